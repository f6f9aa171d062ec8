"""Two checkpoints side by side: tensors byte for byte, logits on fixed prompts."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from resformer.configuration.methods import without_connections
from resformer.convert.connections import expected_shapes
from resformer.convert.conversion import Verify, check_verify
from resformer.convert.deciding import EMBEDDING, HEAD, check_tensors
from resformer.convert.families import resformer_config
from resformer.convert.safetensors_format import FLOATING, Tensor
from resformer.convert.source import OpenedSource, Source, open_source
from resformer.convert.verification import (
    LogitsComparison,
    compare_logits,
    free_memory,
    memory_for_logits,
    same_bytes,
)
from resformer.errors import CheckpointError
from resformer.files import json_value

__all__ = ["Comparison", "verify"]


@dataclass(frozen=True)
class Comparison:
    """The result of comparing two checkpoints."""

    one: str
    other: str
    identical: int  # tensors that are alike byte for byte
    different: dict[
        str, float | None
    ]  # tensor -> largest absolute difference; None if the shapes differ, or headers do
    only_in_one: list[str]
    only_in_other: list[str]
    added: list[str]  # those of the two lists above that are parameters of connections
    logits: LogitsComparison | None  # None if they were not compared

    @property
    def same(self) -> bool:
        """Whether all that both should have is alike; a retrofit and its source are, if it is exact."""
        unmatched = {*self.only_in_one, *self.only_in_other} - set(self.added)
        return not self.different and not unmatched and (self.logits is None or self.logits.identical)

    def as_dict(self) -> dict[str, Any]:
        """For `--json`, which has no NaN and no infinity: `None` in their place."""
        values: dict[str, Any] = json_value({**asdict(self), "same": self.same})
        return values


def verify(
    one: str | Path,
    other: str | Path,
    *,
    verify: Verify = "auto",
    revision: str | None = None,
    other_revision: str | None = None,
) -> Comparison:
    """Compares two checkpoints, a source and its retrofit for example.

    Args:
        one, other: folders, `.gguf` files or Hub ids, of any family that can be converted, or ResFormer's.
        verify: `"headers"` compares names, dtypes and shapes; `"hashes"` the bytes too; `"logits"` the logits too, each
            model in its own dtype, one in memory at a time. `"auto"` is logits where the larger fits into free memory.
        revision, other_revision: of `one` and `other`, if they are Hub ids.

    Raises:
        CheckpointError: one of them cannot be read.
    """
    check_verify(verify)
    sources = open_source(one, revision, resformer=True), open_source(other, other_revision, resformer=True)
    if verify in ("auto", "logits"):
        _check_vocabularies(*sources)
    first, second = (source.fetch(headers_only=verify == "headers") for source in sources)
    connections: set[str] = set()
    tables: list[dict[str, Tensor]] = []
    for source in (first, second):
        config = resformer_config(source.config)
        expected = expected_shapes(config)
        tied, _ = check_tensors(source, expected)
        connections |= expected.keys() - expected_shapes(without_connections(config)).keys()
        table = dict(source.checkpoint.tensors)
        if tied:  # a checkpoint stores one end of the tie or both, the model has both
            for stored, missing in ((EMBEDDING, HEAD), (HEAD, EMBEDDING)):
                if missing not in table:
                    table[missing] = table[stored]
        tables.append(table)
    a, b = tables
    common = [name for name in a if name in b]
    different: dict[str, float | None] = {}
    for name in common:
        comparable = (a[name].dtype, a[name].shape) == (b[name].dtype, b[name].shape)
        if verify == "headers":
            if not comparable:
                different[name] = None
        elif not (comparable and same_bytes(a[name], b[name])):
            different[name] = _distance(a[name], b[name])
    only_a, only_b = sorted(a.keys() - b.keys()), sorted(b.keys() - a.keys())
    return Comparison(
        first.name,
        second.name,
        len(common) - len(different),
        different,
        only_a,
        only_b,
        sorted(connections & {*only_a, *only_b}),
        _logits(first, second, verify),
    )


def _check_vocabularies(first: Source, second: Source) -> None:
    if first.config.vocab_size != second.config.vocab_size:
        raise CheckpointError(
            f"The vocabularies differ: {first.config.vocab_size} and {second.config.vocab_size} tokens. Compare the "
            "tensors alone with --verify hashes."
        )


def _logits(first: OpenedSource, second: OpenedSource, verify: Verify) -> LogitsComparison | None:
    if verify not in ("auto", "logits"):
        return None
    needed = max(memory_for_logits(source.checkpoint, source.dtype) for source in (first, second))
    if verify == "auto" and needed > free_memory():
        return None
    return compare_logits(first.load, second.load)


def _distance(one: Tensor, other: Tensor) -> float | None:
    """The largest absolute difference; NaN if there is one."""
    if one.shape != other.shape:
        return None
    largest = torch.zeros(())
    for a, b in zip(_floats(one), _floats(other), strict=True):
        largest = torch.maximum(largest, (a - b).abs().max().float())
    return largest.item()


def _floats(tensor: Tensor) -> Any:
    """The numbers, some at a time: as many for every dtype."""
    dtype = getattr(torch, FLOATING[tensor.dtype])
    for piece in tensor.pieces(2**20 * dtype.itemsize):
        yield torch.frombuffer(piece, dtype=dtype).double()
