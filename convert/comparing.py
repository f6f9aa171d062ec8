"""Two checkpoints side by side: what Transformers builds of them, tensors byte for byte, tokens, logits."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from resformer.configuration.methods import CONNECTION_FIELDS
from resformer.convert.carrying import same_bytes
from resformer.convert.connected_families import connection_config, family_name, view
from resformer.convert.connections import added_shapes, read_connections
from resformer.convert.judging import differences
from resformer.convert.logits import LogitsComparison, compare_logits, too_large, window_of
from resformer.convert.source import OpenedSource, open_source
from resformer.convert.to_folder import Verify, check_verify
from resformer.convert.tokens import TokensComparison, compare_tokens, tokenizer_of
from resformer.environment import usable_device
from resformer.errors import CheckpointError
from resformer.files import AsDict
from resformer.model_cards.heads import head_of
from resformer.modeling.any_decoder import text_config
from resformer.modeling.connected import added_modules
from resformer.modeling.connection import Connection
from resformer.modeling.connections import KINDS
from resformer.safetensors_format import FLOATING, Shard, Tensor
from resformer.untrusted import MIB, read_bounded


@dataclass(frozen=True)
class Comparison(AsDict):
    """The result of comparing two checkpoints."""

    one: str
    other: str
    configuration: dict[str, tuple[Any, Any]]  # what Transformers makes of it -> its values, where they differ
    without_effect: list[str]  # those fields whose connections change nothing: their coefficients are the identity
    bytes_compared: bool  # False: only names, dtypes and shapes of tensors
    identical: int  # tensors that are alike
    different: dict[str, float | None]  # tensor -> largest absolute difference; None if shapes or dtypes differ
    only_in_one: list[str]
    only_in_other: list[str]
    added: list[str]  # those of the two lists above that are parameters of connections
    logits: LogitsComparison | None
    tokens: TokensComparison | None
    not_compared: list[str]  # sentences: what was not compared, and why

    @property
    def same_tensors(self) -> bool:
        """Whether every tensor that both models should have is alike, as far as it was compared."""
        return not self.different and not ({*self.only_in_one, *self.only_in_other} - set(self.added))

    @property
    def same(self) -> bool | None:
        """Whether both are the same model, as an exact retrofit and its source are; `None` if not known."""
        compared = [each for each in (self.logits, self.tokens) if each is not None]
        if not (self.same_tensors and all(each.identical for each in compared)):
            return False
        differing = self.configuration.keys() - set(self.without_effect)
        if self.bytes_compared or differing - set(CONNECTION_FIELDS):
            return not differing
        return None


def verify(
    one: str | Path,
    other: str | Path,
    *,
    verify: Verify = "auto",
    tokens: int = 128,
    text: str | Path | None = None,
    device: str | None = None,
    revision: str | None = None,
    other_revision: str | None = None,
) -> Comparison:
    """Compares two checkpoints, a source and its retrofit for example.

    Args:
        one, other: folders or Hub ids, of any family that can be converted, with or without connections.
        verify: what Transformers builds of both by default, and tokenizers, are always compared. `"headers"` compares
            names, dtypes and shapes of tensors; `"hashes"` the bytes too; `"logits"` the logits too, each model as
            Transformers loads it by default, one in memory at a time. `"auto"` is logits where the larger fits into
            free memory. Only logits of language models are compared.
        tokens: at which logits are compared, at the end of two rows that are longer than any sliding window.
        text: a file whose text, as the tokenizer of `one` reads it, makes the rows; default: random tokens.
        device: where the models run; default: the CPU.
        revision, other_revision: of `one` and `other`, if they are Hub ids.

    Raises:
        CheckpointError: one of them cannot be read, or the text is too short.
        ValueError: `verify`, `tokens` or `device` make no sense.
    """
    check_verify(verify)
    if tokens < 16:
        raise ValueError(f"tokens={tokens}: expected 16 or more.")
    if verify in ("headers", "hashes") and (text is not None or device is not None):
        raise ValueError(f"verify={verify!r} runs no model: leave out --text and --device.")
    if device is not None:
        usable_device(device)
    sources = [open_source(each, commit, heads=True) for each, commit in ((one, revision), (other, other_revision))]
    opened = [source.fetch(headers_only=verify == "headers") for source in sources]
    a, b = (  # name -> (file, tensor) of all that the model has a place for
        {
            tensor.name: (shard, tensor)
            for shard in source.checkpoint.shards
            for tensor in shard.tensors
            if tensor.name not in source.built.ignored
        }
        for source in opened
    )
    common = [name for name in a if name in b]
    different: dict[str, float | None] = {}
    for name in common:
        pair = a[name], b[name]
        comparable = len({(tensor.dtype, tensor.shape) for _, tensor in pair}) == 1
        if not (comparable and (verify == "headers" or same_bytes(*pair))):
            different[name] = None if verify == "headers" else _distance(*pair)
    configuration = differences(*map(_facts, opened))
    effects = {kind for source in opened for kind in _effects(source)}
    acting = {name for kind in KINDS if kind.name in effects for name in kind.fields}
    fields = dict.fromkeys(name for kind in KINDS for name in kind.fields)
    # In place of a tied tensor the model takes another: a checkpoint may have one end of a tie or both.
    only_a, only_b = a.keys() - b.keys() - opened[0].built.tied, b.keys() - a.keys() - opened[1].built.tied
    tokenizers, why = zip(*map(tokenizer_of, opened), strict=True)
    untold = [f"tokens (of {each.name}: {reason})" for each, reason in zip(opened, why, strict=True) if reason]
    logits, reasons = None, ["bytes of tensors (--verify headers)"] if verify == "headers" else []
    if reason := _why_no_logits(opened, verify):
        reasons.append(f"logits ({reason})")
    else:
        logits = compare_logits(
            *((source.name, source.to_load) for source in opened),
            tokens=tokens,
            text=None if text is None else _token_ids(opened[0], Path(text).expanduser()),
            window=max(window_of(source.config) for source in opened),
            device=device,
        )
    return Comparison(
        one=opened[0].name,
        other=opened[1].name,
        configuration=configuration,
        without_effect=[name for name in fields if name in configuration and name not in acting],
        bytes_compared=verify != "headers",
        identical=len(common) - len(different),
        different=different,
        only_in_one=sorted(only_a),
        only_in_other=sorted(only_b),
        added=sorted(
            (only_a | only_b) & {name for each in opened for name in added_shapes(connection_config(each.config))}
        ),
        logits=logits,
        tokens=None if untold else compare_tokens(*tokenizers),
        not_compared=[*reasons, *untold[:1]],
    )


def _facts(source: OpenedSource) -> dict[str, Any]:
    """What Transformers makes of a source, and its connections."""
    config = connection_config(source.config)
    fields = {name: getattr(config, name, default) for name, default in CONNECTION_FIELDS.items()}
    return {**source.built.facts(), "family": family_name(config), **fields}


def _effects(source: OpenedSource) -> set[str]:
    """The kinds of connections that change what the model computes; where coefficients are not here, all it has."""
    config = connection_config(source.config)
    kinds: list[type[Connection]] = [kind for kind in KINDS if kind.is_in(config)]
    if not source.on_this_disk:
        return {kind.name for kind in kinds}
    read = added_modules(read_connections(config, source.checkpoint.shards))
    found = set()
    for kind in kinds:
        modules = [module for name, module in read.items() if kind.name in name.split(".")]
        fixed = kind.chosen(config).fixed_effects(view(config)) or (not modules and kind.inexact_because(view(config)))
        if fixed or any(distance != 0 for module in modules for distance, _ in module.deviations()):
            found.add(kind.name)
    return found


def _why_no_logits(sources: Sequence[OpenedSource], verify: Verify) -> str:
    """Why logits are not compared; empty if they are."""
    configs = [source.config for source in sources]
    if any(map(head_of, configs)):
        return "only language models have them"
    sizes = [text_config(config).vocab_size for config in configs]
    if verify not in ("auto", "logits"):
        return f"--verify {verify}"
    if sizes[0] != sizes[1]:
        return f"the vocabularies have {sizes[0]:,} and {sizes[1]:,} tokens"
    return too_large(max(source.built.memory for source in sources)) if verify == "auto" else ""


def _token_ids(source: OpenedSource, path: Path) -> tuple[Path, list[int]]:
    """A text file, and its tokens."""
    content, (tokenizer, reason) = read_bounded(path, 64 * MIB), tokenizer_of(source)
    if tokenizer is None:
        raise CheckpointError(f"{source.name}: its tokenizer cannot be read: {reason}")
    ids: list[int] = tokenizer(content.decode("utf-8", "replace"))["input_ids"]
    if (highest := max(ids, default=0)) >= (rows := text_config(source.config).vocab_size):
        raise CheckpointError(f"{source.name}: its tokenizer gives the id {highest:,}, of {rows:,} tokens.")
    return path, ids


def _distance(one: tuple[Shard, Tensor], other: tuple[Shard, Tensor]) -> float | None:
    """The largest absolute difference; NaN if there is one; `None` for what cannot be subtracted."""
    if one[1].shape != other[1].shape or not {one[1].dtype, other[1].dtype} <= FLOATING.keys():
        return None
    numbers = []
    for shard, tensor in (one, other):
        with safe_open(shard.path, "pt") as file:
            numbers.append(file.get_tensor(tensor.name).flatten())
    pairs = zip(*(each.split(2**20) for each in numbers), strict=True)
    distances = [(a.double() - b.double()).abs().max() for a, b in pairs if len(a)]
    return torch.stack(distances).max().item() if distances else 0.0
