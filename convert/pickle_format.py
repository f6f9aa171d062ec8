"""`pytorch_model*.bin`: pickles, read only if the user allows it, restricted to tensors."""

from pathlib import Path

import torch

from resformer.convert.safetensors_format import Tensor
from resformer.convert.tensors import CODES, to_tensor
from resformer.errors import CheckpointError, one_line, quoted
from resformer.untrusted import MIB, bare_name, read_json, regular_file

PICKLE_INDEX = "pytorch_model.bin.index.json"


def pickle_names(folder: Path) -> list[str]:
    """The weight files: `pytorch_model.bin`, or those that `pytorch_model.bin.index.json` names."""
    index = folder / PICKLE_INDEX
    if not index.exists():
        return ["pytorch_model.bin"]
    weight_map = read_json(index, 4 * MIB).get("weight_map")
    values = weight_map.values() if isinstance(weight_map, dict) else ()
    return sorted({bare_name(name, ".bin", str(index)) for name in map(str, values)})


def read_pickles(folder: Path) -> list[Tensor]:
    """The tensors of the weight files, in memory. The unpickler is restricted to tensors: it runs no code."""
    tensors: dict[str, Tensor] = {}
    for name in pickle_names(folder):
        path = regular_file(folder / name)
        try:
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:  # a pickle can fail in any way
            raise CheckpointError(
                f"{folder / name}: cannot be read with weights_only=True: {one_line(error)}"
            ) from error
        for key, value in state.items() if isinstance(state, dict) else ():
            if not isinstance(key, str) or key in tensors or not _is_stored_whole(value):
                raise CheckpointError(f"{folder / name}: {quoted(key)} is no plain floating tensor, or is there twice.")
            tensors[key] = to_tensor(key, value)
    if not tensors:
        raise CheckpointError(f"{folder}: its *.bin files hold no tensors.")
    return list(tensors.values())


def _is_stored_whole(value: object) -> bool:
    """Whether this is a floating tensor with every one of its numbers in the file: an expanded one would be a bomb."""
    return (
        isinstance(value, torch.Tensor)
        and value.dtype in CODES
        and value.layout is torch.strided
        and value.device.type == "cpu"
        and value.numel() * value.element_size() <= value.untyped_storage().nbytes()
    )
