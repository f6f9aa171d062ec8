"""What `ResFormerConfig` promises: Llama by default, every method by name, and an error that helps for every misuse."""

import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from checkpoints import change_json
from conftest import COMBINATIONS, TinyConfig
from huggingface_hub.errors import StrictDataclassError
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, LlamaConfig

from resformer import METHODS, ResFormerConfig, ResFormerForCausalLM
from resformer.configuration import key_sources, mixing_layers, value_sources

#: Small enough to build a model from.
SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
}
#: The connections' own fields, as DESIGN.md lists them, with their defaults.
CONNECTIONS: dict[str, Any] = {
    "value_residual": "none",
    "value_residual_init": [0.5, 0.5],
    "value_residual_layers": None,
    "depth_attention_stride": 1,
    "depth_attention_init": 1.0,
    "value_embeddings": None,
    "value_embeddings_init": None,
    "neutreno_lambda": 0.0,
    "value_sources": None,
    "key_sources": None,
    "dwa": False,
    "dwa_dilation": 1,
    "dwa_period": 1,
    "attention_residuals": False,
    "attention_residual_blocks": 8,
    "attention_residual_init": 1.0,
}
MODES = ["none", "identity", "constant", "learnable", "learnable_plus", "dense", "gated", "depth_attention"]
ALTERNATING = ["full_attention", "sliding_attention"] * 4
FIELD_NAMES = [field.name for field in fields(ResFormerConfig)]


@pytest.fixture
def warned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The configurations' warnings."""
    messages: list[str] = []
    monkeypatch.setattr(f"{ResFormerConfig.__module__}.logger.warning_once", messages.append)
    return messages


def small(**config_fields: Any) -> ResFormerConfig:
    return ResFormerConfig(**{**SMALL, **config_fields})


@contextmanager
def refused(*words: str) -> Iterator[None]:
    """Expects a configuration error that contains each of `words`."""
    with pytest.raises((StrictDataclassError, ValueError)) as caught:
        yield
    message = str(caught.value)
    missing = [word for word in words if word not in message]
    assert not missing, f"the error does not say {missing}: {message}"


# Plain Llama by default


def test_every_llama_field_is_here_with_llamas_default() -> None:
    config, llama = ResFormerConfig(), LlamaConfig()
    assert {field.name for field in fields(LlamaConfig)} <= set(FIELD_NAMES)
    assert {field.name: getattr(config, field.name) for field in fields(LlamaConfig)} == {
        field.name: getattr(llama, field.name) for field in fields(LlamaConfig)
    }


def test_default_has_no_connection() -> None:
    config = ResFormerConfig()
    assert {name: getattr(config, name) for name in CONNECTIONS} == CONNECTIONS
    assert mixing_layers(config) == []
    assert value_sources(config) == key_sources(config) == list(range(32))
    assert config.kv_sharing_modes is None
    assert config.layer_types == ["full_attention"] * 32
    assert config.qk_norm is False
    assert config.attention_out_bias is config.sliding_window is config.no_rope_layers is None


def test_every_field_is_documented() -> None:
    own = set(FIELD_NAMES) - {field.name for field in fields(LlamaConfig)}
    assert [name for name in sorted(own) if name not in (ResFormerConfig.__doc__ or "")] == []


def test_sliding_window_alone_means_sliding_everywhere() -> None:
    assert small(sliding_window=16).layer_types == ["sliding_attention"] * 8


# The named methods


EVERY_TWO = [0, 0, 2, 2, 4, 4, 6, 6]
#: Method -> the fields that it sets at 8 layers.
EXPECTED_METHODS: dict[str, dict[str, Any]] = {
    "transformer": {},
    "resformer": {"value_residual": "learnable"},
    "resformer-identity": {"value_residual": "identity"},
    "resformer-constant": {"value_residual": "constant", "value_residual_init": [2.0, 1.0]},
    "resformer-plus": {"value_residual": "learnable_plus"},
    "resformer-sparse": {
        "value_residual": "constant",
        "value_residual_init": [5.0, 1.0],
        "value_residual_layers": [5, 6, 7],
    },
    "resformer-dense": {"value_residual": "dense"},
    "resformer-gated": {"value_residual": "gated"},
    "depth-attention": {"value_residual": "depth_attention", "depth_attention_stride": 4},
    "value-embeddings": {"value_embeddings": [5, 6, 7]},
    "neutreno": {"neutreno_lambda": 0.4},
    "resformer-neutreno": {"value_residual": "identity", "neutreno_lambda": 0.2},
    "svformer": {"value_sources": [0] * 8},
    "denseformer": {"dwa": True},
    "denseformer-4x5": {"dwa": True, "dwa_dilation": 4, "dwa_period": 5},
    "cla2": {"key_sources": EVERY_TWO, "value_sources": EVERY_TWO},
    "fusedkv-lite": {"key_sources": [0, 1, 2, 3, 3, 3, 3, 3], "value_sources": [0, 1, 2, 3, 0, 0, 0, 0]},
    "resformer-denseformer": {"value_residual": "learnable", "dwa": True},
    "attention-residuals": {"attention_residuals": True, "attention_residual_blocks": 8},
}
#: What follows from the depth, at the papers' 24 layers.
EXPECTED_AT_24_LAYERS: dict[str, dict[str, Any]] = {
    "depth-attention": {"depth_attention_stride": 12},
    "resformer-sparse": {"value_residual_layers": [*range(16, 24)]},
    "value-embeddings": {"value_embeddings": [*range(16, 24)]},
    "svformer": {"value_sources": [0] * 24},
    "cla2": {key: [layer // 2 * 2 for layer in range(24)] for key in ("key_sources", "value_sources")},
    "fusedkv-lite": {"key_sources": [*range(12), *[11] * 12], "value_sources": [*range(12), *[0] * 12]},
}


def test_methods_are_those_of_the_design() -> None:
    assert list(METHODS) == list(EXPECTED_METHODS)


def test_arguments_go_on_top_of_a_methods_fields() -> None:
    config = ResFormerConfig.for_method("resformer-constant", **SMALL, value_residual_init=[5, 1], dwa=True)
    assert (config.value_residual, config.value_residual_init, config.dwa) == ("constant", [5.0, 1.0], True)


@pytest.mark.parametrize("name", ["resfomer", "", "ResFormer", "value_residual"])
def test_unknown_method_is_refused_with_the_list(name: str) -> None:
    with refused(repr(name), *METHODS):
        ResFormerConfig.for_method(name)


def test_method_sets_its_published_fields_and_no_others(method: str, warned: list[str]) -> None:
    for layers, expected in ((8, {}), (24, EXPECTED_AT_24_LAYERS.get(method, {}))):
        config = ResFormerConfig.for_method(method, **{**SMALL, "num_hidden_layers": layers})
        plain = small(num_hidden_layers=layers).to_dict()
        assert config.to_dict() == {**plain, **EXPECTED_METHODS[method], **expected}
    assert warned == []


@pytest.mark.parametrize("num_layers", [0, 2.0, None])
def test_method_refuses_a_bad_number_of_layers_by_name(method: str, num_layers: Any) -> None:
    with refused("num_hidden_layers", str(num_layers)):
        ResFormerConfig.for_method(method, num_hidden_layers=num_layers)


@pytest.mark.filterwarnings("ignore:.*do(es)? nothing")
def test_method_fits_every_depth(method: str) -> None:
    for num_layers in range(1, 49):
        ResFormerConfig.for_method(method, **{**SMALL, "num_hidden_layers": num_layers})


@pytest.mark.parametrize("use_diff", [True, False], ids=["differences", "everything"])
def test_every_field_survives_json(use_diff: bool, tiny_config: TinyConfig) -> None:
    config = tiny_config(
        "kitchen-sink",
        hidden_act="gelu",
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "linear", "factor": 2.5, "rope_theta": 5e5},
        value_residual="constant",
        value_residual_init=[1 / 3, 0.1 + 0.2],
        value_residual_layers=[1, 4],
        depth_attention_stride=2,
        depth_attention_init=0.1,
        value_embeddings=[0, 3],
        value_embeddings_init=0.1,
        dwa_period=3,
        attention_residual_init=1 / 3,
        eos_token_id=[2, 3],
    )
    assert [name for name, default in CONNECTIONS.items() if getattr(config, name) == default] == []
    again = ResFormerConfig.from_dict(json.loads(config.to_json_string(use_diff=use_diff)))
    assert again.to_dict() == config.to_dict()
    assert again.value_residual_init == [1 / 3, 0.1 + 0.2]


def test_saved_configuration_comes_back(method: str, tmp_path: Path) -> None:
    config = ResFormerConfig.for_method(method, **SMALL)
    config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["model_type"] == "resformer"
    for again in (ResFormerConfig.from_pretrained(tmp_path), AutoConfig.from_pretrained(tmp_path)):
        assert type(again) is ResFormerConfig
        assert {**again.to_dict(), "_name_or_path": ""} == config.to_dict()


# What the model, the cache and the converter read


@pytest.mark.parametrize(
    ("config_fields", "expected"),
    [
        ({}, []),
        ({"value_residual": "learnable"}, [1, 2, 3, 4, 5, 6, 7]),
        ({"value_residual": "dense", "value_residual_layers": [3, 7]}, [3, 7]),
        ({"value_residual": "identity", "value_sources": [0, 0, 2, 2, 4, 4, 6, 6]}, [2, 4, 6]),
        ({"value_residual": "depth_attention"}, [1, 2, 3, 4, 5, 6, 7]),
        ({"value_residual": "depth_attention", "depth_attention_stride": 6}, [6, 7]),
        ({"value_residual": "depth_attention", "num_hidden_layers": 1}, []),
    ],
    ids=["none", "all but the first", "listed", "only layers with values of their own", "half", "stride", "one"],
)
def test_mixing_layers(config_fields: dict[str, Any], expected: list[int]) -> None:
    assert mixing_layers(small(**config_fields)) == expected


@pytest.mark.parametrize(
    ("config_fields", "expected"),
    [
        ({}, None),
        (METHODS["svformer"](8), None),
        (METHODS["cla2"](8), ["store", "reuse"] * 4),
        (METHODS["fusedkv-lite"](8), ["store"] * 4 + ["reuse"] * 4),
        ({"key_sources": [0, 0, 2, 3, 4, 5, 6, 7], "value_sources": [0, 1, 0, 3, 4, 5, 6, 7]}, ["store"] * 8),
    ],
    ids=["none", "values", "both", "both in the upper half", "keys alone or values alone"],
)
def test_layers_that_share_both_keys_and_values_store_nothing(
    config_fields: dict[str, Any], expected: list[str] | None
) -> None:
    assert small(**config_fields).kv_sharing_modes == expected


# What combines


@pytest.mark.parametrize("name", COMBINATIONS)
def test_combination_is_accepted_without_a_warning(name: str, tiny_config: TinyConfig, warned: list[str]) -> None:
    ResFormerForCausalLM(tiny_config(name))
    assert warned == []


# Misuse: one row is (what is wrong, the fields, what the message must say)

SIZES = [
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "max_position_embeddings", "head_dim", "sliding_window", "dwa_dilation", "dwa_period"),
]
NESTED_ROPE = {kind: {"rope_type": "default", "rope_theta": 1e4} for kind in ("full_attention", "sliding_attention")}
MISUSES: list[tuple[str, dict[str, Any], list[str]]] = [
    *[
        row
        for name in ("value_sources", "key_sources")
        for row in [
            (f"{name} after its reader", {name: [0, 2, 2, 3, 4, 5, 6, 7]}, [f"`{name}`[1] is 2", "0 to 1"]),
            (f"{name} negative", {name: [0, 1, -1, 3, 4, 5, 6, 7]}, [f"`{name}`[2] is -1", "0 to 2"]),
            (f"{name} beyond the model", {name: [0, 1, 2, 3, 4, 5, 6, 8]}, [f"`{name}`[7] is 8", "0 to 7"]),
            (f"{name} first not itself", {name: [1, 1, 2, 3, 4, 5, 6, 7]}, [f"`{name}`[0] is 1", "0 to 0"]),
            (
                f"{name} of a layer that has none",
                {name: [0, 0, 1, 3, 4, 5, 6, 7]},
                [f"`{name}`[2] is 1", f"`{name}`[1] is 0", "its own source"],
            ),
            (f"{name} too short", {name: [0] * 7}, [f"`{name}` has 7", "`num_hidden_layers` is 8"]),
            (f"{name} too long", {name: [0] * 9}, [f"`{name}` has 9", "`num_hidden_layers` is 8"]),
            (f"{name} of strings", {name: ["0"] * 8}, [name, "['0', '0', "]),
            (f"{name} one number", {name: 0}, [name, "0"]),
            (
                f"{name} across layer types",
                {name: [0] * 8, "layer_types": ALTERNATING, "sliding_window": 16},
                [f"`{name}`[1] is 0", "`layer_types`", "'full_attention' in layer 0", "'sliding_attention' in layer 1"],
            ),
        ]
    ],
    (
        "keys shared from a rotated to an unrotated layer",
        {"key_sources": [0] * 8, "no_rope_layers": [1, 0] * 4},
        ["`key_sources`[1] is 0", "`no_rope_layers`", "1 in layer 0", "0 in layer 1"],
    ),
    ("unknown mode", {"value_residual": "learnt"}, ["value_residual", "learnt", *MODES]),
    ("no mode", {"value_residual": None}, ["value_residual", "None", *MODES]),
    ("one initial value", {"value_residual_init": [0.5]}, ["`value_residual_init` is [0.5]", "two finite numbers"]),
    (
        "nan initial value",
        {"value_residual_init": [0, float("nan")]},
        ["`value_residual_init` is [0.0, nan]", "finite"],
    ),
    ("initial values in words", {"value_residual_init": ["a", "b"]}, ["value_residual_init", "['a', 'b']", "float"]),
    *[
        (
            f"mixing layers {layers}",
            {"value_residual": "learnable", "value_residual_layers": layers},
            [f"`value_residual_layers` is {layers}", "1 to 7", "`num_hidden_layers`", "ascending", "once"],
        )
        for layers in ([0, 3], [8], [-1, 2], [1, 1], [3, 2])
    ],
    (
        "mixing layer without values of its own",
        {"value_residual": "learnable", "value_residual_layers": [2, 3], "value_sources": [0, 0, 2, 2, 4, 4, 6, 6]},
        ["`value_residual_layers` holds 3", "`value_sources`[3] is 2"],
    ),
    ("stride of 0", {"depth_attention_stride": 0}, ["depth_attention_stride", "0"]),
    (
        "a mixing layer before the stride",
        {"value_residual": "depth_attention", "depth_attention_stride": 4, "value_residual_layers": [3, 5]},
        ["`value_residual_layers` is [3, 5]", "4 to 7"],
    ),
    (
        "depth attention over shared values",
        {"value_residual": "depth_attention", "value_sources": [0, 1, 1, 3, 4, 5, 6, 7]},
        ["`value_residual` is 'depth_attention'", "`value_sources` is [0, 1, 1", "`key_sources`"],
    ),
    (
        "a gate that is no gate",
        {"value_residual": "depth_attention", "depth_attention_init": float("nan")},
        ["depth_attention_init", "nan", "finite"],
    ),
    *(
        (
            f"tables in layers {layers}",
            {"value_embeddings": layers},
            [f"`value_embeddings` is {layers}", "0 to 7", "once"],
        )
        for layers in ([3, 8], [-1], [4, 2], [2, 2])
    ),
    (
        "a table in a layer without values",
        {"value_embeddings": [0, 3], "value_sources": [0, 0, 2, 2, 4, 4, 6, 6]},
        ["`value_embeddings` holds 3", "`value_sources`[3] is 2"],
    ),
    ("tables that start below 0", {"value_embeddings": [1], "value_embeddings_init": -0.1}, ["-0.1", "from 0 up"]),
    ("mixing layers of floats", {"value_residual_layers": [1.0]}, ["value_residual_layers", "[1.0]"]),
    ("negative NeuTRENO", {"neutreno_lambda": -0.1}, ["neutreno_lambda", "-0.1", "from 0 up"]),
    ("nan NeuTRENO", {"neutreno_lambda": float("nan")}, ["neutreno_lambda", "nan", "finite"]),
    ("NeuTRENO in words", {"neutreno_lambda": "0.4"}, ["neutreno_lambda", "'0.4'", "float"]),
    ("dwa in words", {"dwa": "yes"}, ["dwa", "'yes'", "bool"]),
    ("fractional period", {"dwa": True, "dwa_period": 1.5}, ["dwa_period", "1.5", "int"]),
    (
        "more depth blocks than layers",
        {"attention_residuals": True, "attention_residual_blocks": 9},
        ["`attention_residual_blocks` is 9", "1 to 8", "`num_hidden_layers`"],
    ),
    ("infinite gates", {"attention_residual_init": float("inf")}, ["attention_residual_init", "inf", "finite"]),
    ("heads over groups", {"num_attention_heads": 7, "num_key_value_heads": 3, "head_dim": 8}, ["(7)", "(3)"]),
    ("more groups than heads", {"num_key_value_heads": 8}, ["`num_attention_heads` (4)", "`num_key_value_heads` (8)"]),
    ("width over heads", {"hidden_size": 66}, ["`hidden_size` (66)", "`num_attention_heads` (4)", "`head_dim`"]),
    ("odd head width", {"head_dim": 15}, ["`head_dim` (15)", "odd"]),
    ("odd head width that follows", {"hidden_size": 60}, ["`head_dim` (15)", "odd"]),
    ("unknown activation", {"hidden_act": "swoosh"}, ["`hidden_act` 'swoosh'", "silu", "gelu"]),
    (
        "unknown rotary embedding",
        {"rope_parameters": {"rope_type": "foo", "rope_theta": 1e4}},
        ["`rope_parameters`", "'foo'", "default", "linear", "yarn", "llama3"],
    ),
    (
        "rotary embedding without its factor",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}},
        ["rope_parameters", "linear", "factor"],
    ),
    (
        "partial rotary embedding",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        ["`rope_parameters`", "partial_rotary_factor", "0.5", "1.0"],
    ),
    ("legacy partial rotary embedding", {"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "0.5", "1.0"]),
    ("rotary embedding by layer type", {"rope_parameters": NESTED_ROPE}, ["`rope_parameters`", "one set for all"]),
    ("rotary embedding a number", {"rope_parameters": 3}, ["rope_parameters", "3", "dict"]),
    ("too few layer types", {"layer_types": ["full_attention"] * 7}, ["layer_types", "7", "num_hidden_layers", "8"]),
    ("no layer types", {"layer_types": []}, ["layer_types", "0", "num_hidden_layers", "8"]),
    (
        "unknown layer type",
        {"layer_types": ["full_attention", "chunked_attention"] * 4, "sliding_window": 16},
        ["layer_types", "'chunked_attention'", "full_attention", "sliding_attention"],
    ),
    ("sliding layers without a window", {"layer_types": ALTERNATING}, ["`layer_types`", "`sliding_window` is None"]),
    ("a window of one token", {"sliding_window": 1}, ["`sliding_window` is 1", "2 or more"]),
    ("too many rope flags", {"no_rope_layers": [1] * 9}, ["`no_rope_layers` has 9", "`num_hidden_layers` is 8"]),
    ("rope flag of 2", {"no_rope_layers": [1, 2] * 4}, ["`no_rope_layers`[1] is 2", "1 ", "0 "]),
    *[(f"{name} {size}", {name: size}, [name, str(size), "positive"]) for name in SIZES for size in (0, -1)],
    *[(f"{name} fractional", {name: 2.5}, [name, "2.5", "int"]) for name in SIZES],
]


@pytest.mark.parametrize(
    ("config_fields", "words"), [row[1:] for row in MISUSES], ids=[row[0].replace(" ", "-") for row in MISUSES]
)
def test_misuse_is_refused_by_name(config_fields: dict[str, Any], words: list[str]) -> None:
    with refused(*words):
        small(**config_fields)


# Settings that fit, but do nothing

USELESS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "mixing layers without a mode": ({"value_residual_layers": [2]}, ["`value_residual_layers`=[2]", "'none'"]),
    "mode with all values shared": (
        {"value_residual": "learnable", "value_sources": [0] * 8},
        ["`value_residual`='learnable'", "no layer"],
    ),
    "mode with no mixing layers": (
        {"value_residual": "identity", "value_residual_layers": []},
        ["`value_residual`='identity'", "no layer"],
    ),
    "dilation without dwa": ({"dwa_dilation": 4}, ["`dwa_dilation`=4", "`dwa` is False"]),
    "period without dwa": ({"dwa_period": 5}, ["`dwa_period`=5", "`dwa` is False"]),
    "blocks of no residuals": (
        {"attention_residual_blocks": 4},
        ["`attention_residual_blocks`=4", "is False"],
    ),
    "start of no tables": (
        {"value_embeddings_init": 0.1},
        ["`value_embeddings_init`=0.1", "`value_embeddings` is None"],
    ),
    "stride without depth attention": (
        {"value_residual": "learnable", "depth_attention_stride": 2},
        ["`depth_attention_stride`=2", "'learnable'"],
    ),
    "period beyond the model": (
        {"dwa": True, "dwa_period": 9},
        ["`dwa`=True", "`dwa_period` (9)", "`num_hidden_layers` (8)"],
    ),
}


@pytest.mark.parametrize(("config_fields", "words"), USELESS.values(), ids=USELESS)
def test_setting_without_effect_warns(config_fields: dict[str, Any], words: list[str], warned: list[str]) -> None:
    small(**config_fields)
    assert len(warned) == 1
    assert [word for word in ["changes nothing", *words] if word not in warned[0]] == []


# Misspelt and renamed fields


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("depth_attention", "attention_residuals"),
        ("depth_attention_blocks", "attention_residual_blocks"),
        ("value_residual_stride", "depth_attention_stride"),
    ],
)
def test_field_of_an_unreleased_checkpoint_is_refused_with_its_new_name(old: str, new: str, tmp_path: Path) -> None:
    small().save_pretrained(tmp_path)
    change_json(tmp_path / "config.json", **{old: 1})
    with refused(f"`{old}` is called `{new}` now"):
        ResFormerConfig.from_pretrained(tmp_path)


def test_a_family_of_ones_own_gets_no_warning(tmp_path: Path, warned: list[str]) -> None:
    class Mine(ResFormerConfig):
        model_type = "mine"

    Mine(**SMALL).save_pretrained(tmp_path)
    assert Mine.from_pretrained(tmp_path).model_type == "mine"
    assert warned == []


@pytest.mark.parametrize(
    ("typo", "name"),
    [
        ("value_residul", "value_residual"),
        ("value_residual_inits", "value_residual_init"),
        ("value_source", "value_sources"),
        ("dwa_dilatation", "dwa_dilation"),
        ("num_kv_heads", "num_key_value_heads"),
        ("slidng_window", "sliding_window"),
    ],
)
def test_misspelt_field_is_pointed_out(typo: str, name: str, warned: list[str]) -> None:
    small(**{typo: None})
    assert [f"`{typo}`; did you mean `{name}`" in message for message in warned] == [True]


def test_field_misspelt_in_a_file_or_an_override_is_pointed_out(tmp_path: Path, warned: list[str]) -> None:
    small().save_pretrained(tmp_path)
    ResFormerConfig.from_pretrained(tmp_path, value_residul="identity")
    assert "`value_residul`; did you mean `value_residual`" in warned[-1]
    change_json(tmp_path / "config.json", value_source=[0] * 8)
    ResFormerConfig.from_pretrained(tmp_path)
    assert "`value_source`; did you mean `value_sources`" in warned[-1]


#: What published config.json files of these families hold, beside what `SMALL` and other files have.
PUBLISHED: dict[str, dict[str, Any]] = {
    "Llama 1": {
        "architectures": ["LlamaForCausalLM"],
        "max_sequence_length": 2048,
        "model_type": "llama",
        "torch_dtype": "float16",
        "transformers_version": "4.28.1",
    },
    "Llama 2": {
        "_name_or_path": "meta-llama/Llama-2-7b-hf",
        "model_type": "llama",
        "pretraining_tp": 1,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "temperature": 0.9,
        "do_sample": True,
        "quantization_config": {"bits": 4, "group_size": 128, "quant_method": "gptq"},
    },
    "Llama 3.1": {
        "eos_token_id": [128001, 128008, 128009],
        "head_dim": 16,
        "mlp_bias": False,
        "model_type": "llama",
        "rope_scaling": {
            "factor": 8.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "unsloth_fixed": True,
    },
    "Llama of Transformers 5": {
        "dtype": "bfloat16",
        "model_type": "llama",
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    },
    "SmolLM2": {
        "model_type": "llama",
        "is_llama_config": True,
        "rope_interleaved": False,
        "transformers.js_config": {"dtype": "q4", "kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}},
    },
    "SmolLM3": {
        "model_type": "smollm3",
        "layer_types": ["full_attention"] * 8,
        "max_window_layers": 28,
        "no_rope_layer_interval": 4,
        "no_rope_layers": [1, 1, 1, 0, 1, 1, 1, 0],
        "sliding_window": None,
        "use_sliding_window": False,
    },
    "Mistral": {"model_type": "mistral", "sliding_window": 4096, "rope_theta": 10000.0},
    "Qwen2.5": {
        "model_type": "qwen2",
        "max_window_layers": 28,
        "sliding_window": 131072,
        "use_mrope": False,
        "use_sliding_window": False,
    },
    "Qwen3": {"model_type": "qwen3", "attention_bias": False, "head_dim": 32, "rope_scaling": None},
}


@pytest.mark.parametrize("published", PUBLISHED.values(), ids=PUBLISHED)
def test_published_config_file_is_read_without_a_warning_where_it_means_the_same(
    published: dict[str, Any], tmp_path: Path, warned: list[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**SMALL, **published}))
    config = ResFormerConfig.from_pretrained(tmp_path)
    if published["model_type"] in ("llama", "mistral"):
        assert warned == []
    else:
        assert [f"{published['model_type']!r}" in text and "resformer convert" in text for text in warned] == [True]
        assert set(config.layer_types) == {"full_attention"}
    assert config.model_type == "resformer"


# Arguments, files and overrides


def test_callers_arguments_are_left_alone(tmp_path: Path) -> None:
    arguments: dict[str, Any] = {
        **SMALL,
        "rope_parameters": {"rope_type": "linear", "factor": 2.0},
        "layer_types": ["full_attention"] * 8,
        "no_rope_layers": [1] * 8,
        "value_residual": "learnable",
        "value_residual_init": [0, 1],
        "value_residual_layers": [2, 4],
        "value_sources": [0, 0, 2, 2, 4, 4, 6, 6],
        "key_sources": [0, 0, 2, 2, 4, 4, 6, 6],
        "id2label": {"0": "no", "1": "yes"},
    }
    before = copy.deepcopy(arguments)
    config = ResFormerConfig(**arguments)
    ResFormerForCausalLM(config)
    config.save_pretrained(tmp_path)
    assert arguments == before
    ResFormerConfig.from_dict(arguments, num_hidden_layers=8)
    assert arguments == before
    scaling = {"type": "linear", "factor": 2.0}
    small(rope_scaling=scaling, rope_theta=5e5)
    assert scaling == {"type": "linear", "factor": 2.0}
    arguments["value_sources"][7] = 7
    assert config.value_sources == before["value_sources"]
    config.value_residual_init[0] = 9.0  # type: ignore[index]
    assert small().value_residual_init == [0.5, 0.5]


def test_tuples_and_whole_numbers_are_welcome() -> None:
    config = small(value_residual="constant", value_residual_init=(2, 1), neutreno_lambda=1)
    assert config.value_residual_init == [2.0, 1.0]
    assert config.neutreno_lambda == 1.0
    assert isinstance(config.neutreno_lambda, float)


def test_llama_checkpoint_read_as_resformer_is_a_resformer(tmp_path: Path) -> None:
    llama = LlamaConfig(**SMALL, num_key_value_heads=2, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    llama.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "llama"
    config = ResFormerConfig.from_pretrained(tmp_path, value_residual="learnable", value_residual_init=[0, 1])
    assert config.model_type == "resformer"
    assert "model_type" not in vars(config)
    assert json.loads(config.to_json_string())["model_type"] == "resformer"
    assert (config.value_residual, config.value_residual_init) == ("learnable", [0.0, 1.0])
    names = {field.name for field in fields(LlamaConfig)} - {"transformers_version"}
    assert {name: getattr(config, name) for name in names} == {name: getattr(llama, name) for name in names}


def test_depth_can_be_overridden_while_reading(tmp_path: Path) -> None:
    small(sliding_window=16).save_pretrained(tmp_path)
    config = ResFormerConfig.from_pretrained(tmp_path, num_hidden_layers=3)
    assert (config.num_hidden_layers, config.layer_types) == (3, ["sliding_attention"] * 3)
    config, unused = ResFormerConfig.from_pretrained(
        tmp_path, num_hidden_layers=3, value_sources=[0] * 3, return_unused_kwargs=True, something_else=1
    )
    assert config.value_sources == [0] * 3
    assert unused == {"something_else": 1}
    config = AutoConfig.from_pretrained(tmp_path, num_hidden_layers=3, dwa=True)
    assert (type(config), config.num_hidden_layers, config.dwa) == (ResFormerConfig, 3, True)
    small(value_sources=[0] * 8).save_pretrained(tmp_path)
    with refused("`value_sources` has 8", "`num_hidden_layers` is 3"):
        ResFormerConfig.from_pretrained(tmp_path, num_hidden_layers=3)


# Values assigned later

LATE: dict[str, tuple[str, Any, list[str]]] = {
    "heads": ("num_attention_heads", 7, ["`num_attention_heads` (7)", "`num_key_value_heads` (4)"]),
    "groups": ("num_key_value_heads", 3, ["`num_attention_heads` (4)", "`num_key_value_heads` (3)"]),
    "depth": ("num_hidden_layers", 4, ["num_hidden_layers", "4", "8"]),
    "head width": ("head_dim", 15, ["`head_dim` (15)"]),
    "activation": ("hidden_act", "swoosh", ["`hidden_act` 'swoosh'"]),
    "values": ("value_sources", [0, 2, 2, 3, 4, 5, 6, 7], ["`value_sources`[1] is 2"]),
    "keys": ("key_sources", [0] * 7, ["`key_sources` has 7"]),
    "mixing layers": ("value_residual_layers", [8], ["`value_residual_layers` is [8]"]),
    "initial values": ("value_residual_init", [1.0], ["`value_residual_init` is [1.0]"]),
    "NeuTRENO": ("neutreno_lambda", -1.0, ["neutreno_lambda", "-1.0"]),
    "layer types": ("layer_types", ALTERNATING, ["`layer_types`", "`sliding_window` is None"]),
    "rope": ("rope_parameters", {"rope_type": "foo", "rope_theta": 1e4}, ["`rope_parameters`", "'foo'"]),
    "no groups": ("num_key_value_heads", None, ["num_key_value_heads", "None"]),
    "no head width": ("head_dim", None, ["head_dim", "None"]),
    "no layer types": ("layer_types", None, ["layer_types", "None"]),
}


@pytest.mark.parametrize("use", ["build", "save"])
@pytest.mark.parametrize(("name", "value", "words"), LATE.values(), ids=LATE)
def test_bad_late_value_is_refused_when_used(name: str, value: Any, words: list[str], use: str, tmp_path: Path) -> None:
    config = small()
    with refused(*words):
        setattr(config, name, value)
        if use == "build":
            ResFormerForCausalLM(config)
        else:
            config.save_pretrained(tmp_path)
    assert not (tmp_path / "config.json").exists()


def test_good_late_values_are_used(tmp_path: Path) -> None:
    config = small()
    config.value_residual = "constant"
    config.value_residual_init = [2, 1]
    config.value_sources = [0, 0, 2, 2, 4, 4, 6, 6]
    model = ResFormerForCausalLM(config)
    assert model.model.value_mixing_matrix()[3].tolist() == [2.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    config.save_pretrained(tmp_path)
    assert ResFormerConfig.from_pretrained(tmp_path).to_dict() == config.to_dict()


# Any list of sources at all


@st.composite
def valid_sources(draw: st.DrawFn) -> list[int]:
    owners: list[int] = []
    sources = []
    for layer in range(draw(st.integers(1, 12))):
        source = draw(st.sampled_from([*owners, layer]))
        if source == layer:
            owners.append(layer)
        sources.append(source)
    return sources


@st.composite
def invalid_sources(draw: st.DrawFn) -> tuple[list[int], int]:
    """A list with one wrong entry, and the number of layers it is meant for."""
    sources = draw(valid_sources())
    layers = len(sources)
    readers = [n for n, source in enumerate(sources) if source != n]
    kind = draw(st.sampled_from(["length", "later", "negative", *(["second hand"] if readers else [])]))
    if kind == "length":
        return draw(st.sampled_from([sources[:-1], [*sources, 0], sources * 2])), layers
    if kind == "second hand":
        return [*sources, draw(st.sampled_from(readers))], layers + 1
    n = draw(st.integers(0, layers - 1))
    sources[n] = draw(st.integers(n + 1, n + 20) if kind == "later" else st.integers(-20, -1))
    return sources, layers


@pytest.mark.parametrize("name", ["value_sources", "key_sources"])
@given(sources=valid_sources())
def test_valid_sources_are_accepted(name: str, sources: list[int]) -> None:
    config = small(**{"num_hidden_layers": len(sources), name: sources})
    assert {"value_sources": value_sources, "key_sources": key_sources}[name](config) == sources


@pytest.mark.parametrize("name", ["value_sources", "key_sources"])
@given(case=invalid_sources())
def test_invalid_sources_are_refused_by_name(name: str, case: tuple[list[int], int]) -> None:
    sources, num_layers = case
    with refused(f"`{name}`"):
        small(**{"num_hidden_layers": num_layers, name: sources})


@given(st.lists(st.integers(-2, 8), max_size=9))
def test_mixing_layers_are_accepted_exactly_if_ascending_and_in_range(layers: list[int]) -> None:
    if layers == sorted(set(layers)) and all(1 <= layer < 8 for layer in layers):
        assert mixing_layers(small(value_residual="learnable", value_residual_layers=layers)) == layers
    else:
        with refused("`value_residual_layers`"):
            small(value_residual="learnable", value_residual_layers=layers)
