"""The desired result of a conversion. `retrofit`, `revert` and `bundle` differ in how they decide on it."""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig

from resformer.configuration import ResFormerConfig
from resformer.convert.connections import added_shapes, expected_shapes
from resformer.convert.families import FAMILIES
from resformer.convert.reading import SideFile
from resformer.convert.safetensors_format import FLOATING, Tensor, same_bytes
from resformer.convert.source import OpenedSource, Source
from resformer.errors import CheckpointError, first_names, quoted
from resformer.modeling.connection import ConnectionKind
from resformer.modeling.modeling_resformer import KINDS
from resformer.record import read_record

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
#: Rotary buffers of old Llama checkpoints; Transformers ignores them and computes them from config.json.
_OLD_BUFFER = re.compile(r"model\.(layers\.[0-9]+\.self_attn\.)?rotary_emb\.inv_freq")


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The result, as it follows from the source and what the user asked for. Nothing is planned or written yet."""

    source: OpenedSource
    config: str  # the text of its config.json
    dtype: torch.dtype  # of most of its weights
    cast: str | None = None  # code of the dtype that the source's floating tensors are converted to; None: they stay
    dropped: Collection[str] = ()  # tensors of the source that it lacks
    added: tuple[Tensor, ...] = ()
    side_files: tuple[SideFile, ...] = ()  # beside those that the source's checkpoint has
    inexact_because: tuple[str, ...] = ()  # why it does not compute what the source does; empty if it does
    warnings: tuple[str, ...] = ()

    @property
    def exact(self) -> bool:
        """Whether its logits must be the source's, bit for bit."""
        return not self.inexact_because and self.dtype == self.source.dtype


def added_kinds(config: ResFormerConfig, before: ResFormerConfig) -> list[ConnectionKind]:
    """The kinds of connections that a model of `config` has beyond one of `before`, its source."""
    added = []
    for kind in KINDS:
        for name in kind.fields:
            old, new = getattr(before, name), getattr(config, name)
            if old != new and kind.is_in(before):
                raise CheckpointError(
                    f"`{name}` is {quoted(old)} in the source and {quoted(new)} in the result: connections are added, "
                    "those of the source stay as they are. Name the fields to add, --method transformer --set dwa=true "
                    "for one."
                )
        if kind.is_in(config) and not kind.is_in(before):
            added.append(kind)
    shapes = expected_shapes(config)
    for name, shape in added_shapes(before).items():
        if shapes.get(name) != shape:
            raise CheckpointError(
                f"{name} of the source has shape {list(shape)}, and the result has no place for it: the connections "
                "that are added leave other layers to mix. Convert the original instead."
            )
    return added


def inexact_because(config: ResFormerConfig, before: ResFormerConfig) -> list[str]:
    """Why a model of `config` does not start as its source, of configuration `before`; empty if it does."""
    return [reason for kind in added_kinds(config, before) for reason in kind.inexact_because(config)]


def recorded_family(source: Source) -> str:
    """The family that a ResFormer checkpoint came from, as its record says; `"resformer"` if that is unknown."""
    family = (read_record(source.folder) or {}).get("family")
    return family if isinstance(family, str) and family in FAMILIES else ResFormerConfig.model_type


def check_tensors(source: OpenedSource, expected: Mapping[str, tuple[int, ...]]) -> tuple[bool, list[str]]:
    """Compares the source's tensors with the shapes that its configuration asks for, both ends of a tie among them.

    Returns whether the head is tied to the embeddings (what the file holds decides, as in Transformers), and notes.
    """
    folder, tensors = source.folder, source.checkpoint.tensors
    tied, notes = bool(source.config.tie_word_embeddings), []
    required = dict(expected)
    if tied and HEAD not in tensors:
        required.pop(HEAD, None)
    elif tied and EMBEDDING not in tensors:
        required.pop(EMBEDDING)
    elif tied and not tensors[HEAD].on_this_disk:
        notes.append(
            f"{folder}: config.json ties lm_head.weight to the embeddings, and the shards hold both; they were not "
            "compared. Where they differ, Transformers loads them untied, the source and the result alike."
        )
    elif tied and not same_bytes(tensors[HEAD], tensors[EMBEDDING]):
        tied = False
        notes.append(
            f"{folder}: config.json ties lm_head.weight to the embeddings, but the two differ; the result has "
            "tie_word_embeddings=False, which is how Transformers loads the source."
        )
    elif not tied and HEAD in required and HEAD not in tensors:
        raise CheckpointError(
            f"{folder}: missing keys: config.json has tie_word_embeddings=False and no shard has lm_head.weight: it "
            "would be random. If the head is the embedding matrix, set tie_word_embeddings to true."
        )
    if missing := required.keys() - tensors.keys():
        raise CheckpointError(f"{folder}: missing keys: config.json asks for {first_names(missing)}.")
    for name, tensor in tensors.items():
        if _OLD_BUFFER.fullmatch(name) and tensor.dtype in FLOATING:
            continue
        if name not in required:
            raise CheckpointError(f"{tensor.place}: unexpected: config.json has no place for it.")
        if tensor.shape != required[name]:
            raise CheckpointError(
                f"{tensor.place}: has shape {list(tensor.shape)}, config.json asks for {list(required[name])}."
            )
        if tensor.dtype not in FLOATING:
            raise CheckpointError(
                f"{tensor.place}: has dtype {tensor.dtype}, expected one of {', '.join(FLOATING)}: quantised "
                "checkpoints have to be dequantised first."
            )
    return tied, notes


def config_text(config: PreTrainedConfig, architecture: str, dtype: torch.dtype) -> str:
    """The text of the result's config.json."""
    config.architectures = [architecture]
    config.dtype = dtype
    return config.to_json_string()
