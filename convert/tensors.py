"""Torch's tensors as stored ones, and back."""

import torch

from resformer.convert.reading import Checkpoint
from resformer.convert.safetensors_format import FLOATING, Tensor
from resformer.errors import CheckpointError

__all__ = ["CODES", "dominant_dtype", "to_tensor", "to_torch"]

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


def dominant_dtype(checkpoint: Checkpoint) -> torch.dtype:
    """The dtype of most numbers."""
    elements: dict[str, int] = {}
    for tensor in checkpoint.tensors.values():
        if tensor.dtype in FLOATING:
            elements[tensor.dtype] = elements.get(tensor.dtype, 0) + tensor.elements
    if not elements:
        raise CheckpointError(f"{checkpoint.folder}: holds no floating tensors.")
    return getattr(torch, FLOATING[max(elements, key=lambda dtype: (elements[dtype], dtype))])
