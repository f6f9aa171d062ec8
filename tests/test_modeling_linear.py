"""Products of one token that oneDNN works out are the products that PyTorch makes of them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from resformer.modeling import linear
from resformer.modeling.linear import Linear

needs_onednn = pytest.mark.skipif(
    not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()),
    reason="this PyTorch has no oneDNN beside MKL",
)


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Notes the weights' shapes of the products that oneDNN works out."""
    seen: list[tuple[int, ...]] = []
    product = torch.ops.mkldnn._linear_pointwise

    def noted(states: torch.Tensor, weight: torch.Tensor, *rest: Any) -> torch.Tensor:
        seen.append(tuple(weight.shape))
        return product(states, weight, *rest)

    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", noted)
    return seen


@needs_onednn
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("rows", "width"), [(512, 512), (640, 333), (1000, 96), (50257, 16), (129, 777)])
@pytest.mark.parametrize("batch", [1, 2, 5, 64])
@torch.no_grad()
def test_products_are_those_of_float64(
    batch: int, rows: int, width: int, bias: bool, products: list[tuple[int, ...]]
) -> None:
    layer = Linear(width, rows, bias=bias)
    for states in (torch.randn(batch, 1, width), torch.randn(1, batch, width).transpose(0, 1)):
        got = layer(states)
        expected = nn.functional.linear(states.double(), layer.weight.double(), layer.bias.double() if bias else None)
        assert got.shape == expected.shape
        assert (got - expected).abs().max() <= 2e-6 * expected.abs().max()
    assert len(products) == 2


@needs_onednn
def test_only_single_tokens_in_float32_without_gradients_go_there(products: list[tuple[int, ...]]) -> None:
    layer = Linear(512, 512)
    token = torch.randn(2, 1, 512)
    with torch.no_grad():
        layer(token)
        assert products == [(512, 512)]
        layer(torch.randn(2, 3, 512))  # a prompt
        layer(torch.randn(512))
        layer(torch.randn(65, 1, 512))  # arithmetic, not reading, takes the time
        Linear(100, 100)(torch.randn(1, 1, 100))  # nothing to gain
        layer.double()(token.double())
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert layer.float()(token).dtype == torch.bfloat16
        with torch.backends.mkldnn.flags(enabled=False):
            layer(token)
    layer(token).sum().backward()
    assert layer.weight.grad is not None
    assert len(products) == 1
    with torch.inference_mode():
        layer(token)
    assert len(products) == 2


@pytest.mark.parametrize("variant", ["resformer-denseformer", "crossed-sharing", "kitchen-sink"], indirect=True)
def test_generation_with_these_products_equals_uncached(
    tiny_model: Callable[..., PreTrainedModel],
    variant: str,
    ragged: dict[str, torch.Tensor],
    products: list[tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(linear, "SMALLEST_WEIGHT", 1)
    model = tiny_model(variant)
    options = {"max_new_tokens": 8, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    got = model.generate(**ragged, **options)
    assert len(products) >= 7 * 6 * 5 or not torch.backends.mkl.is_available()
    expected = model.generate(**ragged, **options, use_cache=False)
    assert torch.equal(got.sequences, expected.sequences)
    for mine, naive in zip(got.logits, expected.logits, strict=True):
        torch.testing.assert_close(mine, naive, rtol=1e-4, atol=1e-4)
