"""Reads a result back and compares it with the plan: headers, then every byte."""

import hashlib
import os
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from resformer.convert.planning import Plan
from resformer.convert.reading import Checkpoint
from resformer.convert.tensors import Rounding, converted
from resformer.errors import VerificationError, first_names
from resformer.safetensors_format import Shard, Tensor
from resformer.untrusted import open_regular, reading


def check_headers(folder: Path, stored: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Raises `VerificationError` if names, dtypes or shapes differ."""
    if stored.keys() != expected.keys():
        raise VerificationError(
            f"{folder}: lacks {first_names(expected.keys() - stored.keys()) or 'nothing'}, holds beyond the plan "
            f"{first_names(stored.keys() - expected.keys()) or 'nothing'}."
        )
    for name, tensor in stored.items():
        planned = expected[name]
        if (tensor.dtype, tensor.shape) != (planned.dtype, planned.shape):
            raise VerificationError(
                f"{tensor.place}: is {tensor.dtype} {list(tensor.shape)}, expected {planned.dtype} "
                f"{list(planned.shape)}."
            )


def check_bytes(
    stored: Checkpoint, plan: Plan, linked: Collection[str], progress: Callable[[int], object]
) -> dict[str, str]:
    """Reads back what was written, and compares it with what it was written from, which is converted again.

    Returns file -> SHA-256, of all weight files but `linked` ones, where there is nothing to compare.
    """
    origins = {origin.name: origin for shard in plan.shards for origin in shard.origins}

    def check(shard: Shard) -> str:
        assert shard.path is not None
        whole = hashlib.sha256()
        with open_regular(shard.path) as file, reading(shard.path):
            whole.update(file.read(shard.size - sum(tensor.nbytes for tensor in shard.tensors)))
        for tensor in shard.tensors:
            expected = converted(origins[tensor.name], tensor.dtype, Rounding())
            for piece, other in zip(tensor.pieces(), expected, strict=True):
                whole.update(piece)
                if bytes(piece) != bytes(other):  # memoryviews compare slowly
                    raise VerificationError(f"{tensor.place}: its bytes are not those that were written.")
            progress(tensor.nbytes)
        return whole.hexdigest()

    read = {shard.path.name: shard for shard in stored.shards if shard.path and shard.path.name not in linked}
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        digests = dict(zip(read, pool.map(check, read.values()), strict=True))
    for side_file in plan.side_files:
        content = side_file.path.read_bytes() if side_file.content is None else side_file.content
        if (stored.folder / side_file.name).read_bytes() != content:
            raise VerificationError(f"{stored.folder / side_file.name}: its bytes are not those that were written.")
        progress(side_file.size)
    return digests
