r"""Shared keys and values: SVFormer (arXiv 2410.17897), CLA (arXiv 2405.12981), FusedKV-Lite (arXiv 2512.03870).

    layer n attends with the keys of layer key_sources[n] to the values of layer value_sources[n]

A reader uses its source's tensors after the cache's update, past tokens included, and stores none: a cache holds
(distinct key sources + distinct value sources) / 2N of the full one.
"""

from typing import Any

import torch
from transformers.cache_utils import BaseQuantizedLayer, Cache

from resformer.configuration import ResFormerConfig, key_sources, value_sources
from resformer.modeling.connection import ConnectionKind, Crossing

__all__ = ["SHARING", "update_cache"]

Tensors = tuple[torch.Tensor | None, torch.Tensor | None]


def update_cache(
    cache: Cache | None, layer_idx: int, new: Tensors, shared: Tensors
) -> tuple[torch.Tensor, torch.Tensor]:
    """Updates the cache with the new keys and values of layer `layer_idx`; returns those that it attends to.

    Args:
        cache: any of Transformers' caches; `None` stores nothing.
        new: keys and values that the layer has made of the current tokens, `(batch, heads, tokens, head_dim)`, or
            `None` where it reads another layer's.
        shared: the keys and values that it reads instead, past tokens included, or `None`.
    """
    keys, values = new
    shared_keys, shared_values = shared
    if cache is not None:
        # A cache layer holds two tensors and takes its length from the first. If this layer computes only one, it is
        # stored as the first, beside one of width 0.
        if keys is not None and values is not None:
            keys, values = cache.update(keys, values, layer_idx)
        elif keys is not None:
            keys, _ = cache.update(keys, _placeholder(cache, layer_idx, keys), layer_idx)
        elif values is not None:
            values, _ = cache.update(values, _placeholder(cache, layer_idx, values), layer_idx)
    return shared_keys if keys is None else keys, shared_values if values is None else values


def _placeholder(cache: Cache, layer_idx: int, stored: torch.Tensor) -> torch.Tensor:
    """The second tensor of a cache layer that stores one: of width 0, unless an exporter has allocated more before."""
    width = 0
    if layer_idx < len(cache.layers):
        layer = cache.layers[layer_idx]
        if isinstance(layer, BaseQuantizedLayer) and not isinstance(layer, _StoresOne):
            # Transformers builds all layers alike, and does not know that this one stores a single tensor.
            layer.__class__ = type(type(layer).__name__, (_StoresOne, type(layer)), {})
        if layer.is_initialized and layer.values is not None:
            width = layer.values.shape[-1]
    return stored.new_zeros((*stored.shape[:-1], width))


class _StoresOne(BaseQuantizedLayer):
    """Mixed into a quantised cache layer: a tensor of width 0, which no quantiser takes, is stored as it is."""

    def _quantize(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return super()._quantize(tensor, *args, **kwargs) if tensor.shape[-1] else (tensor, None)

    def _dequantize(self, stored: Any) -> torch.Tensor:
        if isinstance(stored, tuple) and stored[1] is None:
            return stored[0]
        return super()._dequantize(stored)


def _reads(config: ResFormerConfig, layer: int) -> list[Crossing]:
    sources = (("keys", key_sources(config)[layer]), ("values", value_sources(config)[layer]))
    return [(name, source) for name, source in sources if source != layer]


def _losses(config: ResFormerConfig) -> list[str]:
    reasons = []
    for name in ("value_sources", "key_sources"):
        if readers := sum(layer != source for layer, source in enumerate(getattr(config, name) or ())):
            reasons.append(f"`{name}` drops the projections of {readers} of {config.num_hidden_layers} layers")
    return reasons


SHARING = ConnectionKind(("value_sources", "key_sources"), reads=_reads, losses=_losses)
