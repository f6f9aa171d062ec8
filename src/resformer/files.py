"""Output folders and files that appear whole or not at all."""

import hashlib
import json
import math
import os
import secrets
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from resformer.errors import CheckpointError, OutputError, first_names
from resformer.untrusted import MOST_BYTES, open_regular, read_json

#: The folder in which a repository of the Hub has its evaluation results.
EVAL_RESULTS = ".eval_results"
#: In every output folder: the command that wrote it, and the size and first bytes of its files.
LISTING = ".resformer-files.json"


def check_target(target: Path, *inputs: str | Path, made_by: str, force: bool) -> None:
    """Refuses an output folder that holds one of the `inputs`, or anything but an earlier result.

    With `force`, a folder is replaced only if the command `made_by` has written every file in it, as `LISTING` says,
    and their sizes and first bytes are what they were.
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
    listing = read_json(target / LISTING, MOST_BYTES) if os.path.lexists(target / LISTING) else {}
    known, found = listing.get("files"), _fingerprints(target)
    if listing.get("made_by") != made_by or not isinstance(known, dict):
        known = {}
    if foreign := [name for name in found if found[name] is None or known.get(name) != found[name]]:
        raise CheckpointError(
            f"{target}: holds {first_names(foreign)}, which no {LISTING} of `resformer {made_by}` lists as it is. "
            "It is not replaced, with or without --force; choose another output."
        )
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
        if any(_same(output, each) for each in {folder for each in read for folder in (each, *each.parents)}):
            raise CheckpointError(f"{target}: holds the source {name}; choose another output.")
        if path.is_dir() and any(_same(path, parent) for parent in output.parents):
            raise CheckpointError(f"{target}: lies in the source folder {name}; choose another output.")


def _same(one: Path, other: Path) -> bool:
    """Whether two resolved paths lead to one file, also where the volume ignores case."""
    try:
        return one == other or os.path.samefile(one, other)
    except OSError:
        return False


def folder_above(target: Path) -> Path:
    """The innermost existing folder above `target`."""
    return next(parent for parent in Path(os.path.realpath(target)).parents if os.path.isdir(parent))


@contextmanager
def locked(path: Path, *, wait: bool = False) -> Iterator[bool]:
    """Whether no other process holds this file, which is held until the block ends, or the process is killed."""
    absent = [parent for parent in path.parents if not parent.exists()]
    lock = FileLock(path)
    try:
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        with writing(path), suppress(Timeout):
            lock.acquire(timeout=-1 if wait else 0)
        yield lock.is_locked
    finally:
        with suppress(OSError):  # an interrupt may have come after the file was made and before it was locked
            lock.acquire(timeout=0)
        if lock.is_locked:
            with suppress(OSError):  # Windows removes it on release
                path.unlink()  # before the release: nobody else can hold it yet
            lock.release(force=True)
        for parent in absent:
            with suppress(OSError):  # something lies in it
                parent.rmdir()


@contextmanager
def replacing(target: Path, *, made_by: str, force: bool = False, durable: bool = False) -> Iterator[Path]:
    """A folder beside `target` that takes its place when the block ends well, and is removed when it does not.

    The names of this folder, of the old output and of the lock file follow from `target`'s: the next run finds and
    removes what a killed one has left. The system releases the lock of a killed process. `made_by` is the command, for
    the listing that `check_target` reads; with `force`, a folder that is not empty is replaced; with `durable`,
    when all new files are on the disk.
    """
    target = Path(os.path.realpath(target))
    name = target.name
    if len(os.fsencode(name)) > 200:  # file systems allow 255 bytes, and suffixes are added
        name = hashlib.sha256(os.fsencode(name)).hexdigest()
    partial, old, lock_file = (target.with_name(f".{name}.resformer-{part}") for part in ("partial", "old", "lock"))

    def settle() -> None:
        """Removes what lies beside the output, but brings the old output back if nothing took its place."""
        _remove_folder(partial)
        with writing(target):
            if old.is_dir() and not (old.is_symlink() or target.exists()):
                old.rename(target)
        _remove_folder(old)

    with locked(lock_file) as free:
        if not free:
            raise OutputError(f"{target}: another process is writing there; wait for it.")
        try:
            settle()
            with writing(partial):
                partial.mkdir()
            yield partial
            listing = {"made_by": made_by, "files": _fingerprints(partial)}
            write_text(partial / LISTING, json.dumps(listing, indent=2, sort_keys=True) + "\n")
            if durable:
                _flush(partial)
            if force:  # somebody may have written there since
                check_target(target, made_by=made_by, force=True)
            with writing(target):
                if target.exists():
                    target.rename(old) if force else target.rmdir()  # Windows renames onto no folder, even an empty one
                partial.rename(target)
            settle()
        except BaseException:
            settle()
            raise


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


class AsDict:
    """For a dataclass whose fields and properties are what `--json` prints."""

    def as_dict(self) -> dict[str, Any]:
        """All of them, with `None` for NaN and infinity."""
        names = [
            name for each in type(self).__mro__ for name, value in vars(each).items() if isinstance(value, property)
        ]
        values: dict[str, Any] = json_value({**asdict(self), **{name: getattr(self, name) for name in names}})  # type: ignore[call-overload]
        return values


def replace_text(path: Path, text: str, folder: Path | None = None) -> None:
    """Writes a file, with the folders that it lies in, in place of what is there; whole or not at all.

    Args:
        folder: made by a stranger: links below it are replaced or refused, never followed. Default: the file's own.

    Raises:
        OutputError: it cannot be written, or lies behind a link out of `folder`.
    """
    folder = folder or path.parent
    if linked := [each for each in path.parents if folder in each.parents and each.is_symlink()]:
        raise OutputError(f"{linked[-1]}: is a link, which is not followed; put a folder there.")
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")  # a name that nobody can have planted
    try:
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with partial.open("xb") as file:
                file.write(text.encode())
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


def _flush(folder: Path) -> None:
    """Waits until every file of `folder` is on the disk."""
    paths = [folder, *folder.rglob("*")]
    if sys.platform == "win32":  # cannot flush a folder
        paths = [path for path in paths if path.is_file()]
    # In parallel: the disk then orders the writes.
    with ThreadPoolExecutor(8) as pool, writing(folder):
        list(pool.map(_fsync, paths))


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDWR if sys.platform == "win32" else os.O_RDONLY)  # Windows flushes no others
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_folder(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():  # `rmtree` would wait at a pipe
        shutil.rmtree(path, ignore_errors=True)


def _fingerprints(folder: Path) -> dict[str, str | None]:
    """Relative name -> size and first bytes, of every file; `None` for links, pipes and empty folders."""
    found: dict[str, str | None] = {}
    for parent, folders, files in os.walk(folder):
        inner = Path(parent).relative_to(folder)
        linked = [name for name in folders if Path(parent, name).is_symlink()]
        for name in (*files, *linked):
            found[(inner / name).as_posix()] = _fingerprint(Path(parent, name))
        if not files and not folders and parent != str(folder):
            found[f"{inner.as_posix()}/"] = None
    return {name: fingerprint for name, fingerprint in found.items() if name != LISTING}


def _fingerprint(path: Path) -> str | None:
    """Size and SHA-256 of the first 4 KiB; of safetensors, those of each tensor too: training changes no others."""
    starts, digest = [0], hashlib.sha256()
    with suppress(CheckpointError, OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        if not path.is_symlink():
            with open_regular(path) as file:
                if path.suffix == ".safetensors":
                    length = int.from_bytes(file.read(8), "little")
                    entries = json.loads(file.read(min(length, MOST_BYTES)))
                    entries.pop("__metadata__", None)
                    starts += [8 + length + entry["data_offsets"][0] for entry in entries.values()]
                for start in starts:
                    file.seek(start)
                    digest.update(file.read(4096))
                return f"{file.seek(0, 2)} {digest.hexdigest()}"
    return None
