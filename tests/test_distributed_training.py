"""Training on two ranks, data-parallel or sharded with FSDP2, learns what one process learns, and saves it whole."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from resformer import METHODS
from resformer.training.optimizer import is_connection

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"}
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_step_on_two_ranks_is_the_step_of_one(
    kind: str, tiny_model: Callable[..., PreTrainedModel], tmp_path: Path
) -> None:
    ids = torch.randint(3, 97, (4, 11), generator=torch.Generator().manual_seed(1))
    expected = {}
    for name in [*METHODS, "kitchen-sink", "gated-sink"]:
        model = tiny_model(name).train()
        model.save_pretrained(tmp_path / name)
        torch.save(ids, tmp_path / name / "batch.pt")
        before = {key: parameter.detach().clone() for key, parameter in model.named_parameters()}
        model(ids, labels=ids).loss.backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        expected[name] = before, dict(model.named_parameters())

    worker = str(Path(__file__).with_name("distributed_worker.py"))
    command = [*TORCHRUN, worker, kind, *(str(tmp_path / name) for name in expected)]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    failed = {path.parent.name: path.read_text() for path in tmp_path.glob("*/FAILED.txt")}
    assert not failed, failed

    for name, (before, after) in expected.items():
        model, info = AutoModelForCausalLM.from_pretrained(tmp_path / name / "trained", output_loading_info=True)
        assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), name
        for key, parameter in model.named_parameters():
            moved = (after[key] - before[key]).abs().max()
            assert moved > 0, (name, key)
            assert (parameter - after[key]).abs().max() <= 1e-3 * moved, (name, key, is_connection(key))
