"""Quantised checkpoints: fp8 is dequantised to bfloat16 as Transformers does, others are refused with a way out."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from resformer.convert.reading import Checkpoint
from resformer.convert.safetensors_format import Shard, Tensor
from resformer.errors import CheckpointError, quoted
from resformer.untrusted import MIB

__all__ = ["Dequantised", "check_quantisation", "dequantise_fp8"]

_SCALE, _ACTIVATIONS = "_scale_inv", "activation_scale"
#: Code of a scale's dtype -> torch's. Bytes hold exponents of 2.
_SCALE_DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U8": torch.uint8,
}


@dataclass(frozen=True)
class Dequantised(Tensor):
    """weight * scale of its block, in bfloat16; computed when it is read."""

    weight: Tensor
    scales: Tensor  # (rows, columns) of blocks, or one number
    changed: int | None = field(default=None, compare=False)  # numbers that were rounded, once all have been read

    @property
    def blocks(self) -> tuple[int, int]:
        rows, columns = self.scales.shape if len(self.scales.shape) == 2 else (1, self.scales.elements)
        return rows, columns

    @property
    def on_this_disk(self) -> bool:
        return self.weight.on_this_disk

    def pieces(self, size: int = 4 * MIB) -> Iterator[memoryview]:
        rows, columns = self.shape
        block_rows, across = rows // self.blocks[0], self.blocks[1]
        pending, changed = bytearray(), 0
        for scales, piece in zip(self._numbers(), self.weight.pieces(block_rows * columns), strict=True):
            numbers = torch.frombuffer(piece, dtype=torch.float8_e4m3fn).float().view(block_rows, across, -1)
            products = (numbers * scales[:, None]).bfloat16()
            exact = numbers.double() * scales[:, None].double()  # 4 x 24 bits fit
            changed += int(((products.double() != exact) & ~exact.isnan()).sum())
            pending += products.view(-1).view(torch.uint8).numpy().data
            while len(pending) >= size:
                yield memoryview(pending[:size])
                pending = pending[size:]
        if pending:
            yield memoryview(pending)
        object.__setattr__(self, "changed", changed)

    def _numbers(self) -> torch.Tensor:
        """The scales in float32, `blocks`."""
        content = bytearray().join(self.scales.pieces())
        numbers = torch.frombuffer(content, dtype=_SCALE_DTYPES[self.scales.dtype]).float()
        return ((numbers - 127).exp2() if self.scales.dtype == "U8" else numbers).view(self.blocks)


def check_quantisation(where: Path, quantisation: object) -> None:
    """Refuses what cannot be dequantised here.

    Args:
        where: config.json.
        quantisation: its `quantization_config`.

    Raises:
        CheckpointError: the message says how to dequantise it, if Transformers does.
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


def dequantise_fp8(checkpoint: Checkpoint, block: object) -> Checkpoint:
    """The checkpoint with bfloat16 tensors in the place of fp8 ones and their scales; no weight is read yet.

    Args:
        block: `weight_block_size` of config.json: the rows and columns that share a scale.

    Raises:
        CheckpointError: a scale is missing, or does not belong to whole blocks of its weight; or `block` is not such.
    """
    if block is not None and not (isinstance(block, list) and all(type(edge) is int and edge > 0 for edge in block)):
        raise CheckpointError(f"{checkpoint.folder}: weight_block_size is {quoted(block)}; expected [rows, columns].")
    tensors = checkpoint.tensors
    weights = {name: tensor for name, tensor in tensors.items() if tensor.dtype == "F8_E4M3"}
    if not weights:
        return checkpoint
    made = {name: _dequantised(tensor, tensors.get(f"{name}{_SCALE}"), block or ()) for name, tensor in weights.items()}
    used = {f"{name}{_SCALE}" for name in weights}
    used |= {f"{name.removesuffix('weight')}{_ACTIVATIONS}" for name in weights}
    shards = []
    for shard in checkpoint.shards:
        kept = tuple(made.get(tensor.name, tensor) for tensor in shard.tensors if tensor.name not in used)
        shards.append(shard if kept == shard.tensors else Shard(None, shard.size, kept))
    note = f"{checkpoint.folder}: {len(made)} fp8 tensors are dequantised to bfloat16."
    return replace(checkpoint, shards=tuple(shards), notes=(*checkpoint.notes, note))


def _dequantised(weight: Tensor, scales: Tensor | None, block: Sequence[int]) -> Dequantised:
    if scales is None:
        raise CheckpointError(f"{weight.place}: is quantised to fp8, and there is no {quoted(weight.name + _SCALE)}.")
    if scales.dtype not in _SCALE_DTYPES:
        expected = ", ".join(_SCALE_DTYPES)
        raise CheckpointError(f"{scales.place}: has dtype {scales.dtype}; scales are read in {expected}.")
    whole = math.prod(scales.shape) == 1 or (
        len(weight.shape) == len(scales.shape) == 2
        and all(blocks and not size % blocks for size, blocks in zip(weight.shape, scales.shape, strict=True))
    )
    if len(weight.shape) != 2 or not whole:
        raise CheckpointError(
            f"{scales.place}: has shape {list(scales.shape)}, the weight {list(weight.shape)}: no whole blocks."
        )
    cut = len(scales.shape) == 2 and any(
        count > 1 and size % edge and count == -(-size // edge)
        for size, count, edge in zip(weight.shape, scales.shape, block, strict=False)
    )
    if cut:
        raise CheckpointError(
            f"{scales.place}: the last block of the weight, {list(weight.shape)}, is smaller than weight_block_size, "
            f"{quoted(block)}. Convert the model that it was made from."
        )
    return Dequantised(weight.name, "BF16", weight.shape, memoryview(b""), weight, scales)
