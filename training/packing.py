"""Documents to blocks of tokens: packed back to back, from a memory-mapped column or from streams."""

import hashlib
import json
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
from resformer.training.data import READ_AHEAD, DataError, content, has_chats, is_row_held_out, reading_source
from resformer.version import __version__

#: Passes over the same text that teach about as much as new text would, arXiv 2305.16264.
MANY_PASSES = 4
_COUNTS = ("before", "blocks", "shown")  # of a place, which add up to the blocks given
_SHUFFLED = 4096  # blocks, of all streams, that are shuffled with those near them
_TOKENS = Features({"input_ids": List(Value("int32"))})
_LISTS = ("messages", "tools", "chat_template_kwargs")  # of a chat, or their JSON
_SPELT = "\ufdd0{}\ufdd1"  # stands for a special token in a chat; Unicode keeps these characters out of texts


class PackedBlocks(torch.utils.data.Dataset):
    """Blocks of `block` tokens, read from a memory-mapped column of token ids where they lie.

    Items are `input_ids` and `labels`, and with `separate` also `position_ids` that start again at each document:
    Transformers' attention then keeps the documents of a block apart, FlashAttention in batches of one alone. Labels of
    first tokens are -100 there, since no token before them belongs to their document.

    Args:
        starts: ascending, the index of each document's first token in `tokens`.
        most: keep at most so many blocks, at an even stride over all of them.
        masked: tokens that are no labels are stored as -1 - id. Blocks of these alone are left out.
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
        chunks, ends = self._chunks
        first, last = np.searchsorted(ends, (begin, begin + self.block - 1), "right")  # `slice` would go through them
        within = pa.chunked_array(chunks[first : last + 1]).slice(begin - ends[first] + len(chunks[first]), self.block)
        ids = torch.from_numpy(within.to_numpy().astype("int64"))
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
    def _chunks(self) -> tuple[list[pa.Array], np.ndarray]:
        """The chunks of `tokens`, and where each ends."""
        return self.tokens.chunks, np.cumsum([len(chunk) for chunk in self.tokens.chunks])

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


class RunBlocks(torch.utils.data.Dataset):
    """The blocks of a whole run in the order of its training: no step is short, and a longer run begins alike.

    Pass follows pass, each in a new random order. With weights, the sources share the tokens of each part of the run,
    and each is passed over as often as that takes.

    Args:
        source_of: of each block, the number of its source.
        weights: shares of the tokens, one for each source; `None`: one pass is over all.
        length: of the number of blocks until each was given once, how many the run trains on.
    """

    def __init__(
        self,
        blocks: PackedBlocks,
        sizes: Mapping[str, int],
        source_of: np.ndarray,
        weights: Sequence[float] | None,
        length: Callable[[float], int],
        seed: int,
    ):
        self.blocks, self.digest, self.one_pass, self._sizes = blocks, blocks.digest, len(blocks), sizes
        self._source_of = None if weights is None else source_of
        parts, shares = [np.arange(len(blocks))], [1.0]
        if weights is not None:
            parts, shares = [np.flatnonzero(source_of == number) for number in range(len(sizes))], list(weights)
            for (source, count), part in zip(sizes.items(), parts, strict=True):
                if not len(part):
                    raise _short(source, count, blocks.block)
        count = length(max(len(part) / share for part, share in zip(parts, shares, strict=True)))
        orders, times = [], []
        for number, (part, share) in enumerate(zip(parts, shares, strict=True)):
            passes = range(-(-(int(count * share) + 2) // len(part)))
            orders += [np.random.default_rng([seed, number, each]).permutation(part) for each in passes]
            times.append((np.arange(len(passes) * len(part)) + 0.5) / share)
        self.order = np.concatenate(orders)[np.concatenate(times).argsort(kind="stable")[:count]]

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.blocks[int(self.order[index])]

    def read(self, given: int) -> dict[str, tuple[int, float]]:
        """Source -> its tokens in the first `given` blocks, and the passes over it."""
        if self._source_of is None:  # a small source may begin no block
            counts: Any = given * np.array([*self._sizes.values()]) / max(sum(self._sizes.values()), 1)
            passes = np.full(len(counts), given / len(self.blocks))
        else:
            counts = np.bincount(self._source_of[self.order[:given]], minlength=len(self._sizes))
            passes = counts / np.bincount(self._source_of)
        tokens = (counts * self.blocks.block).round().astype(int).tolist()
        return dict(zip(self._sizes, zip(tokens, passes.round(3).tolist(), strict=True), strict=True))


class StreamedBlocks(torch.utils.data.IterableDataset):
    """Blocks of streams without end, mixed by tokens; items as of `PackedBlocks`.

    The next block is of the stream that has given the fewest for its weight; without weights, of those that have begun
    again least often the one that has given the fewest since. Of each pass, blocks are shuffled with some thousands
    near them. (`datasets.interleave_datasets` mixes by documents, be they long or short, and loses the content of its
    shuffle buffer where a run goes on; the state of a stream that packs in `map` would lose the tail of each batch.)
    """

    one_pass = None  # is not known

    def __init__(
        self,
        streams: Mapping[str, IterableDataset],
        tokenise: Callable[..., dict[str, list[list[int]]]],
        block: int,
        weights: Sequence[float] | None = None,
        separate: bool = False,
        seed: int = 0,
    ):
        self.streams, self.tokenise, self.block = [*streams.items()], tokenise, block
        self.weights, self.separate, self.seed = weights, separate, seed
        # The reader's state and the tokens left over before the documents whose blocks are shuffled together, and the
        # number of these blocks that were given; the passes begun, and the blocks of this one and of those before.
        start: dict[str, Any] = {"reader": None, "left": [[], []], "shown": 0, "passes": 1, "blocks": 0, "before": 0}
        self.resume({"given": 0, "streams": [start] * len(streams)})
        digest = hashlib.sha256()
        for number in range(len(streams)):
            digest.update(next(self._read(number, 1))["input_ids"].numpy().tobytes())
        self.digest = digest.hexdigest()  # of a block of each

    def resume(self, place: dict[str, Any]) -> None:
        """Has iteration begin where `place` says."""
        self.start, self._places = place, [*place["streams"]]
        self._recent = {place["given"]: place["streams"]}

    def place(self, given: int) -> dict[str, Any]:
        """Where iteration is after so many blocks since the beginning, for JSON: what `resume` takes.

        As more may have been read ahead, the places after each block are known from that of the last call on. Another
        process than the first, which reads for all, knows none.
        """
        self._recent = {number: places for number, places in self._recent.items() if number >= given}
        return {"given": given, "streams": self._recent.get(given, self._places)}

    def read(self, given: int) -> dict[str, tuple[int, float]]:
        """Source -> its tokens in the first `given` blocks, and the passes over it that have begun."""
        read = {}
        for (source, _), place in zip(self.streams, self.place(given)["streams"], strict=True):
            begun = place["blocks"] + place["shown"] > 0
            read[source] = sum(map(place.get, _COUNTS)) * self.block, place["passes"] - (not begun)
        return read

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        self.resume(self.start)
        shares = self.weights or [1 / len(self.streams)] * len(self.streams)
        readers = [self._read(number, math.ceil(_SHUFFLED * share)) for number, share in enumerate(shares)]
        given = self.start["given"]
        while True:
            if self.weights is None:
                turns: list[Any] = [(each["passes"], each["blocks"] + each["shown"]) for each in self._places]
            else:
                turns = [sum(map(p.get, _COUNTS)) / share for p, share in zip(self._places, shares, strict=True)]
            number = turns.index(min(turns))
            block, given = next(readers[number]), given + 1
            self._recent[given] = [*self._places]
            yield block

    def _read(self, number: int, together: int) -> Iterator[dict[str, torch.Tensor]]:
        """The blocks of a stream, about so many `together` shuffled; keeps its place."""
        windows = self._windows(number, together)
        place, blocks = next(windows)
        while True:
            numbers = np.random.default_rng([self.seed, number, place["before"] + place["blocks"]])
            order = numbers.permutation(len(blocks))
            for shown in range(place["shown"], len(order)):
                packed, index = blocks[order[shown]]
                self._places[number] = {**place, "shown": shown + 1}
                if shown + 1 == len(order):  # the next blocks say whether the pass has ended
                    place, blocks = next(windows)
                    self._places[number] = place
                yield packed[index]

    def _windows(self, number: int, together: int) -> Iterator[tuple[dict[str, Any], list[tuple[PackedBlocks, int]]]]:
        """Blocks of a stream that follow one another in a pass, again and again, and the place where they begin."""
        (source, documents), place = self.streams[number], self._places[number]
        while True:
            with reading_source(source):
                documents.load_state_dict(place["reader"])
                blocks, (ids, starts) = [], map(list, place["left"])
                for batch in documents.iter(batch_size=64):
                    for document in self.tokenise(batch)["input_ids"]:
                        starts.append(len(ids))
                        ids += document
                    tokens = pa.chunked_array([pa.array(ids, pa.int32())])
                    packed = PackedBlocks(
                        tokens, np.array(starts, int), self.block, separate=self.separate, masked=True
                    )
                    blocks += [(packed, index) for index in range(len(packed))]
                    whole = len(ids) // self.block * self.block
                    ids, starts = ids[whole:], [start - whole for start in starts if start >= whole]
                    if len(blocks) >= together:
                        yield place, blocks
                        place = {**place, "reader": documents.state_dict(), "left": [[*ids], [*starts]], "shown": 0}
                        place["blocks"] += len(blocks)
                        blocks = []
            if blocks:
                yield place, blocks
            count, passes = place["blocks"] + len(blocks), place["passes"] + 1
            if not count:
                raise _short(source, len(ids), self.block)
            if passes == MANY_PASSES + 1:
                warn_of_passes(source, passes)
            place = {**place, "before": place["before"] + count, "blocks": 0, "shown": 0, "passes": passes}
            place |= {"reader": None, "left": [ids, starts]}


def _short(source: str, tokens: int, block: int) -> DataError:
    told = f"{source}: its training documents have {tokens:,} tokens and do not fill a block of {block:,}"
    return DataError(f"{told}; use more text or a smaller --block.")


def warn_of_passes(source: str, passes: float) -> None:
    """Warns if text is read so often that it teaches less than new text would."""
    if passes > MANY_PASSES:
        warnings.warn(
            f"{source}: is read {passes:.3g} times. Beyond {MANY_PASSES} passes, text teaches less and less (arXiv "
            "2305.16264): use more text, a smaller weight or a shorter training.",
            stacklevel=2,
        )


def bytes_per_token(blocks: PackedBlocks, tokenizer: PreTrainedTokenizerBase) -> float:
    """Bytes of text per label, special tokens counted; a loss in nats per token over this and ln 2 is in bits per byte.

    A character that the ends of the blocks cut counts as what a decoder shows for it.
    """
    rows = (blocks[index] for index in range(len(blocks)))
    labels = [row["labels"][row["labels"] >= 0] for row in rows]
    texts = tokenizer.batch_decode(labels, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return sum(len(text.encode("utf-8", "replace")) for text in texts) / sum(map(len, labels))


@dataclass(frozen=True)
class Blocks:
    """The blocks to train on and the held-out ones, which are none where no share is held out."""

    train: Any  # PackedBlocks; RunBlocks if a length is given; StreamedBlocks of streams
    held_out: PackedBlocks
    held_out_documents: Mapping[str, int]  # source -> how many of its documents have tokens in the held-out blocks

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
    length: Callable[[float], int] | None = None,
    parse_special: bool = False,
) -> Blocks:
    """Packs documents back to back; of either side the tail alone is lost.

    A document begins with the beginning-of-sequence token if the tokenizer itself adds one, and ends with the
    end-of-sequence token. Tokens of a `Dataset` are cached and read from the disk, those of a stream made as it comes.

    Args:
        documents: of `load_documents`; all are datasets, or all are streams.
        held_out: the share of documents that is held out, of all sources; 0: none.
        held_out_blocks: the most blocks of them, at an even stride over all held-out tokens. Of streams these are in
            the first 2**25 characters, an equal part of each, or as many more as fill the blocks.
        separate, weights: of `PackedBlocks`, `RunBlocks`.
        length: of `RunBlocks`; default: each block once, without weights in the order of the documents.
        parse_special: whether special tokens that the texts spell are tokens, and not their letters.

    Raises:
        DataError: either side does not fill one block, or a source that has a weight does not.
    """
    options = {"tokenizer": tokenizer, "share": held_out, "parse_special": parse_special, **document_ends(tokenizer)}
    streams = {source: part for source, part in documents.items() if isinstance(part, IterableDataset)}
    train: Any
    if streams:
        encode = partial(tokenise, **options, wanted=False)
        train = StreamedBlocks(streams, encode, block, weights, separate, seed)
    else:
        tables = [_token_table(part, options, wanted=False) for part in documents.values()]
        masked = any(has_chats(part) for part in documents.values())
        train, source_of, sizes = _packed(tables, block, "training", separate=separate, masked=masked)
        if length is not None or weights is not None:
            counts = dict(zip(documents, sizes, strict=True))
            train = RunBlocks(train, counts, source_of, weights, length or round, seed)
    if not held_out:
        nothing = PackedBlocks(pa.chunked_array([], pa.int32()), np.arange(0), block)
        return Blocks(train, nothing, dict.fromkeys(documents, 0))
    if streams:
        enough = -(-held_out_blocks * block // len(streams))
        parts = []
        for source, part in streams.items():
            with reading_source(source):
                parts.append(_read_ahead(part, READ_AHEAD // len(streams), enough, options))
    else:
        parts = [_token_table(part, options, wanted=True) for part in documents.values()]
    remedy = "a larger --held-out"
    held, _, _ = _packed(parts, block, "held-out", remedy, most=held_out_blocks, separate=separate, masked=True)
    source_of = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    held_out_counts = np.bincount(source_of[held.documents], minlength=len(parts)).tolist()
    return Blocks(train, held, dict(zip(documents, held_out_counts, strict=True)))


def _specials(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Special tokens, longer ones first, as one may begin another."""
    return sorted((str(token) for token in tokenizer.added_tokens_decoder.values() if token.special), key=len)[::-1]


def spelt_specials(documents: Mapping[str, Dataset | IterableDataset], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Notes on the sources whose first documents spell special tokens, as text does that a template was applied to."""
    notes = []
    for source, part in documents.items():
        with reading_source(source):
            text = "\n".join(str(content(row)) for row in islice(part, 16))
        if spelt := [token for token in _specials(tokenizer) if token in text]:
            notes.append(f"{source}: {spelt[0]} in its text is read as text; --parse-special makes it a token")
    return notes


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
    parse_special: bool = False,
    version: str = "",
) -> dict[str, list[list[int]]]:
    """The token ids of those documents that are on the `wanted` side of the split, those not learned as -1 - id.

    `datasets` names its cache after the arguments, hence the package's version, and not after this code.
    """
    rows = [dict(zip(batch, row, strict=True)) for row in zip(*batch.values(), strict=True)]
    if ids := [*filter(None, batch.get("input_ids", ()))]:
        _check_ids(min(map(min, ids)), max(map(max, ids)), tokenizer)
    chosen = [each for row in rows if (each := content(row)) and is_row_held_out(row, each, share) == wanted]
    if "input_ids" in batch:
        return {"input_ids": chosen}
    specials = [] if parse_special else _specials(tokenizer)
    encode = partial(tokenizer, add_special_tokens=False, verbose=False)
    plain = [text for text in chosen if isinstance(text, str)]
    encoded = iter(encode(plain, split_special_tokens=not parse_special)["input_ids"] if plain else [])
    return {
        "input_ids": [
            begin + next(encoded) + end if isinstance(each, str) else _answers(each, tokenizer, begin, end, specials)
            for each in chosen
        ]
    }


def _check_ids(least: int, largest: int, tokenizer: PreTrainedTokenizerBase) -> None:
    if least < 0 or largest >= len(tokenizer):
        told = f"The data have the token {min(least, 0) or largest:,}, and the tokenizer {len(tokenizer):,} tokens"
        raise DataError(f"{told}; name the one that made them with --tokenizer.")


def _answers(
    chat: dict[str, Any], tokenizer: PreTrainedTokenizerBase, begin: list[int], end: list[int], specials: Sequence[str]
) -> list[int]:
    """Token ids; -1 - id of those not learned: all but a completion, or the assistant's messages of a chat.

    A prompt is tokenised by itself, and so is each part of a chat up to a message, as TRL does. A message of the
    assistant with a `weight` of 0 is not learned (OpenAI's and Mistral's files).

    Args:
        specials: tokens that the template alone makes.
    """
    encode = partial(tokenizer, add_special_tokens=False, verbose=False)
    prompt, completion = chat.get("prompt") or "", chat.get("completion") or ""
    if isinstance(prompt, str) and isinstance(completion, str) and not chat.get("messages"):
        before, after = encode([prompt, completion], split_special_tokens=bool(specials))["input_ids"]
        return [-1 - token for token in begin + before] + after + end
    text = json.dumps(chat, ensure_ascii=False)
    for number, token in enumerate(specials):
        text = text.replace(token, _SPELT.format(number))

    def ids_of(text: str) -> list[int]:
        ids: list[int] = []
        for number, piece in enumerate(re.split(_SPELT.format(r"(\d+)"), text)):
            literal = number % 2 == 1
            piece = specials[int(piece)] if literal else piece
            ids += encode(piece, split_special_tokens=literal)["input_ids"] if piece else []
        return ids

    chat = json.loads(text)
    try:
        read = {name: json.loads(x or "null") for name, x in chat.items() if name in _LISTS and isinstance(x, str)}
        chat = {**chat, **read}
        given = _messages(chat.get("prompt"), "user")
        messages = [*_messages(chat.get("messages"), ""), *given, *_messages(chat.get("completion"), "assistant")]
        tools = chat.get("tools") or None
        options = {"tools": tools, **(chat.get("chat_template_kwargs") or {})}
        render: Callable[..., str] = partial(tokenizer.apply_chat_template, tokenize=False, **options)
        ids = ids_of(whole := render(messages))
        if tools and "tools" not in tokenizer.get_chat_template(None, tools):
            raise ValueError("it does not render `tools`; use another --tokenizer, or drop the column")
        marked = [-1 - token for token in ids]
        for number in range(len(given), len(messages)):
            if (weight := messages[number].get("weight")) not in (None, 0, 1):
                raise DataError(f"A message's weight is {weight!r}; expected 0, not learned, or 1.")
            if messages[number]["role"] != "assistant" or weight == 0:
                continue
            until, before = render(messages[: number + 1]), render(messages[: number or 1], add_generation_prompt=True)
            if not number:  # a chat without messages cannot be rendered: the head of an answer is in this one
                before = "".join(until.partition(before.removeprefix(until) or until)[:2])
            if not (whole.startswith(until) and until.startswith(before)):
                told = "The tokenizer's chat template renders a message differently when others follow"
                raise DataError(f"{told}; use rows of `prompt` and `completion` with one answer each.")
            # A token that joins the end of a prompt to the answer is learned.
            same = ([one == other for one, other in zip(ids_of(part), ids, strict=False)] for part in (before, until))
            first, last = ([*each, False].index(False) for each in same)
            marked[first:last] = ids[first:last]
    except (TemplateError, TypeError, KeyError, ValueError) as error:
        raise DataError(f"A chat does not fit the tokenizer's chat template: {one_line(error)}") from error
    return marked


def _messages(part: Any, role: str) -> list[dict[str, Any]]:
    """A list of messages; a text is one of `role`. Parts of a content must be texts, which are joined."""
    messages = [{"role": role, "content": part}] if isinstance(part, str) and part else part or []
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or not message.get("role"):
            raise DataError(f"A message is {one_line(repr(message), 60)}; expected `role` and `content`.")
        if isinstance(parts := message.get("content"), list):  # templates may show the list as Python does
            if not all(isinstance(each, dict) and isinstance(each.get("text"), str) for each in parts):
                raise DataError(f"A message has {one_line(repr(parts), 60)}; expected text, or parts of `text` alone.")
            messages[number] = {**message, "content": "".join(each["text"] for each in parts)}
    return messages


def _token_table(documents: Dataset, options: dict[str, Any], *, wanted: bool) -> pa.Table:
    """The tokens of one side; no processes, as the tokenizer's own threads use all cores.

    Those of `resformer tokenize` are read where they lie: held-out documents come first.
    """
    table = documents.data.table
    if {"input_ids", "held_out"} <= set(documents.column_names) and not table["held_out"].null_count:
        held_out = pc.sum(table["held_out"]).as_py() or 0
        if pc.sum(table["held_out"].slice(0, held_out)).as_py() in (held_out, None):
            side = table.slice(0, held_out) if wanted else table.slice(held_out)
            side = side.select(["input_ids"]).cast(_TOKENS.arrow_schema)
            bounds = pc.min_max(pc.list_flatten(side["input_ids"])).as_py()
            _check_ids(bounds["min"] or 0, bounds["max"] or 0, options["tokenizer"])
            return side
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
    tables: Sequence[pa.Table], block: int, side: str, remedy: str | None = None, **options: Any
) -> tuple[PackedBlocks, np.ndarray, list[int]]:
    """The blocks of all tables, the number of the table in which each begins, and the tokens of each table."""
    chunks: list[pa.Array] = []
    starts, sizes = [np.arange(0)], list[int]()
    for table in tables:
        documents = table["input_ids"]
        lengths = pc.list_value_length(documents).to_numpy()
        starts.append(sum(sizes) + lengths.cumsum() - lengths)
        sizes.append(int(lengths.sum()))
        chunks += [chunk.flatten() for chunk in documents.chunks]
    tokens = pa.chunked_array(chunks, pa.int32())
    blocks = PackedBlocks(tokens, np.concatenate(starts), block, **options)
    if not len(blocks) and len(tokens) >= block:
        raise DataError(f"The {side} documents have {len(tokens):,} tokens, and no answer or completion to learn.")
    if not len(blocks):
        remedies = ", ".join(filter(None, ("more text", remedy, "a smaller --block")))
        told = f"The {side} documents have {len(tokens):,} tokens, too few for one block of {block:,}"
        raise DataError(f"{told}; use {remedies}.")
    return blocks, np.searchsorted(np.cumsum(sizes), blocks.begins, "right"), sizes
