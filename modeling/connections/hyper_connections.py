r"""Hyper-connections, arXiv 2409.19606, and manifold-constrained ones (mHC), arXiv 2512.24880: n residual streams.

    r = sum_i p_i h_i                       what a sublayer f, attention or MLP, reads before its norm
    h_i <- sum_j R_ij h_j + b_i f(r)        i < n; all h_i are the embeddings before layer 0
    mean_i h_i                              what a layer returns, and the final norm reads

p, b and R of each sublayer are made of the streams of a token and of what is static; W are learned, n^ is RMSNorm:

    `static`    p_i = m_i, b_i = c_i, R_ij = a_ji
    `dynamic`   p_i = m_i + s tanh(n^(h_i) w_m), b_i = c_i + s' tanh(n^(h_i) w_b), R_ij = a_ji + s tanh(n^(h_j) w_i)
    `mhc`       p, b, R = sigmoid(z_p), 2 sigmoid(z_b), Sinkhorn(z_R); each z = s n^(h_0, .., h_(n-1)) W + static
    `ihc`       the same with R = I

Sinkhorn makes columns, then rows, of exp(z_R) add to 1, 20 times. The streams are kept as differences from the family's
own residual stream x, to which f(r) is added as ever, h_i = x + E_i; layers begin with x the mean:

    r = x + (sum_i p_i - 1) x + sum_i p_i E_i
    E_i <- sum_j R_ij E_j + (sum_j R_ij - 1) x + (b_i - 1) f(r)

which is the same for any x, and starts as the plain family to the bit: W = 0, and sum p, sum_j R_ij and b are 1. In
`static` and `dynamic` that is the paper's start: m is 1 for stream l mod n of sublayer l and 0 for others, a = I, c =
1, s = 0.01. Of `mhc` the paper gives s = 0.01 alone. Here sigmoid(z_p) starts at `OWN` for stream l mod n, at equal
parts of 1 - OWN for others, and z_R at `DIAGONAL` I. For sums that are 1 to the bit, sigmoid is written as a
difference from its start, and of z_p the difference from its start is stored. Rows of R add to 1 by the last step, so
that x cancels.

The papers differ in this: `dynamic` norms with a LayerNorm, sums the streams at the end, which the final norm does
not see but for its epsilon, and a new model's output projections start sqrt(n) larger; n^ has a scale, which W
absorbs. What other connections make of x is made of every h_i. No cache is needed beyond the family's.
"""

import functools
from typing import Any

import torch
from torch import nn
from transformers import initialization as init
from transformers.utils.generic import maybe_autocast

from resformer.configuration.connection_fields import HyperConnectionFields
from resformer.modeling.connection import Connection, Reads, coefficient
from resformer.modeling.sums import derivatives, is_differentiated, is_ordinary, mean_square, plus_outer

OWN, DIAGONAL, ITERATIONS = 0.7, 4.0, 20


class HyperConnections(Connection):
    """W, the scales s and what is static of the attention and the MLP of a layer, for p, b and R in this order."""

    name = "hyper_connections"
    fields_of = HyperConnectionFields
    place = ("attention_input", "mlp_input", "layer_output")

    def __init__(self, config: Any, layer: int):
        super().__init__(config, layer)
        self.form, self.epsilon = config.hyper_connections, config.rms_norm_eps
        self.streams = n = config.hyper_streams
        self.own = [2 * layer % n, (2 * layer + 1) % n]
        self.sizes = [n, n] if self.form == "ihc" else [n, n, n * n]
        self.static = coefficient(2, sum(self.sizes))
        if self.form != "static":
            each_stream = self.form == "dynamic"
            inputs = config.hidden_size if each_stream else n * config.hidden_size
            self.weight = coefficient(2, n + 2 if each_stream else sum(self.sizes), inputs)
            self.scale = coefficient(2, 2 if each_stream else len(self.sizes))

    def reset_parameters(self) -> None:
        n, constrained = self.streams, self.form in ("mhc", "ihc")
        start = torch.zeros(self.static.shape, dtype=self.static.dtype)
        if not constrained:
            start[[0, 1], self.own] = 1.0
            start[:, n : 2 * n] = 1.0
        if self.form != "ihc":
            start[:, 2 * n :] = (DIAGONAL if constrained else 1.0) * torch.eye(n).flatten()
        init.copy_(self.static, start)
        if self.form != "static":
            init.zeros_(self.weight)
            init.constant_(self.scale, 0.01)

    def forward(
        self,
        states: torch.Tensor,
        hyper_states: torch.Tensor | None = None,
        hyper_gain: torch.Tensor | None = None,
        attention_added: torch.Tensor | None = None,
        mlp_added: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Returns r, or what the layer returns; and E, `(batch, tokens, n, hidden_size)`, and b - 1 of the sublayer.

        Of the MLP these are the mean over the streams, which x becomes with it, and what differs from it, n + 1 each.
        """
        if hyper_states is None:
            shape = (*states.shape[:-1], self.streams, states.shape[-1])
            hyper_states = states.new_zeros(()).expand(shape)
        stream = states.reshape(hyper_states[..., 0, :].shape)  # some families flatten batch and tokens
        with maybe_autocast(device_type=states.device.type, enabled=False):
            added = attention_added if mlp_added is None else mlp_added
            if added is not None and hyper_gain is not None:
                hyper_states = plus_outer(hyper_states, hyper_gain, added.reshape(stream.shape).to(stream.dtype))
            if mlp_added is None:
                sublayer = 0 if attention_added is None else 1
                stream, hyper_states, hyper_gain = self.connect(stream, hyper_states, sublayer)
                return stream.view_as(states), {"hyper_states": hyper_states, "hyper_gain": hyper_gain}
            mean, hyper_states = hyper_states.split([1, self.streams], dim=-2)
            return states + mean.view_as(states), {"hyper_states": hyper_states}

    def connect(
        self, stream: torch.Tensor, states: torch.Tensor, sublayer: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns r, E but for the term of f, and b - 1, of the stream x and E."""
        n, logits = self.streams, self.static[sublayer]
        if self.form != "static":
            of_token, states = self.of_token(stream, states, sublayer)
            logits = logits + of_token
        read, gain, *mix = logits.split(self.sizes, dim=-1)
        mix, gain = [each.unflatten(-1, (n, n)) for each in mix], gain.unsqueeze(-1)
        if self.form in ("static", "dynamic"):
            excess, gain = read.sum(-1, keepdim=True) - 1, gain - 1
            mix.append(mix[0].sum(-1, keepdim=True) - 1)
        else:
            own = torch.arange(n, device=read.device) == self.own[sublayer]
            start = own.to(read.dtype) * (OWN - (1 - OWN) / (n - 1)) + (1 - OWN) / (n - 1)
            half = torch.tanh(read / 2)  # sigmoid(logit(start) + read) - start:
            change = 2 * start * (1 - start) * half / (1 - (1 - 2 * start) * half)
            read, excess, gain = start + change, change.sum(-1, keepdim=True), torch.tanh(gain / 2)
            mix = [sinkhorn(each) for each in mix]
        if sublayer == 1:  # the mean over E, and E without it
            mix = mix or [torch.eye(n, dtype=gain.dtype, device=gain.device).expand(*gain.shape[:-1], n)]
            columns = torch.cat((gain, *mix), dim=-1)
            mean = columns.mean(-2, keepdim=True)
            gain, *mix = torch.cat((mean, columns - mean), dim=-2).split([1, n, 1][: 1 + len(mix)], dim=-1)
        rows = [read.unsqueeze(-2), *mix[:1]]
        if torch.compiler.is_compiling():  # compilers fuse sums
            made = [(each.to(states.dtype).unsqueeze(-1) * states.unsqueeze(-3)).sum(-2) for each in rows]
        else:
            made = (torch.cat(rows, dim=-2).to(states.dtype) @ states).split([each.shape[-2] for each in rows], dim=-2)
        mixed, states = [*made, states][:2]
        result = stream + plus_outer(mixed, excess.to(stream.dtype), stream).squeeze(-2)
        if len(mix) > 1:  # rows of R that do not add to 1
            states = plus_outer(states, mix[1].squeeze(-1).to(states.dtype), stream)
        return result, states, gain.squeeze(-1).to(states.dtype)

    def of_token(self, stream: torch.Tensor, states: torch.Tensor, sublayer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns what is added to the static of p, b and R, `(batch, tokens, n + n + n n)`, and E."""
        inputs = stream, states, self.weight[sublayer].to(stream.dtype), self.epsilon
        is_one = torch.is_grad_enabled() and is_ordinary(inputs[:2], inputs[2:3])
        made, states = (Projected.apply if is_one else projected)(*inputs)
        scales = [*self.scale[sublayer]]
        if self.form == "dynamic":
            made, scales = torch.tanh(made).mT, [scales[0], scales[1], scales[0]]
        sizes = zip(scales, self.sizes, strict=True)
        return made.flatten(-2) * torch.cat([each.expand(size) for each, size in sizes]), states

    @classmethod
    def layers(cls, config: Any) -> range:
        return range(config.num_hidden_layers if config.hyper_connections != "none" else 0)

    @classmethod
    def reads(cls, config: Any, layer: int) -> Reads:
        return {"hyper_states": ("hyper_states", layer - 1)} if layer else {}

    @classmethod
    def flops(cls, config: Any) -> int:
        """Of each sublayer W, p and R, and E's term of f; of each layer the mean."""
        n, form = config.hyper_streams, config.hyper_connections
        made = {"static": 0, "dynamic": n * (n + 2), "mhc": n * n * (n + 2), "ihc": 2 * n * n}.get(form, 0)
        read_and_mix = {"mhc": n * (n + 1) + 1, "ihc": n + 1}.get(form, (n + 1) * (n + 1))
        layers = len(cls.layers(config))
        return 4 * layers * config.hidden_size * (made + read_and_mix + n) + 2 * layers * n * config.hidden_size


def projected(
    stream: torch.Tensor, states: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns n^(h) W of all streams together or, where W is as wide as one, of each: `(.., 1 or n, rows of W)`. And E.

    Args:
        stream: x, `(.., width)`.
        states: E, `(.., n, width)`.
        weight: W, `(rows, n width)` or `(rows, width)`.
    """
    streams = _streams(stream, states, weight)
    return _scales(streams, epsilon) * nn.functional.linear(streams, weight), states


def _streams(stream: torch.Tensor, states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (stream.unsqueeze(-2) + states).view(*stream.shape[:-1], -1, weight.shape[-1])


def _scales(streams: torch.Tensor, epsilon: float) -> torch.Tensor:
    return torch.rsqrt(mean_square(streams) + epsilon)


class Projected(torch.autograd.Function):
    """`projected`, without keeping the sums h_i = x + E_i: the backward pass makes them again.

        dh = r dz W - r^3 / width <dz, h W> h        dE = dh + that of the mix, which reads the E returned

    for z = r h W, r the scale of RMSNorm.
    """

    @staticmethod
    def forward(ctx: Any, stream: torch.Tensor, states: torch.Tensor, weight: torch.Tensor, epsilon: float) -> Any:
        ctx.set_materialize_grads(False)
        streams = _streams(stream, states, weight)
        scales, products = _scales(streams, epsilon), nn.functional.linear(streams, weight)
        ctx.epsilon = epsilon
        ctx.save_for_backward(stream, states, weight, scales, products)
        return scales * products, states.view_as(states)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None, of_mix: torch.Tensor | None) -> tuple[Any, ...]:
        if gradient is None:
            return None, of_mix, None, None
        stream, states, weight, scales, products = ctx.saved_tensors
        if is_differentiated(gradient):
            plain = functools.partial(projected, epsilon=ctx.epsilon)
            return *derivatives(plain, (stream, states, weight), (gradient, of_mix)), None
        with maybe_autocast(device_type=stream.device.type, enabled=False):
            streams, (n, width) = _streams(stream, states, weight), states.shape[-2:]
            of_products = (scales * gradient).to(products.dtype)
            factors = (gradient * products).sum(-1, keepdim=True) * scales.pow(3) / -weight.shape[-1]
            factors = factors.to(streams.dtype)
            rows, lines = of_products.flatten(0, -2), streams.flatten(0, -2)
            of_streams = rows @ weight if of_mix is None else torch.addmm(of_mix.reshape(lines.shape), rows, weight)
            of_streams = of_streams.view_as(streams).addcmul_(streams, factors)
            of_stream = of_products.sum(-2) @ weight.unflatten(-1, (-1, width)).sum(1)
            each = factors.expand(*factors.shape[:-2], n, 1).mT @ streams.view_as(states)
            return of_stream + each.squeeze(-2), of_streams.view_as(states), rows.mT @ lines, None


def sinkhorn(logits: torch.Tensor) -> torch.Tensor:
    """Returns exp(logits), `(.., n, n)`, with rows that add to 1, and columns nearly."""
    made: torch.Tensor = Sinkhorn.apply(logits) if is_ordinary([logits]) else _sinkhorn(logits)
    return made


def _sinkhorn(logits: torch.Tensor) -> torch.Tensor:
    matrix = logits.softmax(-2)
    for iteration in range(ITERATIONS):
        if iteration:
            matrix = matrix / matrix.sum(-2, keepdim=True)
        matrix = matrix / matrix.sum(-1, keepdim=True)
    return matrix


class Sinkhorn(torch.autograd.Function):
    """`sinkhorn` as u_i K_ij v_j, K = exp(logits), where v = 1 / (K^T u) and u = 1 / (K v) in turn.

    Kept are u and v of each iteration, 2 n numbers, where autograd keeps 2 n (n + 1).
    """

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor) -> torch.Tensor:
        kernel = _kernel(logits)
        every_u = logits.new_ones(ITERATIONS + 1, *logits.shape[:-1], 1)  # the first is 1
        every_v = torch.empty_like(every_u[1:])
        for before, v, u in zip(every_u, every_v, every_u[1:], strict=False):
            torch.matmul(kernel.mT, before, out=v).reciprocal_()
            torch.matmul(kernel, v, out=u).reciprocal_()
        ctx.save_for_backward(logits, every_u, every_v)
        return every_u[-1] * kernel * every_v[-1].mT

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor | None:
        logits, every_u, every_v = ctx.saved_tensors
        if is_differentiated(gradient):
            return derivatives(lambda each: [_sinkhorn(each)], [logits], [gradient])[0]
        with maybe_autocast(device_type=logits.device.type, enabled=False):
            kernel, of_u, of_v = _kernel(logits), -every_u[1:].square(), -every_v.square()
            product = gradient * kernel
            grad_u, grad_v = -product @ every_v[-1], -product.mT @ every_u[-1]
            for k in reversed(range(ITERATIONS)):  # of_u and of_v become the gradients of K v and K^T u, negative
                grad_u = of_u[k].mul_(grad_u)
                grad_v = of_v[k].mul_(kernel.mT @ grad_u + grad_v)
                grad_u, grad_v = kernel @ grad_v, 0.0
            direct = gradient * every_u[-1] * every_v[-1].mT
            of_u, of_v, every_u, every_v = (
                each.movedim(0, -1).squeeze(-2) for each in (of_u, of_v, every_u[:-1], every_v)
            )
            return kernel * (direct - of_u @ every_v.mT - every_u @ of_v.mT)


def _kernel(logits: torch.Tensor) -> torch.Tensor:
    return (logits - logits.amax(-2, keepdim=True)).exp()
