"""Documents to parquet files of token ids: more than memory holds, in several processes, resumed where it stopped.

`datasets` reads and splits the sources, as it does for training; datatrove would bring a second set of readers, whose
documents would be other ones.
"""

import json
import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from datasets.distributed import split_dataset_by_node
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from resformer.errors import CheckpointError, OutputError
from resformer.files import check_apart, locked, replace_text, replacing, writing
from resformer.record import file_digest
from resformer.training.data import INDEX, load_documents, reading_source
from resformer.training.options import TokenizeOptions, check_same
from resformer.training.packing import document_ends, tokenise
from resformer.training.tokenizers import load_tokenizer, make_tokenizer

#: The folder of the tokenizer in the output.
TOKENIZER = "tokenizer"

_BATCH = 64  # documents that a process takes at a time
_SCHEMA = pa.schema({"input_ids": pa.list_(pa.int32()), "held_out": pa.bool_()})
_SIDES = {"train": False, "validation": True}

_encode: Any = None  # `tokenise` of a worker


def tokenize(options: TokenizeOptions) -> dict[str, Any] | None:
    """Writes `train-*.parquet`, `validation-*.parquet`, the tokenizer and, when all parts are done, `index.json`.

    A row is a document with its end marks: `input_ids`, and `held_out`. After each file, the place of the reader is
    written to `part-I-of-N.json`. A run that was stopped goes on there; the files are those of a run that was not.

    Returns:
        What is in `index.json`; `None`: other parts are not done.
    """
    output, (part, parts) = Path(options.output), options.part
    check_apart(output, *options.data, options.tokenizer)
    record = output / f"part-{part:05}-of-{parts:05}.json"
    with locked(record.with_suffix(".lock")) as free:
        if not free:
            raise OutputError(f"{record}: another process is writing this part.")
        plan = {name: value for name, value in asdict(options).items() if name not in ("output", "workers", "shard")}
        plan["parts"] = parts
        with locked(output / "begin.lock", wait=True):
            tokenizer = _begun(options, plan)
        state = json.loads(record.read_text()) if record.is_file() else {"files": [], "reader": None, "done": False}
        if not state["done"]:
            _write_part(options, tokenizer, record, state)
        return _index(output, plan, tokenizer)


def _begun(options: TokenizeOptions, plan: dict[str, Any]) -> PreTrainedTokenizerBase:
    """The tokenizer of the output, which is begun if it is not; refuses an output that began otherwise."""
    output = Path(options.output)
    record = output / "plan.json"
    if record.is_file():
        check_same(record, plan, "corpus")
        return load_tokenizer(output / TOKENIZER, None, "give another folder")
    if any(path.suffix != ".lock" and path.name != TOKENIZER for path in output.iterdir()):
        raise CheckpointError(f"{output}: is not empty, and was not written by `resformer tokenize`.")
    tokenizer = make_tokenizer(options.tokenizer, _documents(options), options.held_out)
    with replacing(output / TOKENIZER, made_by="tokenize", force=True) as folder:
        tokenizer.save_pretrained(folder)
    replace_text(record, json.dumps(plan, indent=2))
    return tokenizer


def _documents(options: TokenizeOptions) -> Any:
    return load_documents(options.data, **options.reading, streaming=True, held_out=options.held_out)


def _write_part(
    options: TokenizeOptions, tokenizer: PreTrainedTokenizerBase, record: Path, state: dict[str, Any]
) -> None:
    """Writes the files that are not written yet; a file ends with the batch that fills it."""
    writers: dict[str, _Writer] = {}
    bar = tqdm(unit="token", unit_scale=True, initial=sum(file["tokens"] for file in state["files"]))

    def finish(reader: Any, done: bool) -> None:
        state["files"] += [writer.close() for writer in writers.values()]
        state.update(reader=reader, done=done)
        replace_text(record, json.dumps(state))
        writers.clear()

    for tables, reader in _encoded(options, tokenizer, state["reader"]):
        for side, table in tables.items():
            if len(table):
                if side not in writers:
                    writers[side] = _Writer(record.parent, f"{side}-{options.part[0]:05}-{len(state['files']):05}")
                writers[side].write(table)
                bar.update(writers[side].added)
        if sum(writer.tokens for writer in writers.values()) >= options.tokens_per_file:
            finish(reader, done=False)
    finish(None, done=True)
    bar.close()


class _Writer:
    """A parquet file, under another name until it is whole."""

    def __init__(self, folder: Path, name: str):
        self.path, self.partial = folder / f"{name}.parquet", folder / f".{name}.partial"
        with writing(self.path):
            self.writer = pq.ParquetWriter(self.partial, _SCHEMA, compression="zstd")
        self.documents = self.tokens = self.added = 0

    def write(self, table: pa.Table) -> None:
        with writing(self.path):
            self.writer.write_table(table)
        self.added = len(table["input_ids"].combine_chunks().flatten())
        self.documents, self.tokens = self.documents + len(table), self.tokens + self.added

    def close(self) -> dict[str, Any]:
        with writing(self.path):
            self.writer.close()
            os.replace(self.partial, self.path)
        sizes = {"documents": self.documents, "tokens": self.tokens, "bytes": self.path.stat().st_size}
        return {"name": self.path.name, **sizes, "sha256": file_digest(self.path)}


def _encoded(
    options: TokenizeOptions, tokenizer: PreTrainedTokenizerBase, start: Any
) -> Iterator[tuple[dict[str, pa.Table], Any]]:
    """Tables of the batches, in order, each with the state of the reader after it; few are in work at a time."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a process uses one core
    arguments = (str(Path(options.output) / TOKENIZER), options.held_out)
    pool: Executor = ThreadPoolExecutor(1, initializer=_prepare, initargs=arguments)
    if options.workers > 1:
        pool = ProcessPoolExecutor(options.workers, get_context("spawn"), _prepare, arguments)
    pending: deque[tuple[Future[dict[str, pa.Table]], Any]] = deque()
    try:
        for batch, reader in _read(options, start):
            pending.append((pool.submit(_tables, batch), reader))
            if len(pending) > 2 * options.workers:
                tables, reader = pending.popleft()
                yield tables.result(), reader
        for tables, reader in pending:
            yield tables.result(), reader
    finally:
        pool.shutdown(cancel_futures=True)


def _read(options: TokenizeOptions, start: Any) -> Iterator[tuple[dict[str, list[Any]], Any]]:
    """Batches of this part's documents, with the state after each: the number of the source, and its reader's."""
    part, parts = options.part
    first, place = start or (0, None)
    for number, (source, documents) in enumerate(_documents(options).items()):
        if number < first:
            continue
        if parts > 1:
            documents = split_dataset_by_node(documents, part - 1, parts)
        if number == first and place is not None:
            documents.load_state_dict(place)
        with reading_source(source):
            for batch in documents.iter(batch_size=_BATCH):
                yield batch, (number, documents.state_dict())


def _prepare(tokenizer: str, share: float) -> None:
    global _encode
    loaded = load_tokenizer(tokenizer, None, "tokenise into another folder")
    ends: dict[str, Any] = document_ends(loaded)
    _encode = partial(tokenise, tokenizer=loaded, share=share, **ends)


def _tables(batch: dict[str, list[Any]]) -> dict[str, pa.Table]:
    """Of a batch, the table of each side."""
    tables = {}
    for side, held_out in _SIDES.items():
        ids = _encode(batch, wanted=held_out)["input_ids"]
        tables[side] = pa.table({"input_ids": ids, "held_out": [held_out] * len(ids)}, schema=_SCHEMA)
    return tables


def _index(output: Path, plan: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> dict[str, Any] | None:
    """Writes what is in all parts, once they are done."""
    records = [output / f"part-{part:05}-of-{plan['parts']:05}.json" for part in range(1, plan["parts"] + 1)]
    states = [json.loads(record.read_text()) for record in records if record.is_file()]
    if len(states) < len(records) or not all(state["done"] for state in states):
        return None
    files = [file for state in states for file in state["files"]]
    index = {
        **plan,
        "data": [Path(source).name if Path(source).exists() else source for source in plan["data"]],  # for publication
        "vocabulary": len(tokenizer),
        **{
            side: {
                what: sum(file[what] for file in files if file["name"].startswith(side))
                for what in ("documents", "tokens", "bytes")
            }
            for side in _SIDES
        },
        "files": files,
    }
    replace_text(output / INDEX, json.dumps(index, indent=2) + "\n")
    return index
