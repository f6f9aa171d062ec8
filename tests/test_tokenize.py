"""`resformer tokenize`: the tokens of `pretrain`'s own reader, in files that a stopped run goes on with."""

import hashlib
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pyarrow.parquet as pq
import pytest
from datasets import Dataset
from transformers import AutoTokenizer

from resformer.errors import CheckpointError
from resformer.training import tokenizing
from resformer.training.data import load_documents
from resformer.training.options import TokenizeOptions, count
from resformer.training.packing import pack_documents
from resformer.training.tokenizers import make_tokenizer


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """700 lines, one a document."""
    (tmp_path / "text.txt").write_text("\n".join(f"Line {number} says {number**5}." for number in range(700)))
    return tmp_path


def options(folder: Path, output: str = "tokens", **more: Any) -> TokenizeOptions:
    given = {"tokenizer": "bytes", "tokens_per_file": 5000, "held_out": 0.1, "sample_by": "line", **more}
    return TokenizeOptions(data=[str(folder / "text.txt")], output=str(folder / output), **given)


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.glob("*.parquet")}


def test_the_files_hold_the_tokens_of_the_text(text: Path, invoke: Callable[..., Any]) -> None:
    arguments = ["tokenize", "text.txt", "tokens", "--tokenizer", "bytes", "--sample-by", "line", "--held-out", "0.1"]
    done = invoke(text, *arguments, "--tokens-per-file", "5k", "--json")
    assert done.exit_code == 0, done.output
    index, tokenizer = json.loads(done.stdout), AutoTokenizer.from_pretrained(text / "tokens" / "tokenizer")
    assert index == json.loads((text / "tokens" / "index.json").read_text())
    assert {file["name"]: file["sha256"] for file in index["files"]} == digests(text / "tokens")
    assert index["train"]["documents"] + index["validation"]["documents"] == 700
    assert len([file for file in index["files"] if file["name"].startswith("train")]) > 3

    common: dict[str, Any] = {"block": 16, "held_out": 0.1, "held_out_blocks": 64, "separate": True}
    lines = load_documents([str(text / "text.txt")], sample_by="line")
    written = load_documents([str(text / "tokens")])
    expected, blocks = (pack_documents(documents, tokenizer, **common) for documents in (lines, written))
    assert blocks.digest == expected.digest
    assert index["train"]["tokens"] == len(expected.train.tokens)


def test_a_stopped_run_goes_on_to_the_same_files(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizing.tokenize(options(text, "whole"))
    write, begun = tokenizing._write_file, []

    def interrupted(path: Path, table: Any) -> Any:
        begun.append(path)
        if len(begun) in (2, 5):
            raise KeyboardInterrupt
        return write(path, table)

    monkeypatch.setattr(tokenizing, "_write_file", interrupted)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            tokenizing.tokenize(options(text))
        assert not (text / "tokens" / "index.json").exists()
    assert tokenizing.tokenize(options(text)) is not None
    assert digests(text / "tokens") == digests(text / "whole")


def test_a_changed_source_is_noticed(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizing, "_write_file", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        tokenizing.tokenize(options(text))
    lines = (text / "text.txt").read_text()
    for changed in (f"Line -1 says 1.\n{lines}", lines.replace("Line 9 says", "Line 8 says")):
        (text / "text.txt").write_text(changed)
        with pytest.raises(CheckpointError, match=r"digest of .*text.txt was '\w+', is '\w+'. Give another folder"):
            tokenizing.tokenize(options(text))


def test_special_tokens_in_a_text_are_told_and_parsed_where_asked(
    text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (text / "text.txt").write_text("one<|endoftext|>two")
    ends = []
    for parse_special in (False, True):
        tokenizing.tokenize(options(text, f"tokens-{parse_special}", parse_special=parse_special, held_out=0.0))
        rows = [pq.read_table(path) for path in (text / f"tokens-{parse_special}").glob("*.parquet")]
        ends.append(sum(table["input_ids"].to_pylist()[0].count(0) for table in rows))
    assert ends == [1, 2]
    assert capsys.readouterr().err.count("<|endoftext|> in its text is read as text; --parse-special makes it") == 1


@pytest.mark.parametrize("letters", ["ACGT", " "])
def test_a_long_word_is_learned_in_time(letters: str) -> None:
    """DNA, base64, a long run of spaces; the time grew with the square of the length."""
    word = "".join(random.Random(0).choices(letters, k=1_000_000))
    begin = time.process_time()
    tokenizer = make_tokenizer("bpe:300", {"x": Dataset.from_dict({"text": [word]})}, 0.0)
    assert time.process_time() - begin < 30
    ids = tokenizer(word[:5000])["input_ids"]
    assert tokenizer.decode(ids) == word[:5000]
    assert len(ids) < 2500


@pytest.mark.slow
def test_processes_write_the_same_files(text: Path) -> None:
    tokenizing.tokenize(options(text, "whole"))
    tokenizing.tokenize(options(text, workers=2))
    assert digests(text / "tokens") == digests(text / "whole")


@pytest.mark.parametrize(("text_", "number"), [("300k", 300_000), ("1.6B", 1_600_000_000), ("2,048", 2048)])
def test_counts_are_read(text_: str, number: int) -> None:
    assert count(text_) == number


def test_a_new_model_has_the_tokenizer_of_its_tokens(text: Path, invoke: Callable[..., Any]) -> None:
    tokenizing.tokenize(options(text, tokenizer="bpe:300"))
    done = invoke(text, "new", "same", "--data", "tokens", "--no-weights")
    assert done.exit_code == 0, done.output
    vocabularies = [AutoTokenizer.from_pretrained(text / name).get_vocab() for name in ("same", "tokens/tokenizer")]
    assert vocabularies[0] == vocabularies[1]
