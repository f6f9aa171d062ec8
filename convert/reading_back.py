"""Reads a result back and compares it with the plan: headers, then every byte."""

import hashlib
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from resformer.convert.reading import Checkpoint, SideFile, read_checkpoint
from resformer.convert.safetensors_format import Shard, Tensor
from resformer.errors import VerificationError, first_names
from resformer.untrusted import open_regular, reading


def check_headers(folder: Path, expected: Mapping[str, Tensor]) -> Checkpoint:
    """Reads every header of `folder` and compares names, dtypes and shapes with `expected`."""
    stored = read_checkpoint(folder)
    compare_headers(folder, stored.tensors, expected)
    return stored


def compare_headers(folder: Path, stored: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
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
    stored: Checkpoint,
    expected: Mapping[str, Tensor],
    digests: Mapping[str, str],
    linked: Collection[str] = (),
    progress: Callable[[int], object] = lambda read: None,
) -> dict[str, str]:
    """Reads back what was written: copies against their source, the rest against SHA-256 `digests` of tensors.

    Returns file -> SHA-256 of the whole file, of all but `linked` ones, where there is nothing to compare.
    """

    def check(shard: Shard) -> str:
        assert shard.path is not None
        whole = hashlib.sha256()
        with open_regular(shard.path) as file, reading(shard.path):
            whole.update(file.read(shard.size - sum(tensor.nbytes for tensor in shard.tensors)))
        for tensor in shard.tensors:
            computed = hashlib.sha256() if tensor.name in digests else None
            source = iter(()) if computed else expected[tensor.name].pieces()
            same = True
            for piece in tensor.pieces():
                whole.update(piece)
                if computed:
                    computed.update(piece)
                else:  # memoryviews compare slowly
                    same = same and bytes(piece) == bytes(next(source, b""))
            if not same or (computed and computed.hexdigest() != digests[tensor.name]):
                raise VerificationError(f"{tensor.place}: its bytes are not those that were written.")
            progress(tensor.nbytes)
        return whole.hexdigest()

    read = {shard.path.name: shard for shard in stored.shards if shard.path and shard.path.name not in linked}
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        return dict(zip(read, pool.map(check, read.values()), strict=True))


def check_side_files(folder: Path, side_files: Iterable[SideFile], progress: Callable[[int], object]) -> None:
    """Reads tokenizer, templates and other files back."""
    for file in side_files:
        expected = file.path.read_bytes() if file.content is None else file.content
        if (folder / file.name).read_bytes() != expected:
            raise VerificationError(f"{folder / file.name}: its bytes are not those that were written.")
        progress(file.size)
