"""Reads a result back and compares it with its source: headers, bytes, logits."""

import gc
import hashlib
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from resformer.convert.reading import Checkpoint, SideFile, read_checkpoint
from resformer.convert.safetensors_format import FLOATING, Tensor
from resformer.errors import VerificationError, listed

__all__ = [
    "LogitsComparison",
    "check_bytes",
    "check_headers",
    "check_side_files",
    "compare_headers",
    "compare_logits",
    "first_bytes",
    "free_memory",
    "memory_for_logits",
    "model_bytes",
    "not_finite",
    "same_bytes",
]


def check_headers(folder: Path, expected: Mapping[str, Tensor]) -> Checkpoint:
    """Reads every header of `folder` and compares names, dtypes and shapes with `expected`.

    Raises:
        VerificationError: they differ.
    """
    stored = read_checkpoint(folder)
    compare_headers(folder, stored.tensors, expected)
    return stored


def compare_headers(folder: Path, stored: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Raises `VerificationError` if names, dtypes or shapes differ."""
    if stored.keys() != expected.keys():
        raise VerificationError(
            f"{folder}: lacks {listed(expected.keys() - stored.keys()) or 'nothing'}, holds beyond the plan "
            f"{listed(stored.keys() - expected.keys()) or 'nothing'}."
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
    shared: Collection[str] = (),
    progress: Callable[[int], object] = lambda read: None,
) -> None:
    """Reads back what was written: copies against their source, the rest against SHA-256 digests.

    Args:
        expected: name -> the tensor at its source.
        digests: name -> digest, of the tensors whose bytes were computed here.
        shared: files that share their source's bytes (links, clones), where there is nothing to compare.

    Raises:
        VerificationError: a byte differs.
    """

    def check(tensor: Tensor) -> None:
        if tensor.name in digests:
            digest = hashlib.sha256()
            for piece in tensor.pieces():
                digest.update(piece)
            same = digest.hexdigest() == digests[tensor.name]
        else:
            same = same_bytes(tensor, expected[tensor.name])
        if not same:
            raise VerificationError(f"{tensor.place}: its bytes are not those that were written.")
        progress(tensor.nbytes)

    files = [shard for shard in stored.shards if shard.path is not None and shard.path.name not in shared]
    written = [tensor for shard in files for tensor in shard.tensors]
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        list(pool.map(check, written))


def check_side_files(folder: Path, side_files: Iterable[SideFile], progress: Callable[[int], object]) -> None:
    """Reads tokenizer, templates and other files back.

    Raises:
        VerificationError: a byte differs.
    """
    for file in side_files:
        expected = file.path.read_bytes() if file.content is None else file.content
        if (folder / file.name).read_bytes() != expected:
            raise VerificationError(f"{folder / file.name}: its bytes are not those that were written.")
        progress(file.size)


def same_bytes(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are stored alike."""
    pairs = zip(one.pieces(), other.pieces(), strict=True)
    return one.nbytes == other.nbytes and all(bytes(a) == bytes(b) for a, b in pairs)  # memoryviews compare slowly


def first_bytes(tensors: Iterable[Tensor]) -> dict[str, str]:
    """Name -> SHA-256 of a tensor's first 4 KiB: quick for a model of any size, and training changes them."""
    return {tensor.name: hashlib.sha256(next(tensor.pieces(4096), b"")).hexdigest() for tensor in tensors}


def not_finite(tensors: Iterable[Tensor]) -> list[str]:
    """The names of the floating tensors that hold a NaN or an infinity."""
    names = []
    for tensor in tensors:
        if tensor.dtype in FLOATING:
            dtype = getattr(torch, FLOATING[tensor.dtype])
            numbers = (torch.frombuffer(piece, dtype=dtype) for piece in tensor.pieces())
            if not all(piece.isfinite().all() for piece in numbers):
                names.append(tensor.name)
    return names


@dataclass(frozen=True)
class LogitsComparison:
    """The distance between the logits of two models, over `tokens` positions."""

    tokens: int
    identical: bool  # bit for bit
    finite: bool  # all of the source's
    max_difference: float
    mean_kl: float  # KL(source || converted) per token, in nats
    top1_agreement: float  # 0 to 1

    def __str__(self) -> str:
        if self.identical:
            return f"identical to the bit on {self.tokens} tokens"
        return (
            f"differ on {self.tokens} tokens: max {self.max_difference:.3g}, KL {self.mean_kl:.3g} nats per token, "
            f"top-1 agreement {self.top1_agreement:.1%}"
        )


def compare_logits(
    source: Callable[[], PreTrainedModel] | PreTrainedModel,
    converted: Callable[[], PreTrainedModel] | PreTrainedModel,
    tokens: int = 128,
) -> LogitsComparison:
    """Runs both models on the same `tokens` tokens: random ids from a fixed seed, in two rows.

    Args:
        source, converted: models, or functions that load one; then no more than one is in memory at a time.
    """
    with _no_bars():
        expected, actual = _prompt_logits(source, tokens), _prompt_logits(converted, tokens)
    expected_log, actual_log = (values.double().log_softmax(-1) for values in (expected, actual))
    both_nan = expected.isnan() & actual.isnan()
    return LogitsComparison(
        tokens=expected.shape[0] * expected.shape[1],
        identical=bool(((expected == actual) | both_nan).all()),
        finite=bool(expected.isfinite().all()),
        max_difference=(expected - actual).abs().max().item(),
        mean_kl=(expected_log.exp() * (expected_log - actual_log)).sum(-1).mean().item(),
        top1_agreement=(expected.argmax(-1) == actual.argmax(-1)).double().mean().item(),
    )


@torch.no_grad()
def _prompt_logits(model: Callable[[], PreTrainedModel] | PreTrainedModel, tokens: int) -> torch.Tensor:
    """`(2, tokens // 2, vocab_size)` on the CPU."""
    loaded = model if isinstance(model, PreTrainedModel) else model()
    generator = torch.Generator().manual_seed(0)
    input_ids = torch.randint(loaded.config.vocab_size, (2, tokens // 2), generator=generator)
    was_training = loaded.training
    logits = loaded.eval()(input_ids=input_ids.to(loaded.device), use_cache=False).logits.cpu()
    loaded.train(was_training)
    del loaded
    gc.collect()  # a model refers to itself: without this it would stay beside the next one
    return logits


@contextmanager
def _no_bars() -> Iterator[None]:
    """Hides the bars that Transformers shows while it loads a model: they would break the bar of the conversion."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


def model_bytes(checkpoint: Checkpoint, dtype: torch.dtype, added: Iterable[Tensor] = ()) -> int:
    """Bytes of memory that a model takes, with the tensors `added` to those of the checkpoint."""
    return sum(tensor.elements for tensor in (*checkpoint.tensors.values(), *added)) * dtype.itemsize


def memory_for_logits(checkpoint: Checkpoint, dtype: torch.dtype, added: Iterable[Tensor] = ()) -> int:
    """Bytes of memory to compare a model's logits: the model, and room for a forward pass."""
    return int(1.2 * model_bytes(checkpoint, dtype, added)) + 2**29


def free_memory(system: Path = Path("/")) -> int:
    """Bytes that this process can still take: of the machine, or of a control group that it is in, whichever is less.

    Args:
        system: the root of the file system, for tests.
    """
    free = psutil.virtual_memory().available
    with suppress(OSError):  # no control groups: not Linux
        for line in (system / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers in ("", "memory"):  # "": version 2
                mount = system / "sys/fs/cgroup" / controllers
                group = mount / path.lstrip("/")
                # A container sees its own group as the mount, and a path that is not below it.
                for folder in (group, *group.parents):
                    if folder == mount or mount in folder.parents:
                        free = min(free, _free_in_group(folder, version=1 if controllers else 2))
    return free


def _free_in_group(group: Path, version: int) -> int:
    limit_file, used_file, cached_key = (
        ("memory.max", "memory.current", "inactive_file")
        if version == 2
        else ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    )
    try:
        limit, used = (int((group / name).read_text()) for name in (limit_file, used_file))
        statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return limit - used + int(statistics[cached_key])  # cached files make room
    except (OSError, ValueError, KeyError):  # the root group has no such files, and no limit reads "max"
        return sys.maxsize
