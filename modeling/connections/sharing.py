r"""Shared keys and values: SVFormer (arXiv 2410.17897), CLA (arXiv 2405.12981), FusedKV-Lite (arXiv 2512.03870).

    layer n attends with the keys of layer key_sources[n] to the values of layer value_sources[n]

A reader uses its source's tensors after the cache's update, past tokens included, and stores none: a cache holds
(distinct key sources + distinct value sources) / 2N of the full one.
"""

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache

from resformer.configuration import key_sources, value_sources
from resformer.configuration.connection_fields import SharingFields
from resformer.modeling.connection import Connection, Reads
from resformer.modeling.versions import BaseQuantizedLayer


class Sharing(Connection):
    """It has no module: an attention lacks the projections of what it reads of another."""

    name = "sharing"
    fields_of = SharingFields
    has_modules = False

    @classmethod
    def layers(cls, config: Any) -> Sequence[int]:
        pairs = enumerate(zip(key_sources(config), value_sources(config), strict=True))
        return [layer for layer, pair in pairs if pair != (layer, layer)]

    @classmethod
    def reads(cls, config: Any, layer: int) -> Reads:
        reads: Reads = {}
        for name, sources in (("keys", key_sources(config)), ("values", value_sources(config))):
            if sources[layer] != layer:
                reads[f"shared_{name}"] = (f"attended_{name}", sources[layer])
        return reads

    @classmethod
    def needs(cls, config: Any) -> set[str]:
        return {"shared_keys"} if cls.layers(config) else set()

    @classmethod
    def fixed_effects(cls, config: Any) -> list[str]:
        reasons = []
        for name in cls.fields:
            if readers := sum(layer != source for layer, source in enumerate(getattr(config, name) or ())):
                reasons.append(f"`{name}` drops the projections of {readers} of {config.num_hidden_layers} layers")
        return reasons


class SharedCache:
    """In the place of an attention's cache, if there is one, where layers read each other's keys or values.

    Args:
        makes: whether the layer makes keys, and values, of its own.
        places: of the layer.
    """

    def __init__(self, cache: Any, makes: tuple[bool, bool], places: Any):
        self.cache, self.makes, self.places = cache, makes, places

    def update(self, keys: Any, values: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        earlier, (makes_keys, makes_values) = self.places.earlier, self.makes
        keys, values = update_cache(
            self.cache,
            layer_idx,
            keys if makes_keys else None,
            values if makes_values else None,
            earlier.get("shared_keys"),
            earlier.get("shared_values"),
            kwargs.get("kwargs"),
        )
        self.places.tensors.update(attended_keys=keys, attended_values=values)
        return keys, values

    def get_seq_length(self, *args: Any) -> Any:
        if self.cache is None:
            return 0
        if any(self.makes):
            return self.cache.get_seq_length(*args)
        # This layer stores nothing, and those before it have stored the tokens of this pass.
        return self.cache.get_seq_length() - self.places.tensors["hidden_states"].shape[-2]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cache, name)


def update_cache(
    cache: Any,
    layer_idx: int,
    keys: torch.Tensor | None,
    values: torch.Tensor | None,
    shared_keys: torch.Tensor | None = None,
    shared_values: torch.Tensor | None = None,
    kwargs: dict[str, Any] | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Stores what layer `layer_idx` has made of the current tokens; returns the keys and values that it attends to.

    Args:
        cache: any of Transformers' caches; `None` stores nothing.
        keys, values: `(batch, heads, tokens, head_dim)`, or `None` where the layer reads another's.
        shared_keys, shared_values: those of the layer that it reads, past tokens included.
        kwargs: of the attention. A paged cache, that of continuous batching, reads them and adds to them.
    """
    attended = (shared_keys if keys is None else keys), (shared_values if values is None else values)
    if cache is None:
        return attended
    if kwargs and kwargs.get("block_table") is not None:
        # Flash attention itself stores all that a layer attends to, in blocks of this layer.
        return cache.update(*attended, layer_idx, kwargs=kwargs)
    if keys is None and values is None:
        return attended
    # A cache layer holds two tensors and takes its length from the first. If this layer computes only one, it is stored
    # as the first, beside one that is never read.
    if values is None:
        return cache.update(keys, _placeholder(cache, layer_idx, keys), layer_idx, kwargs=kwargs)[0], shared_values
    if keys is None:
        return shared_keys, cache.update(values, _placeholder(cache, layer_idx, values), layer_idx, kwargs=kwargs)[0]
    return cache.update(keys, values, layer_idx, kwargs=kwargs)


def _placeholder(cache: Any, layer_idx: int, stored: torch.Tensor) -> torch.Tensor:
    """The second tensor of a cache layer that stores one: of width 0, unless an exporter has allocated more before."""
    if not isinstance(cache, Cache):  # a paged one, whose layers have one shape
        return stored
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
