"""Weighted sums over earlier layers, for value residuals and depth-weighted averaging."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import initialization as init

from resformer.modeling.connection import Connection

#: The weights of one row: `(K,)`, or K numbers.
Row = torch.Tensor | Sequence[float]

__all__ = [
    "FreeRows",
    "MixingRows",
    "coefficient_dtype",
    "is_autocast",
    "is_ordinary",
    "mixing_matrix",
    "plain_matrix",
    "weighted_sum",
]


def weighted_sum(states: Sequence[torch.Tensor], weights: Row) -> torch.Tensor:
    """Returns sum_k weights[k] states[k], in the dtype of the states.

    A weight of exactly 0 adds nothing and a weight of exactly 1 changes nothing, bit for bit, for finite states.

    Args:
        states: K >= 1 tensors of one shape and dtype.
        weights: of any floating dtype; tensors get gradients. A tensor `(K, ...)` holds K that broadcast to the states.
    """
    scalars: Sequence[Any] = weights.to(states[0]).unbind() if isinstance(weights, torch.Tensor) else weights
    total = states[0] * scalars[0]
    for state, weight in zip(states[1:], scalars[1:], strict=True):
        if isinstance(weight, torch.Tensor):
            total = torch.addcmul(total, state, weight)
        else:
            total = torch.add(total, state, alpha=weight)
    return total


def is_ordinary(*tensors: torch.Tensor) -> bool:
    """Whether these are plain tensors with data, outside of torch.compile, torch.jit tracing and torch.func transforms.

    Compilers fuse plain operations by themselves, and tracers and transforms do not support Python autograd functions.
    """
    return not (
        torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None
        or torch._C._are_functorch_transforms_active()
        or any(type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.is_meta for tensor in tensors)
    )


def is_autocast(tensor: torch.Tensor) -> bool:
    """Whether `torch.autocast` is on for the tensor's device."""
    return not tensor.is_meta and torch.is_autocast_enabled(tensor.device.type)


def coefficient_dtype() -> torch.dtype:
    """The dtype of the coefficients: float32 whatever the model's dtype is, or float64 in a float64 model.

    bfloat16 has no number between 1 and 1 - 2^-8, so a coefficient that starts at 1 would never learn.
    """
    return torch.promote_types(torch.get_default_dtype(), torch.float32)


def plain_matrix(rows: int, columns: int) -> torch.Tensor:
    """Plain Llama's mixing matrix, `(N, N)` of values or `(N, N + 1)` of depth: ones for the newest states."""
    return torch.eye(rows, columns, dtype=torch.float32).roll(columns - rows, dims=1)


class MixingRows(Connection):
    """The rows of a mixing matrix that are not the identity's: row n mixes the states `columns[n]`, the newest last.

    `forward()` returns the weights of every row. The parameters' names contain `bias`, so that the stock `Trainer`
    leaves them out of weight decay, which would pull a retrofit's ones to zero.

    Subclasses define where the weights come from, and their initial values in `reset_parameters`.
    """

    def __init__(self, columns: dict[int, list[int]]):
        super().__init__()
        self.columns = columns

    def forward(self) -> Mapping[int, Row]:
        """Row n -> its weights, in the order of `columns[n]`. Whoever mixes rounds them to the dtype of the states."""
        raise NotImplementedError

    @torch.no_grad()
    def deviations(self) -> list[tuple[float, str]]:
        # A gate's coefficients are not among the weights.
        rows = [(row, self.columns[row][-len(weights) :], weights) for row, weights in self().items()]
        return [
            (abs(float(weight) - (column == columns[-1])), f"[{row}, {column}]")
            for row, columns, weights in rows
            for column, weight in zip(columns, weights, strict=True)
        ]

    @torch.no_grad()
    def fill(self, matrix: torch.Tensor) -> torch.Tensor:
        """Writes the rows into `matrix`, a tensor on the CPU, and returns it."""
        for row, weights in self().items():
            matrix[row] = 0.0
            for column, weight in zip(self.columns[row], weights, strict=True):
                matrix[row, column] = float(weight)
        return matrix


class FreeRows(MixingRows):
    """Rows whose weights are parameters: one flat vector `bias`, row after row."""

    def __init__(self, columns: dict[int, list[int]]):
        super().__init__(columns)
        self.sizes = [len(row) for row in columns.values()]
        self.bias = nn.Parameter(torch.empty(sum(self.sizes), dtype=coefficient_dtype()))

    def forward(self) -> Mapping[int, Row]:
        # A copy: FSDP2 frees the parameter itself when this returns.
        return dict(zip(self.columns, self.bias.clone().split(self.sizes), strict=True))

    def start_at(self, rows: list[list[float]]) -> None:
        init.copy_(self.bias, torch.tensor([weight for row in rows for weight in row]))


def mixing_matrix(rows: int, columns: int, module: MixingRows | None) -> torch.Tensor:
    """`plain_matrix` with the rows of `module`, if there is one: float32, detached, on the CPU."""
    matrix = plain_matrix(rows, columns)
    return matrix if module is None else module.fill(matrix)
