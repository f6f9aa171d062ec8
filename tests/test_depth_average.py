"""Depth-weighted averaging is the plain sum in values, gradients and bits, whichever of its forms works it out."""

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from resformer import ResFormerConfig
from resformer.modeling import depth_average as depth_average_file
from resformer.modeling.depth_average import RunningAverage, depth_average

WIDTH = 6
HALVES = [torch.bfloat16, torch.float16]

#: Layers, dilation, period.
LAYOUTS = [(1, 1, 1), (5, 1, 1), (5, 2, 1), (7, 2, 3), (11, 4, 5), (6, 1, 4)]


class Blocks:
    """X_{n+1} = Y_n + tanh(Y_n W_n), n = 0 .. N-1, in float64 with random parameters."""

    def __init__(self, layers: int, dilation: int = 1, period: int = 1, dtype: torch.dtype = torch.float64):
        self.layout = layers, dilation, period
        dwa = {"dwa": True, "dwa_dilation": dilation, "dwa_period": period}
        self.module = depth_average(ResFormerConfig(num_hidden_layers=layers, num_attention_heads=2, **dwa))
        self.module.bias.data = torch.randn(self.module.bias.shape, dtype=dtype) * 0.4
        self.mixers = [(torch.randn(WIDTH, WIDTH, dtype=dtype) * 0.5).requires_grad_() for _ in range(layers)]
        self.embeddings = torch.randn(2, 2, WIDTH, dtype=dtype, requires_grad=True)

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]:
        return self.module.bias, self.embeddings, *self.mixers

    def start(self) -> RunningAverage:
        return RunningAverage(self.module, self.module())

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
        weights = iter(self.module.bias.unbind())
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


def test_values_and_gradients_are_the_plain_sums(blocks: Blocks) -> None:
    running = blocks.start()
    averaged = blocks.states(running)[1]
    assert running.backward is not None  # not the plain sums
    assert_equal_up_to_rounding(averaged, blocks.states(None)[1])
    assert_equal_up_to_rounding(gradients(averaged[-1], blocks), gradients(blocks.output(None), blocks))


def test_gradient_penalties_are_the_plain_sums(blocks: Blocks) -> None:
    penalised = []
    for running in (blocks.start(), None):
        slopes = torch.autograd.grad(blocks.output(running).sin().sum(), blocks.inputs, create_graph=True)
        penalised.append(gradients(torch.cat([slope.flatten() for slope in slopes]).sin(), blocks))
    assert_equal_up_to_rounding(*penalised)


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


def test_two_forward_passes_share_a_backward_pass(blocks: Blocks) -> None:
    twice = blocks.output(blocks.start()) + 3 * blocks.output(blocks.start())
    assert_equal_up_to_rounding(gradients(twice, blocks), gradients(4 * blocks.output(None), blocks))


def test_backward_passes_may_be_repeated_and_partial(blocks: Blocks) -> None:
    raw, averaged = blocks.states(blocks.start())
    twin_raw, twin = blocks.states(None)
    for number in (len(raw) - 1, len(raw) // 2, len(raw) - 1):
        some = torch.autograd.grad(averaged[-1].sum(), raw[number], retain_graph=True)
        assert_equal_up_to_rounding(some, torch.autograd.grad(twin[-1].sum(), twin_raw[number], retain_graph=True))
        got = gradients(averaged[-1], blocks, retain_graph=True)
        assert_equal_up_to_rounding(got, gradients(twin[-1], blocks, retain_graph=True))


def test_losses_may_read_any_state_and_any_average(blocks: Blocks) -> None:
    for chosen in range(len(blocks.mixers) + 1):
        got, expected = (
            gradients(averaged[chosen] * raw[-1 - chosen] + raw[chosen].sin(), blocks, materialize_grads=True)
            for raw, averaged in (blocks.states(blocks.start()), blocks.states(None))
        )
        assert_equal_up_to_rounding(got, expected)


@pytest.mark.parametrize("read", [0, 3], ids=["none", "every third"])
def test_averages_that_blocks_do_not_read_get_no_gradient(blocks: Blocks, read: int) -> None:
    # Where blocks cut the graph, nothing but the averages ties a state to the later ones.
    def block(n: int, hidden: torch.Tensor) -> torch.Tensor:
        return blocks.block(n, hidden if read and n % read == 0 else hidden.detach())

    got, expected = (
        gradients(blocks.states(running, block)[1][-1], blocks, materialize_grads=True)
        for running in (blocks.start(), None)
    )
    assert_equal_up_to_rounding(got, expected)


@pytest.mark.parametrize("trained", ["weights", "blocks", "upper blocks"])
def test_frozen_parameters_leave_the_other_gradients(blocks: Blocks, trained: str) -> None:
    blocks.module.bias.requires_grad_(trained == "weights")
    blocks.embeddings.requires_grad_(trained == "blocks")
    for n, mixer in enumerate(blocks.mixers):
        mixer.requires_grad_(trained == "blocks" or (trained == "upper blocks" and n >= len(blocks.mixers) // 2))
    learning = [tensor for tensor in blocks.inputs if tensor.requires_grad]
    got, expected = (
        torch.autograd.grad(blocks.output(running).sin().sum(), learning) for running in (blocks.start(), None)
    )
    assert_equal_up_to_rounding(got, expected)


def test_function_transforms_see_a_plain_sum(blocks: Blocks) -> None:
    def output(bias: torch.Tensor, embeddings: torch.Tensor) -> torch.Tensor:
        weights = torch.func.functional_call(blocks.module, {"bias": bias}, ())
        running = RunningAverage(blocks.module, weights)
        hidden = running.append(embeddings)
        for n in range(len(blocks.mixers)):
            hidden = running.append(blocks.block(n, hidden))
        return hidden.sin().sum()

    slopes = torch.func.vmap(torch.func.grad(output), in_dims=(None, 0))(blocks.module.bias, blocks.embeddings)
    expected = torch.autograd.grad(blocks.output(None).sin().sum(), blocks.module.bias)
    assert_equal_up_to_rounding([slopes.sum(dim=0)], expected)


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
        monkeypatch.setattr(depth_average_file, "_is_ordinary", lambda *_: False)
    module = Blocks(*layout).module.float()
    module.reset_parameters()
    assert module.bias.dtype == torch.float32
    with torch.set_grad_enabled(form == "training"):
        running = RunningAverage(module, module())
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
        results.append([hidden, *(torch.autograd.grad(hidden.sum(), blocks.inputs[:2]) if learning else ())])
    for with_autocast, without in zip(*results, strict=True):
        torch.testing.assert_close(with_autocast, without, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("layout", [(5, 1, 1), (5, 2, 1)], ids=str)
def test_half_precision_is_right_to_its_own_rounding(layout: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    with torch.device(device):
        exact, half = Blocks(*layout), Blocks(*layout, dtype=torch.float32)
    exact.module.bias.data = exact.module.bias.data.to(dtype).double() / 4
    half.module.bias.data = exact.module.bias.data.float()
    for mine, twin in zip((half.embeddings, *half.mixers), (exact.embeddings, *exact.mixers), strict=True):
        mine.data = twin.data.to(dtype)
    output = half.output(half.start())
    assert output.dtype == dtype
    got, expected = gradients(output, half), gradients(exact.output(None), exact)
    assert got[0].dtype == torch.float32
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
    blocks.module.bias.requires_grad_(not frozen)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        running = blocks.start()
        hidden = running.append(blocks.embeddings)
        for n in range(len(blocks.mixers)):
            hidden = running.append(hidden + n)  # an operation that keeps nothing
    states = [tensor.data_ptr() for tensor in kept if tensor.shape == blocks.embeddings.shape]
    read = {state for row in blocks.module.columns.values() for state in row}
    assert len(states) == len(set(states)) == (0 if frozen else len(read))
    assert hidden.requires_grad


@pytest.mark.parametrize("ended", ["never", "backward", "double backward"])
def test_what_a_pass_holds_goes_with_its_output(blocks: Blocks, ended: str) -> None:
    gc.disable()
    try:
        raw, averaged = blocks.states(blocks.start())
        kept = [weakref.ref(tensor) for tensor in (*raw[1:], *averaged[1:])]
        output = averaged[-1]
        if ended == "backward":
            output.sum().backward()
        elif ended == "double backward":
            (slope,) = torch.autograd.grad(output.sin().sum(), blocks.embeddings, create_graph=True)
            slope.sum().backward()
            del slope
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
