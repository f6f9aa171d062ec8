r"""Attention Residuals (AttnRes), of Kimi: arXiv 2603.15031.

Sublayer i, the attention of layer n for i = 2n and its MLP for i = 2n + 1, reads before its norm, and the final norm
for i = 2N reads

    z_i = sum_j a_ij b_j        a_ij = exp(s_ij) / sum_k exp(s_ik)        s_ij = w_i . RMSNorm(b_j)

in place of the residual stream x_i, `(batch, tokens, hidden_size)`, the sum of all b_j. b_0 are the embeddings. In
full, b_j is the output of sublayer j - 1. In blocks of layers, it is the sum of the outputs in block j, the last as far
as it has come. w_i, `(hidden_size)`, starts at 0: a mean over all. The attention of layer 0 has b_0 alone to read.

That is the paper's. With `attnres_init`, the sublayer reads x_i + g_i (z_i - x_i), where the gate g_i, a number, starts
there. At g = 0 this is the plain family, to the bit for finite b; at g = 1 the paper's.

The norm's scale, which the published code learns, is left out: w_i has its effect. Outputs are taken where they are
added to the stream; differences of the stream would have its rounding errors.
"""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import initialization as init
from transformers.utils.generic import maybe_autocast

from resformer.configuration.connection_fields import AttnResFields
from resformer.configuration.sources import block_starts
from resformer.modeling.connection import Connection, Reads, coefficient
from resformer.modeling.sums import derivatives, is_differentiated, mean_square, products_pay


class AttnRes(Connection):
    """The w and g of a layer: of its attention, unless it is the first, its MLP and, in the last, the final norm."""

    name = "attnres"
    fields_of = AttnResFields
    place = ("attention_input", "mlp_input", "layer_output")
    plain = {"attnres_init": 0.0}
    at_end = True

    def __init__(self, config: Any, layer: int):
        super().__init__(config, layer)
        self.epsilon, self.first = config.rms_norm_eps, config.attnres_init
        #: Number of a place -> whether the output of the sublayer before it is the first of its block.
        self.opens = {i - 2 * layer: opens_block(config, i - 1) for i in _sublayers(config, layer)}
        self.query = coefficient(len(self.opens), config.hidden_size)  # w
        if self.first is not None:
            self.gate = coefficient(len(self.opens))  # g

    def forward(
        self,
        states: torch.Tensor,
        layer_input: torch.Tensor,
        attnres_ended: torch.Tensor | None = None,
        attnres_last: torch.Tensor | None = None,
        attnres_scales: torch.Tensor | None = None,
        attnres_added: torch.Tensor | None = None,
        attention_added: torch.Tensor | None = None,
        mlp_added: torch.Tensor | None = None,
    ) -> Any:
        """Returns what the sublayer reads, and its `attnres_ended`, `attnres_last` and `attnres_scales`, by name.

        Args:
            states: x_i. Some families flatten batch and tokens.
            attnres_ended: the b_j but for the last that the sublayer before has read, `(blocks, batch, tokens,
                hidden_size)`.
            attnres_last: the last of them.
            attnres_scales: RMSNorm's of all of these, `(blocks + 1, batch, tokens, 1)`.
            attnres_added, attention_added, mlp_added: the output of that sublayer, at the three places.
        """
        place = 0 if attention_added is None else 1 if mlp_added is None else 2
        if place not in self.opens:
            return states
        added: Any = (attnres_added, attention_added, mlp_added)[place]
        last = layer_input if attnres_last is None else attnres_last
        ended, scales, added = attnres_ended, attnres_scales, added.reshape(last.shape).to(last.dtype)
        row = place - min(self.opens)
        with maybe_autocast(device_type=states.device.type, enabled=False):
            if not self.opens[place]:
                last, scales = last + added, scales[:-1]
            elif ended is None:
                ended, scales, last = last[None], self.scale(last), added
            else:
                ended, last = torch.cat((ended, last[None])), added
            scales = torch.cat((scales, self.scale(last)))
            query = self.query[row].to(last.dtype).unsqueeze(-1)
            if last.shape[-2] == 1:  # of one token all are few bytes in fewer kernels
                every = torch.cat((ended, last[None]))
                weights = _weights(every @ query, scales)
                read = (_by_token(weights).mT @ _by_token(every)).squeeze(-2)
            elif products_pay([ended, last]):
                read, ended = Attended.apply(ended, last, scales, query)
            else:
                read = attended(ended, last, scales, query)
            read = read.view_as(states)
            if self.first is not None:
                read = torch.lerp(states, read, self.gate[row].to(read.dtype))
        return read, {"attnres_ended": ended, "attnres_last": last, "attnres_scales": scales}

    def scale(self, states: torch.Tensor) -> torch.Tensor:
        return torch.rsqrt(mean_square(states) + self.epsilon)[None]

    def reset_parameters(self) -> None:
        init.zeros_(self.query)
        if self.first is not None:
            init.constant_(self.gate, self.first)

    @torch.no_grad()
    def deviations(self) -> list[tuple[float, str]]:
        if self.first is None:
            return [(1.0, "")]
        gates = [(abs(float(gate)), f".gate[{row}]") for row, gate in enumerate(self.gate)]
        return [*gates, (float((0 * self.query).sum()), ".query")]  # NaN at gates of 0

    @classmethod
    def layers(cls, config: Any) -> Sequence[int]:
        return range(config.num_hidden_layers if config.attnres else 0)

    @classmethod
    def reads(cls, config: Any, layer: int) -> Reads:
        """What the attention reads; the rest of the layer goes on from there."""
        if layer == 0:
            return {}
        opened = max(n for n in range(layer) if opens_block(config, 2 * n))
        return {
            "attnres_ended": ("attnres_ended", opened),
            "attnres_last": ("attnres_last", layer - 1),
            "attnres_scales": ("attnres_scales", layer - 1),
            "attnres_added": ("mlp_added", layer - 1),
        }

    @classmethod
    def flops(cls, config: Any) -> int:
        """4 x hidden_size for each b that a sublayer reads: its score, and its term of the sum."""
        ends = [end for layer in cls.layers(config) for end in _sublayers(config, layer)]
        return 4 * config.hidden_size * sum(1 + sum(opens_block(config, i) for i in range(end)) for end in ends)


def attended(ended: torch.Tensor, last: torch.Tensor, scales: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Returns z of `ended` and `last`, whose scales and query are as in `AttnRes`."""
    weights = _weights(_products(ended, last, query), scales)
    return torch.addcmul((weights[:-1] * ended).sum(0), weights[-1], last)


def _products(ended: torch.Tensor, last: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    if torch.compiler.is_compiling():  # compilers fuse sums
        return torch.cat([(each * query.mT).sum(-1, keepdim=True) for each in (ended, last[None])])
    return torch.cat((ended @ query, (last @ query)[None]))


def _weights(products: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return (scales * products).softmax(0).to(products.dtype)


class Attended(torch.autograd.Function):
    """`attended`, and `ended` for the next sublayer: on the way back each adds to the gradient of the one before.

        db_j = a_j dz + r_j ds_j w + that of the next sublayer        ds_j = a_j (<b_j, dz> - sum_k a_k <b_k, dz>)

    r_j is the scale of b_j. One matrix product for each token makes the first two terms of all db_j.
    """

    @staticmethod
    def forward(ctx: Any, ended: torch.Tensor, last: torch.Tensor, scales: torch.Tensor, query: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        products = _products(ended, last, query)
        weights = _weights(products, scales)
        ctx.save_for_backward(ended, last, scales, query, products, weights)
        read = (_by_token(weights[:-1]).mT @ _by_token(ended)).squeeze(-2)
        return torch.addcmul(read, weights[-1], last), ended.view_as(ended)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None, of_next: torch.Tensor | None) -> tuple[Any, ...]:
        if gradient is None:
            return of_next, None, None, None
        ended, last, scales, query, products, weights = ctx.saved_tensors
        if is_differentiated(gradient):
            inputs = ended, last, scales, query
            return derivatives(lambda *each: (attended(*each), each[0]), inputs, (gradient, of_next))
        with maybe_autocast(device_type=ended.device.type, enabled=False):
            dots = (_by_token(ended) @ gradient.unsqueeze(-1)).movedim(-2, 0)
            dots = torch.cat((dots, (last * gradient).sum(-1, keepdim=True)[None]))
            of_scores = weights * (dots - (weights * dots).sum(0)).to(scales.dtype)
            of_products = (of_scores * scales).to(last.dtype)
            of_query = ended.flatten(0, -2).mT @ of_products[:-1].flatten(0, -2)
            of_query = of_query + (last.flatten(0, -2).mT @ of_products[-1].flatten(0, -2))
            factors = _by_token(torch.cat((weights, of_products), dim=-1))
            rows = torch.stack((gradient, query.squeeze(-1).expand_as(gradient)), dim=-2)
            of_last = (factors[..., -1:, :] @ rows).squeeze(-2)
            factors, rows = factors[..., :-1, :].flatten(0, -3), rows.flatten(0, -3)
            if of_next is None:
                of_ended = factors @ rows
            else:
                of_ended = torch.baddbmm(_by_token(of_next).flatten(0, -3), factors, rows)
            of_ended = of_ended.view(_by_token(ended).shape).movedim(-2, 0)
        return of_ended, of_last, of_scores * products, of_query


def _by_token(states: torch.Tensor) -> torch.Tensor:
    """`(blocks, batch, tokens, width)` -> `(batch, tokens, blocks, width)`."""
    return states.movedim(0, -2)


def _sublayers(config: Any, layer: int) -> range:
    """The i of a layer that have w_i."""
    return range(max(1, 2 * layer), 2 * layer + 2 + (layer == config.num_hidden_layers - 1))


def opens_block(config: Any, i: int) -> bool:
    """Whether the output of sublayer i is the first of its block."""
    if config.attnres_blocks is None:
        return True
    return i % 2 == 0 and i // 2 in block_starts(config.num_hidden_layers, config.attnres_blocks)
