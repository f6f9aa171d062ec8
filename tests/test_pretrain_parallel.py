"""`resformer pretrain` on several processes: the losses of one, and killed runs that end as if they had not been."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils.other import get_free_port as find_free_port
from checkpoints import save_notes
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from resformer.training.trainer import last_checkpoint

pytestmark = pytest.mark.slow
WORKER = Path(__file__).with_name("killed_worker.py")
OPTIONS = (
    "--data text.txt --sample-by line --tokenizer bytes --held-out 0.1 --held-out-blocks 8 --no-bf16 --block 32 "
    "--batch-tokens 256 --tokens 5120 --evaluations 4 --method resformer-denseformer --set hidden_size=32 "
    "--set num_hidden_layers=2 --set intermediate_size=48 --set num_attention_heads=4 --set num_key_value_heads=2 "
    "--json"
).split()
QUIET = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with text."""
    folder = tmp_path_factory.mktemp("parallel")
    save_notes(folder, "text.txt", "\n")
    return folder


def pretrain(work: Path, output: str, processes: int, *options: str, **environment: str) -> Path:
    """Trains on so many processes and returns the output."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    environment = {**os.environ, **QUIET, "HF_HOME": str(work / "home"), **environment}
    command = [*launcher, str(WORKER), "pretrain", output, *OPTIONS, *options]
    done = subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True, timeout=1800)
    assert (work / output).exists() == (done.returncode == 0) == ("KILLED_AT" not in environment), done.stderr[-3000:]
    if done.returncode == 0:  # one report, of one process
        assert json.loads(done.stdout)["processes"] == processes
        assert len(re.findall("^step 20/20: held-out loss", done.stderr, re.MULTILINE)) == 1, done.stderr[-3000:]
    return work / output


@pytest.fixture(scope="module")
def alone(work: Path) -> Path:
    return pretrain(work, "alone", 1)


@pytest.fixture(scope="module")
def ddp(work: Path) -> Path:
    return pretrain(work, "ddp", 2)


@pytest.fixture(scope="module")
def kept(work: Path) -> Path:
    """What a run on two processes has left that was killed."""
    pretrain(work, "killed", 2, KILLED_AT="13")
    return (work / "killed.training").rename(work / "kept")


def resumed(kept: Path, processes: int) -> Path:
    for name in ("killed", "killed.training"):
        shutil.rmtree(kept.with_name(name), ignore_errors=True)
    shutil.copytree(kept, kept.with_name("killed.training"))
    return pretrain(kept.parent, "killed", processes, "--resume")


def losses(folder: Path) -> list[float]:
    return [entry.get("loss", entry.get("eval_loss")) for entry in json.loads((folder / "log.json").read_text())[:-1]]


def metrics(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "metrics.json").read_text())


def test_several_processes_have_the_losses_of_one(alone: Path, ddp: Path) -> None:
    for of in map(metrics, (alone, ddp)):
        assert (of["steps"], of["tokens"]) == (20, 5120)
    assert len(losses(ddp)) > 10
    assert losses(ddp) == pytest.approx(losses(alone), abs=1e-4)
    weights, expected_weights = (load_file(each / "model.safetensors") for each in (ddp, alone))
    assert weights.keys() == expected_weights.keys()
    for key, tensor in weights.items():
        torch.testing.assert_close(tensor, expected_weights[key], atol=2e-3, rtol=0)
    # Nothing of how it was trained.
    assert json.loads((ddp / "config.json").read_text()) == json.loads((alone / "config.json").read_text())
    AutoModelForCausalLM.from_pretrained(ddp)


def test_a_killed_run_on_two_processes_resumes_to_the_bit(ddp: Path, kept: Path) -> None:
    assert last_checkpoint(kept) is not None
    killed = resumed(kept, 2)
    whole, weights = (load_file(folder / "model.safetensors") for folder in (ddp, killed))
    assert all(torch.equal(tensor, weights[key]) for key, tensor in whole.items())
    assert losses(killed) == losses(ddp)
    assert metrics(killed)["resumed_from"] == 10


def test_a_run_of_two_processes_goes_on_in_one_with_the_same_batches(ddp: Path, kept: Path) -> None:
    moved = resumed(kept, 1)
    assert losses(moved) == pytest.approx(losses(ddp), abs=1e-4)
    assert metrics(moved)["processes"] == 1


def test_two_nodes_train_what_one_does(work: Path, alone: Path) -> None:
    """Two agents on this machine."""
    launcher = "-m torch.distributed.run --nnodes 2 --nproc_per_node 1 --master_addr 127.0.0.1 --master_port"
    command = [sys.executable, *launcher.split(), str(find_free_port())]
    environment = {**os.environ, **QUIET, "HF_HOME": str(work / "home")}
    agents = [
        subprocess.Popen(
            [*command, "--node_rank", str(rank), "-m", "resformer", "pretrain", "nodes", *OPTIONS],
            cwd=work,
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    told = [agent.communicate(timeout=1800)[1] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], told[0][-3000:]
    assert losses(work / "nodes") == pytest.approx(losses(alone), abs=1e-4)
    assert metrics(work / "nodes")["processes"] == 2
