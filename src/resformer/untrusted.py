"""Reads files of untrusted checkpoints: no devices or pipes, no links out of the folder, bounded sizes."""

import json
import os
import re
import stat
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from resformer.errors import CheckpointError, quoted

MIB = 2**20
#: The largest file that holds no weights. Gemma's tokenizer.json has 33 MiB.
MOST_BYTES = 256 * MIB
#: A resolved path is no link; opening a FIFO does not wait for a writer.
_GUARDS = sum(getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_BINARY"))
_KINDS = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}
#: Files of these suffixes are read by Transformers: tokenizers, templates, settings and weights.
_READ = (".jinja", ".json", ".model", ".safetensors", ".tiktoken", ".txt")
#: Sub-folders with chat templates.
TEMPLATE_FOLDERS = ("chat_templates", "additional_chat_templates")
#: Often links to a store that several folders share. Following them is safe: weights are checked tensor by tensor, and
#: only known keys of config.json are read.
_OFTEN_LINKED = re.compile(r".*\.safetensors|config\.json|model\.safetensors\.index\.json")


def regular_file(path: Path, folder: Path | None = None, *, within: bool = False) -> Path:
    """The file behind `path`, links resolved. No link in any part of the path below `folder` is followed out of it.

    Exceptions: links of a snapshot in the Hub's cache to its `blobs`; weights, config.json and the index directly in
    `folder`.

    Args:
        folder: made by a stranger, and named by the user; default: the one that the file lies in.
        within: make no exception but the Hub's cache.

    Raises:
        CheckpointError: the file does not exist, is not regular (a FIFO would block, a device never ends), or lies
            outside `folder`.
    """
    folder = folder or path.parent
    try:
        mode = path.stat().st_mode
        real, home = path.resolve(strict=True), folder.resolve()
    except (OSError, ValueError, RuntimeError) as error:  # a loop of links, a NUL in the name
        reason = "does not exist" if isinstance(error, FileNotFoundError) else f"cannot be read: {error}"
        raise CheckpointError(f"{path}: {reason}.") from error
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "a device")
        raise CheckpointError(f"{path}: expected a regular file, found {kind}.")
    followed = not within and path.parent == folder and _OFTEN_LINKED.fullmatch(path.name)
    if not followed and home not in real.parents and real.parent != _blobs(home):
        raise CheckpointError(f"{path}: is a link out of its folder, to {real}; put the file itself there.")
    return real


def check_folder(folder: str | Path) -> None:
    """Refuses a folder that Transformers is about to load, if it would follow a link out of it or read without end.

    Hub ids are passed over. An adapter's configuration may name any folder as its base model, which Transformers loads.
    """
    folder = Path(folder)
    if not folder.is_dir():
        return
    if os.path.lexists(folder / "adapter_config.json"):
        raise CheckpointError(
            f"{folder / 'adapter_config.json'}: a PEFT adapter; merge it into its model and save that "
            "(`merge_and_unload`), or remove it."
        )
    with reading(folder):
        templates = [path for name in TEMPLATE_FOLDERS for path in (folder / name).glob("*")]
        for path in [*folder.iterdir(), *templates]:
            if path.suffix not in _READ or path.is_dir():
                continue
            size = regular_file(path, folder).stat().st_size
            if size > MOST_BYTES and path.suffix != ".safetensors":
                raise CheckpointError(f"{path}: has {size:,} bytes; at most {MOST_BYTES:,} are read.")


def open_regular(path: Path) -> BinaryIO:
    """Opens a path that `regular_file` returned; checks again, as the file may have been replaced since."""
    try:
        descriptor = os.open(path, os.O_RDONLY | _GUARDS)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be opened: {error.strerror}.") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError(f"{path}: is no regular file any more.")
    return os.fdopen(descriptor, "rb")


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turns a system error into a `CheckpointError` that names `path` and the reason."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}.") from error


def read_bounded(path: Path, limit: int, folder: Path | None = None) -> bytes:
    """The content of a regular file of at most `limit` bytes; `folder` as for `regular_file`."""
    with open_regular(regular_file(path, folder)) as file, reading(path):
        size = os.fstat(file.fileno()).st_size
        if size <= limit:
            return file.read(limit)
    raise CheckpointError(f"{path}: has {size:,} bytes, is larger than {limit:,}, which no such file is.")


def read_json(path: Path, limit: int = 16 * MIB) -> dict[str, Any]:
    """A JSON object, from a file of at most `limit` bytes."""
    return parse_json(read_bounded(path, limit), str(path))


def parse_json(content: bytes, where: str) -> dict[str, Any]:
    """A JSON object without repeated keys, which readers resolve differently."""

    def to_dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) != len(pairs):
            repeated, _ = Counter(key for key, _ in pairs).most_common(1)[0]
            raise CheckpointError(f"{where}: holds {quoted(repeated)} twice.")
        return values

    try:
        value = json.loads(content.decode("utf-8"), object_pairs_hook=to_dict)
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{where}: is not UTF-8 at byte {error.start}.") from error
    except RecursionError as error:
        raise CheckpointError(f"{where}: cannot be read: it is nested too deeply.") from error
    except ValueError as error:
        raise CheckpointError(f"{where}: cannot be read as JSON: {error}.") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{where}: expected a JSON object, found {type(value).__name__}.")
    return value


def bare_name(name: object, suffix: str, where: str) -> str:
    """`name` if it is that of a file in the same folder: it leads nowhere else (`../x`, `/x`, `C:x`, NUL)."""
    if (
        not isinstance(name, str)
        or not name.endswith(suffix)
        or name.startswith(".")
        or any(character in name for character in '/\\:\0*?"<>|')
        or not name.isprintable()
        or len(os.fsencode(name)) > 255
    ):
        raise CheckpointError(
            f"{where}: names the file {quoted(name)}; expected the bare name of a {suffix} file beside it."
        )
    return name


def _blobs(folder: Path) -> Path | None:
    """Where the links of a Hub snapshot lead: `snapshots/<commit>/[sub-folder/]x` is a link to `blobs/<hash>`."""
    snapshots = next((parent for parent in folder.parents if parent.name == "snapshots"), None)
    return None if snapshots is None else snapshots.parent / "blobs"
