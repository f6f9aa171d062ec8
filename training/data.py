"""Training data: documents of files, saved datasets and Hub ids, and which of them are held out."""

import hashlib
import json
import math
import random
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from datasets import (
    Dataset,
    DatasetDict,
    Features,
    IterableDataset,
    Value,
    concatenate_datasets,
    load_dataset,
    load_from_disk,
)
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

_BUILDERS = {
    "txt": "text",
    "text": "text",
    "md": "text",
    "json": "json",
    "jsonl": "json",
    "ndjson": "json",
    "csv": "csv",
    "tsv": "tsv",  # the builder csv, with tabs
    "parquet": "parquet",
    "arrow": "arrow",
}
_COMPRESSED = {".gz", ".bz2", ".xz", ".zst"}
_FEW = 4  # documents that a source must be expected to have on either side, or it is cut
_STRETCHES = 8  # of a source that is cut are held out, of this many characters at least:
_STRETCH = 1000
#: Columns of chats, and of prompts with their completions; of both, either all texts or all lists of messages.
_CHAT_COLUMNS = (["messages"], ["prompt", "completion"])
_NOT_SOURCES = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "pydoc_data"}


class DataError(CheckpointError):
    """The data cannot be read or do not suffice; the message names the source and the way out."""


class Documents(dict[str, Dataset | IterableDataset]):
    """Source -> its documents; `notes` say which were cut."""

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
    """Source -> its documents, in order, as a column called `text`, of token ids called `input_ids`, or of chats.

    Where a source has too few documents for a share of them to be held out, its text is cut at line ends, and some of
    the parts are held out, as a column `held_out` says.

    Args:
        sources: files, folders (all files below that are of a known kind, or one of `Dataset.save_to_disk`), Hub ids,
            `owner/name` or `owner/name:configuration`, or `STANDARD_LIBRARY`.
        split: of Hub ids and saved datasets; files have none.
        sample_by: what a document of a plain text file is: "document" (the file), "paragraph" (until an empty line) or
            "line".
        chats: whether sources without `text_column` may have `messages`, or `prompt` and `completion`.
        held_out: the share that `pack_documents` will hold out.

    Raises:
        DataError: a source does not exist, cannot be read, is empty, or has no such column or split.
    """
    documents = Documents()
    for source in sources:
        if source == STANDARD_LIBRARY:
            documents[source] = (
                IterableDataset.from_generator(standard_library)
                if streaming
                else Dataset.from_list([*standard_library()])
            )
            continue
        with reading_source(source):
            parts = []
            for part in _load(source, split=split, sample_by=sample_by, streaming=streaming):
                columns = part.column_names or list(next(iter(part), {}))
                if not columns:
                    raise DataError(f"{source}: is empty.")
                if "input_ids" in columns:
                    parts.append(part.select_columns([name for name in ("input_ids", "held_out") if name in columns]))
                    continue
                if text_column not in columns:
                    chat = next((names for names in _CHAT_COLUMNS if chats and set(names) <= set(columns)), None)
                    if chat is None:
                        raise DataError(
                            f"{source}: has no column {text_column!r} but {first_names(columns)}; name one with "
                            "--text-column."
                        )
                    parts.append(part.select_columns(chat))
                    continue
                part = part.select_columns([text_column])
                parts.append(part if text_column == "text" else part.rename_column(text_column, "text"))
            documents[source] = concatenate_datasets(list(map(_joinable, parts))) if len(parts) > 1 else parts[0]
            if held_out:
                documents[source], note = _cut_if_few(documents[source], held_out)
                name = Path(source).name if Path(source).exists() else source  # reports are public
                documents.notes += [f"{name}: {note}"] if note else []
    return documents


def _cut_if_few(documents: Dataset | IterableDataset, share: float) -> tuple[Dataset | IterableDataset, str | None]:
    """The same documents, or parts of them and a note."""
    streaming = isinstance(documents, IterableDataset)
    enough, count, characters = math.ceil(_FEW / min(share, 1 - share)), 0, 0
    for row in documents:
        count, characters = count + 1, characters + len(checked_text(row))
        if count == enough or "input_ids" in row or "group" in row or not is_text(row):
            return documents, None
        if streaming and characters >= READ_AHEAD:
            break
    if not characters:
        return documents, None
    stretches = min(max(characters * share // _STRETCH, 1), _STRETCHES)
    settings = {"documents": documents, "period": characters / stretches, "share": share, "version": __version__}
    features = Features({"text": Value("string"), "held_out": Value("bool")})
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
        text = checked_text(row)
        while text:
            room = max(0, math.ceil((stretch + (share if held_out else 1)) * period) - seen)
            end = len(text)
            if room < end:
                end = text.find("\n", room, room + _STRETCH) + 1 or (end if end <= room + _STRETCH else room + _STRETCH)
            yield {"text": text[:end], "held_out": held_out}
            seen, text = seen + end, text[end:]
            if end >= room:
                stretch, held_out = stretch + (not held_out), not held_out


def _joinable(part: Dataset | IterableDataset) -> Dataset | IterableDataset:
    """`datasets` reads the texts of a CSV file as large_string, and joins them with no other string.

    Nor does it join streams whose Arrow tables differ at all: `map` makes rows of them.
    """
    features = part.features or Features()
    if features.get("text") == Value("large_string"):
        features = Features({"text": Value("string")})
    if isinstance(part, IterableDataset):
        return part.map(dict, features=features or None)
    return part if features == part.features else part.cast(features)


def training_texts(source: str, documents: Dataset | IterableDataset, held_out: float) -> Iterator[str]:
    """The texts of a source that `pack_documents` does not hold out."""
    with reading_source(source):
        for row in documents:
            if "input_ids" in row:
                raise DataError(
                    f"{source}: has token ids, and no text to train a tokenizer on; name the one that made them with "
                    "--tokenizer."
                )
            if (text := checked_text(row)) and not is_row_held_out(row, text, held_out):
                yield text


def is_row_held_out(row: Mapping[str, Any], text: str, share: float) -> bool:
    """Whether a document is held out: as `load_documents` has chosen, or by its group or its text."""
    chosen: bool | None = row.get("held_out")
    return is_held_out(row.get("group") or text, share) if chosen is None else chosen


def held_out_groups(documents: Mapping[str, Dataset], held_out: float) -> list[str] | None:
    """The group of each document that `pack_documents` holds out; `None` if each is held out by itself."""
    if not all("group" in part.column_names for part in documents.values()):
        return None
    rows = (row for part in documents.values() for row in part if row["text"])
    return [row["group"] for row in rows if is_held_out(row["group"], held_out)]


@contextmanager
def reading_source(source: str) -> Iterator[None]:
    """Turns what its reader raises, also long after a stream was opened, into a `DataError` that names the source."""
    try:
        yield
    except (DatasetsError, HfHubHTTPError, HFValidationError, OSError, ValueError) as error:
        detail = one_line(error.__cause__ or error)
        raise DataError(f"{source}: cannot be read as a file, a folder or a dataset of the Hub: {detail}") from error


def _load(source: str, *, split: str, sample_by: str, streaming: bool) -> Iterator[Dataset | IterableDataset]:
    path = Path(source).expanduser()
    if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
        saved = load_from_disk(str(path))
        if isinstance(saved, DatasetDict):
            if split not in saved:
                raise DataError(f"{source}: has no split {split!r} but {first_names(saved)}; name one with --split.")
            saved = saved[split]
        yield saved.to_iterable_dataset() if streaming else saved
    elif (path / INDEX).is_file():
        yield load_dataset("parquet", data_files=_token_files(path), split="train", streaming=streaming)
    elif path.exists():
        for builder, files in _files(path).items():
            options = {"text": {"sample_by": sample_by}, "tsv": {"sep": "\t"}}.get(builder, {})
            builder = "csv" if builder == "tsv" else builder
            yield load_dataset(builder, data_files=files, split="train", streaming=streaming, **options)
    elif path.is_absolute() or source.startswith(".") or _builder(path) is not None or source.count("/") > 1:
        raise DataError(f"{source}: there is no such file or folder.")
    else:
        name, _, configuration = source.partition(":")
        yield load_dataset(name, configuration or None, split=split, streaming=streaming)


def _token_files(folder: Path) -> list[str]:
    """The files of `resformer tokenize`, held-out documents first."""
    index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    files = [file for side in ("validation", "train") for file in index["files"] if file["name"].startswith(side)]
    for file in files:
        path = folder / file["name"]
        if not path.is_file() or path.stat().st_size != file["bytes"]:
            raise DataError(f"{path}: is not the file of {file['bytes']:,} bytes that {INDEX} lists; tokenise again.")
    return [str(folder / file["name"]) for file in files]


def _files(path: Path) -> dict[str, list[str]]:
    """Builder -> files, those of a folder in the order of their names."""
    files: dict[str, list[str]] = {}
    for file in [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file()):
        if (builder := _builder(file)) is not None:
            files.setdefault(builder, []).append(str(file))
    if files and not any(Path(file).stat().st_size for group in files.values() for file in group):
        raise DataError(f"{path}: is empty.")
    if not files:
        raise DataError(f"{path}: expected files of a kind that can be read: {', '.join(_BUILDERS)}.")
    return files


def _builder(path: Path) -> str | None:
    suffix = Path(path.stem).suffix if path.suffix in _COMPRESSED else path.suffix
    return _BUILDERS.get(suffix.removeprefix(".").lower())


def checked_text(row: Mapping[str, Any]) -> str:
    """The text of a document, empty where there is none; raises DataError if it is no text."""
    if (text := row.get("text")) is None:  # an empty cell; a document without text is left out
        return ""
    if not isinstance(text, str):
        raise DataError(
            f"The text column holds {one_line(repr(text), 60)}; expected text; name another with --text-column."
        )
    return text


def is_text(row: Mapping[str, Any]) -> bool:
    """Whether the row is no chat; a folder's files may have different columns."""
    return row.get("text") is not None or not {"messages", "completion"} & row.keys()
