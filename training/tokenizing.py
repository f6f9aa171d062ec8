"""Documents to parquet files of token ids: more than memory holds, resumed where it stopped.

The sources are read as for training; datatrove would bring its own readers, whose documents would be other ones.
"""

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from resformer.errors import CheckpointError, OutputError
from resformer.files import check_apart, locked, replace_text, replacing, writing
from resformer.record import file_digest
from resformer.training.data import INDEX, Documents, load_documents, reading_source, source_digest
from resformer.training.options import TokenizeOptions, read_begun, refuse_other
from resformer.training.packing import document_ends, spelt_specials, tokenise
from resformer.training.tokenizers import load_tokenizer, make_tokenizer, save_tokenizer

#: The folder of the tokenizer in the output.
TOKENIZER = "tokenizer"

_LOCK = "tokenize.lock"
_BATCH = 256  # documents that the tokenizer's threads share at a time
_SCHEMA = pa.schema({"input_ids": pa.list_(pa.int32()), "held_out": pa.bool_()})
_SIDES = {"train": False, "validation": True}


def tokenize(options: TokenizeOptions) -> dict[str, Any]:
    """Writes `train-*.parquet`, `validation-*.parquet`, the tokenizer and, at the end, `index.json`; returns that.

    A row is a document with its end marks: `input_ids`, and `held_out`. After each file, the place of the reader is
    written to `plan.json`. A run that was stopped goes on there; the files are those of a run that was not.
    """
    output, record = Path(options.output), Path(options.output, "plan.json")
    check_apart(output, *options.data, options.tokenizer)
    with locked(output / _LOCK) as free:
        if not free:
            raise OutputError(f"{output}: another process is writing it.")
        plan = {name: value for name, value in asdict(options).items() if name != "output"}
        # Of a changed source, documents would be read twice, and others not at all.
        digests = {f"digest of {source}": source_digest(source) for source in options.data}
        if record.is_file():
            state = read_begun(output, record.name)
            refuse_other(output, state["plan"], {**plan, **digests}, "corpus")
            tokenizer = load_tokenizer(output / TOKENIZER, None, "give another folder")
        else:
            tokenizer = _begin(options)
            state = {"plan": {**plan, **digests}, "files": [], "reader": None, "done": False}
            replace_text(record, json.dumps(state, indent=2))
        if not state["done"]:
            with writing(output):
                _write(options, tokenizer, state, record)
        index = {
            **plan,
            "data": [Path(source).name if Path(source).exists() else source for source in options.data],
            "vocabulary": len(tokenizer),
            **{side: _sums(state["files"], side) for side in _SIDES},
            "files": state["files"],
        }
        replace_text(output / INDEX, json.dumps(index, indent=2) + "\n")
        return index


def _begin(options: TokenizeOptions) -> PreTrainedTokenizerBase:
    """Writes the tokenizer."""
    output = Path(options.output)
    if any(path.name not in (_LOCK, TOKENIZER) for path in output.iterdir()):
        raise CheckpointError(f"{output}: is not empty, and was not written by `resformer tokenize`.")
    documents = _documents(options)
    tokenizer = make_tokenizer(options.tokenizer, documents, options.held_out)
    for note in [*documents.notes, *([] if options.parse_special else spelt_specials(documents, tokenizer))]:
        tqdm.write(note, file=sys.stderr)
    with replacing(output / TOKENIZER, made_by="tokenize", force=True) as folder:
        save_tokenizer(tokenizer, folder)
    return tokenizer


def _documents(options: TokenizeOptions) -> Documents:
    return load_documents(options.data, **options.reading, streaming=True, held_out=options.held_out)


def _write(options: TokenizeOptions, tokenizer: PreTrainedTokenizerBase, state: dict[str, Any], record: Path) -> None:
    """Writes the files that are not written yet; a file ends with the batch that fills it."""
    settings: dict[str, Any] = {"tokenizer": tokenizer, "share": options.held_out, **document_ends(tokenizer)}
    encode: Any = partial(tokenise, parse_special=options.parse_special, **settings)
    writers: dict[str, _Writer] = {}
    bar = tqdm(unit="token", unit_scale=True, initial=sum(file["tokens"] for file in state["files"]))

    def finish(**more: Any) -> None:
        state["files"] += [writer.close() for writer in writers.values()]
        state.update(more)
        replace_text(record, json.dumps(state, indent=2))
        writers.clear()

    for batch, reader in _read(options, state["reader"]):
        for side, held_out in _SIDES.items():
            if documents := encode(batch, wanted=held_out)["input_ids"]:
                if side not in writers:
                    writers[side] = _Writer(record.with_name(f"{side}-{len(state['files']):05}.parquet"))
                writers[side].write(documents, held_out)
                bar.update(sum(map(len, documents)))
        if sum(writer.tokens for writer in writers.values()) >= options.tokens_per_file:
            finish(reader=reader)
    finish(done=True)
    bar.close()


class _Writer:
    """A parquet file, under another name until it is whole."""

    def __init__(self, path: Path):
        self.path, self.partial = path, path.with_name(f".{path.stem}.partial")
        self.writer = pq.ParquetWriter(self.partial, _SCHEMA, compression="zstd")
        self.documents = self.tokens = 0

    def write(self, documents: list[list[int]], held_out: bool) -> None:
        sides = [held_out] * len(documents)
        self.writer.write_table(pa.table({"input_ids": documents, "held_out": sides}, schema=_SCHEMA))
        self.documents += len(documents)
        self.tokens += sum(map(len, documents))

    def close(self) -> dict[str, Any]:
        self.writer.close()
        os.replace(self.partial, self.path)
        sizes = {"documents": self.documents, "tokens": self.tokens, "bytes": self.path.stat().st_size}
        return {"name": self.path.name, **sizes, "sha256": file_digest(self.path)}


def _sums(files: list[dict[str, Any]], side: str) -> dict[str, int]:
    of_side = [file for file in files if file["name"].startswith(side)]
    return {what: sum(file[what] for file in of_side) for what in ("documents", "tokens", "bytes")}


def _read(options: TokenizeOptions, start: Any) -> Iterator[tuple[dict[str, list[Any]], Any]]:
    """Batches of documents, with the state after each: the number of the source, and its reader's."""
    first, place = start or (0, None)
    for number, (source, documents) in enumerate(_documents(options).items()):
        if number < first:
            continue
        if number == first and place is not None:
            documents.load_state_dict(place)
        with reading_source(source):
            for batch in documents.iter(batch_size=_BATCH):
                yield batch, (number, documents.state_dict())
