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

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import initialization as init

from resformer.configuration import mixing_layers, value_layers
from resformer.configuration.connection_fields import ValueResidualFields
from resformer.modeling.connection import (
    Added,
    BetweenLayers,
    MixingRow,
    Reads,
    StartsAsStated,
    Weights,
    coefficient,
)
from resformer.modeling.connections.depth_average import RunningAverage
from resformer.modeling.sums import is_differentiated, is_ordinary, one_function_pays, weighted_sum

#: Numbers that may be kept so that decoding launches less.
MANY = 2**24


class ValueResidual(MixingRow):
    name = "value_residual"
    place = "mixed_values"
    fields_of = ValueResidualFields
    plain = {"value_residual_init": [0.0, 1.0]}
    modes: ClassVar[dict[str, type["ValueResidual"]]] = {}

    def __init_subclass__(cls, mode: str | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if mode is not None:  # torch makes subclasses of its own: parametrizations, FSDP2
            ValueResidual.modes[mode] = cls

    def __init__(self, config: Any, layer: int):
        super().__init__(config, layer)
        self.start: tuple[float, ...] = tuple(config.value_residual_init)
        self.columns = self.mixes(config, layer)

    @classmethod
    def chosen(cls, config: Any) -> type["ValueResidual"]:
        return ValueResidual.modes.get(config.value_residual, ValueResidual)

    @classmethod
    def plain_start(cls, fields: Mapping[str, Any]) -> dict[str, Any]:
        asked = fields.get("value_residual")  # not validated yet
        return next((dict(each.plain) for mode, each in ValueResidual.modes.items() if mode == asked), {})

    @classmethod
    def layers(cls, config: Any) -> Sequence[int]:
        return mixing_layers(config)

    @classmethod
    def mixes(cls, config: Any, layer: int) -> list[int]:
        """The layers whose values make V'_n of a mixing layer, ascending, n last."""
        return [value_layers(config, layer)[0], layer]

    @classmethod
    def reads(cls, config: Any, layer: int) -> Reads:
        return {"first_values": ("raw_values", cls.mixes(config, layer)[0])}

    @classmethod
    def flops(cls, config: Any) -> int:
        """2 x key/value heads x head_dim for each term of a mix, and what the mode adds."""
        terms = [len(cls.mixes(config, layer)) for layer in mixing_layers(config)]
        mixed = 2 * config.num_key_value_heads * config.head_dim * sum(terms)
        return mixed + sum(cls.more_flops(config, number) for number in terms)

    @classmethod
    def more_flops(cls, config: Any, terms: int) -> int:
        """Those of a layer beyond its mix."""
        return 0

    @classmethod
    def tp_plan(cls, config: Any) -> dict[str, str]:
        # Each rank mixes the values of its own heads only, so the coefficients' gradients are partial sums.
        return {"layers.*.value_residual": "replicated_with_grad_allreduce"} if mixing_layers(config) else {}


class FixedValueResidual(ValueResidual, mode="constant"):
    """The same two numbers in every mixing layer, so that all take one product l1 V_0."""

    plain = {}

    def __init__(self, config: Any, layer: int):
        super().__init__(config, layer)
        self.start = self.fixed(config)

    def forward(self, values: torch.Tensor, share_of_first: torch.Tensor) -> torch.Tensor:
        """`share_of_first` is l1 V_0."""
        return torch.add(share_of_first, values, alpha=self.start[1])

    def row(self, of_decoder: Any) -> list[float]:
        return list(self.start)

    @classmethod
    def between(cls, modules: Mapping[int, Any], of_decoder: Any) -> BetweenLayers:
        return OneShare(modules)

    @classmethod
    def fixed(cls, config: Any) -> tuple[float, ...]:
        return tuple(config.value_residual_init)

    @classmethod
    def fixed_effects(cls, config: Any) -> list[str]:
        weights = list(cls.fixed(config))
        if weights == [0.0, 1.0] or not mixing_layers(config):
            return []
        return [f"`value_residual`={config.value_residual!r} mixes with fixed coefficients {weights}"]

    @classmethod
    def tp_plan(cls, config: Any) -> dict[str, str]:
        return {}


class IdentityValueResidual(FixedValueResidual, mode="identity"):
    @classmethod
    def fixed(cls, config: Any) -> tuple[float, ...]:
        return 0.5, 0.5


class OneShare(BetweenLayers):
    def __init__(self, modules: Mapping[int, FixedValueResidual]):
        self.modules = modules
        self.products: dict[tuple[int, torch.device], torch.Tensor] = {}  # of each V_0, on each device

    def before(self, layer: int, hidden_states: torch.Tensor, earlier: dict[str, Any], added: Any) -> torch.Tensor:
        if layer in self.modules:
            module, first = self.modules[layer], earlier["first_values"]
            of_first = module.columns[0], first.device
            if of_first not in self.products:
                self.products[of_first] = first * module.start[0]
            earlier["share_of_first"] = self.products[of_first]
        return hidden_states


class LearnableValueResidual(ValueResidual, mode="learnable"):
    def __init__(self, config: Any, layer: int):
        super().__init__(config, layer)
        self.weight = coefficient(2)  # l1, l2

    def forward(
        self,
        values: torch.Tensor,
        first_values: torch.Tensor,
        share_of_first: torch.Tensor | None = None,
        onward: "Onward | None" = None,
    ) -> torch.Tensor:
        """`share_of_first` is l1 V_0, where that is known."""
        return _mixed(values, first_values, self.weight, None, share_of_first, onward)

    def reset_parameters(self) -> None:
        init.copy_(self.weight, torch.tensor(self.start, dtype=self.weight.dtype))

    def row(self, of_decoder: Any) -> list[float]:
        zero, one = probes(self)
        return [float(self(zero, one)), float(self(one, zero))]

    @classmethod
    def between(cls, modules: Mapping[int, Any], of_decoder: Any) -> BetweenLayers:
        return SharesOfFirst(modules, {n: module.weight for n, module in modules.items()})


def _mixed(
    values: torch.Tensor,
    first_values: torch.Tensor,
    own: torch.Tensor,
    share: torch.Tensor | None,
    share_of_first: torch.Tensor | None = None,
    onward: "Onward | None" = None,
) -> torch.Tensor:
    """Returns l1 V_0 + l2 V_n.

    Args:
        own: l1 and l2, `(2,)`, or l2 alone, `(1,)`.
        share: l1 then, `(1,)`, or a number for each row of V_0, `(..., 1)`.
    """
    if onward is not None and is_ordinary([values, first_values], [own] if share is None else [own, share]):
        mixed, first = Mix.apply(values, first_values, own, share)
        if not onward.is_taken:
            onward.first = first
        return mixed
    if share_of_first is None:
        return weighted_sum((first_values, values), _pair(own, share))
    return torch.addcmul(share_of_first, values, own[-1])


def _pair(own: torch.Tensor, share: torch.Tensor | None) -> Sequence[torch.Tensor]:
    """l1 and l2, which broadcast to values."""
    if share is None:
        return own.unbind()
    return share[0] if share.dim() == 1 else share, own[0]


class Mix(torch.autograd.Function):
    """l1 V_0 + l2 V_n, and V_0 for the next layer that mixes: on the way back its gradient is summed up.

        dV_n = l2 dV'_n        dV_0 = l1 dV'_n + that of the next layer        dl1 = <dV'_n, V_0>, dl2 = <dV'_n, V_n>

    The dot products are those of rows, rounded to the dtype of values, and then a sum.
    """

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, first: torch.Tensor, own: torch.Tensor, share: Any) -> tuple[Any, Any]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(values, first, own, share)
        mixed = weighted_sum((first, values), _pair(own, share))
        return mixed, first.view_as(first) if ctx.needs_input_grad[1] else None

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None, of_next: torch.Tensor | None) -> tuple[Any, ...]:
        if gradient is None:
            return None, of_next, None, None
        values, first, own, share = ctx.saved_tensors
        of_first, of_values = _pair(own, share)
        needs_values, needs_first, *needs_weights = ctx.needs_input_grad
        grad_values = gradient * of_values if needs_values else None
        grad_first = None
        if needs_first:
            grad_first = gradient * of_first if of_next is None else torch.addcmul(of_next, gradient, of_first)
        if not any(needs_weights):
            return grad_values, grad_first, None, None
        dots = _dots(gradient, first, values)
        by_rows = share is not None and share.dim() > 1
        sums = dots[by_rows:].sum(1, dtype=own.dtype)
        grad_share = None if share is None else dots[0].view_as(share) if by_rows else sums[:1]
        return grad_values, grad_first, sums[-len(own) :], grad_share


def _dots(gradient: torch.Tensor, *states: torch.Tensor) -> torch.Tensor:
    """Returns <gradient, state> of each row and each state, `(states, rows)`."""
    if is_differentiated(gradient):
        return torch.stack([(gradient * state).sum(-1).reshape(-1) for state in states])
    rows = gradient.reshape(-1, 1, gradient.shape[-1])
    dots = rows.new_empty(len(states), len(rows), 1, 1)
    for state, out in zip(states, dots, strict=True):  # autocast, which would round it, leaves `out=` alone
        torch.bmm(rows, state.reshape(rows.shape).mT, out=out)
    return dots.flatten(1)


class Onward:
    """V_0 as a layer hands it on to the next. Checkpointing runs the layer again, when it has been taken."""

    first: torch.Tensor | None = None
    is_taken = False


class FirstValues(BetweenLayers):
    """V_0 on its way through the layers that mix it, with gradients: each reads what the one before hands on."""

    def __init__(self, modules: Mapping[int, Any]):
        self.modules = modules
        self.newest: dict[tuple[int, torch.device], torch.Tensor] = {}  # of each V_0, on each device
        self.onward: Onward | None = None  # of the layer that runs

    def before(self, layer: int, hidden_states: torch.Tensor, earlier: dict[str, Any], added: Any) -> torch.Tensor:
        if layer in self.modules and one_function_pays(first := earlier["first_values"]):
            self.key = self.modules[layer].columns[0], first.device
            earlier["first_values"] = self.newest.get(self.key, first)
            earlier["onward"] = self.onward = Onward()
        return hidden_states

    def after(self, layer: int, hidden_states: torch.Tensor) -> torch.Tensor:
        if self.onward is not None:
            if self.onward.first is not None:
                self.newest[self.key] = self.onward.first
            self.onward.first, self.onward.is_taken, self.onward = None, True, None
        return hidden_states


class SharesOfFirst(FirstValues):
    """l1 V_0 of all layers in one kernel where they are few numbers, as in decoding, and no gradient is asked for.

    Args:
        modules: of the mixing layers.
        shares: layer -> l1 as the first of its numbers.
    """

    def __init__(self, modules: Mapping[int, Any], shares: Mapping[int, torch.Tensor]):
        super().__init__(modules)
        self.shares = shares
        self.products: dict[int, torch.Tensor | None] = {}

    def before(self, layer: int, hidden_states: torch.Tensor, earlier: dict[str, Any], added: Any) -> torch.Tensor:
        if layer in self.modules:
            if layer not in self.products:
                alike = [n for n, each in self.modules.items() if each.columns[0] == self.modules[layer].columns[0]]
                self.products.update(zip(alike, self.multiplied(alike, earlier["first_values"]), strict=True))
            earlier["share_of_first"] = share = self.products[layer]
            if share is not None:
                return hidden_states
        return super().before(layer, hidden_states, earlier, added)

    def multiplied(self, layers: Sequence[int], first: torch.Tensor) -> Sequence[torch.Tensor | None]:
        shares, weights = [self.shares[n] for n in layers], [self.modules[n].weight for n in layers]
        if (
            torch.is_grad_enabled()
            or len(layers) * first.numel() > MANY
            or not all(map(torch.Tensor.numel, weights))  # DeepSpeed has freed them
            or not is_ordinary([first], [*shares, *weights])  # some may be on another device
        ):
            return [None] * len(layers)
        column = torch.cat([share[:1] for share in shares]).view(-1, *[1] * first.dim())
        # Of float32, as each layer would multiply it; `out` rounds the product alone.
        return torch.mul(first, column, out=first.new_empty(len(layers), *first.shape)).unbind()


class SoftmaxValueResidual(ValueResidual, mode="learnable_plus"):
    """The layers compete for V_0 through a softmax over depth, which is the decoder's."""

    def __init__(self, config: Any, layer: int):
        super().__init__(config, layer)
        self.layer = layer
        self.weight = coefficient(1)  # l2

    def forward(
        self,
        values: torch.Tensor,
        first_values: torch.Tensor,
        share: torch.Tensor,
        share_of_first: torch.Tensor | None = None,
        onward: Onward | None = None,
    ) -> torch.Tensor:
        """`share` is l1, `(1,)`; `share_of_first` l1 V_0, where that is known."""
        return _mixed(values, first_values, self.weight, share, share_of_first, onward)

    def reset_parameters(self) -> None:
        init.constant_(self.weight, self.start[1])

    def row(self, of_decoder: Any) -> list[float]:
        zero, one = probes(self)
        share = zero.view(1) if of_decoder is None else of_decoder()[self.layer]
        return [float(self(zero, one, share)), float(self(one, zero, share))]

    @classmethod
    def of_decoder(cls, config: Any) -> Added | None:
        layers = mixing_layers(config)
        return Shares(layers, config.value_residual_init[0]) if layers else None

    @classmethod
    def between(cls, modules: Mapping[int, Any], of_decoder: Any) -> BetweenLayers:
        return HandedShares(modules, of_decoder() if of_decoder is not None else {})

    @classmethod
    def tp_plan(cls, config: Any) -> dict[str, str]:
        plan = super().tp_plan(config)
        return {**plan, **{name.removeprefix("layers.*."): style for name, style in plan.items()}}


class Shares(Added):
    """l1 of all mixing layers: s softmax(z)."""

    def __init__(self, layers: Sequence[int], first: float):
        super().__init__()
        self.layers, self.first = layers, first
        self.score = coefficient(len(layers))  # z
        self.scale = coefficient(1)  # s

    def forward(self) -> dict[int, torch.Tensor]:
        return dict(zip(self.layers, (self.scale * self.score.softmax(dim=0)).split(1), strict=True))

    def reset_parameters(self) -> None:
        init.zeros_(self.score)
        init.constant_(self.scale, self.first * len(self.layers))

    @torch.no_grad()
    def deviations(self) -> list[tuple[float, str]]:
        return [(float(self.scale.abs()), ".scale"), (float((0 * self.score).sum()), ".score")]  # NaN has an effect


class HandedShares(SharesOfFirst):
    def before(self, layer: int, hidden_states: torch.Tensor, earlier: dict[str, Any], added: Any) -> torch.Tensor:
        if layer in self.modules:
            earlier["share"] = self.shares[layer]
        return super().before(layer, hidden_states, earlier, added)


class DenseValueResidual(ValueResidual, mode="dense"):
    """The sum over earlier layers is worked out before the layer, so that all layers take as many tensors, and
    torch.compile makes one graph for them."""

    def __init__(self, config: Any, layer: int):
        super().__init__(config, layer)
        self.weight = coefficient(1)  # l_{n,n}
        self.earlier = EarlierWeights([self.start[0], *[0.0] * (len(self.columns) - 2)])

    def forward(self, values: torch.Tensor, earlier_values: torch.Tensor) -> torch.Tensor:
        """`earlier_values` is their weighted sum."""
        return torch.addcmul(earlier_values, values, self.weight[0])

    def reset_parameters(self) -> None:
        init.constant_(self.weight, self.start[1])

    def row(self, of_decoder: Any) -> list[float]:
        zero, one = probes(self)
        return [*self.earlier().tolist(), float(self(one, zero))]

    @classmethod
    def mixes(cls, config: Any, layer: int) -> list[int]:
        return value_layers(config, layer)

    @classmethod
    def reads(cls, config: Any, layer: int) -> Reads:
        earlier = cls.mixes(config, layer)[:-1]
        last = max({*mixing_layers(config)}.intersection(earlier), default=0)  # has read those before it
        return {"earlier_values": [("raw_values", each) for each in earlier if each >= last]}

    @classmethod
    def between(cls, modules: Mapping[int, Any], of_decoder: Any) -> BetweenLayers:
        return EarlierValues(modules)

    @classmethod
    def tp_plan(cls, config: Any) -> dict[str, str]:
        plan = super().tp_plan(config)
        return {**plan, **{f"{name}.earlier": style for name, style in plan.items()}}


class EarlierWeights(Weights):
    """Those of a layer on the values of earlier ones."""

    def __init__(self, start: Sequence[float]):
        super().__init__()
        self.start = start
        self.weight = coefficient(len(start))


class EarlierValues(BetweenLayers):
    """The sums over earlier layers: averages over depth, one for each layer that has values."""

    def __init__(self, modules: Mapping[int, DenseValueResidual]):
        rows: dict[int, dict[int, tuple[range, torch.Tensor]]] = {}  # V_0's layer -> what `RunningAverage` takes
        for module in modules.values():
            terms = len(module.columns) - 1
            rows.setdefault(module.columns[0], {})[terms - 2] = range(terms), module.earlier()
        self.averages = {first: RunningAverage(each) for first, each in rows.items()}
        self.modules = modules

    def before(self, layer: int, hidden_states: torch.Tensor, earlier: dict[str, Any], added: Any) -> torch.Tensor:
        if layer in self.modules:
            average = self.averages[self.modules[layer].columns[0]]
            for values in earlier["earlier_values"]:
                earlier["earlier_values"] = average.append(values)
        return hidden_states


class GatedValueResidual(ValueResidual, mode="gated"):
    """l1(t, h) = a + tanh(W x_t)_h: how much of V_0 each token takes, per key/value head (after RWKV-7)."""

    by_heads = True

    def __init__(self, config: Any, layer: int):
        super().__init__(config, layer)
        self.weight = coefficient(1)  # l2
        self.gate = GateProjection(config.hidden_size, config.num_key_value_heads)  # W

    def forward(
        self,
        values: torch.Tensor,
        first_values: torch.Tensor,
        hidden_states: torch.Tensor,
        onward: Onward | None = None,
    ) -> torch.Tensor:
        gate = (self.start[0] + torch.tanh(self.gate(hidden_states)).to(values.dtype)).unsqueeze(-1)
        share_of_first = first_values * gate if onward is None else None
        return _mixed(values, first_values, self.weight, gate, share_of_first, onward)

    def reset_parameters(self) -> None:
        init.constant_(self.weight, self.start[1])

    @classmethod
    def between(cls, modules: Mapping[int, Any], of_decoder: Any) -> BetweenLayers:
        return FirstValues(modules)

    def row(self, of_decoder: Any) -> list[float]:
        zero, one = probes(self)
        own = self(one, zero, one.new_zeros(1, 1, self.gate.in_features))
        return [float("nan"), float(own.flatten()[0])]

    @torch.no_grad()
    def deviations(self) -> list[tuple[float, str]]:
        own, gate = abs(float(self.weight) - 1), float(self.gate.weight.abs().max())
        return [(own, ".weight"), (gate, ".gate"), (abs(self.start[0]), ": value_residual_init[0]")]

    @classmethod
    def more_flops(cls, config: Any, terms: int) -> int:
        """2 x the weights of the gate."""
        return 2 * config.hidden_size * config.num_key_value_heads

    @classmethod
    def tp_plan(cls, config: Any) -> dict[str, str]:
        plan = super().tp_plan(config)
        return {**plan, **{f"{name}.gate": "colwise" for name in plan}}


class GateProjection(StartsAsStated, nn.Linear):
    """Starts at 0 and keeps its own dtype. A linear layer, so that tensor parallelism can split it by heads."""

    def __init__(self, channels: int, heads: int):
        super().__init__(channels, heads, bias=False)
        self.weight = coefficient(heads, channels)

    def reset_parameters(self) -> None:
        init.zeros_(self.weight)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(hidden_states, self.weight.to(hidden_states.dtype))


def probes(module: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """0 and 1 as values of one channel: coefficients are what a module makes of them, also where they are offloaded."""
    device = next(module.parameters()).device
    zero = torch.zeros(1, 1, 1, 1, dtype=torch.float32, device="cpu" if device.type == "meta" else device)
    return zero, zero + 1
