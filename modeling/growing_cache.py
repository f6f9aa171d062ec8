"""A key/value cache that grows in place, where Transformers' `DynamicCache` copies the whole of itself at every token.

New tokens are written behind the old ones, in memory allocated with room for more. Full memory is replaced by larger,
so that the copying comes to a bounded number of tokens for each new one however long the sequence becomes. What is
allocated and not used is at most 256 tokens or 1/16 of the length, whichever is more; a prompt that is never continued
is not even copied.

A layer that shares its keys or its values with an earlier one stores `None` in their place: the cache holds the keys of
distinct key sources and the values of distinct value sources, and nothing else.
"""

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.configuration_utils import PreTrainedConfig

__all__ = ["GrowingCache", "GrowingLayer", "GrowingSlidingWindowLayer"]


def most_slack(tokens: int) -> int:
    """How many tokens' memory may lie unused beside `tokens` used ones."""
    return max(256, tokens // 16)


def new_slack(tokens: int) -> int:
    """How much of that is allocated at once. The rest is for `crop`: rejected guesses of assisted decoding give back
    some tokens at every step, which must not make the memory too large and have it copied every time."""
    return max(192, tokens * 3 // 64)


class GrowingStates:
    """The keys, or the values, of one layer: `(batch, heads, tokens, head_dim)`, appended to along the tokens."""

    def __init__(self) -> None:
        #: What is held, `None` if nothing ever was. A view of `buffer` where there is one.
        self.held: torch.Tensor | None = None
        #: Memory with room for more; tokens `start` to `end` of it are held.
        self.buffer: torch.Tensor | None = None
        self.start = self.end = self.capacity = 0

    def replace(self, states: torch.Tensor | None) -> None:
        self.held, self.buffer = states, None
        self.start = self.end = self.capacity = 0

    def assign(self, states: torch.Tensor | None) -> None:
        """Holds something else, as a caller would have it."""
        self.replace(states)
        if states is not None:
            self.trim()

    def append(self, states: torch.Tensor) -> torch.Tensor:
        """Returns what was held and `states` behind it."""
        held = self.held
        # What autograd has seen must not be written to, and a compiled graph is written to by nobody.
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            self.replace(states if held is None else torch.cat((held, states), dim=-2))
            return self.held
        if held is None:
            self.replace(states)
            self.trim()
            return self.held
        count = states.shape[-2]
        if self.end + count > self.capacity or held.dtype is not states.dtype or not self.is_writable():
            if held.dtype != states.dtype or held.device != states.device:
                self.replace(torch.cat((held, states), dim=-2))  # promotes, or says what does not fit
                return self.held
            self.move_to_larger_memory(count)
        end = self.end + count
        place = self.buffer.narrow(-2, self.end, count)
        if place.shape != states.shape:  # copying would broadcast
            raise ValueError(
                f"The cache holds keys or values of shape {tuple(held.shape)}; {tuple(states.shape)} cannot be "
                "appended: batch, heads and head_dim must be the same."
            )
        place.copy_(states)
        self.end = end
        self.held = self.buffer.narrow(-2, self.start, end - self.start)
        return self.held

    def is_writable(self) -> bool:
        return not self.buffer.is_inference() or torch.is_inference_mode_enabled()

    def move_to_larger_memory(self, more: int) -> None:
        held = self.held
        tokens = held.shape[-2]
        self.capacity = tokens + more + new_slack(tokens + more)
        self.buffer = held.new_empty((*held.shape[:-2], self.capacity, held.shape[-1]))
        self.start, self.end = 0, tokens
        self.held = self.buffer.narrow(-2, 0, tokens)
        self.held.copy_(held)

    def drop(self, first: int, last: int) -> None:
        """Gives up that many tokens at the front and at the end."""
        tokens = self.held.shape[-2]
        first = min(first, tokens)
        left = max(tokens - first - last, 0)
        self.held = self.held.narrow(-2, first, left)
        self.start, self.end = self.start + first, self.start + first + left
        self.trim()

    def trim(self) -> None:
        """Copies what is held where it keeps too much else alive and autograd does not keep that anyway."""
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return
        held = self.held
        token = math.prod((*held.shape[:-2], held.shape[-1])) * held.element_size()
        kept_alive = held.untyped_storage().nbytes() - token * held.shape[-2]
        if kept_alive > most_slack(held.shape[-2]) * token:
            self.replace(held.clone())

    def apply(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replaces the tensor by one with other rows, or on another device, in which the tokens lie alike."""
        if self.held is None:
            return
        if self.buffer is None:
            self.held = change(self.held)
        else:
            self.buffer = change(self.buffer)
            self.held = self.buffer.narrow(-2, self.start, self.end - self.start)

    def __deepcopy__(self, memo: dict[int, Any]) -> "GrowingStates":
        twin = type(self)()
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))  # the memory once, the view as a view of it
        return twin

    def __copy__(self) -> "GrowingStates":
        return copy.deepcopy(self)  # both would write to the same place

    def __getstate__(self) -> dict[str, Any]:
        held = self.held if self.buffer is None else self.held.clone()  # a file needs no room for more
        return {"held": held, "buffer": None, "start": 0, "end": 0, "capacity": 0}


class GrowingLayer(DynamicLayer):
    """One layer of a `GrowingCache`. `keys` and `values` may be read and assigned as those of a `DynamicLayer`."""

    def __init__(self, **kwargs: Any) -> None:
        self.key_states, self.value_states = GrowingStates(), GrowingStates()
        super().__init__(**kwargs)

    @property
    def keys(self) -> torch.Tensor | None:
        return self.key_states.held

    @keys.setter
    def keys(self, states: torch.Tensor | None) -> None:
        self.key_states.assign(states)

    @property
    def values(self) -> torch.Tensor | None:
        return self.value_states.held

    @values.setter
    def values(self, states: torch.Tensor | None) -> None:
        self.value_states.assign(states)

    def __copy__(self) -> "GrowingLayer":
        twin = type(self).__new__(type(self))
        twin.__dict__.update(self.__dict__)
        twin.key_states, twin.value_states = copy.copy(self.key_states), copy.copy(self.value_states)
        return twin

    def lazy_initialization(self, key_states: torch.Tensor | None, value_states: torch.Tensor | None) -> None:
        given = value_states if key_states is None else key_states
        self.dtype, self.device = given.dtype, given.device
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor | None, value_states: torch.Tensor | None, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Stores the new tokens' keys and values and returns all of them, `None` for what is given as `None`."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        return (
            None if key_states is None else self.key_states.append(key_states),
            None if value_states is None else self.value_states.append(value_states),
        )

    def get_seq_length(self) -> int:
        held = self.values if self.keys is None else self.keys
        return 0 if held is None else held.shape[-2]

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove > 0:
            super().crop(tokens_to_remove)  # raises
        self._drop(0, -tokens_to_remove)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self._apply(lambda states: states.index_select(0, beam_idx.to(states.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._apply(lambda states: states.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._apply(lambda states: states[indices, ...])

    def offload(self) -> None:
        self._apply(lambda states: states.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        if self.is_initialized:
            self._apply(lambda states: states.to(self.device, non_blocking=True))

    def _apply(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.key_states.apply(change)
        self.value_states.apply(change)

    def _drop(self, first: int, last: int) -> None:
        for states in (self.key_states, self.value_states):
            if states.held is not None and (first or last):
                states.drop(first, last)


class GrowingSlidingWindowLayer(GrowingLayer, DynamicSlidingWindowLayer):
    """One layer of a `GrowingCache` that keeps the last `sliding_window` - 1 tokens, all that a next one sees."""

    def lazy_initialization(self, key_states: torch.Tensor | None, value_states: torch.Tensor | None) -> None:
        super().lazy_initialization(key_states, value_states)
        self._sliding_window_tensor: torch.Tensor = self._sliding_window_tensor.to(self.device)

    def update(
        self, key_states: torch.Tensor | None, value_states: torch.Tensor | None, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        keys, values = super().update(key_states, value_states)
        given = value_states if key_states is None else key_states
        new = given.shape[-2]
        self.cumulative_length += new
        if not self.record_past:
            self._keep_window()
            return keys, values
        # Until `crop` says what stays, more may be held than the mask of these queries is made for.
        visible = self.sliding_window - 1 + new
        return (
            None if keys is None else keys[..., -visible:, :],
            None if values is None else values[..., -visible:, :],
        )

    def _keep_window(self) -> None:
        held = self.values if self.keys is None else self.keys
        if held is not None:
            self._drop(max(held.shape[-2] - self.sliding_window + 1, 0), 0)

    def get_seq_length(self) -> int:
        return self.cumulative_length

    def crop(self, tokens_to_remove: int) -> None:
        if self.cumulative_length >= self.sliding_window:
            if not self.record_past or tokens_to_remove > 0:
                DynamicSlidingWindowLayer.crop(self, tokens_to_remove)  # raises
        elif tokens_to_remove > 0:
            DynamicLayer.crop(self, tokens_to_remove)  # raises
        tokens_to_remove = min(-tokens_to_remove, self.cumulative_length)
        self._drop(0, tokens_to_remove)
        self.cumulative_length -= tokens_to_remove
        self._keep_window()


#: Transformers' cache layer -> ours. Layers of other kinds stay as they are.
_GROWING: dict[type, Callable[[Any], GrowingLayer]] = {
    DynamicLayer: lambda layer: GrowingLayer(),
    DynamicSlidingWindowLayer: lambda layer: GrowingSlidingWindowLayer(sliding_window=layer.sliding_window),
}


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
        config: PreTrainedConfig | Any = None,
        offloading: bool = False,
        offload_only_non_sliding: bool = False,
    ) -> None:
        # torch's data parallelism gathers caches by calling their class with what iterating over them gave.
        gathered = None if config is None or isinstance(config, PreTrainedConfig) else list(config)
        super().__init__(
            config=config if gathered is None else None,
            offloading=offloading,
            offload_only_non_sliding=offload_only_non_sliding,
        )
        stock: list[Any] = self.layers
        self.layers: list[Any] = [_GROWING[type(layer)](layer) if type(layer) in _GROWING else layer for layer in stock]
        if gathered is not None:
            self.layers = [_gathered_layer(*tensors) for tensors in gathered]
        self.layer_class_to_replicate = None if self.layers else GrowingLayer

    def update(
        self,
        key_states: torch.Tensor | None,
        value_states: torch.Tensor | None,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Stores the new tokens' keys and values in layer `layer_idx` and returns all of them.

        Args:
            key_states, value_states: `(batch, heads, tokens, head_dim)`; one of them `None` in a layer that shares
                what is another's, in every call alike.
        """
        if not self.offloading and layer_idx < len(self.layers):
            return self.layers[layer_idx].update(key_states, value_states, *args, **kwargs)
        if self.offloading and key_states is None:  # Transformers asks the keys for their device
            key_states = value_states[..., :0]
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


def _gathered_layer(
    keys: torch.Tensor | None, values: torch.Tensor | None, window: torch.Tensor | None = None
) -> GrowingLayer:
    layer = GrowingLayer() if window is None else GrowingSlidingWindowLayer(sliding_window=int(window.flatten()[0]))
    if keys is not None or values is not None:
        layer.update(keys, values)
    return layer
