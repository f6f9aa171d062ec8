"""l1 V_0 + l2 V_n as one autograd function is the plain sum in values and gradients, whoever asks for them and how."""

import random
from collections.abc import Callable

import pytest
import torch
from torch.autograd.forward_ad import make_dual, unpack_dual
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from resformer import ResFormerConfig
from resformer.modeling.connections import value_residual
from resformer.modeling.connections.value_residual import ValueResidual
from resformer.modeling.sums import is_ordinary

HEADS, CHANNELS = 2, 3


@pytest.fixture(autouse=True)
def one_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU."""
    monkeypatch.setattr(
        value_residual, "one_function_pays", lambda first: torch.is_grad_enabled() and is_ordinary([first])
    )


class Layers:
    """h_{n+1} = tanh(V'_n W_n), V_n = h_n U_n, V'_0 = V_0, n = 0 .. 4, at random parameters; layer 2 mixes nothing."""

    def __init__(self, mode: str, dtype: torch.dtype = torch.float64):
        sizes = {"hidden_size": HEADS * CHANNELS, "num_attention_heads": HEADS, "num_hidden_layers": 5}
        config = ResFormerConfig(**sizes, value_residual=mode, value_residual_layers=[1, 3, 4])
        kind = ValueResidual.modes[mode]
        self.mode, self.start = mode, config.value_residual_init[0]
        self.modules = {n: kind(config, n) for n in (1, 3, 4)}
        self.of_decoder = kind.of_decoder(config)
        width = HEADS * CHANNELS
        self.hidden = torch.randn(2, 3, width, dtype=dtype, requires_grad=True)
        self.projections = [torch.randn(2, width, width, dtype=dtype).requires_grad_() for _ in range(5)]
        for module in filter(None, [*self.modules.values(), self.of_decoder]):
            for parameter in module.parameters():
                parameter.data = torch.randn(parameter.shape, dtype=torch.promote_types(dtype, torch.float32))

    @property
    def inputs(self) -> list[torch.Tensor]:
        modules = filter(None, [*self.modules.values(), self.of_decoder])
        return [self.hidden, *self.projections, *(each for module in modules for each in module.parameters())]

    def mixed(self, call: Callable[..., torch.Tensor] | None = None) -> list[torch.Tensor]:
        """Every V'_n. `call` calls a layer, which gets what a pass hands it."""
        between = type(self.modules[1]).between(self.modules, self.of_decoder)
        hidden, states = self.hidden, []
        for n in range(5):
            earlier = {"first_values": states[0]} if states else {}
            between.before(n, hidden, earlier, {})
            states.append((call or (lambda layer, *given: layer(*given)))(self.layer, n, hidden, earlier))
            between.after(n, hidden)
            hidden = self.after(n, states[n])
        return states

    def layer(self, n: int, hidden: torch.Tensor, earlier: dict[str, object]) -> torch.Tensor:
        values = self.values(n, hidden)
        if n not in self.modules:
            return values
        module, given = self.modules[n], {"hidden_states": hidden, **earlier}
        return module(values, **{name: given[name] for name in module.takes if name in given})

    def values(self, n: int, hidden: torch.Tensor) -> torch.Tensor:
        return (hidden @ self.projections[n][0]).unflatten(-1, (HEADS, CHANNELS))

    def after(self, n: int, mixed: torch.Tensor) -> torch.Tensor:
        return torch.tanh(mixed.flatten(-2) @ self.projections[n][1])

    def by_the_equation(self) -> list[torch.Tensor]:
        hidden, states = self.hidden, []
        for n in range(5):
            values = self.values(n, hidden)
            if n in self.modules:
                weight = self.modules[n].weight
                first = weight[0]
                if self.mode == "learnable_plus":
                    exponentials = self.of_decoder.score.exp()
                    first = self.of_decoder.scale * exponentials[[*self.modules].index(n)] / exponentials.sum()
                if self.mode == "gated":
                    first = self.start + torch.tanh(hidden @ self.modules[n].gate.weight.T)[..., None]
                values = first * states[0] + weight[-1] * values
            states.append(values)
            hidden = self.after(n, values)
        return states


@pytest.fixture(params=["learnable", "learnable_plus", "gated"])
def layers(request: pytest.FixtureRequest, device: str) -> Layers:
    with torch.device(device):
        return Layers(request.param)


def weighted(states: list[torch.Tensor]) -> torch.Tensor:
    return sum((torch.linspace(-1, 2, state.numel()).to(state) * state.flatten()).sum() for state in states)


def assert_alike(got: object, expected: object) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("seed", range(12))
def test_gradients_of_any_loss_are_those_of_the_equation(layers: Layers, seed: int) -> None:
    """Of any states, whatever is frozen, of two passes at once, again, and of a part of what learns."""
    draw = random.Random(seed)
    for tensor in layers.inputs:
        tensor.requires_grad_(draw.random() < 0.7 or tensor is layers.projections[0])
    learning = [tensor for tensor in layers.inputs if tensor.requires_grad]
    losses = [draw.sample(range(5), draw.randint(1, 3)) for _ in range(4)]
    parts = [draw.sample(learning, draw.randint(1, len(learning))) for _ in losses]
    results = []
    for run in (layers.mixed, layers.by_the_equation):
        passes = [run(), run()]
        for number, (loss, part) in enumerate(zip(losses, parts, strict=True)):
            states = [passes[number % 2][n] for n in loss]
            for wanted in (part, learning):
                gradients = torch.autograd.grad(weighted(states), wanted, retain_graph=True, allow_unused=True)
                results.append([*states, *gradients])
    half = len(results) // 2
    assert "Mix" in type(layers.mixed()[1].grad_fn).__name__
    assert_alike(results[:half], results[half:])


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
def test_checkpoints_give_the_same_gradients(layers: Layers, reentrant: bool) -> None:
    expected = torch.autograd.grad(weighted(layers.by_the_equation()), layers.inputs)

    handed = []

    def once_more(layer: Callable[..., torch.Tensor], n: int, hidden: torch.Tensor, earlier: dict) -> torch.Tensor:
        handed.append(earlier)
        with set_checkpoint_early_stop(False):  # as where the layer goes on
            return checkpoint(layer, n, hidden, earlier, use_reentrant=False)

    if reentrant:  # which loses the gradients of what crosses layers, around each of them
        loss = checkpoint(lambda _: weighted(layers.mixed()), layers.hidden, use_reentrant=True)
    else:
        loss = weighted(layers.mixed(once_more))
    loss.backward()
    assert_alike([tensor.grad for tensor in layers.inputs], list(expected))
    assert all(earlier["onward"].first is None for earlier in handed if "onward" in earlier)  # else graphs stay alive


def test_transforms_and_forward_mode_get_the_plain_sum(layers: Layers) -> None:
    expected, _ = torch.autograd.grad(weighted(layers.by_the_equation()), [layers.hidden, layers.projections[0]])
    hidden, direction = layers.hidden, torch.ones_like(layers.hidden)

    def loss(state: torch.Tensor) -> torch.Tensor:
        layers.hidden = state
        return weighted(layers.mixed())

    assert_alike(torch.func.grad(loss)(hidden), expected)
    assert_alike(torch.func.vmap(torch.func.grad(loss))(torch.stack([hidden, hidden]))[1], expected)
    with torch.autograd.forward_ad.dual_level():
        tangent = unpack_dual(loss(make_dual(hidden, direction))).tangent
    assert_alike(tangent, (expected * direction).sum())


@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
def test_in_halves_gradients_of_coefficients_are_as_near_as_those_of_the_sum(autocast: bool) -> None:
    layers = Layers("learnable", torch.bfloat16)
    values, first, upstream = (torch.randn(2, 500, HEADS, CHANNELS, dtype=torch.bfloat16) for _ in range(3))
    errors = []
    exact = torch.stack([(upstream.double() * each.double()).sum() for each in (first, values)])
    for onward in (value_residual.Onward(), None):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            output = layers.modules[1](values, first, onward=onward)
            (gradient,) = torch.autograd.grad(output, layers.modules[1].weight, upstream)
        assert (output.dtype, gradient.dtype) == (torch.bfloat16, torch.float32)
        errors.append((gradient - exact).abs().max())
    assert errors[0] <= errors[1] + 0.02 * exact.abs().max()
