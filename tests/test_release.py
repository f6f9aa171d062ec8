"""What a release needs: examples that run, a page whose links lead somewhere, workflows that can be read."""

import re
import shutil
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path

import pytest
import yaml
from checkpoints import save_checkpoint
from transformers.utils.import_utils import is_serve_available

from resformer.version import __version__

ROOT = Path(__file__).parents[1]
#: Script -> its arguments, in an order in which each finds what those before it have written.
EXAMPLES = {
    "retrofit": ["llama"],
    "finetune": ["notes.txt"],
    "from_scratch": ["notes.txt", "--block", "64", "--tokens", "4k"],
    "serve": ["finetuned"],
}


@pytest.mark.slow
def test_the_examples_run_one_after_the_other(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "llama")
    (tmp_path / "notes.txt").write_text("".join(f"Values reach layer {n}.\n" for n in range(400)))
    assert {path.stem for path in (ROOT / "examples").iterdir()} == set(EXAMPLES)
    for name, arguments in EXAMPLES.items():
        script = ROOT / "examples" / f"{name}.py"
        assert len(script.read_text(encoding="utf-8").splitlines()) <= 40
        if name != "serve" or is_serve_available():
            done = subprocess.run(
                [sys.executable, script, *arguments], cwd=tmp_path, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, done.stderr
            assert done.stdout.strip(), name


def test_a_release_has_absolute_links_and_the_projects_addresses(tmp_path: Path) -> None:
    (tmp_path / "src" / "resformer").mkdir(parents=True)
    for name in ("README.md", "setup.cfg", "src/resformer/version.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    command = [sys.executable, ROOT / ".ci" / "prepare_release.py"]
    wrong = subprocess.run([*command, "v0.0.0", "https://a.b/c"], cwd=tmp_path, capture_output=True, text=True)
    assert (wrong.returncode, __version__ in wrong.stderr) == (1, True)
    subprocess.run([*command, f"v{__version__}", "https://a.b/c"], cwd=tmp_path, check=True)
    links = re.findall(r"\]\(([^)]+)\)", (tmp_path / "README.md").read_text(encoding="utf-8"))
    assert {re.match(r"https://a\.b/c/(?:blob|raw)/v[\d.]+/\w|https://", link) is not None for link in links} == {True}
    assert f"](https://a.b/c/raw/v{__version__}/benchmarks/" in (tmp_path / "README.md").read_text(encoding="utf-8")
    config = ConfigParser()
    config.read(tmp_path / "setup.cfg", encoding="utf-8")
    assert "Source = https://a.b/c\n" in config["metadata"]["project_urls"]


def test_workflows_and_hooks_can_be_read_and_run_what_is_there() -> None:
    for file in (*ROOT.glob(".github/**/*.yml"), ROOT / ".readthedocs.yaml", ROOT / ".pre-commit-config.yaml"):
        text = file.read_text(encoding="utf-8")
        assert isinstance(yaml.safe_load(text), dict)
        assert [path for path in re.findall(r"(?<![\w.])\.ci/[\w.]+", text) if not (ROOT / path).is_file()] == []
