"""Every method's logits and gradients are those of the equations, at random parameters."""

import copy
import random
from types import ModuleType
from typing import Any

import pytest
import torch
from conftest import COMBINATIONS, RAGGED, moved, others_slow, tiny_config, tiny_model
from naive_twin import naive_logits
from torch import nn
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding

from resformer import METHODS, ResFormerForCausalLM
from resformer.configuration import mixing_layers, value_sources
from resformer.configuration.methods import CONNECTION_FIELDS
from resformer.modeling import sums
from resformer.modeling.connection import Added
from resformer.modeling.connections import KINDS, attnres, depth_average, hyper_connections, mudd, value_residual
from resformer.training.optimizer import is_connection


@pytest.fixture
def float64_throughout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Llama's norm and rotary embedding round to float32 within; here they do not, so that 1e-9 can be asked for."""

    def norm(self: LlamaRMSNorm, hidden_states: torch.Tensor) -> torch.Tensor:
        assert hidden_states.dtype == torch.float64
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        return self.weight * (hidden_states * torch.rsqrt(variance + self.variance_epsilon))

    def rotary(
        self: LlamaRotaryEmbedding, x: torch.Tensor, position_ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.rope_type == "default"
        width = self.config.head_dim
        exponents = torch.arange(0, width, 2, dtype=torch.float64, device=x.device) / width
        angles = position_ids[..., None].double() * self.config.rope_parameters["rope_theta"] ** -exponents
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos(), angles.sin()

    monkeypatch.setattr(LlamaRMSNorm, "forward", norm)
    monkeypatch.setattr(LlamaRotaryEmbedding, "forward", rotary)


def exact_matrices(model: PreTrainedModel) -> tuple[torch.Tensor, torch.Tensor]:
    """M and D in float64. The public methods give float32, which holds every parameter of `randomise` exactly, but not
    the products of learnable_plus: those are worked out again."""
    value_mixing = model.model.value_mixing_matrix()
    depth_mixing = model.model.depth_mixing_matrix()
    exact = value_mixing.double()
    if model.config.value_residual == "learnable_plus" and mixing_layers(model.config):
        state = model.state_dict()
        first = state["model.value_residual.scale"] * state["model.value_residual.score"].softmax(dim=0)
        for layer, weight in zip(mixing_layers(model.config), first.double(), strict=True):
            exact[layer, 0] = weight
        exact = exact[value_sources(model.config)]
    torch.testing.assert_close(exact, value_mixing.double(), rtol=1e-6, atol=1e-7, equal_nan=True)
    return exact, depth_mixing.double()


def assert_logits_equal_the_twin(
    model: PreTrainedModel, input_ids: torch.Tensor, attention_mask: torch.Tensor | None, tolerance: float
) -> None:
    weights = {name: tensor.double().cpu() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        expected = naive_logits(model.config, weights, *exact_matrices(model), input_ids, attention_mask)
        mask = None if attention_mask is None else attention_mask.to(model.device)
        logits = model(input_ids.to(model.device), attention_mask=mask).logits.cpu()
    for row, naive in enumerate(expected):
        real = logits[row] if attention_mask is None else logits[row, attention_mask[row].bool()]
        assert naive.abs().max() > 0.1  # something to tell apart
        assert (real.double() - naive).abs().max() < tolerance * naive.abs().max()


@pytest.mark.parametrize("variant", others_slow([*METHODS, *COMBINATIONS]), indirect=True)
def test_logits_equal_the_twin(variant: str, float64_throughout: None, device: str) -> None:
    model = tiny_model(variant, dtype=torch.float64).to(device)
    assert_logits_equal_the_twin(model, RAGGED["input_ids"][:2, 5:], None, 1e-10)
    assert_logits_equal_the_twin(model, **RAGGED, tolerance=1e-10)
    assert_logits_equal_the_twin(model, RAGGED["input_ids"].flip(1), RAGGED["attention_mask"].flip(1), 1e-10)


def random_fields(seed: int) -> dict[str, Any]:
    """One of endlessly many valid configurations; every eighth seed has the same mode. Floats are exact in float32."""
    draw = random.Random(seed)
    layers = draw.choice([3, 5, 6])
    fields: dict[str, Any] = {"num_hidden_layers": layers}
    modes = ["none", "identity", "constant", "learnable", "learnable_plus", "dense", "gated", "depth_attention"]
    fields["value_residual"] = modes[seed % len(modes)]
    fields["value_residual_init"] = [draw.randint(-8, 16) / 8, draw.randint(-8, 16) / 8]
    over_depth = fields["value_residual"] == "depth_attention"
    if over_depth:
        fields["depth_attention_stride"] = draw.choice([1, 1, 2])
    fields["num_key_value_heads"] = draw.choice([1, 2, 4])
    fields["head_dim"] = draw.choice([None, 6, 12])
    fields["attention_bias"] = draw.random() < 0.5
    fields["mlp_bias"] = draw.random() < 0.3
    fields["tie_word_embeddings"] = draw.random() < 0.5
    fields["rope_parameters"] = {"rope_type": "default", "rope_theta": draw.choice([100.0, 10000.0])}
    fields["neutreno_lambda"] = draw.choice([0.0, 0.375, 1.5])
    if draw.random() < 0.5:
        fields.update(dwa=True, dwa_dilation=draw.choice([1, 2, 3]), dwa_period=draw.choice([1, 1, 2, 7]))

    def sources() -> list[int] | None:
        if draw.random() < 0.35:
            return None
        chosen: list[int] = []
        for n in range(layers):
            chosen.append(draw.choice([n, *[m for m in range(n) if chosen[m] == m]]))
        return chosen

    fields["value_sources"] = None if over_depth else sources()
    fields["key_sources"] = sources()
    owners = [n for n in range(1, layers) if fields["value_sources"] is None or fields["value_sources"][n] == n]
    if draw.random() < 0.4:
        with_values = [n for n in range(layers) if fields["value_sources"] is None or fields["value_sources"][n] == n]
        fields["value_embeddings"] = sorted(draw.sample(with_values, draw.randint(1, len(with_values))))
    if owners and draw.random() < 0.4:
        fields["value_residual_layers"] = sorted(draw.sample(owners, draw.randint(1, len(owners))))
    fields["embedding_residual"], fields["backout"] = draw.random() < 0.4, draw.random() < 0.4
    fields["delta_attention_residuals"] = draw.random() < 0.4
    fields["delta_attention_residual_blocks"] = draw.randint(1, layers)
    fields["attnres"] = draw.random() < 0.4
    fields["attnres_blocks"] = draw.choice([None, draw.randint(1, layers)]) if fields["attnres"] else None
    fields["attnres_init"] = draw.choice([None, 0.5])
    fields["mudd"], fields["mudd_norm"] = draw.random() < 0.4, draw.random() < 0.5
    fields["mudd_channels"] = "".join(draw.sample("qkvr", draw.choice([1, 2, 4, 4])))
    if draw.random() < 0.4:
        fields["hyper_connections"] = draw.choice(["static", "dynamic", "mhc", "ihc"])
        fields["hyper_streams"] = draw.choice([2, 3, 4])
    return fields


@pytest.mark.filterwarnings("ignore:.*do(es)? nothing")
@pytest.mark.parametrize("seed", range(48))
def test_random_combinations_equal_the_twin(seed: int, float64_throughout: None) -> None:
    model = tiny_model(dtype=torch.float64, seed=seed, **random_fields(seed))
    assert_logits_equal_the_twin(model, **RAGGED, tolerance=1e-10)


def loss_of(logits: list[torch.Tensor], labels: list[torch.Tensor]) -> torch.Tensor:
    return sum(
        nn.functional.cross_entropy(row[:-1], ids[1:], reduction="sum") for row, ids in zip(logits, labels, strict=True)
    )


def model_loss(model: PreTrainedModel, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids, attention_mask=attention_mask).logits
    real = attention_mask.bool()
    return loss_of(
        [row[mask] for row, mask in zip(logits, real, strict=True)],
        [row[mask] for row, mask in zip(input_ids, real, strict=True)],
    )


def is_mixing(name: str) -> bool:
    """Whether the twin reads it from the matrices; gates it reads by name."""
    return (".value_residual." in name or ".depth_average." in name) and ".gate" not in name


def test_gradients_equal_the_twin(variant: str, float64_throughout: None, device: str) -> None:
    model = tiny_model(variant, dtype=torch.float64).to(device).train()
    model_loss(model, **moved(RAGGED, device)).backward()
    model.cpu()  # its gradients too

    weights = {
        name: parameter.detach().clone().requires_grad_(not is_mixing(name))
        for name, parameter in model.named_parameters()
    }
    logits = naive_logits(model.config, weights, *exact_matrices(model), **RAGGED)
    real = RAGGED["attention_mask"].bool()
    loss_of(logits, [row[mask] for row, mask in zip(RAGGED["input_ids"], real, strict=True)]).backward()

    for name, parameter in model.named_parameters():
        if is_mixing(name):
            continue
        assert parameter.grad is not None, name
        assert weights[name].grad is not None, name
        assert (parameter.grad - weights[name].grad).abs().max() < 1e-9, name
        assert parameter.grad.abs().max() > 1e-6, f"{name} gets no gradient to compare"


def test_mixing_gradients_equal_finite_differences(variant: str, float64_throughout: None) -> None:
    model = tiny_model(variant, dtype=torch.float64)
    mixing = [parameter for name, parameter in model.named_parameters() if is_mixing(name)]
    if not mixing:
        pytest.skip("the twin has the gradients of all")
    model_loss(model, **RAGGED).backward()
    step = 1e-6
    with torch.no_grad():
        for parameter in mixing:
            for direction in torch.randn(3, parameter.numel(), dtype=torch.float64):
                change = step * direction.view_as(parameter)
                above = (parameter.add_(change), model_loss(model, **RAGGED))[1]
                below = (parameter.sub_(2 * change), model_loss(model, **RAGGED))[1]
                parameter.add_(change)
                expected = (above - below) / (2 * step)
                torch.testing.assert_close((parameter.grad.flatten() @ direction), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("default", [torch.float32, torch.bfloat16], ids=str)
def test_matrices_are_copies_in_float32_on_the_cpu_with_nan_where_a_gate_decides(
    variant: str, default: torch.dtype
) -> None:
    model = tiny_model(variant, dtype=default)
    sources = value_sources(model.config)
    torch.set_default_dtype(default)
    try:
        value_mixing, depth_mixing = model.model.value_mixing_matrix(), model.model.depth_mixing_matrix()
    finally:
        torch.set_default_dtype(torch.float32)
    for matrix, shape in ((value_mixing, (6, 6)), (depth_mixing, (6, 7))):
        assert matrix.shape == shape
        assert matrix.dtype == torch.float32
        assert matrix.device.type == "cpu"
        assert not matrix.requires_grad
    assert not value_mixing.triu(1).any()
    assert not depth_mixing.triu(2).any()
    torch.testing.assert_close(value_mixing[sources], value_mixing, rtol=0, atol=0, equal_nan=True)
    gated = torch.zeros(6, 6, dtype=torch.bool)
    if model.config.value_residual == "gated":
        gated[:, 0] = torch.tensor([source in mixing_layers(model.config) for source in sources])
        assert gated.any()
    elif model.config.value_residual == "depth_attention":
        for n in mixing_layers(model.config):
            gated[n, [*range(0, n, model.config.depth_attention_stride), n]] = True
    assert torch.equal(value_mixing.isnan(), gated)
    assert not depth_mixing.isnan().any()
    before = copy.deepcopy(model.state_dict())
    for matrix in (value_mixing, depth_mixing):
        matrix.fill_(3.0)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("layers", [None, [1], [2, 5]])
@pytest.mark.parametrize("sources", [None, [0, 1, 1, 1, 4, 5]])
@pytest.mark.parametrize("mode", ["identity", "constant", "learnable", "learnable_plus", "dense", "gated"])
def test_value_mixing_reads_what_the_mode_says(mode: str, layers: list[int] | None, sources: list[int] | None) -> None:
    owners = set(range(6)) if sources is None else set(sources)
    mixing = owners - {0} if layers is None else owners & set(layers)
    if layers is not None and not owners >= set(layers):
        layers = sorted(mixing)
    model = tiny_model(value_residual=mode, value_residual_layers=layers, value_sources=sources)
    matrix = model.model.value_mixing_matrix()
    for n in owners:
        read = [m for m in sorted(owners) if m <= n] if mode == "dense" else [0, n]
        if n in mixing:
            assert matrix[n].nonzero().flatten().tolist() == read
        else:
            assert torch.equal(matrix[n], torch.eye(6)[n])


@pytest.mark.parametrize("start", [[0.0, 1.0], [0.25, 0.75], [-2.0, 3.0]])
@pytest.mark.parametrize("mode", ["identity", "constant", "learnable", "learnable_plus", "dense", "gated"])
def test_value_residuals_start_as_stated(mode: str, start: list[float]) -> None:
    a, b = (0.5, 0.5) if mode == "identity" else start
    model = ResFormerForCausalLM(tiny_config(value_residual=mode, value_residual_init=start))
    expected = torch.eye(6)
    for n in range(1, 6):
        expected[n, n] = b
        expected[n, 0] = float("nan") if mode == "gated" else a
    torch.testing.assert_close(model.model.value_mixing_matrix(), expected, rtol=1e-6, atol=0, equal_nan=True)
    if mode == "gated":
        assert all(not layer.value_residual.gate.weight.any() for layer in model.model.layers[1:])


@pytest.mark.parametrize("start", [0.0, 0.25, 1.0])
def test_gates_start_as_stated(start: float) -> None:
    model = ResFormerForCausalLM(tiny_config("depth-attention", depth_attention_init=start))
    for layer in model.model.layers[3:]:
        assert torch.equal(layer.value_residual.gate, torch.full((2,), start))
    model = ResFormerForCausalLM(tiny_config("delta-attention-residuals", delta_attention_residual_init=start))
    for layer in model.model.layers:
        assert torch.equal(layer.delta_attention_residuals.gate, torch.full((2,), start))
        assert not layer.delta_attention_residuals.query.any()
    model = ResFormerForCausalLM(tiny_config("attnres", attnres_init=start))
    modules = [layer.attnres for layer in model.model.layers]
    assert [len(module.gate) for module in modules] == [1, 2, 2, 2, 2, 3]
    assert all((module.gate == start).all() and not module.query.any() for module in modules)
    assert all("gate" not in name for name, _ in tiny_model("attnres").named_parameters() if "attnres" in name)


def test_delta_attention_residuals_has_no_effect_at_gates_of_zero_unless_its_queries_are_nan() -> None:
    module = tiny_model("delta-attention-residuals").model.layers[2].delta_attention_residuals
    nn.init.zeros_(module.gate)
    assert not any(distance for distance, _ in module.deviations())
    module.query.data[1, 5] = float("nan")
    assert [place for distance, place in module.deviations() if distance] == [".query"]


FORMS = [
    ("delta-attention-residuals", {}, sums, "products_pay"),
    ("mudd", {}, sums, "products_pay"),
    ("mudd", {}, mudd, "one_function_pays"),
    ("mudd", {"mudd_norm": True, "mudd_channels": "vkr"}, mudd, "one_function_pays"),
    ("mudd", {"mudd_channels": "qv", "value_sources": [0, 1, 1, 3, 4, 4]}, mudd, "one_function_pays"),
    ("attnres", {}, attnres, "products_pay"),
    *((method, {}, hyper_connections, "is_ordinary") for method in ("mhc", "hyper-connections")),
    *(("mhc", {"hyper_connections": form}, sums, "one_function_pays") for form in ("static", "dynamic", "mhc", "ihc")),
    *((f"resformer{kind}", {}, value_residual, "one_function_pays") for kind in ("", "-plus", "-gated", "-neutreno")),
    ("resformer-gated", {"value_sources": [0, 1, 1, 3, 4, 4]}, value_residual, "one_function_pays"),
    ("resformer-dense", {}, depth_average, "is_ordinary"),
    ("resformer-dense", {"value_residual_layers": [2, 3, 4]}, depth_average, "is_ordinary"),
    ("resformer-dense", {"value_residual_layers": [1, 2, 4]}, depth_average, "is_ordinary"),
]


@pytest.mark.parametrize(("method", "fields", "module", "asked"), FORMS, ids=str)
def test_one_product_is_its_sums(
    method: str, fields: dict[str, Any], module: ModuleType, asked: str, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    results = []
    for product, checkpointed in ((True, False), (True, True), (False, False)):
        monkeypatch.setattr(module, asked, lambda *tensors, product=product: product)
        model = tiny_model(method, dtype=torch.float64, **fields).to(device).train()
        if checkpointed:
            model.gradient_checkpointing_enable()
        first, second = (model_loss(model, **moved(RAGGED, device)) for _ in range(2))  # both are alive
        first.backward(retain_graph=True)
        second.backward()
        first.backward()
        results.append([parameter.grad for parameter in model.parameters()])
    *products, sums_alone = results
    for gradients in products:
        for got, expected in zip(gradients, sums_alone, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-12)


def attended_and_handed_on(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return attnres.attended(*inputs), inputs[0] * 1.0


def projected(*inputs: torch.Tensor) -> torch.Tensor:
    return hyper_connections.Projected.apply(*inputs, 1e-3)


def plainly_projected(stream: torch.Tensor, states: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    streams = (stream.unsqueeze(-2) + states).reshape(*stream.shape[:-1], -1, weight.shape[-1])
    return nn.functional.rms_norm(streams, weight.shape[-1:], eps=1e-3) @ weight.mT, states * 1.0


def summed(weights: torch.Tensor, state: torch.Tensor, earlier: torch.Tensor) -> tuple[torch.Tensor, ...]:
    buffer = torch.cat((earlier.detach(), earlier.new_zeros(2, 2, 3, 3)), dim=-2)
    return mudd.Summed.apply(weights, state, earlier, buffer)


def plainly_summed(weights: torch.Tensor, state: torch.Tensor, earlier: torch.Tensor) -> tuple[torch.Tensor, ...]:
    states = torch.stack([*earlier.unbind(-2), state], dim=-2)
    return torch.einsum("btsk,btkd->btsd", weights, states), states


def mixed(values: torch.Tensor, first: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
    own, share = weights if len(weights) == 2 else (*weights, None)
    outputs = value_residual.Mix.apply(values, first, own, share)
    return tuple(each for each in outputs if each is not None)


def plainly_mixed(
    values: torch.Tensor, first: torch.Tensor, own: torch.Tensor, share: torch.Tensor | None = None
) -> tuple[torch.Tensor, ...]:
    return (own[0] if share is None else share) * first + own[-1] * values, first * 1.0


VALUES = [(2, 3, 2, 3)] * 2
ONE_FUNCTION = {
    "Sinkhorn": (hyper_connections.Sinkhorn.apply, hyper_connections._sinkhorn, [(2, 3, 4, 4)]),
    "Summed": (summed, plainly_summed, [(2, 2, 4, 3), (2, 2, 3), (2, 2, 2, 3)]),
    "Projected": (projected, plainly_projected, [(2, 2, 3), (2, 2, 4, 3), (5, 12)]),
    "Projected of each": (projected, plainly_projected, [(2, 2, 3), (2, 2, 4, 3), (5, 3)]),
    "Mix": (mixed, plainly_mixed, [*VALUES, (2,)]),
    "Mix of shares": (mixed, plainly_mixed, [*VALUES, (1,), (1,)]),
    "Mix by gates": (mixed, plainly_mixed, [*VALUES, (1,), (2, 3, 2, 1)]),
    "Attended": (attnres.Attended.apply, attended_and_handed_on, [(3, 2, 2, 3), (2, 2, 3), (4, 2, 2, 1), (3, 1)]),
}


@pytest.mark.parametrize("name", ONE_FUNCTION)
def test_derivatives_of_one_function_are_those_of_the_plain_sums_and_of_finite_differences(
    name: str, device: str
) -> None:
    function, plain, shapes = ONE_FUNCTION[name]
    inputs = [torch.randn(shape, dtype=torch.float64, device=device, requires_grad=True) for shape in shapes]
    found = []
    for run in (function, plain):
        outputs = run(*inputs)
        outputs = [outputs] if isinstance(outputs, torch.Tensor) else [*outputs]
        batches = [torch.stack([each.detach().cos(), each.detach().sin()]) for each in outputs]
        batched = torch.autograd.grad(outputs, inputs, batches, retain_graph=True, is_grads_batched=True)
        found.append([*outputs, *batched, *torch.autograd.grad(outputs, inputs, [each[0] for each in batches])])
        for number in range(len(inputs)):  # the others are frozen, and one output alone has a gradient
            alone = [each.detach().requires_grad_(n == number) for n, each in enumerate(inputs)]
            outputs = run(*alone)
            for output in [outputs] if isinstance(outputs, torch.Tensor) else outputs:
                if output.requires_grad:
                    square = output.square().sum()
                    (first,) = torch.autograd.grad(square, alone[number], create_graph=True, allow_unused=True)
                    if first is not None:
                        found[-1] += [first, *torch.autograd.grad(first.sum(), alone[number], retain_graph=True)]
        made = [inputs[0], *(each * inputs[0].mean() for each in inputs[1:])]  # as in a model: of one another
        outputs = run(*made)
        square = sum(each.square().sum() for each in ([outputs] if isinstance(outputs, torch.Tensor) else outputs))
        first = torch.autograd.grad(square, inputs, create_graph=True)
        found[-1] += [*first, *torch.autograd.grad(sum(each.sum() for each in first), inputs)]
    for got, expected in zip(*found, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)
    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs)


@pytest.mark.parametrize("method", ["resformer", "resformer-plus"])
def test_values_are_mixed_to_the_same_bits_with_and_without_gradients(method: str) -> None:
    model = tiny_model(method, dtype=torch.bfloat16)
    with torch.no_grad():
        logits = model(**RAGGED).logits
    assert torch.equal(logits, model(**RAGGED).logits)


def test_added_parameters_lie_in_their_modules_and_are_no_scalars(variant: str) -> None:
    model = tiny_model(variant)
    fields = "head_dim num_key_value_heads attention_bias mlp_bias tie_word_embeddings"
    plain = tiny_model(**{field: getattr(model.config, field) for field in fields.split()})
    backbone = {name for name, _ in plain.named_parameters()}
    connections = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, Added))
    for name, parameter in model.named_parameters():
        assert parameter.dim() >= 1, name
        assert is_connection(name) == (name not in backbone) == name.startswith(connections), name
    assert {name for kind in KINDS for name in kind.fields} == {*CONNECTION_FIELDS} - {"connections"}


@pytest.mark.parametrize(("form", "family"), [("mhc", "deepseek_v4"), ("ihc", "hy_v4")])
def test_constrained_hyper_connections_are_those_of_transformers(form: str, family: str) -> None:
    """Of DeepSeek V4 and of HunYuan 4, whose streams are not mixed: float32 throughout."""
    theirs = pytest.importorskip(
        f"transformers.models.{family}.modeling_{family}", reason="a newer Transformers has it"
    )
    module = tiny_model(hyper_connections=form).model.layers[1].hyper_connections
    n, width = 4, 32
    sizes = {"hidden_size": width, "hc_mult": n, "hc_eps": 0.0, "rms_norm_eps": module.epsilon}
    stream, apart, added = torch.randn(2, 5, width), torch.randn(2, 5, n, width), torch.randn(2, 5, width)
    for sublayer in (0, 1):
        if form == "mhc":
            reference = theirs.DeepseekV4HyperConnection(theirs.DeepseekV4Config(**sizes))
        else:
            reference = theirs.HYV4HyperConnection(theirs.HYV4Config(**sizes, hc_magnitude=2.0))
        start = torch.full((n,), 0.1)
        start[module.own[sublayer]] = 0.7
        # theirs is used transposed: its entry (j, i) is R_ij
        order = [*range(2 * n), *(2 * n + i * n + j for j in range(n) for i in range(n))][: module.static.shape[1]]
        with torch.no_grad():
            reference.fn.copy_(module.weight[sublayer][order])
            reference.base.copy_(module.static[sublayer][order])
            reference.base[:n] += torch.logit(start)
            reference.scale.copy_(module.scale[sublayer])
            lanes = stream.unsqueeze(-2) + apart
            post, *mix, read = reference(lanes)
            lanes = mix[0].transpose(-1, -2) @ lanes if mix else lanes
            lanes = lanes + post.unsqueeze(-1) * added.unsqueeze(-2)
            got, mixed, gain = module.connect(stream, apart, sublayer)
            if sublayer == 1:  # their means, and what differs from these
                mixed, gain = mixed[..., :1, :] + mixed[..., 1:, :], gain[..., :1] + gain[..., 1:]
        torch.testing.assert_close(got, read, rtol=1e-4, atol=1e-5)
        ours = (stream + added).unsqueeze(-2) + mixed + gain.unsqueeze(-1) * added.unsqueeze(-2)
        torch.testing.assert_close(ours, lanes, rtol=1e-4, atol=1e-5)
