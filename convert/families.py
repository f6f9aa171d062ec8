"""The families that the decoder expresses exactly: from a Transformers configuration to `ResFormerConfig` fields.

A table, not branches: the next family is one more entry. Each function reads the *built* configuration, in which
Transformers has resolved legacy keys and defaults.
"""

from collections.abc import Callable
from typing import Any

from transformers import PreTrainedConfig

from resformer.convert.errors import CheckpointError

__all__ = ["FAMILIES", "backbone_fields"]

#: Fields that bear one name and one meaning in every family.
_COMMON = (
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads hidden_act "
    "max_position_embeddings initializer_range rms_norm_eps use_cache pad_token_id bos_token_id eos_token_id "
    "tie_word_embeddings rope_parameters attention_dropout"
).split()


def _common(config: PreTrainedConfig) -> dict[str, Any]:
    fields = {name: getattr(config, name) for name in _COMMON}
    return {**fields, "head_dim": getattr(config, "head_dim", None)}


def _llama(config: Any) -> dict[str, Any]:
    return {"attention_bias": config.attention_bias, "mlp_bias": config.mlp_bias}


def _mistral(config: Any) -> dict[str, Any]:
    return {"sliding_window": config.sliding_window}


def _qwen2(config: Any) -> dict[str, Any]:
    return {"attention_bias": True, "attention_out_bias": False, **_windows(config)}


def _qwen3(config: Any) -> dict[str, Any]:
    return {"attention_bias": config.attention_bias, "qk_norm": True, **_windows(config)}


def _smollm3(config: Any) -> dict[str, Any]:
    return {
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "no_rope_layers": config.no_rope_layers[: config.num_hidden_layers],
        **_windows(config),
    }


def _windows(config: Any) -> dict[str, Any]:
    sliding = "sliding_attention" in config.layer_types
    return {"layer_types": config.layer_types, "sliding_window": config.sliding_window if sliding else None}


#: model_type -> what its configuration adds to the common fields.
FAMILIES: dict[str, Callable[[Any], dict[str, Any]]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "smollm3": _smollm3,
}


def backbone_fields(config: PreTrainedConfig) -> dict[str, Any]:
    """The `ResFormerConfig` fields that make the same backbone.

    Raises:
        CheckpointError: the family is not one that the decoder expresses exactly.
    """
    if config.model_type not in FAMILIES:
        raise CheckpointError(
            f"Checkpoints of model_type {config.model_type!r} cannot be converted: the decoder expresses "
            f"{', '.join(FAMILIES)} exactly, and no other family."
        )
    return {**_common(config), **FAMILIES[config.model_type](config)}
