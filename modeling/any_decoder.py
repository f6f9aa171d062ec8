"""Connections in a decoder of another family, which stays what it is: its layers act as ever, and at some of their
modules, which are found by name, the places of `connection.py` are seen.

A layer's class is replaced by a subclass of it, as `torch.nn.utils.parametrize` does. While the layer runs, its
attributes of those modules give the module with the place around it. So a module that something else has put there,
LoRA or a quantised layer, is still seen, once.
"""

import functools
import inspect
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MethodType, SimpleNamespace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from resformer.configuration.connection_fields import check_connections
from resformer.configuration.methods import CONNECTION_FIELDS
from resformer.modeling.connected import ConnectedLayer, ForwardPass, Places, Wiring
from resformer.modeling.connection import Connection, StartsAsStated, kinds_in

#: Names of projections whose whole output is values, of fused ones whose output ends with the values of all heads, and
#: of fused ones whose output ends with values within each head.
_VALUES = ("v_proj", "value", "value_proj", "v")
_FUSED = ("qkv_proj", "c_attn", "Wqkv", "qkv")
_FUSED_BY_HEAD = ("query_key_value", "kv_b_proj")
_OUTPUTS = ("o_proj", "out_proj", "dense", "c_proj", "wo", "Wo", "o", "out", "output_proj", "linear_out")
#: Attribute of an attention -> why what it hands its output projection is no mean of its values.
_OUTPUTS_UNLIKE = {"lambda_init": "subtracts two means of values", "v_scale": "scales values after their projection"}
#: Modules that change values after their projection and before the cache; the former returns them head by head.
_AFTER_VALUES = ("v_norm", "v_sconv")
_INPUT_NORMS = ("input_layernorm", "ln_1", "norm1", "operator_norm", "attention_norm", "self_attn_layer_norm", "norm_1")
_MLP_NORMS = tuple(
    "pre_feedforward_layernorm pre_mlp_layernorm post_attention_layernorm ln_2 norm2 ffn_norm final_layer_norm norm_2 "
    "pre_ff_layernorm".split()
)
#: Attention in a wider sense: its values are no values of a softmax.
_OTHER_MIXERS = re.compile(r"Linear|Lightning|Delta|Recurrent|Mamba|Mixer|Conv|RWKV|SSM|Cross|Ngram", re.IGNORECASE)


@dataclass(frozen=True)
class ValueProjection:
    """The values are, from `start` on, `width` numbers of every `part` that a module returns; 0: all, head by head."""

    module: str
    part: int
    start: int
    width: int
    head_dim: int

    def take(self, output: torch.Tensor) -> torch.Tensor:
        """The values, `(batch, tokens, heads, head_dim)`."""
        if not self.part:
            return output
        values = self._parts(output)
        if self.width < self.part:
            values = values.narrow(-1, self.start, self.width)
        return values if self.width == self.head_dim else values.flatten(-2).unflatten(-1, (-1, self.head_dim))

    def put(self, output: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """The output with other values."""
        if not self.part:
            return values
        if self.part == self.width:
            return values.flatten(-2)
        parts = self._parts(output)
        values = values.flatten(-2).unflatten(-1, (parts.shape[-2], self.width))
        before, after = parts[..., : self.start], parts[..., self.start + self.width :]
        return torch.cat((before, values, after), dim=-1).view_as(output)

    def _parts(self, output: torch.Tensor) -> torch.Tensor:
        """`(batch, tokens, parts, part)`; what is made of cached latents is `(batch, 1, tokens, width)`."""
        return output.flatten(1, -2).unflatten(-1, (-1, self.part))


@dataclass(frozen=True)
class LayerPlaces:
    """What is known of a layer. `None` is not found."""

    attention: str  # the name of its attention; empty if it has none
    values: ValueProjection | None
    heads: int
    query_heads: int
    output: str | None
    output_unlike: str  # why its input is no mean of values; empty if it is
    norms: tuple[str, str] | None  # before attention and MLP
    queries: str  # why queries and keys before the rotary embedding are not known; empty if they are


class Decoder:
    """A decoder of another family: where its layers are, and what is known of them.

    Attributes:
        module: what has the layers.
        layers: the layers.
        name: of the list of layers in the model.
        places: of each layer.
    """

    def __init__(self, model: PreTrainedModel):
        config = text_config(model.config)
        self.model_type = model.config.model_type
        self.count: int = getattr(config, "num_hidden_layers", 0)
        lists = {
            name: module
            for name, module in model.named_modules()
            if isinstance(module, nn.ModuleList)
            and len(module) == self.count
            and not re.search(r"vision|visual|audio|speech|encoder\.|image|codec", f"{name}.".removeprefix("encoder."))
            and all(any(True for _ in layer.children()) for layer in module)
        }
        # Layers of layers, experts for one, come later in the order of names.
        self.name = next(iter(lists), "")
        if not self.count or not lists:
            raise ValueError(f"{self.model_type}: it has no list of `num_hidden_layers` ({self.count}) decoder layers.")
        self.layers = lists[self.name]
        self.module: Any = model.get_submodule(self.name.rpartition(".")[0])
        self.lanes = any(hasattr(config, each) for each in ("altup_num_inputs", "hc_mult", "hc_count"))
        self.loops = any(isinstance(n, int) and n > 1 for name, n in vars(config).items() if "loop" in name)
        windows = {kind == "sliding_attention" for kind in getattr(config, "layer_types", None) or ()}
        self.caches_differ = len(windows) > 1
        self.places = [layer_places(layer, config) for layer in self.layers]

    def view(self, config: PreTrainedConfig) -> "View":
        """What connections read of the configuration.

        Raises:
            ValueError: its fields do not fit, or the decoder cannot have what they say.
        """
        view = View(config, self)
        check_connections(view)
        if reason := why_not(self, view):
            raise ValueError(reason)
        return view

    def tp_plan(self, view: "View", of_family: Mapping[str, str]) -> dict[str, str]:
        """How tensor parallelism splits the connections: by heads, unless the family's own plan gathers the values."""
        module = self.name.rpartition("layers")[0]
        values = [f"{self.name}.*.{each.attention}." for each in self.places if each.values is not None]
        split = (name for name, style in of_family.items() if style == "colwise" and name.startswith(tuple(values)))
        if not any(name.endswith((*_VALUES, *_FUSED, *_FUSED_BY_HEAD)) for name in split):
            return {}
        return {f"{module}{name}": style for kind in kinds_in(view) for name, style in kind.tp_plan(view).items()}


class View(SimpleNamespace):
    """What connections read of another family's configuration, under the names of ours."""

    def __init__(self, config: Any, decoder: Decoder):
        text = text_config(config)
        groups: dict[tuple[int, int], int] = {}
        numbers = [
            None if each.values is None else groups.setdefault((each.heads, each.values.head_dim), len(groups))
            for each in decoder.places
        ]
        super().__init__(
            **{name: getattr(config, name, default) for name, default in CONNECTION_FIELDS.items()},
            num_hidden_layers=decoder.count,
            hidden_size=text.hidden_size,
            vocab_size=text.vocab_size,
            initializer_range=getattr(text, "initializer_range", 0.02),
            rms_norm_eps=next((getattr(text, each) for each in _EPSILONS if hasattr(text, each)), 1e-6),
            value_groups=numbers,
            places=decoder.places,
            **_shape(next((each for each in decoder.places if each.values is not None), decoder.places[0])),
        )

    def of_layer(self, layer: int) -> SimpleNamespace:
        return SimpleNamespace(**{**vars(self), **_shape(self.places[layer])})


_EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon")


def _shape(places: LayerPlaces) -> dict[str, int]:
    return {
        "num_key_value_heads": places.heads,
        "num_attention_heads": places.query_heads,
        "head_dim": 0 if places.values is None else places.values.head_dim,
    }


def text_config(config: Any) -> Any:
    return config.get_text_config(decoder=True)


def layer_places(layer: nn.Module, config: Any) -> LayerPlaces:
    """Finds the places of a layer by the names of its modules."""
    norms = _norms(layer)
    for name, attention in layer.named_modules():
        if re.search(r"cross|encoder_attn|enc_dec", name) or _OTHER_MIXERS.search(type(attention).__name__):
            continue
        projection = next(
            (each for each in (*_VALUES, *_FUSED, *_FUSED_BY_HEAD) if _width(attention._modules.get(each))), None
        )
        if projection is None or not name:
            continue
        output = next((each for each in _OUTPUTS if _width(attention._modules.get(each))), None)
        query_heads = _number(attention, config, "num_attention_heads", "num_heads", "n_heads", "n_head") or 1
        width = _width(attention._modules[projection])
        head_dim = (
            getattr(attention, "v_head_dim", None)
            or _number(attention, config, "head_dim", "attention_head_size", "head_size")
            or config.hidden_size // query_heads
        )
        if projection in _VALUES:
            part = value_width = head_dim
            heads = width // head_dim
        elif groups := getattr(attention, "mp_num", 0):  # queries, values and keys in each of a few groups of heads
            part, value_width = width // groups, width // groups // 3
            heads = query_heads
        elif projection in _FUSED:
            queries = query_heads * head_dim
            part, value_width = width, (width - queries) // 2
            heads = value_width // head_dim
        elif projection == "kv_b_proj":
            heads = query_heads
            part, value_width = width // heads, head_dim
        else:
            heads = next(
                (n for n in _falcon_groups(attention, query_heads) if width % (n * head_dim) == 0), query_heads
            )
            part, value_width = width // heads, head_dim
        start = value_width if hasattr(attention, "mp_num") else part - value_width
        after = next((each for each in _AFTER_VALUES if each in attention._modules), None)
        if after is not None and projection in _VALUES:
            projection, part = after, 0 if after == "v_norm" else part
        queries_unknown = ""
        if projection not in ("v_proj", *_AFTER_VALUES) or not {"q_proj", "k_proj"} <= attention._modules.keys():
            queries_unknown = "its queries, keys and values are not made by `q_proj`, `k_proj` and `v_proj`"
        elif _width(attention._modules["q_proj"]) != query_heads * head_dim:
            queries_unknown = "its `q_proj` returns more than queries"
        elif _width(attention._modules["k_proj"]) != width:
            queries_unknown = "its keys and values have different widths"
        elif getattr(config, "clip_qkv", None):
            queries_unknown = "its queries and keys are clipped after their projection"
        elif (names := inspect.unwrap(type(attention).forward).__code__.co_names) and (
            {"q_proj", "v_proj"} <= {*names} and names.index("q_proj") > names.index("v_proj")
        ):
            queries_unknown = "its values are made before its queries"
        unlike = next((reason for each, reason in _OUTPUTS_UNLIKE.items() if hasattr(attention, each)), "")
        values = ValueProjection(projection, part, start, value_width, head_dim)
        return LayerPlaces(name, values, heads, query_heads, output, unlike, norms, queries_unknown)
    return LayerPlaces("", None, 1, 1, None, "", norms, "it has no attention")


def _width(module: Any) -> int:
    """The numbers that a linear layer returns; 0 for anything else."""
    width = module.nf if type(module).__name__ == "Conv1D" else getattr(module, "out_features", 0)
    return width if isinstance(width, int) else 0


def _number(attention: Any, config: Any, *names: str) -> int | None:
    for owner in (attention, config):
        for name in names:
            if isinstance(value := getattr(owner, name, None), int):
                return value
    return None


def _falcon_groups(attention: Any, query_heads: int) -> Iterator[int]:
    """How many groups of queries, a key and a value a fused projection may have."""
    if getattr(attention, "new_decoder_architecture", False):
        yield attention.num_kv_heads
    elif getattr(attention, "multi_query", False):
        yield 1
    yield query_heads


def _norms(layer: nn.Module) -> tuple[str, str] | None:
    names = list(layer._modules)
    first = next((each for each in _INPUT_NORMS if each in names), None)
    # Those of the first GPT, of BART's kin and of some OPT come after what they are named after.
    if (
        "encoder_attn" in names
        or not getattr(layer, "do_layer_norm_before", True)
        or (first, names[0]) == ("ln_1", "attn")
    ):
        return None
    second = next((each for each in _MLP_NORMS if each in names), None)
    return None if first is None or second is None else (first, second)


def why_not(decoder: Decoder, view: View) -> str | None:
    """Why the decoder cannot have the connections of `view`; `None` if it can."""
    for kind in kinds_in(view):
        if reason := _why_not(kind, decoder, view):
            return f"{decoder.model_type} cannot have `{kind.name}`: {reason}."
    return None


def _why_not(kind: type[Connection], decoder: Decoder, view: View) -> str | None:
    layers, places = decoder.layers, decoder.places
    if decoder.loops:
        return "its layers run several times in a pass"
    with_values = [each for each in places if each.values is not None]
    if any("Cross" in type(layer).__name__ for layer in layers):
        return "its layers of cross-attention are left out where there are no images"
    if kind.place in ("raw_values", "mixed_values", "attention_output"):
        if not with_values:
            return f"no projection of values is known in {type(layers[0]).__name__}"
        if not kind.layers(view):
            return "no two layers have values of one shape"
    if kind.place == "attention_output":
        if any(each.output is None for each in with_values):
            return "the output projection of its attention is not known"
        if reason := with_values[0].output_unlike:
            return f"its attention {reason}"
    reads_tokens = not {"hidden_states", "input_ids", "queries"}.isdisjoint(kind.takes)
    if any(each.values.module == "kv_b_proj" for each in with_values if each.values):
        if reads_tokens or kind.place == "attention_output":
            return "its cache holds latents, of which past tokens' values are made again, but not what they read"
        if kind.place is not None and "values" in kind.place and decoder.caches_differ:
            return "its cache holds latents of all tokens in some layers, and of a window in others"
    if kind.name == "attention_residuals":
        if decoder.lanes:
            return "its residual stream has several lanes"
        without = next((n for n, each in enumerate(places) if each.norms is None), None)
        if without is not None:
            return f"layer {without} lacks a norm before its attention or before its MLP"
    for n in kind.layers(view) if "queries" in kind.takes else ():
        if reason := places[n].queries:
            return f"in layer {n} {reason}"
    return None


class Around:
    """A module with a place around it, for as long as a layer runs."""

    def __init__(self, module: nn.Module, call: Callable[..., Any]):
        self.module, self.call = module, call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(self.module, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)


def _around(name: str, method: str) -> property:
    def get(self: Any) -> Any:
        module = self._modules[name]
        return module if self.places is None else Around(module, getattr(self, method))

    return property(get)


class _Surgery:
    """Mixed into a module whose class is replaced by a subclass, which no file has: copied and pickled by parts."""

    family: type  # the class that it had
    made_by: tuple[Any, ...]  # what made the subclass, and its other arguments
    passes: "Passes"

    @property
    def places(self) -> Any:
        """Those of its layer, while that runs."""
        return self.passes.running.places

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _rebuilt, (self.family, *self.made_by), self.__getstate__()


def _rebuilt(family: type, make: Callable[..., type], *arguments: Any) -> Any:
    module_class: Any = make(family, *arguments)
    return module_class.__new__(module_class)


def _subclass(family: type, mixin: type, methods: Iterable[tuple[str, str]], *made_by: Any) -> type:
    properties = {name: _around(name, method) for name, method in methods}
    # Others look classes up by their names: `_no_split_modules` for one.
    members = {**properties, "family": family, "made_by": made_by, "__module__": family.__module__}
    return type(family.__name__, (mixin, family), members)


class ConnectedAttention(_Surgery):
    """Mixed into an attention. The tensors that connections take are those of the projections."""

    value_projection: ValueProjection

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.places is not None:
            hidden_states = args[0] if args else next(iter(kwargs.values()))
            self.places.tensors["hidden_states"] = kwargs.get("hidden_states", hidden_states)
        return super().forward(*args, **kwargs)  # type: ignore[misc]

    def around_values(self, module: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        output = module(*args, **kwargs)
        places, layout = self.places, self.value_projection
        values = layout.take(output)
        mixed = places("mixed_values", places("raw_values", values))
        return output if mixed is values else layout.put(output, mixed)

    def around_output(self, module: nn.Module, states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        heads = states.unflatten(-1, (-1, self.value_projection.head_dim))
        mixed = self.places("attention_output", heads)
        return module(states if mixed is heads else mixed.flatten(-2), *args, **kwargs)

    def around_queries(self, module: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self._seen("queries", "q_norm", module(*args, **kwargs))

    def around_keys(self, module: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self._seen("keys", "k_norm", module(*args, **kwargs))

    def _seen(self, name: str, norm: str, output: torch.Tensor) -> torch.Tensor:
        """Keeps queries or keys before the rotary embedding, normed as the attention norms them."""
        module, head_dim = self._modules.get(norm), self.value_projection.head_dim  # type: ignore[attr-defined]
        heads = output.unflatten(-1, (-1, head_dim))
        if module is not None:
            by_head = next(module.parameters(), output[:0]).shape[-1:] in ((head_dim,), ())
            heads = module(heads) if by_head else module(output).unflatten(-1, (-1, head_dim))
        self.places.tensors[name] = heads
        return output


@functools.cache
def attention_class(family: type, methods: tuple[tuple[str, str], ...]) -> type:
    """The subclass in which modules have places around them: (name of the module, method)."""
    return _subclass(family, ConnectedAttention, methods, attention_class, methods)


class ConnectedFamilyLayer(_Surgery, ConnectedLayer):
    """Mixed into a decoder layer."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        hidden_states, *more = args or (kwargs.pop("hidden_states"),)
        forward_pass = self.passes.of(self)
        hidden_states, earlier = forward_pass.before(self, hidden_states)
        called = super(ConnectedLayer, self).__call__(hidden_states, *more, earlier=earlier, **kwargs)
        hidden_states, returned, others = called
        hidden_states = forward_pass.after(self, hidden_states, returned)
        return hidden_states if others is None else (hidden_states, *others)

    def forward(
        self, hidden_states: torch.Tensor, *args: Any, earlier: dict[str, Any] | None = None, **kwargs: Any
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor], tuple[Any, ...] | None]:
        """Returns the output, what later layers read, and what the layer returns besides; `None`: a bare tensor."""
        places = Places(self, earlier)
        hidden_states = places("layer_input", hidden_states)
        running = self.passes.running
        running.places = places
        try:
            output = super().forward(hidden_states, *args, **kwargs)
        finally:
            running.places = None
        for place in (*self.acting, *self.returned):
            if place not in places.tensors:
                raise ValueError(f"Layer {self.layer_idx} has not used its {place}: its connections cannot act.")
        if isinstance(output, (tuple, list)):
            return output[0], places.returned(), tuple(output[1:])
        return output, places.returned(), None

    def around_attention_norm(self, module: nn.Module, states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return module(self.places("attention_input", states), *args, **kwargs)

    def around_mlp_norm(self, module: nn.Module, states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return module(self.places("mlp_input", states), *args, **kwargs)


@functools.cache
def layer_class(family: type, norms: tuple[str, str] | None) -> type:
    """The subclass of a decoder layer with connections; with `norms`, also at the inputs of these."""
    methods = zip(norms or (), ("around_attention_norm", "around_mlp_norm"), strict=False)
    return _subclass(family, ConnectedFamilyLayer, methods, layer_class, norms)


class Running(threading.local):
    """The forward pass that runs in a thread: servers call a model in several at once."""

    def __init__(self) -> None:
        self.input_ids: torch.Tensor | None = None
        self.current: ForwardPass | None = None
        self.left: list[int] = []  # the layers that have not run yet
        self.places: Places | None = None  # of the layer that runs


class Passes:
    """The forward pass that runs: what a family's decoder does not hand its layers.

    Read outside of what checkpointing repeats: a repeated layer gets the tensors of its own pass as arguments.
    """

    def __init__(self, decoder: Any, layers: str):
        self.decoder, self.layers = decoder, layers
        self.running = Running()

    def __reduce__(self) -> Any:
        return Passes.__new__, (Passes,), (self.decoder, self.layers)

    def __setstate__(self, state: tuple[Any, str]) -> None:
        self.__init__(*state)  # type: ignore[misc]

    def see_tokens(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A hook before the model's forward, for connections that read tokens."""
        ids = kwargs.get("input_ids", args[0] if args else None)
        self.running.input_ids = ids  # in place of those of a pass that has failed

    def see_tokens_within(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The same before a decoder within the model, which may have turned tokens into embeddings."""
        if (ids := kwargs.get("input_ids", args[0] if args else None)) is not None:
            self.running.input_ids = ids

    def keep_all(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A hook before the decoder's forward, for connections that read states: Gemma 4 drops tokens in its middle."""
        return args, {name: value for name, value in kwargs.items() if name != "logits_to_keep"}

    def of(self, layer: ConnectedLayer) -> ForwardPass:
        layers, running = getattr(self.decoder, self.layers), self.running
        if layer is layers[0]:
            running.current = ForwardPass(layers, self.decoder, running.input_ids)
            running.input_ids = None  # of this pass alone
            running.left = [each.layer_idx for each in layers]
        if running.current is None or not running.left or running.left[0] != layer.layer_idx:
            running.current = None
            raise ValueError(
                f"Layer {layer.layer_idx} is called without those before it: its connections read what they have made."
            )
        forward_pass, running.left = running.current, running.left[1:]
        if not running.left:
            running.current = None  # nothing of a pass outlives it
        return forward_pass


def add_connections(model: PreTrainedModel, decoder: Decoder, view: View) -> None:
    """Gives the layers of the decoder their connections, at their start."""
    wiring = Wiring(view)
    list_name = decoder.name.rpartition(".")[2]
    passes = Passes(decoder.module, list_name)
    kinds = kinds_in(view)
    takes = {name for kind in kinds for name in kind.takes}
    norms = any(kind.name == "attention_residuals" for kind in kinds)
    for n, (layer, places) in enumerate(zip(decoder.layers, decoder.places, strict=True)):
        if places.values is not None:
            attention: Any = layer.get_submodule(places.attention)
            methods = {places.values.module: "around_values"}
            if places.output is not None and any(kind.place == "attention_output" for kind in kinds):
                methods[places.output] = "around_output"
            if "queries" in takes and not places.queries:
                methods |= {"q_proj": "around_queries", "k_proj": "around_keys"}
            _become(attention, attention_class, tuple(methods.items()))
            attention.value_projection, attention.passes = places.values, passes
        _become(layer, layer_class, places.norms if norms else None)
        connected: Any = layer
        connected.passes = passes
        connected.add_connections(wiring, n)
        for name in connected.connections:
            _start(layer._modules[name], layer)
    for kind in kinds:
        if (module := kind.of_decoder(view)) is not None:
            decoder.module.add_module(kind.name, module)
            _start(module, decoder.layers[0])
    if any(kind.place is None for kind in kinds):
        decoder.module.register_forward_pre_hook(passes.keep_all, with_kwargs=True)
    if "input_ids" in takes:
        model.register_forward_pre_hook(passes.see_tokens, with_kwargs=True)
        if decoder.module is not model:
            decoder.module.register_forward_pre_hook(passes.see_tokens_within, with_kwargs=True)


def _become(module: Any, make: Callable[..., Any], argument: Any) -> None:
    """Gives a module another class; hooks of Accelerate call the method that it had."""
    module.__class__ = make(type(module), argument)
    if "_old_forward" in vars(module):
        module._old_forward = MethodType(type(module).forward, module)


def _start(module: Any, layer: Any) -> None:
    """Sets the initial values, on the device where the layer runs; tables have its dtype."""
    like = next(layer.parameters())
    if torch.get_default_device().type != "meta":  # where `from_pretrained` builds; some parameters are elsewhere
        hooks = (getattr(each, "_hf_hook", None) for each in layer.modules()) if like.is_meta else ()  # if offloaded
        module.to(next((each.execution_device for each in hooks if hasattr(each, "execution_device")), like.device))
    if like.dtype == torch.float64:
        module.double()
    for name in module.tables:
        table = module.get_submodule(name.rpartition(".")[0])
        table.to(like.dtype if like.dtype.is_floating_point else None)
    with torch.no_grad():
        for each in module.modules():
            if isinstance(each, StartsAsStated):
                each.reset_parameters()
    module.train(False)
