"""`AutoTokenizer` gives of a result what it gives of the source, which is compared: ids of texts, and all settings."""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from resformer.convert.judging import differences
from resformer.convert.source import OpenedSource
from resformer.errors import CheckpointError, VerificationError, first_names, one_line, quoted
from resformer.files import replace_text
from resformer.loading import without_a_word
from resformer.modeling.any_decoder import text_config
from resformer.names import TOKENIZER_CONFIG
from resformer.untrusted import read_json

_ATTRIBUTES = (
    "padding_side truncation_side model_max_length model_input_names clean_up_tokenization_spaces split_special_tokens "
    "special_tokens_map all_special_tokens all_special_ids chat_template response_template chat_control_tokens"
).split()
_TEXTS = (
    "Hello world",
    " leading and trailing ",
    "two  spaces   three    four",
    "line\nbreak\n\ntwo\r\nreturn\n \n\n\n",
    "\ttab\t\ttabs x = y[1:]\t",
    "12345 3.14 1,000,000 2024-01-31 0x7f 007",
    "don't I'LL we've CamelCase snake_case HTTPServer(x)+=1; // <b>&amp;</b>",
    "Zażółć gęślą jaźń, naïve Straße",
    "Русский текст, український",
    "中文字符测试。日本語のテキスト、한국어 문장",
    "العربية עברית हिन्दी पाठ ภาษาไทย",
    "e\u0301 n\u0303 A\u030a \ufb01 \uff21 \u00bd",
    "\U0001f600\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea",
    "\u00a0\u200b\ufeff\u2581\u0120 odd",
    "",
    " ",
    "   ",
    "\n",
)
#: Added tokens that are tried in texts: the first and the last.
_MOST_ADDED = 64


@dataclass(frozen=True)
class TokensComparison:
    """Two tokenizers: the ids of texts and these back, vocabularies, special tokens, sides, limits, chat templates."""

    texts: int
    identical: bool
    difference: str | None = None  # the first one

    def __str__(self) -> str:
        return f"identical on {self.texts} texts" if self.identical else f"differ: {self.difference}"


def load_tokenizer(name: str | Path, **options: Any) -> PreTrainedTokenizerBase:
    """What `AutoTokenizer` makes of a checkpoint, without its code and without a word; raises the reason alone."""
    try:
        with without_a_word():
            tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False, **options)
    except BaseException as error:  # Transformers raises nearly anything for a bad file, and tokenizers' Rust panics
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise CheckpointError(one_line(error if " " in str(error) else repr(error))) from error
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise CheckpointError(f"{type(tokenizer).__name__} is no tokenizer")
    return tokenizer


def tokenizer_of(source: OpenedSource) -> tuple[PreTrainedTokenizerBase | None, str]:
    """(what `AutoTokenizer` makes of a source; why it makes nothing)."""
    try:
        return load_tokenizer(source.to_load, local_files_only=True), ""
    except CheckpointError as error:
        reason = str(error).replace(str(source.to_load), source.name)
        return None, reason if source.checkpoint.tokenizer_files else "it has none"


def compare_tokens(one: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase) -> TokensComparison:
    """Whether both are, and read, the same. Chat templates are compared as they stand: none is run."""
    added = list(dict.fromkeys([*one.all_special_tokens, *map(str, _added_tokens(one).values())]))
    if len(added) > _MOST_ADDED:
        added = added[: _MOST_ADDED // 2] + added[-_MOST_ADDED // 2 :]
    texts = [*_TEXTS, *(f"{token} a{token}b {token}  {token}\n1{token}" for token in added)]
    with without_a_word():
        difference = _first_difference(one, other, texts)
    return TokensComparison(len(texts), difference is None, difference)


def _first_difference(one: Any, other: Any, texts: Iterable[str]) -> str | None:
    for text in texts:
        for what, (first, second) in differences(_read(one, text), _read(other, text)).items():
            pairs = enumerate(zip(first, second, strict=False))
            start = max(0, next((n for n, pair in pairs if pair[0] != pair[1]), 0) - 1)
            seen = quoted(first[start:]), quoted(second[start:])
            return f"{what} {quoted(text)} are, from {start} on, {seen[0]} and {seen[1]}"
    settings = ({name: getattr(each, name, None) for name in _ATTRIBUTES} for each in (one, other))
    for name, (first, second) in differences(*settings).items():
        return f"{name} is {quoted(first)} and {quoted(second)}"
    added = ({n: repr(token) for n, token in _added_tokens(each).items()} for each in (one, other))
    for key, (first, second) in (differences(one.get_vocab(), other.get_vocab()) | differences(*added)).items():
        return f"the token {quoted(key)} is {quoted(first)} and {quoted(second)}"
    return None


def _added_tokens(tokenizer: Any) -> dict[int, Any]:
    """Id -> token, with its settings, in order; of Mistral's own tokenizers none, which have no such table."""
    decoder = tokenizer.added_tokens_decoder
    return dict(sorted(decoder.items())) if isinstance(decoder, dict) else {}


def _read(tokenizer: Any, text: str) -> dict[str, Any]:
    """What -> the sequence: of a text alone, cut and in a pair, padded, and back; or the name of an error.

    The last calls are plain ones: a tokenizer keeps, and would save, truncation and padding of the last.
    """

    def inputs(*texts: Any, **options: Any) -> list[Any]:
        return sorted(tokenizer(*texts, **options).items())

    calls: dict[str, Callable[[], Any]] = {
        "the ids of": lambda: tokenizer(text)["input_ids"],
        "the ids without special tokens of": lambda: tokenizer(text, add_special_tokens=False)["input_ids"],
        "the inputs of": lambda: inputs(text),
        "the inputs, cut, in a pair, of": lambda: inputs(text, "a pair", truncation="longest_first", max_length=9),
        "the inputs, padded, of": lambda: inputs([text, "a b c d"], padding=True),
        "the letters back of": lambda: tokenizer.decode(tokenizer(text)["input_ids"]),
        "the letters back, without special tokens, of": lambda: tokenizer.decode(
            tokenizer(text)["input_ids"], skip_special_tokens=True
        ),
    }
    sequences = {}
    for what, call in calls.items():
        try:
            sequences[what] = call()
        except Exception as error:  # of a tokenizer that cannot read this text
            sequences[what] = type(error).__name__
    return sequences


def compare_folders(source: OpenedSource, folder: Path) -> tuple[TokensComparison | None, list[str]]:
    """(the tokenizers of a source and of a result, which must not differ, compared; what a person should know)."""
    tokenizer, reason = tokenizer_of(source)
    if tokenizer is None:
        names = source.checkpoint.tokenizer_files
        if not names:
            return None, [f"{source.name} has no tokenizer that can be read: save one beside the result."]
        told = f"{source.name}: its tokenizer cannot be loaded ({reason}). Its files went along as they are"
        return None, [f"{told}: {first_names(names)}."]
    try:
        tokens = compare_tokens(tokenizer, load_tokenizer(folder, local_files_only=True))
        difference = tokens.difference
    except CheckpointError as error:
        difference = str(error)
    if difference is not None:
        raise VerificationError(
            f"{source.name}: AutoTokenizer gives the result another tokenizer than the source: {difference}. Nothing "
            "was written. Save the tokenizer anew, AutoTokenizer.from_pretrained(SOURCE).save_pretrained(FOLDER), and "
            "convert with its files in the place of the source's."
        )
    rows, highest = text_config(source.config).vocab_size, max(tokenizer.get_vocab().values(), default=-1)
    if highest < rows:
        return tokens, []
    return tokens, [
        f"{source.name}: its tokenizer has ids up to {highest:,}, and the model {rows:,} rows of embeddings: a text "
        "with such a token fails, as with the source."
    ]


def keep_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> TokensComparison:
    """Makes `AutoTokenizer` give `tokenizer`, which may be another model's, of a folder that has its files.

    Raises:
        VerificationError: `AutoTokenizer` gives another one, whichever class tokenizer_config.json names.
    """
    path, differences = folder / TOKENIZER_CONFIG, list[str]()
    for name in (None, type(tokenizer).__name__, "TokenizersBackend"):  # the last reads tokenizer.json as it stands
        if name is not None:
            settings = read_json(path) if path.exists() else {}
            replace_text(path, json.dumps({**settings, "tokenizer_class": name}, indent=2) + "\n")
        try:
            tokens = compare_tokens(tokenizer, load_tokenizer(folder, local_files_only=True))
        except CheckpointError as error:
            differences.append(str(error))
            continue
        if tokens.identical:
            return tokens
        differences.append(str(tokens.difference))
    raise VerificationError(f"AutoTokenizer gives the result another tokenizer than the source: {differences[0]}.")
