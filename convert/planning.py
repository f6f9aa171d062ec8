"""The plan: which shards go along whole, which are written anew and from what. Nothing is read or written here."""

import json
from dataclasses import dataclass, replace
from pathlib import Path

from resformer.convert.deciding import Decision
from resformer.convert.reading import SideFile
from resformer.names import standard_names
from resformer.safetensors_format import FLOATING, Shard, Tensor, header_bytes

_Pair = tuple[Tensor, Tensor]  # a tensor of the source, and as it will be stored
#: What Transformers writes at most into one file.
_MAX_SHARD_SIZE = 50 * 10**9


@dataclass(frozen=True)
class PlannedShard:
    """A file of the result: one of the source, byte for byte, or a new one."""

    name: str
    size: int  # bytes
    origins: tuple[Tensor, ...]  # at the source, or in memory
    tensors: tuple[Tensor, ...]  # the same, as they will be stored: their dtypes may differ
    path: Path | None = None  # of the source's file, if it is carried over whole
    origin: str | None = None  # its name at the source


@dataclass(frozen=True)
class Plan:
    """Weight files, side files and config.json of the output; record, card and added code are written later."""

    shards: tuple[PlannedShard, ...]
    side_files: tuple[SideFile, ...]
    config: str  # the text of config.json

    @property
    def carried(self) -> list[PlannedShard]:
        return [shard for shard in self.shards if shard.path is not None]

    @property
    def written(self) -> list[PlannedShard]:
        return [shard for shard in self.shards if shard.path is None]

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Name -> the tensor as it will be stored."""
        return {tensor.name: tensor for shard in self.shards for tensor in shard.tensors}

    @property
    def index(self) -> str | None:
        """The text of the index; `None` where one file is all there is, and Transformers would ignore an index."""
        if len(self.shards) == 1:
            return None
        tensors = self.tensors.values()
        metadata = {
            "total_parameters": sum(tensor.elements for tensor in tensors),
            "total_size": sum(tensor.nbytes for tensor in tensors),
        }
        weight_map = {tensor.name: shard.name for shard in self.shards for tensor in shard.tensors}
        index = {"metadata": metadata, "weight_map": weight_map}
        return json.dumps(index, indent=2, sort_keys=True) + "\n"


def make_plan(decision: Decision, max_shard_size: int | None) -> Plan:
    """Keeps every shard of the source that holds no byte to change, and writes the others anew.

    What is added goes into a file of its own, or to the end of the last one if that is written anyway. Files above
    `max_shard_size` bytes are split; without it written ones at Transformers' own limit, and no others.
    """
    checkpoint, most = decision.source.checkpoint, max_shard_size or _MAX_SHARD_SIZE
    planned: list[Shard | list[_Pair]] = []
    for shard in checkpoint.shards:
        pairs = [
            (tensor, replace(tensor, dtype=decision.cast) if decision.cast and tensor.dtype in FLOATING else tensor)
            for tensor in shard.tensors
            if tensor.name not in decision.dropped
        ]
        unchanged = len(pairs) == len(shard.tensors) and all(one.dtype == other.dtype for one, other in pairs)
        if shard.path is not None and unchanged and (max_shard_size is None or shard.size <= max_shard_size):
            planned.append(shard)
        else:
            planned += _split(pairs, most)
    new = [(tensor, tensor) for tensor in decision.added]
    if planned and isinstance(last := planned[-1], list):
        new = last + new
        planned.pop()
    planned += _split(new, most)
    shards = tuple(map(_planned, standard_names(len(planned)), planned))
    return Plan(shards, (*checkpoint.side_files, *decision.side_files), decision.config)


def _planned(name: str, part: Shard | list[_Pair]) -> PlannedShard:
    if isinstance(part, Shard):
        return PlannedShard(name, part.size, part.tensors, part.tensors, part.path, part.name)
    origins, tensors = zip(*part, strict=True)
    return PlannedShard(name, sum(each.nbytes for each in tensors) + len(header_bytes(tensors)), origins, tensors)


def _split(pairs: list[_Pair], most: int) -> list[list[_Pair]]:
    """Parts of at most `most` bytes each, or of one tensor."""
    parts: list[list[_Pair]] = []
    size = 0
    for origin, tensor in pairs:
        size += tensor.nbytes
        if not parts or size > most:
            parts.append([])
            size = tensor.nbytes
        parts[-1].append((origin, tensor))
    return parts
