"""Every command and every line of code in the README runs, as a reader would run it, against a Hub on loopback."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
from checkpoints import change_json, save_checkpoint
from command_server import run
from conftest import others_slow
from hub_server import Commands

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
QUICK = [f"docs/{name}.md" for name in ("analysis", "converting", "quickstart", "sharing")]
PAGES = "analysis comparing converting finetuning pretraining quickstart sharing training".split()
DOCUMENTS = others_slow(["README.md", *(f"docs/{name}.md" for name in PAGES)], ["README.md", *QUICK])
BLOCKS = r"^```(\w+)\n(.*?)^```"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_documents_run_from_top_to_bottom(document: str, commands: Commands, tmp_path: Path) -> None:
    hub, environment = commands.hub, {**os.environ, **commands.hub.environment(commands.home)}
    blocks = re.findall(BLOCKS, (ROOT / document).read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    save_checkpoint(tmp_path / "source", tie_word_embeddings=True)
    (tmp_path / "source" / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    change_json(tmp_path / "source" / "tokenizer_config.json", pad_token=None)  # SmolLM2's has none either
    hub.add("HuggingFaceTB/SmolLM2-135M", tmp_path / "source")
    work = tmp_path / "work"
    work.mkdir()
    lines = [f"Values of the first layer reach layer {number} of {number + 1}." for number in range(400)]
    (work / "notes.txt").write_text("\n".join(lines))
    pairs = [
        json.dumps({"prompt": f"What is {number} plus 1?", "completion": f" {number + 1}."}) for number in range(99)
    ]
    (work / "chats.jsonl").write_text("\n".join(pairs))
    (work / "run.yaml").write_text("".join(code for language, code in blocks if language == "yaml"))
    commands, printed = [line for language, code in blocks if language == "bash" for line in code.splitlines()], ""
    for command in commands:
        if command.split()[0] in ("make", "pip"):  # the Makefile's own test is below, pip's in test_packaging
            continue
        if command.startswith("resformer serve"):  # goes on: test_serving runs it, and talks to it
            continue
        command = command.replace("accelerate launch", "accelerate.commands.launch")
        program, *arguments = command.partition("#")[0].split()
        assert program in ("resformer", "accelerate.commands.launch")
        done = run("-m", program, *arguments, cwd=work, env=environment)
        assert done.returncode == 0, f"{command}\n{done.stderr}"
        printed += done.stdout
    script = "\n".join(code for language, code in blocks if language == "python")
    done = run("-c", script, cwd=work, env=environment)
    assert done.returncode == 0, done.stderr
    if document == "README.md":
        pushed = hub.repositories["you/smollm2-finetuned"]
        assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(pushed)
        assert "identical to the bit" in printed
    elif document == "docs/comparing.md":
        assert '"baseline": "svformer"' in (work / "study" / "study.json").read_text()


def test_the_table_of_make_pretrain_is_that_of_the_committed_runs() -> None:
    folder = ROOT / "benchmarks" / "results" / "scratch"
    runs = [json.loads((folder / f"{method}.json").read_text()) for method in ("transformer", "svformer")]
    for title, (field, form) in {
        "parameters": ("parameters", ","),
        "training tokens": ("tokens", ","),
        "seconds": ("seconds", ",.0f"),
        "held-out loss before": ("loss_before", ".4f"),
        "held-out loss after": ("loss_after", ".4f"),
    }.items():
        assert f"\n{title:22}" + "".join(f"{run[field]:>14{form}}" for run in runs) + "\n" in README


def test_make_targets_do_what_the_readme_says() -> None:
    for target, command in (("demo", "examples/demo.py"), ("pretrain", "resformer pretrain"), ("test", "-m pytest")):
        assert f"make {target}" in README
        plan = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        assert command in plan
