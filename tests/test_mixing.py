"""Coefficients reach the layers alike, whether as one tensor a row or, where no gradient is asked for, as scalars."""

from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel

from resformer import METHODS
from resformer.modeling.linear import Linear
from resformer.modeling.mixing import split_rows, weighted_sum
from resformer.modeling.value_residual import mix_unkept

MIXING = [name for name in METHODS if name.startswith("resformer") and "denseformer" not in name]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MIXING)
def test_values_mix_to_the_same_bits_with_and_without_gradients(
    tiny_model: Callable[..., PreTrainedModel],
    name: str,
    dtype: torch.dtype,
    autocast: bool,
    ragged: dict[str, torch.Tensor],
) -> None:
    if autocast and dtype == torch.bfloat16:
        pytest.skip("nothing is left to cast")
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
def test_scalars_weigh_as_their_row_does(dtype: torch.dtype) -> None:
    flat = torch.randn(9)
    states = [torch.randn(3, 5).to(dtype) for _ in range(4)]
    sizes = [2, 3, 4]
    with torch.no_grad():
        scalars = split_rows(flat, sizes, dtype)
    assert all(isinstance(row, tuple) for row in scalars)
    rows = split_rows(flat.requires_grad_(), sizes, dtype)
    for size, mine, row, plain in zip(sizes, scalars, rows, split_rows(flat, sizes, None), strict=True):
        expected = weighted_sum(states[:size], plain)
        assert expected.dtype == dtype
        assert torch.equal(weighted_sum(states[:size], row), expected)
        assert torch.equal(weighted_sum(states[:size], mine), expected)


def mixed(count: int, frozen: str = "") -> dict[str, torch.Tensor]:
    """`count` earlier values of two heads of three numbers, and a layer's input, weight and coefficients."""
    tensors = {f"earlier_{m}": torch.randn(2, 2, 5, 3, dtype=torch.float64) for m in range(count)}
    tensors |= {"hidden": torch.randn(2, 5, 4, dtype=torch.float64), "weight": torch.randn(6, 4, dtype=torch.float64)}
    tensors["row"] = torch.randn(count + 1, dtype=torch.float64)
    return {name: tensor.requires_grad_(name != frozen) for name, tensor in tensors.items()}


def unkept(*earlier: torch.Tensor) -> torch.Tensor:
    *values, hidden, weight, row = earlier
    projection = Linear(4, 6, bias=False)
    del projection.weight
    projection.weight = weight if isinstance(weight, torch.nn.Parameter) else torch.nn.Parameter(weight)
    result = mix_unkept(values, projection, hidden, row)
    assert result is not None
    return result


def kept(*earlier: torch.Tensor) -> torch.Tensor:
    """The naive twin."""
    *values, hidden, weight, row = earlier
    own = (hidden @ weight.T).view(2, 5, 2, 3).transpose(1, 2)
    return weighted_sum([*values, own], row)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("frozen", ["", "earlier_0", "hidden", "weight", "row"])
def test_values_that_are_not_kept_have_the_same_gradients(count: int, frozen: str) -> None:
    tensors = mixed(count, frozen)
    tensors["weight"] = torch.nn.Parameter(tensors["weight"].detach(), requires_grad=frozen != "weight")
    wanted = [tensor for tensor in tensors.values() if tensor.requires_grad]
    mine, expected = unkept(*tensors.values()), kept(*tensors.values())
    torch.testing.assert_close(mine, expected, rtol=0, atol=1e-14)
    outer = torch.randn_like(mine)
    first = [torch.autograd.grad(out, wanted, outer, create_graph=True) for out in (mine, expected)]
    for one, other in zip(*first, strict=True):
        torch.testing.assert_close(one, other)
    second = [
        torch.autograd.grad(sum((g * g).sum() for g in gradients), wanted, allow_unused=True) for gradients in first
    ]
    for one, other in zip(*second, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other)


def test_an_own_projection_is_asked_itself() -> None:
    """Whatever else is in the way of the values is not passed by."""
    values, hidden, _, row = mixed(1).values()

    def asked(change: Callable[[Linear], object]) -> bool:
        projection = Linear(4, 6, bias=False).double()
        change(projection)
        return mix_unkept([values], projection, hidden, row) is None

    assert not asked(lambda projection: None)
    assert asked(lambda projection: projection.register_forward_hook(lambda *_: None))
    assert asked(lambda projection: projection.register_forward_pre_hook(lambda *_: None))
    assert asked(lambda projection: projection.register_full_backward_hook(lambda *_: None))
    assert asked(lambda projection: setattr(projection, "forward", None))  # as Accelerate's hooks
    assert asked(lambda projection: torch.nn.utils.parametrizations.orthogonal(projection))
    assert mix_unkept([values], torch.nn.Linear(4, 6).double(), hidden, row) is None
    assert mix_unkept([values], Linear(4, 6, bias=True).double(), hidden, row) is None
    assert mix_unkept([values], Linear(4, 6, bias=False).double(), hidden, (0.5, 0.5)) is None
    with torch.no_grad():
        assert mix_unkept([values], Linear(4, 6, bias=False).double(), hidden, row) is None
