r"""Depth-Attention, arXiv 2606.05014, with a gate: values are mixed over depth by the layer's own queries and keys.

    a_{n,m} = softmax_{m in S(n)}( q_n . K_m / sqrt(head_dim) ),   S(n) = {0, s, 2s, ... < n} and n
    V~_n = a_{n,n} V_n + sum_{m < n} a_{n,m} V'_m
    V'_n = V_n + g_n (V~_n - V_n)

All of it is at one token: q_n is the mean of the queries that share a key/value head, K_m the keys that layer m attends
with, V'_m the values that it attends to. There is one gate g_n per key/value head: 0 is plain Llama, 1 the paper's
V' = V~. s is `depth_attention_stride`.

Queries and keys are taken before the rotary embedding, which turns both by the same angle: layers with and without it
are comparable, and its scaling of long contexts has no effect here. They are normed if the model norms them.
"""

from typing import Any

import torch
from transformers import initialization as init

from resformer.configuration import key_sources, value_layers
from resformer.modeling.connection import Reads, coefficient
from resformer.modeling.connections.value_residual import ValueResidual
from resformer.modeling.sums import weighted_sum


class DepthAttention(ValueResidual, mode="depth_attention"):
    by_heads = True
    plain = {"depth_attention_init": 0.0}

    def __init__(self, config: Any, layer: int):
        super().__init__(config, layer)
        self.first = config.depth_attention_init
        self.gate = coefficient(config.num_key_value_heads)  # g

    def forward(
        self,
        values: torch.Tensor,
        queries: torch.Tensor,
        keys: torch.Tensor,
        earlier_keys: tuple[torch.Tensor, ...],
        earlier_values: tuple[torch.Tensor, ...],
    ) -> torch.Tensor:
        """Returns V'_n. The softmax is in float32, its products are not."""
        heads, width = values.shape[-2:]
        query = queries.unflatten(-2, (heads, -1)).mean(dim=-2) * width**-0.5
        dtype = torch.promote_types(values.dtype, torch.float32)
        scores = [(query * key).sum(dim=-1, keepdim=True, dtype=dtype) for key in (*earlier_keys, keys)]
        mixed = weighted_sum((*earlier_values, values), torch.stack(scores).softmax(dim=0))
        # Exactly V_n where g = 0, and V~_n where g = 1.
        return torch.lerp(values, mixed, self.gate.to(values.dtype).unsqueeze(-1))

    def reset_parameters(self) -> None:
        init.constant_(self.gate, self.first)

    def row(self, of_decoder: Any) -> list[float]:
        # Of two layers whose scores are equal, and whose values are 1 and 0; hooks move them for an offloaded gate.
        device = "cpu" if self.gate.is_meta else self.gate.device
        one = torch.ones(1, 1, len(self.gate), 1, dtype=torch.float32, device=device)
        moved = self(0 * one, one, one, (one,), (one,)).any()
        return [float("nan")] * len(self.columns) if moved else [*[0.0] * (len(self.columns) - 1), 1.0]

    @torch.no_grad()
    def deviations(self) -> list[tuple[float, str]]:
        return [(float(self.gate.abs().max()), ".gate")]

    @classmethod
    def mixes(cls, config: Any, layer: int) -> list[int]:
        stride = config.depth_attention_stride
        return [each for each in value_layers(config, layer) if each % stride == 0 or each == layer]

    @classmethod
    def reads(cls, config: Any, layer: int) -> Reads:
        keys, mixed = key_sources(config), cls.mixes(config, layer)
        reads: Reads = {
            "earlier_values": [("mixed_values", each) for each in mixed[:-1]],
            "earlier_keys": [("keys", keys[each]) for each in mixed[:-1]],
        }
        return reads if keys[layer] == layer else {**reads, "keys": ("keys", keys[layer])}

    @classmethod
    def more_flops(cls, config: Any, terms: int) -> int:
        """As much again for each score, for the gate, and the sum of the queries."""
        return (2 * config.num_key_value_heads * (terms + 1) + config.num_attention_heads) * config.head_dim

    @classmethod
    def tp_plan(cls, config: Any) -> dict[str, str]:
        # Each rank has the gates of its own heads.
        return dict.fromkeys(super().tp_plan(config), "local_params") | {
            f"{name}.gate": "colwise" for name in super().tp_plan(config)
        }
