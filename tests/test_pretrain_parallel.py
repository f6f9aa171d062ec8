"""`resformer pretrain` on several processes: the losses of one, and killed runs that end as if they had not been."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from resformer.training.recipe import last_checkpoint

WORKER = Path(__file__).with_name("pretrain_worker.py")
OPTIONS = (
    "--data text.txt --sample-by line --tokenizer bytes --held-out 0.1 --held-out-blocks 8 --no-bf16 --block 32 "
    "--batch-tokens 256 --tokens 5120 --evaluations 4 --method resformer-denseformer --set hidden_size=32 "
    "--set num_hidden_layers=2 --set intermediate_size=48 --set num_attention_heads=4 --set num_key_value_heads=2"
).split()
#: Name -> processes, options.
LAUNCHES: dict[str, tuple[int, list[str]]] = {
    "ddp": (2, []),
    "fsdp": (2, ["--shard", "2"]),
    "tp": (2, ["--tensor-parallel", "2"]),
    "hsdp": (4, ["--shard", "2"]),
    "fsdp-tp": (4, ["--shard", "2", "--tensor-parallel", "2"]),
}


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with text, and `alone`, what one process has trained."""
    folder = tmp_path_factory.mktemp("parallel")
    lines = [f"Value {number} of the first layer reaches layer {number % 7}." for number in range(300)]
    (folder / "text.txt").write_text("\n".join(lines))
    finish(start(folder, "alone", 1))
    return folder


def start(work: Path, output: str, processes: int, *options: str) -> "subprocess.Popen[str]":
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    environment = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "HF_HOME": str(work / "home")}
    return subprocess.Popen(
        [*launcher, str(WORKER), "pretrain", output, *OPTIONS, *options],
        cwd=work,
        env={**os.environ, **environment},
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: "subprocess.Popen[str]") -> None:
    _, errors = process.communicate(timeout=400)
    assert process.returncode == 0, errors[-3000:]


def losses(folder: Path) -> list[float]:
    return [entry.get("loss", entry.get("eval_loss")) for entry in json.loads((folder / "log.json").read_text())[:-1]]


@pytest.mark.slow
@pytest.mark.parametrize("name", LAUNCHES)
def test_several_processes_have_the_losses_of_one(name: str, work: Path) -> None:
    processes, options = LAUNCHES[name]
    finish(start(work, name, processes, *options))
    metrics, alone = (json.loads((work / each / "metrics.json").read_text()) for each in (name, "alone"))
    assert (metrics["steps"], metrics["tokens"]) == (alone["steps"], alone["tokens"]) == (20, 5120)
    assert len(losses(work / name)) > 10
    assert losses(work / name) == pytest.approx(losses(work / "alone"), abs=1e-4)
    weights, expected = (load_file(work / each / "model.safetensors") for each in (name, "alone"))
    assert weights.keys() == expected.keys()
    for key, tensor in weights.items():
        torch.testing.assert_close(tensor, expected[key], atol=2e-3, rtol=0)
    config = json.loads((work / name / "config.json").read_text())
    assert config == json.loads((work / "alone" / "config.json").read_text())  # nothing of how it was trained
    AutoModelForCausalLM.from_pretrained(work / name)
    assert not (work / f"{name}.training").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_a_killed_run_on_two_processes_resumes_to_the_bit(name: str, work: Path) -> None:
    processes, options = LAUNCHES[name]
    options = [*options, "--tokens", "25600", "--evaluations", "10"]  # 100 steps, so that a kill is in time
    finish(start(work, f"{name}-whole", processes, *options))
    process = start(work, f"{name}-killed", processes, *options)
    for line in process.stderr or ():
        if re.match("step 30/", line):
            launcher = psutil.Process(process.pid)
            for each in (*launcher.children(recursive=True), launcher):  # which are in sessions of their own
                each.kill()
            break
    process.communicate()
    assert not (work / f"{name}-killed").exists()
    checkpoint = last_checkpoint(work / f"{name}-killed.training")
    assert checkpoint is not None
    assert len([*checkpoint.glob("shards/*.distcp")]) == (2 if name == "fsdp" else 0)
    finish(start(work, f"{name}-killed", processes, *options, "--resume"))
    whole, resumed = (load_file(work / f"{name}-{each}" / "model.safetensors") for each in ("whole", "killed"))
    assert all(torch.equal(tensor, resumed[key]) for key, tensor in whole.items())
    assert losses(work / f"{name}-killed") == losses(work / f"{name}-whole")
    metrics = json.loads((work / f"{name}-killed" / "metrics.json").read_text())
    assert 0 < metrics["resumed_from"] < 100


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--shard", 2], "shard is 2 and tensor_parallel 1; expected a product that divides the 1 processes"),
        (["--shard", 2, "--compile"], "shard is 2, with compile; leave one of them out"),
        (["--tensor-parallel", 2, "--streaming"], "tensor_parallel is 2, with streaming; write tokens with"),
        (["--tensor-parallel", 0], "tensor_parallel is 0; expected more than 0"),
    ],
)
def test_what_cannot_be_combined_is_refused_before_data_is_read(
    options: list[Any], words: str, tmp_path: Path, invoke: Callable[..., Any]
) -> None:
    done = invoke(tmp_path, "pretrain", "out", "--data", "missing.txt", "--tokenizer", "bytes", *options)
    assert (done.exit_code, words in done.stderr) == (2, True), done.stderr
    assert not list(tmp_path.iterdir())
