"""One rank of test_distributed_training.py: `torchrun --nproc_per_node 2 distributed_worker.py ddp|fsdp FOLDER...`.

Each folder holds a checkpoint and `batch.pt`, two rows for each rank. One step of SGD under DDP, or under FSDP2; the
result goes to `trained` in the folder, in plain Transformers' form. `FAILED.txt` takes an error.
"""

import sys
import traceback
from pathlib import Path

import torch
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers.distributed import DistributedConfig

from resformer import ResFormerForCausalLM


def step(model: torch.nn.Module, ids: torch.Tensor) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def run(folder: Path, kind: str) -> None:
    rank = dist.get_rank()
    ids = torch.load(folder / "batch.pt", weights_only=True).chunk(2)[rank]
    if kind == "fsdp":
        model = ResFormerForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(fsdp_size=2))
        step(model.train(), ids)
        model.save_pretrained(folder / "trained")
        return
    model = ResFormerForCausalLM.from_pretrained(folder).train()
    parallel = DistributedDataParallel(model)  # without find_unused_parameters
    step(parallel, ids)
    parallel(ids, labels=ids).loss.backward()  # where DDP complains of parameters that got no gradient
    if rank == 0:
        model.save_pretrained(folder / "trained")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    kind, *folders = sys.argv[1:]
    for name in folders:
        try:
            run(Path(name), kind)
        except Exception:
            (Path(name) / "FAILED.txt").write_text(traceback.format_exc())
        dist.barrier()
    dist.destroy_process_group()
