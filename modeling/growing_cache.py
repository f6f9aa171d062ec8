"""A key/value cache that grows in place, where Transformers' `DynamicCache` copies all of itself at every token.

New tokens are written behind the cached ones, in memory that was allocated with room for more:

    memory  [ cached tokens | room ]      layer.keys is the view of the cached tokens

Layers hold what those of a `DynamicCache` hold, under the same names, so that pytrees and exporters find the same
tensors. A tensor's attribute `room` is the number of free tokens behind it. Tensors that other code puts into a layer
lack it and are never written to. Tensors of another `GrowingCache` have it: copy it with `copy.deepcopy`.
"""

from collections.abc import Iterable
from typing import Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer
from transformers.configuration_utils import PreTrainedConfig


def spare_room(tokens: int) -> int:
    """How many tokens new memory for `tokens` has room for: a token is copied 17 times at most."""
    return max(64, tokens // 16)


def appended(states: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Returns `states` with `new` behind them, in place where there is room: `(batch, heads, tokens, head_dim)`."""
    *batch, tokens, head_dim = states.shape
    count = new.shape[-2]
    # In-place writes would corrupt tensors that autograd has saved, and break torch.compile: concatenate there.
    # Concatenating also promotes another dtype, and refuses another device or shape.
    if (
        torch.is_grad_enabled()
        or torch.compiler.is_compiling()
        or (states.dtype, states.device) != (new.dtype, new.device)
        or new.shape != (*batch, count, head_dim)
    ):
        return torch.cat((states, new), dim=-2)
    if getattr(states, "room", 0) < count or (states.is_inference() and not torch.is_inference_mode_enabled()):
        states = moved_to_larger_memory(states, count)
    longer = states.as_strided((*batch, tokens + count, head_dim), states.stride(), states.storage_offset())
    longer.narrow(-2, tokens, count).copy_(new)
    hand_over_room(states, longer, states.room - count)  # type: ignore[attr-defined]
    return longer


def moved_to_larger_memory(states: torch.Tensor, count: int) -> torch.Tensor:
    """Returns a copy with room for `count` tokens and some more."""
    *batch, tokens, head_dim = states.shape
    room = count + spare_room(tokens + count)
    copy = states.new_empty((*batch, tokens + room, head_dim)).narrow(-2, 0, tokens).copy_(states)
    copy.room = room  # type: ignore[attr-defined]
    return copy


def hand_over_room(old: torch.Tensor, new: torch.Tensor, room: int) -> None:
    """Moves the room from `old` to `new`: two tensors must not write to the same memory."""
    old.room = 0  # type: ignore[attr-defined]
    new.room = room  # type: ignore[attr-defined]


class GrowingLayer(DynamicLayer):
    """One layer of a `GrowingCache`."""

    keys: torch.Tensor
    values: torch.Tensor

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores the new tokens' keys and values and returns those of all tokens."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.keys, self.values = key_states[..., :0, :], value_states[..., :0, :]
        self.keys, self.values = appended(self.keys, key_states), appended(self.values, value_states)
        return self.keys, self.values

    def crop(self, tokens_to_remove: int) -> None:
        longer = self.keys, self.values
        super().crop(tokens_to_remove)
        for old, new in zip(longer, (self.keys, self.values), strict=True):
            room = getattr(old, "room", 0)  # without any, a copy may have grown behind these tokens
            if new is not old and room:
                hand_over_room(old, new, room + old.shape[-2] - new.shape[-2])


class GrowingCache(DynamicCache):
    """A `DynamicCache` that grows in place: the same results, without copying all of it at every token.

    `generate()` of models with connections uses it by default. Any Llama-style model of Transformers
    takes it as `cache`. It supports the operations of a `DynamicCache`: cropping, beams, assisted decoding, windows,
    several turns, copies, offloading.

    It grows in place where gradients are off (`torch.no_grad()`, `torch.inference_mode()`, `generate()`). Where they
    are on, within `torch.compile`, and in layers with a sliding window, it concatenates as a `DynamicCache` does, so
    that gradients flow through it.

    Args:
        config: the model's configuration, which says which layers have a sliding window and which hold nothing.
            Without it every layer holds everything.
        offloading, offload_only_non_sliding: as of `DynamicCache`; needs an accelerator.

    ```python
    >>> from resformer import GrowingCache

    >>> model.generate(**inputs, cache=GrowingCache(model.config))
    ```"""

    def __init__(
        self, config: PreTrainedConfig | Iterable[tuple[torch.Tensor | None, ...]] | None = None, **kwargs: Any
    ) -> None:
        if config is None or isinstance(config, PreTrainedConfig):
            super().__init__(config=config, **kwargs)
        else:  # torch.nn.DataParallel joins its replicas' caches by calling their class with the tensors of each layer
            super().__init__(config, **kwargs)
        for layer in self.layers:
            if type(layer) is DynamicLayer:
                layer.__class__ = GrowingLayer  # the same attributes, other methods
        self.layer_class_to_replicate = None if self.layers else GrowingLayer
