r"""Depth-Attention, arXiv 2606.05014, with a gate: values are mixed over depth by the layer's own queries and keys.

    a_{n,m} = softmax_{m in S(n)}( q_n . K_m / sqrt(head_dim) ),   S(n) = {n, n - s, n - 2s, ...}
    V~_n = a_{n,n} V_n + sum_{m < n} a_{n,m} V'_m
    V'_n = V_n + g_n (V~_n - V_n)

All of it is at one token: q_n is the mean of the queries that share a key/value head, K_m the keys that layer m attends
with, V'_m the values that it attends to. There is one gate g_n per key/value head: 0 is plain Llama, 1 the paper, in
which V' = V~. s is `depth_attention_stride`.

Queries and keys are taken before the rotary embedding, which turns both by the same angle: layers with and without it
are comparable, and its scaling of long contexts has no effect here. They are normed if the model norms them.
"""

from collections.abc import Sequence

import torch
from torch import nn
from transformers import initialization as init

from resformer.modeling.connection import MixingRows, coefficient_dtype, weighted_sum


def depth_values(
    queries: torch.Tensor, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor], gate: torch.Tensor
) -> torch.Tensor:
    """Returns V'_n, `(batch, key/value heads, tokens, head_dim)`. The softmax is in float32, its products are not.

    Args:
        queries: of layer n, `(batch, query heads, tokens, head_dim)`.
        keys, values: of the layers in S(n), n last, `(batch, key/value heads, tokens, head_dim)` each.
        gate: g_n, `(key/value heads,)`.
    """
    own = values[-1]
    query = queries.unflatten(1, (own.shape[1], -1)).mean(dim=2) * own.shape[-1] ** -0.5
    dtype = torch.promote_types(own.dtype, torch.float32)
    scores = torch.stack([(query * key).sum(dim=-1, keepdim=True, dtype=dtype) for key in keys])
    mixed = weighted_sum(values, scores.softmax(dim=0))
    # Exactly V_n where g = 0, and V~_n where g = 1.
    return torch.lerp(own, mixed, gate.to(own.dtype).view(own.shape[1], 1, 1))


class DepthGates(MixingRows):
    """depth_attention: the gates of all layers, `bias_gate`, `(key/value heads, mixing layers)`.

    Heads come first, where tensor parallelism splits a matrix.
    """

    def __init__(self, columns: dict[int, list[int]], heads: int, gate: float):
        super().__init__(columns)
        self.gate = gate
        self.bias_gate = nn.Parameter(torch.empty(heads, len(columns), dtype=coefficient_dtype()))

    def forward(self) -> dict[int, torch.Tensor]:
        return dict(zip(self.columns, self.bias_gate.clone().unbind(1), strict=True))

    def reset_parameters(self) -> None:
        init.constant_(self.bias_gate, self.gate)

    @torch.no_grad()
    def entries(self) -> list[tuple[int, int, float]]:
        mixing = [layer for layer, gates in self().items() if gates.any()]
        return [(layer, column, float("nan")) for layer in mixing for column in self.columns[layer]]

    @torch.no_grad()
    def deviations(self) -> list[tuple[float, str]]:
        return [(float(gates.abs().max()), f"[{layer}]") for layer, gates in self().items()]
