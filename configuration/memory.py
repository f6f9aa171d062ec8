"""The size of a key/value cache, from a configuration alone.

A layer that reads another's keys or values stores none of its own, so a cached token takes

    (distinct key sources + distinct value sources) x key/value heads x head_dim

numbers: (N + 1) / 2N of the full cache for SVFormer (arXiv 2410.17897), a half for CLA2 (arXiv 2405.12981).
"""

from typing import Any

import torch

from resformer.configuration.methods import METHODS, method_fields
from resformer.configuration.sources import key_sources, value_sources


def cache_bytes_per_token(config: Any, dtype: Any = "bfloat16") -> int:
    """Bytes that one token of one sequence takes in a cache, while it is inside every window.

    Args:
        config: a `ResFormerConfig`, or that of another decoder in which every layer caches `num_key_value_heads` heads
            (`LlamaConfig`, ...). For other decoders use `resformer inspect`.
        dtype: dtype of the cache, a name such as `"bfloat16"` or a `torch.dtype`.

    Raises:
        ValueError: `dtype` is no floating dtype.

    ```python
    >>> from resformer.configuration import ResFormerConfig, cache_bytes_per_token

    >>> shape = {"num_hidden_layers": 24, "hidden_size": 1024, "num_attention_heads": 16}
    >>> cache_bytes_per_token(ResFormerConfig(**shape))
    98304
    >>> cache_bytes_per_token(ResFormerConfig.for_method("svformer", **shape))
    51200
    ```"""
    stored = [*{*key_sources(config)}, *{*value_sources(config)}]
    if places := getattr(config, "places", None):  # of another family, whose layers of Mamba, for one, store no rows
        stored = [layer for layer in stored if places[layer].values]
    return _bytes_per_row(config, dtype) * len(stored)


def cache_bytes(config: Any, tokens: int, batch_size: int = 1, dtype: Any = "bfloat16") -> int:
    """Bytes that `batch_size` sequences of `tokens` tokens take in a cache, without the slack it grows by.

    Layers of type `"sliding_attention"` hold the last `sliding_window` - 1 tokens, which is all that a next one sees.

    Args and errors: as of `cache_bytes_per_token`.
    """
    held = [_tokens_held(config, layer, tokens) for layer in range(config.num_hidden_layers)]
    rows = sum(held[layer] for sources in (key_sources, value_sources) for layer in set(sources(config)))
    return _bytes_per_row(config, dtype) * rows * batch_size


def cache_bytes_by_method(config: Any, dtype: Any = "bfloat16") -> dict[str, int]:
    """Bytes per token, as of `cache_bytes_per_token`, of a model of this shape for each of the named `METHODS`."""
    layers = config.num_hidden_layers
    by_method = {}
    for method in METHODS:
        fields = method_fields(method, layers)
        stored = sum(len(set(fields.get(f"{kind}_sources") or range(layers))) for kind in ("key", "value"))
        by_method[method] = _bytes_per_row(config, dtype) * stored
    return by_method


def _bytes_per_row(config: Any, dtype: Any) -> int:
    """Bytes of one token's keys, or values, in one layer."""
    resolved = dtype if isinstance(dtype, torch.dtype) else getattr(torch, str(dtype).removeprefix("torch."), None)
    if not (isinstance(resolved, torch.dtype) and resolved.is_floating_point):
        raise ValueError(
            f"`dtype` is {dtype!r}: expected a floating dtype, such as bfloat16, float32 or float8_e4m3fn."
        )
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return heads * head_dim * resolved.itemsize


def _tokens_held(config: Any, layer: int, tokens: int) -> int:
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if window is None or (kinds is not None and kinds[layer] != "sliding_attention"):
        return tokens
    return min(tokens, window - 1)
