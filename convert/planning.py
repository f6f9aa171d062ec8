"""The plan: which shards go along whole, which are written anew and from what. Nothing is read or written here."""

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from resformer.convert.reading import SideFile
from resformer.convert.safetensors_format import FLOATING, Shard, Tensor, header_bytes

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
class Rewrite:
    """A tensor of a written shard: `origin`, converted to `dtype`."""

    origin: Tensor
    dtype: str

    @property
    def result(self) -> Tensor:
        return replace(self.origin, dtype=self.dtype)


@dataclass(frozen=True)
class WrittenShard:
    """A new file, tensor after tensor."""

    name: str
    rewrites: tuple[Rewrite, ...]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(rewrite.result for rewrite in self.rewrites)

    @property
    def size(self) -> int:
        """Bytes of the tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def file_size(self) -> int:
        return self.size + len(header_bytes(self.tensors))


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
    """Keeps every shard that holds no byte to change, and writes the others anew.

    Args:
        shards: the source's.
        dropped: names of tensors to leave out.
        added: new tensors. They go into a file of their own, or to the end of the last one if that is written anyway.
        dtype: a code of `FLOATING` that floating tensors of the source are converted to.
        max_shard_size: split what is larger, in bytes. Default: written files at Transformers' own limit, no others.
    """
    most = max_shard_size or MAX_SHARD_SIZE
    planned: list[CarriedShard | tuple[Rewrite, ...]] = []
    for shard in shards:
        rewrites = tuple(
            Rewrite(tensor, dtype if dtype and tensor.dtype in FLOATING else tensor.dtype)
            for tensor in shard.tensors
            if tensor.name not in dropped
        )
        unchanged = len(rewrites) == len(shard.tensors) and all(item.dtype == item.origin.dtype for item in rewrites)
        if shard.path is not None and unchanged and (max_shard_size is None or shard.size <= max_shard_size):
            planned.append(CarriedShard(shard.name, shard.name, shard.path, shard.size, shard.tensors))
        else:
            planned += _split(rewrites, most)
    new = tuple(Rewrite(tensor, tensor.dtype) for tensor in added)
    if planned and isinstance(last := planned[-1], tuple):
        new = last + new
        planned.pop()
    planned += _split(new, most)
    return tuple(
        replace(part, name=name) if isinstance(part, CarriedShard) else WrittenShard(name, part)
        for name, part in zip(standard_names(len(planned)), planned, strict=True)
    )


def standard_names(count: int) -> list[str]:
    """What Transformers calls `count` shards."""
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]


def _split(rewrites: tuple[Rewrite, ...], most: int) -> list[tuple[Rewrite, ...]]:
    """Parts of at most `most` bytes each, or of one tensor."""
    parts: list[list[Rewrite]] = []
    size = 0
    for rewrite in rewrites:
        size += rewrite.result.nbytes
        if not parts or size > most:
            parts.append([])
            size = rewrite.result.nbytes
        parts[-1].append(rewrite)
    return [tuple(part) for part in parts]
