"""The families that the decoder expresses exactly, and their way to `ResFormerConfig` and back.

A family is what one class of Transformers computes: Transformers' own table says which class a model_type has.
`backbone_config` reads a *built* configuration, in which Transformers has resolved legacy keys and defaults.
`family_config` is its reverse: it builds a family's configuration and accepts it if `backbone_config` gives the same
backbone again.
"""

from dataclasses import dataclass, field
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from resformer.configuration import ResFormerConfig
from resformer.configuration.methods import backbone_fields, without_connections
from resformer.errors import CheckpointError, one_line, quoted
from resformer.modeling.measured import MEASURED

#: Fields that bear one name and one meaning in every family.
_COMMON = (
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads hidden_act "
    "max_position_embeddings initializer_range rms_norm_eps use_cache pad_token_id bos_token_id eos_token_id "
    "tie_word_embeddings rope_parameters attention_dropout"
).split()


@dataclass(frozen=True)
class Family:
    """The fields of a configuration that the class reads beside the common ones and `head_dim`."""

    names: str = ""  # further fields that bear one name and one meaning here and in `ResFormerConfig`
    constants: dict[str, Any] = field(default_factory=dict)  # fields of `ResFormerConfig` that the class implies
    windows: bool = False  # has `layer_types`
    window_switch: bool = False  # has `use_sliding_window`
    training_only: tuple[str, ...] = ()  # has no effect but in training, and is left behind


#: Class of Transformers -> what it reads of its configuration beside the common fields.
_CLASSES: dict[str, Family] = {
    "LlamaForCausalLM": Family("attention_bias mlp_bias"),
    "MistralForCausalLM": Family("sliding_window"),
    "Qwen2ForCausalLM": Family(
        "", {"attention_bias": True, "attention_out_bias": False}, windows=True, window_switch=True
    ),
    "Qwen3ForCausalLM": Family("attention_bias", {"qk_norm": True}, windows=True, window_switch=True),
    "SmolLM3ForCausalLM": Family("attention_bias mlp_bias no_rope_layers", windows=True, window_switch=True),
    "MinistralForCausalLM": Family(windows=True),
    "CwmForCausalLM": Family("mlp_bias", windows=True),
    "SeedOssForCausalLM": Family("attention_bias attention_out_bias mlp_bias", training_only=("residual_dropout",)),
}
#: model_type -> family: those that Transformers runs with one of these classes.
FAMILIES = {
    model_type: family
    for name, family in _CLASSES.items()
    for model_type, each in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items(), key=lambda pair: pair[0] != "llama")
    if each == name
}


def expressed_names(config: PreTrainedConfig) -> set[str]:
    """The fields of a configuration that a `ResFormerConfig` is made from, switches of other fields included."""
    if isinstance(config, ResFormerConfig):
        return {*config.__dataclass_fields__, "base_model"}
    family = FAMILIES[config.model_type]
    names = {*_COMMON, *family.names.split(), "head_dim"}
    return names | ({"layer_types", "sliding_window", "use_sliding_window"} if family.windows else set())


def backbone_config(config: PreTrainedConfig) -> ResFormerConfig:
    """The `ResFormerConfig` of the same backbone, without connections."""
    family = FAMILIES[supported(config.model_type)]
    fields = {name: getattr(config, name) for name in (*_COMMON, *family.names.split())} | family.constants
    fields["head_dim"] = getattr(config, "head_dim", None)
    if "no_rope_layers" in fields:
        fields["no_rope_layers"] = fields["no_rope_layers"][: config.num_hidden_layers]
    if family.windows:
        sliding = "sliding_attention" in config.layer_types
        fields["layer_types"] = config.layer_types
        fields["sliding_window"] = config.sliding_window if sliding else None
    try:
        return ResFormerConfig(**fields)
    except Exception as error:  # any of the validators'
        raise CheckpointError(f"Its configuration is not valid: {one_line(error)}") from error


def supported(model_type: object) -> str:
    """`model_type`, if it is in the table."""
    if isinstance(model_type, str) and model_type in FAMILIES:
        return model_type
    if isinstance(model_type, str) and model_type in MEASURED - MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys():
        reason = "AutoModelForCausalLM does not load it; `resformer.connect` adds connections to the loaded model"
    elif not isinstance(model_type, str) or model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        reason = "Transformers has no causal language model of it, and code of a checkpoint is not run"
    else:
        reason = "connections in its decoder are not known to work: not tried, or failed"
    raise CheckpointError(
        f"Checkpoints of model_type {quoted(model_type)} cannot be converted: {reason}. docs/methods.md has the table "
        f"of those that can; the decoder of this package expresses {', '.join(FAMILIES)}."
    )


def family_config(config: ResFormerConfig, preferred: str | None = None) -> PreTrainedConfig:
    """The configuration of a family, if one fits the `preferred`, that means what `config` does without connections."""
    backbone = without_connections(config)
    wanted = backbone_fields(backbone)
    for model_type, family in sorted(FAMILIES.items(), key=lambda pair: pair[0] != preferred):
        fields = {name: getattr(backbone, name) for name in (*_COMMON, *family.names.split())}
        default = backbone.hidden_size / backbone.num_attention_heads
        if hasattr(CONFIG_MAPPING[model_type], "head_dim") or backbone.head_dim != default:
            fields["head_dim"] = backbone.head_dim
        if family.windows:
            fields |= {"layer_types": backbone.layer_types, "sliding_window": backbone.sliding_window}
        if family.window_switch:
            fields["use_sliding_window"] = backbone.sliding_window is not None
        try:
            candidate = CONFIG_MAPPING[model_type](**fields)
            again = backbone_config(candidate)
        except Exception:  # its validators' any: then it is not this family
            continue
        if backbone_fields(again) == wanted:
            return candidate
    raise CheckpointError(
        f"No family has this backbone: qk_norm={backbone.qk_norm}, attention_bias={backbone.attention_bias}, "
        f"attention_out_bias={backbone.attention_out_bias}, layer_types={sorted(set(backbone.layer_types or ()))}."
    )
