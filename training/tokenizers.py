"""Tokenizers of a model from scratch: bytes, one trained on the data, or that of another checkpoint."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from datasets import Dataset, IterableDataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from resformer.errors import CheckpointError, one_line
from resformer.training.data import training_texts
from resformer.untrusted import check_folder

_END = "<|endoftext|>"
_ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
_LEARNED_FROM = 100_000_000  # characters that a BPE tokenizer is trained on at most, an equal part of each source


def load_tokenizer(name: str | Path, vocab_size: int | None, remedy: str, **options: Any) -> PreTrainedTokenizerBase:
    """A checkpoint's tokenizer, for a model with `vocab_size` tokens, or for any.

    Args:
        remedy: what to do without one, for the message.
        options: of `AutoTokenizer.from_pretrained`.

    Raises:
        CheckpointError: it cannot be loaded, or has more tokens than the model.
    """
    if "gguf_file" not in options:
        check_folder(name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False, **options)
    except Exception as error:  # a corrupt file raises any
        raise CheckpointError(f"{name}: has no tokenizer that can be loaded ({one_line(error)}); {remedy}.") from error
    if vocab_size is not None and len(tokenizer) > vocab_size:
        raise CheckpointError(
            f"{name}: its tokenizer has {len(tokenizer):,} tokens, the model {vocab_size:,}; {remedy}."
        )
    return tokenizer


def make_tokenizer(
    name: str, documents: Mapping[str, Dataset | IterableDataset], held_out: float
) -> PreTrainedTokenizerBase:
    """A tokenizer with an end-of-sequence token alone, or a checkpoint's with its own.

    Args:
        name: "bytes"; "bpe:N", trained on the documents that are not held out; a folder or Hub id.
        documents: of `load_documents`.
        held_out: as of `pack_documents`.

    Raises:
        CheckpointError: the tokenizer cannot be loaded.
        ValueError: `name` is "bpe:" without a number of at least 257, or there are no documents to train it on.
    """
    kind, _, size = name.partition(":")
    if name == "bytes":
        vocabulary = {_END: 0, **{letter: index for index, letter in enumerate(_ALPHABET, start=1)}}
        model = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
        model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    elif kind == "bpe":
        if not size.isdecimal() or int(size) <= len(_ALPHABET):
            raise ValueError(f"tokenizer is {name!r}; expected bpe: and a number of tokens from 257 up.")
        if not documents:
            raise ValueError(f"tokenizer is {name!r}, which is trained on data; name some with --data.")
        model = Tokenizer(models.BPE())
        model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        trainer = trainers.BpeTrainer(
            vocab_size=int(size), special_tokens=[_END], initial_alphabet=_ALPHABET, show_progress=False
        )
        parts = [training_texts(source, part, held_out) for source, part in documents.items()]
        most = _LEARNED_FROM // len(parts)
        model.train_from_iterator(chain.from_iterable(_bounded(texts, most) for texts in parts), trainer)
    else:
        return load_tokenizer(name, None, "expected bytes, bpe:N, a folder or a Hub id")
    model.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=model, eos_token=_END)


def _bounded(texts: Iterable[str], characters: int) -> Iterator[str]:
    """The texts until they have so many characters."""
    seen = 0
    for text in texts:
        yield text
        seen += len(text)
        if seen >= characters:
            return
