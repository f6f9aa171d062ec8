"""Floating-point operations of a model, from its configuration."""

from typing import Any

from resformer.configuration import key_sources, value_sources
from resformer.modeling.modeling_resformer import KINDS


def forward_flops(config: Any, tokens: int) -> dict[str, float]:
    """Operations of a forward pass per token, in sequences of `tokens`; a multiplication and an addition are two.

    | part | per layer and token |
    |---|---|
    | `projections` | 2 x the weights of q, k, v, o and the MLP; a shared key or value has no k or v |
    | `attention` | 4 x query heads x head_dim x keys, the mean number of keys that a causal token sees |
    | `connections` | the sum of `flops` over `KINDS` |
    | `head` | once, 2 x hidden_size x vocab_size |

    Embeddings, norms, rotary embedding, softmax and activations are left out: they are the same for all methods.
    """
    layers, width = config.num_hidden_layers, config.hidden_size
    queries = config.num_attention_heads * config.head_dim
    values = config.num_key_value_heads * config.head_dim
    projected = sum(  # keys and values that layers compute themselves
        source == layer
        for sources in (key_sources(config), value_sources(config))
        for layer, source in enumerate(sources)
    )
    weights = layers * (2 * width * queries + 3 * width * config.intermediate_size) + projected * width * values

    keys = 0.0
    for layer_type in config.layer_types:
        window = tokens if layer_type == "full_attention" else min(tokens, config.sliding_window)
        keys += (window * (window + 1) / 2 + (tokens - window) * window) / tokens

    return {
        "projections": 2 * weights,
        "attention": 4 * queries * keys,
        "connections": sum(kind.flops(config) for kind in KINDS),
        "head": 2 * width * config.vocab_size,
    }


def training_flops(config: Any, tokens: int) -> float:
    """Operations of forward and backward pass per token: three times the forward pass."""
    return 3 * sum(forward_flops(config, tokens).values())
