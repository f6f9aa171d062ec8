"""What all connections have in common.

A connection is a module of the layer that has it. It acts at a place, a tensor with a name that every decoder layer
has, or between the layers:

| place | the tensor | shape |
|---|---|---|
| `layer_input` | what the layer reads | `(batch, tokens, hidden_size)` |
| `attention_input`, `mlp_input` | what the norms before attention and MLP read | the same |
| `raw_values` | V_n, the output of the value projection | `(batch, tokens, key/value heads, head_dim)` |
| `mixed_values` | V'_n, the values that the layer caches and attends to | the same |
| `attention_output` | A V', the input of the output projection | `(batch, tokens, query heads, head_dim)` |

Its `forward` takes the tensor of its place and gives it back; its other arguments are tensors by their names: those of
places before, `hidden_states` (the input of the projections), `queries` and `keys` (before the rotary embedding, of
shapes like the values'), and what `reads` says of earlier layers.
"""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from torch.autograd.forward_ad import unpack_dual
from torch.distributed.tensor import DTensor, Partial
from transformers import initialization as init

from resformer.configuration.methods import connections_of

if TYPE_CHECKING:
    _Undecayed = nn.Module
else:
    # Of this class, which it uses nothing of, since the stock `Trainer` leaves what lies under an `nn.LayerNorm` out of
    # weight decay, which would pull a retrofit's ones to zero.
    _Undecayed = nn.LayerNorm

#: All kinds of connections: the classes with a `name`, one in each file of `connections/`.
KINDS: list[type["Connection"]] = []

#: A tensor that crosses layers: its name, and the layer that makes it; -1 for what comes before all layers.
Crossing = tuple[str, int]
#: Argument -> the tensor or tensors of earlier layers.
Reads = dict[str, Crossing | list[Crossing]]
TOKENS: Crossing = ("input_ids", -1)


class StartsAsStated:
    """A module whose initial values `_init_weights` takes from it."""

    def reset_parameters(self) -> None:
        """Sets the initial values of its own parameters: `from_pretrained` discards what `__init__` sets."""


class Added(StartsAsStated, _Undecayed):
    """A module with parameters that a connection adds."""

    #: Names of parameters with a row per token of the vocabulary. They have the model's dtype, all others float32.
    tables: ClassVar[tuple[str, ...]] = ()

    def __init__(self) -> None:
        nn.Module.__init__(self)

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={tuple(parameter.shape)}" for name, parameter in self._parameters.items())

    @torch.no_grad()
    def deviations(self) -> list[tuple[float, str]]:
        """(a weight's distance from having no effect, its place in the module), of each weight or of the largest."""
        return [(float(parameter.abs().max()), f".{name}") for name, parameter in self.named_parameters()]


class BetweenLayers:
    """What a kind of connection does between the layers in one forward pass."""

    def before(self, layer: int, hidden_states: torch.Tensor, earlier: dict[str, Any]) -> torch.Tensor:
        """Returns what the layer reads in place of `hidden_states`.

        Args:
            earlier: what `reads` asks for, by name. More may be put in; what has the name of a place is added there.
        """
        return hidden_states

    def after(self, layer: int, hidden_states: torch.Tensor) -> torch.Tensor:
        """Returns what is read in place of the layer's output."""
        return hidden_states


class Connection(Added):
    """One kind of connection. An instance belongs to one layer, under its `name`.

    The methods of the class are asked for configurations that it `is_in`: a `ResFormerConfig`, or what `connect` makes
    of another family's.
    """

    name: ClassVar[str]
    #: Its fields of the configuration.
    fields: ClassVar[tuple[str, ...]]
    #: The initial values with which what is learned starts as plain Llama; empty if none do.
    plain: ClassVar[dict[str, Any]] = {}
    #: Where its `forward` is called; `None`: not in the layer.
    place: ClassVar[str | None] = None
    #: Whether it has modules in layers; else the decoder itself does what it says.
    has_modules: ClassVar[bool] = True
    #: The arguments of `forward` beside the tensor of its place.
    takes: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.takes = tuple(inspect.signature(cls.forward).parameters)[2:]
        if "name" in vars(cls):
            KINDS.append(cls)

    def __init__(self, config: Any, layer: int):
        super().__init__()

    @classmethod
    def is_in(cls, config: Any) -> bool:
        """Whether `config` sets any of its fields; an initial value alone is no connection."""
        return any(name in cls.fields for name in connections_of(config) if not name.endswith("_init"))

    @classmethod
    def chosen(cls, config: Any) -> type["Connection"]:
        """The class that `config` chooses, of a kind that has several."""
        return cls

    @classmethod
    def layers(cls, config: Any) -> Sequence[int]:
        """The layers that have one."""
        raise NotImplementedError

    @classmethod
    def reads(cls, config: Any, layer: int) -> Reads:
        """What such a layer reads of earlier ones."""
        return {}

    @classmethod
    def of_decoder(cls, config: Any) -> Added | None:
        """The module of the whole decoder, for what cannot be a layer's."""
        return None

    @classmethod
    def between(cls, modules: Mapping[int, Any], of_decoder: Any) -> BetweenLayers | None:
        """What it does between the layers; called once a forward pass, with the modules of the layers by number."""
        return None

    @classmethod
    def fixed_effects(cls, config: Any) -> list[str]:
        """What makes it differ from plain Llama for any initial values."""
        return []

    @classmethod
    def plain_start(cls, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Connection fields -> `plain`, if they set the first of its fields, which is what turns it on."""
        return dict(cls.plain) if fields.get(cls.fields[0]) else {}

    @classmethod
    def inexact_because(cls, config: Any) -> list[str]:
        """Why a model with it does not start as plain Llama; empty if it does."""
        return cls.chosen(config).fixed_effects(config) + [
            f"`{name}`={value} does not start as plain Llama, {plain} would"
            for name, plain in cls.plain_start(vars(config)).items()
            if (value := getattr(config, name)) != plain
        ]

    @classmethod
    def flops(cls, config: Any) -> int:
        """Operations of a forward pass per token; a multiplication and an addition are two."""
        return 0

    @classmethod
    def tp_plan(cls, config: Any) -> dict[str, str]:
        """How tensor parallelism splits its modules: a name, `layers.*.NAME` for those of layers -> the style."""
        return {}


def kinds_in(config: Any) -> list[type[Connection]]:
    """The kinds of connections that `config` has."""
    return [kind.chosen(config) for kind in KINDS if kind.is_in(config)]


def coefficient(*shape: int) -> nn.Parameter:
    """A parameter in float32 whatever the model's dtype is, or in float64 in a float64 model.

    bfloat16 has no number between 1 and 1 - 2^-8, so a coefficient that starts at 1 would never learn.
    """
    return nn.Parameter(torch.empty(shape, dtype=torch.promote_types(torch.get_default_dtype(), torch.float32)))


def whole(parameter: torch.Tensor) -> torch.Tensor:
    """The parameter, for use outside of its layer.

    FSDP2 gathers parameters for the forward of their layer alone; here they are gathered by themselves. DeepSpeed frees
    them when `forward` returns.
    """
    if not isinstance(parameter, DTensor):
        return parameter.clone() if hasattr(parameter, "ds_id") else parameter
    mesh = parameter.device_mesh
    gathered = parameter.full_tensor(grad_placements=[Partial()] * mesh.ndim)
    if gathered.requires_grad:
        gathered.register_hook(lambda gradient: gradient / mesh.size())  # the mean over ranks, as of all parameters
    return gathered


class Weights(Added):
    """Mixed into a module whose `weight` is used outside of its layer."""

    start: Sequence[float]
    weight: nn.Parameter

    def forward(self) -> torch.Tensor:
        return whole(self.weight)

    def reset_parameters(self) -> None:
        init.copy_(self.weight, torch.tensor(self.start, dtype=self.weight.dtype))


def weighted_sum(states: Sequence[torch.Tensor], weights: torch.Tensor | Sequence[Any]) -> torch.Tensor:
    """Returns sum_k weights[k] states[k], in the dtype of the states.

    A weight of exactly 0 adds nothing and a weight of exactly 1 changes nothing, for finite states; -0 becomes +0 where
    0 is added to it.

    Args:
        states: K >= 1 tensors of one shape and dtype.
        weights: K numbers or scalars, of any floating dtype; tensors get gradients. A tensor `(K, ...)` holds K that
            broadcast to the states.
    """
    if isinstance(weights, torch.Tensor):
        # Scalars take part in products in their own dtype, without a copy.
        weights = (weights if weights.dim() == 1 else weights.to(states[0])).unbind()
    total = states[0] * weights[0]
    for state, weight in zip(states[1:], weights[1:], strict=True):  # in place: autograd saves no sum
        if isinstance(weight, torch.Tensor):
            total.addcmul_(state, weight)
        else:
            total.add_(state, alpha=weight)
    return total


def is_ordinary(states: Sequence[torch.Tensor], weights: Iterable[torch.Tensor] = ()) -> bool:
    """Whether these are plain tensors on one device, the states of one dtype, outside of torch.compile, torch.jit
    tracing and transforms.

    Compilers fuse plain operations by themselves, and tracers and transforms do not support Python autograd functions.
    """
    tensors = [*states, *weights]
    return not (
        torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None
        or torch._C._are_functorch_transforms_active()
        or len({tensor.device for tensor in tensors}) > 1
        or len({state.dtype for state in states}) > 1
        or any(
            type(each) not in (torch.Tensor, nn.Parameter) or unpack_dual(each).tangent is not None for each in tensors
        )
    )


def plain_matrix(rows: int, columns: int) -> torch.Tensor:
    """Plain Llama's mixing matrix, `(N, N)` of values or `(N, N + 1)` of depth: ones for the newest states."""
    return torch.eye(rows, columns, dtype=torch.float32).roll(columns - rows, dims=1)


class MixingRow(Connection):
    """A connection that is a row of a mixing matrix, which is otherwise `plain_matrix`."""

    #: The layers or states that it mixes, ascending; the last is the layer's own.
    columns: Sequence[int]

    def row(self, of_decoder: Any) -> list[float]:
        """The weights of `columns`; NaN where they depend on the token."""
        raise NotImplementedError

    @torch.no_grad()
    def deviations(self) -> list[tuple[float, str]]:
        return [
            (abs(weight - (column == self.columns[-1])), f"[{column}]")
            for column, weight in zip(self.columns, self.row(None), strict=True)
        ]


@torch.no_grad()
def mixing_matrix(rows: int, columns: int, modules: Mapping[int, MixingRow], of_decoder: Any = None) -> torch.Tensor:
    """`plain_matrix` with the rows of the modules: float32, detached, on the CPU."""
    matrix = plain_matrix(rows, columns)
    for layer, module in modules.items():
        matrix[layer] = 0.0
        matrix[layer, list(module.columns)] = torch.tensor(module.row(of_decoder), dtype=torch.float32)
    return matrix
