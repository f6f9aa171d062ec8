"""Small tokenizers of every kind, as the files that checkpoints have."""

import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import sentencepiece
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES, tokenizer_class_from_name

TEXT = (
    "The quick brown fox doesn't jump over 12345 lazy dogs. Straße naïve ąęść\n"
    "def forward(self, x):\n    return x + 1  # two  spaces\n"
    "Съешь же ещё этих мягких французских булок. 中文字符测试 日本語 한국어 العربية हिन्दी\n"
    "the then there these hello world HelloWorld camelCase 2024 1000 10\n"
).splitlines() * 4
SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
SETTINGS = (
    "padding_side truncation_side model_max_length model_input_names special_tokens_map all_special_ids chat_template"
).split()
TEMPLATE = "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


def _byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(r"\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+", "isolated")  # type: ignore[arg-type]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=340, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    return tokenizer


def _metaspace() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    pieces = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer.train_from_iterator(TEXT, trainers.BpeTrainer(vocab_size=400, special_tokens=pieces, show_progress=False))
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = content["added_tokens"][: len(SPECIAL)]  # bytes are no special tokens
    tokenizer = Tokenizer.from_str(json.dumps(content))
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def _unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=250, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator(TEXT, trainer)
    return tokenizer


def _word_piece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *SPECIAL]
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(TEXT, trainer)
    return tokenizer


@cache
def tokenizer_json(kind: str) -> str:
    made = {"bytes": _byte_level, "metaspace": _metaspace, "unigram": _unigram, "wordpiece": _word_piece}[kind]()
    return str(made.to_str())


@cache
def sentencepiece_model(kind: str) -> bytes:
    """Of `kind` bpe or unigram."""
    with TemporaryDirectory() as folder:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(TEXT),
            model_prefix=f"{folder}/m",
            model_type=kind,
            vocab_size=400,
            byte_fallback=True,
            character_coverage=1.0,
            hard_vocab_limit=False,
            user_defined_symbols=SPECIAL[3:],
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            minloglevel=2,
        )
        return Path(f"{folder}/m.model").read_bytes()


@cache
def _vocabulary_and_merges() -> dict[str, str]:
    model = json.loads(tokenizer_json("bytes"))["model"]
    merges = ["#version: 0.2", *(" ".join(pair) for pair in model["merges"]), ""]
    return {"vocab.json": json.dumps(model["vocab"]), "merges.txt": "\n".join(merges)}


def _own(class_name: str) -> dict[str, str | bytes]:
    """The files that the class itself asks for, but for tokenizer.json."""
    found = tokenizer_class_from_name(class_name)
    kind = "unigram" if getattr(getattr(found, "model", None), "__name__", "") == "Unigram" else "bpe"
    files: dict[str, str | bytes] = {}
    for name in getattr(found, "vocab_files_names", {}).values():
        if name.endswith((".model", ".spm")):
            files[name] = sentencepiece_model(kind)
        elif name in _vocabulary_and_merges():
            files[name] = _vocabulary_and_merges()[name]
        elif name == "vocab.txt":
            files[name] = "\n".join(json.loads(tokenizer_json("wordpiece"))["model"]["vocab"])
        elif name == "bpe.codes":
            files[name] = _vocabulary_and_merges()["merges.txt"]
    return files


#: Form -> the class's name -> the files.
FORMS: dict[str, Callable[[str], dict[str, str | bytes]]] = {
    **{
        kind: lambda name, kind=kind: {"tokenizer.json": tokenizer_json(kind)}  # type: ignore[misc]
        for kind in ("bytes", "metaspace", "unigram", "wordpiece")
    },
    "sentencepiece": lambda name: {"tokenizer.model": sentencepiece_model("bpe")},
    "vocabulary": lambda name: dict(_vocabulary_and_merges()),
    "own": _own,
}
#: Where the class is named.
PLACES = ("tokenizer_config.json", "tokenizer_config.json, Fast", "config.json", "nowhere")
#: Every class that `AutoTokenizer` knows, names of older versions, and one that nobody has.
CLASSES = sorted(
    {name for name in TOKENIZER_MAPPING_NAMES.values() if name is not None}
    | {"PreTrainedTokenizer", "PreTrainedTokenizerFast", "BloomTokenizerFast", "NoSuchTokenizer"}
)


def write_tokenizer(folder: Path, class_name: str, form: str, place: str, **settings: Any) -> None:
    """Writes tokenizer files into a folder with a config.json."""
    for name, content in FORMS[form](class_name).items():
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    settings = {"chat_template": TEMPLATE, "model_max_length": 77, "eos_token": "<|im_end|>", **settings}
    if place.startswith("tokenizer_config.json"):
        settings["tokenizer_class"] = class_name.removesuffix("Fast") + "Fast" * place.endswith("Fast")
    if place == "nowhere" and form in ("bytes", "sentencepiece"):
        return  # no tokenizer_config.json either
    if place == "config.json":
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "tokenizer_class": class_name}))
    else:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))


def combinations(family: int) -> Iterator[tuple[str, str, str]]:
    """(class, form, place): every class once; for other families in other forms and places."""
    forms, places = [*FORMS], PLACES[:-1]
    for number, name in enumerate(CLASSES):
        yield name, forms[(number + family) % len(forms)], places[(number // len(forms) + family) % len(places)]
    for form in forms:
        yield "", form, "nowhere"


def facts(folder: Path) -> dict[str, Any]:
    """What `AutoTokenizer` makes of a folder, as a user sees it; the class aside."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    special = [*tokenizer.all_special_tokens, *SPECIAL]
    texts = [
        *TEXT[:9],
        "  two  spaces\n\n\ttab ",
        "e\u0301 \U0001f600 12345",
        "",
        *(f"{t} a{t}b  {t}\nc" for t in special),
    ]
    seen: dict[str, Any] = {name: getattr(tokenizer, name) for name in SETTINGS}
    for text in texts:
        try:
            ids, plain = (tokenizer(text, add_special_tokens=added)["input_ids"] for added in (True, False))
            seen[text] = [ids, plain, tokenizer.decode(ids), tokenizer.decode(ids, skip_special_tokens=True)]
        except Exception as error:  # no unknown token, for one
            seen[text] = type(error).__name__
    if tokenizer.chat_template is not None:
        chat = [{"role": "user", "content": "Hi  there"}, {"role": "assistant", "content": " 12"}]
        seen["chat"] = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    return seen
