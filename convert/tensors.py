"""Torch's tensors as stored ones, and back; a change of dtype, a piece at a time, and how many numbers it changes."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from resformer.safetensors_format import FLOATING, Tensor

#: torch's dtype of weights -> the code of the safetensors format.
CODES = {getattr(torch, name): code for code, name in FLOATING.items()}


def to_tensor(name: str, tensor: torch.Tensor) -> Tensor:
    """A tensor of torch as one that can be written."""
    flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return Tensor(name, CODES[tensor.dtype], tuple(tensor.shape), flat.numpy().data)


def to_torch(tensor: Tensor) -> torch.Tensor:
    """Reads a tensor."""
    dtype = getattr(torch, FLOATING[tensor.dtype])
    content = bytearray()
    for piece in tensor.pieces():
        content += piece
    return torch.frombuffer(content, dtype=dtype).reshape(tensor.shape) if content else torch.empty(tensor.shape)


def numbers(tensor: Tensor) -> Iterator[torch.Tensor]:
    """The numbers of a floating tensor, a piece at a time, each valid until the next one is read."""
    for piece in tensor.pieces():
        yield torch.frombuffer(piece, dtype=getattr(torch, FLOATING[tensor.dtype]))


@dataclass
class Rounding:
    """Counts of numbers that a change of dtype did not keep; measured while they are written."""

    changed: int = 0  # NaN aside
    overflowed: int = 0  # finite before, infinite after
    flushed: int = 0  # not 0 before, 0 after


def converted(tensor: Tensor, dtype: str, rounding: Rounding) -> Iterator[memoryview]:
    """The bytes of `tensor` in the dtype of this code, some at a time; counts are added to `rounding`."""
    if dtype == tensor.dtype:
        yield from tensor.pieces()
        return
    new = getattr(torch, FLOATING[dtype])
    for before in numbers(tensor):
        after = before.to(new)
        if new.itemsize <= before.dtype.itemsize:  # a wider dtype takes every number as it is
            kept, nan = after.to(before.dtype).eq(before).count_nonzero(), before.ne(before).count_nonzero()
            rounding.changed += len(before) - int(kept + nan)
            rounding.overflowed += int(after.isinf().count_nonzero() - before.isinf().count_nonzero())
            rounding.flushed += int(before.count_nonzero() - after.count_nonzero())
        yield after.view(torch.uint8).numpy().data
