"""The command line: data on stdout, words on stderr, exit codes as documented, no traceback unless asked for."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import save_checkpoint
from command_server import resformer
from conftest import cli
from transformers import BertConfig

from resformer import METHODS
from resformer.cli import _expanded
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


def test_convert_json_is_the_report(llama: Path, tmp_path: Path) -> None:
    done = resformer("convert", llama, tmp_path / "out", "--json", "--dry-run", "--set", "dwa=true")
    report = json.loads(done.stdout)
    assert report["exact"] is True
    assert report["fields"]["dwa"] is True
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--method", "svformer"), 3, "--lossy"),
        (("--method", "svformr"), 2, "attention-residuals. Did you mean 'svformer'?"),
        (("--set", "dwa_period=0"), 2, "dwa_period"),
        (("--set", "dwa"), 2, "expected name=value"),
        (("--set", "hidden_size=3"), 2, "`hidden_size` is not a field that a retrofit sets"),
        (("--nonsense",), 2, "No such option"),
    ],
)
def test_misuse_has_its_exit_code_and_one_message(
    llama: Path, tmp_path: Path, arguments: tuple[str, ...], code: int, words: str
) -> None:
    done = resformer("convert", llama, tmp_path / "out", *arguments)
    assert done.returncode == code
    assert done.stdout == ""
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


def test_traceback_is_shown_on_demand(llama: Path, tmp_path: Path) -> None:
    done = resformer("--traceback", "convert", llama, tmp_path / "out", "--method", "svformer")
    assert "Traceback" in done.stderr
    assert "CheckpointError" in done.stderr


def test_exit_codes_tell_verification_and_interruption_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    import typer

    from resformer.commands.terminal import reporting_errors
    from resformer.convert import CheckpointError, OutputError, VerificationError

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
    import importlib

    def interrupted(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    module, _, name = function.partition(".")
    monkeypatch.setattr(importlib.import_module(f"resformer.{module}"), name, interrupted)
    done = cli(*command)
    assert (done.exit_code, done.stderr.count("\n")) == (130, 1)
    assert words in done.stderr


def test_hints_repeat_the_users_own_arguments(llama: Path, tmp_path: Path) -> None:
    done = resformer("convert", llama, tmp_path / "my out", "--method", "svformer", "--dry-run")
    own = shlex.join(
        ["resformer", "convert", str(llama), str(tmp_path / "my out"), "--method", "svformer", "--dry-run"]
    )
    assert f"Try: {own} --lossy\n" in done.stderr


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


def test_convert_verify_inspect_revert_in_a_row(llama: Path, tmp_path: Path) -> None:
    out, back = tmp_path / "out", tmp_path / "back"
    assert resformer("convert", llama, out, "--method", "resformer-denseformer", "--verify", "headers").returncode == 0
    done = resformer("verify", llama, out)
    assert done.returncode == 0, done.stderr
    assert "logits        identical to the bit" in done.stdout
    assert "same          yes" in done.stdout
    done = resformer("inspect", out)
    assert "method        resformer-denseformer" in done.stdout
    assert "D, depth      plain Llama" in done.stdout
    assert json.loads(resformer("inspect", out, "--json").stdout)["method"] == "resformer-denseformer"
    assert "verified      headers" in resformer("revert", out, back, "--verify", "headers").stdout
    assert (back / "model.safetensors").read_bytes() == (llama / "model.safetensors").read_bytes()


def test_an_encoder_is_not_trained_as_a_causal_model(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    BertConfig(vocab_size=300, **sizes).save_pretrained(tmp_path / "bert")
    (tmp_path / "notes.txt").write_text("text")
    done = cli("finetune", tmp_path / "bert", tmp_path / "out", "--data", tmp_path / "notes.txt")
    assert (done.exit_code, f"{tmp_path / 'bert'}: is an encoder (bert)" in done.stderr) == (3, True), done.stderr


def test_verify_exits_with_4_where_checkpoints_differ(llama: Path, tmp_path: Path) -> None:
    resformer("convert", llama, tmp_path / "out", "--method", "cla2", "--lossy", "--verify", "headers")
    done = resformer("verify", llama, tmp_path / "out", "--json")
    assert done.returncode == 4
    assert json.loads(done.stdout)["same"] is False
    done = resformer("inspect", tmp_path / "out")
    assert "cache         384 bytes a token, 50% of the full one" in done.stdout
    assert "\n              448 with svformer\n              768 with every other method\n" in done.stdout
    assert "M, values     row 1: [0]=1" in done.stdout


def test_the_home_folder_is_found_after_an_equals_sign() -> None:
    assert _expanded("--output=~/x") == f"--output={Path.home() / 'x'}"
    assert _expanded("--methods=a:b=~") == "--methods=a:b=~"


def test_methods_lists_every_method() -> None:
    fields = json.loads(resformer("methods", "--layers", "6", "--json").stdout)
    assert fields == {name: method(6) for name, method in METHODS.items()}
    for name in METHODS:
        assert f"{name}: {FACTS[name].summary}\n" in resformer("methods").stdout


def test_commands_name_both_versions_where_transformers_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resformer.commands.terminal.metadata.version", lambda name: "5.9.0")
    refused = cli("inspect", "no-such-folder")  # before anything is read
    assert (refused.exit_code, refused.stdout) == (1, "")
    assert "transformers 5.23 or newer, and 5.9.0 is installed" in refused.stderr
    assert cli("inspect", "--help").exit_code == cli("env").exit_code == 0
