"""The plan: which shards go along whole, which are written anew and from what. Nothing is read or written here."""

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from resformer.convert.reading import SideFile
from resformer.convert.safetensors_format import FLOATING, Shard, Tensor, header_bytes

_Pair = tuple[Tensor, Tensor]  # a tensor of the source, and as it will be stored
#: What Transformers writes at most into one file.
MAX_SHARD_SIZE = 50 * 10**9


@dataclass(frozen=True)
class CarriedShard:
    """A file of the source that the result takes over byte for byte."""

    name: str
    origin: str  # its name at the source
    path: Path
    size: int  # bytes
    tensors: tuple[Tensor, ...]


@dataclass(frozen=True)
class WrittenShard:
    """A new file, tensor after tensor: `origins`, converted to the dtypes of `tensors`."""

    name: str
    origins: tuple[Tensor, ...]
    tensors: tuple[Tensor, ...]

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return sum(tensor.nbytes for tensor in self.tensors) + len(header_bytes(self.tensors))


@dataclass(frozen=True)
class Plan:
    """Weight files, side files and config.json of the output; record, card and added code are written later."""

    shards: tuple[CarriedShard | WrittenShard, ...]
    side_files: tuple[SideFile, ...]
    config: str  # the text of config.json

    @property
    def carried(self) -> list[CarriedShard]:
        return [shard for shard in self.shards if isinstance(shard, CarriedShard)]

    @property
    def written(self) -> list[WrittenShard]:
        return [shard for shard in self.shards if isinstance(shard, WrittenShard)]

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


def plan_shards(
    shards: Sequence[Shard],
    *,
    dropped: Collection[str] = (),
    added: Sequence[Tensor] = (),
    dtype: str | None = None,
    max_shard_size: int | None = None,
) -> tuple[CarriedShard | WrittenShard, ...]:
    """Keeps every shard of the source that holds no byte to change, and writes the others anew.

    Args:
        added: new tensors. They go into a file of their own, or to the end of the last one if that is written anyway.
        dtype: a code of `FLOATING` that floating tensors of the source are converted to.
        max_shard_size: split what is larger, in bytes. Default: written files at Transformers' own limit, no others.
    """
    most = max_shard_size or MAX_SHARD_SIZE
    planned: list[CarriedShard | list[_Pair]] = []
    for shard in shards:
        pairs = [
            (tensor, replace(tensor, dtype=dtype) if dtype and tensor.dtype in FLOATING else tensor)
            for tensor in shard.tensors
            if tensor.name not in dropped
        ]
        unchanged = len(pairs) == len(shard.tensors) and all(one.dtype == other.dtype for one, other in pairs)
        if shard.path is not None and unchanged and (max_shard_size is None or shard.size <= max_shard_size):
            planned.append(CarriedShard(shard.name, shard.name, shard.path, shard.size, shard.tensors))
        else:
            planned += _split(pairs, most)
    new = [(tensor, tensor) for tensor in added]
    if planned and isinstance(last := planned[-1], list):
        new = last + new
        planned.pop()
    planned += _split(new, most)
    return tuple(
        replace(part, name=name) if isinstance(part, CarriedShard) else WrittenShard(name, *zip(*part, strict=True))
        for name, part in zip(standard_names(len(planned)), planned, strict=True)
    )


def standard_names(count: int) -> list[str]:
    """What Transformers calls `count` shards."""
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]


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
