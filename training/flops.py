"""Floating-point operations of a model, from its configuration."""

from typing import Any

import torch

from resformer.convert.connected_families import view
from resformer.convert.connections import meta_model
from resformer.errors import CheckpointError
from resformer.modeling.any_decoder import text_config
from resformer.modeling.connection import kinds_in
from resformer.training.optimizer import is_connection

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def forward_flops(config: Any, tokens: int) -> dict[str, float]:
    """Operations of a forward pass per token, in sequences of `tokens`; a multiplication and an addition are two.

    | part | per layer and token |
    |---|---|
    | `projections` | 2 x the weights of all matrices but the head; of experts a token passes its share |
    | `attention` | 2 x query heads x (numbers of a key and of a value) x the mean number of keys that a token sees |
    | `connections` | the sum of their `flops` |
    | `head` | once, 2 x hidden_size x vocab_size |

    Embeddings, norms, rotary embedding, softmax and activations are left out: they are the same for all methods. Of
    another family's decoder it is an estimate: each matrix is taken to be used once by each token.
    """
    text = text_config(config)
    try:
        seen = view(config)
    except (CheckpointError, ValueError):  # an estimate ends no run; such a decoder has no connections
        seen = None
    model: Any = meta_model(config)
    passed = _passed(model)
    apart = [each.weight for each in model.modules() if isinstance(each, torch.nn.Embedding)]  # of positions too
    apart += [head.weight for head in [model.get_output_embeddings()] if head is not None]
    weights = sum(
        passed[name]
        for name, parameter in model.named_parameters()
        if parameter.dim() > 1 and not is_connection(name) and not any(parameter is each for each in apart)
    )
    places = [] if seen is None else seen.places
    wide = getattr(text, "qk_head_dim", None)  # of queries and keys, where values have another
    queries = [
        each.query_heads * ((wide or each.values.head_dim) + each.values.head_dim) / 2 if each.values is not None else 0
        for each in places
    ]
    attention = 0.0
    kind_of_all = "sliding_attention" if getattr(text, "sliding_window", None) else "full_attention"  # Mistral
    kinds = getattr(text, "layer_types", None) or [kind_of_all] * len(queries)
    for kind, width in zip(kinds, queries, strict=seen is not None):
        window = min(tokens, getattr(text, "sliding_window", None) or tokens) if kind == "sliding_attention" else tokens
        attention += 4 * width * (window * (window + 1) / 2 + (tokens - window) * window) / tokens
    return {
        "projections": 2 * weights,
        "attention": attention,
        "connections": 0.0 if seen is None else sum(kind.flops(seen) for kind in kinds_in(seen)),
        "head": 2 * text.hidden_size * text.vocab_size,
    }


def active_parameters(config: Any) -> int:
    """Parameters that a token passes: of experts its share."""
    return round(sum(_passed(meta_model(config)).values()))


def _passed(model: Any) -> dict[str, float]:
    """Parameter -> how many of its numbers a token passes: of experts its share."""
    text = text_config(model.config)
    experts = next((n for name in _EXPERTS if (n := getattr(text, name, None))), 1)
    share = (getattr(text, "num_experts_per_tok", None) or experts) / experts if experts > 1 else 1
    return {name: each.numel() * (share if ".experts" in name else 1) for name, each in model.named_parameters()}


def training_flops(config: Any, tokens: int) -> float:
    """Operations of forward and backward pass per token: three times the forward pass."""
    return 3 * sum(forward_flops(config, tokens).values())
