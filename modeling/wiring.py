"""Which tensors cross between layers. Follows from the configuration; a layer returns only what a later one reads."""

from dataclasses import dataclass

from resformer.configuration import ResFormerConfig
from resformer.modeling.value_residual import mixed_layers

__all__ = ["LayerWiring", "wire"]


@dataclass(frozen=True)
class LayerWiring:
    """What layer n reads from earlier layers and returns for later ones."""

    key_source: int
    value_source: int
    mixes: tuple[int, ...]  # earlier layers whose raw values it mixes with its own
    takes_first_values: bool  # V_0, for NeuTRENO
    gives_raw_values: bool  # V_n, current tokens
    gives_values: bool  # V'_n, current tokens
    gives_keys_and_values: bool  # as attended to, past tokens included


def wire(config: ResFormerConfig) -> list[LayerWiring]:
    """One `LayerWiring` per layer."""
    layers = range(config.num_hidden_layers)
    key_sources, value_sources = config.all_key_sources, config.all_value_sources
    mixes = {layer: tuple(columns[:-1]) for layer, columns in mixed_layers(config).items()}
    neutreno = config.neutreno_lambda != 0
    raw_read = {layer for columns in mixes.values() for layer in columns} | ({0} if neutreno else set())
    values_read = {source for n, source in enumerate(value_sources) if source != n}
    keys_read = {source for n, source in enumerate(key_sources) if source != n}
    return [
        LayerWiring(
            key_source=key_sources[n],
            value_source=value_sources[n],
            mixes=mixes.get(n, ()),
            takes_first_values=neutreno and n > 0,
            gives_raw_values=n in raw_read,
            gives_values=neutreno and n in values_read,
            gives_keys_and_values=n in keys_read | values_read,
        )
        for n in layers
    ]
