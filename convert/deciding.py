"""The desired result of a conversion. `retrofit`, `revert` and `bundle` differ in how they decide on it."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig

from resformer.configuration import ResFormerConfig
from resformer.convert import connected_families
from resformer.convert.connected_families import is_connected, view
from resformer.convert.connections import added_shapes
from resformer.convert.families import FAMILIES
from resformer.convert.logits import memory_for_logits
from resformer.convert.reading import SideFile
from resformer.convert.source import OpenedSource, Source
from resformer.errors import CheckpointError, quoted
from resformer.modeling.connecting import PREFIX
from resformer.modeling.connection import Connection
from resformer.modeling.connections import KINDS
from resformer.record import read_record
from resformer.safetensors_format import Tensor


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
    def memory(self) -> int:
        """Bytes that comparing the logits takes: the larger model's."""
        dtype = max(self.source.dtype, self.dtype, key=lambda dtype: dtype.itemsize)
        return memory_for_logits(self.source.checkpoint, dtype, self.added)


def added_kinds(config: Any, before: Any) -> list[type[Connection]]:
    """The kinds of connections that a model of `config` has beyond one of `before`, its source."""
    added = []
    for kind in KINDS:
        for name in kind.fields:
            old, new = getattr(before, name, None), getattr(config, name, None)
            if old != new and kind.is_in(before):
                raise CheckpointError(
                    f"`{name}` is {quoted(old)} in the source and {quoted(new)} in the result: connections are added, "
                    "those of the source stay as they are. Name the fields to add, --method transformer --set dwa=true "
                    "for one."
                )
        if kind.is_in(config) and not kind.is_in(before):
            added.append(kind)
    shapes = added_shapes(config)
    for name, shape in added_shapes(before).items():
        if shapes.get(name) != shape:
            raise CheckpointError(
                f"{name} of the source has shape {list(shape)}, and the result has no place for it: the connections "
                "that are added leave other layers to mix. Convert the original instead."
            )
    return added


def inexact_because(config: Any, added: Iterable[type[Connection]]) -> list[str]:
    """Why a model of `config` does not start as its source, which lacks the `added_kinds`; empty if it does."""
    return [reason for kind in added for reason in kind.inexact_because(view(config))]


def recorded_family(source: Source) -> str:
    """The family that a ResFormer checkpoint came from, as its record says, or else its config.json.

    `"resformer"` if neither does.
    """
    if is_connected(source.config):
        return source.config.model_type.removeprefix(PREFIX)
    for stated in (read_record(source.folder), getattr(source.config, "base_model", None)):
        family = stated.get("family") if isinstance(stated, dict) else None
        if isinstance(family, str) and family in FAMILIES:
            return family
    return ResFormerConfig.model_type


def config_text(config: PreTrainedConfig, source: OpenedSource, dtype: torch.dtype | None = None) -> str:
    """The text of the result's config.json; with `dtype` it states that, else what the source states."""
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__]
    if connected_families.is_of_a_family(config.model_type):
        return connected_families.config_text(source.raw_config, config, dtype)
    config.dtype = dtype or source.stated_dtype
    return config.to_json_string()
