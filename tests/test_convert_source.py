"""A source is what Transformers makes of its folder: the result is the same, or the source is refused by name."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from checkpoints import FAMILIES, family_model, save_checkpoint
from test_convert_retrofit import write_gguf
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    PreTrainedConfig,
)

from resformer import inspect, retrofit
from resformer.convert import CheckpointError, VerificationError, configurations, families, sameness, source

LONG = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [3.0] * 4, "rope_theta": 1e4}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
SLIDING = ["sliding_attention", "full_attention"] * 3

#: Family, what its config.json gets -> what is said of it. `None` takes a key out. What is accepted is in
#: test_convert_mutants.
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("mistral", {"layer_types": SLIDING, "head_dim": None}, "has no head_dim"),
    ("llama", {"rope_parameters": None, "rope_theta": "1e4"}, "rope_theta is '1e4'"),
    ("llama", {"rope_parameters": None, "default_theta": 5.0}, "default_theta is 5.0"),
    ("llama", {"layer_types": SLIDING, "sliding_window": 8}, "layer_types is"),
    ("qwen3", {"attention_chunk_size": 8}, "attention_chunk_size is 8"),
    ("llama", {"final_logit_softcapping": 3.0}, "final_logit_softcapping is 3.0"),
    ("llama", {"num_kv_shared_layers": 2}, "num_kv_shared_layers is 2"),
    ("llama", {"kv_sharing_modes": ["store", "reuse"] * 3}, "kv_sharing_modes is"),
    ("llama", {"attribute_map": {"rms_norm_eps": "initializer_range"}}, "attribute_map is"),
    ("llama", {"is_encoder_decoder": True}, "is_encoder_decoder is True"),
    ("llama", {"fusion_config": {"x": True}}, "fusion_config is"),
    ("llama", {"return_dict": False}, "return_dict is False"),
    ("ministral", {"layer_types": ["full_attention"] * 6, "sliding_window": "null"}, "sliding_window is None"),
    ("smollm3", {"no_rope_layers": None, "no_rope_layer_interval": 0}, "no_rope_layer_interval is 0"),
]


def change(folder: Path, fields: dict[str, Any]) -> None:
    content = json.loads((folder / "config.json").read_text()) | fields
    kept = {key: None if value == "null" else value for key, value in content.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept))


@pytest.mark.parametrize(("family", "fields", "said"), REFUSED, ids=lambda value: str(value)[:60])
def test_a_key_that_transformers_reads_is_refused_by_name(
    family: str, fields: dict[str, Any], said: str, tmp_path: Path
) -> None:
    save_checkpoint(tmp_path / "source", family)
    change(tmp_path / "source", fields)
    with pytest.raises(CheckpointError, match=rf"config\.json: .*{re.escape(said)}"):
        retrofit(tmp_path / "source", tmp_path / "out", dry_run=True)


@pytest.mark.parametrize("model_type", families.FAMILIES)
def test_every_field_that_a_family_reads_is_expressed_or_changes_no_number(model_type: str) -> None:
    """Of the fields that a new Transformers adds to a configuration this asks where they go."""
    config = CONFIG_MAPPING[model_type]()
    fields = config.__dataclass_fields__.keys() - PreTrainedConfig.__dataclass_fields__.keys()
    known = families.expressed_names(config).union(families.FAMILIES[model_type].training_only)
    assert not (fields - known) & configurations._read_names(type(config))


def test_every_family_is_of_transformers_own_table() -> None:
    classes = {MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[each]].__name__ for each in families.FAMILIES}
    assert classes == families._CLASSES.keys()
    assert {family.partition("-")[0] for family in FAMILIES} == families.FAMILIES.keys()


#: A field of the result that is wrong -> what is said of it.
WRONG = {
    "rope_parameters": ({"rope_type": "default", "rope_theta": 5.0}, "rotary frequencies"),
    "rms_norm_eps": (0.1, "epsilon of norms"),
    "hidden_act": ("gelu", "activation"),
    "sliding_window": (4, "layers of a cache"),
    "eos_token_id": (7, "special tokens: eos_token_id"),
    "no_rope_layers": ([0] * 6, "layers with a rotary embedding"),
    "num_key_value_heads": (4, "tensors: "),
}


@pytest.mark.parametrize("field", WRONG)
@pytest.mark.parametrize("options", [{"verify": "headers"}, {"dry_run": True}], ids=str)
def test_what_needs_no_weights_is_compared_always(
    field: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control: the configuration is translated wrongly."""
    save_checkpoint(tmp_path / "source", "mistral")
    value, said = WRONG[field]
    check = sameness.check_result

    def wrong(name: str, facts: Any, config: str, side_files: Any) -> None:
        check(name, facts, json.dumps({**json.loads(config), field: value}), side_files)

    monkeypatch.setattr("resformer.convert.to_folder.check_result", wrong)
    with pytest.raises(VerificationError, match=said):
        retrofit(tmp_path / "source", tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("rope", "change"), [(LONG, {"long_factor": [2.0] * 4}), (DYNAMIC, {"factor": 2.0})])
def test_frequencies_of_long_texts_are_compared(rope: dict[str, Any], change: dict[str, Any]) -> None:
    """Up to the trained length they are the same."""
    one, other = (sameness.facts(family_model("llama", rope_parameters=rope | more).config) for more in ({}, change))
    assert [each.name for each in sameness.differences(one, other)] == ["rotary frequencies at 512 tokens"]


def test_the_reference_of_the_logits_is_what_transformers_loads_from_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control: a wrong reading of the configuration, with which the result agrees."""
    save_checkpoint(tmp_path / "source", "mistral")

    def misread(*arguments: Any, **options: Any) -> tuple[PreTrainedConfig, tuple[str, ...]]:
        config, left_behind = configurations.read_config(*arguments, **options)
        config.rms_norm_eps = 0.5
        return config, left_behind

    monkeypatch.setattr(source, "read_config", misread)
    with pytest.raises(VerificationError, match="not exact"):
        retrofit(tmp_path / "source", tmp_path / "out")


def test_the_family_is_known_after_a_training_that_lost_the_record(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "source", "qwen2")
    retrofit(tmp_path / "source", tmp_path / "out", verify="headers")
    AutoModelForCausalLM.from_pretrained(tmp_path / "out").save_pretrained(tmp_path / "trained")
    assert retrofit(tmp_path / "trained", tmp_path / "more", "denseformer", verify="headers").family == "qwen2"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"head_count_kv": None}, r"has no llama\.attention\.head_count_kv"),
        ({"layer_norm_rms_eps": None}, r"has no llama\.attention\.layer_norm_rms_epsilon"),
        ({"logit_scale": 0.5}, r"llama\.logit_scale is 0\.5, and Transformers does not read it"),
        ({"rope_scaling_factor": 4.0}, r"rope\.scaling\.factor is 4\.0, and Transformers does not read"),
        ({"sliding_window": 8}, r"llama\.attention\.sliding_window is 8"),
        ({"rope_dimension_count": 4}, r"llama\.rope\.dimension_count is 4 of 8 channels|holds [\d,]+ numbers"),
        ({"expert_count": 0, "key_length": 8}, ""),
    ],
    ids=str,
)
def test_what_transformers_misreads_in_a_gguf_file_is_refused_by_name(
    changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    gguf = pytest.importorskip("gguf")
    write_gguf(gguf, family_model("llama", vocab_size=258), tmp_path / "model.gguf", **changes)
    if said:
        with pytest.raises(CheckpointError, match=said):
            inspect(tmp_path / "model.gguf")
    else:
        assert inspect(tmp_path / "model.gguf").family == "llama"
