"""Two ranks, tensor-parallel or sharded with FSDP2, compute what one process computes."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from resformer import METHODS


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["tp_size", "fsdp_size"])
def test_two_ranks_compute_what_one_process_does(
    axis: str, tiny_model: Callable[..., PreTrainedModel], ragged: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    folders = {name: tmp_path / name for name in [*METHODS, "crossed-sharing"]}
    expected = {}
    for name, folder in folders.items():
        model = tiny_model(name)
        model.save_pretrained(folder)
        shapes = {key: parameter.shape for key, parameter in model.named_parameters()}
        torch.save((ragged, shapes), folder / "batch.pt")
        output = model(**ragged, labels=ragged["input_ids"])
        output.loss.backward()
        expected[name] = output.logits.detach(), {key: parameter.grad for key, parameter in model.named_parameters()}

    worker = Path(__file__).with_name("parallel_worker.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(worker)]
    finished = subprocess.run(
        [*command, axis, *map(str, folders.values())],
        env={**os.environ, "OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-3000:]

    wrong = []
    for name, (logits, gradients) in expected.items():
        got = torch.load(folders[name] / "got.pt", weights_only=True)
        if "failed" in got:
            wrong.append(f"{name}: {got['failed']}")
            continue
        real = ragged["attention_mask"].bool()
        if (got["logits"][real] - logits[real]).abs().max() > 1e-4:
            wrong.append(f"{name}: logits")
        for key, gradient in gradients.items():
            if (got["gradients"][key] - gradient).abs().max() > 1e-3 * gradient.abs().max():
                wrong.append(f"{name}: gradient of {key}")
                break
    assert not wrong
