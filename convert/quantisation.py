"""Quantised checkpoints: Transformers dequantises fp8 to bfloat16, others are refused with a way out."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from resformer.convert.reading import Checkpoint
from resformer.convert.safetensors_format import Shard, Tensor
from resformer.errors import CheckpointError, quoted

_SCALE, _ACTIVATIONS = "_scale_inv", "activation_scale"


def check_quantisation(where: Path, quantisation: object) -> None:
    """Refuses what cannot be dequantised here.

    Args:
        where: config.json.
        quantisation: its `quantization_config`.
    """
    # bitsandbytes' older configurations do not name it.
    method = quantisation.get("quant_method", "bitsandbytes") if isinstance(quantisation, dict) else None
    if method == "fp8":
        return
    way = "convert the model that it was made from."
    if method == "bitsandbytes":
        way = (
            "dequantise it first: "
            'model = AutoModelForCausalLM.from_pretrained(SOURCE, device_map="auto").dequantize(); '
            'model.save_pretrained("dequantised").'
        )
    elif method == "compressed-tensors":
        way = (
            "dequantise it first: model = AutoModelForCausalLM.from_pretrained(SOURCE, "
            "quantization_config=CompressedTensorsConfig(dequantize=True)); "
            'model.save_pretrained("dequantised").'
        )
    raise CheckpointError(f"{where}: the checkpoint is quantised ({quoted(quantisation)}); {way}")


def fp8_weights(checkpoint: Checkpoint, block: object) -> dict[str, Tensor]:
    """Name -> tensor in fp8. Refuses what Transformers would dequantise with other scales than were meant.

    Args:
        block: `weight_block_size` of config.json: the rows and columns that share a scale.
    """
    if block is not None and not (isinstance(block, list) and all(type(edge) is int and edge > 0 for edge in block)):
        raise CheckpointError(f"{checkpoint.folder}: weight_block_size is {quoted(block)}; expected [rows, columns].")
    weights = {name: tensor for name, tensor in checkpoint.tensors.items() if tensor.dtype == "F8_E4M3"}
    for name, weight in weights.items():
        scales = checkpoint.tensors.get(f"{name}{_SCALE}")
        if scales is None:
            raise CheckpointError(f"{weight.place}: is quantised to fp8, and there is no {quoted(name + _SCALE)}.")
        grid = scales.shape if len(scales.shape) == 2 else (1, 1)
        if len(weight.shape) != 2 or not all(grid) or any(size % n for size, n in zip(weight.shape, grid, strict=True)):
            raise CheckpointError(
                f"{scales.place}: has shape {list(scales.shape)}, the weight {list(weight.shape)}: no whole blocks."
            )
        edges = zip(weight.shape, grid, block or (), strict=False)
        if any(count > 1 and size % edge and count == -(-size // edge) for size, count, edge in edges):
            raise CheckpointError(
                f"{scales.place}: the last block of the weight, {list(weight.shape)}, is smaller than "
                f"weight_block_size, {quoted(block)}. Convert the model that it was made from."
            )
    return weights


def with_dequantised(checkpoint: Checkpoint, dequantised: Mapping[str, Tensor]) -> Checkpoint:
    """The checkpoint with these tensors in the place of those of their names, and without their scales."""
    used = {f"{name}{_SCALE}" for name in dequantised}
    used |= {f"{name.removesuffix('weight')}{_ACTIVATIONS}" for name in dequantised}
    shards = []
    for shard in checkpoint.shards:
        kept = tuple(dequantised.get(tensor.name, tensor) for tensor in shard.tensors if tensor.name not in used)
        shards.append(shard if kept == shard.tensors else Shard(None, shard.size, kept))
    note = f"{checkpoint.folder}: {len(dequantised)} fp8 tensors are dequantised to bfloat16."
    return replace(checkpoint, shards=tuple(shards), notes=(*checkpoint.notes, note))
