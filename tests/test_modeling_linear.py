"""Products of one token, spread over the cores, are the products that PyTorch makes of them."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from resformer.modeling import linear
from resformer.modeling.linear import Linear, product_by_rows


@pytest.fixture
def two_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Notes into how many parts products are divided."""
    seen: list[int] = []

    def noted(states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, parts: int) -> torch.Tensor:
        seen.append(parts)
        return product_by_rows(states, weight, bias, parts)

    monkeypatch.setattr(linear, "product_by_rows", noted)
    return seen


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("rows", "width"), [(512, 512), (640, 333), (1000, 96), (50257, 16), (129, 777)])
@pytest.mark.parametrize("batch", [1, 2, 5, 64])
def test_products_by_rows_are_the_products(batch: int, rows: int, width: int, bias: bool) -> None:
    states, weight = torch.randn(batch, 1, width).double(), torch.randn(rows, width).double()
    offset = torch.randn(rows).double() if bias else None
    expected = nn.functional.linear(states, weight, offset)
    for parts in {1, 2, min(3, rows // 64), min(8, rows // 64)}:
        got = product_by_rows(states, weight, offset, parts)
        assert got.shape == expected.shape
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-11)


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="products are spread where MKL would not")
def test_only_single_tokens_in_float32_without_gradients_are_spread(two_threads: None, parts: list[int]) -> None:
    layer = Linear(512, 512)
    token = torch.randn(2, 1, 512)
    with torch.no_grad():
        torch.testing.assert_close(layer(token), nn.functional.linear(token, layer.weight, layer.bias))
        assert parts == [8]
        layer(torch.randn(2, 3, 512))  # a prompt
        layer(torch.randn(512))
        layer(torch.randn(65, 1, 512))  # arithmetic, not reading, takes the time
        Linear(100, 100)(torch.randn(1, 1, 100))  # nothing to gain
        layer.double()(token.double())
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert layer.float()(token).dtype == torch.bfloat16
        torch.set_num_threads(1)
        layer(token)
        torch.set_num_threads(2)
    layer(token).sum().backward()
    assert layer.weight.grad is not None
    assert parts == [8]
    with torch.inference_mode():
        layer(token)
    assert parts == [8, 8]


@pytest.mark.parametrize("variant", ["resformer-denseformer", "crossed-sharing", "kitchen-sink"], indirect=True)
def test_generation_with_spread_products_equals_uncached(
    tiny_model: Callable[..., PreTrainedModel],
    variant: str,
    ragged: dict[str, torch.Tensor],
    two_threads: None,
    parts: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(linear, "SMALLEST_WEIGHT", 1)
    monkeypatch.setattr(linear, "BLOCK", 4)
    model = tiny_model(variant)
    options = {"max_new_tokens": 8, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    got = model.generate(**ragged, **options)
    assert len(parts) >= 7 * 6 * 5 or not torch.backends.mkl.is_available()
    expected = model.generate(**ragged, **options, use_cache=False)
    assert torch.equal(got.sequences, expected.sequences)
    for mine, naive in zip(got.logits, expected.logits, strict=True):
        torch.testing.assert_close(mine, naive, rtol=1e-4, atol=1e-4)
