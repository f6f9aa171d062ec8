"""bfloat16 and float16 cost no method more accuracy than they cost Llama."""

import copy
import math
from collections import defaultdict
from functools import cache

import pytest
import torch
from conftest import TINY, others_slow
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from resformer import ResFormerConfig, ResFormerForCausalLM
from resformer.training.optimizer import is_connection

#: Rounding errors are proportional to the unit roundoff: one bit less of precision would double the deviation.
ONE_BIT = 2.0
SEEDS = range(2)
STEPS = 15
DTYPES = [torch.bfloat16, torch.float16]


def sequences(seed: int) -> torch.Tensor:
    """`(8, 24)` tokens that count up by 1, 2 or 3: soon learned."""
    generator = torch.Generator().manual_seed(seed)
    start, step = torch.randint(90, (8, 1), generator=generator), torch.randint(1, 4, (8, 1), generator=generator)
    return 3 + (start + step * torch.arange(24)) % 90


def build(method: str, seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    fields = {**TINY, "hidden_size": 64, "intermediate_size": 128, "initializer_range": 0.1}
    return ResFormerForCausalLM(ResFormerConfig.for_method(method, **fields))


def cast(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """A copy as `from_pretrained(dtype=...)` makes it: the coefficients stay in float32."""
    low = copy.deepcopy(model)
    for name, parameter in low.named_parameters():
        if not is_connection(name):
            parameter.data = parameter.data.to(dtype)
    return low


def test_coefficients_start_at_the_numbers_of_the_configuration_in_bfloat16_too() -> None:
    starts = {"value_residual": "learnable", "value_residual_init": [0.3, 0.7], "embedding_residual": True}
    models = [
        AutoModelForCausalLM.from_config(ResFormerConfig(**TINY, **starts, backout=True), dtype=dtype)
        for dtype in (torch.float32, torch.bfloat16)
    ]
    for (name, start), low in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert torch.equal(start, low) or not is_connection(name), name


def train(model: PreTrainedModel, seed: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    for step in range(STEPS):
        optimizer.zero_grad()
        ids = sequences(1000 * seed + step)
        model(ids, labels=ids).loss.backward()
        optimizer.step()


@torch.no_grad()
def token_losses(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    logits = model(ids).logits.float()
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="none")


@cache
def deviations(method: str) -> dict[str, float]:
    """Root mean square over tokens and seeds of how far the losses move in each kind of low precision, in nats."""
    squares: dict[str, list[float]] = defaultdict(list)
    for seed in SEEDS:
        model = build(method, seed)
        train(model, seed)
        ids = sequences(1000 * seed + 999)
        exact = token_losses(model, ids)
        for dtype in DTYPES:
            with torch.autocast("cpu", dtype=dtype):
                mixed = token_losses(model, ids)
            for kind, losses in (("autocast", mixed), ("pure", token_losses(cast(model, dtype), ids))):
                squares[f"{kind} {dtype}"].append((losses - exact).square().mean().item())
    return {kind: math.sqrt(sum(values) / len(values)) for kind, values in squares.items()}


#: One of every mechanism.
METHODS = (
    "resformer resformer-plus resformer-dense resformer-gated depth-attention value-embeddings svformer denseformer "
    "neutreno delta-attention-residuals attnres mudd hyper-connections mhc nanochat"
).split()


@pytest.mark.parametrize("method", others_slow(METHODS, ["resformer", "svformer"]))
def test_losses_deviate_by_less_than_a_bit_more_than_llamas(method: str) -> None:
    llama = deviations("transformer")
    assert len(llama) == 4
    for kind, deviation in deviations(method).items():
        assert 0 < deviation < ONE_BIT * llama[kind], (kind, deviation / llama[kind])
