"""The fields of connections in the configuration of any family, a small dataclass for each connection."""

import difflib
import functools
import math
import re
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from inspect import cleandoc
from typing import Any, Literal

from huggingface_hub.dataclasses import as_validated_field
from huggingface_hub.errors import StrictDataclassError

from resformer.configuration.sources import mixing_layers, value_sources


def reason(error: BaseException) -> str:
    """What a validator of huggingface_hub's says: the field and what is wrong with it, in one line.

    Where one of several values is expected, the one that was probably meant is named.
    """
    named = re.match(
        r"(?:Class v|V)alidation error for (?:validator '\w+'|field ('\w+')):\s+\w+: (.*)", str(error), re.S
    )
    if named is None:
        return str(error)
    field = "" if named[1] is None or named[2].startswith("Field ") else f"Field {named[1]}: "
    told = " ".join(f"{field}{named[2]}".split())
    if expected := re.search(r"expected one of \((.+)\), got (.+)$", told):
        close = difflib.get_close_matches(expected[2], re.findall(r"'(\w+)'", expected[1]), n=1)
        told += "".join(f". Did you mean {each!r}?" for each in close)
    return told


def told_in_one_line(config: Any) -> Any:
    """Makes errors of a new configuration one line: `reason`."""
    begin = config.__init__

    @functools.wraps(begin)
    def init(self: Any, *given: Any, **named: Any) -> None:
        try:
            begin(self, *given, **named)
        except StrictDataclassError as error:
            error.args = (reason(error),)
            raise error.with_traceback(None) from None

    config.__init__ = init
    return config


def _field(is_allowed: Callable[[Any], bool], expected: str) -> Any:
    """Makes fields whose value, where it is not None, has to be allowed."""

    def check(value: float | None = None) -> None:
        if value is not None and not is_allowed(value):
            raise ValueError(f"Value must be {expected}, got {value}")

    return as_validated_field(check)


positive = _field(lambda value: value >= 1, "a positive integer")
several = _field(lambda value: value >= 2, "an integer from 2 up")
finite = _field(math.isfinite, "a finite number")
positive_number = _field(lambda value: 0 < value < math.inf, "a finite number above 0")
not_negative = _field(lambda value: 0 <= value < math.inf, "a finite number from 0 up")


@dataclass(kw_only=True, repr=False, eq=False)
class ValueResidualFields:
    r"""Values of a layer and of earlier ones (ResFormer, arXiv 2410.17897; Depth-Attention, arXiv 2606.05014).

    Args:
        value_residual (`str`, defaults to `"none"`):
            How the values of a mixing layer are made from its own and earlier layers': `"none"`, `"identity"`,
            `"constant"`, `"learnable"`, `"learnable_plus"`, `"dense"`, `"gated"` or `"depth_attention"`, whose
            equations are in `modeling/connections/value_residual.py` and `depth_attention.py`. `"depth_attention"`
            takes `key_sources`, but no `value_sources`.
        value_residual_init (`list[float]`, defaults to [0.5, 0.5]):
            The coefficients on V_0 and V_n: the values of `"constant"`, the start of the learned modes. `"identity"`
            and `"depth_attention"` ignore it. (0, 1) starts as plain Llama.
        value_residual_layers (`list[int]`, *optional*):
            The layers that mix, from 1 to `num_hidden_layers - 1`, ascending (Sparse-ResFormer). Default: every layer
            but 0 that has values of its own.
        depth_attention_stride (`int`, defaults to 1):
            The stride s of `"depth_attention"`: layer n mixes layers 0, s, 2s, ... below it, and itself.
        depth_attention_init (`float`, defaults to 1.0):
            The start of the gates of `"depth_attention"`. 1 is as without gates, 0 plain Llama.
    """

    value_residual: Literal[
        "none", "identity", "constant", "learnable", "learnable_plus", "dense", "gated", "depth_attention"
    ] = "none"
    value_residual_init: list[int | float] | tuple[int | float, ...] = (0.5, 0.5)
    value_residual_layers: list[int] | None = None
    depth_attention_stride: int = positive(default=1)
    depth_attention_init: int | float = finite(default=1.0)


@dataclass(kw_only=True, repr=False, eq=False)
class ValueEmbeddingFields:
    r"""A row of a table for each token, added to values (modded-nanogpt, nanochat; Bank of Values, arXiv 2606.02780).

    Args:
        value_embeddings (`list[int]`, *optional*):
            The layers that add to their values a row of a table, picked by the token and gated per key/value head (in
            Bank of Values the row is the value), ascending. A table has `vocab_size` x `num_key_value_heads` x
            `head_dim` numbers. The model then needs `input_ids`.
        value_embeddings_init (`float`, *optional*):
            The standard deviation that the tables start with; 0 starts as plain Llama. Default: `initializer_range`, as
            of every other embedding and projection.
        value_embeddings_gate_channels (`int`, defaults to 12):
            Number of channels of the layer's input that the gate reads.
        value_embeddings_gate_limit (`float`, defaults to 3.0):
            The gate's largest value.
    """

    value_embeddings: list[int] | None = None
    value_embeddings_init: int | float | None = not_negative(default=None)
    value_embeddings_gate_channels: int = positive(default=12)
    value_embeddings_gate_limit: int | float = finite(default=3.0)


@dataclass(kw_only=True, repr=False, eq=False)
class SharingFields:
    r"""Keys and values of another layer (SVFormer, arXiv 2410.17897; CLA, arXiv 2405.12981).

    A source comes no later than its reader, is its own source, and has the reader's kind of layer (`layer_types`).

    Args:
        value_sources (`list[int]`, *optional*):
            Layer n attends to the values of layer `value_sources[n]` and has no `v_proj` unless that is n itself.
            `[0] * N` is SVFormer.
        key_sources (`list[int]`, *optional*):
            The same for keys and `k_proj`. `[0, 0, 2, 2, ...]` in both is CLA2.
    """

    value_sources: list[int] | None = None
    key_sources: list[int] | None = None


@dataclass(kw_only=True, repr=False, eq=False)
class NeutrenoFields:
    r"""NeuTRENO (arXiv 2312.00751).

    Args:
        neutreno_lambda (`float`, defaults to 0.0):
            The term l (V_0 - V'_n), added to the attention output of every layer but 0 (0.4 in its language models).
            Finite and not negative.
    """

    neutreno_lambda: int | float = not_negative(default=0.0)


@dataclass(kw_only=True, repr=False, eq=False)
class DepthAverageFields:
    r"""Depth-weighted averaging of all earlier layers' outputs (DenseFormer, arXiv 2402.02622).

    Args:
        dwa (`bool`, defaults to `False`):
            Whether there are averages.
        dwa_dilation, dwa_period (`int`, default to 1):
            DenseFormer's k x p: average after every p-th block, over every k-th earlier output.
    """

    dwa: bool = False
    dwa_dilation: int = positive(default=1)
    dwa_period: int = positive(default=1)


@dataclass(kw_only=True, repr=False, eq=False)
class DeltaAttentionResidualFields:
    r"""Delta attention residuals (arXiv 2605.18855), for each head (arXiv 2607.27230), times a learned gate.

    Args:
        delta_attention_residuals (`bool`, defaults to `False`):
            Sublayers read, beside the residual stream, a softmax over what earlier blocks of layers added to it.
        delta_attention_residual_blocks (`int`, defaults to 8):
            Number of blocks, from 1 to `num_hidden_layers`.
        delta_attention_residual_init (`float`, defaults to 1.0):
            The start of the gates. 0 starts as plain Llama.
    """

    delta_attention_residuals: bool = False
    delta_attention_residual_blocks: int = positive(default=8)
    delta_attention_residual_init: int | float = finite(default=1.0)


@dataclass(kw_only=True, repr=False, eq=False)
class EmbeddingResidualFields:
    r"""The embeddings beside the stream (modded-nanogpt, nanochat).

    Args:
        embedding_residual (`bool`, defaults to `False`):
            Each layer reads r x + s X_0 in place of the residual stream x; X_0 are the embeddings, r and s are learned.
        embedding_residual_init (`float`, defaults to 0.1):
            The start of s; r starts at 1. 0 starts as plain Llama.
    """

    embedding_residual: bool = False
    embedding_residual_init: int | float = finite(default=0.1)


@dataclass(kw_only=True, repr=False, eq=False)
class BackoutFields:
    r"""A middle layer's output, taken out of what the final norm reads (nanochat).

    Args:
        backout (`bool`, defaults to `False`):
            The output of layer `num_hidden_layers // 2`, times a learned number, is taken out of what the final norm
            reads.
        backout_init (`float`, defaults to 0.2):
            The start of that number. 0 starts as plain Llama.
    """

    backout: bool = False
    backout_init: int | float = finite(default=0.2)


@dataclass(kw_only=True, repr=False, eq=False)
class HyperConnectionFields:
    r"""Several residual streams (hyper-connections, arXiv 2409.19606; mHC, arXiv 2512.24880).

    Args:
        hyper_connections (`str`, defaults to `"none"`):
            How sublayers read and write the streams: `"static"` or `"dynamic"` (2409.19606), `"mhc"` (2512.24880), or
            `"ihc"`, which is mHC with streams that are not mixed; equations in
            `modeling/connections/hyper_connections.py`.
        hyper_streams (`int`, defaults to 4):
            Number of streams, from 2 up.
    """

    hyper_connections: Literal["none", "static", "dynamic", "mhc", "ihc"] = "none"
    hyper_streams: int = several(default=4)


@dataclass(kw_only=True, repr=False, eq=False)
class OwnFields:
    r"""Connections of classes that are no part of this package.

    Args:
        connections (`dict[str, dict]`, *optional*):
            Name of a class of connections -> values of its fields. The class has to be imported before the model is
            built.
    """

    connections: dict[str, dict[str, Any]] | None = None


@dataclass(kw_only=True, repr=False, eq=False)
class ConnectionFields(  # a dataclass has the fields of its last base first
    OwnFields,
    HyperConnectionFields,
    BackoutFields,
    EmbeddingResidualFields,
    DeltaAttentionResidualFields,
    DepthAverageFields,
    NeutrenoFields,
    SharingFields,
    ValueEmbeddingFields,
    ValueResidualFields,
):
    """Connections that are added to a decoder. The defaults add none. Layers are counted from 0."""


ConnectionFields.__doc__ = f"{ConnectionFields.__doc__}\n\n    Args:\n" + "".join(
    textwrap.indent(cleandoc(each.__doc__ or "").partition("Args:\n")[2], "    ").rstrip() + "\n"
    for each in reversed(ConnectionFields.__bases__)
)


def check_connections(config: Any) -> None:
    """Refuses fields that do not fit together or the layers, and warns of those without effect."""
    depth_attention = config.value_residual == "depth_attention"
    for name in ("key_sources", "value_sources"):
        _check_sources(config, name)
    _check_layers(config, "value_residual_layers", 1)
    _check_layers(config, "value_embeddings", 0)
    init = config.value_residual_init
    if len(init) != 2 or not all(math.isfinite(value) for value in init):
        raise ValueError(f"`value_residual_init` is {init}: expected two finite numbers (on V_0, on V_n).")
    if depth_attention and value_sources(config) != list(range(config.num_hidden_layers)):
        raise ValueError(
            f"`value_residual` is 'depth_attention', which mixes the values of all layers, but `value_sources` is "
            f"{config.value_sources}. Share keys alone (`key_sources`), or choose another mode."
        )
    if config.delta_attention_residuals and config.delta_attention_residual_blocks > config.num_hidden_layers:
        raise ValueError(
            f"`delta_attention_residual_blocks` is {config.delta_attention_residual_blocks}: expected 1 to "
            f"{config.num_hidden_layers} (`num_hidden_layers`), a block has a layer at least."
        )
    _warn_of_settings_without_effect(config)


def _check_sources(config: Any, name: str) -> None:
    sources, layers = getattr(config, name), config.num_hidden_layers
    if sources is None:
        return
    if len(sources) != layers:
        raise ValueError(f"`{name}` has {len(sources)} entries, but `num_hidden_layers` is {layers}.")
    kinds = getattr(config, "layer_types", None)
    rope = getattr(config, "no_rope_layers", None) if name == "key_sources" else None
    for reader, source in enumerate(sources):
        where = f"`{name}`[{reader}] is {source}"
        if not 0 <= source <= reader:
            raise ValueError(f"{where}: a source comes no later than its reader, expected 0 to {reader}.")
        if sources[source] != source:
            raise ValueError(f"{where}, but `{name}`[{source}] is {sources[source]}: a source must be its own source.")
        if kinds is not None and kinds[source] != kinds[reader]:
            raise ValueError(
                f"{where}, but `layer_types` differ: {kinds[source]!r} in layer {source}, {kinds[reader]!r} in layer "
                f"{reader}. Share within one layer type."
            )
        if rope and rope[source] != rope[reader]:
            raise ValueError(
                f"{where}, but `no_rope_layers` differ: {rope[source]} in layer {source}, {rope[reader]} in layer "
                f"{reader}. Rotated queries need rotated keys."
            )


def _check_layers(config: Any, name: str, first: int) -> None:
    layers, sources = getattr(config, name) or [], value_sources(config)
    if layers != sorted(set(layers)) or not all(first <= layer < config.num_hidden_layers for layer in layers):
        raise ValueError(
            f"`{name}` is {layers}: expected ascending layers from {first} to {config.num_hidden_layers - 1} "
            "(`num_hidden_layers` - 1), each once."
        )
    for layer in layers:
        if sources[layer] != layer:
            raise ValueError(
                f"`{name}` holds {layer}, but `value_sources`[{layer}] is {sources[layer]}: that layer has no "
                "values of its own."
            )


def _warn_of_settings_without_effect(config: Any) -> None:
    from transformers.utils import logging  # here: `resformer methods` does without Transformers

    mode = f"`value_residual` is {config.value_residual!r}"
    depth_attention = config.value_residual == "depth_attention"
    embeddings = config.value_embeddings, f"`value_embeddings` is {config.value_embeddings}"
    period = f"`dwa_period` ({config.dwa_period}) is above `num_hidden_layers` ({config.num_hidden_layers})"
    for name, default, used, reason in (
        ("value_residual", "none", mixing_layers(config), "no layer has earlier values, and its own, to mix"),
        ("value_residual_layers", None, config.value_residual != "none", mode),
        ("depth_attention_stride", 1, depth_attention, mode),
        ("depth_attention_init", 1.0, depth_attention, mode),
        ("value_embeddings_init", None, *embeddings),
        ("value_embeddings_gate_channels", 12, *embeddings),
        ("value_embeddings_gate_limit", 3.0, *embeddings),
        ("dwa", False, config.dwa_period <= config.num_hidden_layers, period),
        ("dwa_dilation", 1, config.dwa, "`dwa` is False"),
        ("dwa_period", 1, config.dwa, "`dwa` is False"),
        (
            "delta_attention_residual_blocks",
            8,
            config.delta_attention_residuals,
            "`delta_attention_residuals` is False",
        ),
        ("hyper_streams", 4, config.hyper_connections != "none", "`hyper_connections` is 'none'"),
    ):
        if (value := getattr(config, name)) != default and not used:
            logging.get_logger(__name__).warning_once(f"`{name}`={value!r} changes nothing: {reason}.")
