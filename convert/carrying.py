"""The files of a result, as pieces of the source's files and of memory: written, and read back.

The kernel hard-links or copies what does not change; where the file system has reflinks, copies share their bytes.
"""

import hashlib
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import BinaryIO

from resformer.errors import CheckpointError, OutputError, VerificationError
from resformer.files import folder_above, write_text, writing
from resformer.names import CONFIG, INDEX
from resformer.safetensors_format import Shard, Tensor, header_bytes
from resformer.untrusted import MIB, open_regular, reading, regular_file

_COPY_PIECE = 64 * MIB  # bytes of one copy_file_range call; the progress bar moves after each

Progress = Callable[[int], object]


@dataclass(frozen=True)
class Range:
    """Some bytes of a file."""

    path: Path
    start: int
    length: int


@dataclass(frozen=True)
class File:
    """A file of the result."""

    name: str
    pieces: tuple[bytes | Range, ...]
    tensors: tuple[Tensor, ...] = ()  # of weights
    origin: str | None = None  # the source's file of weights that it is, whole

    @property
    def size(self) -> int:
        return sum(len(piece) if isinstance(piece, bytes) else piece.length for piece in self.pieces)


@dataclass
class Transfer:
    """How many bytes went which way."""

    linked: int = 0  # hard links: no bytes moved
    copied: int = 0  # whole files and side files; the kernel shares their bytes where the file system can
    written: int = 0  # new files
    downloaded: int = 0  # from the Hub

    @property
    def moved(self) -> int:
        """Bytes that need space on the disk."""
        return self.copied + self.written


def carried(shard: Shard, dropped: Set[str], name: str) -> File:
    """A source's weight file: as it is, or without some tensors, with a new header before the bytes of the others."""
    if not shard.names & dropped:
        return File(name, (Range(shard.path, 0, shard.size),), shard.tensors, shard.name)
    kept = [tensor for tensor in shard.tensors if tensor.name not in dropped]
    ranges = [Range(shard.path, tensor.start, tensor.nbytes) for tensor in kept]
    return File(name, (header_bytes(kept), *ranges), tuple(kept))


def check_space(needed: int, target: Path) -> None:
    """Raises `OutputError` if the disk has no room for so many bytes, and some to spare."""
    folder = folder_above(target)
    free = shutil.disk_usage(folder).free
    if needed + 64 * MIB > free:
        raise OutputError(
            f"{folder}: has {free:,} bytes free, the result takes {needed:,} and 64 MiB to spare. Give an "
            "output on another disk, or link whole shards of a checkpoint that is on this one: --link (link=True)."
        )


def write_files(files: Iterable[File], folder: Path, *, link: bool = False, progress: Progress) -> None:
    """Writes the files into `folder`, with `link` the source's as hard links; `progress` gets numbers of bytes."""
    for file in files:
        target = folder / file.name
        with writing(target):
            target.parent.mkdir(exist_ok=True)
            if link and file.origin:
                _link(file, target)
                progress(file.size)
            else:
                _write(file, target, progress)


def _link(file: File, target: Path) -> None:
    (piece,) = file.pieces
    assert isinstance(piece, Range)
    source = regular_file(piece.path)
    try:
        os.link(source, target)
    except OSError as error:
        raise OutputError(
            f"{source}: cannot be hard-linked to this output ({error.strerror}). Give one on the same disk, or copy "
            "it, without --link (link=True)."
        ) from error
    linked = target.lstat()
    if not stat.S_ISREG(linked.st_mode) or linked.st_size != file.size:
        raise CheckpointError(f"{source}: changed since it was read; run the conversion again.")


def _write(file: File, target: Path, progress: Progress) -> None:
    with target.open("xb") as output:
        for piece in file.pieces:
            if isinstance(piece, bytes):
                output.write(piece)
                progress(len(piece))
                continue
            with open_regular(regular_file(piece.path)) as source:
                before = os.fstat(source.fileno())
                _copy_range(source, piece, output, progress)
                after = os.fstat(source.fileno())
                shrunk = file.origin is not None and after.st_size != piece.length
            if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns) or shrunk:
                raise CheckpointError(f"{piece.path}: changed while it was read; run the conversion again.")


def _copy_range(source: BinaryIO, piece: Range, output: BinaryIO, progress: Progress) -> None:
    """Appends a range of `source`, its file, to `output`, in the kernel if it can."""
    start, stop = piece.start, piece.start + piece.length
    output.flush()  # the kernel appends to the file itself
    with suppress(OSError):  # not possible between these files, or an error that reading or writing shows again
        while hasattr(os, "copy_file_range") and start < stop:
            moved = os.copy_file_range(source.fileno(), output.fileno(), min(stop - start, _COPY_PIECE), start)
            if not moved:  # where some file systems cannot, they raise no error
                break
            start += moved
            progress(moved)
    for content in _read(source, Range(piece.path, start, stop - start)):
        output.write(content)
        progress(len(content))


def check_bytes(files: Iterable[File], folder: Path, progress: Progress) -> dict[str, str]:
    """Reads files back, compares them with their pieces, and returns their SHA-256."""
    digests = {}
    for file in files:
        digest = hashlib.sha256()
        with open_regular(regular_file(folder / file.name)) as stored, reading(folder / file.name):
            for expected in chain(*map(_content, file.pieces), [b""]):
                content = stored.read(len(expected) or 1)  # at the end, nothing
                digest.update(content)
                progress(len(content))
                if content != expected:
                    raise VerificationError(f"{folder / file.name}: its bytes are not those that were written.")
        digests[file.name] = digest.hexdigest()
    return digests


def _content(piece: bytes | Range) -> Iterator[bytes]:
    if isinstance(piece, bytes):
        yield piece
        return
    with open_regular(regular_file(piece.path)) as source:
        yield from _read(source, piece)


def _read(source: BinaryIO, piece: Range) -> Iterator[bytes]:
    left = piece.length
    with reading(piece.path):
        source.seek(piece.start)
        while left:
            content = source.read(min(left, 8 * MIB))
            if not content:
                raise CheckpointError(f"{piece.path}: ended {left:,} bytes early: it changed while it was read.")
            left -= len(content)
            yield content


def same_bytes(one: tuple[Shard, Tensor], other: tuple[Shard, Tensor]) -> bool:
    """Whether two tensors are stored alike; those of one file, by hard links too, are."""
    first, second = (Range(shard.path, tensor.start, tensor.nbytes) for shard, tensor in (one, other))
    if os.path.samefile(first.path, second.path) and first.start == second.start:
        return first.length == second.length
    return first.length == second.length and all(a == b for a, b in zip(_content(first), _content(second), strict=True))


def write_settings(folder: Path, config: str, weights: Sequence[File]) -> None:
    """Writes config.json, and an index of several files; beside a single one Transformers would ignore it."""
    if len(weights) > 1:
        tensors = {tensor.name: (tensor, file.name) for file in weights for tensor in file.tensors}
        metadata = {
            "total_parameters": sum(tensor.elements for tensor, _ in tensors.values()),
            "total_size": sum(tensor.nbytes for tensor, _ in tensors.values()),
        }
        index = {"metadata": metadata, "weight_map": {name: file for name, (_, file) in tensors.items()}}
        write_text(folder / INDEX, json.dumps(index, indent=2, sort_keys=True) + "\n")
    write_text(folder / CONFIG, config)
