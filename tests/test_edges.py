"""A layer with connections is, to whoever wraps, hooks, compiles or checkpoints it, the layer that it was."""

import copy
import functools
import itertools
import re
from collections.abc import Callable
from types import MethodType, SimpleNamespace
from typing import Any

import any_decoder
import pytest
import torch
from accelerate import dispatch_model
from accelerate.hooks import remove_hook_from_module
from accelerate.utils import FullyShardedDataParallelPlugin, compile_regions
from accelerate.utils.fsdp_utils import fsdp2_apply_ac
from conftest import others_slow
from peft import LoraConfig, get_peft_model
from small_decoders import small_decoder
from torch._dynamo.utils import counters
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from transformers import AutoConfig, PreTrainedModel
from transformers.models.auto import modeling_auto, tokenization_auto
from transformers.models.auto.auto_factory import _LazyAutoMapping

import resformer
from resformer.modeling.any_decoder import Decoder
from resformer.modeling.versions import CACHE

#: Every method, in sets that act together.
SETS = (
    "resformer+neutreno+denseformer",
    "resformer-identity+svformer+attnres",
    "resformer-plus+mudd",
    "resformer-dense+mhc",
    "resformer-gated+delta-attention-residuals",
    "depth-attention",
    "nanochat",
)
HOSTS = ("gpt_neox", "llama", "gemma3_text")
#: Each set on a host, whose queries, keys and values are one product in gpt_neox; a quick run tries the first.
CASES = [f"{host}-{each}" for host, each in zip(itertools.cycle(HOSTS), SETS, strict=False)]


def connected(case: str) -> PreTrainedModel:
    """Of three layers: a first one, one that both reads and is read, and a last one; compilers take long for each."""
    host, _, methods = case.partition("-")
    model = resformer.connect(small_decoder(host, num_hidden_layers=3), methods.split("+"), lossy=True).train()
    any_decoder.move(model)
    return model


def layers_of(model: PreTrainedModel) -> Any:
    return Decoder(model).layers


def attention_of(layer: Any) -> str:
    return str(layer.known.attention)


def attention_alone(model: PreTrainedModel) -> None:
    for layer in layers_of(model):
        setattr(layer, attention_of(layer), checkpoint_wrapper(getattr(layer, attention_of(layer))))


def layers_wrapped(model: PreTrainedModel, **options: Any) -> None:
    layers = layers_of(model)
    for n in range(len(layers)):
        layers[n] = checkpoint_wrapper(layers[n], **options)


def products_kept(model: PreTrainedModel) -> None:
    layers_wrapped(model, context_fn=lambda: create_selective_checkpoint_contexts([torch.ops.aten.mm.default]))


def accelerates(model: PreTrainedModel) -> None:
    name = type(layers_of(model)[0]).__name__
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=[name],
        activation_checkpointing=True,
    )
    plugin.set_auto_wrap_policy(model)
    fsdp2_apply_ac(SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin)), model)


def transformers_own(model: PreTrainedModel) -> None:
    model.gradient_checkpointing_enable({"use_reentrant": False})


def regions(model: PreTrainedModel) -> PreTrainedModel:
    return compile_regions(model, backend="eager")


def compiled_in_the_list(model: PreTrainedModel) -> None:
    layers = layers_of(model)
    for n in range(len(layers)):
        layers[n] = torch.compile(layers[n], backend="eager")


def compiled_in_place(model: PreTrainedModel) -> None:
    for layer in layers_of(model):
        layer.compile(backend="eager")


def compiled_with_checkpoints(model: PreTrainedModel) -> Any:
    transformers_own(model)
    return torch.compile(model, backend="aot_eager", fullgraph=True)


class Break(torch.nn.Module):
    """A graph break around a module."""

    def __init__(self, module: torch.nn.Module):
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        torch._dynamo.graph_break()
        return self.module(*args, **kwargs)


def broken(model: PreTrainedModel) -> PreTrainedModel:
    for layer in layers_of(model):
        layer.mlp = Break(layer.mlp)
    return model


def compiled_with_breaks(model: PreTrainedModel) -> None:
    Decoder(broken(model)).module.compile(backend="eager")


WRAPPERS: list[Callable[[PreTrainedModel], Any]] = [
    *(attention_alone, layers_wrapped, products_kept, accelerates, transformers_own),
    *(regions, compiled_in_the_list, compiled_in_place, compiled_with_checkpoints, compiled_with_breaks),
]


def gradients(model: Any) -> dict[str, torch.Tensor]:
    """Under the names that parameters have without wrappers."""
    wrappers = r"_checkpoint_wrapped_module\.|_orig_mod\.|(?<=mlp\.)module\."
    return {re.sub(wrappers, "", name): each for name, each in any_decoder.all_gradients(model).items()}


#: Which take a compiler seconds: one for all sets, the others for the first ones.
COMPILED = (compiled_in_the_list, compiled_in_place, compiled_with_checkpoints, compiled_with_breaks)


def wrapped_cases(wrap: Callable[..., Any]) -> list[Any]:
    quick = CASES[:0] if wrap in COMPILED else CASES[:1] if wrap is regions else CASES[:3]
    return [
        pytest.param(wrap, case, id=f"{wrap.__name__}-{case}", marks=[] if case in quick else pytest.mark.slow)
        for case in (CASES[:3] if wrap in COMPILED else CASES)
    ]


@functools.cache
def plain_gradients(case: str) -> dict[str, torch.Tensor]:
    """What every wrapper is compared with."""
    return gradients(connected(case))


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")
@pytest.mark.parametrize(("wrap", "case"), [each for wrap in WRAPPERS for each in wrapped_cases(wrap)])
def test_a_wrapped_layer_gives_the_gradients_of_the_plain_one(wrap: Callable[..., Any], case: str) -> None:
    expected, model = plain_gradients(case), connected(case)
    torch.compiler.reset()
    wrapped = wrap(model)
    got = gradients(model if wrapped is None else wrapped)
    assert got.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(got[name], gradient, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("wrap", [regions, compiled_in_the_list, compiled_in_place], ids=lambda each: each.__name__)
def test_a_compiled_layer_is_compiled(wrap: Callable[..., Any]) -> None:
    captured = []
    for model in (small_decoder("llama", num_hidden_layers=3).train(), connected("llama-resformer")):
        torch.compiler.reset()
        counters.clear()
        wrapped = wrap(model)
        gradients(model if wrapped is None else wrapped)
        captured.append(counters["stats"]["calls_captured"])
    assert captured[1] >= captured[0]


@pytest.mark.slow
def test_a_model_compiles_around_breaks_within_its_layers() -> None:
    model = resformer.connect(small_decoder("gpt_oss"), "resformer-denseformer")
    any_decoder.move(model)
    expected = any_decoder.logits_of(model)
    torch.compiler.reset()
    compiled = torch.compile(broken(model), backend="eager")
    torch.testing.assert_close(any_decoder.logits_of(compiled), expected, rtol=1e-4, atol=1e-5)


def test_compiled_generation_is_one_graph_and_gives_the_same_tokens() -> None:
    """Each mechanism's in Llama: test_modeling_compile.py."""
    model = connected("gemma3_text-mudd").eval()
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    expected = model.generate(any_decoder.IDS, **options, use_cache=False)
    torch.compiler.reset()
    model.forward = torch.compile(model.forward, backend="eager", fullgraph=True)
    got = model.generate(any_decoder.IDS, **options, cache_implementation="static", disable_compile=True)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("host", others_slow(HOSTS, ["llama"]))
def test_a_hook_on_a_layer_steers_as_on_the_plain_model(host: str) -> None:
    plain, model = small_decoder(host), resformer.connect(small_decoder(host))
    vector = torch.randn(64)

    def steer(_module: Any, _args: Any, output: Any) -> Any:
        return (output[0] + vector, *output[1:]) if isinstance(output, tuple) else output + vector

    for each in (plain, model):
        layers_of(each)[1].register_forward_hook(steer)
    assert torch.equal(any_decoder.logits_of(model), any_decoder.logits_of(plain))


def test_a_wrapper_that_does_not_call_its_layer_is_named() -> None:
    class Skipped(torch.nn.Module):
        def __init__(self, layer: torch.nn.Module):
            super().__init__()
            self.layer = layer

        def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            return hidden_states

    model = resformer.connect(small_decoder("llama"))
    model.model.layers[2] = Skipped(model.model.layers[2])
    with pytest.raises(ValueError, match="Layer 2 is in a Skipped, which has not called it"):
        any_decoder.logits_of(model)


@pytest.mark.parametrize("method", ["resformer", "svformer", "denseformer", "mudd", "mhc"])
def test_layers_that_are_repeated_or_run_one_by_one_are_refused(method: str) -> None:
    """PEFT's `layer_replication` copies and renumbers layers; quantisers call each with what the first one got."""
    model = connected(f"llama-{method}")
    adapted = get_peft_model(copy.deepcopy(model), LoraConfig(layer_replication=[[0, 2], [1, 3]]))
    with pytest.raises(ValueError, match="holds layer 1 twice"):
        any_decoder.logits_of(adapted)
    layers, got = model.model.layers, []
    layers[0].register_forward_pre_hook(lambda _module, *args: got.append(args), with_kwargs=True)
    any_decoder.logits_of(model)
    with pytest.raises(ValueError, match="Layer 1 is called with the arguments of layer 0"):
        layers[1](*got[0][0], **got[0][1])


def test_layers_that_are_one_or_have_another_forward_are_refused() -> None:
    def tied(layers: Any) -> None:
        layers[2] = layers[1]

    def tied_attention(layers: Any) -> None:
        layers[2].self_attn = layers[1].self_attn

    def replaced(layers: Any) -> None:
        layers[1].forward = MethodType(lambda self, states, **kwargs: states, layers[1])

    for change, said in (
        (tied, "a LlamaDecoderLayer is in two"),
        (tied_attention, "a LlamaAttention is in two"),
        (replaced, "`forward` of a LlamaDecoderLayer was replaced"),
    ):
        model = small_decoder("llama")
        change(model.model.layers)
        expected = any_decoder.logits_of(model)
        with pytest.raises(ValueError, match=f"llama cannot have `value_residual`: .*{said}"):
            resformer.connect(model)
        assert torch.equal(any_decoder.logits_of(model), expected)


@pytest.mark.parametrize("head", [True, False])
def test_hooks_of_accelerate_that_stay_or_are_taken_off_are_in_no_ones_way(head: bool) -> None:
    def hooked(model: Any, taken_off: bool) -> PreTrainedModel:
        devices = {
            name: "cpu" for name, _ in model.named_modules() if name.count(".") == 1 + head or "layers" not in name
        }
        dispatch_model(model, devices | {"": "cpu"}, force_hooks=True)
        return remove_hook_from_module(model, recurse=True) if taken_off else model

    def states(model: Any) -> torch.Tensor:
        with torch.no_grad():
            return model(any_decoder.IDS)[0]

    def plain() -> PreTrainedModel:
        return small_decoder("llama") if head else small_decoder("llama").model

    expected = states(plain())
    for taken_off in (True, False):
        model = resformer.connect(hooked(plain(), taken_off))
        assert torch.equal(states(model), expected)
        any_decoder.move(model)
        assert not torch.equal(states(model), expected)
        model = resformer.disconnect(hooked(model, taken_off), lossy=True)
        assert torch.equal(states(model), expected)


@pytest.mark.parametrize("rows", [3, 4])
def test_positions_in_images_are_no_packed_sequences(rows: int) -> None:
    positions = torch.arange(9).expand(rows, 2, 9).clone()
    positions[-3:, :, 3:6] = 3  # an image
    model = small_decoder("qwen2_vl")
    for each in (model, resformer.connect(model)):
        assert each(any_decoder.IDS, position_ids=positions)[CACHE] is not None


def test_a_pass_that_has_failed_leaves_nothing_behind() -> None:
    model = resformer.connect(small_decoder("llama"), "resformer-denseformer")
    any_decoder.move(model)
    expected = any_decoder.logits_of(model)

    def fail(*_: Any) -> None:
        raise RuntimeError("stop")

    hook = layers_of(model)[2].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="stop"):
        any_decoder.logits_of(model)
    hook.remove()
    assert [type(each).__name__ for each in model.model.layers] == ["LlamaDecoderLayer"] * 4
    assert torch.equal(any_decoder.logits_of(model), expected)


def test_states_of_the_family_are_restored_and_copies_are_independent() -> None:
    model = resformer.connect(small_decoder("llama"), "resformer-denseformer")
    other = copy.deepcopy(model)
    any_decoder.move(other)
    with resformer.disconnected(other):
        assert torch.equal(any_decoder.logits_of(other), any_decoder.logits_of(model))
    assert not torch.equal(any_decoder.logits_of(other), any_decoder.logits_of(model))
    other.model.layers[0] = copy.deepcopy(other.model.layers[0])  # depth-wise growth copies some
    with resformer.disconnected(other):
        assert torch.equal(any_decoder.logits_of(other), any_decoder.logits_of(model))
    with pytest.raises(ValueError, match=r"Connections have learned: model\.layers\.\d"):
        resformer.disconnect(other)
    shared = resformer.connect(small_decoder("llama"), "svformer", lossy=True)
    for refused in (lambda: resformer.disconnect(shared), lambda: resformer.disconnected(shared).__enter__()):
        with pytest.raises(ValueError, match="have no projections of their own"):
            refused()


@pytest.mark.parametrize("model_type", ["llama", "llava"])  # the text model of one that sees images has no fields
def test_a_method_is_added_to_a_connected_model_whose_coefficients_stay(model_type: str) -> None:
    model = resformer.connect(small_decoder(model_type), "resformer")
    any_decoder.move(model)
    expected, trained = any_decoder.logits_of(model), Decoder(model).layers[1].value_residual.weight
    resformer.connect(model, ["denseformer", "delta-attention-residuals"])
    assert torch.equal(any_decoder.logits_of(model), expected)
    assert Decoder(model).layers[1].value_residual.weight is trained
    assert (model.config.dwa, model.config.delta_attention_residuals) == (True, True)
    whole = resformer.connect(small_decoder(model_type), ["resformer", "denseformer", "delta-attention-residuals"])
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in whole.named_parameters()]


def test_sharing_takes_further_connections() -> None:
    model = resformer.connect(small_decoder("llama"), "svformer", lossy=True)
    expected = any_decoder.logits_of(model)
    resformer.connect(model, "denseformer")
    assert torch.equal(any_decoder.logits_of(model), expected)


def test_transformers_own_tables_stay_whole() -> None:
    resformer.connect(small_decoder("qwen3"), "resformer")
    mappings = [each for module in (modeling_auto, tokenization_auto) for each in vars(module).values()]
    for mapping in mappings:
        if isinstance(mapping, _LazyAutoMapping):
            assert all(key is not None for key in mapping.keys())  # noqa: SIM118
    with pytest.raises(ValueError, match="Unrecognized configuration class"):
        modeling_auto.AutoModelForQuestionAnswering.from_config(AutoConfig.for_model("gemma3_text"))
    from transformers.cli.serving.utils import get_response_template

    plain = small_decoder("qwen3")
    template = get_response_template(object(), plain)
    assert template == get_response_template(object(), resformer.connect(plain))
    assert template is not None
