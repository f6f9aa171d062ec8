"""The logits of two models on the same tokens."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import PreTrainedConfig

from resformer.convert.judging import load
from resformer.environment import free_memory
from resformer.errors import CheckpointError, one_line
from resformer.loading import without_a_word
from resformer.modeling.any_decoder import text_config
from resformer.modeling.versions import CACHE
from resformer.safetensors_format import FLOATING, Shard

#: Tokens that are decoded one at a time, with a cache.
_STEPS = 4


#: What families call the most tokens that a layer attends to.
_WINDOWS = """sliding_window sliding_window_size window_size attention_window_size attention_chunk_size local_attention
    local_attention_window_len""".split()


def window_of(config: PreTrainedConfig) -> int:
    """The window of a model's attention; 0 without one."""
    text = text_config(config)
    kinds = getattr(text, "layer_types", None)
    if kinds is not None and {*kinds} <= {"full_attention", "linear_attention"}:
        return 0
    return max(size for name in _WINDOWS if isinstance(size := getattr(text, name, 0), int))


def not_compared(reason: str) -> CheckpointError:
    return CheckpointError(f"{reason} Convert it anyway with --verify hashes (verify='hashes').", "--verify hashes")


def memory_of(model: int) -> int:
    """Bytes that comparing logits takes, of a model of so many: it, and room for a forward pass."""
    return int(1.2 * model) + 2**29


def too_large(model: int) -> str:
    """Why logits of a model of so many bytes are not compared; empty if there is room."""
    needed, free = memory_of(model), free_memory()
    return f"that takes {needed / 1e9:.1f} GB of memory, {free / 1e9:.1f} GB are free" if needed > free else ""


def not_finite(shards: Iterable[Shard]) -> list[str]:
    """The names of the floating tensors that hold a NaN or an infinity."""
    found = []
    for shard in shards:
        with safe_open(shard.path, "pt") as file:
            names = (tensor.name for tensor in shard.tensors if tensor.dtype in FLOATING)
            found += [name for name in names if not file.get_tensor(name).isfinite().all()]
    return found


@dataclass(frozen=True)
class LogitsComparison:
    """The distance between the logits of two models on two rows of tokens.

    Each row is read twice: in one pass without a cache; then as `generate` reads it, the first row padded on the left,
    into a cache, and the last tokens one at a time.
    """

    tokens: int  # at which logits are compared, in both readings: half of them at the end of each row
    row: int  # tokens of a row
    window: int | None  # that no row exceeds
    identical: bool  # bit for bit, in both readings
    finite: bool  # all of the source's
    max_difference: float
    mean_kl: float  # KL(source || converted) per token, in nats
    top1_agreement: float  # 0 to 1

    def __str__(self) -> str:
        where = f"on {self.tokens} tokens" + (f", within the sliding window of {self.window:,}" if self.window else "")
        if self.identical:
            return f"identical to the bit {where}"
        return (
            f"differ {where}: max {self.max_difference:.3g}, KL {self.mean_kl:.3g} nats per token, top-1 agreement "
            f"{self.top1_agreement:.1%}"
        )


def compare_logits(
    *models: tuple[str, Path],
    tokens: int = 128,
    text: tuple[Path, Sequence[int]] | None = None,
    window: int = 0,
    longest: int | None = None,
    device: str | None = None,
) -> LogitsComparison:
    """Runs two models on the same two rows of tokens.

    Args:
        models: the name of each, for messages, and its folder; no more than one is in memory at a time.
        tokens: at which logits are compared, at least 16: half of them at the end of each row.
        text: the file and the token ids of the rows; default: random ones, from a fixed seed.
        window: the longest of both; rows exceed it, if it is at most `longest`.

    Raises:
        CheckpointError: a model does not run, or the text is too short.
    """
    row = max(tokens // 2, 0 if longest is not None and window > longest else window + tokens // 4)
    path, ids = text or (None, None)
    if ids is not None and len(ids) < 2 * row:
        raise CheckpointError(
            f"{path}: has {len(ids):,} tokens, two rows take {2 * row:,}: give more text, or --tokens."
        )
    readings = []
    for name, folder in models:
        with without_a_word():
            loaded: Any = load(folder, name)[0]
            try:
                readings.append(_read_twice(loaded if device is None else loaded.to(device), tokens // 2, row, ids))
            except Exception as error:  # of the family's code, for values that no validator looks at
                raise not_compared(
                    f"{name}: Transformers loads it, and its model does not run ({type(error).__name__}: "
                    f"{one_line(error)})."
                ) from error
            finally:
                loaded.to("meta")  # a model refers to itself, and its weights would stay beside the next one's
    expected, actual = readings
    pairs = list(zip(expected.split(128), actual.split(128), strict=True))  # float64 takes memory
    kl = agreement = 0.0
    for a, b in pairs:
        log_a, log_b = (values.double().log_softmax(-1) for values in (a, b))
        kl += (log_a.exp() * (log_a - log_b)).sum().item()
        agreement += (a.argmax(-1) == b.argmax(-1)).sum().item()
    return LogitsComparison(
        tokens=2 * (tokens // 2),
        row=row,
        window=window if row <= window else None,
        identical=all(bool(((a == b) | (a.isnan() & b.isnan())).all()) for a, b in pairs),
        finite=bool(expected.isfinite().all()),
        max_difference=torch.stack([(a - b).abs().max().float() for a, b in pairs]).max().item(),
        mean_kl=kl / len(expected),
        top1_agreement=agreement / len(expected),
    )


@torch.no_grad()
def _read_twice(loaded: Any, compared: int, row: int, text: Sequence[int] | None) -> torch.Tensor:
    """The logits at the last `compared` tokens of two rows, in both readings."""
    ids = torch.randint(text_config(loaded.config).vocab_size, (2, row), generator=torch.Generator().manual_seed(0))
    ids = (ids if text is None else torch.tensor(text[: 2 * row]).view(2, row)).to(loaded.device)
    _, plain = _read(loaded, compared, input_ids=ids, use_cache=False)
    if CACHE not in signature(type(loaded).forward).parameters:
        return plain.flatten(0, 1)
    pad = compared // 4
    padded = torch.stack([torch.cat([ids.new_zeros(pad), ids[0, : row - pad]]), ids[1]])
    mask = torch.ones_like(padded)
    mask[0, :pad] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)  # as `generate` counts them
    cache, parts = None, []
    for start, stop in ((0, row - _STEPS), *((n, n + 1) for n in range(row - _STEPS, row))):
        output, part = _read(
            loaded,
            min(stop - start, compared - _STEPS),
            input_ids=padded[:, start:stop],
            attention_mask=mask[:, :stop],
            position_ids=positions[:, start:stop],
            use_cache=True,
            **{CACHE: cache},
        )
        if (cache := output.get(CACHE)) is None:  # an encoder
            return plain.flatten(0, 1)
        parts.append(part)
    cached = torch.cat(parts, 1)
    of_padding = max(0, pad - (row - compared))
    return torch.cat([plain[0], plain[1], cached[0, of_padding:], cached[1]])


def _read(model: Any, kept: int, **inputs: Any) -> tuple[Any, torch.Tensor]:
    """(the output, the last `kept` logits); a family may have no argument for some of the inputs."""
    known = signature(type(model).forward).parameters
    # A mixture's balancing loss changes no logits, and fails on padding with a cache.
    inputs |= {"logits_to_keep": kept, "output_router_logits": False}
    inputs = {name: value for name, value in inputs.items() if name in known}
    output = model(**inputs)
    return output, output.logits[:, -kept:].cpu()
