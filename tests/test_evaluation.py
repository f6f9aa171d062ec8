"""`resformer eval`: the harness's tasks over local files give a retrofit its source's scores to the bit, offline."""

import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import save_checkpoint
from command_server import python
from conftest import cli
from safetensors.torch import load_file

from resformer import retrofit
from resformer.convert import CheckpointError
from resformer.evaluation import evaluate

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


def scores(checkpoint: Path) -> dict[str, dict[str, Any]]:
    """Task -> metrics."""
    return evaluate(str(checkpoint), list(TASKS), include_path=checkpoint.parent / "tasks", device="cpu")["results"]


def retrofitted(folder: Path, method: str) -> Path:
    """A retrofit of the Llama, made once."""
    if not (folder / method).exists():
        retrofit(folder / "llama", folder / method, method, lossy=True, link=True, verify="headers")
    return folder / method


def test_exact_retrofits_score_as_their_source_to_the_bit(folder: Path) -> None:
    expected = scores(folder / "llama")
    assert set(expected) == set(TASKS)
    for method in ("resformer-gated", "depth-attention", "resformer-denseformer"):
        assert scores(retrofitted(folder, method)) == expected, method


@pytest.mark.vllm
@pytest.mark.skipif(find_spec("vllm") is None, reason="no vLLM: make test-vllm")
def test_vllm_and_transformers_give_the_same_scores(folder: Path) -> None:
    save_checkpoint(folder / "wide", head_dim=32)
    retrofit(folder / "wide", folder / "served", "resformer-constant", lossy=True, verify="headers")
    scores = {}
    for backend in ("hf", "vllm"):
        command = ["-m", "resformer", "eval", folder / "served", "--tasks", "letters,text", "--json"]
        command += ["--include-path", folder / "tasks", "--backend", backend, "--dtype", "float32"]
        results = json.loads(python(*command, HF_HOME=str(folder / "home"), VLLM_CPU_KVCACHE_SPACE="1"))
        assert results["config"]["model"] == backend
        scores[backend] = {
            (task, name): value
            for task in ("letters", "text")
            for name, value in results["results"][task].items()
            if isinstance(value, float)
        }
    assert results["vllm_version"]
    assert scores["vllm"] == pytest.approx(scores["hf"], rel=1e-3)


def test_command_writes_the_harnesses_results_with_versions(folder: Path, only_our_tasks: None) -> None:
    output, model = folder / "results.json", retrofitted(folder, "resformer")
    options = "--tasks letters,te* --limit 3 --batch-size 2 --num-fewshot 0 --device cpu --dtype float64".split()
    command = ["eval", str(model), *options, "--include-path", str(folder / "tasks"), "--output", str(output)]
    done = cli(*command, "--json")
    assert done.exit_code == 0, done.output
    results = json.loads(output.read_text())
    assert json.loads(done.stdout) == results
    assert results["n-samples"]["letters"] == {"original": 6, "effective": 3}
    assert set(results["results"]) == {"letters", "text"}
    assert 0 <= results["results"]["letters"]["acc,none"] <= 1
    assert results["config"]["model_args"]["pretrained"] == results["model_name"] == command[1]
    assert results["config"]["model_dtype"] == "torch.float64"
    for package in ("resformer", "torch", "transformers", "datasets", "lm_eval"):
        assert results[f"{package}_version"]
    again = cli(*command)
    assert again.exit_code == 3
    assert "exists already" in again.stderr
    assert json.loads(output.read_text()) == results
    assert again.stderr.splitlines()[-1].endswith(" --force")
    refused = cli(*command[:-1], model / "config.json", "--force")
    assert refused.exit_code == 3
    assert "holds no results" in refused.stderr
    done = cli(*command, "--force")
    *table, _, wrote = done.stdout.splitlines()
    assert re.search(r"\|letters *\|.*\|acc *\|", "\n".join(table))
    assert wrote == f"wrote         {output}"


def test_a_misspelt_task_is_pointed_out(folder: Path, only_our_tasks: None) -> None:
    done = cli("eval", folder / "llama", "--include-path", folder / "tasks", "--tasks", "leters")
    assert (done.exit_code, done.stdout, "Did you mean 'letters'?" in done.stderr) == (2, "", True), done.stderr


def test_a_checkpoint_that_cannot_be_loaded_is_named_and_pickles_are_not_read(folder: Path, tmp_path: Path) -> None:
    for file in (folder / "llama").iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    torch.save(load_file(folder / "llama" / "model.safetensors"), tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=f"{tmp_path}: cannot be loaded: .*safetensors"):
        evaluate(str(tmp_path), ["letters"], include_path=folder / "tasks", device="cpu")


@pytest.mark.slow
def test_the_harnesses_own_command_knows_our_models(folder: Path) -> None:
    output = folder / "own"
    command = "-m resformer.evaluation --model hf --tasks letters --device cpu --limit 2".split()
    command += ["--model_args", f"pretrained={retrofitted(folder, 'resformer')}", "--output_path", str(output)]
    command += ["--include_path", str(folder / "tasks")]
    python(*command, HF_HOME=str(folder / "home"), HF_DATASETS_OFFLINE="1")
    (results,) = output.rglob("results_*.json")
    assert json.loads(results.read_text())["n-samples"]["letters"]["effective"] == 2
