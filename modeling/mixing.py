"""What value residuals and depth-weighted averaging share: weighted sums over earlier layers."""

import itertools
from collections.abc import Mapping, Sequence

import torch
from torch import nn
from transformers import initialization as init

__all__ = ["FreeRows", "MixingRows", "is_ordinary", "own_dtype", "split_rows", "weighted_sum"]


def weighted_sum(states: Sequence[torch.Tensor], weights: torch.Tensor | Sequence[float]) -> torch.Tensor:
    """Returns sum_k weights[k] states[k], in the dtype of the states.

    A weight of exactly 0 adds nothing and a weight of exactly 1 changes nothing, bit for bit, for finite states.

    Args:
        states: K >= 1 tensors of one shape and dtype.
        weights: `(K,)` tensor of any floating dtype, which gets gradients, or K numbers.
    """
    if isinstance(weights, torch.Tensor):
        first, *others = weights.to(states[0]).unbind()
        total = states[0] * first
        for state, weight in zip(states[1:], others, strict=True):
            total = torch.addcmul(total, state, weight)
        return total
    total = states[0] * weights[0]
    for state, number in zip(states[1:], weights[1:], strict=True):
        total = torch.add(total, state, alpha=number)
    return total


def split_rows(
    flat: torch.Tensor, sizes: Sequence[int], dtype: torch.dtype | None
) -> Sequence[torch.Tensor | list[float]]:
    """Splits a vector of weights into rows of these sizes, rounded to `dtype` if it is given.

    Where nothing can tell the difference the rows are lists of numbers, which cost a decoding step less than tensors.
    """
    if dtype is None or torch.is_autocast_enabled(flat.device.type):
        return flat.split(sizes)
    flat = flat.to(dtype)
    if torch.is_grad_enabled() or flat.device.type != "cpu" or not is_ordinary(flat):
        return flat.split(sizes)
    numbers = iter(flat.tolist())
    return [list(itertools.islice(numbers, size)) for size in sizes]


def is_ordinary(*tensors: torch.Tensor) -> bool:
    """Whether these are plain tensors outside of compilers, tracers and function transforms.

    What is inside one fuses plain operations itself, and may take neither numbers read out of tensors nor autograd
    functions written in Python.
    """
    return not (
        torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None
        or torch._C._are_functorch_transforms_active()
        or any(type(tensor) not in (torch.Tensor, nn.Parameter) for tensor in tensors)
    )


def own_dtype() -> torch.dtype:
    """What the coefficients are held in, whatever the model's dtype: float32, or float64 in a float64 model.

    bfloat16 has no number between 1 and 1 - 2^-8, so a coefficient that starts at 1 would never learn.
    """
    return torch.promote_types(torch.get_default_dtype(), torch.float32)


class MixingRows(nn.Module):
    """The rows of a mixing matrix that are not the identity's: row n mixes the states `columns[n]`.

    `forward()` returns the weights of every row. The parameters' names hold `bias`, which the stock Trainer exempts
    from weight decay: decay would pull a retrofit's ones to zero. They are how far each row leans towards each state.

    Subclasses say where the weights come from and set their start in `reset_parameters`.
    """

    def __init__(self, columns: dict[int, list[int]]):
        super().__init__()
        self.columns = columns

    def forward(self, dtype: torch.dtype | None = None) -> Mapping[int, torch.Tensor | Sequence[float]]:
        """Row n -> its weights, in the order of `columns[n]`: a `(len(columns[n]),)` tensor or numbers.

        Args:
            dtype: of the states to be mixed, to which the weights are rounded; `None` leaves them as they are.
        """
        raise NotImplementedError

    def reset_parameters(self) -> None:
        """Sets the start. Called by `_init_weights`: `from_pretrained` discards what `__init__` sets."""

    @torch.no_grad()
    def fill(self, matrix: torch.Tensor) -> torch.Tensor:
        """Writes the rows into `matrix`, on the CPU, and returns it."""
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
        self.bias = nn.Parameter(torch.empty(sum(self.sizes), dtype=own_dtype()))

    def forward(self, dtype: torch.dtype | None = None) -> dict[int, torch.Tensor | list[float]]:
        # A copy: FSDP2 frees the parameter itself when this returns.
        return dict(zip(self.columns, split_rows(self.bias.clone(), self.sizes, dtype), strict=True))

    def start_at(self, rows: list[list[float]]) -> None:
        init.copy_(self.bias, torch.tensor([weight for row in rows for weight in row]))
