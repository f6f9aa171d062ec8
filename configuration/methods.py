"""The named methods: one line each, from a method's name to the `ResFormerConfig` fields it sets.

Equations, values and published results of each are in the model cards; `ResFormerConfig.for_method` builds a
configuration from a name. A new method is one more line here.
"""

import copy
from collections.abc import Callable
from typing import Any

from resformer.configuration.connection_fields import ConnectionFields
from resformer.errors import did_you_mean

#: The fields of connections -> their defaults, which are no connection. All other fields are the backbone's.
CONNECTION_FIELDS: dict[str, Any] = {
    **vars(ConnectionFields()),
    "value_residual_init": [*ConnectionFields.value_residual_init],  # as in a configuration
}


def _last_third(num_layers: int) -> list[int]:
    """The layers that Sparse-ResFormer mixes: the last three of eight, generalised to the last third, never layer 0.

    Bank of Values has its tables in the last third too.
    """
    return list(range(max(1, num_layers - -(-num_layers // 3)), num_layers))


def _every_second(num_layers: int) -> list[int]:
    """The layers in which nanochat has tables: the last, and every second before it."""
    return list(range((num_layers - 1) % 2, num_layers, 2))


def _pairs(num_layers: int) -> list[int]:
    """CLA2: layers 2i and 2i + 1 use the keys or values of layer 2i."""
    return [layer - layer % 2 for layer in range(num_layers)]


def _second_half(num_layers: int, source: int) -> list[int]:
    """FusedKV-Lite: layers from N // 2 on use the keys or values of layer `source`."""
    half = max(1, num_layers // 2)
    return [*range(half), *[min(source, half - 1)] * (num_layers - half)]


#: Method name -> the configuration fields it sets for a given number of layers.
METHODS: dict[str, Callable[[int], dict[str, Any]]] = {
    "transformer": lambda n: {},
    "resformer": lambda n: {"value_residual": "learnable"},
    "resformer-identity": lambda n: {"value_residual": "identity"},
    "resformer-constant": lambda n: {"value_residual": "constant", "value_residual_init": [2.0, 1.0]},
    "resformer-plus": lambda n: {"value_residual": "learnable_plus"},
    "resformer-sparse": lambda n: {
        "value_residual": "constant",
        "value_residual_init": [5.0, 1.0],
        "value_residual_layers": _last_third(n),
    },
    "resformer-dense": lambda n: {"value_residual": "dense"},
    "resformer-gated": lambda n: {"value_residual": "gated"},
    "depth-attention": lambda n: {"value_residual": "depth_attention", "depth_attention_stride": max(1, n // 2)},
    "value-embeddings": lambda n: {"value_embeddings": _last_third(n)},
    "neutreno": lambda n: {"neutreno_lambda": 0.4},
    "resformer-neutreno": lambda n: {"value_residual": "identity", "neutreno_lambda": 0.2},
    "svformer": lambda n: {"value_sources": [0] * n},
    "denseformer": lambda n: {"dwa": True},
    "denseformer-4x5": lambda n: {"dwa": True, "dwa_dilation": 4, "dwa_period": 5},
    "cla2": lambda n: {"key_sources": _pairs(n), "value_sources": _pairs(n)},
    "fusedkv-lite": lambda n: {
        "key_sources": _second_half(n, max(1, n // 2) - 1),
        "value_sources": _second_half(n, 0),
    },
    "resformer-denseformer": lambda n: {"value_residual": "learnable", "dwa": True},
    "delta-attention-residuals": lambda n: {
        "delta_attention_residuals": True,
        "delta_attention_residual_blocks": min(8, n),
    },
    "hyper-connections": lambda n: {"hyper_connections": "dynamic"},
    "mhc": lambda n: {"hyper_connections": "mhc"},
    "nanochat": lambda n: {"embedding_residual": True, "value_embeddings": _every_second(n), "backout": True},
}


def method_fields(method: str, num_hidden_layers: int) -> dict[str, Any]:
    """The configuration fields that `method` sets for a model of `num_hidden_layers` layers.

    Raises:
        ValueError: `method` is not one of `METHODS`; the message lists them. Or the number of layers is not
            a positive integer.
    """
    if not isinstance(num_hidden_layers, int) or num_hidden_layers < 1:
        raise ValueError(f"`num_hidden_layers` is {num_hidden_layers!r}: expected an integer from 1 up.")
    if method not in METHODS:
        raise ValueError(
            f"Unknown method {method!r}: expected one of {', '.join(METHODS)}.{did_you_mean(method, METHODS)}"
        )
    return METHODS[method](num_hidden_layers)


def fields_within_kinds(method: str, config: Any) -> dict[str, Any]:
    """`method_fields` for a text model of several kinds of layers: sharing stays within each kind of attention.

    Args:
        config: of the text model, with `num_hidden_layers` and, if layers differ, `layer_types`.
    """
    layers = config.num_hidden_layers
    fields = method_fields(method, layers)
    types = getattr(config, "layer_types", None) or [""] * layers
    rope = getattr(config, "no_rope_layers", None) or [1] * layers
    kinds = [*zip(types, rope, strict=True)] if len(types) == len(rope) == layers else [("", 1)] * layers
    for name in ("key_sources", "value_sources"):
        if name in fields and len(set(kinds)) > 1:
            sources = [*range(layers)]
            for kind in set(kinds):
                members = [
                    n for n, each in enumerate(kinds) if each == kind and ("attention" in kind[0] or not kind[0])
                ]
                for n, source in zip(members, method_fields(method, len(members) or 1)[name], strict=False):
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
            connections.get(field, CONNECTION_FIELDS[field]) == chosen.get(field, CONNECTION_FIELDS[field])
            for field in CONNECTION_FIELDS
            if not field.endswith("_init") or field in chosen
        ):
            return name
    return None


def connections_of(config: Any) -> dict[str, Any]:
    """The connection fields of `config` that are not plain Llama's."""
    values = {name: getattr(config, name, default) for name, default in CONNECTION_FIELDS.items()}
    return {name: value for name, value in values.items() if value != CONNECTION_FIELDS[name]}


def without_connections(config: Any, **fields: Any) -> Any:
    """The same configuration, with `fields` in the place of its connections."""
    changed = copy.deepcopy(config)
    for name, default in CONNECTION_FIELDS.items():
        setattr(changed, name, fields.get(name, default))
    return changed
