"""`ResFormerConfig`, the named methods, and the size of their caches."""

from resformer.configuration.configuration_resformer import ResFormerConfig
from resformer.configuration.memory import cache_bytes, cache_bytes_by_method, cache_bytes_per_token
from resformer.configuration.methods import METHODS

__all__ = ["METHODS", "ResFormerConfig", "cache_bytes", "cache_bytes_by_method", "cache_bytes_per_token"]
