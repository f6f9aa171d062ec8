"""Coefficients reach the layers alike, whether as one tensor a row or, where no gradient is asked for, as scalars."""

import pytest
import torch
from conftest import Batch, TinyModel

from resformer import METHODS
from resformer.modeling.mixing import weighted_sum

MIXING = [name for name in METHODS if name.startswith(("resformer", "depth")) and "denseformer" not in name]


@pytest.mark.parametrize(
    ("dtype", "autocast"), [(torch.float32, False), (torch.float32, True), (torch.bfloat16, False)], ids=str
)
@pytest.mark.parametrize("name", MIXING)
def test_values_mix_to_the_same_bits_with_and_without_gradients(
    tiny_model: TinyModel, name: str, dtype: torch.dtype, autocast: bool, ragged: Batch
) -> None:
    model = tiny_model(name).to(dtype)
    if model.model.value_residual is not None:
        model.model.value_residual.float()
        for parameter in model.model.value_residual.parameters():
            parameter.data += 0.0123  # what bfloat16 does not hold
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        learning = model(**ragged).logits
        with torch.no_grad():
            assert torch.equal(model(**ragged).logits, learning)
    assert learning.requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_ones_and_zeros_change_no_bit(dtype: torch.dtype) -> None:
    states = [torch.randn(3, 5, 7).to(dtype) for _ in range(4)]
    for kept, weights in enumerate(torch.eye(4)):
        for given in (weights, weights.tolist()):
            out = weighted_sum(states, given)
            assert out.dtype == dtype
            assert torch.equal(out, states[kept])
