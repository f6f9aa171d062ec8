"""Depth-weighted averaging is the plain sum in values, gradients and bits, whichever of its forms works it out."""

import gc
import random
import weakref
from collections.abc import Callable

import pytest
import torch
from conftest import RAGGED, tiny_model
from torch.autograd.forward_ad import dual_level, make_dual, unpack_dual
from torch.utils.checkpoint import checkpoint

from resformer import ResFormerConfig
from resformer.modeling.connections import depth_average as depth_average_file
from resformer.modeling.connections.depth_average import DepthAverage, RunningAverage

WIDTH = 6
HALVES = [torch.bfloat16, torch.float16]

#: Layers, dilation, period.
LAYOUTS = [(1, 1, 1), (5, 1, 1), (5, 2, 1), (7, 2, 3), (11, 4, 5), (6, 1, 4)]


class Blocks:
    """X_{n+1} = Y_n + tanh(Y_n W_n), n = 0 .. N-1, in float64 with random parameters."""

    def __init__(self, layers: int, dilation: int = 1, period: int = 1, dtype: torch.dtype = torch.float64):
        self.layout = layers, dilation, period
        dwa = {"dwa": True, "dwa_dilation": dilation, "dwa_period": period}
        config = ResFormerConfig(num_hidden_layers=layers, num_attention_heads=2, **dwa)
        self.modules = {n: DepthAverage(config, n) for n in DepthAverage.layers(config)}
        for module in self.modules.values():
            module.weight.data = torch.randn(module.weight.shape, dtype=dtype) * 0.4
        self.mixers = [(torch.randn(WIDTH, WIDTH, dtype=dtype) * 0.5).requires_grad_() for _ in range(layers)]
        self.embeddings = torch.randn(2, 2, WIDTH, dtype=dtype, requires_grad=True)

    @property
    def weights(self) -> list[torch.nn.Parameter]:
        return [module.weight for module in self.modules.values()]

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]:
        return self.embeddings, *self.weights, *self.mixers

    def start(self) -> RunningAverage:
        return DepthAverage.between(self.modules, None)

    def block(self, n: int, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + torch.tanh(hidden @ self.mixers[n])

    def states(
        self, running: RunningAverage | None, block: Callable[[int, torch.Tensor], torch.Tensor] | None = None
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """X_j and Y_j, averaged by `running`, or straight from the equation if that is `None`."""
        raw, averaged = [self.embeddings], []
        for number in range(len(self.mixers) + 1):
            averaged.append(self.naive(raw) if running is None else running.append(raw[number]))
            if number < len(self.mixers):
                raw.append((block or self.block)(number, averaged[number]))
        return raw, averaged

    def naive(self, raw: list[torch.Tensor]) -> torch.Tensor:
        """Y_i = sum_{j <= i, j = i mod k} D[i - 1, j] X_j if p divides i, else X_i."""
        layers, dilation, period = self.layout
        weights = iter(torch.cat(self.weights).unbind())
        for i in range(period, layers + 1, period):
            row = {j: next(weights) for j in range(i + 1) if (i - j) % dilation == 0}
            if i == len(raw) - 1:
                return sum(weight * raw[j] for j, weight in row.items())
        return raw[-1]

    def output(self, running: RunningAverage | None) -> torch.Tensor:
        return self.states(running)[1][-1]


def gradients(output: torch.Tensor, blocks: Blocks, **options: bool) -> list[torch.Tensor]:
    return list(torch.autograd.grad(output, blocks.inputs, upstream_of(output), **options))


def upstream_of(output: torch.Tensor) -> torch.Tensor:
    return torch.linspace(-1, 1, output.numel(), dtype=output.dtype, device=output.device).view(output.shape)


def assert_equal_up_to_rounding(got: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for mine, twin in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, twin, rtol=1e-11, atol=1e-11)


@pytest.fixture(params=LAYOUTS, ids=lambda layout: "-".join(map(str, layout)))
def blocks(request: pytest.FixtureRequest, device: str) -> Blocks:
    with torch.device(device):
        return Blocks(*request.param)


@pytest.mark.parametrize("option", ["create_graph", "is_grads_batched"])
def test_gradients_that_it_has_not_are_refused(blocks: Blocks, option: str) -> None:
    output = blocks.output(blocks.start())
    upstream = upstream_of(output).expand(3, *output.shape) if option == "is_grads_batched" else upstream_of(output)
    with pytest.raises(RuntimeError, match=f"{option}.*torch.func"):
        torch.autograd.grad(output, blocks.inputs, upstream, **{option: True})


def test_forward_mode_is_the_derivative_of_the_plain_sum(blocks: Blocks) -> None:
    tangents = []
    for plain in (False, True):
        with torch.autograd.forward_ad.dual_level():
            embeddings, blocks.embeddings = blocks.embeddings, make_dual(blocks.embeddings, blocks.embeddings.cos())
            tangents.append(unpack_dual(blocks.output(None if plain else blocks.start())).tangent)
            blocks.embeddings = embeddings
    assert_equal_up_to_rounding(*([each] for each in tangents))


@pytest.mark.parametrize("whole", [True, False], ids=["all in one", "each block"])
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
def test_checkpoints_of_blocks_or_of_everything_give_the_same_gradients(
    blocks: Blocks, reentrant: bool, whole: bool
) -> None:
    expected = gradients(blocks.output(None), blocks)

    def block(n: int, hidden: torch.Tensor) -> torch.Tensor:
        return checkpoint(blocks.block, n, hidden, use_reentrant=reentrant)

    if whole:
        output = checkpoint(lambda _: blocks.output(blocks.start()), blocks.embeddings, use_reentrant=reentrant)
    else:
        output = blocks.states(blocks.start(), block)[1][-1]
    output.backward(upstream_of(output))
    assert_equal_up_to_rounding([tensor.grad for tensor in blocks.inputs], expected)


@pytest.mark.parametrize("seed", range(16))
def test_values_and_gradients_of_any_loss_are_those_of_the_plain_sums(blocks: Blocks, seed: int) -> None:
    """Of any states and averages, whatever is frozen or cut off, of two passes at once, repeated, and of a part."""
    draw = random.Random(seed)
    for tensor in blocks.inputs:
        tensor.requires_grad_(draw.random() < 0.7 or tensor is blocks.mixers[0])
    learning = [tensor for tensor in blocks.inputs if tensor.requires_grad]
    cut = [draw.random() < 0.3 for _ in blocks.mixers]

    def block(n: int, hidden: torch.Tensor) -> torch.Tensor:
        # Where blocks cut the graph, nothing but the averages ties a state to the later ones.
        return blocks.block(n, hidden.detach() if cut[n] else hidden)

    raw, averaged = blocks.states(None, block)
    places = [n for n, state in enumerate(raw + averaged) if state.requires_grad]
    losses = [draw.sample(places, draw.randint(1, min(3, len(places)))) for _ in range(4)]
    wanted = [draw.choice([n for n in places if n < len(raw)]) for _ in losses]
    results: list[list[torch.Tensor]] = []
    for start in (blocks.start, lambda: None):
        passes = [[state for part in blocks.states(start(), block) for state in part] for _ in range(2)]
        results.append([*passes[0]])
        for loss, place in zip(losses, wanted, strict=True):
            value = sum((n + 1) * states[n].sin().sum() for n in loss for states in passes)
            for some in (learning, [passes[0][place]]):
                options = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
                results[-1] += torch.autograd.grad(value, some, **options)
    assert_equal_up_to_rounding(*results)


def test_function_transforms_see_a_plain_sum(blocks: Blocks) -> None:
    def output(weights: list[torch.Tensor], embeddings: torch.Tensor) -> torch.Tensor:
        modules = blocks.modules.items()
        running = RunningAverage(
            {n: (module.columns, weight) for (n, module), weight in zip(modules, weights, strict=True)}
        )
        hidden = running.append(embeddings)
        for n in range(len(blocks.mixers)):
            hidden = running.append(blocks.block(n, hidden))
        return hidden.sin().sum()

    slopes = torch.func.vmap(torch.func.grad(output), in_dims=(None, 0))(blocks.weights, blocks.embeddings)
    expected = torch.autograd.grad(blocks.output(None).sin().sum(), blocks.weights)
    assert_equal_up_to_rounding([slope.sum(dim=0) for slope in slopes], expected)


def test_without_gradients_it_gives_the_plain_sum(blocks: Blocks) -> None:
    with torch.no_grad():
        running = blocks.start()
        averaged = blocks.states(running)[1]
    assert_equal_up_to_rounding(averaged, blocks.states(None)[1])
    assert not running.states  # nothing is kept that no average reads


@pytest.mark.parametrize("form", ["plain", "inference", "training"])
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
@pytest.mark.parametrize("layout", [(11, 1, 1), (11, 2, 3)], ids=str)
def test_the_identity_changes_no_bit_in_any_form(
    layout: tuple[int, int, int], dtype: torch.dtype, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if form == "plain":
        monkeypatch.setattr(depth_average_file, "is_ordinary", lambda *_: False)
    blocks = Blocks(*layout, dtype=torch.float32)
    for module in blocks.modules.values():
        module.reset_parameters()
    with torch.set_grad_enabled(form == "training"):
        running = blocks.start()
        for _ in range(layout[0] + 1):
            state = (torch.randn(3, 7, 5) * 10).to(dtype)
            averaged = running.append(state)
            assert averaged.dtype == dtype
            assert torch.equal(averaged, state)


@pytest.mark.parametrize("learning", [True, False])
def test_autocast_rounds_no_average(learning: bool) -> None:
    blocks = Blocks(5, dtype=torch.float32)
    results = []
    for enabled in (True, False):
        with torch.set_grad_enabled(learning), torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            running = blocks.start()
            hidden = running.append(blocks.embeddings)
            for _ in blocks.mixers:
                hidden = running.append(hidden.cos())
        assert hidden.dtype == torch.float32
        results.append(
            [hidden, *(torch.autograd.grad(hidden.sum(), [blocks.embeddings, *blocks.weights]) if learning else ())]
        )
    for with_autocast, without in zip(*results, strict=True):
        torch.testing.assert_close(with_autocast, without, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("layout", [(5, 1, 1), (5, 2, 1)], ids=str)
def test_half_precision_is_right_to_its_own_rounding(layout: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    with torch.device(device):
        exact, half = Blocks(*layout), Blocks(*layout, dtype=torch.float32)
    for mine, twin in zip(half.weights, exact.weights, strict=True):
        twin.data = twin.data.to(dtype).double() / 4
        mine.data = twin.data.float()
    for mine, twin in zip((half.embeddings, *half.mixers), (exact.embeddings, *exact.mixers), strict=True):
        mine.data = twin.data.to(dtype)
    output = half.output(half.start())
    assert output.dtype == dtype
    got, expected = gradients(output, half), gradients(exact.output(None), exact)
    assert got[1].dtype == torch.float32
    together = slice(1, 1 + len(half.weights))  # a small one of few numbers has errors of the others' size
    for each in (got, expected):
        each[together] = [torch.cat(each[together])]
    for mine, twin in zip([output, *got], [exact.output(None), *expected], strict=True):
        assert (mine.double() - twin).norm() < 0.03 * twin.norm()


def test_states_that_change_their_dtype_are_summed_plainly(blocks: Blocks) -> None:
    # Embeddings in single precision under a decoder in double, say.
    def output(running: RunningAverage | None) -> torch.Tensor:
        raw = [blocks.embeddings.float()]
        for n in range(len(blocks.mixers) + 1):
            averaged = blocks.naive(raw) if running is None else running.append(raw[n])
            if n < len(blocks.mixers):
                raw.append(blocks.block(n, averaged.double()))
        return averaged

    outputs = [output(blocks.start()), output(None)]
    results = [[out, *gradients(out, blocks)] for out in outputs]
    for mine, twin in zip(*results, strict=True):
        torch.testing.assert_close(mine, twin, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("frozen", [False, True])
def test_every_state_is_kept_once_for_the_backward_pass_of_weights_that_learn(blocks: Blocks, frozen: bool) -> None:
    for weight in blocks.weights:
        weight.requires_grad_(not frozen)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        running = blocks.start()
        hidden = running.append(blocks.embeddings)
        for n in range(len(blocks.mixers)):
            hidden = running.append(hidden + n)  # an operation that keeps nothing
    states = [tensor.data_ptr() for tensor in kept if tensor.shape == blocks.embeddings.shape]
    read = {state for module in blocks.modules.values() for state in module.columns}
    assert len(states) == len(set(states)) == (0 if frozen else len(read))
    assert hidden.requires_grad


@pytest.mark.parametrize("ended", ["never", "backward"])
def test_what_a_pass_holds_goes_with_its_output(blocks: Blocks, ended: str) -> None:
    gc.disable()
    try:
        raw, averaged = blocks.states(blocks.start())
        kept = [weakref.ref(tensor) for tensor in (*raw[1:], *averaged[1:])]
        output = averaged[-1]
        if ended == "backward":
            output.sum().backward()
        del raw, averaged, output
        assert not [reference for reference in kept if reference() is not None]
    finally:
        gc.enable()


def test_no_gradient_outlives_the_backward_pass(blocks: Blocks) -> None:
    averaged = blocks.states(blocks.start())[1]
    gone: list[weakref.ref] = []
    for tensor in averaged[:-1]:
        tensor.register_hook(lambda gradient: gone.append(weakref.ref(gradient)))
    averaged[-1].sum().backward()
    assert len(gone) == len(averaged) - 1
    assert not [reference for reference in gone if reference() is not None]


@pytest.mark.parametrize("variant", ["denseformer", "resformer-dense"])
@pytest.mark.parametrize("of", ["mlp.down_proj", "self_attn.v_proj"])
def test_tangents_that_begin_in_a_later_layer_are_those_of_plain_sums(variant: str, of: str) -> None:
    model, name = tiny_model(variant, attention="eager").double(), f"model.layers.2.{of}.weight"
    weight = model.get_parameter(name).detach()
    tangent = torch.randn_like(weight)

    def run(given: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, {name: given}, RAGGED["input_ids"], {"use_cache": False}).logits

    _, expected = torch.func.jvp(run, (weight,), (tangent,))  # transforms take plain sums
    with torch.no_grad(), dual_level():
        got = unpack_dual(run(make_dual(weight, tangent))).tangent
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-12)
