"""How the devices of a training share the work."""

from typing import Any

from transformers import PreTrainedConfig, TrainingArguments
from transformers.distributed import DistributedConfig

from resformer.training.options import RunOptions

#: Where Accelerate refuses tensor parallelism in training.
NOT_TENSOR_PARALLEL = ["cpu"]


def data_parallel(options: RunOptions, devices: int) -> int:
    """The number of devices, or groups of them, that take different sequences; ValueError if they do not divide."""
    group = options.shard * options.tensor_parallel
    if devices % group:
        raise ValueError(
            f"shard is {options.shard} and tensor_parallel {options.tensor_parallel}; expected a product that divides "
            f"the {devices} processes of the launch."
        )
    if options.tensor_parallel > 1 and options.shard == 1 and devices > group:
        raise ValueError(
            f"tensor_parallel is {options.tensor_parallel}, of {devices} processes, and replicas of such models are "
            f"not supported without shards; give --shard {devices // group}."
        )
    return devices // options.tensor_parallel


def passes(sequences: int, micro: int) -> int:
    """How often a device takes `micro` of its sequences in a step; raises ValueError if they cannot be divided so."""
    if sequences % micro:
        raise ValueError(f"micro_batch is {micro}; expected a divisor of the {sequences} sequences of a device.")
    return sequences // micro


def distributed(options: RunOptions, config: PreTrainedConfig, arguments: TrainingArguments) -> dict[str, Any]:
    """Arguments of `from_pretrained` that have each process load its part."""
    replicas = data_parallel(options, arguments.world_size) // options.shard
    if (tensor := options.tensor_parallel) > 1:
        if arguments.device.type in NOT_TENSOR_PARALLEL:
            raise ValueError(f"tensor_parallel is {tensor}; Accelerate trains with it on accelerators alone.")
        for name in ("num_attention_heads", "num_key_value_heads"):
            if getattr(config, name) % tensor:
                raise ValueError(f"tensor_parallel is {tensor}; expected a divisor of {name}, {getattr(config, name)}.")
    if max(options.shard, tensor) == 1:
        return {}
    if arguments.load_best_model_at_end:
        raise ValueError("load_best_model_at_end is set; the weights of sharded checkpoints are not loaded at the end.")
    return {
        "distributed_config": DistributedConfig(
            fsdp_size=options.shard, tp_size=tensor, dp_replicate_size=replicas if options.shard > 1 else 1
        )
    }
