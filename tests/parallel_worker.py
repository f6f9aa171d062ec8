"""One rank of test_modeling_parallel.py: `torchrun --nproc_per_node 2 parallel_worker.py tp_size FOLDER...`.

Reads the checkpoint and `batch.pt` of each folder; rank 0 writes logits and whole gradients, or the error, to `got.pt`.
"""

import sys
from pathlib import Path

import torch
from torch import distributed as dist
from transformers.distributed import DistributedConfig

from resformer import ResFormerForCausalLM


def whole(local: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Puts the shards of all ranks together along the one dimension in which they fall short of `shape`."""
    if hasattr(local, "full_tensor"):
        local = local.full_tensor()
    short = [dim for dim, size in enumerate(shape) if local.shape[dim] != size]
    if not short:
        return local
    shards = [torch.empty_like(local) for _ in range(dist.get_world_size())]
    dist.all_gather(shards, local.contiguous())
    return torch.cat(shards, dim=short[0])


def run(folder: Path, axis: str) -> dict[str, object]:
    batch, shapes = torch.load(folder / "batch.pt", weights_only=True)
    try:
        model = ResFormerForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(**{axis: 2})).eval()
        output = model(**batch, labels=batch["input_ids"])
        output.loss.backward()
    except (RuntimeError, ValueError) as error:  # alike on all ranks
        return {"failed": str(error)}
    gradients = {name: whole(parameter.grad, shapes[name]) for name, parameter in model.named_parameters()}
    return {"logits": output.logits.detach(), "gradients": gradients}


if __name__ == "__main__":
    dist.init_process_group("gloo")
    axis, *folders = sys.argv[1:]
    for name in folders:
        result = run(Path(name), axis)
        if dist.get_rank() == 0:
            torch.save(result, Path(name) / "got.pt")
        dist.barrier()
    dist.destroy_process_group()
