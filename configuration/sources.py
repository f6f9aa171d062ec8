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


def mixing_layers(config: Any) -> list[int]:
    """The layers whose values are mixed with earlier layers' (`value_residual`), ascending."""
    if config.value_residual == "none":
        return []
    if config.value_residual_layers is not None:
        return config.value_residual_layers
    first = config.depth_attention_stride if config.value_residual == "depth_attention" else 1
    sources = value_sources(config)
    return [layer for layer in range(first, config.num_hidden_layers) if sources[layer] == layer]
