r"""Value residuals: ResFormer, arXiv 2410.17897.

    V'_n = l1_n V_0 + l2_n V_n              for the mixing layers n; V'_n = V_n elsewhere
    V'_n = sum_{m <= n} l_{n,m} V_m         in mode "dense"
    V'_n = V_n + g_n (V~_n - V_n)           in mode "depth_attention", see `depth_attention.py`

V_n is the raw `v_proj` output of layer n, without rotary embedding. Values are mixed before they are cached, so
decoding needs nothing of past tokens but V'. Gradients flow into V_0.

| mode | coefficients | parameters | start, for `value_residual_init` = (a, b) |
|---|---|---|---|
| identity | 0.5, 0.5 | 0 | |
| constant | a, b | 0 | |
| learnable | l1_n, l2_n free | 2 a layer | a, b |
| learnable_plus | l1_n = s softmax(z)_n over the L mixing layers, l2_n free | 2 a layer, s | z = 0, s = a L, l2_n = b |
| dense | l_{n,m} free | N(N+1)/2 - 1 | a on V_0, b on V_n, 0 between |
| gated | l1_n = a + tanh(W_n h) per token and key/value head, l2_n free | heads x width + 1 a layer | W = 0, l2_n = b |
| depth_attention | a softmax over depth, g_n free per key/value head | heads a layer | `depth_attention_init` |
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import initialization as init

from resformer.configuration import ResFormerConfig, mixing_layers, value_sources
from resformer.modeling.connection import Connection, ConnectionKind, FreeRows, MixingRows, Row, coefficient_dtype
from resformer.modeling.depth_attention import DepthGates


def mixed_layers(config: ResFormerConfig, layer: int) -> list[int]:
    """The layers whose values make V'_n of layer n, ascending, n last; empty if it does not mix."""
    if layer not in mixing_layers(config):
        return []
    if config.value_residual == "depth_attention":
        stride = config.depth_attention_stride
        return list(range(layer % stride, layer + 1, stride))
    if config.value_residual == "dense":
        return [earlier for earlier, source in enumerate(value_sources(config)[: layer + 1]) if earlier == source]
    return [0, layer]


def value_residual(config: ResFormerConfig) -> MixingRows | None:
    """The module that holds the coefficients of the configured mode; `None` if no layer mixes."""
    columns = {layer: mixed_layers(config, layer) for layer in mixing_layers(config)}
    if not columns:
        return None
    a, b = config.value_residual_init
    start = (a, b)
    match config.value_residual:
        case "identity":
            return FixedValueResidual(columns, (0.5, 0.5))
        case "constant":
            return FixedValueResidual(columns, start)
        case "learnable" | "dense":
            return FreeRows(columns, start)
        case "learnable_plus":
            return SoftmaxValueResidual(columns, start)
        case "gated":
            return GatedValueResidual(columns, start)
        case "depth_attention":
            return DepthGates(columns, config.num_key_value_heads, config.depth_attention_init)
    raise ValueError(f"Unknown `value_residual` {config.value_residual!r}.")


class FixedValueResidual(MixingRows):
    """identity, constant: the same two numbers in every mixing layer."""

    def forward(self) -> dict[int, tuple[float, float]]:
        return dict.fromkeys(self.columns, self.start)


class SoftmaxValueResidual(MixingRows):
    """learnable_plus: the layers compete for V_0 through a softmax over depth."""

    def __init__(self, columns: dict[int, list[int]], start: tuple[float, float]):
        super().__init__(columns, start)
        layers = len(columns)
        self.bias_score = nn.Parameter(torch.empty(layers, dtype=coefficient_dtype()))  # z
        self.bias_scale = nn.Parameter(torch.empty(1, dtype=coefficient_dtype()))  # s
        self.bias_own = nn.Parameter(torch.empty(layers, dtype=coefficient_dtype()))  # l2

    def forward(self) -> Mapping[int, Row]:
        first = self.bias_scale * self.bias_score.softmax(dim=0)
        flat = torch.stack((first, self.bias_own), dim=1).flatten()
        return dict(zip(self.columns, flat.split(2), strict=True))

    def reset_parameters(self) -> None:
        a, b = self.start
        init.zeros_(self.bias_score)
        init.constant_(self.bias_scale, a * len(self.columns))
        init.constant_(self.bias_own, b)


class GatedValueResidual(MixingRows):
    """gated: the coefficients of V_n, one a layer; those of V_0 come from each layer's `ValueGate`."""

    def __init__(self, columns: dict[int, list[int]], start: tuple[float, float]):
        super().__init__(columns, start)
        self.bias_own = nn.Parameter(torch.empty(len(columns), dtype=coefficient_dtype()))  # l2

    def forward(self) -> dict[int, torch.Tensor]:
        return dict(zip(self.columns, self.bias_own.clone().split(1), strict=True))

    def reset_parameters(self) -> None:
        init.constant_(self.bias_own, self.start[1])

    @torch.no_grad()
    def entries(self) -> list[tuple[int, int, float]]:
        own = [(layer, layer, float(weight)) for layer, weight in self().items()]
        return [*((layer, 0, float("nan")) for layer in self.columns), *own]

    @torch.no_grad()
    def deviations(self) -> list[tuple[float, str]]:
        own = [(abs(float(weight) - 1), f"[{layer}, {layer}]") for layer, weight in self().items()]
        return [*own, (abs(self.start[0]), ": value_residual_init[0]")]


class ValueGate(nn.Module):
    """l1(t, h) = a + tanh(W x_t)_h: how much of V_0 each token takes, per key/value head (after RWKV-7)."""

    def __init__(self, config: ResFormerConfig):
        super().__init__()
        self.offset = config.value_residual_init[0]
        heads = config.num_key_value_heads
        self.bias_gate = GateProjection(config.hidden_size, heads, bias=False, dtype=coefficient_dtype())  # W

    def forward(
        self, hidden_states: torch.Tensor, first_values: torch.Tensor, values: torch.Tensor, weight: torch.Tensor
    ) -> torch.Tensor:
        """Returns l1 V_0 + l2 V_n.

        Args:
            hidden_states: the layer's normed input, `(batch, tokens, hidden_size)`.
            first_values, values: V_0 and V_n, `(batch, heads, tokens, head_dim)`.
            weight: l2, `(1,)`.
        """
        gate = self.offset + torch.tanh(self.bias_gate(hidden_states)).to(values.dtype)
        return torch.addcmul(first_values * gate.transpose(1, 2).unsqueeze(-1), values, weight.to(values.dtype))


class GateProjection(Connection, nn.Linear):
    """Starts at zero and keeps its own dtype. A linear layer, so that tensor parallelism can split it by heads."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(hidden_states, self.weight.to(hidden_states.dtype))

    def reset_parameters(self) -> None:
        init.zeros_(self.weight)


def _fixed_effects(config: ResFormerConfig) -> list[str]:
    mode = config.value_residual
    weights = [0.5, 0.5] if mode == "identity" else config.value_residual_init
    if mode not in ("identity", "constant") or weights == [0.0, 1.0] or not mixing_layers(config):
        return []
    return [f"`value_residual`={mode!r} mixes with fixed coefficients {weights}"]


def _flops(config: ResFormerConfig) -> int:
    """2 x key/value heads x head_dim for each term of a mix, and 2 x the weights of a gate.

    Depth-Attention: as much again for each score, for the gate, and the sum of the queries.
    """
    mixed = {layer: mixed_layers(config, layer) for layer in mixing_layers(config)}
    heads = config.num_key_value_heads
    terms, more = sum(map(len, mixed.values())), 0
    if config.value_residual == "gated":
        more = 2 * config.hidden_size * heads * len(mixed)
    elif config.value_residual == "depth_attention":
        more = (2 * heads * (terms + len(mixed)) + config.num_attention_heads * len(mixed)) * config.head_dim
    return 2 * heads * config.head_dim * terms + more


def _plain_start(fields: Mapping[str, Any]) -> dict[str, Any]:
    mode = fields.get("value_residual")
    if mode == "depth_attention":
        return {"depth_attention_init": 0.0}
    return {"value_residual_init": [0.0, 1.0]} if mode in ("learnable", "learnable_plus", "dense", "gated") else {}


VALUE_RESIDUAL = ConnectionKind(
    "value_residual value_residual_init value_residual_layers depth_attention_stride depth_attention_init".split(),
    "value_residual",
    _fixed_effects,
    _plain_start,
    _flops,
)
