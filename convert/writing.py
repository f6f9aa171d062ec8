"""The writer: carries a plan out, in a folder beside the output that takes the output's place when all of it is there.

Bytes that do not change never pass through this process: files are hard-linked, cloned (reflink) or copied by the
kernel, tensors of a file that is written anew are copied by the kernel too. Only a change of dtype reads them, a piece
at a time.
"""

import ctypes
import errno
import hashlib
import os
import shutil
import signal
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from resformer.convert.casting import Rounding, converted
from resformer.convert.errors import CheckpointError, OutputError
from resformer.convert.files import MIB, open_regular, regular_file
from resformer.convert.planning import CarriedShard, Plan, Rewrite, WrittenShard
from resformer.convert.safetensors_format import header_bytes

if sys.platform != "win32":  # which has neither locks on folders nor clones
    import fcntl

__all__ = [
    "Transfer",
    "Written",
    "check_space",
    "check_target",
    "flush",
    "foresee",
    "replace_text",
    "replacing",
    "write_plan",
    "write_text",
]

_COPY_PIECE = 64 * MIB  # what the kernel copies between two looks at the progress bar
_FICLONE = 0x40049409  # linux/fs.h
_RENAME_EXCHANGE = 2  # linux/fs.h

Progress = Callable[[int], object]


@dataclass
class Transfer:
    """How many bytes went which way."""

    linked: int = 0  # hard links: no bytes moved
    cloned: int = 0  # reflinks: no bytes moved, until one side changes
    copied: int = 0  # whole files and side files
    written: int = 0  # new files

    @property
    def moved(self) -> int:
        """Bytes that need space on the disk."""
        return self.copied + self.written


@dataclass
class Written:
    """What `write_plan` did."""

    transfer: Transfer = field(default_factory=Transfer)
    shared: set[str] = field(default_factory=set)  # files that share their source's bytes: linked or cloned
    digests: dict[str, str] = field(default_factory=dict)  # tensor -> SHA-256 of the bytes this process made
    rounding: Rounding = field(default_factory=Rounding)
    notes: list[str] = field(default_factory=list)


def check_target(target: Path, source: Path | None, *, force: bool) -> None:
    """Refuses an output that would destroy something.

    Args:
        source: the source's folder; `None` if the source is a single file.

    Raises:
        CheckpointError: the output holds the source, lies in it, is a file, or holds something and `force` is not set.
    """
    if target.is_symlink() and not target.exists():
        raise CheckpointError(f"{target}: is a link that leads nowhere; choose another output.")
    here = Path(os.path.realpath(target))
    if source is not None:
        there = Path(os.path.realpath(source))
        if here == there or here in there.parents:
            raise CheckpointError(f"{target}: holds the source {source}; choose another output.")
        if there in here.parents:
            raise CheckpointError(f"{target}: lies in the source folder {source}; choose another output.")
    if os.path.exists(target) and not target.is_dir():
        raise CheckpointError(f"{target}: is a file; choose another output.")
    if os.path.isdir(target) and any(target.iterdir()) and not force:
        raise CheckpointError(
            f"{target}: is not empty; replace it with --force (force=True), or choose another output.", "--force"
        )


def foresee(plan: Plan, target: Path, *, link: bool) -> Transfer:
    """What `write_plan` will do; nothing is left on the disk."""
    folder = _folder_above(target)
    transfer = Transfer(
        copied=sum(file.size for file in plan.side_files), written=sum(shard.size for shard in plan.written)
    )
    for shard in plan.carried:
        if link and regular_file(shard.path).stat().st_dev == folder.stat().st_dev:
            transfer.linked += shard.size
        elif _can_clone(shard.path, folder):
            transfer.cloned += shard.size
        else:
            transfer.copied += shard.size
    return transfer


def check_space(transfer: Transfer, target: Path) -> None:
    """Raises `OutputError` if the disk has no room for what `foresee` said."""
    folder = _folder_above(target)
    if not os.access(folder, os.W_OK):
        raise OutputError(f"{folder}: cannot be written to.")
    free, needed = shutil.disk_usage(folder).free, transfer.moved + 64 * MIB
    if needed > free:
        raise OutputError(
            f"{folder}: has {free:,} bytes free, the result takes {transfer.moved:,} and some room to spare. --link "
            "(link=True) links whole shards of a source on the same disk instead of copying them."
        )


def _folder_above(target: Path) -> Path:
    """The innermost folder above `target` that there is."""
    return next(parent for parent in Path(os.path.realpath(target)).parents if os.path.isdir(parent))


@contextmanager
def replacing(target: Path, *, force: bool = False) -> Iterator[Path]:
    """A folder beside `target` that takes its place when the block ends well, and vanishes when it does not.

    Its name follows from `target`'s: what a killed run has left is found, and cleared, by the next one.

    Args:
        force: replace a folder that is not empty.

    Raises:
        OutputError: it cannot be made, or another process is writing to the same output.
    """
    target = Path(os.path.realpath(target))
    name = target.name
    if len(os.fsencode(name)) > 200:  # there must be room for what is added to it
        name = hashlib.sha256(os.fsencode(name)).hexdigest()
    partial, old = (target.with_name(f".{name}.resformer-{kind}") for kind in ("partial", "old"))
    absent = [parent for parent in target.parents if not parent.exists()]
    lock = _Lock(partial)
    try:
        with _writing(partial):
            target.parent.mkdir(parents=True, exist_ok=True)
            partial.mkdir(exist_ok=True)
            lock.take()
        with _writing(target):
            if old.exists() and not target.exists():  # killed between the two renames of `_put_in_place`
                old.rename(target)
            _clear(partial)
        yield partial
        with _writing(target):
            _put_in_place(partial, target, old, force=force)
    except BaseException:
        with _uninterrupted():
            # Under its name may also lie what `target` was, if the swap was the last thing that happened.
            left = lock if lock.is_mine() else _Lock(partial)
            if left.is_mine():
                shutil.rmtree(partial, ignore_errors=True)
            left.give()
            for parent in absent:
                with suppress(OSError):
                    parent.rmdir()
        raise
    finally:
        lock.give()


def write_plan(
    plan: Plan, folder: Path, *, link: bool = False, digests: bool = True, progress: Progress = lambda moved: None
) -> Written:
    """Writes everything in `plan` into `folder`, index and configuration last.

    Args:
        link: hard-link whole shards where the file system allows it.
        digests: take SHA-256 of the bytes that this process makes.
        progress: called with the number of bytes that have just been carried or written.

    Raises:
        CheckpointError: a file of the source has vanished or changed since it was read.
        OutputError: the disk is full, or does not take it for another reason.
    """
    done = Written()
    for shard in plan.shards:
        with _writing(folder / shard.name):
            if isinstance(shard, CarriedShard):
                _carry(shard, folder / shard.name, done, link=link, progress=progress)
            else:
                _write(shard, folder / shard.name, done, digests=digests, progress=progress)
    for file in plan.side_files:
        with _writing(folder / file.name):
            (folder / file.name).parent.mkdir(exist_ok=True)
            with open_regular(file.path) as source, (folder / file.name).open("xb", buffering=0) as output:
                if file.content is None:
                    _copy_range(source, file.path, 0, file.size, output, progress)
                else:
                    _write_all(output, memoryview(file.content))
        done.transfer.copied += file.size
    for name, text in (("model.safetensors.index.json", plan.index), ("config.json", plan.config)):
        if text is not None:
            write_text(folder / name, text)
    return done


def write_text(path: Path, text: str) -> None:
    """Writes a small new file."""
    with _writing(path):
        path.write_bytes(text.encode())


def replace_text(path: Path, text: str) -> None:
    """Writes a file, with the folders that it lies in, in place of what is there; whole or not at all.

    Raises:
        OutputError: the disk does not take it.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        with _writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_bytes(text.encode())
            os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def flush(folder: Path, shared: set[str]) -> None:
    """Waits until every file of `folder` is on the disk, but those that it shares with the source."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name not in shared]
    # All at once: the disk orders the writes better than a file after the other would.
    with ThreadPoolExecutor(8) as pool, _writing(folder):
        list(pool.map(_fsync, [*files, folder, *(path for path in folder.iterdir() if path.is_dir())]))


def _carry(shard: CarriedShard, target: Path, done: Written, *, link: bool, progress: Progress) -> None:
    source = regular_file(shard.path)
    if link:
        try:
            os.link(source, target)
        except FileNotFoundError:
            raise
        except OSError as error:
            note = f"--link: hard links are not possible here ({error.strerror}); whole shards are copied."
            done.notes += [note] if note not in done.notes else []
        else:
            linked = target.lstat()
            if not stat.S_ISREG(linked.st_mode) or linked.st_size != shard.size:
                raise CheckpointError(f"{source}: changed since it was read; run the conversion again.")
            done.transfer.linked += shard.size
            done.shared.add(target.name)
            progress(shard.size)
            return
    with open_regular(source) as reader, target.open("xb", buffering=0) as output:
        before = os.fstat(reader.fileno())
        if before.st_size == shard.size and _clone(reader, output):
            done.transfer.cloned += shard.size
            done.shared.add(target.name)
            progress(shard.size)
        else:
            _copy_range(reader, source, 0, shard.size, output, progress)
            done.transfer.copied += shard.size
        after = os.fstat(reader.fileno())
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns) or after.st_size != shard.size:
        raise CheckpointError(f"{source}: changed while it was read; run the conversion again.")


def _write(shard: WrittenShard, target: Path, done: Written, *, digests: bool, progress: Progress) -> None:
    header = header_bytes(shard.tensors)
    with target.open("xb", buffering=0) as output:
        _write_all(output, memoryview(header))
        for rewrite in shard.rewrites:
            origin = rewrite.origin
            if isinstance(origin.data, tuple) and rewrite.dtype == origin.dtype:
                path, start = origin.data
                with open_regular(path) as source:
                    _copy_range(source, path, start, origin.nbytes, output, progress)
                continue
            digest = hashlib.sha256()
            for piece in _made(rewrite, done.rounding):
                if digests:
                    digest.update(piece)
                _write_all(output, piece)
                progress(len(piece))
            if digests:
                done.digests[origin.name] = digest.hexdigest()
    done.transfer.written += shard.size + len(header)


def _made(rewrite: Rewrite, rounding: Rounding) -> Iterator[memoryview]:
    """The bytes of a tensor that is not in a file already as it should be."""
    if rewrite.dtype != rewrite.origin.dtype:
        yield from converted(rewrite.origin, rewrite.dtype, rounding)
    elif isinstance(rewrite.origin.data, memoryview):
        yield rewrite.origin.data


def _copy_range(source: BinaryIO, path: Path, start: int, length: int, output: BinaryIO, progress: Progress) -> None:
    """Appends `length` bytes of `source`, the file at `path`, from `start` on, to `output`, in the kernel if it can."""
    left = length
    in_kernel = hasattr(os, "copy_file_range")
    while left:
        if in_kernel:
            try:
                moved = os.copy_file_range(source.fileno(), output.fileno(), min(left, _COPY_PIECE), start)
            except OSError as error:
                if error.errno not in (errno.EXDEV, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM):
                    raise
                in_kernel = False
                continue
        else:
            source.seek(start)
            piece = source.read(min(left, 8 * MIB))
            _write_all(output, memoryview(piece))
            moved = len(piece)
        if moved == 0:
            raise CheckpointError(f"{path}: ended {left:,} bytes early: it changed while it was read.")
        start += moved
        left -= moved
        progress(moved)


def _write_all(output: BinaryIO, piece: memoryview) -> None:
    while piece:
        piece = piece[output.write(piece) :]


def _clone(source: BinaryIO, output: BinaryIO) -> bool:
    """Makes `output` share the extents of `source`; not possible on most file systems."""
    if sys.platform != "linux":
        return False
    try:
        fcntl.ioctl(output.fileno(), _FICLONE, source.fileno())
    except OSError:
        return False
    return True


def _can_clone(source: Path, folder: Path) -> bool:
    """Whether `_clone` works into `folder`, tried with a file that has no name."""
    if not hasattr(os, "O_TMPFILE"):
        return False
    try:
        with open_regular(source) as reader, os.fdopen(os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o600), "wb") as trial:
            return _clone(reader, trial)
    except OSError:
        return False


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Says what could not be written, and why."""
    try:
        yield
    except OSError as error:
        raise OutputError(f"{path}: cannot be written: {error.strerror or error}. Nothing was left behind.") from error


class _Lock:
    """Holds a folder against other processes that convert to the same output, as long as this one lives."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.descriptor = -1

    def take(self) -> None:
        if self.folder.is_symlink() or not self.folder.is_dir():
            raise OutputError(f"{self.folder}: is no folder but a link or a file; remove it.")
        if not self.is_mine():
            raise OutputError(f"{self.folder}: another conversion to this output is running; wait for it.")

    def is_mine(self) -> bool:
        """Whether nobody else holds the folder; then it is held by this."""
        if sys.platform == "win32":  # no locks on folders there
            return True
        try:
            if self.descriptor < 0:
                # Not through a link: what it leads to is not ours to clear.
                self.descriptor = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return os.path.samestat(os.lstat(self.folder), os.fstat(self.descriptor))
        except OSError:  # somebody holds it, has just put it in place, or it is a link or a file
            return False

    def give(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Puts off Ctrl-C and SIGTERM: a second one must not stop what the first has started."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _clear(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _put_in_place(partial: Path, target: Path, old: Path, *, force: bool) -> None:
    """Puts `partial` where `target` is, in one step where the system has one; then removes what was there."""
    if not force or not target.exists():
        partial.rename(target)  # replaces an empty folder, and no other
    else:
        # After the swap what was there bears the partial's name: nobody else may take it for a partial.
        lock = _Lock(target)
        try:
            lock.take()
            if _swap(partial, target):
                shutil.rmtree(partial, ignore_errors=True)
            else:
                target.rename(old)
                partial.rename(target)
        finally:
            lock.give()
    shutil.rmtree(old, ignore_errors=True)


def _swap(one: Path, other: Path) -> bool:
    """Exchanges two folders' names atomically (renameat2); `False` where the system cannot."""
    try:
        renameat2 = ctypes.CDLL(None).renameat2
    except (AttributeError, OSError, TypeError):
        return False
    here = -100  # AT_FDCWD: both paths are absolute
    return renameat2(here, os.fsencode(one), here, os.fsencode(other), _RENAME_EXCHANGE) == 0
