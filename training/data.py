"""Training data: documents of files, saved datasets and Hub ids, and which of them are held out."""

import csv
import hashlib
import io
import json
import lzma
import math
import os
import platform
import random
import sysconfig
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TextIO

import pyarrow as pa
from datasets import Dataset, DatasetDict, Features, IterableDataset, List, Value, load_dataset, load_from_disk
from datasets.exceptions import DatasetsError
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from resformer.errors import CheckpointError, first_names, one_line
from resformer.version import __version__

#: The source that every machine has: the files of Python's standard library, about 11 MB.
STANDARD_LIBRARY = "standard-library"
#: The share of its modules that comparisons, the demo and `resformer analyze` hold out.
STANDARD_HELD_OUT = 0.1
#: What lists the files that `resformer tokenize` has written, in their folder.
INDEX = "index.json"
#: Characters of all streams together that are searched for held-out documents.
READ_AHEAD = 2**25

_KINDS = {
    **dict.fromkeys(("txt", "text", "md"), "text"),
    **dict.fromkeys(("json", "jsonl", "ndjson"), "json"),
    **{name: name for name in ("csv", "tsv", "parquet", "arrow")},
}
_TABLES = ("parquet", "arrow")
_DELIMITERS = {"csv": ",", "tsv": "\t"}
_COMPRESSED = {".gz", ".bz2", ".xz", ".zst"}
_BROKEN = (lzma.LZMAError, pa.ArrowException)
_FEW = 4  # documents that a source must be expected to have on either side, or it is cut
_STRETCHES = 8  # of a source that is cut are held out, of this many characters at least:
_STRETCH = 1000
#: What is read of a chat, or of a prompt with its completion; of both, either is a text or a list of messages.
_CHAT = ("messages", "prompt", "completion", "tools", "chat_template_kwargs")
_TEXT = Value("large_string")  # one may have more than 2 GB
_FEATURES = {"text": _TEXT, "chat": _TEXT, "input_ids": List(Value("int32")), "held_out": Value("bool")}  # chat: JSON
_NOT_SOURCES = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "pydoc_data"}


class DataError(CheckpointError):
    """The data cannot be read or do not suffice; the message names the source and the way out."""


class Documents(dict[str, Dataset | IterableDataset]):
    """Source -> its documents; `notes` say which were cut, and which files and columns are not read."""

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
    text_column: str = "text",
    sample_by: str = "document",
    streaming: bool = False,
    chats: bool = False,
    held_out: float = 0.0,
) -> Documents:
    """Source -> its documents, in order: rows that `content` reads.

    Where a source has too few documents for a share of them to be held out, its text is cut at line ends, and some of
    the parts are held out, as a column `held_out` says.

    Args:
        sources: files, folders (all files of a known kind, but no README; or one of `Dataset.save_to_disk` or
            `resformer tokenize`), Hub ids, `owner/name` or `owner/name:configuration`, or `STANDARD_LIBRARY`.
        chats: whether sources without `text_column` may have `messages`, or `prompt` and `completion`.
        held_out: the share that `pack_documents` will hold out.
    """
    documents = Documents()
    for source in sources:
        path = Path(source).expanduser()
        name = path.name if path.exists() else source  # reports are public
        with reading_source(source):
            part, unread = _load(source, path, split, streaming, text=text_column, chats=chats, sample_by=sample_by)
            if unread:
                documents.notes.append(f"{name}: not read: {first_names(unread)}")
            if held_out:
                part, note = _cut_if_few(part, held_out)
                documents.notes += [f"{name}: {note}"] if note else []
        documents[source] = part
    return documents


def _cut_if_few(documents: Dataset | IterableDataset, share: float) -> tuple[Dataset | IterableDataset, str | None]:
    """The same documents, or parts of them and a note."""
    streaming = isinstance(documents, IterableDataset)
    enough, count, characters = math.ceil(_FEW / min(share, 1 - share)), 0, 0
    for row in documents:
        document = content(row)
        count, characters = count + bool(document), characters + len(document)
        if count == enough or "group" in row or not isinstance(document, str):
            return documents, None
        if streaming and characters >= READ_AHEAD:
            break
    if not characters:
        return documents, None
    stretches = min(max(characters * share // _STRETCH, 1), _STRETCHES)
    settings = {"documents": documents, "period": characters / stretches, "share": share, "version": __version__}
    features = Features({"text": _TEXT, "held_out": Value("bool")})
    if streaming:
        note = "its documents are cut at line ends, since they are few, before some of the parts are held out"
        return IterableDataset.from_generator(_cut, gen_kwargs=settings, features=features), note
    parts = Dataset.from_generator(_cut, gen_kwargs=settings, features=features)
    cut = f"{count} document{' was' if count == 1 else 's were'} cut at line ends into {len(parts)} parts"
    return parts, f"{cut}, {sum(parts['held_out'])} of them held out" if len(parts) > count else None


def _cut(
    documents: Dataset | IterableDataset, period: float, share: float, version: str = ""
) -> Iterator[dict[str, Any]]:
    """Cuts documents so that of each `period` characters the first `share` is held out.

    A part ends at a line's end, or where a line goes on for long; each has a line at least.
    """
    seen, stretch, held_out = 0, 0, True
    for row in documents:
        text = content(row)
        while text:
            room = max(0, math.ceil((stretch + (share if held_out else 1)) * period) - seen)
            end = len(text)
            if room < end:
                end = text.find("\n", room, room + _STRETCH) + 1 or (end if end <= room + _STRETCH else room + _STRETCH)
            yield {"text": text[:end], "held_out": held_out}
            seen, text = seen + end, text[end:]
            if end >= room:
                stretch, held_out = stretch + (not held_out), not held_out


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
        return json.loads(row["chat"])
    text = row.get("text")
    if text is not None and not isinstance(text, str):
        raise DataError(f"The text column holds {one_line(repr(text), 60)}, no text; name another with --text-column.")
    return text or _chat(row) or ""


def has_chats(documents: Dataset) -> bool:
    """Whether some of the documents are no texts."""
    if "chat" in documents.column_names:
        return documents.data.column("chat").null_count < len(documents)
    return not {"messages", "completion"}.isdisjoint(documents.column_names)


def is_row_held_out(row: Mapping[str, Any], document: Any, share: float) -> bool:
    """Whether a document is held out: as `load_documents` has chosen, or by its group or its content."""
    if (chosen := row.get("held_out")) is not None:
        return chosen
    if isinstance(document, dict):
        document = json.dumps(document, sort_keys=True)  # what the data say, not what a template makes of it
    elif not isinstance(document, str):
        document = b"".join(int(token).to_bytes(4, "little") for token in document).decode("latin-1")
    return is_held_out(row.get("group") or document, share)


@contextmanager
def reading_source(source: str) -> Iterator[None]:
    """Turns what its reader raises, also long after a stream was opened, into a `DataError` that names the source."""
    try:
        yield
    except (DatasetsError, HfHubHTTPError, HFValidationError, OSError, ValueError) as error:
        if isinstance(error.__cause__, DataError):  # of a file, when `datasets` made rows of it
            raise error.__cause__ from None
        detail = one_line(error.__cause__ or error)
        raise DataError(f"{source}: cannot be read as a file, a folder or a dataset of the Hub: {detail}") from error


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


def _load(
    source: str, path: Path, split: str, streaming: bool, *, text: str, chats: bool, sample_by: str
) -> tuple[Dataset | IterableDataset, list[str]]:
    """The documents of a source, and the names of its files and columns that are not read."""
    part: Any
    unread: list[str] = []
    if source == STANDARD_LIBRARY:
        rows = IterableDataset.from_generator(standard_library)
        return rows if streaming else Dataset.from_list([*standard_library()]), unread
    if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
        part = load_from_disk(str(path))
        if isinstance(part, DatasetDict):
            if split not in part:
                raise DataError(f"{source}: has no split {split!r} but {first_names(part)}; name one with --split.")
            part = part[split]
        part = part.to_iterable_dataset() if streaming else part
    elif path.exists():
        files = visible = _token_files(path) if (path / INDEX).is_file() else _visible_files(path)
        files = [file for file in files if _kind(file) and (file == path or file.stem.upper() != "README")]
        if not files:
            raise DataError(f"{path}: expected files of a kind that can be read: {', '.join(_KINDS)}.")
        unread = [str(file.relative_to(path)) for file in visible if file not in files]
        samples: Iterator[Any] = (next(_rows(file, sample_by, list), {}) for file in files if file.stat().st_size)
        columns: Any = next(filter(None, samples), {})
        columns = columns if isinstance(columns, dict) else {"text": columns}
        kept = _kept(columns, text, chats, str(path))
        if kept[0] != "input_ids" or {_kind(file) for file in files} != {"parquet"}:
            features = Features({name: _FEATURES[name] for name in (kept if "input_ids" in kept else ("text", "chat"))})
            stamps = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
            settings = {"files": stamps, "text": text, "chats": chats, "sample_by": sample_by, "version": __version__}
            generate: Any = IterableDataset.from_generator if streaming else Dataset.from_generator
            # `datasets` would cast each row of a stream by itself, in most of the time that reading takes.
            part = generate(_read, gen_kwargs=settings, features=None if streaming else features)
            return part, [*unread, *(set(columns) - set(kept))]
        paths = [str(file) for file in files]
        part = load_dataset("parquet", data_files=paths, columns=kept, split="train", streaming=streaming)
    elif path.is_absolute() or source.startswith(".") or _kind(path) or source.count("/") > 1:
        raise DataError(f"{source}: there is no such file or folder.")
    else:
        name, _, configuration = source.partition(":")
        part = load_dataset(name, configuration or None, split=split, streaming=streaming)
    columns = part.column_names or list(next(iter(part), {}))
    kept = _kept(columns, text, chats, source)
    part = part.select_columns(kept)
    return part.rename_column(text, "text") if kept == [text] != ["text"] else part, [*unread, *{*columns} - {*kept}]


def _token_files(folder: Path) -> list[Path]:
    """The files of `resformer tokenize`, held-out documents first."""
    index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    files = [file for side in ("validation", "train") for file in index["files"] if file["name"].startswith(side)]
    for file in files:
        path = folder / file["name"]
        if not path.is_file() or path.stat().st_size != file["bytes"]:
            raise DataError(f"{path}: is not the file of {file['bytes']:,} bytes that {INDEX} lists; tokenise again.")
    return [folder / file["name"] for file in files]


def _kept(columns: Collection[str], text: str, chats: bool, name: str) -> list[str]:
    """Those of a source's columns that are read; raises DataError if that would be none."""
    if not columns:
        raise DataError(f"{name}: is empty.")
    if "input_ids" in columns:
        return [each for each in ("input_ids", "held_out") if each in columns]
    if text in columns:
        return [text]
    if chats and ("messages" in columns or {"prompt", "completion"} <= set(columns)):
        return [each for each in _CHAT if each in columns]
    chat = ", `messages` (a list of `role` and `content`), or `prompt` and `completion`" if chats else ""
    raise DataError(f"{name}: has no column {text!r} but {first_names(columns)}; expected text (--text-column){chat}.")


def _read(
    files: list[tuple[str, int, int]], text: str, chats: bool, sample_by: str, version: str
) -> Iterator[dict[str, Any]]:
    """The rows of files, for `content`; errors name the file. `datasets` names its cache after the arguments."""
    for name, _, _ in files:
        path, keep = Path(name), partial(_kept, text=text, chats=chats, name=name)
        try:
            for row in _rows(path, sample_by, keep):
                row = row if isinstance(row, dict) else {"text": row}  # JSON may be a list of texts
                kept = keep(row)
                if kept[0] == "input_ids":
                    yield {each: row[each] for each in kept}
                elif kept == [text]:
                    document = str(content({"text": row[text]}))
                    document.encode()  # raises for half of a pair of surrogates, which JSON can have
                    yield {"text": document, "chat": None}
                else:
                    yield {"text": None, "chat": json.dumps(_chat(row, table=_kind(path) in _TABLES))}
        except (OSError, EOFError, ValueError, csv.Error, DatasetsError, DataError, *_BROKEN) as error:
            said = one_line(error.__cause__ or error)
            raise DataError(said if said.startswith(name) else f"{name}: {said}") from error


def _rows(path: Path, sample_by: str, keep: Callable[[Collection[str]], list[str]]) -> Iterator[Any]:
    """The rows of a file as it has them: `datasets` would have all files agree on the types of all columns."""
    if (kind := _kind(path)) in _TABLES:
        table = load_dataset(kind, data_files=str(path), split="train", streaming=True)
        yield from table.select_columns(keep(table.column_names))
        return
    # pyarrow decompresses by the suffix, and raises where a file was cut off.
    opened: Any = lzma.open(path) if path.suffix == ".xz" else pa.input_stream(str(path))  # noqa: SIM115
    with io.TextIOWrapper(opened, encoding="utf-8-sig", newline="" if kind in _DELIMITERS else None) as lines:
        if kind in _DELIMITERS:
            csv.field_size_limit(2**31 - 1)
            for row in csv.DictReader(lines, delimiter=_DELIMITERS[kind]):
                if None in row:  # pandas would take the first cell for a number of the row
                    raise ValueError(f"a row has more cells than there are columns: {one_line(row, 80)}")
                yield row
        elif kind == "text":
            yield from ({"text": text} for text in _texts(lines, sample_by))
        elif (first := next(filter(str.strip, lines), "")).lstrip().startswith("["):
            yield from json.loads(first + lines.read())
        else:
            for number, line in enumerate(chain([first], lines), start=1):
                try:
                    if line.strip():
                        yield json.loads(line)
                except ValueError as error:
                    raise ValueError(f"line {number}: {error}") from None


def _texts(lines: TextIO, sample_by: str) -> Iterator[str]:
    text = lines.read() if sample_by == "document" else ""
    if sample_by == "line":
        yield from (line.rstrip("\n") for line in lines)
    while more := lines.read(2**20):
        *whole, text = (text + more).split("\n\n")
        yield from filter(None, whole)
    if text:
        yield text


def _kind(path: Path) -> str:
    """Of what kind a file is by its name; empty: of none that can be read."""
    suffix = Path(path.stem).suffix if path.suffix in _COMPRESSED else path.suffix
    return _KINDS.get(suffix.removeprefix(".").lower(), "")


def _chat(row: Mapping[str, Any], table: bool = True) -> dict[str, Any]:
    """What is read of a chat; empty where nothing is said. In a table, each message has the keys of all, some empty."""
    chat = {name: row[name] for name in _CHAT if row.get(name) is not None}
    if not chat.get("messages") and chat.get("completion") is None:
        return {}
    if not table:
        return chat
    stripped = json.dumps(chat, default=str)
    return json.loads(stripped, object_hook=lambda each: {name: x for name, x in each.items() if x is not None})
