"""What every conversion does once its plan stands: check, write, verify, put in place."""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedConfig
from transformers.utils import logging as transformers_logging

from resformer.convert.casting import Rounding
from resformer.convert.planning import CarriedShard, Plan
from resformer.convert.reading import Checkpoint
from resformer.convert.safetensors_format import FLOATING
from resformer.convert.source import OpenedSource
from resformer.convert.verification import (
    LogitsComparison,
    check_bytes,
    check_headers,
    compare_logits,
    free_memory,
    not_finite,
    same_bytes,
)
from resformer.convert.writing import Transfer, Written, check_space, flush, foresee, write_plan
from resformer.errors import CheckpointError, VerificationError, brief, listed
from resformer.files import replacing, write_text

__all__ = [
    "Conversion",
    "Outcome",
    "Verify",
    "carry_out",
    "check_tensors",
    "check_verify",
    "foretell",
    "memory_for_logits",
    "model_bytes",
    "no_bars",
    "result_config",
]

Verify = Literal["auto", "headers", "hashes", "logits"]

#: Old Llamas stored what follows from config.json; Transformers passes over it.
_OLD_BUFFER = re.compile(r"model\.(layers\.[0-9]+\.self_attn\.)?rotary_emb\.inv_freq")
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class Conversion:
    """A conversion that has been decided on, and how to carry it out."""

    source: OpenedSource
    plan: Plan
    output: Path
    dtype: torch.dtype  # of most weights of the result
    exact: bool  # the logits must be the source's, bit for bit
    link: bool = False
    force: bool = False
    verify: Verify = "auto"
    durable: bool = False
    progress: bool = True


@dataclass(frozen=True)
class Outcome:
    """What happened, or, in a dry run, would."""

    transfer: Transfer
    verified: str  # headers, hashes, logits; "" in a dry run
    logits: LogitsComparison | None = None
    rounding: Rounding = field(default_factory=Rounding)
    warnings: tuple[str, ...] = ()
    files: Mapping[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def told(self) -> dict[str, Any]:
        """What every report says of it."""
        return {"transfer": self.transfer, "verified": self.verified, "verification": self.logits}


def check_verify(verify: str) -> None:
    """Raises `ValueError` for what is no `Verify`."""
    *others, last = get_args(Verify)
    if verify not in (*others, last):
        raise ValueError(f"verify={verify!r}: expected {', '.join(others)} or {last}.")


def check_tensors(source: OpenedSource, expected: Mapping[str, tuple[int, ...]]) -> tuple[bool, list[str]]:
    """Compares the tensors of the source with those that its configuration asks for.

    Args:
        expected: name -> shape of every tensor, both ends of a tie among them.

    Returns:
        whether the head is tied to the embeddings (what the file holds decides, as in Transformers), and notes.

    Raises:
        CheckpointError: a tensor is missing, too many, of the wrong shape, or quantised.
    """
    folder, tensors = source.folder, source.checkpoint.tensors
    tied, notes = bool(source.config.tie_word_embeddings), []
    required = dict(expected)
    if tied and HEAD not in tensors:
        required.pop(HEAD, None)
    elif tied and EMBEDDING not in tensors:
        required.pop(EMBEDDING)
    elif tied and not same_bytes(tensors[HEAD], tensors[EMBEDDING]):
        tied = False
        notes.append(
            f"{folder}: config.json ties lm_head.weight to the embeddings, but the two differ; the result has "
            "tie_word_embeddings=False, which is how Transformers loads the source."
        )
    elif not tied and HEAD in required and HEAD not in tensors:
        raise CheckpointError(
            f"{folder}: missing keys: config.json has tie_word_embeddings=False and no shard has lm_head.weight: it "
            "would be random. If the head is the embedding matrix, set tie_word_embeddings to true."
        )
    if missing := required.keys() - tensors.keys():
        raise CheckpointError(f"{folder}: missing keys: config.json asks for {listed(missing)}.")
    for name, tensor in tensors.items():
        if _OLD_BUFFER.fullmatch(name) and tensor.dtype in FLOATING:
            continue
        if name not in required:
            raise CheckpointError(f"{tensor.place}: unexpected: config.json has no place for it.")
        if tensor.shape != required[name]:
            raise CheckpointError(
                f"{tensor.place}: has shape {list(tensor.shape)}, config.json asks for {list(required[name])}."
            )
        if tensor.dtype not in FLOATING:
            raise CheckpointError(
                f"{tensor.place}: has dtype {tensor.dtype}, expected one of {', '.join(FLOATING)}: quantised "
                "checkpoints have to be dequantised first."
            )
    return tied, notes


def result_config(config: PreTrainedConfig, architecture: str, dtype: torch.dtype) -> str:
    """The text of the result's config.json."""
    config.architectures = [architecture]
    config.dtype = dtype
    return config.to_json_string()


def carry_out(conversion: Conversion, finish: Callable[[Path, Outcome], dict[str, str]]) -> Outcome:
    """Writes the plan beside the output, verifies it, and puts it in place.

    Args:
        finish: given the folder and the outcome so far, returns the texts of further files.

    Raises:
        CheckpointError, OutputError, VerificationError: nothing is left of the output.
    """
    plan, output = conversion.plan, conversion.output
    forecast = foresee(plan, output, link=conversion.link)
    check_space(forecast, output)
    verify, warnings = _choose(conversion)
    to_move = sum(shard.size for shard in plan.shards) + sum(file.size for file in plan.side_files)
    to_read = 0 if verify == "headers" else forecast.moved
    with (
        replacing(output, force=conversion.force) as partial,
        tqdm(
            total=to_move + to_read,
            unit="B",
            unit_scale=True,
            desc=output.name,
            disable=None if conversion.progress else True,
        ) as bar,
    ):
        written = write_plan(plan, partial, link=conversion.link, digests=verify != "headers", progress=bar.update)
        expected = plan.tensors
        found = check_headers(partial, expected)
        if verify != "headers":
            check_bytes(found, expected, written.digests, written.shared, bar.update)
        logits = _compare(conversion, partial, written.rounding) if verify == "logits" else None
        outcome = Outcome(
            written.transfer,
            verify,
            logits,
            written.rounding,
            (*warnings, *written.notes, *_generation_config(found)),
            _files(plan, written, found),
        )
        for name, text in finish(partial, outcome).items():
            write_text(partial / name, text)
        if conversion.durable:
            flush(partial, written.shared)
    return outcome


def foretell(conversion: Conversion) -> Outcome:
    """What `carry_out` would do, but for the bytes of files that are written last."""
    transfer = foresee(conversion.plan, conversion.output, link=conversion.link)
    return Outcome(transfer, "", warnings=tuple(_choose(conversion)[1]))


def model_bytes(checkpoint: Checkpoint, dtype: torch.dtype) -> int:
    """What a model takes in memory."""
    return sum(tensor.elements for tensor in checkpoint.tensors.values()) * dtype.itemsize


def memory_for_logits(checkpoint: Checkpoint, dtype: torch.dtype) -> int:
    """What comparing a model's logits takes: the model, and room for a forward pass."""
    return int(1.2 * model_bytes(checkpoint, dtype)) + 2**29


def _choose(conversion: Conversion) -> tuple[str, list[str]]:
    if conversion.verify != "auto":
        return conversion.verify, []
    dtype = max(conversion.source.dtype, conversion.dtype, key=lambda dtype: dtype.itemsize)
    needed = memory_for_logits(conversion.source.checkpoint, dtype)
    if conversion.source.gguf is not None and conversion.source.model is None:  # a dry run: it will be in memory too
        needed += model_bytes(conversion.source.checkpoint, conversion.source.dtype)
    free = free_memory()
    if needed <= free:
        return "logits", []
    return "hashes", [
        f"The logits were not compared: that takes {needed / 1e9:.1f} GB of memory, {free / 1e9:.1f} GB are free. "
        "Where there is more: resformer verify SOURCE OUTPUT."
    ]


def _compare(conversion: Conversion, partial: Path, rounding: Rounding) -> LogitsComparison:
    """Compares the logits of the source and the result, each in the dtype of most of its weights."""
    source, dtype = conversion.source, conversion.dtype
    with no_bars():
        comparison = compare_logits(source.load, lambda: AutoModelForCausalLM.from_pretrained(partial, dtype=dtype))
    if not comparison.finite:
        wrong = not_finite(source.checkpoint.tensors.values())
        raise CheckpointError(
            f"{source.folder}: the source's logits are not finite, so comparing them proves nothing: NaN or infinite "
            f"numbers are in {listed(wrong) or 'none of its tensors, but config.json lets them grow'}. "
            "Convert it anyway, its bytes unchanged, with --verify hashes (verify='hashes').",
            "--verify hashes",
        )
    if conversion.exact and not comparison.identical:
        raise VerificationError(
            f"The conversion of {source.name} is not exact, the logits {comparison}. Nothing was written; this is a "
            "defect of resformer, please report it."
        )
    if not math.isfinite(comparison.max_difference):
        cast = f"converting from {source.dtype} to {dtype} made {rounding.overflowed:,} weights infinite"
        raise CheckpointError(
            f"{conversion.output}: the result's logits are not finite, the source's are: "
            f"{'the method did it' if dtype == source.dtype else cast.replace('torch.', '')}. Choose another, or "
            "convert it anyway with --verify hashes (verify='hashes').",
            "--verify hashes",
        )
    return comparison


def _generation_config(found: Checkpoint) -> Iterator[str]:
    for file in found.side_files:
        if file.name == "generation_config.json":
            try:
                GenerationConfig.from_pretrained(found.folder, local_files_only=True).validate(strict=True)
            except Exception as error:  # its own validator's, or of a file that means something else
                reason = brief(error)
                yield f"generation_config.json goes along as it is, but saving the model again will fail: {reason}"


def _files(plan: Plan, written: Written, found: Checkpoint) -> dict[str, dict[str, Any]]:
    """For the record: each weights file, where it is from, and the tensors in it."""
    digests = written.digests
    files: dict[str, dict[str, Any]] = {}
    for shard, stored in zip(plan.shards, found.shards, strict=True):
        files[shard.name] = {
            "bytes": stored.size,
            "carried_from": shard.path.name if isinstance(shard, CarriedShard) else None,
            "tensors": {
                tensor.name: {"dtype": tensor.dtype, "shape": list(tensor.shape)}
                | ({"sha256": digests[tensor.name]} if tensor.name in digests else {})
                for tensor in stored.tensors
            },
        }
    return files


@contextmanager
def no_bars() -> Iterator[None]:
    """One bar for one piece of work: Transformers' own would stand in the middle of ours."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()
