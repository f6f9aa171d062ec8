"""Whose keys and values each layer attends to, and which layers mix values.

Functions of plain fields, not properties: an engine that copies the fields into a class of its own can call them on it.
"""

from typing import Any


def key_sources(config: Any) -> list[int]:
    """Entry n is the layer whose keys layer n attends to: `key_sources`, by default n itself.

    Args:
        config: a `ResFormerConfig`, or any configuration with `num_hidden_layers`.
    """
    return getattr(config, "key_sources", None) or list(range(config.num_hidden_layers))


def value_sources(config: Any) -> list[int]:
    """Entry n is the layer whose values layer n attends to: `value_sources`, by default n itself."""
    return getattr(config, "value_sources", None) or list(range(config.num_hidden_layers))


def value_groups(config: Any) -> list[int | None]:
    """A number for each layer that has values of its own: layers whose values have one shape have one number."""
    groups = getattr(config, "value_groups", None)  # of another family's decoder
    return groups or [0 if source == n else None for n, source in enumerate(value_sources(config))]


def value_layers(config: Any, layer: int) -> list[int]:
    """The layers up to `layer`, ascending, that have values of their own, of the shape of this layer's.

    The first gives V_0. Empty if `layer` itself has none.
    """
    groups = value_groups(config)
    return [] if groups[layer] is None else [n for n in range(layer + 1) if groups[n] == groups[layer]]


def block_starts(layers: int, blocks: int) -> list[int]:
    """The first layer of each block of layers; sizes differ by 1 at most."""
    return [block * layers // blocks for block in range(blocks)]


def mixing_layers(config: Any) -> list[int]:
    """The layers whose values are mixed with earlier layers' (`value_residual`), ascending."""
    if config.value_residual == "none":
        return []
    if config.value_residual_layers is not None:
        return config.value_residual_layers
    groups = value_groups(config)
    return [n for n, group in enumerate(groups) if group is not None and groups.index(group) < n]
