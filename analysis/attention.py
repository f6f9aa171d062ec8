"""Attention for Transformers' attention interface that is the family's eager one, and shows what each token receives.

Registered as `"resformer_analysis"`. A function passed to the model's forward as `importance_taker` is called once for
each layer.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

IMPLEMENTATION = "resformer_analysis"

#: Called with a layer's index, the importance of its tokens, `(batch, tokens)`, and its value states.
ImportanceTaker = Callable[[int, torch.Tensor, torch.Tensor], None]


def measured_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *args: Any,
    importance_taker: ImportanceTaker | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the family's eager attention returns; all of `(batch, heads, tokens, head_dim)`.

    Calls `importance_taker` with a_j = (1/l) sum_i A_ij, the attention of l queries to token j averaged over heads.
    """
    attention = type(getattr(module, "_module", module))  # of a layer with connections it is behind another
    own = (vars(sys.modules[each.__module__]).get("eager_attention_forward") for each in attention.__mro__)
    eager = next(filter(None, own), None)
    if eager is None:
        raise NotImplementedError("its attention has no eager form to be analysed")
    output, weights = eager(module, query, key, value, *args, **kwargs)
    if importance_taker is not None:
        received = weights.mean(dim=(1, 2), dtype=torch.promote_types(weights.dtype, torch.float32))
        importance_taker(module.layer_idx, received, value)  # type: ignore[arg-type]
    return output, weights


AttentionInterface.register(IMPLEMENTATION, measured_attention)
AttentionMaskInterface.register(IMPLEMENTATION, ALL_MASK_ATTENTION_FUNCTIONS["eager"])
