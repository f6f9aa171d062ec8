"""The safetensors format: headers read without trust, headers written. No tensor is loaded here.

A file is 8 bytes of header length (little endian), the header as JSON, and the tensors' bytes, without gaps. The
header maps a name to `{"dtype", "shape", "data_offsets": [start, stop]}`, and `__metadata__` to strings.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from resformer.errors import CheckpointError, quoted
from resformer.untrusted import MIB, open_regular, parse_json, reading, regular_file

#: dtype code -> bits of an element.
DTYPE_BITS = {
    **dict.fromkeys("F4".split(), 4),
    **dict.fromkeys("F6_E2M3 F6_E3M2".split(), 6),
    **dict.fromkeys("BOOL U8 I8 F8_E4M3 F8_E5M2 F8_E8M0 F8_E4M3FNUZ F8_E5M2FNUZ".split(), 8),
    **dict.fromkeys("I16 U16 F16 BF16".split(), 16),
    **dict.fromkeys("I32 U32 F32".split(), 32),
    **dict.fromkeys("I64 U64 F64 C64".split(), 64),
}
#: The dtypes of weights that are not quantised, with torch's names.
FLOATING = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}

#: A 70B Llama's whole header is 0.1 MiB. Beyond this a header is an attack on memory, not a checkpoint.
_LARGEST_HEADER = 4 * MIB
_MOST_DIMENSIONS = 8
#: In one file, and in all shards of a checkpoint together. A 70B Llama has 723.
MOST_TENSORS = 20_000


@dataclass(frozen=True)
class Tensor:
    """Where a tensor's bytes are: a range of a file, or memory."""

    name: str
    dtype: str  # of DTYPE_BITS
    shape: tuple[int, ...]
    data: "tuple[Path, int] | memoryview"  # (file, first byte), or the bytes themselves

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.elements * DTYPE_BITS[self.dtype] // 8

    @property
    def on_this_disk(self) -> bool:
        """False if only the header was read, from the Hub: `pieces` cannot be read."""
        return isinstance(self.data, memoryview) or self.data[0].exists()

    @property
    def place(self) -> str:
        """For messages: file and tensor."""
        where = f"{self.data[0]}: " if isinstance(self.data, tuple) else ""
        return f"{where}tensor {quoted(self.name)}"

    def pieces(self) -> Iterator[memoryview]:
        """The bytes, each piece valid until the next one is read into the same buffer.

        A piece is of 2^20 numbers, which stay in the processor's cache until they are written.
        """
        size = MIB * DTYPE_BITS[self.dtype] // 8
        if isinstance(self.data, memoryview):
            for start in range(0, self.nbytes, size):
                yield self.data[start : start + size]
            return
        path, start = self.data
        buffer = memoryview(bytearray(min(size, self.nbytes)))
        with open_regular(path) as file:
            for position in range(0, self.nbytes, size):
                piece = buffer[: min(size, self.nbytes - position)]
                with reading(path):
                    file.seek(start + position)
                    count = file.readinto(piece)  # type: ignore[attr-defined]
                if count != len(piece):
                    raise CheckpointError(f"{self.place}: its bytes are gone: the file changed while it was read.")
                yield piece


@dataclass(frozen=True)
class Shard:
    """A safetensors file whose header has been checked, or tensors in memory (`path` is then `None`)."""

    path: Path | None
    size: int  # bytes of the file
    tensors: tuple[Tensor, ...]  # in the order of their bytes
    name: str = ""  # in its folder or repository; `path`, with links resolved, may have another


def read_shard(path: Path) -> Shard:
    """Reads and checks the header of the safetensors file `path`."""
    real = regular_file(path)
    with open_regular(real) as file:

        def read(start: int, length: int) -> bytes:
            file.seek(start)
            return file.read(length)

        return check_shard(path, real, file.seek(0, 2), read)


def check_shard(path: Path, real: Path, size: int, read: Callable[[int, int], bytes]) -> Shard:
    """Checks the header of a safetensors file.

    Args:
        path: the file's name in messages.
        real: where its bytes are.
        size: of the file, in bytes.
        read: (first byte, number of bytes) -> these bytes, fewer at the end of the file.
    """
    start = read(0, 40)
    length = int.from_bytes(start[:8], "little")
    if start == b"version https://git-lfs.github.com/spec/v1"[:40]:
        raise CheckpointError(f"{path}: is a Git LFS pointer, not the file itself: run `git lfs pull`.")
    if len(start) < 8 or 8 + length > size:
        raise CheckpointError(f"{path}: is truncated: a header of {length:,} bytes in a file of {size:,}.")
    if length > _LARGEST_HEADER:
        raise CheckpointError(f"{path}: its header claims {length:,} bytes; at most {_LARGEST_HEADER:,} are read.")
    header = read(8, length)
    if not header.startswith(b"{"):
        raise CheckpointError(f"{path}: is no safetensors file: its header does not begin with '{{'.")
    entries = parse_json(header, f"{path}: header")
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{path}: __metadata__ is not a map from strings to strings.")
    if len(entries) > MOST_TENSORS:
        raise CheckpointError(f"{path}: holds {len(entries):,} tensors; at most {MOST_TENSORS:,} are read.")
    data = 8 + length
    tensors = sorted(
        (_tensor(real, path, data, name, entry) for name, entry in entries.items()), key=lambda entry: entry[:2]
    )
    position, last = 0, None
    for begin, end, tensor in tensors:
        if begin != position:
            what = "overlaps" if begin < position else "leaves a hole after"
            before = f"tensor {quoted(last)}" if last is not None else "the header"
            raise CheckpointError(
                f"{path}: tensor {quoted(tensor.name)} {what} {before}: it begins at byte {begin:,} of the data, "
                f"expected {position:,}."
            )
        position, last = end, tensor.name
    if data + position != size:
        what = "is truncated" if data + position > size else "has bytes that belong to no tensor"
        after = f" after tensor {quoted(last)}" if last is not None else ""
        raise CheckpointError(f"{path}: {what}{after}: {size:,} bytes, expected {data + position:,}.")
    return Shard(real, size, tuple(tensor for _, _, tensor in tensors), path.name)


def _tensor(real: Path, path: Path, data: int, name: str, entry: object) -> tuple[int, int, Tensor]:
    """(first byte, byte after the last, tensor); the bytes are counted from `data`."""
    where = f"{path}: tensor {quoted(name)}"
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{where}: expected dtype, shape and data_offsets, found {quoted(entry)}.")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise CheckpointError(f"{where}: unknown dtype {quoted(dtype)}.")
    if not _are_sizes(shape) or len(shape) > _MOST_DIMENSIONS:
        raise CheckpointError(f"{where}: shape {quoted(shape)} is no list of at most {_MOST_DIMENSIONS} sizes.")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(f"{where}: data_offsets {quoted(offsets)} are no [start, stop] with 0 <= start <= stop.")
    begin, end = offsets
    bits = math.prod(shape) * DTYPE_BITS[dtype]
    if bits != 8 * (end - begin):
        raise CheckpointError(
            f"{where}: {dtype} of shape {list(shape)} takes {bits // 8:,} bytes, its offsets say {end - begin:,}."
        )
    return begin, end, Tensor(name, dtype, tuple(shape), (real, data + begin))


def _are_sizes(values: object) -> bool:
    """Whether this is a list of integers from 0 to 2^63 - 1; `True` is none."""
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 2**63 for value in values)


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


def same_bytes(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are stored alike."""
    pairs = zip(one.pieces(), other.pieces(), strict=True)
    return one.nbytes == other.nbytes and all(bytes(a) == bytes(b) for a, b in pairs)  # memoryviews compare slowly
