"""Training data: documents of files, saved datasets and Hub ids, read by `datasets`, and which of them are held out."""

import errno
import glob
import hashlib
import json
import lzma
import math
import os
import platform
import random
import sysconfig
import warnings
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
from datasets import (
    Dataset,
    Features,
    IterableDataset,
    Json,
    Value,
    load_dataset,
    load_dataset_builder,
)
from datasets.config import HF_DATASETS_CACHE
from datasets.exceptions import DatasetGenerationCastError, DatasetsError
from datasets.table import CastError
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from resformer.errors import CheckpointError, OutputError, first_names, one_line

#: The source that every machine has: the files of Python's standard library, about 11 MB.
STANDARD_LIBRARY = "standard-library"
#: The share of its modules that comparisons, the demo and `resformer analyze` hold out.
STANDARD_HELD_OUT = 0.1
#: What lists the files that `resformer tokenize` has written, in their folder.
INDEX = "index.json"

_CELLS = {"keep_default_na": False, "index_col": False}  # "NA" stays text, and the first column is no index
_CELLS_LOST = "Length of header or names"  # pandas' warning, where a row has more cells than there are columns
#: Suffix of a file -> the builder of `datasets` that reads it, and its options.
_BUILDERS: dict[str, tuple[str, dict[str, Any]]] = {
    **dict.fromkeys(("txt", "text", "md"), ("text", {})),
    **dict.fromkeys(("json", "jsonl", "ndjson"), ("json", {})),
    "csv": ("csv", {**_CELLS, "sep": ","}),
    "tsv": ("csv", {**_CELLS, "sep": "\t"}),
    **{name: (name, {}) for name in ("parquet", "arrow")},
}
_COMPRESSED = {".gz", ".bz2", ".xz", ".zst"}
_CANNOT_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
_BROKEN = (lzma.LZMAError, zlib.error, EOFError, Warning, pa.ArrowException)
#: What is read of a chat, or of a prompt with its completion; of both, either is a text or a list of messages.
CHAT = ("messages", "conversations", "prompt", "completion", "tools", "chat_template_kwargs")
#: Of tokenised data, 0 where nothing is learned: what a chat template of Transformers, and TRL, make.
MASKS = ("assistant_masks", "completion_mask")
#: What is read of tokenised data: `labels` are -100 where nothing is learned, `attention_mask` is 0 for padding.
_TOKENS = ("input_ids", "labels", *MASKS, "attention_mask", "held_out")
_NOT_SOURCES = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "pydoc_data"}


class DataError(CheckpointError):
    """The data cannot be read or do not suffice; the message names the source and the way out."""


class Documents(dict[str, Dataset | IterableDataset]):
    """Source -> its documents; `notes` say which files and columns are not read."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[str] = []


def is_held_out(key: str, share: float) -> bool:
    """Whether a document is held out: by a hash of its text or group, so that adding documents moves none."""
    return int.from_bytes(hashlib.sha256(key.encode("utf-8", "replace")).digest()[:8]) < share * 2**64


def standard_library() -> Iterator[dict[str, str]]:
    """The files of Python's standard library in a fixed, shuffled order: `text`, and `group`, the top-level module.

    A module is held out or trained on as a whole, so that no held-out file has a training file beside it.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files = [path for path in sorted(root.rglob("*.py")) if _NOT_SOURCES.isdisjoint(path.relative_to(root).parts)]
    random.Random(0).shuffle(files)
    for path in files:
        text = path.read_text(encoding="utf-8", errors="replace")
        yield {"text": text, "group": path.relative_to(root).parts[0]}


def load_documents(
    sources: Sequence[str],
    *,
    split: str = "train",
    text_column: str | None = None,
    sample_by: str = "document",
    streaming: bool = False,
    chats: bool = False,
) -> Documents:
    """Source -> its documents, in order: rows that `content` reads.

    Args:
        sources: files, folders (with the splits that `datasets` finds in them; or one of `Dataset.save_to_disk` or
            `resformer tokenize`), Hub ids, `owner/name` or `owner/name:configuration`, or `STANDARD_LIBRARY`.
        text_column: what is read, whatever else a source has; default: tokens, else `text`, else chats.
        chats: whether sources may have `messages`, or `prompt` and `completion`.
    """
    documents = Documents()
    for source in sources:
        path = Path(source).expanduser()
        name = path.name if path.exists() else source  # reports are public
        with reading_source(source):
            part, unread = _load(source, path, split, streaming, sample_by)
            if source != STANDARD_LIBRARY:
                columns = part.column_names or list(next(iter(part), {}))
                kept = _kept(columns, text_column, chats, source)
                unread += sorted(set(columns) - set(kept))
                part = _rows(part.select_columns(kept), kept, text_column is not None, source)
            if unread:
                documents.notes.append(f"{name}: not read: {first_names(unread)}")
        documents[source] = part
    return documents


def training_texts(
    source: str, documents: Dataset | IterableDataset, held_out: float, most: float = math.inf
) -> Iterator[str]:
    """The texts of a source that `pack_documents` does not hold out, until they have `most` characters."""
    with reading_source(source):
        for row in documents:
            if most <= 0:
                return
            if not isinstance(text := content(row), str):
                raise DataError(f"{source}: has no text to train a tokenizer on; name a tokenizer with --tokenizer.")
            if text and not is_row_held_out(row, text, held_out):
                yield text
                most -= len(text)


def content(row: Mapping[str, Any]) -> Any:
    """A document: its text, its chat, or its token ids; empty if its cells are, and then it is left out."""
    if (ids := row.get("input_ids")) is not None:
        return ids
    if row.get("chat") is not None:
        return row["chat"]
    text = row.get("text")
    if text is not None and not isinstance(text, str):
        raise DataError(f"The text column holds {one_line(repr(text), 60)}, no text; name another with --text-column.")
    if text:
        text.encode()  # raises for half of a pair of surrogates, which JSON can have
    return text or ""


def is_row_held_out(row: Mapping[str, Any], document: Any, share: float) -> bool:
    """Whether a document is held out: as a column `held_out` says, or by its group or its content."""
    if (chosen := row.get("held_out")) is not None:
        return bool(chosen)
    if isinstance(document, dict):
        document = json.dumps(document, sort_keys=True)  # what the data say, not what a template makes of it
    elif not isinstance(document, str):
        document = b"".join(int(token).to_bytes(4, "little") for token in document).decode("latin-1")
    return is_held_out(row.get("group") or document, share)


@contextmanager
def reading_source(source: str) -> Iterator[None]:
    """Turns what its reader raises, also long after a stream was opened, into a `DataError` that names the source."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", _CELLS_LOST)
            yield
    except (DatasetsError, HfHubHTTPError, HFValidationError, OSError, ValueError, TypeError, *_BROKEN) as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, DataError):  # `datasets` wraps what its functions raise
            if isinstance(cause, OSError) and cause.errno in _CANNOT_WRITE:
                told = f"{source}: the cache of `datasets`, {HF_DATASETS_CACHE}, cannot be written"
                raise OutputError(
                    f"{told}: {os.strerror(cause.errno)}. HF_DATASETS_CACHE=FOLDER names another."
                ) from error
            cause = cause.__cause__
        if cause is not None:
            raise cause from None
        path, columns = Path(source).expanduser(), dict[str, Path]()
        for file in _visible_files(path) if path.is_dir() else ():  # raises of the one that cannot be read
            if (found := _builder(file)) is not None:
                with reading_source(str(file)):
                    name = glob.escape(str(file.absolute()))
                    rows = load_dataset(found[0], data_files=name, split="train", streaming=True, **found[1])
                    for row in rows:
                        columns.setdefault(str(rows.features or [*row]), file.relative_to(path))
        detail = one_line(error.__cause__ or error)
        way_out = "mend it, or leave it out" if path.exists() else "check its name"
        casts = (CastError, DatasetGenerationCastError)
        if len(columns) > 1 and (isinstance(error, casts) or isinstance(error.__cause__, casts)):
            way_out = f"the columns of {' and '.join(map(str, [*columns.values()][:2]))} differ: name each with --data"
        raise DataError(f"{source}: `datasets` cannot read it: {detail}; {way_out}.") from error


def _builder(file: Path) -> tuple[str, dict[str, Any]] | None:
    suffix = Path(file.stem).suffix if file.suffix in _COMPRESSED else file.suffix
    return _BUILDERS.get(suffix.lower().removeprefix("."))


def source_digest(source: str) -> str:
    """Of the names and sizes of a source's files and 64 parts of each, which are all of it up to 4 MiB.

    It differs if documents were added, removed or moved. Of a dataset on the Hub it says nothing.
    """
    path = Path(source).expanduser()
    digest = hashlib.sha256(platform.python_version().encode() if source == STANDARD_LIBRARY else b"")
    for file in _visible_files(path):
        size = file.stat().st_size
        digest.update(f"{file.relative_to(path)} {size}".encode("utf-8", "replace"))
        with file.open("rb") as opened:
            for begin in range(0, size, max(2**16, size // 64)):
                opened.seek(begin)
                digest.update(opened.read(2**16))
    return digest.hexdigest()


def _visible_files(path: Path) -> list[Path]:
    """The file, or all below a folder, in the order of their names."""
    files, seen = [path] if path.is_file() else [], set[str]()
    for folder, below, names in os.walk(path, followlinks=True):
        if (real := os.path.realpath(folder)) in seen:  # a link leads back, or to what was read
            below[:] = names[:] = []
        seen.add(real)
        below.sort()
        files += [file for name in names if (file := Path(folder, name)).is_file()]
    return sorted(file for file in files if not any(part.startswith(".") for part in file.relative_to(path).parts))


def _load(source: str, path: Path, split: str, streaming: bool, sample_by: str) -> tuple[Any, list[str]]:
    """The rows of a source with all their columns, and its files that are not read."""
    if source == STANDARD_LIBRARY:
        rows = IterableDataset.from_generator(standard_library)
        return rows if streaming else Dataset.from_list([*standard_library()]), []
    if path.exists() and "::" in str(path.absolute()):
        raise DataError(f"{source}: `datasets` takes the :: in its path for an archive; rename it.")
    if (path / "dataset_dict.json").is_file():
        path /= _split(source, split, json.loads((path / "dataset_dict.json").read_text(encoding="utf-8"))["splits"])
    if (path / "state.json").is_file():  # not by `load_from_disk`, whose caches lie beside the data
        listed = json.loads((path / "state.json").read_text(encoding="utf-8")).get("_data_files", [])
        names = [glob.escape(str(path.absolute() / file["filename"])) for file in listed]
        return load_dataset("arrow", data_files=names, split="train", streaming=streaming), []
    if (path / INDEX).is_file():
        listed = json.loads((path / INDEX).read_text(encoding="utf-8"))["files"]
        written = sorted(listed, key=lambda file: file["name"].startswith("train"))  # held-out documents first
        for file in written:
            if not (name := path / file["name"]).is_file() or name.stat().st_size != file["bytes"]:
                raise DataError(
                    f"{name}: is not the file of {file['bytes']:,} bytes that {INDEX} lists; tokenise again."
                )
        names = [glob.escape(str(path.absolute() / file["name"])) for file in written]
        part = load_dataset("parquet", data_files=names, split="train", streaming=streaming)
        return part, [file.name for file in _visible_files(path) if file.suffix != ".parquet" and file.parent == path]
    root = str(path.resolve())
    if (path.is_dir() or path.suffix in _COMPRESSED) and glob.escape(root) != root:
        told = "`datasets` takes [, * and ? in the path of a folder or of a compressed file for a pattern"
        raise DataError(f"{source}: {told}; rename it, or name a folder's files.")
    if path.is_file():
        if (found := _builder(path)) is None:
            raise DataError(f"{source}: expected a file that ends with one of {', '.join(_BUILDERS)}.")
        if not path.stat().st_size:
            raise DataError(f"{source}: is empty.")
        (builder, options), files, unread = found, {"train": [str(path.absolute())]}, list[str]()
    elif path.is_dir():
        made = load_dataset_builder(root)
        builder = type(made).__module__.rpartition(".")[2]
        options = {**_CELLS, "sep": made.config.sep} if builder == "csv" else {}
        files = {name: [str(file) for file in of_split] for name, of_split in made.config.data_files.items()}
        read = {os.path.realpath(file) for file in files[_split(source, split, files)]}
        unread = [str(file.relative_to(path)) for file in _visible_files(path) if os.path.realpath(file) not in read]
        unread = [name for name in unread if Path(name).stem.upper() != "README"]
    elif path.is_absolute() or source.startswith(".") or path.suffix[1:].lower() in _BUILDERS or source.count("/") > 1:
        raise DataError(f"{source}: there is no such file or folder.")
    else:
        name, _, configuration = source.partition(":")
        return load_dataset(name, configuration or None, split=split, streaming=streaming), []
    if builder == "text":
        options = {"sample_by": sample_by, "keep_linebreaks": sample_by == "document"}
    files = {name: [*map(glob.escape, of_split)] for name, of_split in files.items()}
    options = {**options, "data_files": files, "split": _split(source, split, files)}
    part = load_dataset(builder, streaming=streaming, **options)
    features = part.features if builder == "json" and not streaming else {}
    if mixed := [name for name, kind in features.items() if _mixed(kind)]:
        # Of values of several types `datasets` takes a text that is JSON, such as "42", for what it says.
        part = load_dataset(builder, features=Features({**features, **dict.fromkeys(mixed, Json())}), **options)
    return part, unread


def _mixed(kind: Any) -> bool:
    return "Json(" in str(kind)


def _split(source: str, split: str, splits: Collection[str]) -> str:
    if split not in splits:
        known = first_names([*map(str, splits)])
        raise DataError(f"{source}: has no split {split!r} but {known}; name one with --split.")
    return split


def _kept(columns: Collection[str], text: str | None, chats: bool, name: str) -> list[str]:
    """Those of a source's columns that are read; raises DataError if that would be none."""
    if not columns:
        raise DataError(f"{name}: is empty.")
    if text is None and "input_ids" in columns:
        return [each for each in _TOKENS if each in columns]
    if (text or "text") in columns:
        return [text or "text"]
    is_chat = {"messages", "conversations"} & {*columns} or {"prompt", "completion"} <= {*columns}
    if text is None and chats and is_chat:
        return [each for each in CHAT if each in columns]
    chat = ", `messages` (a list of `role` and `content`), or `prompt` and `completion`" if chats else ""
    told = f"has no column {text or 'text'!r} but {first_names(columns)}"
    raise DataError(f"{name}: {told}; expected text (--text-column){chat}.")


def _rows(part: Any, kept: Sequence[str], chosen: bool, source: str) -> Any:
    """The columns as `content` reads them: `text`, `chat`, or those of tokens."""
    if kept[0] == "input_ids":
        return part
    texts = chosen and isinstance((part.features or {}).get(kept[0], Value("string")), Value)
    if texts or (len(kept) == 1 and kept[0] not in CHAT):
        return part if kept[0] == "text" else part.rename_column(kept[0], "text")
    # In a table, each message has the keys of all, some empty; in JSON an empty one was written.
    given = {
        "source": source,
        "padded": not _mixed(part.features),
        "mixed": [name for name in ("prompt", "completion") if isinstance(part.features.get(name), Json)],
    }
    features = Features({"chat": Json()})
    return part.map(_as_chat, fn_kwargs=given, remove_columns=list(kept), features=features)


def _as_chat(row: dict[str, Any], source: str, padded: bool, mixed: Sequence[str]) -> dict[str, Any]:
    """What is said of a chat; `None` where nothing is."""
    chat = {name: value for name, value in row.items() if value is not None}
    if texts := [name for name in mixed if not isinstance(chat.get(name, []), list)]:
        raise DataError(f"{source}: some rows have a text as `{texts[0]}`, others messages; use a file for each.")
    if padded:
        chat = json.loads(json.dumps(chat, default=str), object_hook=_without_empty)
    said = chat.get("messages") or chat.get("conversations") or chat.get("completion")
    return {"chat": chat if said else None}


def _without_empty(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None or name == "content"}
