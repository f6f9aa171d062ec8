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
from resformer.names import CONFIG, FOLDERS, INDEX, OFTEN_LINKED, SIDE_FILES, SINGLE, TOKENIZER_CONFIG

MIB = 2**20
#: A config.json, an index, a header of safetensors. A mixture of 74,000 tensors has headers of 10 MB.
LARGEST_JSON = 32 * MIB
#: The largest file that holds no weights. Gemma's tokenizer.json has 33 MiB.
MOST_BYTES = 256 * MIB
#: A resolved path is no link; opening a FIFO does not wait for a writer.
_GUARDS = sum(getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_BINARY"))
_KINDS = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}


def regular_file(path: Path, folder: Path | None = None, *, within: bool = False) -> Path:
    """The file behind `path`, links resolved, as `inside` allows them.

    Args:
        folder: made by a stranger, and named by the user; default: the one that the file lies in.

    Raises:
        CheckpointError: the file does not exist, is not regular (a FIFO would block, a device never ends), or lies
            outside `folder`.
    """
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:  # a loop of links, a NUL in the name
        reason = "does not exist" if isinstance(error, FileNotFoundError) else f"cannot be read: {error}"
        raise CheckpointError(f"{path}: {reason}.") from error
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "a device")
        raise CheckpointError(f"{path}: expected a regular file, found {kind}.")
    return inside(path, folder or path.parent, within=within)


def inside(path: Path, folder: Path, *, within: bool = False) -> Path:
    """The resolved path. No link in any part of it below `folder` is followed out of it.

    Links that may leave it: those of a snapshot in the Hub's cache to its `blobs`; weights, config.json and the index
    directly in `folder`.

    Args:
        within: make no exception but the Hub's cache.
    """
    try:
        real, home = path.resolve(strict=True), folder.resolve()
    except (OSError, RuntimeError) as error:  # it is gone, or a loop of links
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    followed = not within and path.parent == folder and OFTEN_LINKED.fullmatch(path.name)
    # `snapshots/<commit>/[sub-folder/]x` is a link to `blobs/<hash>`.
    blobs = [parent.with_name("blobs") for parent in home.parents if parent.name == "snapshots"][:1]
    if not followed and home not in real.parents and real.parent not in blobs:
        raise CheckpointError(f"{path}: is a link out of its folder, to {real}; put the file itself there.")
    return real


def names_in(folder: Path) -> list[str]:
    """The names in a checkpoint's folder, and in those of its folders that are a part of it; of others `name/`."""
    inside = [folder / name for name in FOLDERS if (folder / name).is_dir() and not (folder / name).is_symlink()]
    paths = sorted([*({*folder.iterdir()} - {*inside}), *(path for each in inside for path in each.iterdir())])
    return [path.relative_to(folder).as_posix() + "/" * (path.is_dir() and not path.is_symlink()) for path in paths]


def check_folder(folder: str | Path) -> None:
    """Refuses a folder that Transformers is about to load, if any path in it leads out, to no file, or to no end.

    An adapter's configuration may name any folder as its base model, which Transformers loads.
    """
    folder = Path(folder)
    if os.path.lexists(folder / "adapter_config.json"):
        raise CheckpointError(
            f"{folder / 'adapter_config.json'}: a PEFT adapter; merge it into its model and save that "
            "(`merge_and_unload`), or remove it."
        )
    with reading(folder):
        for parent, folders, files in os.walk(folder):
            for path in (Path(parent, name) for name in (*files, *folders)):
                if path.is_dir():
                    inside(path, folder)
                    continue
                size, name = regular_file(path, folder).stat().st_size, path.relative_to(folder).as_posix()
                if size > MOST_BYTES and (SIDE_FILES.fullmatch(name) or name in (CONFIG, INDEX)):
                    raise CheckpointError(f"{path}: has {size:,} bytes; at most {MOST_BYTES:,} are read.")
        named: dict[Path, Any] = {}
        if not (folder / SINGLE).exists():  # beside it, Transformers ignores an index
            named = {path: read_json(path).get("weight_map") for path in folder.glob("*.index.json")}
    if (folder / TOKENIZER_CONFIG).exists():
        check_settings(folder / TOKENIZER_CONFIG)
    if (folder / CONFIG).exists():
        named[folder / CONFIG] = {"": read_json(folder / CONFIG).get("transformers_weights") or SINGLE}
    for path, files in named.items():  # of weights
        for tensor, file in files.items() if isinstance(files, dict) else ():
            suffix = ".safetensors" if path.name == INDEX else Path(str(file)).suffix
            check_bare_name(file, suffix, f"{path}: weight_map of {quoted(tensor)}" if tensor else str(path))


def check_settings(path: Path) -> None:
    """Refuses a tokenizer_config.json with text that is the path of another file: some tokenizers read `vocab` so.

    Keys such as `vocab_file` are not read: Transformers puts the checkpoint's files in their place.
    """

    def check(value: object, key: str) -> None:
        for name, entry in value.items() if isinstance(value, dict) else ():
            if not re.fullmatch(r".*_(file|tokens?)|name_or_path|chat_template|added_tokens_decoder", name):
                check(entry, name)
        for entry in value if isinstance(value, list) else ():
            check(entry, key)
        places = (Path(value), path.parent / value) if isinstance(value, str) and "\0" not in value else ()
        if any(os.path.lexists(place) and not os.path.isdir(place) for place in places):
            raise CheckpointError(f"{path}: {quoted(key)} is {quoted(value)}, a file that Transformers may read.")

    check(read_json(path), "")


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


def read_bounded(path: Path, limit: int) -> bytes:
    """The content of a regular file of at most `limit` bytes."""
    with open_regular(regular_file(path)) as file, reading(path):
        size = os.fstat(file.fileno()).st_size
        if size <= limit:
            return file.read(limit)
    raise CheckpointError(f"{path}: has {size:,} bytes, is larger than {limit:,}, which no such file is.")


def read_json(path: Path, limit: int = LARGEST_JSON) -> dict[str, Any]:
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


def check_bare_name(name: object, suffix: str, where: str) -> None:
    """Refuses what is not the name of a file in the same folder, but leads elsewhere (`../x`, `/x`, `C:x`, NUL)."""
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
