"""Files that a stranger made: found, opened and read without following, waiting for, or believing them."""

import json
import os
import stat
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from resformer.errors import CheckpointError, shown

__all__ = ["MIB", "bare_name", "open_regular", "parse_json", "read_bounded", "read_json", "regular_file"]

MIB = 2**20


def regular_file(path: Path) -> Path:
    """The file behind `path`, links resolved.

    Raises:
        CheckpointError: there is nothing, it is no regular file (a FIFO would block, a device never ends), or a link
            leads out of its folder. The links of a Hub snapshot, which lead to its `blobs`, are followed.
    """
    try:
        kind = path.stat().st_mode
        real = path.resolve(strict=True)
    except (OSError, ValueError, RuntimeError) as error:  # a loop of links, a NUL in the name
        reason = "does not exist" if isinstance(error, FileNotFoundError) else f"cannot be read: {error}"
        raise CheckpointError(f"{path}: {reason}.") from error
    if not stat.S_ISREG(kind):
        raise CheckpointError(f"{path}: expected a regular file, found {_kind(kind)}.")
    folder = path.parent.resolve()
    if path.is_symlink() and folder not in real.parents and real.parent != _blobs(folder):
        raise CheckpointError(f"{path}: is a link out of its folder, to {real}; put the file itself there.")
    return real


def open_regular(path: Path) -> BinaryIO:
    """Opens a file that `regular_file` has found, and looks again at what was opened."""
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be opened: {error.strerror}.") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError(f"{path}: is no regular file any more.")
    return os.fdopen(descriptor, "rb")


def read_bounded(path: Path, limit: int) -> bytes:
    """The content of a regular file of at most `limit` bytes."""
    with open_regular(regular_file(path)) as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise CheckpointError(f"{path}: is larger than {limit:,} bytes, which no such file is.")
    return content


def read_json(path: Path, limit: int = 16 * MIB) -> dict[str, Any]:
    """A JSON object, from a file of at most `limit` bytes."""
    return parse_json(read_bounded(path, limit), str(path))


def parse_json(content: bytes, where: str) -> dict[str, Any]:
    """A JSON object in which no key stands twice.

    Raises:
        CheckpointError: it is none; the message begins with `where`.
    """
    try:
        found = json.loads(content.decode("utf-8"), object_pairs_hook=_unique_keys(where))
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{where}: is not UTF-8 at byte {error.start}.") from error
    except RecursionError as error:
        raise CheckpointError(f"{where}: cannot be read: it is nested too deeply.") from error
    except ValueError as error:
        raise CheckpointError(f"{where}: cannot be read as JSON: {error}.") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{where}: expected a JSON object, found {type(found).__name__}.")
    return found


def bare_name(name: object, suffix: str, where: str) -> str:
    """`name` if it is the name of a file in the same folder.

    Raises:
        CheckpointError: it leads elsewhere (`../x`, `/x`, `C:x`, NUL) or does not end in `suffix`.
    """
    if (
        not isinstance(name, str)
        or not name.endswith(suffix)
        or name.startswith(".")
        or any(character in name for character in '/\\:\0*?"<>|')
        or not name.isprintable()
        or len(os.fsencode(name)) > 255
    ):
        raise CheckpointError(
            f"{where}: names the file {shown(name)}; expected the bare name of a {suffix} file beside it."
        )
    return name


def _unique_keys(where: str) -> Callable[[list[tuple[str, Any]]], dict[str, Any]]:
    def to_dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
            raise CheckpointError(f"{where}: holds {shown(twice)} twice.")
        return found

    return to_dict


def _blobs(folder: Path) -> Path | None:
    """Where the links of a Hub snapshot lead: `snapshots/<commit>/x` is a link to `blobs/<hash>`."""
    return folder.parent.parent / "blobs" if folder.parent.name == "snapshots" else None


def _kind(mode: int) -> str:
    for test, name in (
        (stat.S_ISDIR, "a folder"),
        (stat.S_ISFIFO, "a FIFO"),
        (stat.S_ISSOCK, "a socket"),
        (stat.S_ISBLK, "a block device"),
        (stat.S_ISCHR, "a character device"),
    ):
        if test(mode):
            return name
    return "something else"
