"""What all connections have in common: modules with added parameters, weighted sums, and what a kind says of itself."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import initialization as init

from resformer.configuration import ResFormerConfig
from resformer.configuration.methods import connections_of

#: The weights of one row: `(K,)`, or K numbers or scalars.
Row = torch.Tensor | Sequence[float | torch.Tensor]


@dataclass(frozen=True)
class ConnectionKind:
    """One kind of connection, listed in `KINDS` of `modeling_resformer.py`.

    Args:
        fields: its fields of `ResFormerConfig`.
        module: the name of the modules that hold its parameters; `None` if it has none.
        fixed_effects: configuration -> what makes it differ from plain Llama for any initial values.
        plain_start: connection fields -> the initial values with which what is learned starts as plain Llama.
        flops: configuration -> operations of a forward pass per token; a multiplication and an addition are two.
    """

    fields: Sequence[str]
    module: str | None = None
    fixed_effects: Callable[[ResFormerConfig], list[str]] = lambda config: []
    plain_start: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda fields: {}
    flops: Callable[[ResFormerConfig], int] = lambda config: 0

    def inexact_because(self, config: ResFormerConfig) -> list[str]:
        """Why a model with it does not start as plain Llama; empty if it does."""
        return self.fixed_effects(config) + [
            f"`{name}`={value} does not start as plain Llama, {plain} would"
            for name, plain in self.plain_start(vars(config)).items()
            if (value := getattr(config, name)) != plain
        ]

    def is_in(self, config: ResFormerConfig) -> bool:
        """Whether `config` sets any of its fields; an initial value alone is no connection."""
        return any(name in self.fields for name in connections_of(config) if not name.endswith("_init"))


class Connection(nn.Module):
    """A module whose parameters a connection adds to Llama's.

    Their names contain `bias`, so that the stock `Trainer` leaves them out of weight decay, which would pull a
    retrofit's ones to zero.
    """

    #: Whether it is a table with a row per token of the vocabulary. Tables have the model's dtype.
    is_table = False

    def reset_parameters(self) -> None:
        """Sets the initial values. Called by `_init_weights`: `from_pretrained` discards what `__init__` sets."""

    @torch.no_grad()
    def deviations(self) -> list[tuple[float, str]]:
        """(a weight's distance from having no effect, its place in the module), of each weight or of the largest."""
        return [(float(parameter.abs().max()), f".{name}") for name, parameter in self.named_parameters()]


def coefficient_dtype() -> torch.dtype:
    """The dtype of the coefficients: float32 whatever the model's dtype is, or float64 in a float64 model.

    bfloat16 has no number between 1 and 1 - 2^-8, so a coefficient that starts at 1 would never learn.
    """
    return torch.promote_types(torch.get_default_dtype(), torch.float32)


def weighted_sum(states: Sequence[torch.Tensor], weights: Row) -> torch.Tensor:
    """Returns sum_k weights[k] states[k], in the dtype of the states.

    A weight of exactly 0 adds nothing and a weight of exactly 1 changes nothing, for finite states; -0 becomes +0 where
    0 is added to it.

    Args:
        states: K >= 1 tensors of one shape and dtype.
        weights: of any floating dtype; tensors get gradients. A tensor `(K, ...)` holds K that broadcast to the states.
    """
    scalars: Sequence[Any] = weights.to(states[0]).unbind() if isinstance(weights, torch.Tensor) else weights
    total = states[0] * scalars[0]
    for state, weight in zip(states[1:], scalars[1:], strict=True):  # in place: autograd saves no sum
        if isinstance(weight, torch.Tensor):
            total.addcmul_(state, weight)
        else:
            total.add_(state, alpha=weight)
    return total


class MixingRows(Connection):
    """The rows of a mixing matrix that are not the identity's: row n mixes the states `columns[n]`, the newest last.

    Subclasses define where the weights come from, and their initial values in `reset_parameters`.

    Args:
        start: what the weights of the first and the newest state of a row start with.
    """

    def __init__(self, columns: dict[int, list[int]], start: tuple[float, float] = (0.0, 1.0)):
        super().__init__()
        self.columns, self.start = columns, start

    def forward(self) -> Mapping[int, Row]:
        """Row n -> its weights, in the order of `columns[n]`. Whoever mixes rounds them to the dtype of the states."""
        raise NotImplementedError

    @torch.no_grad()
    def entries(self) -> list[tuple[int, int, float]]:
        """(row, column, weight) of the matrix; a weight that depends on the token is NaN."""
        return [
            (row, column, float(weight))
            for row, weights in self().items()
            for column, weight in zip(self.columns[row], weights, strict=True)
        ]

    def deviations(self) -> list[tuple[float, str]]:
        return [
            (abs(weight - (column == self.columns[row][-1])), f"[{row}, {column}]")
            for row, column, weight in self.entries()
        ]


class FreeRows(MixingRows):
    """Rows whose weights are parameters: one flat vector `bias`, row after row."""

    def __init__(self, columns: dict[int, list[int]], start: tuple[float, float] = (0.0, 1.0)):
        super().__init__(columns, start)
        self.sizes = [len(row) for row in columns.values()]
        self.bias = nn.Parameter(torch.empty(sum(self.sizes), dtype=coefficient_dtype()))

    def forward(self) -> Mapping[int, Row]:
        # A copy: FSDP2 frees the parameter itself when this returns.
        return dict(zip(self.columns, self.bias.clone().split(self.sizes), strict=True))

    def reset_parameters(self) -> None:
        first, newest = self.start
        rows = [[first, *[0.0] * (size - 2), newest][-size:] for size in self.sizes]
        init.copy_(self.bias, torch.tensor([weight for row in rows for weight in row]))


def plain_matrix(rows: int, columns: int) -> torch.Tensor:
    """Plain Llama's mixing matrix, `(N, N)` of values or `(N, N + 1)` of depth: ones for the newest states."""
    return torch.eye(rows, columns, dtype=torch.float32).roll(columns - rows, dims=1)


def mixing_matrix(rows: int, columns: int, module: MixingRows | None) -> torch.Tensor:
    """`plain_matrix` with the rows of `module`, if there is one: float32, detached, on the CPU."""
    matrix = plain_matrix(rows, columns)
    entries = [] if module is None else module.entries()
    matrix[[row for row, _, _ in entries]] = 0.0
    for row, column, weight in entries:
        matrix[row, column] = weight
    return matrix
