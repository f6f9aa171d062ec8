"""One rank of test_distributed_training.py: `torchrun --nproc_per_node 2 distributed_worker.py KIND/NAME...`.

Each folder holds a checkpoint and `batch.pt`. One step of SGD on two rows for each rank, under `ddp`, or under FSDP2 as
Transformers (`fsdp`) or Accelerate (`accelerate`) sets it up, or tensor-parallel on all rows (`tp`); the result goes to
`trained` in the folder, in plain Transformers' form. `FAILED.txt` takes an error.
"""

import functools
import sys
import traceback
from pathlib import Path

import torch
import yaml
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import resformer.training


@functools.cache
def accelerator() -> Accelerator:
    """Shards as `fsdp2.yaml` says, on CPUs, where Accelerate would use DDP; without its rounding to bfloat16."""
    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    file = Path(next(iter(resformer.training.__path__))) / "configs/fsdp2.yaml"
    settings = {
        key.removeprefix("fsdp_"): value for key, value in yaml.safe_load(file.read_text())["fsdp_config"].items()
    }
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=settings.pop("version"),
        cpu_offload=settings.pop("offload_params"),
        **settings,
    )
    made = Accelerator(cpu=True, fsdp_plugin=plugin)
    assert made.distributed_type == DistributedType.FSDP
    return made


def step(model: torch.nn.Module, ids: torch.Tensor) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def run(folder: Path, kind: str) -> None:
    rank = dist.get_rank()
    batch = torch.load(folder / "batch.pt", weights_only=True)
    ids = batch.chunk(2)[rank]
    if kind in ("fsdp", "tp"):
        config = DistributedConfig(**{f"{kind}_size": 2})
        model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=config)
        step(model.train(), batch if kind == "tp" else ids)
        model.save_pretrained(folder / "trained")
        return
    model = AutoModelForCausalLM.from_pretrained(folder).train()
    if kind == "accelerate":
        name = type(model).__name__
        sharder = accelerator()
        sharder.state.fsdp_plugin.transformer_cls_names_to_wrap = None  # Accelerate keeps those of the model before
        model, optimizer = sharder.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        assert type(model).__name__ == f"FSDP{name}"
        sharder.backward(model(ids, labels=ids).loss)
        optimizer.step()
        state = sharder.get_state_dict(model)
        if rank == 0:
            model.save_pretrained(folder / "trained", state_dict=state)  # as Trainer does
        return
    parallel = DistributedDataParallel(model)  # without find_unused_parameters
    step(parallel, ids)
    parallel(ids, labels=ids).loss.backward()  # where DDP complains of parameters that got no gradient
    if rank == 0:
        model.save_pretrained(folder / "trained")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    for folder in map(Path, sys.argv[1:]):
        try:
            run(folder, folder.parent.name)
        except Exception:
            (folder / "FAILED.txt").write_text(traceback.format_exc())
        dist.barrier()
    dist.destroy_process_group()
