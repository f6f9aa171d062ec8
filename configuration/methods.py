"""The named methods, from a name to the `ResFormerConfig` fields that it sets, and what is said of connections.

Those of one connection stand with its fields, in connection_fields.py. `ResFormerConfig.for_method` builds a
configuration from a name.
"""

import copy
import re
from collections.abc import Mapping
from typing import Any

from resformer.configuration.about import About, Method, Paper
from resformer.configuration.connection_fields import DENSEFORMER, NEUTRENO, RESFORMER, ConnectionFields
from resformer.errors import did_you_mean

#: The fields of connections -> their defaults, which are no connection. All other fields are the backbone's.
CONNECTION_FIELDS: dict[str, Any] = {
    **vars(ConnectionFields()),
    "value_residual_init": [*ConnectionFields.value_residual_init],  # as in a configuration
}


def _of_all_connections(name: str) -> dict[str, Any]:
    """What the dataclasses of fields, one for each connection, say under a name."""
    kinds = reversed(ConnectionFields.__bases__)
    return {key: value for kind in kinds for key, value in vars(kind).get(name, {}).items()}


def _every_second(num_layers: int) -> list[int]:
    """The layers in which nanochat has tables: the last, and every second before it."""
    return list(range((num_layers - 1) % 2, num_layers, 2))


_LLAMA = Paper(
    "2302.13971",
    "{LLaMA}: Open and Efficient Foundation Language Models",
    "Touvron, Hugo and others",
    2023,
)

#: The methods by name, plain Llama, those of each connection, those of several.
METHODS: dict[str, Method] = {
    "transformer": Method(
        "Transformer (plain Llama)",
        "The baseline: a Llama decoder without any cross-layer connection, bit for bit.",
        lambda n: {},
        (_LLAMA,),
    ),
    **_of_all_connections("methods"),
    "resformer-neutreno": Method(
        "ResFormer with NeuTRENO",
        "Identity-ResFormer, with NeuTRENO's term on the mixed values.",
        lambda n: {"value_residual": "identity", "neutreno_lambda": 0.2},
        (RESFORMER, NEUTRENO),
    ),
    "resformer-denseformer": Method(
        "ResFormer with DenseFormer",
        "Learned value residuals and depth-weighted averaging together.",
        lambda n: {"value_residual": "learnable", "dwa": True},
        (RESFORMER, DENSEFORMER),
    ),
    "nanochat": Method(
        "The connections of nanochat, but for its smear",
        "Each layer reads a learned sum of the residual stream and the embeddings, every second one has value "
        "embeddings, and the final norm reads the last output less a multiple of the middle one. From "
        "nanochat's code (github.com/karpathy/nanochat), as it is since March 2026; no paper describes it.",
        lambda n: {"embedding_residual": True, "value_embeddings": _every_second(n), "backout": True},
    ),
}

#: The methods to begin with -> loss from scratch minus plain Llama's, nats a token, and cost: parameters and cache of
#: SmolLM2-135M's shape, kernels of Llama-3.1-8B's. In the order of the loss within one source, the longest trainings
#: first; docs/methods.md has the sources.
FIRST: dict[str, tuple[str, str]] = {
    "mudd": (
        "-0.0710 at 304M and -0.0605 at 1.2B parameters, others'; -0.0206 [-0.0520, +0.0108], ours (n20)",
        "1,241,024 parameters, 100.0 % of the cache, +106.5% kernels in decoding",
    ),
    "mhc": (
        "-0.0396 at 304M and -0.0287 at 1.2B parameters, others'",
        "3,319,380 parameters, 100.0 % of the cache, +607.7% kernels in decoding",
    ),
    "attnres": (
        "-0.0318 at 304M parameters, others'; -0.0190 [-0.0386, +0.0007], ours (n20)",
        "34,620 parameters, 100.0 % of the cache, +70.7% kernels in decoding",
    ),
    "svformer": (
        "-0.0983 [-0.1123, -0.0842], ours (b12)",
        "-3,207,168 parameters, 51.7 % of the cache, +0.0% kernels in decoding",
    ),
    "resformer": (
        "-0.0695 [-0.1018, -0.0371], ours (b12)",
        "58 parameters, 100.0 % of the cache, +2.4% kernels in decoding",
    ),
    "denseformer": (
        "-0.0604 [-0.1006, -0.0203], ours (b12)",
        "495 parameters, 100.0 % of the cache, +7.5% kernels in decoding",
    ),
    "value-embeddings": (
        "+0.0417 [+0.0237, +0.0596], ours (n20); -0.0079 [-0.0132, -0.0026], ours (main)",
        "94,372,200 parameters, 100.0 % of the cache, +4.8% kernels in decoding",
    ),
    "cla2": (
        "+0.0158 [-0.0030, +0.0345], ours (main)",
        "-3,317,760 parameters, 50.0 % of the cache, -4.7% kernels in decoding",
    ),
}

#: Connection field -> what is said of the connection where it is set; `FIELD.VALUE` of one value alone, and
#: `connections.NAME` of a class that is no part of this package.
ABOUT: dict[str, About] = _of_all_connections("about")


def method_fields(method: str, num_hidden_layers: int) -> dict[str, Any]:
    """The configuration fields that `method` sets for a model of `num_hidden_layers` layers.

    Raises:
        ValueError: `method` is not one of `METHODS`; the message lists them. Or the number of layers is not
            a positive integer.
    """
    if not isinstance(num_hidden_layers, int) or num_hidden_layers < 1:
        raise ValueError(f"`num_hidden_layers` is {num_hidden_layers!r}: expected an integer from 1 up.")
    if not isinstance(method, str) or method not in METHODS:
        hint = did_you_mean(str(method), METHODS) or f" `{method}` is a field." * (method in [*CONNECTION_FIELDS])
        if str(method).partition(":")[0] in METHODS:  # as `resformer compare` takes them
            hint = " Fields are set apart from the method: `--set FIELD=VALUE`, in Python `FIELD=VALUE`."
        raise ValueError(f"Unknown method {method!r}: expected one of {', '.join(METHODS)}.{hint}")
    return METHODS[method](num_hidden_layers)


def fields_within_kinds(method: str, config: Any) -> dict[str, Any]:
    """`method_fields` for a text model whose layers differ: values are those of attention, shared within one kind.

    Args:
        config: of the text model, with `num_hidden_layers` and, if layers differ, `layer_types`.
    """
    layers = config.num_hidden_layers
    fields = method_fields(method, layers)
    types = getattr(config, "layer_types", None) or [""] * layers
    rope = getattr(config, "no_rope_layers", None) or [1] * layers
    kinds = [*zip(types, rope, strict=True)] if len(types) == len(rope) == layers else [("", 1)] * layers
    attending = [n for n, kind in enumerate(kinds) if re.search("(?<!linear_)attention|hybrid|^$", kind[0])]
    for name in {"value_embeddings", "value_residual_layers"} & fields.keys():
        if len(attending) > 1:  # other layers may have no values
            fields[name] = [attending[n] for n in method_fields(method, len(attending))[name]]
    for name in ("key_sources", "value_sources"):
        if name in fields and len(set(kinds)) > 1:
            sources = [*range(layers)]
            for kind in {kinds[n] for n in attending}:
                members = [n for n in attending if kinds[n] == kind]
                for n, source in zip(members, method_fields(method, len(members))[name], strict=True):
                    sources[n] = members[source]
            fields[name] = sources
    return fields


def method_of(config: Any) -> str | None:
    """The named method that `config` has the connections of; `None` if they have no name.

    Initial values of coefficients are compared only where the method sets them.
    """
    connections = connections_of(config)
    decoder = config if hasattr(config, "num_hidden_layers") else config.get_text_config()
    for name in METHODS:
        chosen = fields_within_kinds(name, decoder)
        if all(
            _compared(connections, field) == _compared(chosen, field)
            for field in CONNECTION_FIELDS
            if not field.endswith("_init") or field in chosen
        ):
            return name
    return None


def _compared(fields: Mapping[str, Any], name: str) -> Any:
    """A field's value, and of classes that are no part of this package the names."""
    value = fields.get(name, CONNECTION_FIELDS[name])
    return {*(value or ())} if name == "connections" else value


def about_of(fields: Mapping[str, Any]) -> dict[str, About]:
    """Key of `ABOUT` -> what is said, of those fields that turn a connection on."""
    names = [name for name in ABOUT if fields.get(name) not in (None, False, 0, "none")]
    modes = [mode if (mode := f"{name}.{fields[name]}") in ABOUT else name for name in names]
    own = [f"connections.{name}" for name in fields.get("connections") or ()]
    return {name: ABOUT[name] for name in (*modes, *own) if name in ABOUT}


def connections_of(config: Any) -> dict[str, Any]:
    """The connection fields of `config` that are not plain Llama's."""
    values = {name: getattr(config, name, default) for name, default in CONNECTION_FIELDS.items()}
    values["value_residual_init"] = [*values["value_residual_init"]]
    return {name: value for name, value in values.items() if value != CONNECTION_FIELDS[name]}


def without_connections(config: Any) -> Any:
    """A copy of the configuration that has no connections."""
    changed = copy.deepcopy(config)
    for name, default in CONNECTION_FIELDS.items():
        setattr(changed, name, default)
    return changed
