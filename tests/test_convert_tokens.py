"""`AutoTokenizer` gives of every result what it gives of the source, as Transformers reads the user's files."""

import json
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from checkpoints import FAMILIES as VARIANTS
from checkpoints import contents, family_model
from conftest import others_slow
from hub_server import Commands, Repository
from tokenizer_files import CLASSES, FORMS, combinations, facts, tokenizer_json, write_tokenizer
from transformers import AutoConfig, AutoTokenizer
from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

from resformer import retrofit, revert, verify
from resformer.names import SIDE_FILES

#: Llama-style families, each with tables of its own in Transformers.
FAMILIES = sorted({name.partition("-")[0] for name in VARIANTS})
#: Name -> family, class, form and place, of which other tokens came before: by the model type, by config.json alone, by
#: the code of LlamaTokenizer, by a class of sentencepiece.
SOURCES = {
    "mistral": ("mistral", "LlamaTokenizer", "bytes", "tokenizer_config.json, Fast"),
    "distilled": ("qwen2", "LlamaTokenizer", "bytes", "tokenizer_config.json, Fast"),
    "internlm3": ("internlm3", "InternLM3Tokenizer", "sentencepiece", "tokenizer_config.json"),
    "config": ("llama", "Qwen2Tokenizer", "vocabulary", "config.json"),
    "plain": ("qwen3", "", "bytes", "nowhere"),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of each family, without a tokenizer."""
    folder = tmp_path_factory.mktemp("models")
    for family in FAMILIES:
        family_model(family, vocab_size=420).save_pretrained(folder / family)
    return folder


def source_of(models: Path, folder: Path, family: str, class_name: str, form: str, place: str) -> Path:
    shutil.copytree(models / family, folder)
    write_tokenizer(folder, class_name, form, place)
    return folder


def walk(models: Path, folder: Path, family: str, cases: list[tuple[str, str, str]]) -> Counter[str]:
    """Converts each; asserts that the tokens are the source's, or that it is told that Transformers reads none."""
    counts: Counter[str] = Counter()
    for number, case in enumerate(cases):
        source, out = source_of(models, folder / f"source-{number}", family, *case), folder / f"out-{number}"
        report = retrofit(source, out, verify="headers", progress=False)
        try:
            expected = facts(source)
        except Exception:  # Transformers raises nearly anything
            counts["not loaded"] += 1
            assert report.tokens is None, case
            assert any("tokenizer" in warning and str(source) in warning for warning in report.warnings), case
        else:
            counts["compared"] += 1
            assert facts(out) == expected, case
            assert report.tokens is not None, (case, report.warnings)
            assert report.tokens.identical
        shutil.rmtree(source)
        shutil.rmtree(out)
    return counts


@pytest.mark.slow
def test_every_class_of_transformers_table(models: Path, tmp_path: Path) -> None:
    """Each with one family, in a form of its own."""
    counts: Counter[str] = Counter()
    for number, family in enumerate(FAMILIES):
        counts += walk(models, tmp_path, family, [*combinations(number)][number :: len(FAMILIES)])
    print(dict(counts))
    assert counts.total() == len(CLASSES) + len(FORMS)
    assert counts["compared"] > 0.4 * counts.total()


def test_every_file_that_a_tokenizer_of_transformers_reads_goes_along() -> None:
    for name in CLASSES:
        for file in getattr(tokenizer_class_from_name(name), "vocab_files_names", {}).values():
            assert SIDE_FILES.fullmatch(file), (name, file)


@pytest.mark.parametrize("name", others_slow(SOURCES, ["mistral", "plain"]))
def test_a_revert_brings_the_sources_files_back_to_the_byte(name: str, models: Path, tmp_path: Path) -> None:
    source = source_of(models, tmp_path / "source", *SOURCES[name])
    retrofit(source, tmp_path / "one", verify="headers")
    retrofit(tmp_path / "one", tmp_path / "two", "transformer", dwa=True, verify="headers")
    report = revert(tmp_path / "two", tmp_path / "back", all=True, verify="headers")
    assert report.tokens is not None
    assert report.tokens.identical
    assert facts(tmp_path / "back") == facts(source)
    written, back = ({n: text for n, text in contents(f).items() if "token" in n} for f in (source, tmp_path / "back"))
    assert back == written


def download(repository: Repository, folder: Path) -> None:
    folder.mkdir()
    for name, content in repository.items():
        (folder / name).write_bytes(bytes(content[:]))


@pytest.mark.slow
def test_the_tokens_stay_through_every_command(
    models: Path, commands: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("\n\n".join(f"Line {n}  of the  notes, 12345." for n in range(200)))
    expected = {}
    for name, source in SOURCES.items():
        expected[name] = facts(source_of(models, tmp_path / name, *source))
        (tmp_path / name / "README.md").write_text("---\nlicense: mit\n---\n")
        retrofit(name, f"{name}-out", verify="headers")
        assert verify(name, f"{name}-out", verify="hashes").tokens.identical
        options = ("--data", "notes.txt", "--block", 32, "--steps", 1, "--held-out", 0, "--json")
        done = commands("finetune", f"{name}-out", f"{name}-tuned", *options)
        assert done.exit_code == 0, done.stderr
        assert json.loads(done.stdout)["tokenizer"]["identical"]
        assert commands("push", f"{name}-out", f"you/{name}").exit_code == 0
        download(commands.hub.repositories[f"you/{name}"], tmp_path / f"{name}-hub")
        for folder in ("out", "tuned", "hub"):
            assert facts(tmp_path / f"{name}-{folder}") == expected[name], (name, folder)


#: Case -> what tokenizer_config.json and tokenizer.json hold, and what is said of that.
UNREADABLE: dict[str, tuple[Any, Any, str]] = {
    "code": ({"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}, {}, "custom code"),
    "broken": ({}, {"model": "none"}, "tokenizer.json"),
}


@pytest.mark.parametrize("case", UNREADABLE)
def test_a_tokenizer_that_cannot_be_loaded_is_told_in_one_line_and_goes_along(
    case: str, models: Path, tmp_path: Path
) -> None:
    source = source_of(models, tmp_path / "source", "llama", "", "vocabulary", "nowhere")
    settings, tokenizer, said = UNREADABLE[case]
    (source / "tokenizer_config.json").write_text(json.dumps(settings))
    (source / "tokenizer.json").write_text(json.dumps(tokenizer) if tokenizer else tokenizer_json("bytes"))
    (source / "own.py").write_text("raise SystemExit('run')")
    report = retrofit(source, tmp_path / "out", verify="headers")
    (warning,) = [each for each in report.warnings if "its tokenizer cannot be loaded" in each]
    assert "\n" not in warning
    assert re.search(said, warning)
    assert report.tokens is None
    comparison = verify(source, tmp_path / "out", verify="hashes")
    assert any(reason.startswith("tokens (of ") for reason in comparison.not_compared)


def test_verify_says_which_text_differs(models: Path, tmp_path: Path) -> None:
    source = source_of(models, tmp_path / "source", *SOURCES["plain"])
    retrofit(source, tmp_path / "out", verify="headers")
    assert verify(source, tmp_path / "out", verify="hashes").same
    content = json.loads(tokenizer_json("bytes"))
    content["model"]["merges"] = content["model"]["merges"][:20]
    (tmp_path / "out" / "tokenizer.json").write_text(json.dumps(content))
    comparison = verify(source, tmp_path / "out", verify="hashes")
    assert comparison.same is False
    assert str(comparison.tokens).startswith("differ: the ids of 'Hello world' are, from 0 on, [")


def test_a_tokenizer_with_more_ids_than_rows_is_told(models: Path, tmp_path: Path) -> None:
    source = source_of(models, tmp_path / "source", "llama", "", "vocabulary", "nowhere")
    (source / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    (source / "tokenizer.json").write_text(tokenizer_json("bytes"))
    tokenizer = AutoTokenizer.from_pretrained(source)
    rows = AutoConfig.from_pretrained(source).vocab_size
    tokenizer.add_tokens([f"<more-{number}>" for number in range(rows)])
    tokenizer.save_pretrained(source)
    highest = max(tokenizer.get_vocab().values())
    (warning,) = retrofit(source, tmp_path / "out", verify="headers").warnings
    assert f"ids up to {highest:,}, and the model {rows:,} rows" in warning
