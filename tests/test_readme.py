"""Every command and every line of code in the README runs, as a reader would run it, against a Hub on loopback."""

import json
import os
import re
import subprocess
from pathlib import Path

import nanochat_twin
import pytest
import torch
from checkpoints import change_json, save_checkpoint
from command_server import run
from conftest import others_slow
from hub_server import Commands
from transformers import AutoModelForCausalLM

from resformer.training.optimizer import is_connection

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
QUICK = [f"docs/{name}.md" for name in ("index", "sharing")]
PAGES = "comparing converting finetuning index pretraining sharing".split()
DOCUMENTS = others_slow(["README.md", *(f"docs/{name}.md" for name in PAGES)], ["README.md", *QUICK])
BLOCKS = r"^```(\w+)\n(.*?)^```"
#: Beginning of a command -> what it gets more, to be done soon on a CPU.
MORE = {
    "resformer trl": "--use_cpu --bf16 false --max_steps 2 --report_to none",
    "resformer finetune model tuned": "--no-bf16",
    "resformer pretrain fresh": "--no-bf16",
    "resformer compare study": "--no-bf16 --batch 4",
}
#: As of Llama 3.1: answers are marked.
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}"
    "{% else %}{{ m.content }}\n{% endif %}{% endfor %}"
)


def write_data(work: Path, between: str) -> None:
    """What documents find in their folder; `between` the lines of the notes."""
    nanochat_twin.save_run(work / "d12", 4)
    lines = [f"Values of the first layer reach layer {number} of {number + 1}." for number in range(400)]
    (work / "notes.txt").write_text(between.join(lines))
    pairs = [{"prompt": f"What is {number} plus 1?", "completion": f" {number + 1}."} for number in range(99)]
    (work / "chats.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    roles = {"prompt": "user", "completion": "assistant"}
    chats = [{"messages": [{"role": roles[part], "content": text} for part, text in each.items()]} for each in pairs]
    (work / "chats").mkdir()
    (work / "chats" / "train.jsonl").write_text("\n".join(map(json.dumps, chats)))


@pytest.mark.parametrize("document", DOCUMENTS)
def test_documents_run_from_top_to_bottom(document: str, commands: Commands, tmp_path: Path) -> None:
    """Python code as one script, at the place of its last part."""
    hub, environment = commands.hub, {**os.environ, **commands.hub.environment(commands.home)}
    text = (ROOT / document).read_text(encoding="utf-8")
    blocks = re.findall(BLOCKS, text, flags=re.MULTILINE | re.DOTALL)
    save_checkpoint(tmp_path / "source", tie_word_embeddings=True)
    (tmp_path / "source" / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    change_json(tmp_path / "source" / "tokenizer_config.json", pad_token=None)  # SmolLM2's has none either
    hub.add("HuggingFaceTB/SmolLM2-135M", tmp_path / "source")
    (tmp_path / "source" / "chat_template.jinja").write_text(TEMPLATE)
    hub.add("meta-llama/Llama-3.1-8B-Instruct", tmp_path / "source")
    work = tmp_path / "work"
    work.mkdir()
    write_data(work, "\n\n" if "--sample-by paragraph" in text else "\n")
    (work / "run.yaml").write_text("".join(code for language, code in blocks if language == "yaml"))
    scripts = [number for number, (language, _) in enumerate(blocks) if language == "python"]
    script, printed = "\n".join(blocks[number][1] for number in scripts), ""
    for number, (language, code) in enumerate(blocks):
        runs = [["-c", script]] if [number] == scripts[-1:] else []
        for command in code.replace("\\\n", " ").splitlines() if language == "bash" else ():
            command = command.partition("#")[0].replace("torchrun", "torch.distributed.run")
            # The Makefile's own test is below, pip's in test_packaging; servers go on: test_serving talks to them.
            if not command.startswith(("make", "pip", "resformer serve", "vllm serve")):
                more = [word for start, words in MORE.items() if command.startswith(start) for word in words.split()]
                runs.append(["-m", *command.split(), *more])
        for words in runs:
            assert words[1] in ("resformer", "torch.distributed.run", script)
            done = run(*words, cwd=work, env=environment)
            assert done.returncode == 0, f"{words}\n{done.stderr}"
            printed += done.stdout
    if document == "README.md":
        pushed = hub.repositories["you/smollm2-finetuned"]
        assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(pushed)
        assert "identical to the bit" in printed
        drawing, *outputs = [code for language, code in blocks if language == "text"]
        assert "──►" in drawing
        assert outputs != []
        assert [text for text in outputs if text not in printed] == []
    elif document == "docs/comparing.md":
        assert '"baseline": "svformer"' in (work / "study" / "study.json").read_text()
    elif document == "docs/converting.md":
        card = (work / "model" / "README.md").read_text(encoding="utf-8")
        assert "states no licence" in card
        assert "Whether it was trained, and on what, is not recorded" in card
        assert "taken out of what the final norm reads" in card
    elif document == "docs/finetuning.md":
        assert json.loads((work / "both" / "metrics.json").read_text())["processes"] == 2
        assert not (work / "both.training").exists()
        before, after = (
            AutoModelForCausalLM.from_pretrained(work / name).state_dict() for name in ("llama-resformer", "merged")
        )
        assert before.keys() == after.keys()
        assert not [name for name in before if is_connection(name) and torch.equal(before[name], after[name])]


def test_the_table_of_make_pretrain_is_that_of_the_committed_runs() -> None:
    folder = ROOT / "benchmarks" / "results" / "scratch"
    runs = [json.loads((folder / f"{method}.json").read_text()) for method in ("transformer", "svformer")]
    page = (ROOT / "docs" / "pretraining.md").read_text(encoding="utf-8")
    for title, (field, form) in {
        "parameters": ("parameters", ","),
        "training tokens": ("tokens", ","),
        "seconds": ("seconds", ",.0f"),
        "held-out loss before": ("loss_before", ".4f"),
        "held-out loss after": ("loss_after", ".4f"),
    }.items():
        assert f"\n{title:22}" + "".join(f"{run[field]:>14{form}}" for run in runs) + "\n" in page


def test_make_targets_do_what_the_readme_says() -> None:
    for target, command in (("demo", "examples/demo.py"), ("pretrain", "resformer pretrain"), ("test", "-m pytest")):
        assert f"make {target}" in README
        plan = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        assert command in plan
