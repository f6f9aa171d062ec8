"""What a model is: `ResFormerConfig` and the named methods."""

from resformer.configuration.configuration_resformer import ResFormerConfig
from resformer.configuration.methods import METHODS

__all__ = ["METHODS", "ResFormerConfig"]
