"""Documents to parquet files of token ids: more than memory holds, in several processes, resumed where it stopped.

The sources are read as for training; datatrove would bring its own readers, whose documents would be other ones.
"""

import json
import os
import sys
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from resformer.errors import CheckpointError, first_names
from resformer.files import check_apart, locked, replace_text, replacing, writing
from resformer.record import file_digest
from resformer.training.data import INDEX, MASKS, DataError, load_documents, reading_source, source_digest
from resformer.training.options import TokenizeOptions, read_begun, refuse_other
from resformer.training.packing import document_ends, spelt_specials, tokenise
from resformer.training.tokenizers import TOKENIZER, check_tokens, load_tokenizer, make_tokenizer, save_tokenizer

_LOCK = "tokenize.lock"
_BATCH = 64  # documents that a process takes at a time
_SCHEMA = pa.schema({"input_ids": pa.list_(pa.int32()), "held_out": pa.bool_()})
_SIDES = {"train": False, "validation": True}

_encode: Any = None  # `tokenise` of a worker


def tokenize(options: TokenizeOptions) -> dict[str, Any]:
    """Writes `train-*.parquet`, `validation-*.parquet`, the tokenizer and, at the end, `index.json`; returns that.

    A row is a document with its end marks: `input_ids`, and `held_out`. After each file, the place of the reader is
    written to `plan.json`. A run that was stopped goes on there; the files are those of a run that was not.
    """
    output, record = Path(options.output), Path(options.output, "plan.json")
    check_apart(output, *options.data, options.tokenizer)
    with locked(output / _LOCK, busy=f"{output}: another process is writing it."):
        plan = {name: value for name, value in asdict(options).items() if name not in ("output", "workers")}
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
            _write(options, state, record)
        index = {
            **plan,
            "data": [Path(source).name if Path(source).exists() else source for source in options.data],
            "vocabulary": len(tokenizer),
        }
        for side in _SIDES:
            files = [file for file in state["files"] if file["name"].startswith(side)]
            index[side] = {what: sum(file[what] for file in files) for what in ("documents", "tokens", "bytes")}
        index["files"] = state["files"]
        replace_text(output / INDEX, json.dumps(index, indent=2) + "\n")
        return index


def _begin(options: TokenizeOptions) -> PreTrainedTokenizerBase:
    """Writes the tokenizer."""
    output = Path(options.output)
    if any(path.name not in (_LOCK, TOKENIZER) for path in output.iterdir()):
        raise CheckpointError(f"{output}: is not empty, and was not written by `resformer tokenize`.")
    documents = load_documents(options.data, **options.reading, streaming=True)
    tokenizer = make_tokenizer(options.tokenizer, documents, options.held_out)
    check_tokens(options.data, tokenizer)
    for note in [*documents.notes, *([] if options.parse_special else spelt_specials(documents, tokenizer))]:
        tqdm.write(note, file=sys.stderr)
    with replacing(output / TOKENIZER, made_by="tokenize", force=True) as folder:
        save_tokenizer(tokenizer, folder)
    return tokenizer


def _write(options: TokenizeOptions, state: dict[str, Any], record: Path) -> None:
    """Writes the files that are not written yet; a file ends with the batch that fills it."""
    waiting: dict[str, list[pa.Table]] = {side: [_SCHEMA.empty_table()] for side in _SIDES}

    def finish(**more: Any) -> None:
        number = len(state["files"])
        for side, tables in waiting.items():
            if len(table := pa.concat_tables(tables)):
                state["files"].append(_write_file(record.with_name(f"{side}-{number:05}.parquet"), table))
            del tables[1:]
        state.update(more)
        replace_text(record, json.dumps(state, indent=2))

    with tqdm(unit="token", unit_scale=True, initial=sum(file["tokens"] for file in state["files"])) as bar:
        tokens = 0
        for tables, reader in _encoded(options, state["reader"]):
            for side, table in tables.items():
                waiting[side].append(table)
                tokens += (count := _tokens(table))
                bar.update(count)
            if tokens >= options.tokens_per_file:
                tokens = 0
                finish(reader=reader)
        finish(done=True)


def _tokens(table: pa.Table) -> int:
    return pc.sum(pc.list_value_length(table["input_ids"])).as_py() or 0


def _write_file(path: Path, table: pa.Table) -> dict[str, Any]:
    """Writes a parquet file, under another name until it is whole; returns what `index.json` has of it."""
    partial = path.with_name(f".{path.stem}.partial")
    with writing(path):
        pq.write_table(table, partial, compression="zstd")
        os.replace(partial, path)
    sizes = {"documents": len(table), "tokens": _tokens(table), "bytes": path.stat().st_size}
    return {"name": path.name, **sizes, "sha256": file_digest(path)}


def _encoded(options: TokenizeOptions, start: Any) -> Iterator[tuple[dict[str, pa.Table], Any]]:
    """Tables of the batches, in order, each with the state of the reader after it; few are in work at a time."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a process uses one core
    arguments = (str(Path(options.output) / TOKENIZER), options.held_out, options.parse_special)
    pool: Executor = ThreadPoolExecutor(1, initializer=_prepare, initargs=arguments)
    if options.workers > 1:
        pool = ProcessPoolExecutor(options.workers, get_context("spawn"), _prepare, arguments)
    batches = _read(options, start)
    results: Iterator[tuple[dict[str, pa.Table], Any]] = iter(())
    with pool:
        while some := [*islice(batches, 4 * options.workers)]:
            tables = pool.map(_tables, (batch for batch, _ in some))
            yield from results  # of those before, while these are in work
            results = zip(tables, (reader for _, reader in some), strict=True)
        yield from results


def _read(options: TokenizeOptions, start: Any) -> Iterator[tuple[dict[str, list[Any]], Any]]:
    """Batches of documents, with the state after each: the number of the source, and its reader's."""
    first, place = start or (0, None)
    sources = load_documents(options.data, **options.reading, streaming=True)
    for number, (source, documents) in enumerate(sources.items()):
        if number < first:
            continue
        if number == first and place is not None:
            documents.load_state_dict(place)
        with reading_source(source):
            for batch in documents.iter(batch_size=_BATCH):
                if marks := {"labels", *MASKS} & batch.keys():
                    told = f"{source}: has {first_names(marks)}, and only tokens that are all learned are written"
                    raise DataError(f"{told}; give it to `finetune` as it is, or drop these columns.")
                yield batch, (number, documents.state_dict())


def _prepare(tokenizer: str, share: float, parse_special: bool) -> None:
    global _encode
    loaded = load_tokenizer(tokenizer, None, "tokenise into another folder")
    ends: dict[str, Any] = document_ends(loaded)
    _encode = partial(tokenise, tokenizer=loaded, share=share, parse_special=parse_special, **ends)


def _tables(batch: dict[str, list[Any]]) -> dict[str, pa.Table]:
    """Of a batch, the table of each side."""
    tables = {}
    for side, held_out in _SIDES.items():
        ids = _encode(batch, wanted=held_out)["input_ids"]
        tables[side] = pa.table({"input_ids": ids, "held_out": [held_out] * len(ids)}, schema=_SCHEMA)
    return tables
