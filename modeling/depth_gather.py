r"""Depth-weighted averaging with a fast backward pass: the same averaging, with the matrix transposed.

    Y_i = sum_{j <= i} A[i, j] X_j        dX_j = sum_{i >= j} A[i, j] dY_i        dA[i, j] = <dY_i, X_j>

Plain autograd would write one gradient of X_j for every average that reads it, and then add them up. Here one autograd
node stands for state j, X_j in and Y_j out. Its backward runs after those of all i > j, so every dY_i is known: one sum
gives dX_j, and the dot products give column j of dA. Only X_j is saved for this, once.

Where every average reads every state, states are taken in groups. For 8 states in groups of 4, A is worked out as

          X_0 X_1 X_2 X_3   X_4 X_5 X_6 X_7
    Y_0    +                                      +  one term of a sum, added when Y_i is made
    Y_1    +   +
    Y_2    +   +   +                              #  one matrix product for the whole block, done when X_4 comes:
    Y_3    +   +   +   +                             each of X_0 .. X_3 is read once for four averages
    Y_4    #   #   #   #     +
    Y_5    #   #   #   #     +   +
    Y_6    #   #   #   #     +   +   +
    Y_7    #   #   #   #     +   +   +   +

The backward pass goes through the same blocks from the last state to the first, with A transposed.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

__all__ = ["Gather"]


class Gather:
    """The averages of one forward pass.

    Args:
        matrix: A, `(N + 1, N + 1)`, lower triangular, in the coefficients' dtype; row i makes Y_i.
        reads: i -> the states that Y_i is made of, ascending, i last; Y_i = X_i for every other i.
        states: X_j by j, all alike in shape, dtype and device. The caller puts X_j there before `append(j, X_j)` and
            takes out what no later average reads.
        group: how many states go together; 0 for none, as it must be unless every average reads every state.
        like: any state.
    """

    def __init__(
        self,
        matrix: torch.Tensor,
        reads: Mapping[int, Sequence[int]],
        states: Mapping[int, torch.Tensor],
        group: int,
        like: torch.Tensor,
    ):
        self.transposed = Transposed(matrix, reads, group, like)
        self.weights = self.transposed.weights.detach()
        self.reads = reads
        self.read = {state for row in reads.values() for state in row}
        self.states = states
        self.group = group
        self.stacks: list[torch.Tensor] = []  # X_j of each earlier group, `(group, numbers)`
        self.begun: torch.Tensor | None = None  # the # blocks of this group's averages, summed
        #: An output of each node and an input of the next: autograd then runs them in reverse order in any case.
        self.chain = matrix

    def append(self, number: int, state: torch.Tensor) -> torch.Tensor:
        """Returns Y_number."""
        if number not in self.read:
            return state
        if not (torch.is_grad_enabled() and (state.requires_grad or self.chain.requires_grad)):
            return self.average(number)
        output, self.chain = GatherNode.apply(state, self.chain, self, number)
        return output

    @torch.no_grad()
    def average(self, i: int) -> torch.Tensor:
        """Returns Y_i: a new tensor, or X_i itself."""
        state = self.states[i]
        if i not in self.reads:
            return state
        first = first_of_group(i, self.group)
        if i == first > 0:
            self.stacks.append(_rows(self.states[j] for j in range(i - self.group, i)))
            members = self.weights[i : i + self.group, :i].split(self.group, dim=1)
            self.begun = _matrix_sum(zip(members, self.stacks, strict=True))
            if i + self.group >= len(self.weights):  # the last group
                self.stacks.clear()
        weights = self.weights[i].unbind()
        begun = None if self.begun is None else self.begun[i - first].view_as(state)
        if i == len(self.weights) - 1:
            self.begun = None
        return _sum(begun, [(weights[j], self.states[j]) for j in self.reads[i] if j >= first])


class GatherNode(torch.autograd.Function):
    """State j: X_j in, Y_j out, and the chain through both."""

    @staticmethod
    def forward(
        ctx: Any, state: torch.Tensor, chain: torch.Tensor, gather: Gather, number: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)
        # Not the gather itself: it holds the chain, which holds this node, and such a cycle is never freed.
        ctx.transposed, ctx.number = gather.transposed, number
        if ctx.transposed.lowest is None:
            ctx.transposed.lowest = number
        if ctx.transposed.learns:
            ctx.save_for_backward(state)
        output = gather.average(number)
        return (output.view_as(output) if output is state else output), chain.view_as(chain)

    @staticmethod
    def backward(
        ctx: Any, grad_output: torch.Tensor | None, grad_chain: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, torch.Tensor, None, None]:
        if grad_chain is None:  # the first node of this backward pass
            grad_chain = ctx.transposed.restart()
        state = ctx.saved_tensors[0] if ctx.transposed.learns else None
        grad_state = ctx.transposed.step(ctx.number, state, grad_output, grad_chain)
        return grad_state, grad_chain, None, None


class Transposed:
    """The backward passes of a `Gather`, one at a time, each from the last state to the first.

    With `create_graph=True` autograd records every operation, so that the gradients have gradients.
    """

    def __init__(self, matrix: torch.Tensor, reads: Mapping[int, Sequence[int]], group: int, like: torch.Tensor):
        self.weights = matrix.to(like.dtype)
        self.learns = matrix.requires_grad
        self.reads = reads
        self.group = group
        self.shape = like.shape
        self.matrix = matrix.detach()
        self.lowest: int | None = None  # the first state that has a node: the last step of a backward pass
        self.clear()

    def clear(self) -> None:
        self.open: dict[int, torch.Tensor] = {}  # dY_i of the averages of this group
        self.closed: list[tuple[slice, torch.Tensor]] = []  # of each later group: its i, and dY_i row by row
        self.begun: torch.Tensor | None = None  # the # blocks of this group's dX_j, summed
        self.seen: list[torch.Tensor | None] = []  # X_j of this group so far, ascending

    def restart(self) -> torch.Tensor:
        """Starts a backward pass, the last of which may have stopped early, and returns dA, all 0."""
        self.clear()
        return torch.zeros_like(self.matrix)

    def step(
        self, j: int, state: torch.Tensor | None, grad_output: torch.Tensor | None, grad_matrix: torch.Tensor
    ) -> torch.Tensor | None:
        """Returns dX_j, and writes column j of dA; with groups, all columns of a group at its first state.

        Args:
            j: less than in the step before.
            state: X_j; `None` if the weights do not learn.
            grad_output: dY_j; `None` if nothing depends on Y_j.
            grad_matrix: dA so far.
        """
        first = first_of_group(j, self.group)
        if self.closed and self.begun is None:
            members = slice(first, first + self.group)
            self.begun = _matrix_sum((self.weights[rows, members].t(), grads) for rows, grads in self.closed)
        begun = None if self.begun is None else self.begun[j - first].view(self.shape)
        if grad_output is not None and j in self.reads:
            self.open[j] = grad_output
        elif grad_output is not None:
            begun = grad_output if begun is None else begun + grad_output

        readers = [i for i in self.open if j in self.reads[i]]
        weights = self.weights[:, j].unbind()
        grad_state = _sum(begun, [(weights[i], self.open[i]) for i in readers])
        if self.group:
            self.seen.insert(0, state)
            if j == first:
                self.close(j, grad_matrix)
        elif self.learns:
            for i in readers:
                grad_matrix[i, j] = _dot(self.open[i], state)
        if j == self.lowest:
            self.clear()
        return grad_state

    def close(self, first: int, grad_matrix: torch.Tensor) -> None:
        """Ends the group of the states from `first` on: writes their columns of dA and clears what only they needed."""
        if self.open:
            rows = range(min(self.open), max(self.open) + 1)
            known = self.open[rows.start]
            grads = _rows(self.open[i] if i in self.open else torch.zeros_like(known) for i in rows)
            self.closed.append((slice(rows.start, rows.stop), grads))
        if self.learns:
            states = _rows(self.seen)
            for members, grads in self.closed:
                # In the diagonal block the part above the diagonal has no meaning, and nothing reads it.
                grad_matrix[members, first : first + len(self.seen)] = _dots(grads, states)
        self.open, self.begun, self.seen = {}, None, []


def first_of_group(number: int, group: int) -> int:
    """Returns the first state of the group that state `number` is in; 0 without groups."""
    return number - number % group if group else 0


def _rows(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Returns `(K, numbers)` of K tensors."""
    return torch.stack(list(tensors)).flatten(1)


def _matrix_sum(products: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """Returns the sum of the matrix products `(R, K) @ (K, numbers)`."""
    total = None
    for weights, rows in products:  # in place: autocast does not round in-place operations
        if total is None:
            total = rows.new_empty(len(weights), rows.shape[1]).addmm_(weights, rows, beta=0)
        else:
            total.addmm_(weights, rows)
    return total


def _sum(begun: torch.Tensor | None, terms: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor | None:
    """Returns begun + sum_k w_k x_k for the terms (w_k, x_k), without writing to `begun`; `None` if both are empty."""
    total, is_new = begun, False
    for weight, state in terms:
        if total is None:
            total = state * weight
        elif is_new:
            total.addcmul_(state, weight)
        else:
            total = torch.addcmul(total, state, weight)
        is_new = True
    return total


def _dots(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Returns `(R, K)`, the product of a, `(R, numbers)`, and the transpose of b, `(K, numbers)`."""
    if a.dtype not in (torch.float32, torch.float64) or a.shape[1] % 16:
        return a @ b.t()
    # A sum this long is a third faster in 16 parts, and no less exact.
    a, b = (rows.unflatten(1, (16, -1)).transpose(0, 1) for rows in (a, b))
    return torch.bmm(a, b.transpose(1, 2)).sum(dim=0)


def _dot(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Returns <a, b>, a scalar; float32 for lower precisions, where `torch.dot` is slow on CPUs and inexact."""
    if a.dtype in (torch.float32, torch.float64):
        return torch.dot(a.reshape(-1), b.reshape(-1))
    return (a * b).sum(dtype=torch.float32)
