"""A key/value cache that grows in place, where Transformers' `DynamicCache` copies all of itself at every token.

New tokens are written behind the cached ones, in memory that was allocated with room for more:

    memory  [ dropped by a window | cached tokens | room ]      layer.keys is the view of the cached tokens

Memory without enough room is replaced by a larger one, at most 256 tokens or 1/16 larger than it must be, whichever is
more: so each token is copied a bounded number of times, however long the sequence becomes. A prompt is held as it is
given, and is first copied when a token follows.

Layers hold what those of a `DynamicCache` hold, under the same names, so that pytrees and exporters find the same
tensors. A tensor's attribute `room` is the number of free tokens behind it. Tensors that other code puts into a layer
lack the attribute and are never written to. Tensors of another `GrowingCache` have it: copy it with `copy.deepcopy`.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.configuration_utils import PreTrainedConfig

__all__ = ["GrowingCache", "GrowingLayer", "GrowingSlidingWindowLayer", "moved_to_larger_memory"]


def most_slack(tokens: int) -> int:
    """How many tokens' memory may lie unused beside `tokens` used ones."""
    return max(256, tokens // 16)


def new_slack(tokens: int) -> int:
    """Tokens of slack in a new allocation. Less than `most_slack`, so that the small crops of assisted decoding do not
    each lead to a copy."""
    return max(192, tokens * 3 // 64)


def appended(states: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Returns `states` with `new` behind them, in place where there is room: `(batch, heads, tokens, head_dim)`."""
    if states.dim() == 1:  # of a layer that holds nothing yet
        return trimmed(new)
    # In-place writes would corrupt tensors that autograd has saved, and break torch.compile: concatenate there.
    # Concatenating also promotes another dtype, and refuses another device.
    if (
        torch.is_grad_enabled()
        or torch.compiler.is_compiling()
        or states.dtype != new.dtype
        or states.device != new.device
    ):
        return torch.cat((states, new), dim=-2)
    *batch, tokens, head_dim = states.shape
    count = new.shape[-2]
    if new.shape != (*batch, count, head_dim):  # writing would broadcast
        raise ValueError(
            f"The cache holds keys or values of shape {tuple(states.shape)}; {tuple(new.shape)} cannot be appended: "
            "batch, heads and head_dim must be the same."
        )
    room = room_behind(states)
    if room < count or (states.is_inference() and not torch.is_inference_mode_enabled()):
        states, room = moved_to_larger_memory(states, count)
    longer = extended(states, count)
    longer.narrow(-2, tokens, count).copy_(new)
    hand_over_room(states, longer, room - count)
    return longer


def moved_to_larger_memory(states: torch.Tensor, count: int) -> tuple[torch.Tensor, int]:
    """Returns a copy with room for `count` tokens and some more, and that room."""
    *batch, tokens, head_dim = states.shape
    room = count + new_slack(tokens + count)
    memory = states.new_empty((*batch, tokens + room, head_dim))
    return memory.narrow(-2, 0, tokens).copy_(states), room


def shortened(states: torch.Tensor, first: int, last: int) -> torch.Tensor:
    """Returns `states` without the first `first` and the last `last` tokens."""
    tokens = states.shape[-2]
    first = min(first, tokens)
    last = min(last, tokens - first)
    part = states.narrow(-2, first, tokens - first - last)
    if (room := room_behind(states)) >= 0:
        hand_over_room(states, part, room + last)
    return trimmed(part)


def extended(states: torch.Tensor, count: int) -> torch.Tensor:
    """Returns the view of `count` more tokens of the memory."""
    *batch, tokens, head_dim = states.shape
    return states.as_strided((*batch, tokens + count, head_dim), states.stride(), states.storage_offset())


def trimmed(states: torch.Tensor) -> torch.Tensor:
    """Returns a copy where `states` keep too much other memory alive, unless autograd keeps that anyway."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return states
    *batch, tokens, head_dim = states.shape
    token_bytes = math.prod((*batch, head_dim)) * states.element_size()
    unused = states.untyped_storage().nbytes() - token_bytes * tokens
    return states.clone() if unused > most_slack(tokens) * token_bytes else states


def selected(states: torch.Tensor, rows: torch.LongTensor) -> torch.Tensor:
    """Returns a copy of these sequences of the batch, with as much room."""
    room = max(room_behind(states), 0)
    copy = extended(states, room).index_select(0, rows.to(states.device)).narrow(-2, 0, states.shape[-2])
    hand_over_room(states, copy, room)
    return copy


def room_behind(states: torch.Tensor) -> int:
    """How many tokens may be written behind `states`; -1 if another tensor has the room, or there never was any."""
    return getattr(states, "room", -1)


def hand_over_room(old: torch.Tensor, new: torch.Tensor, room: int) -> None:
    """Moves the room from `old` to `new`: two tensors must not write to the same memory."""
    old.room = -1  # type: ignore[attr-defined]
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
        self.keys, self.values = appended(self.keys, key_states), appended(self.values, value_states)
        return self.keys, self.values

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove >= 0 or not self.is_initialized:
            super().crop(tokens_to_remove)  # raises, or does nothing
        else:
            self.keys, self.values = (shortened(each, 0, -tokens_to_remove) for each in (self.keys, self.values))

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        if self.is_initialized:
            self.keys, self.values = selected(self.keys, beam_idx), selected(self.values, beam_idx)


class GrowingSlidingWindowLayer(DynamicSlidingWindowLayer):
    """One layer of a `GrowingCache` that keeps the last `sliding_window` - 1 tokens, all that a next one sees."""

    keys: torch.Tensor
    values: torch.Tensor
    record_past = False  # set by Transformers, from 5.16 on

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores the new tokens' keys and values and returns those that the new tokens may see."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        keys, values = appended(self.keys, key_states), appended(self.values, value_states)
        new, tokens = key_states.shape[-2], keys.shape[-2]
        self.cumulative_length += new
        window = self.sliding_window - 1
        if self.record_past:  # all is kept until `crop` says what stays; masks are made for the window
            self.keys, self.values = keys, values
            return keys[..., -(window + new) :, :], values[..., -(window + new) :, :]
        self.keys, self.values = (shortened(each, max(tokens - window, 0), 0) for each in (keys, values))
        return keys, values

    reorder_cache = GrowingLayer.reorder_cache


class GrowingCache(DynamicCache):
    """A `DynamicCache` that grows in place: the same results, without copying all of it at every token.

    `generate()` and plain forward calls of resformer's models use it by default. Any Llama-style model of Transformers
    takes it as `past_key_values`. What a `DynamicCache` can do, it can: cropping, beams, assisted decoding, windows,
    several turns, copies, offloading.

    It grows in place where gradients are off (`torch.no_grad()`, `torch.inference_mode()`, `generate()`). Where they
    are on, and within `torch.compile`, it concatenates as a `DynamicCache` does, so that gradients flow through it. The
    tensors handed to the first `update` are held, not copied, and must not be written to afterwards.

    Args:
        config: the model's configuration, which says which layers have a sliding window and which hold nothing.
            Without it every layer holds everything.
        offloading, offload_only_non_sliding: as of `DynamicCache`; needs an accelerator.

    Raises:
        ValueError: from `update`, if batch size, heads or head_dim are not those of what the cache holds; from `crop`,
            if the number is positive.

    ```python
    >>> from resformer import GrowingCache

    >>> model.generate(**inputs, past_key_values=GrowingCache(model.config))
    ```"""

    def __init__(
        self,
        config: PreTrainedConfig | Iterable[tuple[torch.Tensor | None, ...]] | None = None,
        offloading: bool = False,
        offload_only_non_sliding: bool = False,
    ) -> None:
        is_config = config is None or isinstance(config, PreTrainedConfig)
        super().__init__(
            config=config if is_config else None,
            offloading=offloading,
            offload_only_non_sliding=offload_only_non_sliding,
        )
        self.layers: list[Any] = [growing(layer) for layer in self.layers]
        self.layer_class_to_replicate = None if self.layers else GrowingLayer
        # torch.nn.DataParallel joins its replicas' caches by calling their class with the tensors of each layer.
        for layer, (keys, values, *_) in enumerate(() if is_config else config):
            if keys is not None:
                self.update(keys.clone(), values.clone(), layer)


def growing(layer: Any) -> Any:
    """The counterpart of one of Transformers' cache layers; layers of other kinds stay as they are."""
    if type(layer) is DynamicLayer:
        return GrowingLayer()
    if type(layer) is DynamicSlidingWindowLayer:
        return GrowingSlidingWindowLayer(sliding_window=layer.sliding_window)
    return layer
