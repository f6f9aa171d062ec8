"""What a study trains on: packed text of any source, and a tokenizer that has seen its training part alone."""

import hashlib
import platform
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from resformer.errors import CheckpointError, brief
from resformer.training.corpus import standard_library
from resformer.training.data import Blocks, DataError, PackedBlocks, is_held_out, load_documents, pack_documents

__all__ = ["StudyData", "bytes_per_token", "study_data"]

_END = "<|endoftext|>"
_ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
_LEARNED_FROM = 100_000_000  # characters that a BPE tokenizer is trained on at most


@dataclass(frozen=True)
class StudyData:
    """Blocks to train on and held-out ones."""

    name: str  # as people say it
    blocks: Blocks
    tokenizer: PreTrainedTokenizerBase
    bytes_per_token: float  # of the held-out blocks

    @property
    def fingerprint(self) -> dict[str, Any]:
        """Differs where other tokens are trained or evaluated on. Of very large data the start and the length tell."""
        digest = hashlib.sha256()
        for side in (self.blocks.train, self.blocks.held_out):
            for chunk in side.tokens.slice(0, 2**26).chunks:
                digest.update(chunk.to_numpy().astype("<i8"))
        return {
            "training_tokens": len(self.blocks.train) * self.blocks.train.block,
            "held_out_tokens": len(self.blocks.held_out) * self.blocks.held_out.block,
            "sha256": digest.hexdigest(),
        }


def study_data(
    sources: Sequence[str],
    *,
    tokenizer: str | PreTrainedTokenizerBase,
    block: int,
    held_out: float,
    held_out_blocks: int,
    split: str = "train",
    text_column: str = "text",
    sample_by: str = "paragraph",
) -> StudyData:
    """Reads and packs the sources, or Python's standard library if there are none.

    Args:
        tokenizer: "bytes"; "bpe:N", trained on the training part; a folder or Hub id; or one that is there.
        held_out: the share of documents that is held out. Of the standard library it is one module in ten.
        sources, split, text_column, sample_by: as of `load_documents`.

    Raises:
        DataError: the data cannot be read or do not suffice.
        CheckpointError: the tokenizer cannot be loaded.
        ValueError: `tokenizer` is "bpe:" and no number from 257 up.
    """
    if not sources:
        made = _tokenizer(tokenizer, lambda: standard_library(held_out=False))
        blocks = Blocks(
            _packed(standard_library(held_out=False), made, block, None),
            _packed(standard_library(held_out=True), made, block, held_out_blocks),
        )
        name = f"the sources of the standard library of Python {platform.python_version()}"
    else:
        documents = load_documents(sources, split=split, text_column=text_column, sample_by=sample_by)
        training = (text for text in documents["text"] if text and not is_held_out(text, held_out))
        made = _tokenizer(tokenizer, lambda: training)
        blocks = pack_documents(documents, made, block=block, held_out=held_out, held_out_blocks=held_out_blocks)
        name = ", ".join(Path(source).name if Path(source).exists() else source for source in sources)
    return StudyData(name, blocks, made, bytes_per_token(blocks.held_out, made))


def bytes_per_token(blocks: PackedBlocks, tokenizer: PreTrainedTokenizerBase) -> float:
    """Bytes of text per token, end-of-sequence tokens included; a loss over this and ln 2 is in bits per byte.

    A character that the ends of the blocks cut counts as what a decoder shows for it.
    """
    count = len(blocks) * blocks.block
    text = tokenizer.decode(
        blocks.tokens.slice(0, count).to_pylist(), skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    return len(text.encode("utf-8", "replace")) / count


def _packed(texts: Iterable[str], tokenizer: PreTrainedTokenizerBase, block: int, most: int | None) -> PackedBlocks:
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    chunks = []
    texts = iter(texts)
    while batch := list(islice(texts, 64)):
        ids = tokenizer(batch, add_special_tokens=False, verbose=False)["input_ids"]
        chunks.append(pa.array([token for tokens in ids for token in tokens + end], pa.int32()))
    packed = PackedBlocks(pa.chunked_array(chunks, pa.int32()), block, most)
    if not len(packed):
        raise DataError(f"The standard library has {len(packed.tokens):,} tokens, too few for a block of {block}.")
    return packed


def _tokenizer(tokenizer: str | PreTrainedTokenizerBase, texts: Any) -> PreTrainedTokenizerBase:
    if not isinstance(tokenizer, str):
        return tokenizer
    kind, _, size = tokenizer.partition(":")
    if tokenizer == "bytes":
        vocabulary = {_END: 0, **{letter: index for index, letter in enumerate(_ALPHABET, start=1)}}
        model = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
        model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    elif kind == "bpe":
        if not size.isdecimal() or int(size) <= len(_ALPHABET):
            raise ValueError(f"tokenizer is {tokenizer!r}; expected bpe: and a number of tokens from 257 up.")
        model = Tokenizer(models.BPE())
        model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        trainer = trainers.BpeTrainer(
            vocab_size=int(size), special_tokens=[_END], initial_alphabet=_ALPHABET, show_progress=False
        )
        model.train_from_iterator(_bounded(texts()), trainer)
    else:
        try:
            return AutoTokenizer.from_pretrained(tokenizer)
        except (OSError, ValueError, ImportError) as error:
            raise CheckpointError(
                f"{tokenizer}: is no tokenizer that can be loaded; expected bytes, bpe:N, a folder or a Hub id: "
                f"{brief(error)}"
            ) from error
    model.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=model, eos_token=_END)


def _bounded(texts: Iterable[str]) -> Iterator[str]:
    seen = 0
    for text in texts:
        yield text
        seen += len(text)
        if seen >= _LEARNED_FROM:
            return
