"""The command line: data on stdout, words on stderr, exit codes as documented, no traceback unless asked for."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import save_checkpoint

from resformer import METHODS
from resformer.version import __version__


def resformer(*arguments: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "resformer", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment, check=False)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli") / "llama"
    save_checkpoint(folder)
    return folder


def test_version_is_printed() -> None:
    assert resformer("--version").stdout.strip() == __version__


def test_help_needs_no_torch() -> None:
    code = "import sys; from resformer.cli import app; assert 'torch' not in sys.modules, 'torch'"
    code += "; assert 'transformers' not in sys.modules, 'transformers'"
    subprocess.run([sys.executable, "-c", code], check=True)
    help_text = resformer("--help").stdout
    for command in ("convert", "methods", "demo"):
        assert command in help_text


def test_convert_prints_its_report_on_stdout_alone(llama: Path, tmp_path: Path) -> None:
    done = resformer("convert", llama, tmp_path / "out", "--method", "resformer")
    assert (done.returncode, done.stderr) == (0, "")
    assert "verified      headers, bytes, logits identical to the bit on 128 tokens" in done.stdout
    assert (tmp_path / "out" / "model.safetensors").is_file()


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
        (("--method", "svformr"), 2, "expected one of transformer, resformer"),
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

    from resformer import cli
    from resformer.convert import CheckpointError, VerificationError

    for error, code in (
        (VerificationError("x"), 4),
        (CheckpointError("x"), 3),
        (ValueError("x"), 2),
        (RuntimeError("x"), 1),
        (KeyboardInterrupt(), 130),
    ):
        with pytest.raises(typer.Exit) as exit_, cli._reporting_errors():
            raise error
        assert exit_.value.exit_code == code


def test_methods_lists_every_method() -> None:
    fields = json.loads(resformer("methods", "--layers", "6", "--json").stdout)
    assert fields == {name: method(6) for name, method in METHODS.items()}
    assert resformer("methods").stdout.count("\n") == len(METHODS)
