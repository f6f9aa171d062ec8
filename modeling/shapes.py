"""Names and shapes of a model's tensors, without the model: on the meta device one of 80 layers takes 0.4 s."""

import torch
from transformers.activations import ACT2FN

from resformer.configuration import ResFormerConfig
from resformer.modeling.wiring import connection_modules

__all__ = ["parameter_shapes"]


def parameter_shapes(config: ResFormerConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor in the state dict of `ResFormerForCausalLM`, both ends of a tie among them."""
    width, inner = config.hidden_size, config.intermediate_size
    queries, keys = (heads * config.head_dim for heads in (config.num_attention_heads, config.num_key_value_heads))
    bias = config.attention_bias
    out_bias = bias if config.attention_out_bias is None else config.attention_out_bias
    activation = ACT2FN[config.hidden_act]
    embeddings = (config.vocab_size, width)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": embeddings}
    for layer in range(config.num_hidden_layers):
        makes_keys, makes_values = (
            sources[layer] == layer for sources in (config.all_key_sources, config.all_value_sources)
        )
        # Module -> outputs, inputs, whether it has a bias.
        linear = {
            "self_attn.q_proj": (queries, width, bias),
            **({"self_attn.k_proj": (keys, width, bias)} if makes_keys else {}),
            **({"self_attn.v_proj": (keys, width, bias)} if makes_values else {}),
            "self_attn.o_proj": (width, queries, out_bias),
            "mlp.gate_proj": (inner, width, config.mlp_bias),
            "mlp.up_proj": (inner, width, config.mlp_bias),
            "mlp.down_proj": (width, inner, config.mlp_bias),
        }
        within: dict[str, tuple[int, ...]] = {}
        for name, (outputs, inputs, has_bias) in linear.items():
            within |= {f"{name}.weight": (outputs, inputs), **({f"{name}.bias": (outputs,)} if has_bias else {})}
        if config.qk_norm:
            within |= {f"self_attn.{kind}_norm.weight": (config.head_dim,) for kind in ("qk" if makes_keys else "q")}
        within |= {f"mlp.act_fn.{name}": tuple(tensor.shape) for name, tensor in activation.state_dict().items()}
        within |= {f"{name}_layernorm.weight": (width,) for name in ("input", "post_attention")}
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in within.items()}
    with torch.device("meta"):
        for prefix, module in connection_modules(config).items():
            shapes |= {f"{prefix}.{name}": tuple(tensor.shape) for name, tensor in module.named_parameters()}
    return shapes | {"model.norm.weight": (width,), "lm_head.weight": embeddings}
