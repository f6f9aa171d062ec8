"""`ResFormerConfig`, the named methods, whose keys and values layers read, and the size of caches."""

from typing import TYPE_CHECKING

from resformer.lazy import on_demand

if TYPE_CHECKING:
    from resformer.configuration.about import *  # noqa: F403
    from resformer.configuration.configuration_resformer import *  # noqa: F403
    from resformer.configuration.memory import *  # noqa: F403
    from resformer.configuration.methods import *  # noqa: F403
    from resformer.configuration.sources import *  # noqa: F403

__all__, __getattr__, __dir__ = on_demand(
    globals(),
    {
        "resformer.configuration.about": "Paper",
        "resformer.configuration.configuration_resformer": "ResFormerConfig",
        "resformer.configuration.memory": "cache_bytes cache_bytes_by_method cache_bytes_per_token",
        "resformer.configuration.methods": "METHODS",
        "resformer.configuration.sources": "key_sources mixing_layers value_layers value_sources",
    },
)
