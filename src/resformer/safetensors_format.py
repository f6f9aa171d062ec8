"""The headers of safetensors files: what their tensors are called, how large they are and where their bytes are.

A file is 8 bytes of header length (little endian), the header as JSON, and the tensors' bytes, without gaps. Whether a
header follows the format, and its tensors fill the file, `safetensors` itself says.
"""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from safetensors import safe_open

from resformer.errors import CheckpointError, one_line
from resformer.untrusted import LARGEST_JSON, open_regular, parse_json, regular_file

#: Code of the format -> torch's name: the dtypes of weights that are not quantised.
FLOATING = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
#: In all shards of a checkpoint together. Qwen3-Next-80B has 74 thousand.
MOST_TENSORS = 200_000


@dataclass(frozen=True)
class Tensor:
    """What a header says of a tensor."""

    name: str
    dtype: str  # the format's code
    shape: tuple[int, ...]
    start: int  # its first byte in the file
    nbytes: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Shard:
    """A safetensors file whose header has been checked."""

    path: Path  # links resolved
    size: int  # bytes of the file
    tensors: tuple[Tensor, ...]  # in the order of their bytes
    name: str  # in its folder or repository; `path` may have another

    @cached_property
    def names(self) -> frozenset[str]:
        return frozenset(tensor.name for tensor in self.tensors)


def read_shard(path: Path) -> Shard:
    """Reads and checks the header of the safetensors file `path`."""
    real = regular_file(path)
    with open_regular(real) as file:
        start, size = file.read(40), file.seek(0, 2)
        length = header_length(start, size, path)
        file.seek(8)
        header = file.read(length)
    try:
        with safe_open(real, "np") as whole:
            count = len(whole.keys())
    except Exception as error:  # its own kind, and the system's
        raise CheckpointError(f"{path}: is no whole safetensors file: {one_line(error)}") from error
    if count > MOST_TENSORS:
        raise CheckpointError(f"{path}: holds {count:,} tensors; at most {MOST_TENSORS:,} are read.")
    entries = parse_json(header, f"{path}: header")
    entries.pop("__metadata__", None)
    tensors = []
    for name, entry in entries.items():
        begin, end = entry["data_offsets"]
        tensors.append(Tensor(name, entry["dtype"], tuple(entry["shape"]), 8 + length + begin, end - begin))
    return Shard(real, size, tuple(sorted(tensors, key=lambda tensor: (tensor.start, tensor.nbytes))), path.name)


def header_length(start: bytes, size: int, path: Path) -> int:
    """The header's bytes, by the first 40 bytes of a file of `size`; refuses a header that memory should not hold."""
    if start == b"version https://git-lfs.github.com/spec/v1"[:40]:
        raise CheckpointError(f"{path}: is a Git LFS pointer, not the file itself: run `git lfs pull`.")
    length = int.from_bytes(start[:8], "little")
    if len(start) < 8 or 8 + length > size:
        raise CheckpointError(f"{path}: is truncated: a header of {length:,} bytes in a file of {size:,}.")
    if length > LARGEST_JSON:
        raise CheckpointError(f"{path}: its header claims {length:,} bytes; at most {LARGEST_JSON:,} are read.")
    return length


def header_bytes(tensors: Iterable[Tensor]) -> bytes:
    """The beginning of a safetensors file that holds `tensors` in this order: length and header, 8-byte aligned."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for tensor in tensors:
        end = position + tensor.nbytes
        entries[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [position, end]}
        position = end
    header = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header
