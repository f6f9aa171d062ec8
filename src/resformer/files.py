"""Output folders and files that appear whole or not at all."""

import hashlib
import json
import math
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from inspect import getmembers
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from safetensors import SafetensorError

from resformer.errors import CheckpointError, OutputError, quoted
from resformer.names import LISTING
from resformer.safetensors_format import read_shard
from resformer.untrusted import MOST_BYTES, open_regular, read_json


def check_target(target: Path, *inputs: str | Path, made_by: str, force: bool) -> None:
    """Refuses an output folder that holds one of the `inputs`, or anything but an earlier result.

    With `force`, a folder is replaced only if the command `made_by` has written every file in it, as `LISTING` says,
    and their sizes and first bytes are what they were.
    """
    try:
        os.path.realpath(target).encode()
    except UnicodeEncodeError as error:
        raise CheckpointError(
            f"{target}: is not UTF-8, as paths of models have to be; choose another output."
        ) from error
    if target.is_symlink() and not target.exists():
        raise CheckpointError(f"{target}: is a link that leads nowhere; choose another output.")
    check_apart(target, *inputs)
    if os.path.exists(target) and not target.is_dir():
        raise CheckpointError(f"{target}: is a file; choose another output.")
    if os.path.ismount(target.resolve()):
        raise CheckpointError(f"{target}: is a mount point, which no rename can replace; choose a folder in it.")
    if not os.access(folder_above(target), os.W_OK):
        raise OutputError(f"{folder_above(target)}: cannot be written to.")
    if beside(target, "old").is_dir() and not os.path.lexists(target):
        with locked(beside(target, "lock")) as free:
            if free:
                _bring_back(target)
    if not target.is_dir() or not any(target.iterdir()):
        return
    known = listed(target, made_by)
    for name in _names(target):  # the first one that is not known ends the search
        if known.get(name) is None or known[name] != fingerprint(target / name):
            raise CheckpointError(
                f"{target}: holds {quoted(name)}, which is not as `resformer {made_by}` wrote it, by its {LISTING}. "
                "Even --force does not replace such a folder; choose another output."
            )
    if not force:
        raise CheckpointError(
            f"{target}: is not empty; replace it with --force (force=True), or choose another output.", "--force"
        )


def listed(folder: Path, made_by: str) -> dict[str, str]:
    """Relative name -> `fingerprint` of every file that the command `made_by` has written there, as `LISTING` says."""
    listing = read_json(folder / LISTING, MOST_BYTES) if os.path.lexists(folder / LISTING) else {}
    files = listing.get("files")
    return files if listing.get("made_by") == made_by and isinstance(files, dict) else {}


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
def locked(path: Path, *, wait: bool = False, busy: str = "") -> Iterator[bool]:
    """Whether no other process holds this file, which is held until the block ends, or the process is killed.

    Raises `OutputError` with the words of `busy`, if there are any, where another process does.
    """
    absent = [parent for parent in path.parents if not parent.exists()]
    lock = FileLock(path)
    try:
        with writing(path), suppress(Timeout):
            path.parent.mkdir(parents=True, exist_ok=True)
            lock.acquire(timeout=-1 if wait else 0)
        if busy and not lock.is_locked:
            raise OutputError(busy)
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
def replacing(target: Path, *, made_by: str, force: bool = False) -> Iterator[Path]:
    """A folder beside `target` that takes its place when the block ends well, and is removed when it does not.

    The names of this folder, of the old output and of the lock file follow from `target`'s: the next run finds and
    removes what a killed one has left. The system releases the lock of a killed process. `made_by` is the command, for
    the listing that `check_target` reads; with `force`, a folder that is not empty is replaced.
    """
    target = Path(os.path.realpath(target))
    partial, old, lock_file = (beside(target, part) for part in ("partial", "old", "lock"))

    def settle() -> None:
        """Removes what lies beside the output, but brings the old output back if nothing took its place."""
        _remove_folder(partial)
        _bring_back(target)
        _remove_folder(old)

    with locked(lock_file, busy=f"{target}: another process is writing there; wait for it."):
        try:
            settle()
            with writing(partial):
                partial.mkdir()
            yield partial
            listing = {"made_by": made_by, "files": {name: fingerprint(partial / name) for name in _names(partial)}}
            write_text(partial / LISTING, json.dumps(listing, indent=2, sort_keys=True) + "\n")
            if force:  # somebody may have written there since
                check_target(target, made_by=made_by, force=True)
            with writing(target):
                if target.exists():
                    target.rename(old) if force else target.rmdir()  # Windows renames onto no folder, even an empty one
                partial.rename(target)
            settle()
        except BaseException:  # a signal may have interrupted the last step too
            settle()
            raise


def _bring_back(target: Path) -> None:
    """If a process died between the two renames of `replacing`, the old output lies beside its place: renames it."""
    old = beside(target, "old")
    with writing(target):
        if old.is_dir() and not (old.is_symlink() or target.exists()):
            old.rename(target)


def beside(target: Path, part: str) -> Path:
    """Where `replacing` works for an output: the new folder, the old one; or the lock of whoever writes it."""
    target = Path(os.path.realpath(target))
    name = target.name
    if len(os.fsencode(name)) > 200:  # file systems allow 255 bytes, and suffixes are added
        name = hashlib.sha256(os.fsencode(name)).hexdigest()
    return target.with_name(f".{name}.resformer-{part}")


def write_text(path: Path, text: str) -> None:
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
        names = [name for name, _ in getmembers(type(self), lambda value: isinstance(value, property))]
        values: dict[str, Any] = json_value({**asdict(self), **{name: getattr(self, name) for name in names}})  # type: ignore[call-overload]
        return values


def replace_text(path: Path, text: str) -> None:
    """Writes a file, with the folders that it lies in, in place of what is there; whole or not at all.

    A link of its name is replaced, never followed. Raises `OutputError` if it cannot be written.
    """
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


def replace_listed(path: Path, text: str) -> None:
    """Writes a file as `replace_text` does; a `LISTING` that had the file as it was, or none, has the new one."""
    before = fingerprint(path) if path.is_file() else None  # a file that somebody has edited stays theirs
    replace_text(path, text)
    listing = path.parent / LISTING
    with suppress(CheckpointError):  # a listing that cannot be read lists nothing
        values = read_json(listing, MOST_BYTES) if os.path.lexists(listing) else {}
        if isinstance(files := values.get("files"), dict) and files.get(path.name) == before:
            files[path.name] = fingerprint(path)
            replace_text(listing, json.dumps(values, indent=2, sort_keys=True) + "\n")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns an error of the disk, or of safetensors, into an `OutputError` that names `path` and the reason."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise OutputError(f"{path}: cannot be written: {getattr(error, 'strerror', None) or error}.") from error


def _remove_folder(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():  # `rmtree` would wait at a pipe
        shutil.rmtree(path, ignore_errors=True)


def _names(folder: Path) -> Iterator[str]:
    """Relative names of all files and links in a folder but `LISTING`, and of its empty folders, in order."""
    for parent, folders, files in os.walk(folder):
        folders.sort()
        inner = Path(parent).relative_to(folder)
        linked = [name for name in folders if Path(parent, name).is_symlink()]
        yield from ((inner / name).as_posix() for name in sorted((*files, *linked)) if (inner / name) != Path(LISTING))
        if not files and not folders and inner.parts:
            yield f"{inner.as_posix()}/"


def fingerprint(path: Path) -> str | None:
    """Size and SHA-256 of the first 4 KiB; of safetensors, those of each tensor too: training changes no others.

    `None` for what is no file: links, pipes, folders.
    """
    starts, digest = [0], hashlib.sha256()
    with suppress(CheckpointError, OSError):
        if not path.is_symlink():
            if path.suffix == ".safetensors":
                starts += [tensor.start for tensor in read_shard(path).tensors]
            with open_regular(path) as file:
                for start in starts:
                    file.seek(start)
                    digest.update(file.read(4096))
                return f"{file.seek(0, 2)} {digest.hexdigest()}"
    return None
