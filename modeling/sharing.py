r"""Shared keys and values: SVFormer (arXiv 2410.17897), CLA (arXiv 2405.12981), FusedKV-Lite (arXiv 2512.03870).

    layer n attends with the keys of layer key_sources[n] to the values of layer value_sources[n]

A reader takes its source's tensors as they are after the cache's update, past tokens included, and stores nothing of
its own: a cache holds (distinct key sources + distinct value sources) / 2N of the full one.
"""

import torch
from transformers.cache_utils import Cache

from resformer.modeling.growing_cache import GrowingCache

__all__ = ["update_cache"]


def update_cache(
    cache: Cache | None,
    layer_idx: int,
    own: tuple[torch.Tensor | None, torch.Tensor | None],
    shared: tuple[torch.Tensor | None, torch.Tensor | None],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the keys and the values that layer `layer_idx` attends to, having stored its own ones.

    Args:
        cache: a `GrowingCache`, or any of Transformers' caches; `None` stores nothing.
        own: keys and values that the layer has made of the current tokens, `(batch, heads, tokens, head_dim)`, or
            `None` where it reads another layer's.
        shared: what it reads instead, past tokens included, or `None`.
    """
    own_keys, own_values = own
    shared_keys, shared_values = shared
    if cache is not None:
        if own_keys is not None and own_values is not None:
            return cache.update(own_keys, own_values, layer_idx)
        if isinstance(cache, GrowingCache):
            if own_keys is not None or own_values is not None:
                own_keys, own_values = cache.update(own_keys, own_values, layer_idx)
        # Transformers' caches hold two tensors a layer and tell their length by the keys, so the one tensor of a
        # half-sharing layer goes there, beside one of width 0.
        elif own_keys is not None:
            own_keys, _ = cache.update(own_keys, _placeholder(cache, layer_idx, own_keys), layer_idx)
        elif own_values is not None:
            own_values, _ = cache.update(own_values, _placeholder(cache, layer_idx, own_values), layer_idx)
    return (
        shared_keys if own_keys is None else own_keys,
        shared_values if own_values is None else own_values,
    )


def _placeholder(cache: Cache, layer_idx: int, stored: torch.Tensor) -> torch.Tensor:
    """Takes the second place in a cache layer: of width 0, unless an exporter has allocated that place beforehand."""
    width = 0
    if layer_idx < len(cache.layers):
        layer = cache.layers[layer_idx]
        if layer.is_initialized and layer.values is not None:
            width = layer.values.shape[-1]
    return stored.new_zeros((*stored.shape[:-1], width))
