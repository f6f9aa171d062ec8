"""The tokenizer goes along: `AutoTokenizer` gives of a result what it gives of the source, which is compared.

`AutoTokenizer` chooses a class by the model type in config.json, by `tokenizer_class` there or in
tokenizer_config.json, and by what tokenizer.json holds. A result has another model type than its source, so its
tokenizer_config.json names the class that was chosen for the source.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from resformer.configuration.connection_fields import ConnectionFields
from resformer.convert.source import OpenedSource, check_number
from resformer.errors import CheckpointError, OutputError, VerificationError, first_names, one_line, quoted
from resformer.files import replace_text, writing
from resformer.hub import asking_hub, fetch
from resformer.loading import without_a_word
from resformer.modeling.any_decoder import text_config
from resformer.names import TOKENIZER_CONFIG
from resformer.record import read_record
from resformer.untrusted import MIB, MOST_BYTES, check_folder, parse_json, read_bounded, read_json

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
_CLASS = re.compile(r'"tokenizer_class"\s*:\s*("(?:[^"\\]|\\.)*"|null)(?:, )?')
#: Reads tokenizer.json as it stands.
_PLAIN = "TokenizersBackend"


@dataclass(frozen=True)
class TokensComparison:
    """Two tokenizers: the ids of texts and these back, vocabularies, special tokens, sides, limits, chat templates."""

    texts: int
    identical: bool
    difference: str | None = None  # the first one

    def __str__(self) -> str:
        return f"identical on {self.texts} texts" if self.identical else f"differ: {self.difference}"


@dataclass(frozen=True)
class CarriedTokenizer:
    """The outcome of `carry_tokenizer`."""

    tokens: TokensComparison | None = None  # None: the source has no tokenizer that can be loaded
    classes: tuple[str | None, str | None] | None = None  # that the source and the result name, where they differ
    warnings: tuple[str, ...] = ()


def load_tokenizer(name: str | Path, **options: Any) -> PreTrainedTokenizerBase:
    """What `AutoTokenizer` makes of a checkpoint, without its code and without a word.

    Raises:
        CheckpointError: it cannot; the message is the reason alone.
    """
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


@contextmanager
def source_tokenizer(source: OpenedSource) -> Iterator[PreTrainedTokenizerBase]:
    """The source's tokenizer, read from a folder that has those of its files that go along, until the block ends.

    Raises:
        CheckpointError: it cannot be loaded; the message is the reason alone.
    """
    if source.gguf is not None:
        yield load_tokenizer(source.gguf.parent, gguf_file=source.gguf.name)
        return
    with TemporaryDirectory(prefix="resformer-") as name:
        folder, settings = Path(name), dict[str, Any]()
        for file in source.checkpoint.side_files:
            content = read_bounded(file.path, MOST_BYTES, source.folder)
            if file.name == TOKENIZER_CONFIG:
                settings = parse_json(content, file.name)
            copy_file(content, folder / file.name)
        copy_file(read_bounded(source.folder / "config.json", MIB), folder / "config.json")
        try:
            check_folder(folder)
            tokenizer = load_tokenizer(folder, local_files_only=True)
        except CheckpointError as error:
            if "auto_map" in settings:
                raise CheckpointError(f"auto_map in {TOKENIZER_CONFIG} names code, which is not run") from error
            raise CheckpointError(str(error).replace(str(folder), source.name)) from error
        yield tokenizer


def copy_file(content: bytes, path: Path) -> None:
    """Writes a file, and its folder if need be."""
    with writing(path):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)


def fetch_side_files(source: OpenedSource) -> int:
    """Downloads the side files that are still on the Hub; returns how many bytes they have."""
    missing = [file for file in source.checkpoint.side_files if not file.path.exists()]
    check_number(source, missing)
    if missing:
        with asking_hub(source.name):
            names = [file.name for file in missing]
            fetch(str(source.repo_id), str(source.revision), source.hub_files, names, MOST_BYTES)
    return sum(file.size for file in missing)


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
        for (what, first), (_, second) in zip(_read(one, text), _read(other, text), strict=True):
            if first != second:
                pairs = enumerate(zip(first, second, strict=False))
                start = max(0, next((n for n, pair in pairs if pair[0] != pair[1]), 0) - 1)
                seen = quoted(first[start:]), quoted(second[start:])
                return f"{what} {quoted(text)} are, from {start} on, {seen[0]} and {seen[1]}"
    for name in _ATTRIBUTES:
        first, second = getattr(one, name, None), getattr(other, name, None)
        if first != second:
            return f"{name} is {quoted(first)} and {quoted(second)}"
    for first, second in (
        (one.get_vocab(), other.get_vocab()),
        [{n: repr(token) for n, token in _added_tokens(each).items()} for each in (one, other)],
    ):
        for key in {**first, **second} if first != second else ():
            if first.get(key) != second.get(key):
                return f"the token {quoted(key)} is {quoted(first.get(key))} and {quoted(second.get(key))}"
    return None


def _added_tokens(tokenizer: Any) -> dict[int, Any]:
    """Id -> token, with its settings, in order; of Mistral's own tokenizers none, which have no such table."""
    decoder = tokenizer.added_tokens_decoder
    return dict(sorted(decoder.items())) if isinstance(decoder, dict) else {}


def _read(tokenizer: Any, text: str) -> Iterator[tuple[str, Any]]:
    """(what, the sequence): of a text alone, cut and in a pair, padded, and back; or the name of an error.

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
    for what, call in calls.items():
        try:
            yield what, call()
        except Exception as error:  # of a tokenizer that cannot read this text
            yield what, type(error).__name__


def keep_tokenizer(
    tokenizer: PreTrainedTokenizerBase, folder: Path, first: Callable[[], object] | None = None
) -> TokensComparison:
    """Makes `AutoTokenizer` give `tokenizer`, or its equal, of a folder with its config.json and the tokenizer's files.

    Changes no more than that takes: the class that tokenizer_config.json names, or else all of these files.

    Args:
        first: what to try before that.

    Raises:
        VerificationError: `AutoTokenizer` gives another one, whatever the files say.
    """

    def save(as_class: str | None = None) -> None:
        for name in ("special_tokens_map.json", "added_tokens.json"):  # of older forms, and read with newer ones
            (folder / name).unlink(missing_ok=True)
        with writing(folder):
            tokenizer.save_pretrained(folder)
        if as_class is not None:
            _name_class(folder, as_class)

    attempts: list[Callable[[], object]] = [] if first is None else [first]
    attempts += [lambda: _name_class(folder, type(tokenizer).__name__), save]
    if isinstance(tokenizer, PreTrainedTokenizerFast):
        attempts.append(lambda: save(_PLAIN))
    differences = []
    for attempt in attempts:
        attempt()
        try:
            tokens = compare_tokens(tokenizer, load_tokenizer(folder, local_files_only=True))
        except CheckpointError as error:
            differences.append(str(error))
            continue
        if tokens.identical:
            return tokens
        differences.append(str(tokens.difference))
    raise VerificationError(f"AutoTokenizer gives the result another tokenizer than the source: {differences[0]}.")


def carry_tokenizer(source: OpenedSource, folder: Path) -> CarriedTokenizer:
    """Makes `AutoTokenizer` give the source's tokenizer of the result: a folder with config.json and the side files.

    Raises:
        VerificationError: it gives another one.
    """
    fetch_side_files(source)
    recorded = _recorded_classes(source)
    with ExitStack() as stack:
        try:
            tokenizer = stack.enter_context(source_tokenizer(source))
        except OutputError:
            raise
        except CheckpointError as error:
            return CarriedTokenizer(None, recorded, _not_loaded(source, str(error)))
        if source.gguf is not None:
            with writing(folder):
                tokenizer.save_pretrained(folder)
        stated = _stated_class(folder)
        plain = not read_json(folder / "config.json")["model_type"].startswith("resformer")

        def restore() -> None:  # a family has its own file again
            if recorded is not None and recorded[1] == stated:
                _write_class(folder, recorded[0])

        try:
            tokens = keep_tokenizer(tokenizer, folder, restore if plain else None)
        except VerificationError as error:
            raise VerificationError(
                f"{source.name}: {error} Nothing was written. Take the tokenizer's files out of the source, and save "
                "the tokenizer elsewhere."
            ) from error
        warnings, rows = [], text_config(source.config).vocab_size
        if (highest := max(tokenizer.get_vocab().values(), default=-1)) >= rows:
            warnings.append(
                f"{source.name}: its tokenizer has ids up to {highest:,}, and the model {rows:,} rows of embeddings: a "
                "text with such a token fails, as with the source."
            )
        if getattr(getattr(tokenizer, "_tokenizer", None), "fix_mistral_regex", None) is False:
            warnings.append(
                f"{source.name}: Transformers reads its tokenizer with an incorrect regex, and so the result's. "
                "AutoTokenizer's fix_mistral_regex=True mends the source alone: set it in the source's "
                f"{TOKENIZER_CONFIG}, and convert again."
            )
    named = _stated_class(folder)
    return CarriedTokenizer(tokens, recorded if named == stated else (stated, named), tuple(warnings))


def _not_loaded(source: OpenedSource, reason: str) -> tuple[str, ...]:
    """The warning about a tokenizer that went along, and could not be compared."""
    if source.gguf is not None:
        return (f"{source.gguf}: has no tokenizer that can be read ({reason}): save one beside the result.",)
    if not (names := source.checkpoint.tokenizer_files):
        return ()  # the decision has said so
    return (
        f"{source.name}: its tokenizer cannot be loaded ({reason}). Its files went along as they are: "
        f"{first_names(names)}.",
    )


def _recorded_classes(source: OpenedSource) -> tuple[str | None, str | None] | None:
    """`CarriedTokenizer.classes` of the conversion that made this source."""
    record = read_record(source.folder) if isinstance(source.config, ConnectionFields) else None
    match (record or {}).get("tokenizer_classes"):
        case [str() | None as one, str() | None as other]:
            return one, other
    return None


def _stated_class(folder: Path) -> str | None:
    path = folder / TOKENIZER_CONFIG
    stated = read_json(path).get("tokenizer_class") if path.exists() else None
    return stated if isinstance(stated, str) else None


def _name_class(folder: Path, name: str) -> None:
    """Has tokenizer_config.json name this class, if it does not do so by an older name, or by naming none."""
    stated = (_stated_class(folder) or _PLAIN).removesuffix("Fast")
    if name != (_PLAIN if stated == "PreTrainedTokenizer" else stated):
        _write_class(folder, name)


def _write_class(folder: Path, name: str | None) -> None:
    """Changes the class in tokenizer_config.json, and no other byte; `_write_class` with the old one undoes it."""
    path = folder / TOKENIZER_CONFIG
    text = path.read_bytes().decode() if path.exists() else "{}"
    wanted = {key: value for key, value in json.loads(text).items() if key != "tokenizer_class"}
    wanted |= {} if name is None else {"tokenizer_class": name}
    entry = f'"tokenizer_class": {json.dumps(name)}'
    ways = [text.replace("{", f"{{{entry}, ", 1), text.replace("{", f"{{{entry}", 1), json.dumps(wanted, indent=2)]
    for match in _CLASS.finditer(text):  # a chat template may spell it too
        (start, end), value = (match.span(), "") if name is None else (match.span(1), json.dumps(name))
        ways.insert(0, text[:start] + value + text[end:])
    text = next(way for way in ways if _is_json(way, wanted))
    if text.strip() == "{}":
        path.unlink(missing_ok=True)
    else:
        replace_text(path, text)


def _is_json(text: str, value: object) -> bool:
    try:
        return bool(json.loads(text) == value)
    except ValueError:
        return False
