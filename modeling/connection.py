"""A connection: what `resformer.Connection` is, for the package's own and for anyone's.

A connection is one class, in one file: its fields, equation, layers, what it reads, where it acts, how it starts, what
it costs. An instance is a module of the layer that has it, under its `name`. It acts at a place, a tensor with a name:

| place | the tensor | shape |
|---|---|---|
| `embeddings` | X_0, what the first layer reads | `(batch, tokens, hidden_size)` |
| `layer_input`, `layer_output` | what the layer reads and returns | the same |
| `attention_input`, `mlp_input` | what the norms before attention and MLP read | the same |
| `attention_added`, `mlp_added` | what attention and MLP add to the stream, before dropout | the same |
| `query_input`, `key_input`, `value_input` | what the projections read | the same |
| `raw_queries`, `raw_keys` | their outputs, before any norm | `(batch, tokens, heads, head_dim)` |
| `raw_values` | V_n, the output of the value projection | `(batch, tokens, key/value heads, head_dim)` |
| `mixed_values` | V'_n, the values that the layer caches and attends to | the same |
| `attention_output` | A V', the input of the output projection | `(batch, tokens, query heads, head_dim)` |

Where no connection of a model is `by_heads`, the last two dimensions of values may be one.

Its `forward` takes the tensor of its place, or of each of several, and gives it back, alone or as `(tensor, {name:
another})`, whose others are then known by their names; one with the name of a place to come is read there. Its other
arguments are tensors by their names: those of places before, `hidden_states` (the input of the projections), `queries`
and `keys` (before the rotary embedding, normed as the layer norms them), and what `reads` says of earlier layers.
`attention_norm` is a function, the norm that the layer has before attention.
"""

import copy
import functools
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from dataclasses import fields as dataclass_fields
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial
from transformers import conversion_mapping
from transformers import initialization as init
from transformers.models.auto import modeling_auto

from resformer.configuration.about import About, Method, Paper
from resformer.configuration.methods import ABOUT, METHODS, connections_of

if TYPE_CHECKING:
    Undecayed = nn.Module
else:
    # The stock `Trainer` decays no parameter under an `nn.LayerNorm`. Decay would pull a retrofit's ones to zero.
    Undecayed = nn.LayerNorm

#: All kinds of connections, in the order in which they act at one place: the package's as in `connections/__init__.py`,
#: then others by `order` and name.
KINDS: list[type["Connection"]] = []
PLACES = (
    "embeddings layer_input attention_input query_input key_input value_input raw_queries raw_keys raw_values "
    "mixed_values attention_output attention_added mlp_input mlp_added layer_output"
).split()

#: Names of tensors that a layer has by itself.
OF_LAYERS = ("hidden_states", "queries", "keys", *PLACES)
#: Attributes that a layer with connections has.
_OF_A_LAYER = (
    "connections layers number known around reads crossings returned acting expected end switch family mixin "
    "checkpointed"
).split()

#: A tensor that crosses layers: its name, and the layer that makes it; -1 for what comes before all layers.
Crossing = tuple[str, int]
#: Argument -> the tensor or tensors of earlier layers.
Reads = dict[str, Crossing | list[Crossing]]
TOKENS: Crossing = ("input_ids", -1)


@dataclass(frozen=True)
class Shape:
    """What a connection may read of a model: sizes, and the fields of all connections as attributes.

    Attributes:
        fields: the fields of connections, `num_hidden_layers`, and `layer_types`, if the family has them.
        num_attention_heads, num_key_value_heads, head_dim: of a layer (`of_layer`), or of the first with values.
        value_groups: a number for each layer that has values of its own; those of one shape have one number.
        heads: of each layer, the three numbers of heads.
        places: of each layer, the `LayerPlaces`.
    """

    fields: Mapping[str, Any]
    hidden_size: int
    vocab_size: int
    initializer_range: float
    rms_norm_eps: float
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    value_groups: tuple[int | None, ...]
    heads: tuple[Mapping[str, int], ...]
    places: tuple[Any, ...] = ()

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["fields"][name]
        except KeyError:
            raise AttributeError(name) from None

    def of_layer(self, layer: int) -> "Shape":
        numbers: Any = self.heads[layer]
        return replace(self, **numbers)


class StartsAsStated:
    """A module whose initial values `_init_weights` takes from it."""

    def reset_parameters(self) -> None:
        """Sets the initial values of its own parameters: `from_pretrained` discards what `__init__` sets."""


def tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers, also of modules within it."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


class Added(StartsAsStated, Undecayed):
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


@contextmanager
def in_full_precision() -> Iterator[None]:
    """Tensors that are made are float32, or float64, also where `from_pretrained` makes a model of lower precision."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.promote_types(before, torch.float32))
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@torch.no_grad()
def set_initial_values(module: nn.Module) -> None:
    """Sets the initial values of a connection, and of modules within it."""
    for each in module.modules():
        if isinstance(each, Connection):
            each.set_as_made()  # its `reset_parameters` may leave some out, such as buffers
        if isinstance(each, StartsAsStated):
            each.reset_parameters()


class BetweenLayers:
    """What a kind of connection does between the layers in one forward pass."""

    def before(
        self, layer: int, hidden_states: torch.Tensor, earlier: dict[str, Any], added: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        """Returns what the layer reads in place of `hidden_states`.

        Args:
            earlier: what `reads` asks for, by name. More may be put in, for `forward`.
            added: place -> a term that is added there may be put in.
        """
        return hidden_states

    def after(self, layer: int, hidden_states: torch.Tensor) -> torch.Tensor:
        """Returns what is read in place of the layer's output."""
        return hidden_states


class Connection(Added):
    """One kind of connection: subclass it, in any file, to make one.

    A subclass with a `name` is known from then on: `connect(model, "NAME")`, the method's name, adds it to a model, and
    `from_pretrained` of a checkpoint that has it asks for the class. Its annotated attributes are its fields, with
    defaults; they stand in the configuration's `connections` and are attributes of each instance. The methods of the
    class are asked for the `Shape` of a model that has it (`is_in`).

    Raises:
        TypeError: the class cannot be what it says; the message names the attribute.
    """

    name: ClassVar[str]
    #: Its fields of the configuration: those of this dataclass. `None`: its annotated attributes.
    fields_of: ClassVar[type | None] = None
    fields: ClassVar[tuple[str, ...]] = ()
    #: Values of its fields with which the plain family's outputs stay as they are; empty if there are none. In a user's
    #: class `{}` is: any values do; where it is not defined, it is not known.
    plain: ClassVar[dict[str, Any]] = {}
    #: Where its `forward` is called, one place or several; `None`: not in the layer.
    place: ClassVar[str | tuple[str, ...] | None] = None
    places: ClassVar[tuple[str, ...]] = ()
    #: Whether it tells the heads of values apart; else the last two dimensions of values may be one.
    by_heads: ClassVar[bool] = False
    #: Where it stands among the connections of others that act at its place: smaller ones act first.
    order: ClassVar[float] = 0.0
    #: Whether the last layer does more than the others for it: that layer may then not be removed.
    at_end: ClassVar[bool] = False
    #: Whether it has modules in layers; else the decoder itself does what it says.
    has_modules: ClassVar[bool] = True
    #: What is said where a decoder cannot have it: a sentence after a space.
    way_out: ClassVar[str] = ""
    #: The arguments of `forward` beside the tensor of its place, and those that have no default.
    takes: ClassVar[tuple[str, ...]] = ()
    required: ClassVar[tuple[str, ...]] = ()
    #: For cards and `resformer methods`, of a class that is no part of this package: title, one sentence (default: the
    #: docstring's first line), one with the equation, and its paper, or the arXiv number of that.
    title: ClassVar[str] = ""
    summary: ClassVar[str] = ""
    equation: ClassVar[str] = ""
    paper: ClassVar[Paper | str | None] = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.places = (cls.place,) if isinstance(cls.place, str) else tuple(cls.place or ())
        taken = [*inspect.signature(cls.forward).parameters.values()][2:]
        named = [each for each in taken if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
        cls.takes = tuple(each.name for each in named)
        cls.required = tuple(each.name for each in named if each.default is each.empty)
        if cls.fields_of is not None:
            cls.fields = tuple(each.name for each in dataclass_fields(cls.fields_of))
        if "name" in vars(cls):
            _add_kind(cls)

    def __init__(self, config: Any, layer: int):
        super().__init__()
        if not self.fields_of:
            vars(self).update(self.settings(config))
            self.made_of = config, layer

    @classmethod
    def made(cls, config: Any, layer: int) -> "Connection":
        """An instance, whose tensors are float32 also in a model of lower precision.

        Raises:
            TypeError: a class that is no part of this package cannot be made again, or would not be loaded as it was.
        """
        with in_full_precision():
            made = cls(config, layer)
        if cls.fields_of:
            return made
        if not hasattr(made, "made_of"):
            raise TypeError(f"{cls.__name__}.__init__ does not call `super().__init__(shape, layer)`.")
        for module, name, value in ((each, *member) for each in made.modules() for member in vars(each).items()):
            if any(isinstance(each, torch.Tensor) for each in (value if isinstance(value, (list, tuple)) else [value])):
                raise TypeError(
                    f"{type(module).__name__}.{name} has a tensor of its own, which `from_pretrained` and `to` leave "
                    f"out: `self.register_buffer({name!r}, ..., persistent=False)`, or a ParameterList."
                )
        return made

    def set_as_made(self) -> None:
        """Sets what `__init__` sets, also in modules and buffers, of a class that is no part of this package."""
        if not self.fields_of:
            own = tensors_of(self)  # an adapter may have wrapped some
            for name, value in tensors_of(self.made(*self.made_of)).items():
                if name in own:
                    own[name].copy_(value)

    @torch.no_grad()
    def deviations(self) -> list[tuple[float, str]]:
        starts = [copy.deepcopy(self) for _ in range(2)]
        for start in starts:
            vars(start).update(self.plain)
            if not self.fields_of:
                shape, layer = self.made_of
                plain = {**shape.connections, self.name: self.settings(shape) | self.plain}
                start.made_of = replace(shape, fields={**shape.fields, "connections": plain}), layer
            set_initial_values(start)
        return [
            (float((now - plain).abs().max()), f".{name}")
            for (name, now), plain, again in zip(
                self.named_parameters(), *(each.parameters() for each in starts), strict=True
            )
            if torch.equal(plain, again)  # what is drawn has no start to be compared with
        ]

    @classmethod
    def settings(cls, config: Any) -> dict[str, Any]:
        """Field -> value, of a class whose fields are its annotated attributes."""
        return with_defaults(cls, (getattr(config, "connections", None) or {}).get(cls.name))

    @classmethod
    def field_values(cls, config: Any) -> dict[str, Any]:
        """Field, by the name that `connect` takes -> value."""
        if cls.fields_of is not None:
            return {name: getattr(config, name) for name in cls.fields}
        return {f"{cls.name}_{name}": value for name, value in cls.settings(config).items()}

    @classmethod
    def is_in(cls, config: Any) -> bool:
        """Whether `config` turns this connection on; an initial value alone does not."""
        if cls.fields_of is None:
            return cls.name in (getattr(config, "connections", None) or {})
        return any(name in cls.fields for name in connections_of(config) if not name.endswith("_init"))

    @classmethod
    def check(cls, settings: Mapping[str, Any]) -> None:
        """Raises a `ValueError` if the values of its own fields do not fit."""

    @classmethod
    def chosen(cls, config: Any) -> type["Connection"]:
        """The class that `config` chooses, of a kind that has several."""
        return cls

    @classmethod
    def needs(cls, config: Any) -> set[str]:
        """The places that it acts at, adds to or reads: a decoder that lacks one refuses it."""
        read = {name for read in cls.layers(config) for name, _ in crossings(cls.reads(config, read))}
        return ({*cls.places, *cls.takes, *read} & {*OF_LAYERS}) - {"embeddings"}

    @classmethod
    def layers(cls, config: Any) -> Sequence[int]:
        """The layers that have one: all, if a class does not say."""
        return range(config.num_hidden_layers)

    @classmethod
    def reads(cls, config: Any, layer: int) -> Reads:
        """What such a layer reads of earlier ones."""
        return {}

    @classmethod
    def of_decoder(cls, config: Any) -> Added | None:
        """The module of the whole decoder, for what cannot be a layer's."""
        return None

    @classmethod
    def made_of_decoder(cls, config: Any) -> Added | None:
        """`of_decoder`, checked."""
        with in_full_precision():
            module = cls.of_decoder(config)
        if module is not None and not isinstance(module, Added):
            raise TypeError(
                f"{cls.__name__}.of_decoder returns a {type(module).__name__}: expected a subclass of "
                f"{Added.__module__}.Added, whose `reset_parameters` sets where it starts."
            )
        return module

    @classmethod
    def between(cls, modules: Mapping[int, Any], of_decoder: Any) -> BetweenLayers | None:
        """What it does between the layers; called once a forward pass, with the modules of the layers by number."""
        return None

    @classmethod
    def fixed_effects(cls, config: Any) -> list[str]:
        """What makes it differ from plain Llama for any initial values."""
        return [] if cls.states_start() else [f"`{cls.name}` states no `plain`, the fields with which it has no effect"]

    @classmethod
    def plain_start(cls, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Connection fields -> `plain`, if they set the first of its fields, which is what turns it on."""
        if cls.fields_of is None:
            connections = fields.get("connections") or {}
            own = {cls.name: cls.plain | (connections.get(cls.name) or {})}
            return {"connections": connections | own} if cls.name in connections else {}
        return dict(cls.plain) if fields.get(cls.fields[0]) else {}

    @classmethod
    def states_start(cls) -> bool:
        """Whether it is known with which fields it starts as the plain family."""
        return cls.fields_of is not None or cls.plain is not Connection.plain

    @classmethod
    def inexact_because(cls, config: Any) -> list[str]:
        """Why a model with it does not start as plain Llama; empty if it does."""
        values = config.fields if isinstance(config, Shape) else vars(config)
        start, own = cls.plain_start(values), values
        if cls.fields_of is None:
            start, own = cls.plain, cls.settings(config)
        fixed = cls.chosen(config).fixed_effects(config) if cls.states_start() else []
        return fixed + [
            f"`{name}`={own[name]} does not start as the plain model, {plain} would"
            for name, plain in start.items()
            if own[name] != plain
        ]

    @classmethod
    def flops(cls, config: Any) -> int:
        """Operations of a forward pass per token; a multiplication and an addition are two."""
        return 0

    @classmethod
    def tp_plan(cls, config: Any) -> dict[str, str]:
        """How tensor parallelism splits its modules: a name, `layers.*.NAME` for those of layers -> the style."""
        return {}


def crossings(reads: "Reads") -> list[Crossing]:
    return [each for read in reads.values() for each in (read if isinstance(read, list) else [read])]


def own_fields(kind: type[Connection]) -> dict[str, Any]:
    """Field -> default, of a class whose fields are its annotated attributes, ancestors' first."""
    found: dict[str, Any] = {}
    for each in reversed(kind.__mro__[: kind.__mro__.index(Connection)]):
        for name, annotation in inspect.get_annotations(each).items():
            if "ClassVar" not in str(annotation) and name in vars(each):
                found[name.removeprefix(f"{kind.name}_")] = vars(each)[name]
    return found


def overrides(kind: type[Connection], method: str) -> bool:
    """Whether a class has its own form of a class method of `Connection`."""
    return getattr(kind, method).__func__ is not getattr(Connection, method).__func__


def with_every_field(connections: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The same `connections`, with the fields that they leave out: a class may get other defaults later."""
    kinds = {kind.name: kind for kind in KINDS}
    return {name: with_defaults(kinds[name], given) for name, given in connections.items()}


def with_defaults(kind: type[Connection], given: Mapping[str, Any] | None) -> dict[str, Any]:
    """All fields of such a class: the given values, and defaults. Tuples come back from a file as lists."""
    defaults = copy.deepcopy(own_fields(kind))
    of_tuples = {name for name, value in defaults.items() if isinstance(value, tuple)}
    return defaults | {
        name: tuple(value) if name in of_tuples and isinstance(value, list) else value
        for name, value in (given or {}).items()
    }


def _add_kind(kind: type[Connection]) -> None:
    """Makes a class known, in the place of an older one of its name: a notebook's cell is run again."""
    name = kind.name
    if not isinstance(name, str) or not name.isidentifier() or name in _OF_A_LAYER:
        raise TypeError(f"{kind.__qualname__}.name is {name!r}: expected a name that a module can have.")
    places = [each for each in PLACES if each != "embeddings" or kind.fields_of]  # where the package's own alone act
    if not {*kind.places} <= {*places}:
        raise TypeError(f"{kind.__qualname__}.place is {kind.place!r}: expected one of {', '.join(places)}.")
    if not isinstance(kind.order, (int, float)):
        raise TypeError(f"{kind.__qualname__}.order is {kind.order!r}: expected a number.")
    for method, own in vars(Connection).items():
        if isinstance(own, classmethod) and not isinstance(inspect.getattr_static(kind, method), classmethod):
            raise TypeError(f"{kind.__qualname__}.{method} is asked of the class: put `@classmethod` above it.")
    older = next((each for each in KINDS if each.name == name), None)
    if kind.fields_of is None:
        if (name in METHODS and older is None) or (older is not None and older.fields_of is not None):
            raise TypeError(f"{kind.__qualname__}.name is {name!r}, which is taken by this package: choose another.")
        if renamed := changed_by_loading(name):
            raise TypeError(
                f"{kind.__qualname__}.name is {name!r}, which loading a {renamed} changes: choose a name that is not, "
                "and does not end like, a part of its weights' names."
            )
        if not kind.places and not overrides(kind, "between"):
            raise TypeError(f"{kind.__qualname__}.place is not set: expected one of {', '.join(places)}.")
        if kind.places and kind.forward is Added.forward:
            raise TypeError(f"{kind.__qualname__} has no `forward`, which takes the {kind.places[0]} and returns it.")
        if not isinstance(kind.plain, dict):
            raise TypeError(f"{kind.__qualname__}.plain is {kind.plain!r}: expected a dict of fields.")
        if unknown := kind.plain.keys() - own_fields(kind).keys():
            field = min(unknown)
            raise TypeError(
                f"{kind.__qualname__}.plain has {field!r}, which is no field: annotate it, `{field}: float = 0.0`."
            )
        for field in own_fields(kind).keys() & {"training", "forward"}:
            raise TypeError(f"{kind.__qualname__}.{field}: a module has an attribute of this name: choose another.")
        said = (vars(kind).get("__doc__") or "").strip().partition("\n")[0]
        paper = Paper(kind.paper) if isinstance(kind.paper, str) else kind.paper
        papers = () if paper is None else (paper,)
        METHODS[name] = Method(
            kind.title or name, kind.summary or said, lambda layers: {"connections": {name: {}}}, papers
        )
        ABOUT[f"connections.{name}"] = About(name, kind.equation, paper)
    if older is not None:
        KINDS.remove(older)
    KINDS.append(kind)
    # A stable sort: the package's own keep their order.
    KINDS.sort(key=lambda each: (each.fields_of is None, each.order, each.name if each.fields_of is None else ""))


def changed_by_loading(name: str) -> str | None:
    """A model type whose weights' names are changed when they are loaded, and the name of a connection with them."""
    for model_type, patterns in _renamings():
        if any(re.search(pattern, f"model.layers.0.{name}.weight") for pattern in patterns):
            return model_type
    return None


@functools.cache
def _renamings() -> list[tuple[str, list[str]]]:
    """Model type -> patterns of those names that have nothing of layers or decoders around them."""
    found = []
    decoders = (
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES | modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    )
    for model_type, transforms in conversion_mapping._build_checkpoint_conversion_mapping().items():
        if model_type not in decoders:
            continue
        both = [way for each in transforms for way in (each, each.reverse_transform())]  # loading, and saving
        patterns = [pattern for each in both for pattern in each.source_patterns]
        found.append((model_type, [each for each in patterns if not re.search(each, "model.layers.0.a.weight")]))
    return found


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
