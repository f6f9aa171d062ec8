r"""Multiway dynamic dense connections (MUDD): MUDDFormer, arXiv 2502.12170.

    X^c_i = X_i + sum_{j <= i} A^c_ij X_j       c = Q, K, V, R;  i = 1..N
    A_i = W2 GELU(W1 RMSNorm(X_i)) + a_i        of each token, (channels, i + 1)

X_0 are the embeddings, X_i what block i - 1 has made. Block i adds to the stream X^R_i; its queries are made of
norm(X^Q_i), keys and values alike, with the norm that it has before attention. The final norm reads X^R_N. Channels
share W1, `(channels (i + 1), hidden_size)`, as in the paper's appendix B. W1 starts with a variance of 1 / hidden_size,
W2 and a at 0: the paper's start, and plain Llama to the bit. The paper's a_ii, which starts at 1, is 1 + a_ii here, so
that a model in bfloat16 can learn it.

With `mudd_norm`, the paper's PrePostDANorm for deep models,

    X^c_i = X_i + sum_{j <= i} A^c_ij Norm_j(X_j)       c = Q, K, V
    X^R_i = X_i + Norm'_i(sum_{j <= i} A^R_ij Norm_j(X_j))

with learned scales, which start at 1 in Norm_j and at 0.001 in Norm'_i. Norm' is in R alone, as in the authors' code;
the paper's equation 10 has it in every channel.

It departs from their code in three points: queries, keys and values share the scale of the layer's norm; W1 has the
paper's width, where theirs is rounded up to a multiple of 64 and is four times as wide for X_N; and MLPs keep theirs
(section 2.4 has them grow with depth). Layers without attention have R alone, and layers that read another's keys or
values have no channel of these.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import initialization as init
from transformers.utils.generic import maybe_autocast

from resformer.configuration import key_sources, value_sources
from resformer.configuration.connection_fields import MuddFields
from resformer.modeling.connection import BetweenLayers, Connection, coefficient, whole
from resformer.modeling.sums import derivatives, is_differentiated, mean_square, one_function_pays, weighted_sums

INPUTS = {"q": "query_input", "k": "key_input", "v": "value_input"}


def channels_of(config: Any, block: int) -> str:
    """The channels that a block reads, R last; `num_hidden_layers` stands for the final norm."""
    chosen = "".join(each for each in "qkvr" if each in config.mudd_channels)
    places = getattr(config, "places", ())
    if block == config.num_hidden_layers or (places and not places[block].attention):
        return chosen[-1:] if "r" in chosen else ""
    others = [key for key, sources in (("k", key_sources), ("v", value_sources)) if sources(config)[block] != block]
    return "".join(each for each in chosen if each not in others)


class Mudd(Connection):
    """What follows block `layer`: its W1, W2 and a, and the scales of norms."""

    name = "mudd"
    fields_of = MuddFields

    def __init__(self, config: Any, layer: int):
        super().__init__(config, layer)
        self.channels, self.epsilon = channels_of(config, layer + 1), config.rms_norm_eps
        self.is_last = layer + 1 == config.num_hidden_layers
        channels, width = len(self.channels), config.hidden_size
        weights = channels * (layer + 2)
        if weights:
            self.first, self.second = coefficient(weights, width), coefficient(weights, weights)  # W1, W2
            self.static = coefficient(channels, layer + 2)  # a
        if config.mudd_norm:
            self.pre = coefficient(1 if layer else 2, width)  # of Norm_{layer + 1}, in layer 0 of Norm_0 before it
            if "r" in self.channels:
                self.post = coefficient(1, width)  # of Norm'
        self.names = [*self._parameters]  # a parametrization gives them others

    def forward(self) -> dict[str, torch.Tensor]:
        return {name: whole(getattr(self, name)) for name in self.names}

    def reset_parameters(self) -> None:
        starts = {"second": 0.0, "static": 0.0, "pre": 1.0, "post": 1e-3}
        for name, parameter in self.named_parameters():
            if name == "first":
                init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
            else:
                init.constant_(parameter, starts[name])

    @torch.no_grad()
    def deviations(self) -> list[tuple[float, str]]:
        with_effect = ("second", "static")  # of the others NaN alone has one
        return [
            (float(each.abs().max() if name in with_effect else (0 * each).sum()), f".{name}")
            for name, each in self.named_parameters()
        ]

    @classmethod
    def layers(cls, config: Any) -> Sequence[int]:
        blocks = range(1, config.num_hidden_layers + 1) if config.mudd else ()
        return range(max((block for block in blocks if channels_of(config, block)), default=0))

    @classmethod
    def needs(cls, config: Any) -> set[str]:
        return {"layer_input"}

    @classmethod
    def between(cls, modules: Mapping[int, Any], of_decoder: Any) -> BetweenLayers:
        return Aggregates(modules)

    @classmethod
    def flops(cls, config: Any) -> int:
        """2 x hidden_size for a row of W1 and for a term of a sum, and W2."""
        rows = [len(channels_of(config, layer + 1)) * (layer + 2) for layer in cls.layers(config)]
        return sum(4 * config.hidden_size * each + 2 * each**2 for each in rows)


class MuddAttention(Connection):
    """The inputs of the projections of a layer."""

    name = "mudd_attention"
    fields_of = MuddFields
    place = "attention_input"
    way_out = " Leave its channels out: `mudd_channels`='r'."

    def forward(
        self,
        states: torch.Tensor,
        mudd_terms: Mapping[str, torch.Tensor],
        attention_norm: Callable[[torch.Tensor], torch.Tensor],
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """`mudd_terms` are X^Q - X^R and so on, so that other connections at this place act on all channels."""
        inputs = {INPUTS[each]: states + term.view_as(states) for each, term in mudd_terms.items()}
        return states, {place: attention_norm(each) for place, each in inputs.items()}

    @classmethod
    def layers(cls, config: Any) -> Sequence[int]:
        return [layer for layer in range(1, config.num_hidden_layers) if cls.inputs(config, layer)]

    @classmethod
    def inputs(cls, config: Any, layer: int) -> list[str]:
        return [INPUTS[each] for each in channels_of(config, layer) if each != "r"] if config.mudd else []

    @classmethod
    def needs(cls, config: Any) -> set[str]:
        return {place for layer in cls.layers(config) for place in (str(cls.place), *cls.inputs(config, layer))}


class Aggregates(BetweenLayers):
    """The X_j of one forward pass, and what blocks read of them.

    Between the layers: those read different numbers of states, and torch.compile makes one graph for all of them.
    """

    def __init__(self, modules: Mapping[int, Mudd]):
        self.modules, self.parameters = modules, {layer: module() for layer, module in modules.items()}
        self.count = 0
        self.states: list[torch.Tensor] = []  # X_j, or Norm_j(X_j)
        self.buffer: torch.Tensor | None = None  # has room for all of them, for `Summed`, which hands `stack` on
        self.stack: torch.Tensor

    def before(self, layer: int, hidden_states: torch.Tensor, earlier: dict[str, Any], added: Any) -> torch.Tensor:
        if layer != self.count:
            raise ValueError(
                f"Layer {layer} runs after {self.count} others, but `mudd` reads the outputs of all layers in their "
                "order: layers cannot be removed, moved or called alone."
            )
        hidden_states, terms = self.aggregated(hidden_states)
        if terms:
            earlier["mudd_terms"] = terms
        return hidden_states

    def after(self, layer: int, hidden_states: torch.Tensor) -> torch.Tensor:
        is_last = layer in self.modules and self.modules[layer].is_last
        return self.aggregated(hidden_states)[0] if is_last else hidden_states

    def aggregated(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """X_i -> X^R_i, and X^Q_i - X^R_i and so on, by their letters."""
        number, self.count = self.count, self.count + 1
        module = self.modules.get(max(0, number - 1))
        if module is None:
            return hidden_states, {}
        device, epsilon = hidden_states.device, module.epsilon
        full = torch.promote_types(hidden_states.dtype, torch.float32)
        own = {name: each.to(device) for name, each in self.parameters[max(0, number - 1)].items()}
        scale = torch.rsqrt(mean_square(hidden_states) + epsilon)  # of RMSNorm
        state = hidden_states
        if "pre" in own:
            state = hidden_states * scale.to(hidden_states) * own["pre"][-1 if number else 0].to(hidden_states)
        if number == 0 or not module.channels:
            self.sums(state, state.new_empty(*state.shape[:-1], 0, number + 1))
            return hidden_states, {}
        with maybe_autocast(device_type=device.type, enabled=False):
            hidden = scale * nn.functional.linear(hidden_states, own["first"].to(hidden_states))
            weights = nn.functional.linear(nn.functional.gelu(hidden), own["second"].to(full))
        weights = weights.unflatten(-1, own["static"].shape) + own["static"]
        if "r" in module.channels and "post" not in own:
            weights = torch.cat((weights[..., :-1, :] - weights[..., -1:, :], weights[..., -1:, :]), dim=-2)
        terms = self.sums(state, weights.to(hidden_states))
        if "r" in module.channels:
            *terms, stream = terms
            if "post" in own:
                post = own["post"][0].to(stream)
                stream = nn.functional.rms_norm(stream, stream.shape[-1:], post, epsilon)
                terms = [each - stream for each in terms]
            hidden_states = hidden_states + stream
        return hidden_states, dict(zip(module.channels, terms, strict=False))

    def sums(self, state: torch.Tensor, weights: torch.Tensor) -> list[torch.Tensor]:
        """Returns sum_k weights[.., s, k] X_k of each s; `state` is the last X_k."""
        if self.buffer is None and not self.states and one_function_pays(state):
            self.buffer = state.new_empty(*state.shape[:-1], 2 + max(self.modules), state.shape[-1])
            self.stack = self.buffer[..., :0, :]
        if self.buffer is None:
            self.states = [*(each.to(state) for each in self.states), state]
            return [*weighted_sums(self.states, weights)] if weights.shape[-2] else []
        self.buffer = self.buffer.to(state)
        sums, self.stack = Summed.apply(weights, state, self.stack.to(state), self.buffer)
        return [*sums.unbind(-2)]


class Summed(torch.autograd.Function):
    """Z_s = sum_k A_sk X_k, and all X_k for the next block: views of one buffer, into which each is copied once.

        dX_k = sum_s A_sk dZ_s + that of the next block        dA_sk = <dZ_s, X_k>

    On the way back one product of a block adds to the gradients of all X_k.
    """

    @staticmethod
    def forward(ctx: Any, weights: torch.Tensor, state: torch.Tensor, earlier: torch.Tensor, buffer: Any) -> Any:
        ctx.set_materialize_grads(False)
        states = buffer.data[..., : weights.shape[-1], :]  # `data`: what is saved of other states has not changed
        states[..., -1, :] = state
        ctx.save_for_backward(weights, state, earlier, states)
        with maybe_autocast(device_type=state.device.type, enabled=False):
            return weights @ states, states

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None, of_next: torch.Tensor | None) -> tuple[Any, ...]:
        if gradient is None:
            return None, *((None, None) if of_next is None else (of_next[..., -1, :], of_next[..., :-1, :])), None
        weights, state, earlier, states = ctx.saved_tensors
        if is_differentiated(gradient):
            return *derivatives(summed, (weights, state, earlier), (gradient, of_next)), None
        with maybe_autocast(device_type=state.device.type, enabled=False):
            if of_next is None:
                of_states = weights.mT @ gradient
            else:
                flat = (each.flatten(0, -3) for each in (of_next, weights.mT, gradient))
                of_states = torch.baddbmm(*flat).view_as(states)
            return gradient @ states.mT, of_states[..., -1, :], of_states[..., :-1, :], None


def summed(weights: torch.Tensor, state: torch.Tensor, earlier: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    states = torch.cat((earlier, state.unsqueeze(-2)), dim=-2)
    return weights @ states, states
