"""Output folders and files that appear whole or not at all."""

import hashlib
import math
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from resformer.errors import CheckpointError, OutputError, listed

__all__ = [
    "EVAL_RESULTS",
    "check_apart",
    "check_target",
    "folder_above",
    "json_value",
    "locked",
    "replace_text",
    "replacing",
    "write_text",
    "writing",
]

#: The folder in which a repository of the Hub has its evaluation results.
EVAL_RESULTS = ".eval_results"
#: Sub-folders that a checkpoint may have.
_SUBFOLDERS = {"chat_templates", "additional_chat_templates", EVAL_RESULTS}


def check_target(target: Path, *inputs: str | Path, mark: str, force: bool) -> None:
    """Refuses an output folder that holds an input, or that holds anything but an earlier result.

    Args:
        inputs: what the command reads: files, folders, or Hub ids, which are passed over.
        mark: a file that every result of the command has. With `force`, a folder is replaced only if it holds this
            file, no sub-folders but those of a checkpoint, and no code, unless `mark` is code.

    Raises:
        CheckpointError: as `check_apart`; or the output is a file, holds something and `force` is not set, or holds
            something else than a result of the command.
        OutputError: the folder that it lies in cannot be written to.
    """
    if target.is_symlink() and not target.exists():
        raise CheckpointError(f"{target}: is a link that leads nowhere; choose another output.")
    check_apart(target, *inputs)
    if os.path.exists(target) and not target.is_dir():
        raise CheckpointError(f"{target}: is a file; choose another output.")
    if os.path.ismount(target.resolve()):
        raise CheckpointError(f"{target}: is a mount point, which no rename can replace; choose a folder in it.")
    if not os.access(folder_above(target), os.W_OK):
        raise OutputError(f"{folder_above(target)}: cannot be written to.")
    if not os.path.isdir(target) or not any(target.iterdir()):
        return
    kept = "It is not replaced, with or without --force; choose another output."
    if not (target / mark).is_file():
        raise CheckpointError(f"{target}: is not empty, and has no {mark}, as every result of this command has. {kept}")
    if foreign := _foreign_entries(target, mark):
        raise CheckpointError(f"{target}: holds {listed(foreign)}, which no result of this command does. {kept}")
    if not force:
        raise CheckpointError(
            f"{target}: is not empty; replace it with --force (force=True), or choose another output.", "--force"
        )


def check_apart(target: Path, *inputs: str | Path) -> None:
    """Refuses an output that is, or holds, one of the `inputs` or what a link in one leads to, or lies in one."""
    output = Path(os.path.realpath(target))
    for name in inputs:
        path = Path(os.path.realpath(Path(name).expanduser()))
        if not os.path.exists(path):  # a Hub id
            continue
        entries = path.iterdir() if path.is_dir() else ()
        read = {path, *(Path(os.path.realpath(entry)) for entry in entries)}
        if any(output in (each, *each.parents) for each in read):
            raise CheckpointError(f"{target}: holds the source {name}; choose another output.")
        if path in output.parents and path.is_dir():
            raise CheckpointError(f"{target}: lies in the source folder {name}; choose another output.")


def folder_above(target: Path) -> Path:
    """The innermost existing folder above `target`."""
    return next(parent for parent in Path(os.path.realpath(target)).parents if os.path.isdir(parent))


@contextmanager
def locked(path: Path, *, wait: bool = False) -> Iterator[bool]:
    """Whether no other process holds this file, which is held until the block ends, or the process is killed."""
    absent = [parent for parent in path.parents if not parent.exists()]
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path)
    with writing(path), suppress(Timeout):
        lock.acquire(timeout=-1 if wait else 0)
    try:
        yield lock.is_locked
    finally:
        if lock.is_locked:
            with suppress(OSError):  # Windows removes it on release
                path.unlink()  # before the release: nobody else can hold it yet
            lock.release()
        for parent in absent:
            with suppress(OSError):  # something lies in it
                parent.rmdir()


@contextmanager
def replacing(target: Path, *, force: bool = False) -> Iterator[Path]:
    """A folder beside `target` that takes its place when the block ends well, and is removed when it does not.

    The names of this folder, of the old output and of the lock file follow from `target`'s: the next run finds and
    removes what a killed one has left. The system releases the lock of a killed process.

    Args:
        force: replace a folder that is not empty.

    Raises:
        OutputError: it cannot be made, or another process is writing to the same output.
    """
    target = Path(os.path.realpath(target))
    name = target.name
    if len(os.fsencode(name)) > 200:  # file systems allow 255 bytes, and suffixes are added
        name = hashlib.sha256(os.fsencode(name)).hexdigest()
    partial, old, lock_file = (target.with_name(f".{name}.resformer-{part}") for part in ("partial", "old", "lock"))
    absent = [parent for parent in target.parents if not parent.exists()]
    lock = FileLock(lock_file)

    def settle() -> None:
        """Removes what lies beside the output, but brings the old output back if nothing took its place."""
        _remove_folder(partial)
        with writing(target):
            if old.is_dir() and not (old.is_symlink() or target.exists()):
                old.rename(target)
        _remove_folder(old)

    try:
        with writing(target):
            target.parent.mkdir(parents=True, exist_ok=True)
        with writing(lock_file), suppress(Timeout):
            lock.acquire(timeout=0)
        if not lock.is_locked:
            raise OutputError(f"{target}: another process is writing there; wait for it.")
        settle()
        with writing(partial):
            partial.mkdir()
        yield partial
        with writing(target):
            if target.exists():
                target.rename(old) if force else target.rmdir()  # Windows renames onto no folder, even an empty one
            partial.rename(target)
        settle()
    except BaseException:
        if lock.is_locked:
            settle()
        raise
    finally:
        with suppress(OSError):  # an interrupt may have come after the file was made and before it was locked
            lock.acquire(timeout=0)
        if lock.is_locked:
            with suppress(OSError):  # Windows removes it on release
                lock_file.unlink()  # before the release: nobody else can hold it yet
            lock.release(force=True)
        for parent in absent:
            with suppress(OSError):  # the output lies in it
                parent.rmdir()


def write_text(path: Path, text: str) -> None:
    """Writes a small new file."""
    with writing(path):
        path.write_bytes(text.encode())


def json_value(value: Any) -> Any:
    """The same with `None` for NaN and infinity, which JSON does not have."""
    if isinstance(value, dict):
        return {key: json_value(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_value(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def replace_text(path: Path, text: str) -> None:
    """Writes a file, with the folders that it lies in, in place of what is there; whole or not at all.

    Raises:
        OutputError: it cannot be written.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_bytes(text.encode())
            os.replace(partial, path)
    except BaseException:
        with suppress(OSError):  # as there is none; the error above is raised
            partial.unlink()
        raise


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns a system error into an `OutputError` that names `path` and the reason."""
    try:
        yield
    except OSError as error:
        raise OutputError(f"{path}: cannot be written: {error.strerror or error}.") from error


def _remove_folder(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():  # `rmtree` would wait at a pipe
        shutil.rmtree(path, ignore_errors=True)


def _foreign_entries(folder: Path, mark: str) -> list[str]:
    """Names that no result of a command has: unknown sub-folders, and code unless `mark`, as of a bundle, is code."""
    known = _SUBFOLDERS | ({"runs"} if mark == "metrics.json" else set())  # TensorBoard's, of a fine-tuning
    return [
        path.name
        for path in folder.iterdir()
        if (path.is_dir() and path.name not in known) or (path.suffix == ".py" and not mark.endswith(".py"))
    ]
