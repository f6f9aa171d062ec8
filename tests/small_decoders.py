"""A small model of each decoder that the installed Transformers has, made from its configuration's own defaults.

Models that see images among them, with a small tower.
"""

import copy
import inspect
import re
import sys
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

#: Those of another name for one of them, and ours.
_NAMES = {**MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, **MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}
TYPES = [name for name in _NAMES if not name.startswith("resformer")]
VOCABULARY = 99
LAYERS = 4
#: Names of sizes in configurations -> what they are here.
_SIZES: dict[int, str] = {
    VOCABULARY: "vocab_size vocab_size_per_layer_input unpadded_vocab_size",
    64: "hidden_size out_hidden_size text_hidden_size max_position_embeddings n_embd d_model embed_dim hidden_dim "
    "lru_width word_embed_proj_dim n_positions n_ctx max_seq_len mamba_d_ssm embedding_size rnn_hidden_size emb_dim "
    "index_topk projector_hidden_size moe_hidden_size",
    48: "intermediate_size n_inner d_ff ffn_dim ffn_hidden_size decoder_ffn_dim encoder_ffn_dim block_ff_dim "
    "block_ffn_hidden_size intermediate_size_mlp dense_intermediate_size",
    32: "moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size shared_intermediate_size "
    "moe_shared_expert_intermediate_size shared_experts_intermediate_size",
    24: "q_lora_rank",
    16: "kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim head_dim global_head_dim attention_head_dim "
    "linear_key_head_dim linear_value_head_dim linear_head_dim mamba_d_head mamba_head_dim d_kv index_head_dim "
    "swa_head_dim",
    8: "sliding_window sliding_window_size mamba_d_state ssm_state_size state_size chunk_size attention_window "
    "hidden_size_per_layer_input laurel_rank rotary_dim ple_hidden_dim attention_chunk_size mamba_chunk_size",
    4: "num_hidden_layers n_layer num_layers n_layers decoder_layers num_attention_heads n_head num_heads n_heads "
    "decoder_attention_heads encoder_layers encoder_attention_heads num_experts num_local_experts n_routed_experts "
    "moe_num_experts linear_num_value_heads mamba_n_heads mamba_num_heads mamba_dt_rank linear_conv_kernel_dim "
    "num_blocks depth layers attention_heads linear_num_heads",
    2: "num_key_value_heads num_kv_heads num_experts_per_tok moe_k moe_topk linear_num_key_heads "
    "altup_num_inputs index_n_heads multi_query_group_num num_experts_per_token",
    1: "n_group topk_group n_shared_experts first_k_dense_replace mamba_n_groups n_groups moe_num_shared_experts "
    "zero_expert_num num_hidden_groups num_kv_shared_layers",
    0: "pad_token_id",
}
SIZES = {name: size for size, names in _SIZES.items() for name in names.split()}


def _of_images(section: list[int]) -> dict[str, Any]:
    """A rotary embedding of time, height and width, of so many channels each."""
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": section}}


#: What differs for one family.
OWN: dict[str, dict[str, Any]] = {
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 16, "attn_layer_indices": [1, 3]},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "granitemoehybrid": {"mamba_n_heads": 8, "mamba_d_head": 16, "layer_types": ["mamba", "attention"] * 2},
    **{each: {"head_dim": 16} for each in ("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral")},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    **{each: {"layer_types": ["conv", "full_attention"] * 2} for each in ("lfm2_moe", "lfm3", "lfm3_vl")},
    "nanochat_2026": {"smear": True, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "nemotron_h": {"layers_block_type": ["mamba", "attention"] * 2},
    "ernie4_5_vl_moe": {"moe_intermediate_size": [32, 32]},
    **{each: _of_images([4, 2, 2]) for each in "qwen2_vl qwen2_5_vl qwen2_5_omni_thinker paddleocr_vl".split()},
    **{each: _of_images([4, 2, 2]) for each in "cosmos3_edge glm4v glm46v glm_ocr glmga".split()},
    "glm4v_moe": _of_images([2, 1, 1]),
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "bailing_hybrid": {"n_group": 1, "topk_group": 1},
    **{
        each: {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}}
        for each in ("cohere_compass", "cohere_compass_text")
    },
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0}},
    "dory": {"n_input_layers": 1, "n_recurrent_layers": 2, "n_output_layers": 1},
    "dots3_note_text": {
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 24,
        "swa_kv_lora_rank": 16,
        "swa_head_dim": 32,
        "swa_qk_nope_head_dim": 16,
        "swa_qk_rope_head_dim": 16,
        "swa_v_head_dim": 16,
    },
    "glm5_next": {"qk_rope_head_dim": 0},
    **{each: {"n_layers_per_attn_res_block": 2} for each in ("inkling2", "inkling2_text")},
    **{
        each: {"n_layers_per_attn_res_block": 2, "loop_layer_index_start": 2, "loop_layer_index_end": 4}
        for each in ("inkling2_loop", "inkling2_loop_text")
    },
    "mimo_v2_flash": {"head_dim": 24},
    "mistral4": {"head_dim": 32},
    **{
        each: {
            "indexer_n_heads": 2,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 16,
            "indexer_budget": 8,
            "indexer_compress_ratio": 4,
        }
        for each in ("qwen4_exp", "qwen4_exp_text")
    },
    "lara_mini": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "step3p7": {"sliding_window": 8},
    "xlstm": {"qk_dim_factor": 1.0, "chunk_size": 64},
    "zamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "zaya": {"num_experts_per_tok": 1},
}


def small_config(model_type: str, **own: Any) -> Any:
    """The configuration, with `own` fields of the text model; raises whatever its class raises."""
    config_class = CONFIG_MAPPING[model_type]
    default = config_class()
    text = default.get_text_config(decoder=True)
    stated = vars(text)
    fields = _sizes(text)
    if "num_key_value_heads" in stated:
        fields["num_key_value_heads"] = 4 if "kv_lora_rank" in stated else 2
    for name in ("layer_types", "layers_block_type", "mlp_layer_types", "attention_types"):
        if isinstance(stated.get(name), (list, tuple)) and isinstance(stated[name][0], str):
            kinds = list(dict.fromkeys(stated[name]))[:LAYERS]
            fields[name] = (kinds * LAYERS)[: own.get("num_hidden_layers", LAYERS)]
    # Chance would make two passes differ.
    fields |= {
        name: 0.0 for name, value in stated.items() if re.search("drop|jitter", name) and isinstance(value, float)
    }
    fields |= OWN.get(model_type, {}) | own
    small = type(text)(**fields)
    if text is default:
        return small
    parts = {name: part for name in default.sub_configs if (part := getattr(default, name, None)) is not None}
    name = next((name for name, part in parts.items() if part is text), None)
    if name is None:  # an encoder and decoder in one
        return small
    towers = {other: type(part)(**_sizes(part)) for other, part in parts.items() if other != name}
    return config_class(**_sizes(default), **{name: small}, **towers)


def _sizes(config: Any) -> dict[str, Any]:
    return {name: size for name, size in SIZES.items() if vars(config).get(name) is not None}


#: Those whose decoders are given images too -> what differs: their parts must fit each other.
SEEING: dict[str, dict[str, Any]] = {
    **{name: {} for name in "llava qwen2_5_vl qwen3_5 qwen3_vl".split()},
    "gemma3": {"mm_tokens_per_image": 4},
    "idefics3": {"patch_size": 16, "image_size": 64},
    "internvl": {"patch_size": [14, 14], "image_size": [28, 28]},
    "mistral3": {"image_size": 56, "head_dim": 16},
    "paligemma": {"projection_dim": 64},
    "smolvlm": {"patch_size": 16, "image_size": 64},
}


def seeing_model(model_type: str) -> tuple[PreTrainedModel, dict[str, torch.Tensor]]:
    """A model that sees images, and what it reads: a few tokens around an image."""
    config = small_config(model_type)
    vision, own = config.vision_config, SEEING[model_type]
    own = {"patch_size": 14, "image_size": 28, "depth": 2, "deepstack_visual_indexes": [0], **own}
    for part in (config, vision):
        for name, value in own.items():
            if hasattr(part, name):
                setattr(part, name, value)
    for name in ("image_token_id", "image_token_index"):
        if hasattr(config, name):
            setattr(config, name, VOCABULARY - 1)
    torch.manual_seed(0)
    model = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)](config).eval()
    size = max(size) if isinstance(size := getattr(vision, "image_size", 0), list) else size
    image: dict[str, torch.Tensor] = {"pixel_values": torch.randn(1, 3, size, size)}
    if model_type in ("idefics3", "smolvlm"):
        image["pixel_values"] = image["pixel_values"][None]  # several images a row
    if model_type == "mistral3":
        image["image_sizes"] = torch.tensor([[size, size]])
    if model_type.startswith("qwen"):
        patches = torch.randn(16, vision.in_channels * vision.temporal_patch_size * vision.patch_size**2)
        image = {"pixel_values": patches, "image_grid_thw": torch.tensor([[1, 4, 4]])}
    with torch.no_grad():
        seen = model.model.get_image_features(**image).pooler_output
    tokens = sum(each.reshape(-1, each.shape[-1]).shape[0] for each in seen)
    ids = torch.tensor([[5, 6, *[VOCABULARY - 1] * tokens, 7, 8]])
    kinds = "mm_token_type_ids" if model_type.startswith("qwen") else "token_type_ids"
    marked = {kinds: (ids == VOCABULARY - 1).long()} if kinds in inspect.signature(model.forward).parameters else {}
    return model, {"input_ids": ids, **image, **marked}


def small_decoder(model_type: str, most_parameters: int = 40_000_000, **own: Any) -> PreTrainedModel:
    """A model in eval mode. Raises `ValueError` with the reason if it cannot be made so small."""
    config = small_config(model_type, **own)
    model_class, config = class_and_config(config)
    in_short_chunks(model_class)
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in model_class(copy.deepcopy(config)).parameters())
    if size > most_parameters:
        raise ValueError(f"has {size:,} parameters at the least")
    torch.manual_seed(0)
    return model_class(config).eval()


def default_decoder(model_type: str) -> PreTrainedModel:
    """A model of the sizes that Transformers gives the type by default, without memory."""
    model_class, config = class_and_config(CONFIG_MAPPING[model_type]())
    with torch.device("meta"), no_init_weights():
        return model_class(config).eval()


def class_and_config(config: Any) -> tuple[Any, Any]:
    """The class of the model, and the configuration that it takes: of the text alone, as the Auto class does."""
    causal = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    model_class = (MODEL_FOR_CAUSAL_LM_MAPPING if causal else MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING)[type(config)]
    of_text = model_class.config_class is config.sub_configs.get("text_config")
    return model_class, config.get_text_config() if of_text else config


def in_short_chunks(model_class: type) -> None:
    """Delta rules pad what they read to chunks of 64, and loop over each: minutes of autograd for a few tokens."""
    for each in vars(sys.modules[model_class.__module__]).values():
        function: Any = inspect.unwrap(each) if callable(each) else each
        if inspect.isfunction(function) and "chunk_size" in inspect.signature(function).parameters:
            function.__defaults__ = tuple(8 if value == 64 else value for value in function.__defaults__ or ())
