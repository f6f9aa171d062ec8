"""The files of a result, as pieces of the source's files and of memory: written, and read back.

The kernel hard-links or copies what does not change; where the file system has reflinks, copies share their bytes.
"""

import hashlib
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from resformer.errors import CheckpointError, OutputError, VerificationError
from resformer.files import folder_above, write_text, writing
from resformer.names import INDEX
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


@dataclass
class Written:
    """The result of `write_files`."""

    linked: set[str] = field(default_factory=set)  # files that are hard links to the source's
    notes: list[str] = field(default_factory=list)


def whole(shard: Shard, name: str) -> File:
    """A source's weight file as it is."""
    return File(name, (Range(shard.path, 0, shard.size),), shard.tensors, shard.name)


def without(shard: Shard, dropped: Iterable[str], name: str) -> File:
    """A source's weight file without some tensors: a new header, and the bytes of the others."""
    kept = [tensor for tensor in shard.tensors if tensor.name not in {*dropped}]
    ranges = [Range(shard.path, tensor.start, tensor.nbytes) for tensor in kept]
    return File(name, (header_bytes(kept), *ranges), tuple(kept))


def index_text(files: Sequence[File]) -> str | None:
    """The text of the index; `None` where one file is all there is, and Transformers would ignore an index."""
    if len(files) == 1:
        return None
    tensors = {tensor.name: (tensor, file.name) for file in files for tensor in file.tensors}
    metadata = {
        "total_parameters": sum(tensor.elements for tensor, _ in tensors.values()),
        "total_size": sum(tensor.nbytes for tensor, _ in tensors.values()),
    }
    index = {"metadata": metadata, "weight_map": {name: file for name, (_, file) in tensors.items()}}
    return json.dumps(index, indent=2, sort_keys=True) + "\n"


def transfer_of(weights: Iterable[File], side_files: Iterable[File], linked: Iterable[str]) -> Transfer:
    """The bytes of `write_files`, where it hard-links the files `linked`."""
    transfer, linked = Transfer(copied=sum(file.size for file in side_files)), {*linked}
    for file in weights:
        how = "linked" if file.name in linked else "written" if file.origin is None else "copied"
        setattr(transfer, how, getattr(transfer, how) + file.size)
    return transfer


def can_be_linked(weights: Iterable[File], target: Path) -> set[str]:
    """The files that `write_files` can hard-link: those on the disk of `target`."""
    disk = folder_above(target).stat().st_dev
    paths = {
        file.name: piece.path for file in weights if file.origin for piece in file.pieces if isinstance(piece, Range)
    }
    places = {name: path if path.exists() else path.parent for name, path in paths.items()}
    return {name for name, place in places.items() if place.stat().st_dev == disk}


def check_space(needed: int, target: Path) -> None:
    """Raises `OutputError` if the disk has no room for so many bytes, and some to spare."""
    folder = folder_above(target)
    free = shutil.disk_usage(folder).free
    if needed + 64 * MIB > free:
        raise OutputError(
            f"{folder}: has {free:,} bytes free, the result takes {needed:,} and some room to spare. Give an "
            "output on another disk, or link whole shards of a checkpoint that is on this one: --link (link=True)."
        )


def write_files(files: Iterable[File], folder: Path, *, link: bool = False, progress: Progress) -> Written:
    """Writes the files into `folder`; `progress` gets numbers of bytes."""
    done = Written()
    for file in files:
        with writing(folder / file.name):
            (folder / file.name).parent.mkdir(exist_ok=True)
            if not (link and file.origin and _linked(file, folder / file.name, done)):
                _write(file, folder / file.name, progress)
                continue
            progress(file.size)
    return done


def _linked(file: File, target: Path, done: Written) -> bool:
    (piece,) = file.pieces
    assert isinstance(piece, Range)
    source = regular_file(piece.path)
    try:
        os.link(source, target)
    except OSError as error:
        note = f"--link: hard links are not possible here ({error.strerror}); whole shards are copied."
        done.notes += [note] if note not in done.notes else []
        return False
    linked = target.lstat()
    if not stat.S_ISREG(linked.st_mode) or linked.st_size != file.size:
        raise CheckpointError(f"{source}: changed since it was read; run the conversion again.")
    done.linked.add(target.name)
    return True


def _write(file: File, target: Path, progress: Progress) -> None:
    with target.open("xb", buffering=0) as output:
        for piece in file.pieces:
            if isinstance(piece, bytes):
                _write_all(output, memoryview(piece))
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
    start, length = piece.start, piece.length
    in_kernel = hasattr(os, "copy_file_range")
    while length:
        moved = 0
        if in_kernel:
            with suppress(OSError):  # not possible between these files, or an error that reading or writing shows again
                moved = os.copy_file_range(source.fileno(), output.fileno(), min(length, _COPY_PIECE), start)
        if moved == 0:  # where some file systems cannot, they raise no error
            in_kernel = False
            with reading(piece.path):
                source.seek(start)
                content = source.read(min(length, 8 * MIB))
            _write_all(output, memoryview(content))
            moved = len(content)
        if moved == 0:
            raise CheckpointError(f"{piece.path}: ended {length:,} bytes early: it changed while it was read.")
        start += moved
        length -= moved
        progress(moved)


def _write_all(output: BinaryIO, piece: memoryview) -> None:
    while piece:
        piece = piece[output.write(piece) :]


def check_bytes(files: Iterable[File], folder: Path, progress: Progress) -> dict[str, str]:
    """Reads files back, compares them with their pieces, and returns their SHA-256."""
    digests = {}
    for file in files:
        digest = hashlib.sha256()
        with open_regular(regular_file(folder / file.name)) as stored, reading(folder / file.name):
            for piece in file.pieces:
                for expected in _content(piece):
                    content = stored.read(len(expected))
                    digest.update(content)
                    progress(len(content))
                    if content != expected:
                        raise VerificationError(f"{folder / file.name}: its bytes are not those that were written.")
            if stored.read(1):
                raise VerificationError(f"{folder / file.name}: its bytes are not those that were written.")
        digests[file.name] = digest.hexdigest()
    return digests


def _content(piece: bytes | Range) -> Iterable[bytes]:
    if isinstance(piece, bytes):
        yield piece
        return
    with open_regular(regular_file(piece.path)) as source, reading(piece.path):
        source.seek(piece.start)
        left = piece.length
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
    """Writes the index and config.json, last: until then the folder is no checkpoint."""
    for name, text in ((INDEX, index_text(weights)), ("config.json", config)):
        if text is not None:
            write_text(folder / name, text)
