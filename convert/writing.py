"""Carries out a plan: writes its shards, side files, index and configuration into a folder.

The kernel hard-links or copies bytes that do not change: whole files, and tensors of new files; where the file system
has reflinks, copies share their bytes. Only a change of dtype reads them into this process, a piece at a time.
"""

import os
import shutil
import stat
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from resformer.convert.planning import Plan, PlannedShard
from resformer.convert.tensors import Rounding, converted
from resformer.errors import CheckpointError, OutputError
from resformer.files import folder_above, write_text, writing
from resformer.safetensors_format import header_bytes
from resformer.untrusted import MIB, open_regular, reading, regular_file

_COPY_PIECE = 64 * MIB  # bytes of one copy_file_range call; the progress bar moves after each

Progress = Callable[[int], object]


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
    """The result of `write_plan`."""

    linked: set[str] = field(default_factory=set)  # files that are hard links to the source's
    rounding: Rounding = field(default_factory=Rounding)
    notes: list[str] = field(default_factory=list)


def transfer_of(plan: Plan, linked: Collection[str]) -> Transfer:
    """The bytes of `write_plan`, where it hard-links the files `linked`."""
    return Transfer(
        linked=sum(shard.size for shard in plan.carried if shard.name in linked),
        copied=sum(shard.size for shard in plan.carried if shard.name not in linked)
        + sum(file.size for file in plan.side_files),
        written=sum(shard.size for shard in plan.written),
    )


def can_be_linked(plan: Plan, target: Path) -> set[str]:
    """The files that `write_plan` can hard-link: those on the disk of `target`."""
    disk = folder_above(target).stat().st_dev
    places = {shard.name: shard.path for shard in plan.carried if shard.path is not None}
    places = {name: place if place.exists() else place.parent for name, place in places.items()}
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


def write_plan(plan: Plan, folder: Path, *, link: bool = False, progress: Progress = lambda moved: None) -> Written:
    """Writes everything in `plan` into `folder`, index and configuration last; `progress` gets numbers of bytes."""
    done = Written()
    for shard in plan.shards:
        with writing(folder / shard.name):
            if shard.path is not None:
                _carry(shard, regular_file(shard.path), folder / shard.name, done, link=link, progress=progress)
            else:
                _write(shard, folder / shard.name, done, progress)
    for file in plan.side_files:
        with writing(folder / file.name):
            (folder / file.name).parent.mkdir(exist_ok=True)
            with open_regular(file.path) as source, (folder / file.name).open("xb", buffering=0) as output:
                if file.content is None:
                    _copy_range(source, file.path, 0, file.size, output, progress)
                else:
                    _write_all(output, memoryview(file.content))
    for name, text in (("model.safetensors.index.json", plan.index), ("config.json", plan.config)):
        if text is not None:
            write_text(folder / name, text)
    return done


def _carry(shard: PlannedShard, source: Path, target: Path, done: Written, *, link: bool, progress: Progress) -> None:
    if link:
        try:
            os.link(source, target)
        except OSError as error:
            note = f"--link: hard links are not possible here ({error.strerror}); whole shards are copied."
            done.notes += [note] if note not in done.notes else []
        else:
            linked = target.lstat()
            if not stat.S_ISREG(linked.st_mode) or linked.st_size != shard.size:
                raise CheckpointError(f"{source}: changed since it was read; run the conversion again.")
            done.linked.add(target.name)
            progress(shard.size)
            return
    with open_regular(source) as reader, target.open("xb", buffering=0) as output:
        before = os.fstat(reader.fileno())
        _copy_range(reader, source, 0, shard.size, output, progress)
        after = os.fstat(reader.fileno())
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns) or after.st_size != shard.size:
        raise CheckpointError(f"{source}: changed while it was read; run the conversion again.")


def _write(shard: PlannedShard, target: Path, done: Written, progress: Progress) -> None:
    with target.open("xb", buffering=0) as output:
        _write_all(output, memoryview(header_bytes(shard.tensors)))
        for origin, tensor in zip(shard.origins, shard.tensors, strict=True):
            if isinstance(origin.data, tuple) and tensor.dtype == origin.dtype:
                path, start = origin.data
                with open_regular(path) as source:
                    _copy_range(source, path, start, origin.nbytes, output, progress)
                continue
            for piece in converted(origin, tensor.dtype, done.rounding):
                _write_all(output, piece)
                progress(len(piece))


def _copy_range(source: BinaryIO, path: Path, start: int, length: int, output: BinaryIO, progress: Progress) -> None:
    """Appends `length` bytes of `source`, the file at `path`, from `start` on, to `output`, in the kernel if it can."""
    in_kernel = hasattr(os, "copy_file_range")
    while length:
        moved = 0
        if in_kernel:
            with suppress(OSError):  # not possible between these files, or an error that reading or writing shows again
                moved = os.copy_file_range(source.fileno(), output.fileno(), min(length, _COPY_PIECE), start)
        if moved == 0:  # where some file systems cannot, they raise no error
            in_kernel = False
            with reading(path):
                source.seek(start)
                piece = source.read(min(length, 8 * MIB))
            _write_all(output, memoryview(piece))
            moved = len(piece)
        if moved == 0:
            raise CheckpointError(f"{path}: ended {length:,} bytes early: it changed while it was read.")
        start += moved
        length -= moved
        progress(moved)


def _write_all(output: BinaryIO, piece: memoryview) -> None:
    while piece:
        piece = piece[output.write(piece) :]
