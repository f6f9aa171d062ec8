r"""Delta attention residuals, multi-head and gated: arXiv 2605.18855, 2607.27230.

What sublayer i (the attention of layer n for i = 2n, its MLP for i = 2n + 1) reads, before its norm:

    h_i = x_i + g_i concat_h sum_b a_ib^h D_b^h         a_ib^h = exp(s_ib^h) / (1 + sum_c exp(s_ic^h))
    s_ib^h = w_i^h . RMSNorm(D_b)^h

x_i is the residual stream, `(batch, tokens, hidden_size)`, to which the sublayer's output is added as in Llama. The
layers form B blocks. D_0 are the embeddings, and D_b, b >= 1, is what block b - 1 added to the stream. Sublayers read
the D_b of all blocks before their own: at most B. Heads h are contiguous slices of D_b and of w_i; their number is that
of key/value heads, or its greatest common divisor with `hidden_size`. The 1 is a null source of score 0 and value 0, so
that a head can read nothing. w_i, `(hidden_size)`, starts at 0, a mean over all sources; g_i, a scalar, starts at
`delta_attention_residual_init`. At g = 0 this is plain Llama: for finite D, x + 0 D is x.

It departs from the published code in three points. There D_b is the stream minus D_(b-1) for b >= 2, and the attention
of a block's first layer does not read the block before it. The null source and the norm's scale are learned; here w_i
has the effect of the latter.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from transformers import initialization as init
from transformers.utils.generic import maybe_autocast

from resformer.configuration.connection_fields import DeltaAttentionResidualFields
from resformer.configuration.sources import block_starts
from resformer.modeling.connection import BetweenLayers, Connection, coefficient, whole
from resformer.modeling.sums import weighted_sums


class DeltaAttentionResiduals(Connection):
    """The w and g of a layer, of its attention and its MLP."""

    name = "delta_attention_residuals"
    fields_of = DeltaAttentionResidualFields
    plain = {"delta_attention_residual_init": 0.0}

    def __init__(self, config: Any, layer: int):
        super().__init__(config, layer)
        self.begins_block = layer in _starts(config)
        self.heads = math.gcd(config.num_key_value_heads, config.hidden_size)
        self.epsilon = config.rms_norm_eps
        self.first = config.delta_attention_residual_init
        self.query = coefficient(2, config.hidden_size)  # w
        self.gate = coefficient(2)  # g

    def forward(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns w, `(2, hidden_size)`, and g, `(2)`."""
        return whole(self.query), whole(self.gate)

    def reset_parameters(self) -> None:
        init.zeros_(self.query)
        init.constant_(self.gate, self.first)

    @torch.no_grad()
    def deviations(self) -> list[tuple[float, str]]:
        gates = [(abs(float(gate)), f".gate[{sublayer}]") for sublayer, gate in enumerate(self.gate)]
        return [*gates, (float((0 * self.query).sum()), ".query")]  # with gates of 0, NaN alone has an effect

    @classmethod
    def layers(cls, config: Any) -> Sequence[int]:
        return range(config.num_hidden_layers if config.delta_attention_residuals else 0)

    @classmethod
    def needs(cls, config: Any) -> set[str]:
        return {"attention_input", "mlp_input"}

    @classmethod
    def between(cls, modules: Mapping[int, Any], of_decoder: Any) -> BetweenLayers:
        return BlockDeltas(modules)

    @classmethod
    def flops(cls, config: Any) -> int:
        """4 x hidden_size for each delta that a sublayer reads: its score, and its term of the sum."""
        layers = len(cls.layers(config))
        return 4 * config.hidden_size * sum(2 * (layers - start) for start in _starts(config) if layers)


def _starts(config: Any) -> list[int]:
    return block_starts(config.num_hidden_layers, config.delta_attention_residual_blocks)


class BlockDeltas(BetweenLayers):
    """The deltas of one forward pass, and how much of each the sublayers of the current block read."""

    def __init__(self, modules: Mapping[int, DeltaAttentionResiduals]):
        starts = [layer for layer, module in modules.items() if module.begins_block]
        self.blocks = dict(zip(starts, [*starts[1:], len(modules)], strict=False))  # first layer -> end
        first = next(iter(modules.values()))
        self.heads, self.epsilon = first.heads, first.epsilon
        parameters = [module() for module in modules.values()]
        device = parameters[0][0].device
        #: w, (2N, heads, hidden_size / heads), and g, (2N)
        self.query = torch.cat([query.to(device) for query, _ in parameters]).unflatten(-1, (self.heads, -1))
        self.gate = torch.cat([gate.to(device) for _, gate in parameters])
        self.next = 0
        self.stream: torch.Tensor | None = None  # at the start of the current block
        self.deltas: list[torch.Tensor] = []  # D_b, (batch, tokens, heads, width)
        self.scores: list[torch.Tensor] = []  # s_ib, (sublayers from the current block on, batch, tokens, heads)
        #: What the sublayers of the current block read beside the stream, of the deltas' shape.
        self.terms: Iterator[torch.Tensor] = iter(())

    def before(self, layer: int, hidden_states: torch.Tensor, earlier: dict[str, Any], added: Any) -> torch.Tensor:
        """Hands the layer what its attention and its MLP read beside the stream, sum_b g_i a_ib D_b."""
        if layer != self.next:
            raise ValueError(
                f"Layer {layer} runs after {self.next} others, but `delta_attention_residuals` reads the outputs of "
                "all layers in their order: layers cannot be removed, moved or called alone."
            )
        self.next += 1
        if layer in self.blocks:
            self.begin(layer, self.blocks[layer], hidden_states)
        added["attention_input"], added["mlp_input"] = next(self.terms), next(self.terms)
        return hidden_states

    def begin(self, layer: int, end: int, stream: torch.Tensor) -> None:
        """Adds the delta of the block that ended before `layer`, for the layers from there up to `end`."""
        device = stream.device  # with `device_map`, layers are on several devices
        delta = stream if self.stream is None else stream - self.stream.to(device)
        self.stream = stream
        query = self.query[2 * layer :].to(device)
        dtype = torch.promote_types(delta.dtype, torch.float32)
        with maybe_autocast(device_type=device.type, enabled=False):
            full = delta.to(dtype)
            scale = torch.rsqrt(full.pow(2).mean(-1, keepdim=True) + self.epsilon)
            delta = delta.unflatten(-1, (self.heads, -1))
            scores = scale * torch.einsum("bthk,shk->sbth", full.view_as(delta), query.to(dtype))
        self.deltas = [*(earlier.to(device) for earlier in self.deltas), delta]
        self.scores = [*(earlier[-len(query) :].to(device) for earlier in self.scores), scores]

        here = 2 * (end - layer)
        read = [scores[:here] for scores in self.scores]
        weights = torch.stack([torch.zeros_like(read[0]), *read], dim=1).softmax(dim=1)[:, 1:]  # 0: the null source
        weights = (self.gate[2 * layer : 2 * end].to(weights).view(-1, 1, 1, 1, 1) * weights).to(delta.dtype)
        self.terms = weighted_sums(self.deltas, weights.permute(2, 3, 4, 0, 1))
