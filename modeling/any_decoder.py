"""Where the layers of any family's decoder are, and the places in them, found by the names of modules."""

import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightConverter

from resformer.configuration.connected_config import plain_view
from resformer.configuration.connection_fields import check_connections
from resformer.configuration.sources import key_sources, value_sources
from resformer.errors import did_you_mean
from resformer.modeling.connection import (
    KINDS,
    OF_LAYERS,
    TOKENS,
    Added,
    Connection,
    Shape,
    crossings,
    kinds_in,
    overrides,
    own_fields,
)
from resformer.modeling.versions import CACHE

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
_QUERIES_AND_KEYS = {"v_proj": ("q_proj", "k_proj"), "value": ("query", "key"), "v": ("q", "k")}
_QUERIES_AND_KEYS["value_proj"] = ("query_proj", "key_proj")
_MLPS = ("mlp", "feed_forward", "block_sparse_moe", "ffn", "moe", "feedforward", "MLP")
_ADDED_BY_ATTENTION = ("post_self_attn_layernorm", "post_self_attn_norm", "post_attn_norm")
_ADDED_BY_MLP = ("post_feedforward_layernorm", "post_mlp_layernorm", "post_mlp_norm", "post_ff_layernorm")
#: Attributes of layers and configurations with which what is added is scaled or gated after its last module.
_SCALED = (
    "residual_multiplier",
    "layer_scale",
    "resid_attn_dropout_scale",
    "layer_scalar",
    "alpha",
    "attn_residual_scale",
)
#: Layers that add something else to the stream than what a module of them returns, measured.
_ADDED_OTHERWISE = (
    "BloomBlock FalconDecoderLayer MptBlock DbrxBlock MiniCPM3DecoderLayer Block BeamDecoderLayer BeamLayer".split()
)
#: Attentions that keep more in their cache than keys and values, or whose family reads or ties their projections by
#: name, measured.
_SHARE_OTHERWISE = (
    "InklingAttention InklingTextAttention ModernBertDecoderAttention RecurrentGemmaAttention ZambaAttention "
    "Zamba2Attention"
).split()
SUBLAYER_INPUTS = ("attention_input", "mlp_input")
SUBLAYERS_ADDED = ("attention_added", "mlp_added")
_OF_THE_STREAM = {"layer_input", "layer_output", *SUBLAYER_INPUTS, *SUBLAYERS_ADDED}
PROJECTION_INPUTS = ("query_input", "key_input", "value_input")
#: Attention in a wider sense: its values are no values of a softmax. BigBird's is another module for short texts.
#: All classes of Kimi Linear and RecurrentGemma have such a name.
_OTHER_MIXERS = re.compile(
    r"(?<!Kimi)Linear|Lightning|Delta|Recurrent(?!Gemma)|Mamba|Mixer|Conv|RWKV|(?-i:SSM)|Cross|Ngram|BigBird",
    re.IGNORECASE,
)


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
    norms: tuple[str, str] | None  # what reads the stream before attention and MLP: norms, or these themselves
    queries: str  # why queries and keys before the rotary embedding are not known; empty if they are
    projections: tuple[str, str, str] = ("", "", "")  # of queries, keys and values, where they are separate
    added: tuple[str, str] | None = None  # modules that return what attention and MLP add to the stream
    shares: str = "it has no attention"  # why it cannot read another layer's keys or values; empty if it can

    def missing(self, place: str) -> str:
        """Why the layer lacks a place; empty if it has it."""
        if place in ("layer_input", "layer_output"):
            return ""
        if place in SUBLAYER_INPUTS:
            return "" if self.norms else "it lacks a norm before its attention or before its MLP"
        if place in SUBLAYERS_ADDED:
            return "" if self.added else "what its attention and MLP add to the stream is no module's output"
        if place in PROJECTION_INPUTS:
            name = self.projections[PROJECTION_INPUTS.index(place)]
            return "" if name else "its queries, keys and values are not made by projections of their own"
        if place in ("raw_queries", "raw_keys", "queries", "keys"):
            return self.queries
        if self.values is None:
            return "no projection of values is known"
        if place == "attention_output":
            return "the output projection of its attention is not known" if self.output is None else self.output_unlike
        return "" if place in ("raw_values", "mixed_values", "hidden_states") else f"no family has a place {place!r}"


class Decoder:
    """A decoder of another family: where its layers are, and what is known of them.

    Attributes:
        module: what has the layers.
        layers: the layers.
        name: of the list of layers in the model.
        places: of each layer.
    """

    def __init__(self, model: PreTrainedModel, places: list[LayerPlaces] | None = None):
        config = text_config(model.config)
        self.model_type = model.config.model_type
        self.count: int = getattr(config, "num_hidden_layers", 0)
        lists = {
            name: module
            for name, module in model.named_modules()
            if isinstance(module, nn.ModuleList)
            and len(module) == self.count
            and not re.search(r"vision|visual|audio|speech|image|codec", name)
            and all(any(True for _ in layer.children()) for layer in module)
        }
        # Layers of layers, experts for one, come later in the order of names; an encoder is a decoder if it is alone.
        self.name = min(lists, key=lambda name: "encoder." in name, default="")
        if not self.count or not lists:
            raise ValueError(
                f"model_type {self.model_type}: it has no list of `num_hidden_layers` ({self.count}) decoder layers."
            )
        self.layers = lists[self.name]
        self.module: Any = model.get_submodule(self.name.rpartition(".")[0])
        self.lanes = any(hasattr(config, each) for each in ("altup_num_inputs", "hc_mult", "hc_count"))
        self.loops = any(isinstance(n, int) and n > 1 for name, n in vars(config).items() if "loop" in name)
        windows = {kind == "sliding_attention" for kind in getattr(config, "layer_types", None) or ()}
        self.caches_differ = len(windows) > 1
        # A layer that reads another's values has no projection to be found by, once it is connected.
        self.places = places or [
            next((known for each in layer.modules() if (known := vars(each).get("known")) is not None), None)
            or layer_places(layer, config)
            for layer in self.layers
        ]

    def view(self, config: PreTrainedConfig) -> Shape:
        """What connections read of the configuration.

        Raises:
            ValueError: its fields do not fit, or the decoder cannot have what they say.
        """
        text = text_config(config)
        plain = plain_view(config, text)
        plain.num_hidden_layers = self.count
        check_connections(plain)
        check_own(plain)
        groups: dict[tuple[int, int], int] = {}
        sources = plain.value_sources or [*range(self.count)]
        numbers = [
            None
            if each.values is None or sources[n] != n
            else groups.setdefault((each.heads, each.values.head_dim), len(groups))
            for n, each in enumerate(self.places)
        ]
        first = next((each for each in self.places if each.values is not None), self.places[0])
        view = Shape(
            fields=vars(plain),
            hidden_size=text.hidden_size,
            vocab_size=text.vocab_size,
            initializer_range=getattr(text, "initializer_range", 0.02),
            rms_norm_eps=next((eps for each in _EPSILONS if (eps := getattr(text, each, None)) is not None), 1e-6),
            value_groups=tuple(numbers),
            heads=tuple(_heads(each) for each in self.places),
            places=tuple(self.places),
            **_heads(first),
        )
        if reason := why_not(self, view):
            raise ValueError(reason)
        return view

    def tp_plan(self, view: Shape, of_family: Mapping[str, str]) -> dict[str, str]:
        """How tensor parallelism splits the connections: by heads, unless the family's own plan gathers the values."""
        module = self.name.rpartition("layers")[0]
        values = [f"{self.name}.*.{each.attention}." for each in self.places if each.values is not None]
        split = (name for name, style in of_family.items() if style == "colwise" and name.startswith(tuple(values)))
        if not any(name.endswith((*_VALUES, *_FUSED, *_FUSED_BY_HEAD)) for name in split):
            return {}
        return {f"{module}{name}": style for kind in kinds_in(view) for name, style in kind.tp_plan(view).items()}


_EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon")


def _heads(places: LayerPlaces) -> dict[str, int]:
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
        if re.search(r"cross|encoder_attn|enc_dec|\.\d+\.", name) or _OTHER_MIXERS.search(type(attention).__name__):
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
        elif projection in _FUSED and getattr(attention, "multi_query", True):  # a GPT-BigCode without is by head
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
        of_values = projection
        after = next((each for each in _AFTER_VALUES if each in attention._modules), None)
        if after is not None and projection in _VALUES:
            projection, part = after, 0 if after == "v_norm" else part
        queries_unknown = ""
        if projection not in ("v_proj", *_AFTER_VALUES) or not {"q_proj", "k_proj"} <= attention._modules.keys():
            queries_unknown = "its queries, keys and values are not made by `q_proj`, `k_proj` and `v_proj`"
        elif _width(attention._modules["k_proj"]) != width:
            queries_unknown = "its keys and values have different widths"
        elif _width(attention._modules["q_proj"]) != query_heads * head_dim:
            queries_unknown = "its `q_proj` returns more than queries"
        elif getattr(config, "clip_qkv", None):
            queries_unknown = "its queries and keys are clipped after their projection"
        elif (names := inspect.unwrap(type(attention).forward).__code__.co_names) and (
            {"q_proj", "v_proj"} <= {*names} and names.index("q_proj") > names.index("v_proj")
        ):
            queries_unknown = "its values are made before its queries"
        unlike = next((reason for each, reason in _OUTPUTS_UNLIKE.items() if hasattr(attention, each)), "")
        values = ValueProjection(projection, part, start, value_width, head_dim)
        separate = _QUERIES_AND_KEYS.get(of_values, ("", ""))
        projections = (*separate, of_values) if {*separate} <= attention._modules.keys() else ("", "", "")
        return LayerPlaces(
            *(name, values, heads, query_heads, output, unlike, norms or _themselves(layer, name), queries_unknown),
            projections=projections,
            added=_added(layer, name, config),
            shares=_why_it_cannot_share(attention, config, values, queries_unknown),
        )
    return LayerPlaces("", None, 1, 1, None, "", norms, "it has no attention", added=_added(layer, "", config))


def _themselves(layer: nn.Module, attention: str) -> tuple[str, str] | None:
    """Attention and MLP, where they read the stream without a norm: OLMo 2 and its kin norm what they return."""
    names, mlp = layer._modules, next((each for each in _MLPS if each in layer._modules), None)
    normed_later = {"post_attention_layernorm", "post_feedforward_layernorm"} <= names.keys()
    return (attention, mlp) if mlp and normed_later and attention in names and "input_layernorm" not in names else None


def _added(layer: nn.Module, attention: str, config: Any) -> tuple[str, str] | None:
    """The modules whose outputs are added to the stream: norms after attention and MLP, or these themselves."""
    names = layer._modules
    scaled = any(hasattr(layer, each) for each in _SCALED) or getattr(config, "residual_multiplier", 1.0) != 1.0
    if (
        type(layer).__name__ in _ADDED_OTHERWISE
        or not attention
        or scaled
        or _OTHER_MIXERS.search(" ".join(type(each).__name__ for each in layer.children()))
    ):
        return None
    first = next((each for each in _ADDED_BY_ATTENTION if each in names), attention.partition(".")[0])
    second = next((each for each in _ADDED_BY_MLP if each in names), None)
    if second in _ADDED_BY_MLP and first not in _ADDED_BY_ATTENTION:
        first = "post_attention_layernorm" if "post_attention_layernorm" in names else first
    second = second or next((each for each in _MLPS if each in names), None)
    return None if second is None else (first, second)


def _why_it_cannot_share(attention: nn.Module, config: Any, values: ValueProjection, queries_unknown: str) -> str:
    if values.module != "v_proj" or not {"q_proj", "k_proj"} <= attention._modules.keys():
        return "its queries, keys and values are not made by `q_proj`, `k_proj` and `v_proj`"
    if "widths" in queries_unknown:
        return queries_unknown
    if type(attention).__name__ in _SHARE_OTHERWISE or getattr(attention, "indexer", None) is not None:
        return "its attention keeps or reads more than keys and values"
    on_disk = get_checkpoint_conversion_mapping(config.model_type.removeprefix("resformer_")) or ()
    if any(re.search(r"[kv]_proj", str(each.target_patterns)) for each in on_disk if isinstance(each, WeightConverter)):
        return "its projections are one tensor on disk"
    if unlike := next((reason for each, reason in _OUTPUTS_UNLIKE.items() if hasattr(attention, each)), ""):
        return f"its attention {unlike}"
    # By name: vLLM copies the configuration's class of a bundle to its processes by value.
    classes = [each for each in type(config).__mro__ if each.__name__ != "ConnectedConfig"]
    of_family = any("kv_sharing_modes" in vars(each) for each in classes)
    if of_family or getattr(config, "num_kv_shared_layers", None):
        return "its layers share keys and values by themselves"
    if config.is_encoder_decoder:
        return "its cache is of an encoder and a decoder"
    if CACHE not in inspect.signature(inspect.unwrap(type(attention).forward)).parameters:
        return f"its attention takes no `{CACHE}`"
    return ""


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


def check_own(config: Any) -> None:
    """Refuses connections of classes that are not there, and fields that they do not have."""
    others = {kind.name: kind for kind in KINDS if kind.fields_of is None}
    asked = config.connections or {}
    if not isinstance(asked, Mapping) or not all(isinstance(each or {}, Mapping) for each in asked.values()):
        raise ValueError(f"`connections` is {asked!r}: expected the names of classes, each with a dict of its fields.")
    for name, values in asked.items():
        kind = others.get(name)
        if kind is None:
            raise ValueError(
                f"`connections` has {name!r}, of which there is no class: first import the file that defines a "
                f"`resformer.Connection` with name = {name!r} (`resformer --import FILE.py COMMAND`)."
                f"{did_you_mean(name, others)}"
            )
        known = own_fields(kind)
        for field, value in (values or {}).items():
            if field not in known:
                raise ValueError(
                    f"`connections`[{name!r}] has {field!r}: {kind.__qualname__} has no such field."
                    f"{did_you_mean(field, known)}"
                )
            if isinstance(known[field], (int, float, str)) and not _is_like(value, known[field]):
                kind_of = type(known[field])
                expected = {int: "whole number", float: "number", str: "string"}.get(kind_of, kind_of.__name__)
                raise ValueError(f"`connections`[{name!r}][{field!r}] is {value!r}: expected a {expected}.")
        kind.check(kind.settings(config))


def _is_like(value: Any, default: Any) -> bool:
    if isinstance(default, bool) or isinstance(value, bool):
        return isinstance(value, bool) and isinstance(default, bool)
    return isinstance(value, (int, float) if isinstance(default, float) else type(default))


def _what_of_class(kind: type[Connection], view: Shape, n: int) -> str | None:
    """What is wrong with what a user's class acts on and reads in a layer."""
    shares = {("raw_values", "value_input"): value_sources(view), ("raw_keys", "key_input"): key_sources(view)}
    for names, sources in shares.items():
        for place in {*kind.places} & {*names} if sources[n] != n else ():
            return f"layer {n} takes from layer {sources[n]} what would be its {place}"
    for name, read in kind.reads(view, n).items():
        for each in read if isinstance(read, list) else [read]:
            if not (isinstance(each, tuple) and [*map(type, each)] == [str, int]):
                return f"its `reads` has {each!r} for {name!r} in layer {n}: expected (the name of a tensor, a layer)"
        if name in (*OF_LAYERS, "attention_norm"):
            return f"its `reads` names {name!r}, as a tensor of the layer itself is named: choose another name"
        if name not in kind.takes and not overrides(kind, "between"):
            return f"its `reads` names {name!r}, which its `forward` does not take"
    return None


def why_not(decoder: Decoder, view: Shape) -> str | None:
    """Why the decoder cannot have the connections of `view`; `None` if it can."""
    known: dict[tuple[int, str], tuple[Any, str]] = {}
    for kind in kinds_in(view):
        if reason := _why_not(kind, decoder, view):
            return f"{decoder.model_type} cannot have `{kind.name}`: {reason}.{kind.way_out}"
        for n in kind.layers(view):
            for name, read in kind.reads(view, n).items():
                earlier, other = known.setdefault((n, name), (read, kind.name))
                if earlier != read:
                    return f"`{other}` and `{kind.name}` read two tensors as {name!r} in layer {n}: rename one of them."
    return None


def _has_another_forward(module: nn.Module) -> bool:
    """Whether it is no method of its class; Accelerate keeps that beside its own."""
    forward = vars(module).get("_old_forward", vars(module).get("forward"))
    return forward is not None and getattr(forward, "__func__", None) is not type(module).forward


def _why_not(kind: type[Connection], decoder: Decoder, view: Shape) -> str | None:
    layers, places = decoder.layers, decoder.places
    for n in kind.layers(view):
        if not 0 <= n < len(layers):
            return f"it has {len(layers)} layers, and none is layer {n}"
        if kind.fields_of is None and (reason := _what_of_class(kind, view, n)):
            return reason
        for name, maker in crossings(kind.reads(view, n)):
            if (name, maker) != TOKENS and not 0 <= maker < n:
                return f"layer {n} would read the {name} of layer {maker}, which is none before it"
    for own in (getattr(each, kind.name, None) for each in (*layers, decoder.module)):
        if not isinstance(own, (Added, type(None))):
            return f"its modules have an attribute {kind.name!r} of their own: choose another name"
    if getattr(decoder.module, "layerdrop", 0):
        return "in training it drops layers, which others read: load it with `layerdrop=0`"
    if decoder.loops:
        return "its layers run several times in a pass"
    with_values = [each for each in places if each.values is not None]
    if any("Cross" in type(layer).__name__ for layer in layers):
        return "its layers of cross-attention are left out where there are no images"
    needs = kind.needs(view)
    parts = [*layers]
    if needs - _OF_THE_STREAM:
        parts += [
            layer.get_submodule(each.attention) for layer, each in zip(layers, places, strict=True) if each.attention
        ]
    if repeated := next((type(each).__name__ for n, each in enumerate(parts) if each in parts[:n]), ""):
        return f"a {repeated} is in two layers, and connections are of one place"
    if replaced := next((type(each).__name__ for each in parts if _has_another_forward(each)), ""):
        return f"the `forward` of a {replaced} was replaced, past which connections do not reach"
    if needs & {"raw_values", "mixed_values", "attention_output"}:
        if not with_values:
            return f"no projection of values is known in {type(layers[0]).__name__}"
        groups = [each for each in view.value_groups if each is not None]
        if not kind.layers(view) and len(groups) == len({*groups}) > 1:
            return "no two layers have values of one shape"
    reads_tokens = not {"hidden_states", "input_ids", "queries"}.isdisjoint(kind.takes)
    if any(each.values.module == "kv_b_proj" for each in with_values if each.values):
        if reads_tokens or "attention_output" in kind.places:
            return "its cache holds latents, of which past tokens' values are made again, but not what they read"
        if any("values" in place for place in kind.places) and decoder.caches_differ:
            return "its cache holds latents of all tokens in some layers, and of a window in others"
    if needs & _OF_THE_STREAM and decoder.lanes:
        return "its residual stream has several lanes"
    if needs & {*SUBLAYER_INPUTS}:
        without = next((n for n, each in enumerate(places) if each.norms is None), None)
        if without is not None:
            return f"layer {without} lacks a norm before its attention or before its MLP"
    for n in kind.layers(view):
        if "shared_keys" in needs:
            sources = {key_sources(view)[n], value_sources(view)[n], n}
            if reason := next((places[each].shares for each in sources if places[each].shares), ""):
                return f"in layer {n} {reason}"
            if any(view.heads[each] != view.heads[n] for each in sources):
                return f"layer {n} and its sources have other numbers of heads"
        for place in sorted(needs - {"shared_keys", *SUBLAYER_INPUTS}):
            if reason := places[n].missing(place):
                return f"in layer {n} {reason}"
    return None
