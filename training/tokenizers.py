"""Tokenizers of a model from scratch: bytes, one trained on the data, or that of another checkpoint."""

from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from datasets import Dataset, IterableDataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from resformer.convert import tokens
from resformer.errors import CheckpointError
from resformer.loading import check_source
from resformer.training.data import INDEX, DataError, training_texts

#: The folder of the tokenizer in what `resformer tokenize` writes.
TOKENIZER = "tokenizer"

_END = "<|endoftext|>"
_ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
_LONG = 1024  # characters of a word that are learned from together: each merge goes through a word again
_LEARNED_FROM = 100_000_000  # characters that a BPE tokenizer is trained on at most, an equal part of each source


def load_tokenizer(name: str | Path, vocab_size: int | None, remedy: str, **options: Any) -> PreTrainedTokenizerBase:
    """A checkpoint's tokenizer, for a model with `vocab_size` tokens, or for any; `remedy` says what to do without."""
    if "gguf_file" not in options:
        check_source(name)
    try:
        tokenizer = tokens.load_tokenizer(name, **options)
    except CheckpointError as error:
        raise CheckpointError(f"{name}: has no tokenizer that can be loaded ({error}); {remedy}.") from error
    if vocab_size is not None and len(tokenizer) > vocab_size:
        raise CheckpointError(f"{name}: has {len(tokenizer):,} tokens, the model {vocab_size:,}; {remedy}.")
    return tokenizer


def tokenizers_of(sources: Iterable[str]) -> list[Path]:
    """The folders of the tokenizers of those sources that `resformer tokenize` has written."""
    folders = [Path(source).expanduser() for source in sources]
    return [folder / TOKENIZER for folder in folders if (folder / INDEX).is_file()]


def check_tokens(sources: Iterable[str], tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises DataError where a source has the tokens of another tokenizer."""
    for folder in tokenizers_of(sources):
        theirs = load_tokenizer(folder, None, "tokenise again").get_vocab()
        if not theirs.items() <= tokenizer.get_vocab().items():  # it may have further ones
            told = f"{folder.parent}: has the tokens of another tokenizer than {tokenizer.name_or_path or 'the model'}"
            raise DataError(f"{told}; tokenise again with that, or name {folder} with --tokenizer.")


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> tokens.TokensComparison:
    """Writes it into the folder of a checkpoint, so that `AutoTokenizer` gives it, or its equal, of that."""
    tokenizer.save_pretrained(folder)
    return tokens.keep_tokenizer(tokenizer, folder)


def make_tokenizer(
    name: str, documents: Mapping[str, Dataset | IterableDataset], held_out: float
) -> PreTrainedTokenizerBase:
    """A tokenizer with an end-of-sequence token alone, or a checkpoint's with its own.

    Args:
        name: "bytes"; "bpe:N", trained on the documents that are not held out; a folder or Hub id.
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
        words = pre_tokenizers.ByteLevel(add_prefix_space=False)
        model.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.FixedLength(_LONG)])
        trainer = trainers.BpeTrainer(
            vocab_size=int(size), special_tokens=[_END], initial_alphabet=_ALPHABET, show_progress=False
        )
        most = _LEARNED_FROM // len(documents)
        parts = (training_texts(source, part, held_out, most) for source, part in documents.items())
        model.train_from_iterator(chain.from_iterable(parts), trainer)
        model.pre_tokenizer = words
    else:
        return load_tokenizer(name, None, "expected bytes, bpe:N, a folder or a Hub id")
    model.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=model, eos_token=_END)
