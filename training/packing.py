"""Documents to blocks of tokens: packed back to back, read from a memory-mapped column."""

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from datasets import Dataset, Features, IterableDataset, List, Value
from datasets.table import InMemoryTable
from transformers import PreTrainedTokenizerBase

from resformer.training.data import MASKS, DataError, content, is_row_held_out, reading_source
from resformer.training.tokenizers import check_tokens
from resformer.version import __version__

_TOKENS = Features({"input_ids": List(Value("int32"))})
_EMPTY = _TOKENS.arrow_schema.empty_table()


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
        block = self._table.fast_slice(begin, self.block)  # pyarrow's own `slice` goes through all chunks
        ids = torch.from_numpy(block["tokens"].to_numpy().astype("int64"))
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
    def _table(self) -> InMemoryTable:
        return InMemoryTable(pa.table({"tokens": self.tokens}))

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the first 2**26 tokens, and of where their blocks and documents begin."""
        digest = hashlib.sha256()
        for part in (*self.tokens.slice(0, 2**26).chunks, self.starts, self.begins):
            digest.update(np.asarray(part).astype("<i8").tobytes())
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
        length: given the number of blocks until each was given once, returns how many the run trains on.
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
                    told = f"{source}: its training documents have {count:,} tokens and do not fill a block of"
                    raise DataError(f"{told} {blocks.block:,}; use more text or a smaller --block.")
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


def bytes_per_token(blocks: PackedBlocks, tokenizer: PreTrainedTokenizerBase) -> float:
    """Bytes of text per label, special tokens counted; a loss in nats per token over this and ln 2 is in bits per byte.

    Bytes are those of each token, in any script: a token may have a part of a character.
    """
    labels = torch.cat([blocks[index]["labels"] for index in range(len(blocks))])
    ids = labels[labels >= 0].numpy()
    if (sizes := _bytes_of_tokens(tokenizer)) is not None:
        return float(sizes[ids].sum() / len(ids))
    text = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return len(text.encode("utf-8", "replace")) / len(ids)


def _bytes_of_tokens(tokenizer: PreTrainedTokenizerBase) -> np.ndarray | None:
    """How many bytes of text each token stands for; `None` if its decoder does not join its tokens' own letters."""
    decoder = str(getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None))
    byte_level = "ByteLevel" in decoder  # a letter is a byte
    if not byte_level and "ByteFallback" not in decoder and "Metaspace" not in decoder:
        return None
    sizes = np.zeros(max(tokenizer.get_vocab().values(), default=0) + 1)
    added = tokenizer.added_tokens_decoder
    for piece, number in tokenizer.get_vocab().items():
        if number in added:
            sizes[number] = 0 if added[number].special else len(piece.encode())
        elif byte_level:
            sizes[number] = len(piece)
        else:
            sizes[number] = 1 if re.fullmatch("<0x[0-9A-F]{2}>", piece) else len(piece.replace("\u2581", " ").encode())
    return sizes


@dataclass(frozen=True)
class Blocks:
    """The blocks to train on and the held-out ones, which are none where no share is held out."""

    train: Any  # PackedBlocks; RunBlocks if a length is given
    held_out: PackedBlocks
    held_out_documents: Mapping[str, int]  # source -> how many of its documents have tokens in the held-out blocks

    @property
    def digest(self) -> str:
        """Differs if other tokens are trained or evaluated on, as far as the digests of both sides go."""
        return hashlib.sha256(f"{self.train.digest} {self.held_out.digest}".encode()).hexdigest()


def pack_documents(
    documents: Mapping[str, Dataset],
    tokenizer: PreTrainedTokenizerBase,
    *,
    block: int,
    held_out: float,
    held_out_blocks: int,
    held_out_data: Mapping[str, Dataset] | None = None,
    separate: bool = False,
    seed: int = 0,
    weights: Sequence[float] | None = None,
    length: Callable[[float], int] | None = None,
    parse_special: bool = False,
    chats: Callable[[Dataset, str], pa.Table] | None = None,
) -> Blocks:
    """Packs documents back to back; of either side the tail alone is lost.

    A document begins with the beginning-of-sequence token if the tokenizer itself adds one, and ends with the
    end-of-sequence token. Tokens are cached, and read from the disk. Chats are packed whole: see `ChatTrainer`.

    Args:
        held_out: the share of documents that is held out, of all sources; 0: none.
        held_out_blocks: the most blocks of them, at an even stride over all held-out tokens.
        held_out_data: documents that are all held out, whatever their column `held_out` says.
        separate, weights: of `PackedBlocks`, `RunBlocks`.
        length: of `RunBlocks`; default: each block once, without weights in the order of the documents.
        parse_special: whether special tokens that the texts spell are tokens, and not their letters.
        chats: makes whole blocks of a source's chats; the name is that of the source.

    Raises:
        DataError: either side does not fill one block, or a source that has a weight does not.
    """
    options = {"tokenizer": tokenizer, "parse_special": parse_special, **document_ends(tokenizer)}
    check_tokens([*documents, *(held_out_data or ())], tokenizer)
    columns = {name for part in documents.values() for name in part.column_names}
    mixed, labelled = "chat" in columns, not columns.isdisjoint({"labels", *MASKS})

    def tables(parts: Mapping[str, Dataset], share: float, *, wanted: bool) -> list[pa.Table]:
        found = []
        for source, part in parts.items():
            with reading_source(source):
                if "chat" in part.column_names:
                    assert chats is not None
                    side = part.filter(_is_on_side, fn_kwargs={"share": share, "wanted": wanted})
                    found.append(chats(side, source) if len(side) else _EMPTY)
                else:
                    table = _token_table(part, {**options, "share": share}, wanted=wanted)
                    found.append(whole_blocks(table, block, tokenizer) if mixed else table)
        return found

    train, source_of, sizes = _packed(
        tables(documents, held_out, wanted=False), block, "training", separate=separate, masked=mixed or labelled
    )
    blocks: Any = train
    if length is not None or weights is not None:
        counts = dict(zip(documents, sizes, strict=True))
        blocks = RunBlocks(train, counts, source_of, weights, length or round, seed)
    if not held_out and not held_out_data:
        nothing = PackedBlocks(pa.chunked_array([], pa.int32()), np.arange(0), block)
        return Blocks(blocks, nothing, dict.fromkeys(documents, 0))
    held, share = documents, held_out
    if held_out_data:
        share, held = 1.0, dict(held_out_data)
        for name, part in held_out_data.items():
            if "held_out" in part.column_names:
                held[name] = part.remove_columns("held_out").add_column("held_out", np.ones(len(part), bool))
    parts = tables(held, share, wanted=True)
    remedy = "a larger --held-out, --sample-by line or a file of its own with --held-out-data"
    packed, _, _ = _packed(parts, block, "held-out", remedy, most=held_out_blocks, separate=separate, masked=True)
    learned = np.concatenate([has_labels(part) for part in parts])  # what fills blocks up is no document
    source_of = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    seen = packed.documents[learned[packed.documents]]
    held_out_counts = np.bincount(source_of[seen], minlength=len(parts)).tolist()
    return Blocks(blocks, packed, dict(zip(held, held_out_counts, strict=True)))


def _is_on_side(row: Mapping[str, Any], share: float, wanted: bool) -> bool:
    return bool(document := content(row)) and is_row_held_out(row, document, share) == wanted


def has_labels(table: pa.Table) -> np.ndarray:
    """Of each document, whether one of its tokens is learned."""
    counts = pc.list_value_length(table["input_ids"]).to_numpy()
    learned = pc.greater_equal(pc.list_flatten(table["input_ids"]), 0).to_numpy()
    return np.bincount(np.repeat(np.arange(len(counts)), counts)[learned], minlength=len(counts)) > 0


def whole_blocks(table: pa.Table, block: int, tokenizer: PreTrainedTokenizerBase) -> pa.Table:
    """The same documents, and one of padding, which is not learned, that fills the last block."""
    count = pc.sum(pc.list_value_length(table["input_ids"])).as_py() or 0
    rest = pa.table({"input_ids": [[padding(tokenizer)] * (-count % block)]}, schema=_TOKENS.arrow_schema)
    return pa.concat_tables([table, rest]) if count % block else table


def padding(tokenizer: PreTrainedTokenizerBase) -> int:
    """A token that is not learned."""
    known = (token for token in (tokenizer.pad_token_id, tokenizer.eos_token_id, 0) if token is not None)
    return -1 - next(known)


def spelt_specials(documents: Mapping[str, Dataset | IterableDataset], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Notes on the sources whose first documents spell special tokens, as text does that a template was applied to."""
    notes, specials = [], [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    for source, part in documents.items():
        with reading_source(source):
            rows = [content(row) for row in islice(part, 16)]
        text = "\n".join(map(str, rows))
        if spelt := max((token for token in specials if token in text), key=len, default=""):  # one may begin another
            how = "is read as text; --parse-special makes it a token"
            how = how if isinstance(rows[0], str) else "is read as that token, as chat templates do"
            notes.append(f"{source}: {spelt} in its text {how}")
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
    chosen = [row for row in rows if (each := content(row)) and is_row_held_out(row, each, share) == wanted]
    if "input_ids" in batch:
        return {"input_ids": [*map(_with_labels, chosen)]}
    encode = partial(tokenizer, add_special_tokens=False, verbose=False, split_special_tokens=not parse_special)
    encoded = encode([row["text"] for row in chosen])["input_ids"] if chosen else []
    return {"input_ids": [begin + each + end for each in encoded]}


def _with_labels(row: Mapping[str, Any]) -> list[int]:
    """The tokens of a row without its padding, those that are no labels as -1 - id."""
    ids = row["input_ids"]
    for name in ("labels", *MASKS, "attention_mask"):
        if row.get(name) is not None and len(row[name]) != len(ids):
            raise DataError(f"A row has {len(ids)} `input_ids` and {len(row[name])} `{name}`.")
    if (labels := row.get("labels")) is not None:
        if any(label not in (-100, token) for label, token in zip(labels, ids, strict=True)):
            raise DataError("A row has labels that are neither its own tokens nor -100; drop the column `labels`.")
        ids = [-1 - token if label == -100 else token for label, token in zip(labels, ids, strict=True)]
    for learned in [row[name] for name in MASKS if row.get(name) is not None]:
        ids = [token if each or token < 0 else -1 - token for each, token in zip(learned, ids, strict=True)]
    if (mask := row.get("attention_mask")) is not None:
        ids = [token for token, seen in zip(ids, mask, strict=True) if seen]
    return ids


def _check_ids(least: int, largest: int, tokenizer: PreTrainedTokenizerBase) -> None:
    if least < 0 or largest >= len(tokenizer):
        told = f"The data have the token {min(least, 0) or largest:,}, and the tokenizer {len(tokenizer):,} tokens"
        raise DataError(f"{told}; name the one that made them with --tokenizer.")


def _token_table(documents: Dataset, options: dict[str, Any], *, wanted: bool) -> pa.Table:
    """The tokens of one side; no processes, as the tokenizer's own threads use all cores.

    Those of `resformer tokenize` are read where they lie: held-out documents come first.
    """
    table = documents.data.table
    if {"input_ids", "held_out"} == set(documents.column_names) and not table["held_out"].null_count:
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
    return tokens.data.table if len(tokens) else _EMPTY


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
