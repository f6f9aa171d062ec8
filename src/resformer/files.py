"""Output folders and files that appear whole or not at all."""

import ctypes
import hashlib
import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from resformer.errors import CheckpointError, OutputError

if sys.platform != "win32":  # which has no locks on folders
    import fcntl

__all__ = ["check_target", "folder_above", "replace_text", "replacing", "write_text", "writing"]

_RENAME_EXCHANGE = 2  # linux/fs.h


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


def folder_above(target: Path) -> Path:
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
        with writing(partial):
            target.parent.mkdir(parents=True, exist_ok=True)
            partial.mkdir(exist_ok=True)
            lock.take()
        with writing(target):
            if old.exists() and not target.exists():  # killed between the two renames of `_put_in_place`
                old.rename(target)
            _clear(partial)
        yield partial
        with writing(target):
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


def write_text(path: Path, text: str) -> None:
    """Writes a small new file."""
    with writing(path):
        path.write_bytes(text.encode())


def replace_text(path: Path, text: str) -> None:
    """Writes a file, with the folders that it lies in, in place of what is there; whole or not at all.

    Raises:
        OutputError: the disk does not take it.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_bytes(text.encode())
            os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


@contextmanager
def writing(path: Path) -> Iterator[None]:
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
