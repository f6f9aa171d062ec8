"""Documents to blocks of tokens: packed back to back, from a memory-mapped column or from streams."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from datasets import Dataset, Features, IterableDataset, List, Value
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from resformer.errors import one_line
from resformer.training.data import READ_AHEAD, DataError, checked_text, is_row_held_out, is_text, reading_source
from resformer.version import __version__

_SHUFFLED = 1024  # blocks of streams that are shuffled among one another
_TOKENS = Features({"input_ids": List(Value("int32"))})


class PackedBlocks(torch.utils.data.Dataset):
    """Blocks of `block` tokens, read from a memory-mapped column of token ids where they lie.

    Item i is `input_ids` and `labels`, int64 of shape (block,), and with `separate` also `position_ids` that start
    again at each document: attention implementations of Transformers then keep the documents of a block apart,
    FlashAttention in batches of one alone. Labels of first tokens are -100 there, since no token before them belongs
    to their document.

    Args:
        tokens: all documents, back to back.
        starts: ascending, the index of each document's first token.
        most: keep at most so many blocks, at an even stride over all of them.
        masked: whether there are tokens that are no labels, stored as -1 - id. Blocks of these alone are left out.
    """

    def __init__(
        self,
        tokens: pa.ChunkedArray,
        starts: np.ndarray,
        block: int,
        *,
        most: int | None = None,
        separate: bool = False,
        masked: bool = False,
    ):
        self.tokens, self.starts, self.block, self.separate, self.masked = tokens, starts, block, separate, masked
        begins = np.arange(len(tokens) // block) * block
        if masked:
            learned = tokens.to_numpy() >= 0
            if separate:
                learned[starts[starts < len(learned)]] = False  # no token before them belongs to their document
            begins = begins[learned[: len(begins) * block].reshape(-1, block)[:, 1:].any(axis=1)]
        length = len(begins) if most is None else min(len(begins), most)
        self.begins = begins[np.arange(length) * len(begins) // max(length, 1)]  # each block's first token

    def __len__(self) -> int:
        return len(self.begins)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        begin = int(self.begins[index])
        ids = torch.from_numpy(self.tokens.slice(begin, self.block).to_numpy().astype("int64"))
        labels, ids = ids.masked_fill(ids < 0, -100), torch.where(ids < 0, -1 - ids, ids)
        if not self.separate:
            return {"input_ids": ids, "labels": labels}
        first, end = np.searchsorted(self.starts, (begin, begin + self.block))
        starts = torch.from_numpy(self.starts[first:end] - begin)
        positions = torch.arange(self.block)
        document_start = torch.zeros_like(positions)
        document_start[starts] = starts
        return {
            "input_ids": ids,
            "labels": labels.index_fill(0, starts, -100),
            "position_ids": positions - document_start.cummax(0).values,
        }

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the first 2**26 tokens, and of where their blocks and documents begin."""
        digest = hashlib.sha256()
        for chunk in self.tokens.slice(0, 2**26).chunks:
            digest.update(chunk.to_numpy().astype("<i8").tobytes())
        for places in (self.starts, self.begins):
            digest.update(places.astype("<i8").tobytes())
        return digest.hexdigest()

    @property
    def whole(self) -> "PackedBlocks":
        """The same without `most`."""
        return PackedBlocks(self.tokens, self.starts, self.block, separate=self.separate, masked=self.masked)

    @property
    def documents(self) -> np.ndarray:
        """The indices of the documents that have a token in one of the blocks."""
        firsts = np.searchsorted(self.starts, self.begins, "right") - 1
        ends = np.searchsorted(self.starts, self.begins + self.block)
        return np.unique(np.concatenate([np.arange(0), *map(np.arange, firsts, ends)]))


class StreamedBlocks(torch.utils.data.IterableDataset):
    """Blocks of streams without end, mixed by tokens; items as of `PackedBlocks`.

    The next block is of the stream that has given the fewest for its weight. A stream that has ended begins again;
    without weights, when all have ended, so that no text is read twice before another was read once. Blocks are
    shuffled among each 1,024 that follow one another.

    Args:
        streams: source -> documents.
        tokenise: of a batch of documents, as `tokenise`.

    Raises:
        DataError: a stream does not fill a block.
    """

    def __init__(
        self,
        streams: Mapping[str, IterableDataset],
        tokenise: Callable[..., dict[str, list[list[int]]]],
        block: int,
        *,
        weights: Sequence[float] | None = None,
        separate: bool = False,
        seed: int = 0,
    ):
        self.weights, self.seed = weights, seed
        self._sources, self._block = list(streams), block
        self._streams = [_PackedStream(stream, tokenise, block, separate) for stream in streams.values()]
        count = len(self._streams)
        self._start: dict[str, Any] = {"window": 0, "given": 0, "places": [None] * count, "ended": [False] * count}
        self._start |= {"blocks": [0] * count, "before": [0] * count}
        digest = hashlib.sha256()
        for source, stream in zip(streams, self._streams, strict=True):
            with reading_source(source):
                first = next(iter(stream), None)
            if first is None:
                raise DataError(
                    f"{source}: its training documents have {stream.tail:,} tokens and do not fill a block of "
                    f"{block:,}; use more text or a smaller --block."
                )
            digest.update(first["input_ids"].numpy().tobytes())
        self.digest = digest.hexdigest()  # of each stream's first block
        self._begin()

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        window, given = self._begin()
        mixed = self._mixed()
        while True:
            self._windows[window] = self._now(window)
            numbers, blocks = zip(*islice(mixed, _SHUFFLED), strict=True)
            order = np.random.default_rng([self.seed, window]).permutation(_SHUFFLED)
            self._windows[window]["order"] = np.array(numbers)[order].tolist()
            for index in order[given:]:
                yield blocks[index]
            window, given = window + 1, 0

    def _begin(self) -> tuple[int, int]:
        start = self._start
        for stream, place in zip(self._streams, start["places"], strict=True):
            stream.place = place
        self._blocks, self._before, self._ended = (list(start[name]) for name in ("blocks", "before", "ended"))
        self._windows = {start["window"]: start}
        return start["window"], start["given"]

    def resume(self, place: dict[str, Any]) -> None:
        """Has iteration begin where `place` says."""
        self._start = place
        self._begin()

    def place(self, given: int) -> dict[str, Any]:
        """Where iteration is after so many blocks since the beginning, for JSON: what `resume` takes.

        As more may have been read ahead, the places of all windows are known from that of the last call on.
        """
        window = given // _SHUFFLED
        self._windows = {number: place for number, place in self._windows.items() if number >= window}
        return {**self._windows.get(window, self._now(window)), "given": given % _SHUFFLED}

    def _now(self, window: int) -> dict[str, Any]:
        places = [stream.place for stream in self._streams]
        counts = {"blocks": list(self._blocks), "before": list(self._before), "ended": list(self._ended)}
        return {"window": window, **counts, "places": places}

    def tokens(self, given: int) -> dict[str, int]:
        """Source -> its tokens in so many blocks since the beginning."""
        place = self.place(given)
        within = np.bincount(place.get("order", [])[: place["given"]], minlength=len(self._sources))
        counts = self._block * (np.array(place["blocks"]) + place["before"] + within)
        return dict(zip(self._sources, counts.tolist(), strict=True))

    def _mixed(self) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
        iterators = [iter(stream) for stream in self._streams]
        weights = self.weights or [1.0] * len(iterators)
        while True:
            number = min(
                (number for number, ended in enumerate(self._ended) if not ended),
                key=lambda number: self._blocks[number] / weights[number],
            )
            with reading_source(self._sources[number]):
                block = next(iterators[number], None)
            if block is not None:
                self._blocks[number] += 1
                yield number, block
                continue
            iterators[number] = iter(self._streams[number])
            self._ended[number] = self.weights is None
            if all(self._ended):
                self._before = [sum(counts) for counts in zip(self._before, self._blocks, strict=True)]
                self._ended, self._blocks = [False] * len(iterators), [0] * len(iterators)


class _PackedStream:
    """The blocks of one stream. `place` is where iteration is, and where it begins: `None` at either end."""

    def __init__(self, documents: IterableDataset, tokenise: Callable[..., Any], block: int, separate: bool):
        self.documents, self.tokenise, self.block, self.separate = documents, tokenise, block, separate
        self.place: dict[str, Any] | None = None
        self.tail = 0  # tokens that did not fill a block at the end

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        # The reader's state before a batch of documents, the tokens left over from those before, the blocks given.
        place = self.place or {"reader": None, "left": [[], []], "given": 0}
        reader, left, given = place["reader"], place["left"], place["given"]
        self.documents.load_state_dict(reader)
        for batch in self.documents.iter(batch_size=64):
            ids, starts = map(list, left)
            for document in self.tokenise(batch)["input_ids"]:
                starts.append(len(ids))
                ids += document
            tokens = pa.chunked_array([pa.array(ids, pa.int32())])
            blocks = PackedBlocks(tokens, np.array(starts, np.int64), self.block, separate=self.separate, masked=True)
            for index in range(given, len(blocks)):
                self.place = {"reader": reader, "left": left, "given": index + 1}
                yield blocks[index]
            whole = len(ids) // self.block * self.block
            left = [ids[whole:], [start - whole for start in starts if start >= whole]]
            reader, given = self.documents.state_dict(), 0
        self.place, self.tail = None, len(left[0])


@dataclass(frozen=True)
class Blocks:
    """The blocks to train on and the held-out ones, which are none where no share is held out."""

    train: Any  # PackedBlocks; StreamedBlocks of streams
    held_out: PackedBlocks
    held_out_documents: Mapping[str, int]  # source -> how many of its documents have tokens in the held-out blocks
    #: Source -> the tokens of its training documents; empty of streams.
    training_tokens: Mapping[str, int] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """Differs if other tokens are trained or evaluated on, as far as the digests of both sides go."""
        return hashlib.sha256(f"{self.train.digest} {self.held_out.digest}".encode()).hexdigest()


def pack_documents(
    documents: Mapping[str, Dataset | IterableDataset],
    tokenizer: PreTrainedTokenizerBase,
    *,
    block: int,
    held_out: float,
    held_out_blocks: int,
    separate: bool = False,
    seed: int = 0,
    weights: Sequence[float] | None = None,
    remedy: str = "a larger --held-out",
) -> Blocks:
    """Packs documents back to back; of either side the tail alone is lost.

    A document begins with the beginning-of-sequence token if the tokenizer itself adds one, and ends with the
    end-of-sequence token. Tokens of a `Dataset` are cached by `datasets` and read from the disk; an `IterableDataset`
    is tokenised as it comes.

    Args:
        documents: of `load_documents`; all are datasets, or all are streams.
        held_out: the share of documents that is held out, by `is_held_out` or as `load_documents` has chosen; 0: none.
        held_out_blocks: the most blocks that are made of them, at an even stride over all held-out tokens. Of streams
            these are the ones in the first 2**25 characters, an equal part of each stream, or as many more as fill the
            blocks.
        separate: keep the documents of a block apart, see `PackedBlocks`.
        seed: of the order in which the blocks of streams are trained on.
        weights: shares of the training tokens, one for each source: of datasets as many documents as it takes until
            one is used up, of streams without end. Default: all documents of all sources. Held-out documents come from
            all sources in any case.
        remedy: of too few held-out documents, for the message.

    Raises:
        DataError: either side does not fill one block.
    """
    options = {"tokenizer": tokenizer, "share": held_out, **document_ends(tokenizer)}
    masked = any({"messages", "completion"} & set(part.column_names or ()) for part in documents.values())
    streams = {source: part for source, part in documents.items() if isinstance(part, IterableDataset)}
    train: PackedBlocks | StreamedBlocks
    counts: dict[str, int] = {}
    if streams:
        encode = partial(tokenise, **options, wanted=False)
        train = StreamedBlocks(streams, encode, block, weights=weights, separate=separate, seed=seed)
    else:
        tables = [_token_table(part, options, wanted=False) for part in documents.values()]
        sums = [pc.sum(pc.list_value_length(table["input_ids"])).as_py() or 0 for table in tables]
        if weights is not None:  # until a source is used up
            total = min(count / weight for count, weight in zip(sums, weights, strict=True))
            sums = [round(total * weight) for weight in weights]
        counts = dict(zip(documents, sums, strict=True))
        train = _packed(tables, block, "training", counts=sums, separate=separate, masked=masked)
    if not held_out:
        nothing = PackedBlocks(pa.chunked_array([], pa.int32()), np.arange(0), block)
        return Blocks(train, nothing, dict.fromkeys(documents, 0), counts)
    if streams:
        enough = -(-held_out_blocks * block // len(streams))
        parts = []
        for source, part in streams.items():
            with reading_source(source):
                parts.append(_read_ahead(part, READ_AHEAD // len(streams), enough, options))
    else:
        parts = [_token_table(part, options, wanted=True) for part in documents.values()]
    held = _packed(parts, block, "held-out", remedy, most=held_out_blocks, separate=separate, masked=True)
    source_of = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    held_out_counts = np.bincount(source_of[held.documents], minlength=len(parts)).tolist()
    return Blocks(train, held, dict(zip(documents, held_out_counts, strict=True)), counts)


def pack_all(
    documents: Mapping[str, Dataset], tokenizer: PreTrainedTokenizerBase, *, block: int, most: int, side: str
) -> PackedBlocks:
    """Packs documents as `pack_documents` does, none held out: at most `most` blocks, at an even stride over all."""
    options = {"tokenizer": tokenizer, "share": 0.0, **document_ends(tokenizer)}
    tables = [_token_table(part, options, wanted=False) for part in documents.values()]
    return _packed(tables, block, side, most=most)


def document_ends(tokenizer: PreTrainedTokenizerBase) -> dict[str, list[int]]:
    """The tokens that go before and after each document.

    The call also sets up the tokenizer's truncation and padding, so that its hash, which names the cache, stays.
    """
    added = tokenizer("")["input_ids"]
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    return {"begin": [bos] if bos is not None and added[:1] == [bos] else [], "end": [] if eos is None else [eos]}


def tokenise(
    batch: Mapping[str, Sequence[Any]],
    *,
    tokenizer: PreTrainedTokenizerBase,
    begin: list[int],
    end: list[int],
    share: float,
    wanted: bool,
    version: str = "",
) -> dict[str, list[list[int]]]:
    """The token ids of those documents that are on the `wanted` side of the split, those not learned as -1 - id.

    `datasets` names its cache after the arguments, hence the package's version, and not after this code.
    """
    rows = [dict(zip(batch, row, strict=True)) for row in zip(*batch.values(), strict=True)]
    chosen = [row for row in rows if (text := _text(row, tokenizer)) and is_row_held_out(row, text, share) == wanted]
    if "input_ids" in batch:
        ids = [row["input_ids"] for row in chosen]
        if (largest := max(map(max, ids), default=0)) >= len(tokenizer):
            raise DataError(
                f"The data have the token {largest:,}, and the tokenizer {len(tokenizer):,} tokens; name the one that "
                "made them with --tokenizer."
            )
        return {"input_ids": ids}
    plain = [row["text"] for row in chosen if is_text(row)]
    encoded = iter(tokenizer(plain, add_special_tokens=False, verbose=False)["input_ids"] if plain else [])
    return {
        "input_ids": [
            begin + next(encoded) + end if is_text(row) else _answers(row, tokenizer, begin, end) for row in chosen
        ]
    }


def _text(row: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> str:
    """A document's text, or the bytes of its tokens: their hash decides on which side it is."""
    if (ids := row.get("input_ids")) is not None:
        return np.array(ids, "<i4").tobytes().decode("latin-1")
    if is_text(row):
        return checked_text(row)
    if isinstance(row.get("completion"), str):
        return (row["prompt"] or "") + row["completion"]
    if not row.get("messages") and row.get("completion") is None:  # an empty cell
        return ""
    return _apply_template(tokenizer, _messages(row), tokenize=False)


def _messages(row: Mapping[str, Any]) -> list[dict[str, str]]:
    return [*(row.get("messages") or []), *(row.get("prompt") or []), *(row.get("completion") or [])]


def _answers(row: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, begin: list[int], end: list[int]) -> list[int]:
    """Token ids; -1 - id of those not learned: all but a completion, or the assistant's messages of a chat.

    A prompt is tokenised by itself, and so is each part of a chat up to a message, as TRL does.
    """
    if isinstance(row.get("completion"), str):
        prompt, completion = tokenizer([row["prompt"] or "", row["completion"]], add_special_tokens=False)["input_ids"]
        return [-1 - token for token in begin + prompt] + completion + end
    messages = _messages(row)
    ids = _apply_template(tokenizer, messages)
    marked = [-1 - token for token in ids]
    for number in range(len(row.get("prompt") or []), len(messages)):
        if messages[number].get("role") == "assistant":
            before = _apply_template(tokenizer, messages[:number], add_generation_prompt=True)
            until = _apply_template(tokenizer, messages[: number + 1])
            if ids[: len(until)] != until or until[: len(before)] != before:
                raise DataError(
                    "The tokenizer's chat template renders a message differently when others follow, so that answers "
                    "cannot be found in the text; use rows of `prompt` and `completion` with one answer each."
                )
            marked[len(before) : len(until)] = ids[len(before) : len(until)]
    return marked


def _apply_template(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]], **options: Any) -> Any:
    try:
        return tokenizer.apply_chat_template(messages, return_dict=False, **options)
    except (TemplateError, TypeError, KeyError, ValueError) as error:
        raise DataError(f"A chat does not fit the tokenizer's chat template: {one_line(error)}") from error


def _token_table(documents: Dataset, options: dict[str, Any], *, wanted: bool) -> pa.Table:
    """The tokens of one side; no processes, as the tokenizer's own threads use all cores.

    Those of `resformer tokenize` are read where they lie: held-out documents come first.
    """
    if {"input_ids", "held_out"} <= set(documents.column_names):
        table = documents.data.table
        held_out = pc.sum(table["held_out"]).as_py() or 0
        if pc.sum(table["held_out"].slice(0, held_out)).as_py() in (held_out, None):
            side = table.slice(0, held_out) if wanted else table.slice(held_out)
            return side.select(["input_ids"]).cast(_TOKENS.arrow_schema)
    tokens = documents.map(
        tokenise,
        fn_kwargs={**options, "wanted": wanted, "version": __version__},
        batched=True,
        remove_columns=documents.column_names,
        features=_TOKENS,
        desc=f"Tokenising, {'held-out' if wanted else 'training'}",
    )
    return tokens.data.table if len(tokens) else _TOKENS.arrow_schema.empty_table()


def _read_ahead(documents: IterableDataset, characters: int, enough: int, options: dict[str, Any]) -> pa.Table:
    """Held-out documents of a stream: of its first `characters`, or of more if those have not `enough` tokens."""
    tables, seen, count = [_TOKENS.arrow_schema.empty_table()], 0, 0
    for batch in documents.iter(batch_size=64):
        tokens = tokenise(batch, **options, wanted=True)
        tables.append(pa.table(tokens, schema=_TOKENS.arrow_schema))
        seen += sum(len(str(value)) for values in batch.values() for value in values)
        count += sum(map(len, tokens["input_ids"]))
        if seen >= characters and count >= enough:
            break
    return pa.concat_tables(tables)


def _packed(
    tables: Sequence[pa.Table],
    block: int,
    side: str,
    remedy: str | None = None,
    counts: Sequence[int | None] | None = None,
    **options: Any,
) -> PackedBlocks:
    """The blocks of the first `counts` tokens of each table, or of all; a document may be all there is of a source."""
    chunks: list[pa.Array] = []
    starts, length = [np.arange(0)], 0
    for table, count in zip(tables, counts or [None] * len(tables), strict=True):
        documents = table["input_ids"]
        part = pa.chunked_array([chunk.flatten() for chunk in documents.chunks], pa.int32()).slice(0, count)
        lengths = pc.list_value_length(documents).to_numpy()
        begins = lengths.cumsum() - lengths
        starts.append(length + (begins if count is None else begins[begins < count]))
        chunks += part.chunks
        length += len(part)
    tokens = pa.chunked_array(chunks, pa.int32())
    blocks = PackedBlocks(tokens, np.concatenate(starts), block, **options)
    if not len(blocks) and len(tokens) >= block:
        raise DataError(f"The {side} documents have {len(tokens):,} tokens, and no answer or completion to learn.")
    if not len(blocks):
        remedies = ", ".join(filter(None, ("more text", remedy, "a smaller --block")))
        raise DataError(
            f"The {side} documents have {len(tokens):,} tokens, too few for one block of {block:,}; use {remedies}."
        )
    return blocks
