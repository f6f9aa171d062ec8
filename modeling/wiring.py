"""All kinds of connections, the parameters that they add, and which tensors cross between layers because of them."""

from dataclasses import dataclass

from resformer.configuration import ResFormerConfig
from resformer.modeling.attention_residuals import ATTENTION_RESIDUALS
from resformer.modeling.connection import Connection, Crossing
from resformer.modeling.depth_average import DEPTH_AVERAGE
from resformer.modeling.neutreno import NEUTRENO
from resformer.modeling.sharing import SHARING
from resformer.modeling.value_embedding import VALUE_EMBEDDING
from resformer.modeling.value_residual import VALUE_RESIDUAL

__all__ = ["KINDS", "LayerWiring", "connection_modules", "wire"]

KINDS = (SHARING, NEUTRENO, VALUE_EMBEDDING, VALUE_RESIDUAL, DEPTH_AVERAGE, ATTENTION_RESIDUALS)


def connection_modules(config: ResFormerConfig) -> dict[str, Connection]:
    """Name in `ResFormerForCausalLM` -> a new module, for each that holds added parameters."""
    return {name: module for kind in KINDS for name, module in kind.modules(config).items()}


@dataclass(frozen=True)
class LayerWiring:
    """The tensors that one layer takes as arguments, and the names of those that it returns for later layers."""

    reads: tuple[Crossing, ...]
    gives: tuple[str, ...]


def wire(config: ResFormerConfig) -> list[LayerWiring]:
    """One `LayerWiring` per layer; a layer returns only what a later one reads."""
    layers = range(config.num_hidden_layers)
    reads = [tuple(dict.fromkeys(read for kind in KINDS for read in kind.reads(config, n))) for n in layers]
    return [
        LayerWiring(
            reads[n],
            tuple(dict.fromkeys(name for later in reads[n + 1 :] for name, layer in later if layer == n)),
        )
        for n in layers
    ]
