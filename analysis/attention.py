"""Attention for Transformers' attention interface that sums what each token receives, a few queries at a time.

Registered as `"resformer_analysis"`. A function passed to the model's forward as `importance_taker` is called once for
each layer. Neither attention weights nor masks are held for all queries at once.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface

IMPLEMENTATION = "resformer_analysis"

#: Called with a layer's index, the importance of its tokens, `(batch, tokens)`, and its value states.
ImportanceTaker = Callable[[int, torch.Tensor, torch.Tensor], None]

#: Most attention weights in memory at a time, over all heads: 64 MB in float32.
_MOST_WEIGHTS = 2**24
#: Arguments of attention in some families that this function does not implement.
_UNKNOWN = ("softcap", "s_aux", "position_bias")


class MaskRows:
    """A mask whose rows are computed when they are needed, from the arguments of `AttentionMaskInterface`."""

    def __init__(self, **arguments: Any):
        self.arguments = arguments

    def __call__(self, start: int, stop: int) -> torch.Tensor:
        """`(batch, 1, stop - start, keys)`, True where the query sees the key."""
        rows = {"q_length": stop - start, "q_offset": self.arguments.get("q_offset", 0) + start}
        never_none = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        return sdpa_mask(**{**self.arguments, **rows, **never_none})


def chunked_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: MaskRows | None,
    scaling: float | None = None,
    importance_taker: ImportanceTaker | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Softmax attention without dropout, equal to eager attention; all of `(batch, heads, tokens, head_dim)`.

    Calls `importance_taker` with a_j = (1/l) sum_i A_ij, the attention of l queries to token j averaged over heads, in
    at least float32. Queries that see no key (padding) give zeros.
    """
    if unknown := [name for name in _UNKNOWN if kwargs.get(name) is not None]:
        raise NotImplementedError(f"attention with `{unknown[0]}` cannot be analysed")
    if not isinstance(attention_mask, MaskRows):
        raise NotImplementedError("the model does not make its masks through Transformers' mask interface")
    batch, heads, queries, head_dim = query.shape
    keys = key.shape[2]
    grouped = query.unflatten(1, (key.shape[1], -1))  # (batch, key/value heads, heads of a group, queries, head_dim)
    group = grouped.shape[2]
    scaling = head_dim**-0.5 if scaling is None else scaling
    precise = torch.promote_types(query.dtype, torch.float32)
    output = value.new_empty(batch, queries, heads, value.shape[-1])
    received = torch.zeros(batch, keys, dtype=precise, device=query.device)
    step = max(1, _MOST_WEIGHTS // (batch * heads * keys))
    for start in range(0, queries, step):
        stop = min(start + step, queries)
        # The heads of a group are treated as more queries to its keys, so keys need not be repeated.
        scores = grouped[:, :, :, start:stop].flatten(2, 3) @ key.mT * scaling
        unseen = ~attention_mask(start, stop).expand(-1, group, -1, -1).flatten(1, 2)[:, None]
        weights = scores.masked_fill(unseen, -torch.inf).softmax(dim=-1, dtype=precise).nan_to_num()
        received += weights.sum(dim=(1, 2))
        attended = (weights.to(value.dtype) @ value).unflatten(2, (group, -1))
        output[:, start:stop] = attended.permute(0, 3, 1, 2, 4).flatten(2, 3)
    if importance_taker is not None:
        importance_taker(module.layer_idx, received / (heads * queries), value)  # type: ignore[arg-type]
    return output, None


AttentionInterface.register(IMPLEMENTATION, chunked_attention)
AttentionMaskInterface.register(IMPLEMENTATION, MaskRows)
