"""The command line: data on stdout, words on stderr, exit codes as documented, no traceback unless asked for."""

import importlib
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from checkpoints import save_checkpoint
from click.testing import Result
from command_server import resformer
from conftest import assert_answers, cli

from resformer import METHODS
from resformer.cli import _expanded, app
from resformer.commands.terminal import PANELS
from resformer.configuration.methods import FIRST
from resformer.version import __version__

COMMANDS = typer.main.get_group(app)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli") / "llama"
    save_checkpoint(folder)
    return folder


def test_version_and_commands_are_printed() -> None:
    assert cli("--version").stdout.strip() == __version__
    help_text = cli("--help").stdout
    commands = "convert revert bundle verify inspect methods env finetune compare analyze eval card push"
    for command in commands.split():
        assert command in help_text
    assert "...\n" not in help_text.partition("\n")[2]  # below the usage, whole sentences
    assert [panel for panel in PANELS if f"\n{panel}:\n" not in help_text] == []
    assert "[default: 5e-05]" in " ".join(cli("finetune", "--help").stdout.split())


@pytest.mark.parametrize("name", [name for name, command in COMMANDS.commands.items() if not command.hidden])
def test_the_example_of_each_command_is_one(name: str) -> None:
    example = COMMANDS.commands[name].epilog.partition("Example:")[2]
    program, given, *arguments = example.split()
    assert (program, given) == ("resformer", name)
    COMMANDS.commands[name].make_context(name, arguments)  # raises where an argument is unknown or missing


def test_names_of_other_packages_are_taken() -> None:
    assert cli("retrofit", "--help").stdout.partition("\n")[2] == cli("convert", "--help").stdout.partition("\n")[2]
    assert "--sizes, --size" in cli("compare", "--help").stdout


def test_a_reader_that_stops_early_is_no_error() -> None:
    command = f"{sys.executable} -m resformer env"
    done = subprocess.run(f"{command} | head -n 0", shell=True, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_traceback_is_shown_if_it_is_asked_for(llama: Path, tmp_path: Path) -> None:
    done = resformer("--traceback", "convert", llama, tmp_path / "out", "--method", "neutreno")
    assert "Traceback" in done.stderr
    assert "CheckpointError" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("command", "function", "words"),
    [
        (["convert", "a", "b"], "convert.retrofit", "Nothing was left behind"),
        (["push", "a", "you/a"], "pushing.push", "What was uploaded is not sent again"),
        (["eval", "a", "--tasks", "b"], "evaluation.evaluate", "No results were written"),
        (["compare", "a", "--steps", "1"], "training.study.comparison.run_study", "are kept. Go on with: {}"),
        (["finetune", "a", "b"], "training.recipe.finetune_checkpoint", "from the last checkpoint with: {} --resume"),
    ],
)
def test_after_an_interrupt_a_command_says_what_it_leaves(
    command: list[str], function: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    module, _, name = function.rpartition(".")
    command += ["--data", "x"] * (command[0] in ("compare", "finetune"))
    monkeypatch.setattr("sys.argv", ["resformer", *command])
    monkeypatch.setattr(importlib.import_module(f"resformer.{module}"), name, interrupted)
    done = cli(*command)
    assert (done.exit_code, done.stderr.count("\n")) == (130, 1)
    assert words.format(" ".join(["resformer", *command])) in done.stderr


@pytest.mark.parametrize(
    ("command", "package", "extra"),
    [
        ("eval missing --tasks letters", "lm_eval", "eval"),
        ("compare out --data missing.txt --steps 4", "matplotlib", "study"),
    ],
)
def test_a_missing_package_is_named_before_anything_is_read(
    command: str,
    package: str,
    extra: str,
    invoke: Callable[..., Result],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    done = invoke(tmp_path, *command.split())
    assert (done.exit_code, f"pip install '.[{extra}]'" in done.stderr) == (1, True), done.stderr
    assert list(tmp_path.iterdir()) == []


#: Memory, rounding, and the size of a tokenizer differ between versions of libraries.
VARIES = re.compile(r"(?<=^memory        ).*$|\S+e-\d+|\S+ \wB(?= copied)", re.MULTILINE)


def test_commands_print_what_they_did(
    llama: Path, invoke: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One after the other, with their exit codes: `snapshots/transcript.json`."""

    def answer(asked: str) -> str:
        monkeypatch.setattr("sys.argv", asked.split())
        done = invoke(llama.parent, *asked.split()[1:])
        return f"{done.exit_code}\n" + VARIES.sub("...", done.stdout)

    assert_answers("transcript", answer)
    assert (llama.parent / "back" / "model.safetensors").read_bytes() == (llama / "model.safetensors").read_bytes()


def test_the_home_folder_is_found_after_an_equals_sign() -> None:
    assert _expanded("--output=~/x") == f"--output={Path.home() / 'x'}"
    assert _expanded("--methods=a:b=~") == "--methods=a:b=~"


def test_methods_lists_every_method() -> None:
    in_json = json.loads(cli("methods", "--layers", "6", "--json").stdout)
    assert in_json == {name: of(6) for name, of in METHODS.items()}
    listed = cli("methods").stdout
    assert [name for name in METHODS if f"{name}: {METHODS[name].summary}\n" not in listed] == []
    first, others = listed.split("\nTo reproduce a paper, or to compare:\n")
    assert re.findall(r"^([\w-]+): ", first, re.MULTILINE) == [*FIRST]
    assert [said for each in FIRST.values() for said in each if said not in first] == []
    assert "transformer: " in others


def test_commands_name_both_versions_where_transformers_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resformer.commands.terminal.metadata.version", lambda name: "5.9.0")
    refused = cli("inspect", "no-such-folder")  # before anything is read
    assert (refused.exit_code, refused.stdout) == (1, "")
    assert "transformers 5.23 or newer, and 5.9.0 is installed" in refused.stderr
    assert cli("inspect", "--help").exit_code == cli("env").exit_code == 0
