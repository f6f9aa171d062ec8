"""Training data: sources of any kind that `datasets` reads, a held-out split by content, packing into blocks."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from datasets import Dataset, DatasetDict, IterableDataset, concatenate_datasets, load_dataset, load_from_disk
from datasets.exceptions import DatasetsError
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from transformers import PreTrainedTokenizerBase

from resformer.errors import CheckpointError, brief, listed

__all__ = ["Blocks", "DataError", "PackedBlocks", "is_held_out", "load_documents", "pack_documents"]

_BUILDERS = {
    "txt": "text",
    "text": "text",
    "md": "text",
    "json": "json",
    "jsonl": "json",
    "ndjson": "json",
    "csv": "csv",
    "tsv": "csv",
    "parquet": "parquet",
    "arrow": "arrow",
}
_COMPRESSED = {".gz", ".bz2", ".xz", ".zst"}
_SHUFFLED = 1024  # blocks of a stream that are shuffled among one another


class DataError(CheckpointError):
    """The data cannot be read or do not suffice; the message names the source and the way out."""


class PackedBlocks(torch.utils.data.Dataset):
    """Blocks of `block` tokens, read from a memory-mapped column of token ids where they lie.

    Item i is `{"input_ids": ids, "labels": ids}`, int64 of shape (block,).
    """

    def __init__(self, tokens: pa.ChunkedArray, block: int, most: int | None = None):
        self.tokens, self.block = tokens, block
        self.length = len(tokens) // block if most is None else min(len(tokens) // block, most)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < self.length:
            raise IndexError(f"Block {index} of {self.length}.")
        ids = torch.from_numpy(self.tokens.slice(index * self.block, self.block).to_numpy().astype("int64"))
        return {"input_ids": ids, "labels": ids}


@dataclass(frozen=True)
class Blocks:
    """What is trained on and what is held out."""

    train: PackedBlocks | IterableDataset
    held_out: PackedBlocks


def is_held_out(text: str, share: float) -> bool:
    """Whether a document is held out. Its text alone decides: no document changes sides when others are added."""
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "replace")).digest()[:8]) < share * 2**64


def load_documents(
    sources: Sequence[str],
    *,
    split: str = "train",
    text_column: str = "text",
    sample_by: str = "paragraph",
    streaming: bool = False,
) -> Dataset | IterableDataset:
    """The documents of all sources, in order, as one column called `text`.

    Args:
        sources: files, folders (all files below that are of a known kind, or one of `Dataset.save_to_disk`), or Hub
            ids, `owner/name` or `owner/name:configuration`.
        split: of Hub ids and saved datasets; files have none.
        sample_by: what a document of a plain text file is: "paragraph" (until an empty line), "line" or "document".

    Raises:
        DataError: a source does not exist, cannot be read, is empty, or has no such column or split.
    """
    parts = []
    for source in sources:
        for part in _load(source, split=split, sample_by=sample_by, streaming=streaming):
            columns = part.column_names or list(next(iter(part), {}))
            if not columns:
                raise DataError(f"{source}: is empty.")
            if text_column not in columns:
                raise DataError(
                    f"{source}: has no column {text_column!r} but {listed(columns)}; name one with --text-column."
                )
            part = part.select_columns([text_column])
            parts.append(part if text_column == "text" else part.rename_column(text_column, "text"))
    return concatenate_datasets(parts) if len(parts) > 1 else parts[0]


def _load(source: str, *, split: str, sample_by: str, streaming: bool) -> Iterator[Dataset | IterableDataset]:
    path = Path(source).expanduser()
    try:
        if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
            saved = load_from_disk(str(path))
            if isinstance(saved, DatasetDict):
                if split not in saved:
                    raise DataError(f"{source}: has no split {split!r} but {listed(saved)}; name one with --split.")
                saved = saved[split]
            yield saved.to_iterable_dataset() if streaming else saved
        elif path.exists():
            for builder, files in _files(path).items():
                options = {"sample_by": sample_by} if builder == "text" else {}
                if builder == "csv" and any(".tsv" in Path(file).suffixes for file in files):
                    options["sep"] = "\t"
                yield load_dataset(builder, data_files=files, split="train", streaming=streaming, **options)
        elif path.is_absolute() or source.startswith(".") or _builder(path) is not None or source.count("/") > 1:
            raise DataError(f"{source}: there is no such file or folder.")
        else:
            name, _, configuration = source.partition(":")
            yield load_dataset(name, configuration or None, split=split, streaming=streaming)
    except (DatasetsError, HfHubHTTPError, HFValidationError, OSError, ValueError) as error:
        detail = brief(error.__cause__ or error)
        raise DataError(f"{source}: cannot be read as a file, a folder or a dataset of the Hub: {detail}") from error


def _files(path: Path) -> dict[str, list[str]]:
    """Builder -> files, those of a folder in the order of their names."""
    found = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    files: dict[str, list[str]] = {}
    for file in found:
        if (builder := _builder(file)) is not None:
            files.setdefault(builder, []).append(str(file))
    if files and not any(Path(file).stat().st_size for group in files.values() for file in group):
        raise DataError(f"{path}: is empty.")
    if not files:
        raise DataError(f"{path}: expected files of a kind that can be read: {', '.join(_BUILDERS)}.")
    return files


def _builder(path: Path) -> str | None:
    kind = Path(path.stem).suffix if path.suffix in _COMPRESSED else path.suffix
    return _BUILDERS.get(kind.removeprefix(".").lower())


def pack_documents(
    documents: Dataset | IterableDataset,
    tokenizer: PreTrainedTokenizerBase,
    *,
    block: int,
    held_out: float,
    held_out_blocks: int,
    seed: int = 0,
) -> Blocks:
    """Packs documents, each ended by the end-of-sequence token, back to back; of either side the tail alone is lost.

    Tokens of a `Dataset` are cached by `datasets` and read from the disk; an `IterableDataset` is tokenised as it
    comes, after one look for the held-out blocks.

    Args:
        held_out: the share of documents that is held out, by `is_held_out`.
        held_out_blocks: the most blocks that are made of them, the first ones.
        seed: of the order in which a stream's blocks are trained on.

    Raises:
        DataError: either side does not fill one block.
    """
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    tokenizer("", add_special_tokens=False)  # sets it up: from here on its hash, and so the cache's name, stays
    options = {"tokenizer": tokenizer, "end": end, "share": held_out}
    if isinstance(documents, IterableDataset):
        ids: list[int] = []
        for batch in documents.iter(batch_size=64):
            for tokens in _tokenise(batch["text"], **options, wanted=True)["input_ids"]:
                ids += tokens
            if len(ids) >= held_out_blocks * block:
                break
        held = PackedBlocks(pa.chunked_array([pa.array(ids, pa.int32())]), block, held_out_blocks)
        stream = IterableDataset.from_generator(
            _stream, gen_kwargs={"documents": documents, "block": block, "options": options}
        )
        train = stream.shuffle(seed=seed, buffer_size=_SHUFFLED)
        _check(held, "held-out")
        if next(iter(stream), None) is None:
            raise DataError(f"The stream does not fill a block of {block} tokens; use more text or a smaller --block.")
        return Blocks(train, held)
    sides = []
    for wanted, side in ((False, "training"), (True, "held-out")):
        # No processes: the tokenizer's own threads use all cores.
        tokens = documents.map(
            _tokenise,
            input_columns="text",
            fn_kwargs={**options, "wanted": wanted},
            batched=True,
            remove_columns=documents.column_names,
            desc=f"Tokenising, {side}",
        )
        column = tokens.data.column("input_ids") if len(tokens) else pa.chunked_array([], pa.list_(pa.int32()))
        flat = pa.chunked_array([chunk.flatten() for chunk in column.chunks], column.type.value_type)
        sides.append(PackedBlocks(flat, block, held_out_blocks if wanted else None))
        _check(sides[-1], side)
    return Blocks(*sides)


def _tokenise(
    texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, end: list[int], share: float, wanted: bool
) -> dict[str, list[list[int]]]:
    """The token ids of those texts that are on the `wanted` side of the split."""
    for text in texts:
        if not isinstance(text, str):
            raise DataError(
                f"The text column holds {brief(repr(text), 60)}; expected text; name another with --text-column."
            )
    chosen = [text for text in texts if text and is_held_out(text, share) == wanted]
    ids = tokenizer(chosen, add_special_tokens=False, verbose=False)["input_ids"] if chosen else []
    return {"input_ids": [tokens + end for tokens in ids]}


def _stream(documents: IterableDataset, block: int, options: dict[str, Any]) -> Iterator[dict[str, list[int]]]:
    pending: list[int] = []
    for batch in documents.iter(batch_size=64):
        for tokens in _tokenise(batch["text"], **options, wanted=False)["input_ids"]:
            pending += tokens
        whole = len(pending) - len(pending) % block
        for start in range(0, whole, block):
            ids = pending[start : start + block]
            yield {"input_ids": ids, "labels": ids}
        pending = pending[whole:]


def _check(blocks: PackedBlocks, side: str) -> None:
    if not len(blocks):
        way = "a larger --held-out, " if side == "held-out" else ""
        raise DataError(
            f"The {side} documents have {len(blocks.tokens):,} tokens, too few for one block of {blocks.block}; "
            f"use more text, {way}a smaller --block, or shorter documents (--sample-by line)."
        )
