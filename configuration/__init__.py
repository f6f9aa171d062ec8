"""`ResFormerConfig`, the named methods, whose keys and values layers read, and the size of caches."""

from resformer.configuration.configuration_resformer import ResFormerConfig
from resformer.configuration.memory import cache_bytes, cache_bytes_by_method, cache_bytes_per_token
from resformer.configuration.methods import METHODS
from resformer.configuration.sources import key_sources, mixing_layers, value_sources

__all__ = [
    "METHODS",
    "ResFormerConfig",
    "cache_bytes",
    "cache_bytes_by_method",
    "cache_bytes_per_token",
    "key_sources",
    "mixing_layers",
    "value_sources",
]
