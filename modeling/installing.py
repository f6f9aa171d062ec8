"""Gives the layers of a decoder their connections, and takes them away again."""

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from resformer.configuration.sources import key_sources, value_sources
from resformer.modeling.acting import (
    ConnectedAttention,
    ConnectedDecoder,
    ConnectedLayer,
    ConnectedList,
    Passes,
    PlacedModule,
    Surgery,
    Switch,
    around_module,
    around_nothing,
    around_output,
    around_queries_or_keys,
    around_values,
    change_class,
    surgery,
)
from resformer.modeling.any_decoder import (
    PROJECTION_INPUTS,
    SUBLAYER_INPUTS,
    SUBLAYERS_ADDED,
    Decoder,
    LayerPlaces,
)
from resformer.modeling.connection import (
    Connection,
    Reads,
    Shape,
    crossings,
    kinds_in,
    set_initial_values,
)
from resformer.modeling.connections import KINDS as KINDS  # makes the package's own known, in bundles too

#: Places within an attention.
WITHIN_ATTENTION = {*PROJECTION_INPUTS, "raw_queries", "raw_keys", "queries", "keys", "hidden_states"}
WITHIN_ATTENTION |= {"raw_values", "mixed_values", "attention_output"}
#: What is set of modules that get another class.
_SET = (
    "around switch number known reads crossings returned connections acting expected end makes counts_heads "
    "value_projection"
).split()
#: Name of a module -> what is called in its place while its owner runs.
Around = dict[str, Callable[..., Any]]


def add_connections(model: PreTrainedModel, decoder: Decoder, view: Shape) -> None:
    """Gives the layers of the decoder their connections, at their start."""
    kinds = kinds_in(view)
    if not kinds:
        return
    by_layer: list[list[type[Connection]]] = [[] for _ in decoder.layers]
    for kind in kinds:
        for n in kind.layers(view):
            by_layer[n].append(kind)
    reads: list[Reads] = [
        {name: read for kind in of_layer for name, read in kind.reads(view, n).items()}
        for n, of_layer in enumerate(by_layer)
    ]
    returned: list[set[str]] = [set() for _ in decoder.layers]
    for name, maker in (each for of_layer in reads for each in crossings(of_layer)):
        if maker >= 0:
            returned[maker].add(name)
    needs = {place for kind in kinds for place in kind.needs(view)}
    flat = not any(kind.by_heads for kind in kinds)
    sharing = "shared_keys" in needs
    end = next((kind.name for kind in kinds if kind.at_end), "")
    for n, (layer, places) in enumerate(zip(decoder.layers, decoder.places, strict=True)):
        within = places.values is not None and bool(sharing or needs & WITHIN_ATTENTION)
        if within:
            _place_attention(layer, places, view, n, needs, flat, sharing)
        _become(layer, ConnectedLayer)
        connected: Any = layer
        connected.number, connected.known, connected.end = n, places, (end, decoder.count - 1)
        connected.around = _around_of_layer(places, needs, within)
        connected.reads, connected.crossings = reads[n], crossings(reads[n])
        connected.returned = tuple(sorted(returned[n]))
        with_modules = [kind for kind in by_layer[n] if kind.has_modules]
        connected.connections = tuple(kind.name for kind in with_modules)
        connected.acting = {}
        for kind in with_modules:
            module = kind.made(view.of_layer(n), n)
            connected.add_module(kind.name, module)
            start(module, connected)
            for place in kind.places:
                if place != "embeddings":
                    connected.acting.setdefault(place, []).append((kind.name, kind.takes, kind.required))
        taken = [place for kind in with_modules for place in kind.takes if place == "layer_input"]
        connected.expected = tuple(dict.fromkeys((*taken, *connected.acting, *connected.returned)))
    for kind in kinds:
        if (of_decoder := kind.made_of_decoder(view)) is not None:
            decoder.module.add_module(kind.name, of_decoder)
            start(of_decoder, decoder.layers[0])
    switch = Switch()
    for placed in (each for layer in decoder.layers for each in layer.modules() if isinstance(each, Surgery)):
        placed.switch = switch
    _become(decoder.layers, ConnectedList)
    # Gemma 4 drops tokens in its middle, whose states connections between layers read.
    drops = ("logits_to_keep",) if any(kind.place is None and kind.has_modules for kind in kinds) else ()
    passes = Passes(decoder.module, decoder.name.rpartition(".")[2], drops, switch)
    if not isinstance(decoder.module, PreTrainedModel):  # others run their passes by themselves
        _become(decoder.module, ConnectedDecoder)
    decoder.layers.passes = decoder.module.passes = passes  # type: ignore[assignment]
    if passes.plan.reads_tokens and decoder.module is not model:
        handle = model.register_forward_pre_hook(passes.see_tokens, with_kwargs=True)
        passes.hook = handle  # type: ignore[attr-defined]


def remove_connections(decoder: Decoder) -> None:
    """Takes them away: the layers are again of the classes that they had, without projections that sharing took."""
    passes: Any = decoder.layers.passes
    added: set[str] = set()
    for layer in decoder.layers:
        connected: Any = layer
        names = connected.connections
        added.update(names)
        for module in list(layer.modules()):
            _undo(module)
        for name in names:
            del layer._modules[name]
    for name in added:
        decoder.module._modules.pop(name, None)
    if getattr(passes, "hook", None) is not None:
        passes.hook.remove()
    for module in (decoder.layers, decoder.module):
        vars(module).pop("passes", None)
        _undo(module)


def _around_of_layer(places: LayerPlaces, needs: set[str], within: bool) -> tuple[tuple[str, Callable[..., Any]], ...]:
    """What is around the children of a layer."""
    before = dict(zip(places.norms or (), SUBLAYER_INPUTS, strict=False)) if needs & {*SUBLAYER_INPUTS} else {}
    after = dict(zip(places.added or (), SUBLAYERS_ADDED, strict=False)) if needs & {*SUBLAYERS_ADDED} else {}
    attention = places.attention.partition(".")[0] if within else ""
    names = dict.fromkeys(name for name in (*before, *after, attention) if name)
    return tuple(
        (name, partial(around_module, before.get(name, ""), after.get(name, ""), name == attention)) for name in names
    )


def _place_attention(
    layer: nn.Module, places: LayerPlaces, view: Shape, n: int, needs: set[str], flat: bool, sharing: bool
) -> None:
    values = places.values
    assert values is not None
    if flat and values.part == values.width:
        values = replace(values, part=0)
    path = places.attention.split(".")
    owner: Any = layer
    for container, child in pairwise(path):
        owner = owner.get_submodule(container)
        _become(owner, PlacedModule)
        owner.around = ((child, partial(around_module, "", "", True)),)
    attention: Any = layer.get_submodule(places.attention)
    inputs = dict(zip(PROJECTION_INPUTS, places.projections, strict=True))
    around: Around = {}
    if not places.queries and needs & {"queries", "keys", "raw_queries", "raw_keys"}:
        around["q_proj"] = partial(around_queries_or_keys, "queries", "query_input" in needs)
        around["k_proj"] = partial(around_queries_or_keys, "keys", "key_input" in needs)
    else:
        for each in ("query_input", "key_input"):
            if each in needs and inputs[each]:
                around[inputs[each]] = partial(around_module, each, "", False)
    at_projection = "value_input" in needs and inputs["value_input"] == values.module
    if "value_input" in needs and inputs["value_input"] and not at_projection:
        around[inputs["value_input"]] = partial(around_module, "value_input", "", False)
    if needs & {"raw_values", "mixed_values"} or at_projection:
        around[values.module] = partial(around_values, at_projection)
    if places.output is not None and "attention_output" in needs:
        around[places.output] = around_output
    if sharing:
        code = inspect.unwrap(type(attention).forward).__code__
        if {"num_key_value_heads", "num_kv_heads", "num_heads", "_shape"}.intersection(code.co_names):
            attention.counts_heads = places.heads * values.head_dim
        attention.makes = key_sources(view)[n] == n, value_sources(view)[n] == n
        for letter, makes in zip("kv", attention.makes, strict=True):
            if not makes:
                attention._modules.pop(f"{letter}_proj", None)
                if f"{letter}_norm" in attention._modules:
                    attention.add_module(f"{letter}_norm", nn.Identity())
                around[f"{letter}_proj"] = around_nothing
    _become(attention, ConnectedAttention)
    attention.value_projection, attention.around = values, tuple(around.items())


def _become(module: Any, mixin: type) -> None:
    kind: Any = type(module)
    change_class(module, surgery(kind, mixin))


def _undo(module: Any) -> None:
    if not isinstance(module, Surgery):
        return
    change_class(module, module.family)
    for name in _SET:
        vars(module).pop(name, None)


def start(module: Any, layer: Any) -> None:
    """Sets the initial values, on the device where the layer runs; tables have its dtype."""
    added = {id(each) for each in module.parameters()}
    like = next(each for each in layer.parameters() if id(each) not in added)
    if torch.get_default_device().type != "meta":  # where `from_pretrained` builds; some parameters are elsewhere
        hooks = (getattr(each, "_hf_hook", None) for each in layer.modules()) if like.is_meta else ()  # if offloaded
        module.to(next((each.execution_device for each in hooks if hasattr(each, "execution_device")), like.device))
    if like.dtype == torch.float64:
        module.double()
    for name in module.tables:
        table = module.get_submodule(name.rpartition(".")[0])
        table.to(like.dtype if like.dtype.is_floating_point else None)
    set_initial_values(module)
    module.train(layer.training)
