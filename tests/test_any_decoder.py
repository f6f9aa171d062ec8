"""`connect`: connections in the decoders of other families, measured on a small model of each."""

import errno
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import any_decoder
import pytest
import torch
import transformers
from accelerate.utils import compile_regions
from conftest import RAGGED, others_slow
from huggingface_hub.errors import StrictDataclassError
from peft import LoraConfig, get_peft_model
from safetensors import SafetensorError
from safetensors.torch import load_file
from small_decoders import SEEING, TYPES, default_decoder, seeing_model, small_config, small_decoder
from torch._inductor.exc import InductorError
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Gemma4ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

import resformer
from resformer.configuration.methods import CONNECTION_FIELDS, METHODS, connections_of, method_of
from resformer.errors import CheckpointError, OutputError
from resformer.modeling import connecting
from resformer.modeling.any_decoder import Decoder
from resformer.modeling.connected import added_modules
from resformer.modeling.connection import KINDS
from resformer.modeling.families import config_class, model_class
from resformer.modeling.measured import MEASURED
from resformer.modeling.versions import CACHE

IDS = torch.arange(12).view(2, 6)
QUICK = ("llama", "gemma3_text", "qwen3_moe", "phi3", "gpt_oss", "lfm2")


@pytest.mark.parametrize("model_type", others_slow(TYPES, QUICK))
def test_each_connection_does_what_the_documentation_says(model_type: str) -> None:
    found = any_decoder.verdicts(model_type, alone=model_type in QUICK)
    assert not [said for said in found.values() if said.startswith("FAILS")]
    refusals, documented = any_decoder.refusals(found), any_decoder.documented().get(model_type)
    if f"transformers=={transformers.__version__}\n" in (any_decoder.ROOT / "constraints.txt").read_text():
        assert documented == (None if "" in found else refusals)
    elif "" not in found and documented is not None:  # another version may refuse others
        every, before, now = {*any_decoder.CONNECTIONS}, any_decoder.refused(documented), any_decoder.refused(refusals)
        assert before == every or before <= now < every


def test_the_documentation_and_connect_know_what_was_measured() -> None:
    refused = {name: any_decoder.refused(reasons) for name, reasons in any_decoder.documented().items()}
    assert {*refused} == MEASURED
    assert len([name for name in MEASURED if refused[name] != set(any_decoder.CONNECTIONS)]) > 180


WHOLE = (resformer.connect, resformer.disconnect, partial(resformer.save_connections, folder="none"))
T5_SMALL = T5Config(d_model=8, d_kv=4, d_ff=8, num_layers=2, num_heads=2, vocab_size=9)


def test_what_cannot_be_connected_is_told_in_one_line(tmp_path: Path) -> None:
    model = small_decoder("gemma3_text")
    bad = {"value_residual": "learnabel"}
    alone = small_decoder("nemotron_h", layers_block_type=["mamba", "moe", "attention", "mlp"])
    around, adapted = small_decoder("llama"), resformer.connect(small_decoder("llama"))
    resformer.connect(around.model)
    get_peft_model(adapted, LoraConfig(target_modules=["q_proj"], modules_to_save=["value_residual"]))
    reentrant = small_decoder("llama").train()
    reentrant.gradient_checkpointing_enable({"use_reentrant": True})
    dropping = small_decoder("opt", layerdrop=0.1)
    for refused, said in (
        (lambda: resformer.connect(dropping), "opt cannot have .*: in training it drops layers, .* `layerdrop=0`"),
        (lambda: resformer.connect(model, **bad), "expected one of .*, got learnabel. Did you mean 'learnable'\\?"),
        (lambda: resformer.connected_config(model.config, **bad), "got learnabel. Did you mean 'learnable'\\?"),
        (lambda: resformer.connect(reentrant), "Reentrant gradient checkpointing loses the gradients"),
        (lambda: resformer.connect("gemma"), "takes a model, not its name"),
        (lambda: resformer.connect(model.config), "is a configuration, no model: `resformer.connected_config`"),
        (lambda: resformer.value_mixing_matrix(model.config), "A Gemma3TextConfig is no model: give the model that"),
        (lambda: resformer.connect(model, "value_residual"), "Unknown method .* `value_residual` is a field\\."),
        (lambda: resformer.connect(model, ""), "Unknown method ''"),
        (lambda: resformer.save_connections(model, tmp_path / "none"), "has no connections to save"),
        (
            lambda: resformer.connect(resformer.connect(model), value_residual="dense"),
            "`value_residual` is 'learnable' already, and 'dense' is asked for",
        ),
        *((lambda of=of: of(around), "has connections in its `model` alone, which") for of in WHOLE),
        (lambda: resformer.connected_config(model), "takes a configuration of Transformers, not a"),
        (lambda: resformer.connect(T5ForConditionalGeneration(T5_SMALL)), "no projection of values is known in T5B"),
        (lambda: resformer.connect(adapted, "denseformer"), "PEFT has wrapped it: merge or unload the adapter first"),
        (lambda: resformer.disconnect(small_decoder("llama")), "has no connections"),
        (lambda: resformer.connect(alone, "cla2", lossy=True), "no two of its layers have attention of one kind"),
    ):
        with pytest.raises(ValueError, match=said) as error:
            refused()
        assert "\n" not in str(error.value)
    with pytest.raises(StrictDataclassError, match=r"^Field 'value_residual' expected .*Did you mean 'learnable'"):
        type(model.config)(**bad)
    small_decoder("gemma3_text").save_pretrained(tmp_path / "whole")
    with pytest.raises(CheckpointError, match=r"whole: has no connections\.safetensors"):
        resformer.connect(small_decoder("gemma3_text"), str(tmp_path / "whole"))
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("where", "error"),
    [
        ("resformer.convert.connections.save_file", SafetensorError("I/O error: No space left on device")),
        ("pathlib.Path.write_bytes", OSError(errno.ENOSPC, "No space left on device")),
    ],
)
def test_an_earlier_result_outlives_a_full_disk(where: str, error: Exception, tmp_path: Path) -> None:
    model = resformer.connect(small_decoder("llama"), "resformer")
    resformer.save_connections(model, tmp_path / "saved")
    before = {file.name: file.read_bytes() for file in (tmp_path / "saved").iterdir()}
    any_decoder.move(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(where, Mock(side_effect=error))
        with pytest.raises(OutputError, match=r"saved: cannot be written: .*No space left on device"):
            resformer.save_connections(model, tmp_path / "saved")
    assert before == {file.name: file.read_bytes() for file in (tmp_path / "saved").iterdir()}


def test_coefficients_alone_are_saved_and_added_again_by_the_lines_of_their_card(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    small_decoder("gemma3_text").save_pretrained(tmp_path / "base")
    monkeypatch.chdir(tmp_path)
    model = resformer.connect(AutoModelForCausalLM.from_pretrained("base"), "resformer-denseformer")
    any_decoder.move(model)
    model.config.pad_token_id = 5  # the stock `Trainer` sets the tokenizer's
    resformer.save_connections(model, "adapter")
    assert sum(file.stat().st_size for file in Path("adapter").iterdir()) < 10_000
    lines = Path("adapter/README.md").read_text().partition("```python\n")[2].partition("```")[0]
    names: dict[str, Any] = {}
    exec(lines, names)
    again = names["model"]
    assert list(added_modules(again)) == list(added_modules(model))
    any_decoder.assert_same(again, model)

    regions = compile_regions(model, backend="eager")
    resformer.save_connections(regions, "regions")
    saved, expected = (load_file(f"{folder}/connections.safetensors") for folder in ("regions", "adapter"))
    assert saved.keys() == expected.keys()
    assert torch.equal(resformer.depth_mixing_matrix(regions), resformer.depth_mixing_matrix(model))

    model.save_pretrained("connected")
    resformer.save_connections(AutoModelForCausalLM.from_pretrained("connected"), "again")
    assert Path("again/config.json").read_text() == Path("adapter/config.json").read_text()

    wide = resformer.connect(small_decoder("llama", vocab_size=4096))
    wide.get_input_embeddings().weight.data[-1] += 1  # a token that was added
    with pytest.raises(ValueError, match="by training, merging or an adapter, and would be missing"):
        resformer.save_connections(wide, "wide")

    halved = AutoModelForCausalLM.from_pretrained("base", dtype=torch.bfloat16)
    resformer.connect(halved, "adapter")  # for the same model, in another dtype
    resformer.save_connections(resformer.connect(AutoModelForCausalLM.from_pretrained("base"), "attnres"), "further")
    had = resformer.connect(AutoModelForCausalLM.from_pretrained("base"), "denseformer")
    with pytest.raises(CheckpointError, match=r"the model has one already: `resformer\.disconnect` it first"):
        resformer.connect(had, "adapter")  # which has some of these
    assert not hasattr(had.model.layers[1], "value_residual")
    assert resformer.connect(had, "further").config.attnres

    other = AutoModelForCausalLM.from_pretrained("base", rms_norm_eps=1e-3)
    with pytest.raises(ValueError, match="has connections for base, whose configuration is not this model's"):
        resformer.connect(other, "adapter")
    assert added_modules(resformer.connect(other, "adapter", lossy=True))

    resformer.save_connections(resformer.connect(small_decoder("gemma3_text"), "denseformer"), "nameless")
    assert "has no name, and the folder cannot tell which it is" in caplog.text
    assert "for a model without a name: their" in Path("nameless/README.md").read_text()
    with pytest.raises(ValueError, match="has connections for a model without a name, whose"):
        resformer.connect(AutoModelForCausalLM.from_pretrained("base", rms_norm_eps=1e-3), "nameless")


@pytest.mark.parametrize("name", CONNECTION_FIELDS)
def test_any_value_of_a_field_fits_or_is_refused_in_one_line(name: str) -> None:
    model = small_decoder("llama")
    plain = any_decoder.logits_of(model)
    for value in ([], {"a": 1}, "x", -1, None, float("nan"), [1], ["a"], {"seen_gain": 1}):
        try:
            connected = resformer.connect(model, lossy=True, **{name: value})
        except ValueError as error:
            assert "\n" not in str(error)  # noqa: PT017
            assert type(model) is LlamaForCausalLM
        else:
            any_decoder.logits_of(connected)
            model = small_decoder("llama")
    assert torch.equal(any_decoder.logits_of(model), plain)


def test_a_connection_that_fails_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_decoder("gemma3_text")
    facts = any_decoder.facts_of(model)
    monkeypatch.setattr(connecting, "checksums", Mock(side_effect=NotImplementedError("of some quantised tensor")))
    with pytest.raises(NotImplementedError):
        resformer.connect(model)
    assert any_decoder.facts_of(model)[1:] == facts[1:]


def other_value(value: Any) -> Any:
    if isinstance(value, str):
        return "gated" if value == "dense" else "dense"
    return not value if isinstance(value, bool) else value + 1 if isinstance(value, (int, float)) else [0]


@pytest.mark.parametrize("method", [*METHODS][1:])
def test_connections_that_are_there_stay(method: str) -> None:
    own = any_decoder.CONNECTIONS["own"]
    model = resformer.connect(small_decoder("llama"), method, lossy=True, **own)
    any_decoder.move(model)
    expected, before = any_decoder.logits_of(model), model.config.to_dict()
    there = [name for kind in KINDS if kind.is_in(model.config) for name in kind.fields]
    asked = {name: other_value(getattr(model.config, name)) for name in there}
    asked |= {"seen_gain_times": 3.0, "seen_gain_init": 3.0}
    for name, value in asked.items():
        for refused in (
            lambda fields={name: value}: resformer.connect(model, lossy=True, **fields),
            lambda fields={name: value}: resformer.connected_config(model.config, **fields),
        ):
            with pytest.raises(ValueError, match=f"`{name}` is .* already, and .* is asked for"):
                refused()
    assert model.config.to_dict() == before
    assert torch.equal(any_decoder.logits_of(model), expected)
    more = {"value_residual": "learnable"} if "dwa" in there else {"dwa": True}
    both = connections_of(resformer.connected_config(model.config, **more))
    assert both == connections_of(model.config) | more


@pytest.mark.parametrize("model_type", ["mixtral", "llama", "bloom"])
def test_the_family_says_which_implementations_may_be_chosen(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the class with connections is asked before the family's, as in a process that loads nothing else."""
    family = MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[model_type]]
    made = model_class(family, config_class(CONFIG_MAPPING[model_type]))
    for what in ("_can_set_attn_implementation", "_can_set_experts_implementation"):
        monkeypatch.setattr(family, f"{what}_cached_value", None, raising=False)
        assert getattr(made, what)() == getattr(family, what)()
    assert family._can_set_experts_implementation() == (model_type == "mixtral")
    assert family._can_set_attn_implementation() == (model_type != "bloom")


def test_models_of_one_configuration_are_connected_each_for_itself() -> None:
    config = small_config("llama")
    models = [LlamaForCausalLM(config) for _ in range(3)]
    one, other = (resformer.connect(m, method) for m, method in zip(models, ("resformer", "denseformer"), strict=False))
    assert [type(each.config) is LlamaConfig for each in (one, other, models[2])] == [False, False, True]
    assert (one.config.dwa, other.config.value_residual) == (False, "none")
    assert all(getattr(module, "config", one.config) is one.config for module in one.modules())


def test_a_loaded_model_has_its_familys_type_when_it_is_disconnected(tmp_path: Path) -> None:
    resformer.connect(small_decoder("qwen3")).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert resformer.disconnect(model).config.model_type == "qwen3"


def test_coefficients_have_the_dtype_with_which_the_saved_model_is_loaded(tmp_path: Path) -> None:
    for dtype in (torch.bfloat16, torch.float64):
        model = resformer.connect(small_decoder("llama").to(dtype), "nanochat")
        model.save_pretrained(tmp_path)
        again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
        assert {n: p.dtype for n, p in model.named_parameters()} == {n: p.dtype for n, p in again.named_parameters()}


def test_tokens_of_a_pass_are_not_read_by_the_next() -> None:
    model = resformer.connect(small_decoder("llama"), "value-embeddings")
    embeddings = model.get_input_embeddings()(IDS)
    with pytest.raises(ValueError, match="exactly one of input_ids or inputs_embeds"):
        model(input_ids=IDS, inputs_embeds=embeddings)
    any_decoder.logits_of(model)
    for part in (model.model, model):
        with pytest.raises(ValueError, match="pass `input_ids` instead"):
            part(inputs_embeds=embeddings.flip(1))


@pytest.mark.parametrize("name", ["dwa", "embedding_residual", "backout", "delta_attention_residuals", "mudd"])
def test_layers_without_keys_and_values_read_states_of_the_tokens_that_others_read(name: str) -> None:
    config = small_config("gemma4_text")
    config.num_kv_shared_layers = 2  # as in the small ones of Gemma 4
    torch.manual_seed(1)  # with others a norm magnifies what rounding leaves
    base = Gemma4ForCausalLM(config).eval()
    assert not any_decoder.verdict(base, name)
    model = any_decoder.connected(base, any_decoder.CONNECTIONS[name])
    any_decoder.move(model)
    with torch.no_grad():
        last = model(input_ids=any_decoder.IDS, logits_to_keep=3).logits
    assert torch.allclose(last, any_decoder.logits_of(model)[:, -3:], atol=1e-5)


@pytest.mark.parametrize("method", ["value-embeddings", "resformer-sparse", "nanochat"])
@pytest.mark.parametrize("model_type", ["jamba", "lfm2_moe", "minimax"])
def test_methods_choose_their_layers_among_those_that_have_values(model_type: str, method: str) -> None:
    model = small_decoder(model_type)
    having = any_decoder.with_values(model)
    config = resformer.connect(model, method, lossy=True).config
    assert (config.value_embeddings or config.value_residual_layers) == having[-1:]  # of two of four
    assert method_of(config) == method


def test_queries_that_are_clipped_are_not_attended_to_over_depth() -> None:
    config = small_config("olmo")
    config.clip_qkv = 0.05
    said = any_decoder.verdict(type(small_decoder("olmo"))(config).eval(), "depth_attention")
    assert said == "in layer 1 its queries and keys are clipped after their projection."


FUSED: list[tuple[str, dict[str, Any]]] = [
    ("falcon", {"num_attention_heads": 8, "num_kv_heads": 2, "new_decoder_architecture": True}),  # 40B, 180B
    ("falcon", {"num_kv_heads": 4, "multi_query": False, "alibi": True, "parallel_attn": False}),  # RW
    ("gpt_bigcode", {"multi_query": True}),
    ("gpt_bigcode", {"multi_query": False}),
    ("phi3", {"num_key_value_heads": 1}),
]


@pytest.mark.parametrize(("model_type", "fields"), FUSED)
def test_values_are_where_each_form_of_a_family_fuses_them(model_type: str, fields: dict[str, Any]) -> None:
    model = any_decoder.connected(small_decoder(model_type, **fields), {"connections": {"seen_values": {}}})
    any_decoder.SeenValues.kept.clear()
    with torch.no_grad():
        cache = model(input_ids=IDS, use_cache=True)[CACHE]
    for n, layer in enumerate(cache.layers):
        values, cached = any_decoder.SeenValues.kept[n], layer.values.transpose(1, 2)
        assert torch.equal(values.repeat_interleave(cached.shape[2] // values.shape[2], dim=2), cached)


def test_layers_that_scale_queries_by_their_position_share() -> None:
    fields = {"num_hidden_layers": 8, "layer_types": None, "no_rope_layers": [1, 1, 1, 0] * 2, "floor_scale": 2}
    assert not any_decoder.verdict(small_decoder("llama4_text", **fields), "sharing")


#: Widths of queries and values differ; one attention; many layers without, and a name that is one of those.
UNLIKE_SMALL_ONES = ("mimo_v2_flash", "nemotron_h", "qwen3_next", "kimi_linear", "recurrent_gemma")


@pytest.mark.parametrize("model_type", others_slow(sorted(MEASURED), [*QUICK, *UNLIKE_SMALL_ONES]))
def test_what_is_refused_at_the_sizes_of_transformers_is_what_was_measured(model_type: str) -> None:
    try:
        model = default_decoder(model_type)
    except Exception as error:  # any of a family's code
        pytest.skip(f"Transformers makes no model of it: {error}")
    expected = any_decoder.refused(any_decoder.documented()[model_type])
    refused = {name for name in any_decoder.CONNECTIONS if any_decoder.why_refused(model, name)}
    if refused != expected:  # a hybrid may have one attention at the most
        assert sum(places.values is not None for places in Decoder(model).places) < 2
        assert expected < refused


@pytest.mark.parametrize("method", ["resformer-denseformer", "value-embeddings", "delta-attention-residuals", "mudd"])
def test_threads_that_call_a_model_at_once_get_what_each_gets_alone(method: str) -> None:
    model = resformer.connect(small_decoder("llama"), method)
    any_decoder.move(model)
    texts = [IDS + 7 * n for n in range(3)]
    interval = sys.getswitchinterval()

    @torch.no_grad()
    def logits(ids: torch.Tensor) -> torch.Tensor:
        return model(input_ids=ids).logits

    expected = [logits(ids) for ids in texts]
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(3) as pool:
            got = list(pool.map(logits, texts * 20))
    finally:
        sys.setswitchinterval(interval)
    assert all(torch.allclose(one, other, atol=1e-5) for one, other in zip(got, expected * 20, strict=True))


def test_layers_read_the_embeddings_beside_the_stream() -> None:
    model = resformer.connect(small_decoder("gemma3_text"), "transformer", embedding_residual=True)
    any_decoder.move(model)
    plain = small_decoder("gemma3_text")
    embeddings: list[torch.Tensor] = []

    def mix(layer: Any, args: Any, weight: torch.Tensor) -> Any:
        embeddings.append(args[0])
        return weight[0] * args[0] + weight[1] * embeddings[0], *args[1:]

    for ours, theirs in zip(Decoder(model).layers, Decoder(plain).layers, strict=True):
        weight = ours.embedding_residual.weight
        theirs.register_forward_pre_hook(lambda layer, args, weight=weight: mix(layer, args, weight))
    assert torch.allclose(any_decoder.logits_of(model), any_decoder.logits_of(plain), atol=1e-6)


@pytest.mark.parametrize("model_type", others_slow(SEEING, ["gemma3"]))
def test_the_decoder_of_a_model_that_sees_images_is_connected(model_type: str, tmp_path: Path) -> None:
    model, inputs = seeing_model(model_type)
    with torch.no_grad():
        expected = model(**inputs).logits
        connected: Any = resformer.connect(model, "resformer-denseformer")
        assert "vision" not in Decoder(connected).name  # the tower has as many layers
        assert torch.equal(connected(**inputs).logits, expected)
        any_decoder.move(connected)
        assert not torch.equal(connected(**inputs).logits, expected)
        connected.save_pretrained(tmp_path)
        any_decoder.assert_same(AutoModelForImageTextToText.from_pretrained(tmp_path), connected, **inputs)
    cached, uncached = (connected.generate(**inputs, **TOKENS, use_cache=each) for each in (True, False))
    assert torch.equal(cached, uncached)


@pytest.mark.parametrize("model_type", ["gemma3_text", "qwen3_moe", "gpt2"])
def test_the_first_layers_of_a_checkpoint_are_those_of_the_whole(model_type: str, tmp_path: Path) -> None:
    model = build(model_type)
    model.save_pretrained(tmp_path)
    first = AutoModelForCausalLM.from_pretrained(tmp_path, num_hidden_layers=2)
    with pytest.raises(ValueError, match="takes the middle of all layers out of the last"):
        type(model.config).from_dict({**model.config.to_dict(), "backout": True}, num_hidden_layers=2)
    with torch.no_grad():
        whole = model(input_ids=IDS, output_hidden_states=True).hidden_states
        got = first(input_ids=IDS, output_hidden_states=True).hidden_states
    assert len(got) == 3
    assert all(torch.equal(one, other) for one, other in zip(got[:2], whole, strict=False))


def test_a_decoder_that_was_not_measured_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    resformer.connect(small_decoder("llama"))
    assert not caplog.messages
    monkeypatch.setattr(connecting, "MEASURED", frozenset())
    resformer.connect(small_decoder("llama"))
    assert "'llama' were not measured" in caplog.text


#: A dense decoder with windows, one with experts, one like ours; a hybrid, multi-head latent attention, fused values.
USED = ["gemma3_text", "qwen3_moe", "llama", "qwen3_next", "deepseek_v3", "phi3"]
used = pytest.mark.parametrize("model_type", others_slow(USED, ["gemma3_text"]))
METHOD = "resformer-denseformer"
TOKENS = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def build(model_type: str) -> PreTrainedModel:
    """A small model with connections that do something."""
    model = resformer.connect(small_decoder(model_type), METHOD)
    any_decoder.move(model)
    return model


def real(states: torch.Tensor) -> torch.Tensor:
    return states[RAGGED["attention_mask"].bool()]


class NoStream:
    """Stands for a stream of CUDA, without which Transformers offloads no cache."""

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def wait_stream(self, _: object) -> None: ...


@used
@pytest.mark.parametrize("way", ["static", "beams", "assisted", "quantized", "offloaded", "offloaded_static"])
def test_generation_with_any_cache_of_prompts_padded_on_the_left_equals_uncached(
    model_type: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(model_type)
    monkeypatch.setattr(torch, "Stream", NoStream)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda _: NoStream())
    if way == "assisted" and model._is_stateful:
        pytest.skip("the family refuses it")
    inputs = {name: tensor[:1] for name, tensor in RAGGED.items()} if way == "assisted" else RAGGED
    options: dict[str, Any] = {
        "static": {"cache_implementation": "static", "disable_compile": True},
        "beams": {"num_beams": 3},
        "assisted": {"assistant_model": small_decoder(model_type)},
        "quantized": {"cache_implementation": "quantized", "cache_config": {"backend": "fp8"}, "max_new_tokens": 2},
        "offloaded": {"cache_implementation": "offloaded"},
        "offloaded_static": {"cache_implementation": "offloaded_static", "disable_compile": True},
    }[way]
    if way == "quantized":
        plain = small_decoder(model_type)
        try:
            plain.generate(**inputs, **{**TOKENS, **options})
        except ValueError as error:
            pytest.skip(f"the family refuses it: {error}")
    options = {**TOKENS, **options, "output_logits": True, "return_dict_in_generate": True}
    got = model.generate(**inputs, **options)
    beams = {"num_beams": options.get("num_beams", 1), "max_new_tokens": options["max_new_tokens"]}
    expected = model.generate(**inputs, **{**TOKENS, **beams}, use_cache=False)
    if way == "quantized":  # the second token alone reads what was rounded
        assert torch.equal(got.sequences[:, :-1], expected[:, :-1])
    else:
        assert torch.equal(got.sequences, expected)


#: Flex attention is compiled for each family: one with windows, one whose values are narrower than keys.
KERNELS = [*((each, "eager") for each in USED), *((each, "flex_attention") for each in ("gemma3_text", "deepseek_v3"))]


@pytest.mark.parametrize(
    ("model_type", "attention"), [KERNELS[0], *(pytest.param(*each, marks=pytest.mark.slow) for each in KERNELS[1:])]
)
def test_attention_kernels_agree(model_type: str, attention: str) -> None:
    model = build(model_type)
    with torch.no_grad():
        sdpa = any_decoder.tokens_of(model, use_cache=True) if attention == "eager" else None
        expected = real(model(**RAGGED).logits)
        try:
            model.set_attn_implementation(attention)
        except ValueError as error:
            pytest.skip(f"the family refuses it: {error}")
        try:
            got = real(model(**RAGGED).logits)
        except InductorError as error:
            pytest.skip(f"torch compiles no such mask for this CPU: {str(error)[:80]}")
    assert torch.allclose(got, expected, atol=1e-5)
    if sdpa is not None:  # flex attention is compiled for each length
        assert torch.equal(any_decoder.tokens_of(model, use_cache=True), sdpa)


@pytest.mark.parametrize(
    ("model_type", "part"),
    [("gemma3_text", "layers"), *(pytest.param(each, "model", marks=pytest.mark.slow) for each in USED)],
)
def test_compiling_changes_no_gradient(model_type: str, part: str) -> None:
    model = build(model_type).train()
    expected = any_decoder.gradients(model)
    torch.compiler.reset()
    # AOTAutograd's backward pass of the family's own delta rule fails: a view of what is not contiguous.
    backend = "eager" if model_type == "qwen3_next" else "aot_eager"
    for module in [model] if part == "model" else Decoder(model).layers:
        module.compile(backend=backend)
    got = any_decoder.gradients(model)
    assert got.keys() == expected.keys()
    for name, gradient in expected.items():
        assert torch.allclose(got[name], gradient, atol=1e-5), name


@used
def test_layers_on_several_devices_give_the_same_logits(model_type: str, tmp_path: Path) -> None:
    model = build(model_type)
    model.save_pretrained(tmp_path)
    expected, tokens = any_decoder.logits_of(model), any_decoder.tokens_of(model, use_cache=True)
    name = Decoder(model).name
    # The CPU and the disk are devices to Accelerate: a layer's arguments and weights are moved by its hooks.
    devices = {f"{name}.{n}": "cpu" if n < 2 else "disk" for n in range(4)}
    places = {n: "cpu" for n, child in model.named_modules() if n and not any(True for _ in child.children())}
    others = {n: each for n, each in places.items() if not n.startswith(f"{name}.")}
    folder = tmp_path / "offloaded"
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, device_map=devices | others, offload_folder=folder)
    small_decoder(model_type).save_pretrained(tmp_path / "base")
    options = {"device_map": devices | others, "offload_folder": folder / "base"}
    later = resformer.connect(AutoModelForCausalLM.from_pretrained(tmp_path / "base", **options), METHOD)
    any_decoder.move(later)
    for each in (loaded, later):
        assert {parameter.device.type for parameter in Decoder(each).layers.parameters()} == {"cpu", "meta"}
        assert torch.allclose(any_decoder.logits_of(each), expected, atol=1e-5)
        assert torch.equal(any_decoder.tokens_of(each, use_cache=True), tokens)
