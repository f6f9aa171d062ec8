"""`resformer pretrain` on several processes: the losses of one, and killed runs that end as if they had not been."""

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from accelerate.utils.other import get_free_port as find_free_port
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from resformer.training.trainer import last_checkpoint

WORKER = Path(__file__).with_name("killed_worker.py")
OPTIONS = (
    "--data text.txt --sample-by line --tokenizer bytes --held-out 0.1 --held-out-blocks 8 --no-bf16 --block 32 "
    "--batch-tokens 256 --tokens 5120 --evaluations 4 --method resformer-denseformer --set hidden_size=32 "
    "--set num_hidden_layers=2 --set intermediate_size=48 --set num_attention_heads=4 --set num_key_value_heads=2"
).split()
#: Name -> processes, options.
LAUNCHES: dict[str, tuple[int, list[str]]] = {
    "alone": (1, []),
    "ddp": (2, []),
}


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with text."""
    folder = tmp_path_factory.mktemp("parallel")
    lines = [f"Value {number} of the first layer reaches layer {number % 7}." for number in range(300)]
    (folder / "text.txt").write_text("\n".join(lines))
    return folder


def pretrain(work: Path, output: str, processes: int, *options: str, **environment: str) -> str:
    """Trains on so many processes and returns what they say on stderr."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    quiet = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "HF_HOME": str(work / "home")}
    environment = {**os.environ, **quiet, **environment}
    command = [*launcher, str(WORKER), "pretrain", output, *OPTIONS, *options]
    done = subprocess.run(command, cwd=work, env=environment, stderr=subprocess.PIPE, text=True, timeout=400)
    assert (work / output).exists() == (done.returncode == 0) == ("KILLED_AT" not in environment), done.stderr[-3000:]
    return done.stderr


@pytest.fixture(scope="module")
def trained(work: Path) -> Callable[[str], Path]:
    """`trained("ddp")`: what the processes of that launch have trained."""

    @functools.cache
    def train(name: str) -> Path:
        processes, options = LAUNCHES[name]
        pretrain(work, name, processes, *options)
        return work / name

    return train


def losses(folder: Path) -> list[float]:
    return [entry.get("loss", entry.get("eval_loss")) for entry in json.loads((folder / "log.json").read_text())[:-1]]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*LAUNCHES][1:])
def test_several_processes_have_the_losses_of_one(name: str, trained: Callable[[str], Path]) -> None:
    alone, several = trained("alone"), trained(name)
    metrics, expected = (json.loads((each / "metrics.json").read_text()) for each in (several, alone))
    assert (metrics["steps"], metrics["tokens"]) == (expected["steps"], expected["tokens"]) == (20, 5120)
    assert len(losses(several)) > 10
    assert losses(several) == pytest.approx(losses(alone), abs=1e-4)
    weights, expected_weights = (load_file(each / "model.safetensors") for each in (several, alone))
    assert weights.keys() == expected_weights.keys()
    for key, tensor in weights.items():
        torch.testing.assert_close(tensor, expected_weights[key], atol=2e-3, rtol=0)
    # Nothing of how it was trained.
    assert json.loads((several / "config.json").read_text()) == json.loads((alone / "config.json").read_text())
    AutoModelForCausalLM.from_pretrained(several)


@pytest.mark.slow
def test_a_killed_run_on_two_processes_resumes_to_the_bit(work: Path, trained: Callable[[str], Path]) -> None:
    name = "ddp"
    processes, options = LAUNCHES[name]
    pretrain(work, f"{name}-killed", processes, *options, KILLED_AT="13")
    checkpoint = last_checkpoint(work / f"{name}-killed.training")
    assert checkpoint is not None
    pretrain(work, f"{name}-killed", processes, *options, "--resume")
    whole, resumed = (load_file(folder / "model.safetensors") for folder in (trained(name), work / f"{name}-killed"))
    assert all(torch.equal(tensor, resumed[key]) for key, tensor in whole.items())
    assert losses(work / f"{name}-killed") == losses(trained(name))
    assert json.loads((work / f"{name}-killed" / "metrics.json").read_text())["resumed_from"] == 10


@pytest.mark.slow
def test_a_run_of_two_processes_goes_on_in_one_with_the_same_batches(
    work: Path, trained: Callable[[str], Path]
) -> None:
    processes, options = LAUNCHES["ddp"]
    pretrain(work, "moved", processes, *options, KILLED_AT="13")
    pretrain(work, "moved", 1, *options, "--resume")
    assert losses(work / "moved") == pytest.approx(losses(trained("ddp")), abs=1e-4)
    assert json.loads((work / "moved" / "metrics.json").read_text())["processes"] == 1


@pytest.mark.slow
def test_two_nodes_train_what_one_does(work: Path, trained: Callable[[str], Path]) -> None:
    """Two agents on this machine."""
    port = find_free_port()
    launcher = f"-m torch.distributed.run --nnodes 2 --nproc_per_node 1 --master_addr 127.0.0.1 --master_port {port}"
    quiet = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "HF_HOME": str(work / "home")}
    command = ["-m", "resformer", "pretrain", "nodes", *OPTIONS]
    agents = [
        subprocess.Popen(
            [sys.executable, *launcher.split(), "--node_rank", str(rank), *command],
            cwd=work,
            env={**os.environ, **quiet},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    told = [agent.communicate(timeout=400)[1] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], told[0][-3000:]
    assert losses(work / "nodes") == pytest.approx(losses(trained("alone")), abs=1e-4)
    assert json.loads((work / "nodes" / "metrics.json").read_text())["processes"] == 2
