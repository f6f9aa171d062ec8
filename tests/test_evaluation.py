"""`resformer eval`: the harness's tasks over local files give a retrofit its source's scores to the bit, offline."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import any_decoder
import pytest
import torch
from checkpoints import byte_tokenizer, save_checkpoint
from command_server import python
from conftest import cli
from safetensors.torch import load_file
from test_connected_commands import FAMILIES, save_family
from transformers import AutoModelForCausalLM

from resformer import retrofit

TASKS = {
    "letters": """
        output_type: multiple_choice
        doc_to_text: "{{question}}"
        doc_to_choice: "{{choices}}"
        doc_to_target: "{{answer}}"
        metric_list: [{metric: acc}, {metric: acc_norm}, {metric: brier_score}]
    """,
    "text": """
        output_type: loglikelihood_rolling
        doc_to_text: ""
        doc_to_target: "{{question}}"
        metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]
    """,
    "write": """
        output_type: generate_until
        doc_to_text: "{{question}}"
        doc_to_target: "{{question}}"
        generation_kwargs: {max_gen_toks: 8, until: ["zzz"]}
        metric_list: [{metric: chrf}]
    """,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds the checkpoint `llama`, and in `tasks` three tasks over questions of different lengths."""
    folder = tmp_path_factory.mktemp("evaluation")
    save_checkpoint(folder / "llama")
    (folder / "tasks").mkdir()
    documents = folder / "tasks" / "documents.jsonl"
    rows = [
        {"question": f"word {n} " * (1 + n % 4), "choices": [" a", " bcd", " efghi"], "answer": n % 3} for n in range(6)
    ]
    documents.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, lines in TASKS.items():
        head = f"task: {name}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {documents}}}}}\n"
        body = "\n".join(line.strip() for line in lines.splitlines())
        (folder / "tasks" / f"{name}.yaml").write_text(f"{head}test_split: test\n{body}metadata: {{version: 1.0}}\n")
    return folder


@pytest.fixture(autouse=True)
def _no_report_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes the harness seconds."""
    monkeypatch.setattr("torch.utils.collect_env.get_pretty_env_info", lambda: "")


@pytest.fixture
def only_our_tasks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves the harness's own tasks out: more than 10,000, which take seconds to read."""
    from lm_eval.tasks._index import TaskIndex

    build = TaskIndex.build

    def build_only_folder(paths: list[Path]) -> dict[str, Any]:
        return build([path for path in paths if path.is_relative_to(folder)])

    monkeypatch.setattr(TaskIndex, "build", staticmethod(build_only_folder))


def scores(checkpoint: Path, output: Path, tasks: str = ",".join(TASKS)) -> dict[str, dict[str, Any]]:
    """Task -> metrics, of `resformer eval`."""
    files = str(checkpoint.parent / "tasks")
    options = ["--tasks", tasks, "--include_path", files, "--device", "cpu", "--output_path", str(output)]
    done = cli("eval", checkpoint, *options)
    assert done.exit_code == 0, done.output
    assert re.search(rf"^\|\s*Tasks\s*\|.*^\|{tasks.partition(',')[0]}", done.stdout, re.MULTILINE | re.DOTALL)
    (results,) = output.rglob("results_*.json")
    return json.loads(results.read_text())["results"]


def retrofitted(folder: Path, method: str) -> Path:
    """A retrofit of the Llama, made once."""
    if not (folder / method).exists():
        retrofit(folder / "llama", folder / method, method, lossy=True, link=True, verify="headers")
    return folder / method


def test_exact_retrofits_score_as_their_source_to_the_bit(folder: Path, only_our_tasks: None, tmp_path: Path) -> None:
    source = shutil.copytree(folder / "llama", folder / "llama, dtype=float64")  # the harness's own commas and signs
    expected = scores(source, tmp_path / "llama")
    assert set(expected) == set(TASKS)
    for method in ("resformer-gated", "depth-attention", "resformer-denseformer"):
        assert scores(retrofitted(folder, method), tmp_path / method) == expected, method


@pytest.mark.parametrize("family", FAMILIES)
def test_other_families_score_as_their_source_until_connections_learn(
    family: str, folder: Path, only_our_tasks: None, tmp_path: Path
) -> None:
    source, out, moved = (folder / f"{family}{kind}" for kind in ("", "-out", "-moved"))
    save_family(source, family)
    retrofit(source, out, "resformer-denseformer", link=True, verify="headers")
    model = AutoModelForCausalLM.from_pretrained(out)
    any_decoder.move(model)
    model.save_pretrained(moved)
    byte_tokenizer().save_pretrained(moved)
    of_source, of_out, of_moved = (scores(each, tmp_path / each.name, "text") for each in (source, out, moved))
    assert of_source == of_out != of_moved


def test_pickles_are_not_read(folder: Path, only_our_tasks: None, tmp_path: Path) -> None:
    for file in (folder / "llama").iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    torch.save(load_file(folder / "llama" / "model.safetensors"), tmp_path / "pytorch_model.bin")
    done = cli("eval", tmp_path, "--tasks", "letters", "--include_path", str(folder / "tasks"), "--device", "cpu")
    assert done.exit_code
    assert "safetensors" in done.stderr + str(done.exception)


@pytest.mark.slow
def test_the_harnesses_own_command_knows_our_models(folder: Path) -> None:
    output = folder / "own"
    command = "-m resformer.evaluation --model hf --tasks letters --device cpu --limit 2".split()
    command += ["--model_args", f"pretrained={retrofitted(folder, 'resformer')}", "--output_path", str(output)]
    command += ["--include_path", str(folder / "tasks")]
    python(*command, HF_HOME=str(folder / "home"), HF_DATASETS_OFFLINE="1")
    (results,) = output.rglob("results_*.json")
    assert json.loads(results.read_text())["n-samples"]["letters"]["effective"] == 2
