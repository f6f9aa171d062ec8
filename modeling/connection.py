"""The interface between a kind of connection, one file each, and the rest of the package."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from resformer.configuration import ResFormerConfig
from resformer.configuration.methods import connections_of

__all__ = ["Connection", "ConnectionKind", "Crossing"]

#: A tensor that crosses layers: its name in `ResFormerAttention.forward`, and the layer that makes it.
Crossing = tuple[str, int]


class Connection(nn.Module):
    """A module whose parameters a connection adds to Llama's."""

    #: Whether it is a table with a row per token of the vocabulary. Tables have the model's dtype.
    is_table = False

    def reset_parameters(self) -> None:
        """Sets the initial values. Called by `_init_weights`: `from_pretrained` discards what `__init__` sets."""

    def deviations(self) -> list[tuple[float, str]]:
        """(a weight's distance from having no effect, its place in the module), of each weight or of the largest."""
        raise NotImplementedError


@dataclass(frozen=True)
class ConnectionKind:
    """One kind of connection, listed in `KINDS`.

    Args:
        fields: its fields of `ResFormerConfig`.
        module: the name of the modules that hold its parameters; `None` if it has none.
        modules: configuration -> name in `ResFormerForCausalLM` and a new module, for each that adds parameters.
        reads: configuration and layer -> the tensors that the layer reads of earlier layers.
        losses: configuration -> why a model with it does not start as plain Llama; empty if it does.
        start: connection fields of a retrofit -> fields that make it start as plain Llama, unless it sets them itself.
        flops: configuration -> operations of a forward pass per token; a multiplication and an addition are two.
        coefficients: the name of those modules whose parameters are in float32 at least, whatever the model's dtype is;
            `None`: all.
    """

    fields: tuple[str, ...]
    module: str | None = None
    modules: Callable[[ResFormerConfig], dict[str, Connection]] = lambda config: {}
    reads: Callable[[ResFormerConfig, int], Sequence[Crossing]] = lambda config, layer: ()
    losses: Callable[[ResFormerConfig], list[str]] = lambda config: []
    start: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda fields: {}
    flops: Callable[[ResFormerConfig], int] = lambda config: 0
    coefficients: str | None = None

    def is_in(self, config: ResFormerConfig) -> bool:
        """Whether `config` sets any of its fields; an initial value alone is no connection."""
        return any(name in self.fields for name in connections_of(config) if not name.endswith("_init"))
