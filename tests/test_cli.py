"""The command line: data on stdout, words on stderr, exit codes as documented, no traceback unless asked for."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from checkpoints import save_checkpoint
from command_server import resformer
from conftest import assert_said, cli
from transformers import BertConfig

from resformer import METHODS
from resformer.cli import _expanded
from resformer.commands.terminal import reporting_errors
from resformer.convert import CheckpointError, OutputError, VerificationError
from resformer.model_cards.facts import FACTS
from resformer.version import __version__


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli") / "llama"
    save_checkpoint(folder)
    return folder


def test_version_and_commands_are_printed() -> None:
    assert resformer("--version").stdout.strip() == __version__
    help_text = resformer("--help").stdout
    commands = "convert revert bundle shrink verify inspect methods demo env finetune compare analyze eval card push"
    for command in commands.split():
        assert command in help_text
    assert "[default: 5e-05]" in " ".join(resformer("finetune", "--help").stdout.split())


def test_a_reader_that_stops_early_is_no_error() -> None:
    command = f"{sys.executable} -m resformer env"
    done = subprocess.run(f"{command} | head -n 0", shell=True, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_convert_prints_its_report_on_stdout_alone(llama: Path, tmp_path: Path) -> None:
    done = resformer("convert", llama, tmp_path / "out", "--method", "resformer")
    assert (done.returncode, done.stderr) == (0, "")
    assert "verified      headers, bytes, logits identical to the bit on 128 tokens" in done.stdout
    assert (tmp_path / "out" / "model-00002-of-00002.safetensors").is_file()


def test_misuse_has_its_exit_code_and_one_message_that_repeats_the_arguments(llama: Path, tmp_path: Path) -> None:
    said = {}
    for case, arguments in {
        "lossy": ("--method", "svformer", "--dry-run"),
        "method": ("--method", "svformr"),
        "value": ("--set", "dwa_period=0"),
        "no value": ("--set", "dwa"),
        "field": ("--set", "hidden_size=3"),
        "option": ("--nonsense",),
    }.items():
        done = resformer("convert", llama, tmp_path / "my out", *arguments)
        assert done.stdout == ""
        said[case] = f"{done.returncode}: {done.stderr}"
    assert_said("cli", said, tmp=tmp_path, llama=llama)
    done = resformer("--traceback", "convert", llama, tmp_path / "my out", "--method", "svformer")
    assert "Traceback" in done.stderr
    assert "CheckpointError" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_exit_codes_tell_verification_and_interruption_apart() -> None:
    for error, code in (
        (VerificationError("x"), 4),
        (OutputError("x"), 1),
        (CheckpointError("x"), 3),
        (ValueError("x"), 2),
        (RuntimeError("x"), 1),
        (KeyboardInterrupt(), 130),
    ):
        with pytest.raises(typer.Exit) as exit_, reporting_errors():
            raise error
        assert exit_.value.exit_code == code


@pytest.mark.parametrize(
    ("command", "function", "words"),
    [
        (["convert", "a", "b"], "convert.retrofit", "Nothing was left behind"),
        (["push", "a", "you/a"], "pushing.push", "What was uploaded is not sent again"),
        (["demo"], "demo.run_demo", "stay in the output folder"),
        (["eval", "a", "--tasks", "b"], "evaluation.evaluate", "No results were written"),
    ],
)
def test_after_an_interrupt_a_command_says_what_it_leaves(
    command: list[str], function: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    module, _, name = function.partition(".")
    monkeypatch.setattr(importlib.import_module(f"resformer.{module}"), name, interrupted)
    done = cli(*command)
    assert (done.exit_code, done.stderr.count("\n")) == (130, 1)
    assert words in done.stderr


def test_dry_run_tells_the_plan(llama: Path, tmp_path: Path) -> None:
    done = resformer("convert", llama, tmp_path / "out", "--link", "--dry-run")
    size = (llama / "model.safetensors").stat().st_size
    for line in (
        "tensors       57 kept, 1 new, 0 dropped",
        f"files         1 carried over whole, 1 written: {size / 1000:.1f} kB linked, ",
        "memory        ",
        f"would write   {tmp_path / 'out'}",
        f"do it         resformer convert {llama} {tmp_path / 'out'} --link",
    ):
        assert f"\n{line}" in done.stdout


def said(*arguments: object, code: int = 0) -> str:
    done = cli(*arguments)
    assert done.exit_code == code, done.stderr
    return done.stdout


def test_convert_verify_inspect_revert_in_a_row(llama: Path, tmp_path: Path) -> None:
    out, back = tmp_path / "out", tmp_path / "back"
    report = json.loads(said("convert", llama, out, "--json", "--dry-run", "--set", "dwa=true"))
    assert (report["exact"], report["fields"]["dwa"], out.exists()) == (True, True, False)
    said("convert", llama, out, "--method", "resformer-denseformer", "--verify", "headers")
    verified, inspected = said("verify", llama, out), said("inspect", out)
    assert "logits        identical to the bit" in verified
    assert "same          yes" in verified
    assert "method        resformer-denseformer" in inspected
    assert "D, depth      plain Llama" in inspected
    assert json.loads(said("inspect", out, "--json"))["method"] == "resformer-denseformer"
    assert "verified      headers" in said("revert", out, back, "--verify", "headers")
    assert (back / "model.safetensors").read_bytes() == (llama / "model.safetensors").read_bytes()


def test_verify_exits_with_4_where_checkpoints_differ(llama: Path, tmp_path: Path) -> None:
    said("convert", llama, tmp_path / "out", "--method", "cla2", "--lossy", "--verify", "headers")
    assert json.loads(said("verify", llama, tmp_path / "out", "--json", code=4))["same"] is False
    inspected = said("inspect", tmp_path / "out")
    assert "cache         384 bytes a token, 50% of the full one" in inspected
    assert "\n              448 with svformer\n              768 with every other method\n" in inspected
    assert "M, values     row 1: [0]=1" in inspected


def test_an_encoder_is_not_trained_as_a_causal_model(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    BertConfig(vocab_size=300, **sizes).save_pretrained(tmp_path / "bert")
    (tmp_path / "notes.txt").write_text("text")
    done = cli("finetune", tmp_path / "bert", tmp_path / "out", "--data", tmp_path / "notes.txt")
    assert (done.exit_code, f"{tmp_path / 'bert'}: is an encoder (bert)" in done.stderr) == (3, True), done.stderr


def test_the_home_folder_is_found_after_an_equals_sign() -> None:
    assert _expanded("--output=~/x") == f"--output={Path.home() / 'x'}"
    assert _expanded("--methods=a:b=~") == "--methods=a:b=~"


def test_methods_lists_every_method() -> None:
    assert json.loads(said("methods", "--layers", "6", "--json")) == {name: of(6) for name, of in METHODS.items()}
    listed = said("methods")
    assert [name for name in METHODS if f"{name}: {FACTS[name].summary}\n" not in listed] == []


def test_commands_name_both_versions_where_transformers_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resformer.commands.terminal.metadata.version", lambda name: "5.9.0")
    refused = cli("inspect", "no-such-folder")  # before anything is read
    assert (refused.exit_code, refused.stdout) == (1, "")
    assert "transformers 5.23 or newer, and 5.9.0 is installed" in refused.stderr
    assert cli("inspect", "--help").exit_code == cli("env").exit_code == 0
