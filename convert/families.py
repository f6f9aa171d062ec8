"""The families that the decoder expresses exactly, and their way to `ResFormerConfig` and back.

A table, not branches: the next family is one more entry. `backbone_config` reads a *built* configuration, in which
Transformers has resolved legacy keys and defaults. `family_config` is its reverse: it builds a family's configuration
and accepts it if `backbone_config` gives the same backbone again.
"""

from dataclasses import dataclass, field
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

from resformer.configuration import ResFormerConfig
from resformer.configuration.methods import backbone_fields, without_connections
from resformer.errors import CheckpointError, one_line, quoted

#: Fields that bear one name and one meaning in every family.
_COMMON = (
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads hidden_act "
    "max_position_embeddings initializer_range rms_norm_eps use_cache pad_token_id bos_token_id eos_token_id "
    "tie_word_embeddings rope_parameters attention_dropout"
).split()


@dataclass(frozen=True)
class Family:
    """The fields of a family's configuration beside the common ones and `head_dim`."""

    names: str = ""  # further fields that bear one name and one meaning here and in `ResFormerConfig`
    constants: dict[str, Any] = field(default_factory=dict)  # fields of `ResFormerConfig` that the family implies
    windows: bool = False  # has `layer_types`
    window_switch: bool = False  # has `use_sliding_window`
    training_only: tuple[str, ...] = ()  # has no effect but in training, and is left behind


#: model_type -> what its configuration adds to the common fields.
FAMILIES: dict[str, Family] = {
    "llama": Family("attention_bias mlp_bias"),
    "mistral": Family("sliding_window"),
    "qwen2": Family("", {"attention_bias": True, "attention_out_bias": False}, windows=True, window_switch=True),
    "qwen3": Family("attention_bias", {"qk_norm": True}, windows=True, window_switch=True),
    "smollm3": Family("attention_bias mlp_bias no_rope_layers", windows=True, window_switch=True),
    "ministral": Family(windows=True),
    "cwm": Family("mlp_bias", windows=True),
    "internlm3": Family("attention_bias mlp_bias"),
    "seed_oss": Family("attention_bias attention_out_bias mlp_bias", training_only=("residual_dropout",)),
    "iquestcoder": Family("attention_bias mlp_bias"),
}

#: A way out where a family differs only in the names and layout of its tensors.
_LLAMAFIED = 'use a checkpoint whose tensors were renamed and split as Llama\'s ("llamafied")'
#: Why others are not in the table, where the reason is short, and the nearest way.
_REASONS = {
    "gemma": "its norms add 1 to their weights and its embeddings are scaled",
    "gemma2": "it soft-caps its logits, and has norms after its blocks",
    "gemma3_text": "it norms after the blocks",
    "olmo": "its norms have no weights",
    "granite": "it scales embeddings, residuals, attention and logits",
    "phi3": f"it fuses q, k and v, and gate and up; for Phi-4, {_LLAMAFIED}, such as unsloth/phi-4",
    "stablelm": "its norms are LayerNorms and its rotary embedding is partial",
    "glm4": "it norms after attention and MLP, and its rotary embedding is partial",
    "exaone4": "it norms after attention and MLP",
    "ministral3": "its attention scales queries by position",
    "gpt_oss": "it is a mixture of experts with attention sinks",
    "gpt2": "its positions are learned embeddings",
    **dict.fromkeys(("arcee", "nemotron"), "its MLP has no gate"),
    **dict.fromkeys(("phi", "cohere", "cohere2"), "its blocks run attention and MLP side by side"),
    **dict.fromkeys(("olmo2", "olmo3"), "it norms after attention and MLP, and over all heads' queries at once"),
    **dict.fromkeys("baichuan exaone internlm internlm2 qwen".split(), f"it needs code of its own; {_LLAMAFIED}"),
    **dict.fromkeys(
        "mixtral qwen2_moe qwen3_moe granitemoe olmoe phimoe deepseek_v2 deepseek_v3 dots1 mellum".split(),
        "it is a mixture of experts",
    ),
}


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
        raise CheckpointError(f"The source's config.json is not valid: {one_line(error)}") from error


def resformer_config(config: PreTrainedConfig) -> ResFormerConfig:
    """`config` itself, if it is ResFormer's, else that of the same backbone without connections."""
    return config if isinstance(config, ResFormerConfig) else backbone_config(config)


def supported(model_type: object) -> str:
    """`model_type`, if it is in the table."""
    if isinstance(model_type, str) and model_type in FAMILIES:
        return model_type
    if model_type == "resformer":
        raise CheckpointError(
            "This is a ResFormer checkpoint already: `resformer revert` makes it plain again, if nothing was learned."
        )
    reason = f" ({_REASONS[model_type]})" if isinstance(model_type, str) and model_type in _REASONS else ""
    raise CheckpointError(
        f"Checkpoints of model_type {quoted(model_type)} cannot be converted{reason}: the decoder expresses "
        f"{', '.join(FAMILIES)} exactly, and no other family."
    )


def family_config(config: ResFormerConfig, preferred: str | None = None) -> PreTrainedConfig:
    """The configuration of a family, if one fits the `preferred`, that means what `config` does without connections."""
    backbone = without_connections(config)
    wanted = backbone_fields(backbone)
    for model_type in sorted(FAMILIES, key=lambda name: name != preferred):
        family = FAMILIES[model_type]
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
