"""Connections at work: in a layer, and between the layers of a forward pass.

A layer, its attention, the list of layers and the decoder get a subclass of the class that they have, as
`torch.nn.utils.parametrize` does. To whoever calls, hooks, wraps or compiles one of them it is what it was: the same
arguments, the same output. What crosses layers goes beside them:

    decoder   makes a `ForwardPass`, and finds a `Step` for each layer in its list
    Step      layer(hidden_states, ..., earlier=tensors of earlier layers, later=box for those that later ones read)
    layer     runs the family's code on a `Seen` of itself: the layer, but for modules that have places around them

Within a layer everything is handed down in arguments and made anew in each run, so that checkpointing, which runs
layers again, passes that are alive at once, threads and compilers see what belongs to their own run.
"""

import functools
import threading
from collections.abc import Callable, Iterable, Mapping
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from resformer.errors import did_you_mean
from resformer.modeling.any_decoder import LayerPlaces, ValueProjection
from resformer.modeling.connection import KINDS, PLACES, TOKENS, BetweenLayers, Crossing, Reads
from resformer.modeling.connections.sharing import SharedCache
from resformer.modeling.versions import CACHE


def _versions(tensors: Iterable[Any]) -> list[int]:
    """How often each was changed in place."""
    return [each._version for each in tensors if isinstance(each, torch.Tensor) and not each.is_inference()]


class Places:
    """The named tensors of one layer in one run, and the connections that act on them.

    Args:
        number: of the layer that the rest is for.
        earlier: tensors of earlier layers, by the names of `layer.reads`, and what is handed to its connections.
        added: place -> a term that is added there.
    """

    def __init__(self, layer: Any, number: int, earlier: Mapping[str, Any], added: Mapping[str, torch.Tensor]):
        self.layer, self.earlier, self.added = layer, earlier, added
        self.is_compiled = torch.compiler.is_compiling()
        if not self.is_compiled and number != layer.number:  # compiled layers are one program, without their numbers
            raise ValueError(
                f"Layer {layer.number} is called with the arguments of layer {number}, without what crosses layers. "
                "Call the model: with connections, layers do not run one by one."
            )
        self.tensors: dict[str, Any] = {"attention_norm": layer.attention_norm}
        self.given: dict[str, torch.Tensor] = {}  # by connections before, for places to come
        self.makers: dict[str, str] = {}  # of tensors that connections return beside that of their place
        self.before_attention: tuple[dict[str, Any], dict[str, torch.Tensor]] | None = None

    def begin_attention(self) -> None:
        """Attention that is checkpointed alone runs twice, and may not read what its first run has left."""
        if self.before_attention is None:
            self.before_attention = self.tensors.copy(), self.given.copy()
        else:
            self.tensors, self.given = (each.copy() for each in self.before_attention)

    def __call__(self, place: str, tensor: torch.Tensor) -> torch.Tensor:
        """Returns what the connections make of the tensor of a place."""
        if place in self.given:
            tensor = self.given[place].to(tensor.dtype).view_as(tensor)
        if place in self.added:
            term = self.added[place]  # some families flatten batch and tokens
            tensor = (tensor.reshape(term.shape) + term).view_as(tensor)
        for name, takes, required in self.layer.acting.get(place, ()):
            arguments = {}
            for each in takes:
                if each in self.tensors:
                    arguments[each] = self.tensors[each]
                elif each in self.earlier:
                    arguments[each] = self.earlier[each]
                elif each in required:
                    raise ValueError(
                        f"`{name}` takes {each!r} at {place}, which layer {self.layer.number} lacks."
                        f"{did_you_mean(each, [*self.tensors, *self.earlier])}"
                    )
            module: Any = self.layer._modules[name]
            before = None if self.is_compiled or module.fields_of else _versions((tensor, *arguments.values()))
            made: Any = module(tensor, **arguments)
            if before and before != _versions((tensor, *arguments.values())):
                raise ValueError(
                    f"`{name}` changes a tensor in place at {place}, which others read as it was: return a new one, "
                    "`x = x + ...` for `x += ...`."
                )
            if isinstance(made, tuple) and len(made) == 2 and isinstance(made[1], Mapping):
                made, others = made
                for each, other in others.items():
                    if self.makers.setdefault(each, name) != name:
                        raise ValueError(
                            f"`{self.makers[each]}` and `{name}` both return {each!r} in layer {self.layer.number}: "
                            "give one of them another name."
                        )
                    (self.given if each in PLACES else self.tensors)[each] = other
            if not isinstance(made, torch.Tensor) or made.shape != tensor.shape:
                got = (
                    f"a tensor of shape {tuple(made.shape)}" if isinstance(made, torch.Tensor) else type(made).__name__
                )
                raise ValueError(
                    f"`{name}` returns {got} at {place}: its `forward` returns the tensor of shape "
                    f"{tuple(tensor.shape)} that it gets, changed, alone or as `(tensor, {{name: another}})`."
                )
            tensor = made if made.dtype == tensor.dtype else made.to(tensor.dtype)  # its parameters may have another
        self.tensors[place] = tensor
        return tensor

    def at_input(self, place: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """The arguments of a module, the first with what connections make of it."""
        if args:
            return self(place, args[0]), *args[1:]
        name = next(iter(kwargs))
        kwargs[name] = self(place, kwargs[name])
        return args

    def at_output(self, place: str, output: Any) -> Any:
        if isinstance(output, tuple):
            return self(place, output[0]), *output[1:]
        return self(place, output)


class Around:
    """A module with a place around it, in one run."""

    def __init__(self, around: Callable[..., Any], owner: Any, places: Places, module: Any):
        self._around, self._owner, self._places, self._module = around, owner, places, module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._around(self._owner, self._places, self._module, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class Seen:
    """A module in one run: the module, but for attributes that have places around them."""

    forward = None  # Transformers compares it, and checkpoints a layer once
    gradient_checkpointing = False

    def __init__(self, module: Any, places: Places):
        if not places.is_compiled:  # found at once, where compilers ask `__getattr__`
            vars(self).update(module.__dict__)
            vars(self).update(module._modules)
        self._module = module
        for name, around in module.around:
            setattr(self, name, Around(around, module, places, module._modules.get(name)))

    def __getattr__(self, name: str) -> Any:
        module = self._module
        if name in module.own_methods:
            return functools.partial(getattr(module.family, name), self)
        return getattr(module, name)


def around_module(
    before: str,
    after: str,
    handed: bool,
    owner: Any,
    places: Places,
    module: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Calls a module within a layer, with places before and after it.

    Args:
        before, after: the places at its input and its output; empty for none.
        handed: whether it has places within.
    """
    if before:
        args = places.at_input(before, args, kwargs)
    output = module(*args, places=places, **kwargs) if handed else module(*args, **kwargs)
    return places.at_output(after, output) if after else output


def around_nothing(owner: Any, places: Places, module: None, hidden_states: torch.Tensor) -> torch.Tensor:
    """In the place of a projection that the layer lacks: a head, or all where it counts them, that nobody reads."""
    if owner.counts_heads:
        return hidden_states.new_zeros(1).expand(*hidden_states.shape[:-1], owner.counts_heads)
    return hidden_states.narrow(-1, 0, owner.value_projection.head_dim)


def around_values(before: bool, owner: Any, places: Places, module: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    if before:
        args = places.at_input("value_input", args, kwargs)
    output = module(*args, **kwargs)
    layout: ValueProjection = owner.value_projection
    values = layout.take(output) if layout.part else output
    mixed = places("mixed_values", places("raw_values", values))
    return output if mixed is values else layout.put(output, mixed)


def around_output(owner: Any, places: Places, module: Any, states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    heads = states.unflatten(-1, (-1, owner.value_projection.head_dim))
    mixed = places("attention_output", heads)
    return module(states if mixed is heads else mixed.flatten(-2), *args, **kwargs)


def around_queries_or_keys(
    name: str, before: bool, owner: Any, places: Places, module: Any, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """Around the projection of `"queries"` or `"keys"`, which are kept as the attention norms them."""
    if before:
        args = places.at_input("query_input" if name == "queries" else "key_input", args, kwargs)
    output: torch.Tensor = module(*args, **kwargs)
    head_dim = owner.value_projection.head_dim
    heads = output.unflatten(-1, (-1, head_dim))
    mixed = places(f"raw_{name}", heads)
    if mixed is not heads:
        heads, output = mixed, mixed.flatten(-2)
    norm = owner._modules.get("q_norm" if name == "queries" else "k_norm")
    if norm is not None:
        by_head = next(norm.parameters(), output[:0]).shape[-1:] in ((head_dim,), ())
        heads = norm(heads) if by_head else norm(output).unflatten(-1, (-1, head_dim))
    places.tensors[name] = heads
    return output


class Switch:
    """Whether the connections of a model are left out for a moment."""

    is_off = False


class Surgery:
    """Mixed into a module whose class is replaced by a subclass, which no file has: copied and pickled by parts."""

    family: Any  # the class that it had
    mixin: type
    switch: Switch
    own_methods: frozenset[str]  # functions of that class, which read attributes of `self` too

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _rebuilt, (self.family, self.mixin), self.__getstate__()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Leaves out Transformers' `GradientCheckpointingLayer`, which would checkpoint what is beside a layer too."""


def _rebuilt(family: type, mixin: type) -> Any:
    made: Any = surgery(family, mixin)
    return made.__new__(made)


@functools.cache
def surgery(family: Any, mixin: Any) -> Any:
    """The subclass of a module's class with a mixin of this file. It has the same name, which others look up."""
    methods = {
        name
        for each in family.__mro__[: family.__mro__.index(nn.Module)]
        for name, value in vars(each).items()
        if callable(value) and hasattr(value, "__get__") and not isinstance(value, (type, staticmethod, classmethod))
    }
    members = {
        "family": family,
        "mixin": mixin,
        "own_methods": frozenset(methods - {"forward", "__init__"}),
        "__module__": family.__module__,
    }
    if mixin is ConnectedLayer:
        members["checkpointed"] = checkpointed_class(family)
    made: Any = type(family.__name__, (mixin, family), members)
    run: Any = mixin.forward
    forward = FunctionType(run.__code__, run.__globals__, closure=run.__closure__)
    forward.__kwdefaults__ = run.__kwdefaults__
    made.forward = functools.update_wrapper(forward, family.forward)  # vLLM reads its source, others its signature
    return made


def change_class(module: Any, kind: type) -> None:
    """Gives a module another class. Accelerate's hooks keep the method that it had, also when they are taken off."""
    before, own = type(module).forward, vars(module)
    module.__class__ = kind
    if getattr(own.get("_old_forward"), "__func__", None) is before:
        own["_old_forward"] = MethodType(kind.forward, module)  # type: ignore[attr-defined]
    elif getattr(own.get("forward"), "__func__", None) is before:
        del own["forward"]


class PlacedModule(Surgery):
    """Mixed into a module between a layer and its attention."""

    around: tuple[tuple[str, Callable[..., Any]], ...]

    def forward(self, *args: Any, places: Places | None = None, **kwargs: Any) -> Any:
        if places is None:
            if self.switch.is_off:
                return self.family.forward(self, *args, **kwargs)
            raise ValueError(
                f"{type(self).__name__} is called alone: its connections read tensors of its layer. Call the model."
            )
        return self.family.forward(Seen(self, places), *args, **kwargs)


class ConnectedAttention(PlacedModule):
    """Mixed into an attention. The tensors that connections take are those of the projections."""

    value_projection: ValueProjection
    makes: tuple[bool, bool] | None = None  # keys and values of its own, where layers share them
    counts_heads: int = 0  # the width of keys, if it splits them by their number of heads

    def forward(self, *args: Any, places: Places | None = None, **kwargs: Any) -> Any:
        if places is not None:
            places.begin_attention()
            places.tensors["hidden_states"] = (
                args[0] if args else kwargs.get("hidden_states", next(iter(kwargs.values())))
            )
            if self.makes is not None:
                kwargs[CACHE] = SharedCache(kwargs.get(CACHE), self.makes, places)
            return self.family.forward(Seen(self, places), *args, **kwargs)
        return super().forward(*args, **kwargs)


#: Handed to a layer: its number, tensors of earlier layers, terms that are added in it.
Earlier = tuple[int, Mapping[str, Any], Mapping[str, torch.Tensor]]


class Later:
    """What a layer makes for later ones, handed to it beside its arguments. Its wrappers may run it again."""

    tensors: dict[str, torch.Tensor] | None = None
    is_read = False


class ConnectedLayer(Surgery):
    """Mixed into a decoder layer."""

    number: int  # PEFT and others write to `layer_idx`
    training: bool
    checkpointed: type["Checkpointed"]
    known: LayerPlaces
    around: tuple[tuple[str, Callable[..., Any]], ...]
    reads: Reads
    crossings: list[Crossing]  # all that it reads
    returned: tuple[str, ...]  # names of its tensors that later layers read
    connections: tuple[str, ...]  # the names of its modules
    acting: dict[str, list[tuple[str, tuple[str, ...], tuple[str, ...]]]]  # place -> (name, takes, required), in order
    expected: tuple[str, ...]  # places that it must come by
    end: tuple[str, int]  # (a connection that acts after the last layer, or nothing; the number of that)

    def forward(
        self,
        hidden_states: torch.Tensor,
        *args: Any,
        earlier: Earlier | None = None,
        later: Later | None = None,
        **kwargs: Any,
    ) -> Any:
        """As the family's."""
        if earlier is None or later is None:
            if self.switch.is_off:
                return self.family.forward(self, hidden_states, *args, **kwargs)
            raise ValueError(
                f"Layer {self.number} is called alone: its connections read tensors of earlier layers. Call the "
                "model, or `resformer.disconnect` it."
            )
        if self.training and getattr(self, "gradient_checkpointing", False):
            output, tensors = self.checkpointed(self).forward(hidden_states, *args, earlier=earlier, **kwargs)
        else:
            output, tensors = run_layer(self, hidden_states, *args, earlier=earlier, **kwargs)
        if not later.is_read:
            later.tensors = tensors
        return output

    def attention_norm(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """What attention reads of a tensor: its norm, where the layer has one before attention."""
        name = self.known.norms[0] if self.known.norms else self.known.attention
        normed: torch.Tensor = hidden_states if name == self.known.attention else getattr(self, name)(hidden_states)
        return normed


def run_layer(
    layer: ConnectedLayer,
    hidden_states: torch.Tensor,
    *args: Any,
    earlier: Earlier,
    **kwargs: Any,
) -> tuple[Any, dict[str, torch.Tensor]]:
    """Returns a layer's output and the tensors that later layers read. Checkpointing runs it again."""
    places = Places(layer, *earlier)
    if "layer_input" in layer.expected or "layer_input" in places.added:
        hidden_states = places("layer_input", hidden_states)
    seen = Seen(layer, places) if layer.around else layer
    output = layer.family.forward(seen, hidden_states, *args, **kwargs)
    if "layer_output" in layer.expected:
        output = places.at_output("layer_output", output)
    for name in (*layer.expected, *places.given):
        if name not in places.tensors:
            why = "its connections cannot act" if name in PLACES else "it is no place, and no connection returns it"
            meant = "" if name in PLACES else did_you_mean(name, PLACES)
            raise ValueError(f"Layer {layer.number} has not used its {name}: {why}.{meant}")
    return output, {name: places.tensors[name] for name in layer.returned} if layer.returned else {}


class Checkpointed:
    """A layer, for Transformers' gradient checkpointing: from outside of it nothing may be written within."""

    def __init__(self, layer: Any):
        self._layer = layer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


@functools.cache
def checkpointed_class(family: type) -> type:
    class Layer(GradientCheckpointingLayer if issubclass(family, GradientCheckpointingLayer) else nn.Module):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return run_layer(self._layer, *args, **kwargs)

    return type(family.__name__, (Checkpointed,), {"forward": Layer.forward})


class Plan:
    """What the layers of a decoder read and have, worked out once for a list of layers."""

    def __init__(self, modules: list[nn.Module], decoder: nn.Module):
        self.modules, self.decoder = modules, decoder  # the list's, which may have wrappers around layers
        self.layers: dict[int, Any] = {}
        self.numbers: list[int] = []
        for module in modules:
            layer: Any = next((each for each in module.modules() if isinstance(each, ConnectedLayer)), None)
            if layer is None:
                raise ValueError(
                    f"The list of layers holds a {type(module).__name__} in the place of a layer, past which "
                    "connections do not reach. Pipeline parallelism is not supported: use tensor parallelism or FSDP2."
                )
            if layer.number in self.layers:
                raise ValueError(
                    f"The list of layers holds layer {layer.number} twice, whose connections are of one place: repeat "
                    "layers of the model before `connect`, or `resformer.disconnect` it for that."
                )
            self.layers[layer.number] = layer
            self.numbers.append(layer.number)
        for name, last in {layer.end for layer in self.layers.values()}:
            if name and last not in self.layers:
                raise ValueError(
                    f"Layer {last}, the last, has been removed, and `{name}` acts after it: remove layers of the model "
                    "before `connect`."
                )
        last = {crossing: n for n, layer in self.layers.items() for crossing in layer.crossings}
        #: Of each layer: what it reads, what it is the last to read, and what of its own others read.
        self.of = {
            n: (
                [*layer.reads.items()],
                [crossing for crossing in layer.crossings if last[crossing] == n],
                [(name, (name, n)) for name in layer.returned if (name, n) in last],
            )
            for n, layer in self.layers.items()
        }
        self.reads_tokens = TOKENS in last
        having = {
            kind.name: [n for n, layer in self.layers.items() if kind.name in layer.connections] for kind in KINDS
        }
        self.kinds = [(name, numbers) for name, numbers in having.items() if numbers]


class ForwardPass:
    """What crosses from layer to layer in one forward pass.

    Args:
        input_ids: of the current tokens, `(batch, tokens)`.
    """

    def __init__(self, plan: Plan, input_ids: torch.Tensor | None = None):
        self.plan = plan
        self.tensors: dict[Crossing, Any] = {} if input_ids is None else {TOKENS: input_ids}
        self.between: list[BetweenLayers] = []
        for name, numbers in plan.kinds:
            modules: Any = {n: plan.layers[n]._modules[name] for n in numbers}
            between = modules[numbers[0]].between(modules, plan.decoder._modules.get(name))
            if between is not None:
                self.between.append(between)

    def before(self, n: int, hidden_states: torch.Tensor, module: Any) -> tuple[torch.Tensor, Earlier]:
        """(what layer n reads, what is handed to it).

        Args:
            module: the layer, or what is around it.
        """
        reads, read_last, _ = self.plan.of[n]
        earlier: dict[str, Any] = {}
        added: dict[str, torch.Tensor] = {}
        if reads:
            # Accelerate moves the arguments of a layer to its device, once for each layer; here once for each device.
            device = hidden_states.device
            if "_hf_hook" in module.__dict__:
                device = getattr(module._hf_hook, "execution_device", None) or device
            for name, read in reads:
                earlier[name] = (
                    tuple([self._read(n, each, device) for each in read])
                    if isinstance(read, list)
                    else self._read(n, read, device)
                )
            for crossing in read_last:
                self.tensors.pop(crossing, None)
        dtype = hidden_states.dtype
        for between in self.between:
            hidden_states = between.before(n, hidden_states, earlier, added)
        return hidden_states if hidden_states.dtype == dtype else hidden_states.to(dtype), (n, earlier, added)

    def _read(self, n: int, crossing: Crossing, device: torch.device) -> Any:
        tensor = self.tensors.get(crossing)
        if tensor is None:
            raise ValueError(
                f"Layer {n} reads the {crossing[0]} of layer {crossing[1]}, which has been removed or comes later."
            )
        if tensor.device != device:
            tensor = self.tensors[crossing] = tensor.to(device)
        return tensor

    def after(self, n: int, hidden_states: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Returns what is read in place of the layer's output.

        Args:
            tensors: the layer's own, by name, that later ones read.
        """
        for name, crossing in self.plan.of[n][2]:
            self.tensors[crossing] = tensors[name]
        dtype = hidden_states.dtype
        for between in self.between:
            hidden_states = between.after(n, hidden_states)
        return hidden_states if hidden_states.dtype == dtype else hidden_states.to(dtype)


class Step:
    """A layer in a forward pass: what the decoder finds in its list. All that may run a layer again is within."""

    def __init__(self, forward_pass: ForwardPass, module: Any, n: int):
        self._forward_pass, self._module, self._n = forward_pass, module, n

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        hidden_states, *more = args or (kwargs.pop("hidden_states"),)
        n, module, later = self._n, self._module, Later()
        hidden_states, earlier = self._forward_pass.before(n, hidden_states, module)
        output = module(hidden_states, *more, earlier=earlier, later=later, **kwargs)
        if later.tensors is None:
            raise ValueError(
                f"Layer {n} is in a {type(module).__name__}, which has not called it with its arguments: connections "
                "do not reach past it. Take it off, or `resformer.disconnect` the model."
            )
        later.is_read = True  # a wrapper that runs the layer again keeps the box, but no tensors in it
        tensors, later.tensors = later.tensors, None
        if isinstance(output, (tuple, list)):
            return (self._forward_pass.after(n, output[0], tensors), *output[1:])
        return self._forward_pass.after(n, output, tensors)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class ConnectedList(Surgery, nn.ModuleList):
    """Mixed into the list of layers, in which the decoder finds the steps of its pass while it runs."""

    passes: "Passes"

    def __getitem__(self, index: Any) -> Any:
        steps = self.passes.steps
        if steps is not None:
            return steps[index]
        if isinstance(index, slice):  # a part is no list of a decoder
            return nn.ModuleList([*self._modules.values()][index])
        return super().__getitem__(index)

    def __iter__(self) -> Any:
        steps = self.passes.steps
        return super().__iter__() if steps is None else iter(steps)

    def forward(self) -> None: ...


class _OfThread(threading.local):
    steps: list[Step] | None = None
    input_ids: torch.Tensor | None = None


class Passes:
    """The forward pass of a decoder that runs: servers call a model in several threads at once.

    While torch.compile traces it is kept in plain attributes: a tracer does not see thread-locals (as in
    `transformers.utils.output_capturing.CompileableContextVar`).
    """

    def __init__(self, decoder: Any, layers: str, drops: tuple[str, ...], switch: Switch):
        self.decoder, self.layers, self.drops, self.switch = decoder, layers, drops, switch
        self.of_thread = _OfThread()
        self.compiled_steps: list[Step] | None = None
        self.plan = Plan([*getattr(decoder, layers)._modules.values()], decoder)

    def __reduce__(self) -> Any:
        return Passes.__new__, (Passes,), (self.decoder, self.layers, self.drops, self.switch)

    def __setstate__(self, state: tuple[Any, str, tuple[str, ...], Switch]) -> None:
        # The parts of the decoder may not have their own states yet.
        self.decoder, self.layers, self.drops, self.switch = state
        self.of_thread, self.compiled_steps = _OfThread(), None

    def __getattr__(self, name: str) -> Any:
        if name != "plan":
            raise AttributeError(name)
        self.plan = Plan([*getattr(self.decoder, self.layers)._modules.values()], self.decoder)
        return self.plan

    @property
    def steps(self) -> list[Step] | None:
        """Of the pass that runs."""
        return self.of_thread.steps if self.compiled_steps is None else self.compiled_steps

    def run(self, forward: Callable[..., Any], decoder: Any, *args: Any, **kwargs: Any) -> Any:
        """Calls the decoder's own forward, whose layers are those of a new pass."""
        if self.switch.is_off:
            return forward(decoder, *args, **kwargs)
        if getattr(decoder, self.layers) is not getattr(self.decoder, self.layers):
            return self.of_copy(decoder).run(forward, decoder, *args, **kwargs)
        compiling = torch.compiler.is_compiling()
        if not compiling and [*getattr(self.decoder, self.layers)._modules.values()] != self.plan.modules:
            self.layers_have_changed()
        plan = self.plan
        for name in self.drops:
            kwargs.pop(name, None)
        input_ids = self.tokens(args, kwargs) if plan.reads_tokens else None
        forward_pass = ForwardPass(plan, input_ids)
        steps = [Step(forward_pass, *each) for each in zip(plan.modules, plan.numbers, strict=True)]
        if compiling:
            self.compiled_steps = steps
            output = forward(decoder, *args, **kwargs)
            self.compiled_steps = None
            return output
        self.compiled_steps = None  # of a compiled pass that has failed
        before, self.of_thread.steps = self.of_thread.steps, steps
        try:
            return forward(decoder, *args, **kwargs)
        finally:
            self.of_thread.steps = before

    def of_copy(self, decoder: Any) -> "Passes":
        """Those of a shallow copy with other layers: Accelerate's `compile_regions` makes one."""
        decoder.passes = passes = Passes(decoder, self.layers, self.drops, self.switch)
        passes.of_thread = self.of_thread  # whose tokens the model's hook sees
        passes.layers_have_changed()
        return passes

    def layers_have_changed(self) -> None:
        """Some were wrapped, compiled or removed."""
        layers = getattr(self.decoder, self.layers)
        if not isinstance(layers, ConnectedList):
            kind: Any = type(layers)
            layers.__class__ = surgery(kind, ConnectedList)
            layers.passes = self
        self.plan = Plan([*layers._modules.values()], self.decoder)

    def tokens(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
        """The numbers of the tokens, which the decoder gets, or the model that it is part of has got."""
        given, embedded = kwargs.get("input_ids", args[0] if args else None), kwargs.get("inputs_embeds")
        if given is not None and given.is_floating_point():  # BERT's list of layers gets embeddings
            given, embedded = None, given
        if given is None or not torch.compiler.is_compiling():
            seen, self.of_thread.input_ids = self.of_thread.input_ids, None  # a later pass may not read them
            given = seen if given is None else given
        if given is None and embedded is None:
            return None  # the family says what it needs
        if given is None:
            layers = self.plan.layers.values()
            names = {name for each in layers for name, read in each.reads.items() if read == TOKENS}
            readers: Any = (each._modules[name] for each in layers for name in each.connections)
            fields = (each.fields[0] if each.fields else each.name for each in readers if names & {*each.takes})
            field = next(fields, "connections")
            raise ValueError(
                f"`{field}` looks up rows of tokens, which `inputs_embeds` does not name: pass `input_ids` instead "
                "(soft prompts are not supported)."
            )
        return given

    def see_tokens(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A hook before a model around the decoder, which may turn tokens into embeddings."""
        self.of_thread.input_ids = kwargs.get("input_ids", args[0] if args else None)


def keep_packed_sequences_apart(kwargs: dict[str, Any]) -> None:
    """Makes no cache of packed sequences: Transformers sees by their positions where they begin, without one alone.

    Where positions restart, that is; of one sequence with gaps, such as tokens that were evicted, a family makes one.
    """
    positions = kwargs.get("position_ids")
    if positions is not None and positions.dim() == 3:  # of time, height and width; before these may be the text's
        positions = positions[0] if len(positions) == 4 else None
    if positions is None or kwargs.get("attention_mask") is not None or kwargs.get(CACHE) is not None:
        return
    if torch.compiler.is_compiling():
        kwargs.setdefault("use_cache", False)
    elif kwargs.get("use_cache") is not False and bool((positions.diff() < 1).any()):
        kwargs["use_cache"] = False


class ConnectedDecoder(Surgery):
    """Mixed into the module that has the layers, if it is no model with connections by itself."""

    passes: Passes

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.passes.run(self.family.forward, self, *args, **kwargs)
