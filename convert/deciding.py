"""The desired result of a conversion. `retrofit`, `revert` and `bundle` differ in how they decide on it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from resformer.convert.connections import added_shapes
from resformer.convert.reading import SideFile
from resformer.convert.source import OpenedSource
from resformer.errors import CheckpointError, quoted
from resformer.modeling.connection import Connection
from resformer.modeling.connections import KINDS


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The result, as it follows from the source and what the user asked for. Nothing is planned or written yet."""

    source: OpenedSource
    config: str  # the text of its config.json
    dtype: torch.dtype  # in which Transformers loads it by default
    dropped: Mapping[str, str] = field(
        default_factory=dict
    )  # name in the source's files -> in its model: it lacks them
    unused: bool = False  # whether they may stay in linked files, as config.json then says
    added: Mapping[str, torch.Tensor] = field(default_factory=dict)  # by their names in a checkpoint
    added_names: frozenset[str] = frozenset()  # in its model
    side_files: tuple[SideFile, ...] = ()  # beside those that the source's checkpoint has
    inexact_because: tuple[str, ...] = ()  # why it does not compute what the source does; empty if it does
    warnings: tuple[str, ...] = ()

    @property
    def memory(self) -> int:
        """Bytes that comparing the logits takes: the larger model, and room for a forward pass."""
        added = sum(tensor.nbytes for tensor in self.added.values())
        return int(1.2 * (self.source.built.memory + added)) + 2**29


def added_kinds(config: Any, before: Any) -> list[type[Connection]]:
    """The kinds of connections that a model of `config` has beyond one of `before`, its source."""
    added = []
    for kind in KINDS:
        for name in kind.fields:
            old, new = getattr(before, name, None), getattr(config, name, None)
            if old != new and kind.is_in(before):
                raise CheckpointError(
                    f"`{name}` is {quoted(old)} in the source and {quoted(new)} in the result: connections are added, "
                    "those of the source stay as they are. Name the fields to add, --method transformer --set dwa=true "
                    "for one."
                )
        if kind.is_in(config) and not kind.is_in(before):
            added.append(kind)
    shapes = added_shapes(config)
    for name, shape in added_shapes(before).items():
        if shapes.get(name) != shape:
            raise CheckpointError(
                f"{name} of the source has shape {list(shape)}, and the result has no place for it: the connections "
                "that are added leave other layers to mix. Convert the original instead."
            )
    return added
