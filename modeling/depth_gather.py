r"""The backward pass of depth-weighted averaging is depth-weighted averaging transposed, and is done that way here.

    Y_i = sum_{j <= i} A[i, j] X_j        dX_j = sum_{i >= j} A[i, j] dY_i        dA[i, j] = <dY_i, X_j>

Left to autograd, X_j gets one gradient from every average that reads it, each written to memory and then added up. Here
one node stands for state j: it takes X_j and gives Y_j. Going backwards it runs after every node i > j, finds all the
dY_i at hand, gathers them in one sweep and takes its column of dA in the same sweep. Only X_j is kept for that, once.

Where every average reads every state, the states go in groups: what one group's averages take from an earlier group is
one matrix product, which reads each state once for all of them.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

__all__ = ["Gather"]


class Gather:
    """The averages of one forward pass, and their gradients in any number of backward passes.

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
        self.shape = like.shape
        self.weights = matrix.to(like.dtype)
        self.learns = matrix.requires_grad
        self.reads = reads
        self.read = {state for row in reads.values() for state in row}
        self.states = states
        self.group = group
        self.begun: torch.Tensor | None = None  # what this group's averages take from the earlier groups
        #: Passed from node to node, so that autograd knows their order whatever the blocks between them do.
        self.chain = matrix
        self.lowest: int | None = None  # the first state that has a node
        self.backward = _Backward(self)

    def append(self, number: int, state: torch.Tensor) -> torch.Tensor:
        """Returns Y_number."""
        if number not in self.read:
            return state
        if not (torch.is_grad_enabled() and (state.requires_grad or self.chain.requires_grad)):
            return self.average(number)
        if self.lowest is None:
            self.lowest = number
        output, self.chain = _Node.apply(state, self.chain, self, number)
        return output

    @torch.no_grad()
    def average(self, i: int) -> torch.Tensor:
        """Returns Y_i: a new tensor, or X_i itself."""
        state = self.states[i]
        if i not in self.reads:
            return state
        first = self.first_of_group(i)
        if i == first > 0:
            rows = slice(i, i + self.group)
            earlier = [slice(at, at + self.group) for at in range(0, first, self.group)]
            self.begun = _matrix_sum(
                (self.weights[rows, columns], _rows(self.states[j] for j in range(columns.start, columns.stop)))
                for columns in earlier
            )
        weights = self.weights[i].unbind()
        begun = None if self.begun is None else self.begun[i - first].view_as(state)
        return _sum(begun, [(weights[j], self.states[j]) for j in self.reads[i] if j >= first])

    def first_of_group(self, number: int) -> int:
        return number - number % self.group if self.group else 0


class _Node(torch.autograd.Function):
    """State j: X_j in, Y_j out."""

    @staticmethod
    def forward(
        ctx: Any, state: torch.Tensor, chain: torch.Tensor, gather: Gather, number: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)
        ctx.gather, ctx.number = gather, number
        if gather.learns:
            ctx.save_for_backward(state)
        output = gather.average(number)
        return (output.view_as(output) if output is state else output), chain.view_as(chain)

    @staticmethod
    def backward(
        ctx: Any, grad_output: torch.Tensor | None, grad_chain: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, torch.Tensor, None, None]:
        state = ctx.saved_tensors[0] if ctx.gather.learns else None
        backward = ctx.gather.backward
        if grad_chain is None:  # no later node in this pass
            grad_chain = backward.restart()
        grad_state = backward.step(ctx.number, state, grad_output, grad_chain)
        return grad_state, grad_chain, None, None


class _Backward:
    """One backward pass at a time: nodes from the last to the first.

    With `create_graph=True` every operation is recorded, the dY_i it has been given included, so it has gradients too.
    """

    def __init__(self, gather: Gather):
        self.gather = gather

    def restart(self) -> torch.Tensor:
        """Forgets the last pass, which may have ended early; returns dA, still 0, which `step` fills."""
        self.open: dict[int, torch.Tensor] = {}  # dY_i of this group's averages
        self.closed: list[tuple[slice, torch.Tensor]] = []  # of later groups': their i, and dY_i in rows
        self.begun: torch.Tensor | None = None  # what this group's states get from those
        self.seen: list[torch.Tensor] = []  # X_j of this group, the last first
        matrix = self.gather.chain
        return torch.zeros(matrix.shape, dtype=matrix.dtype, device=matrix.device)

    def step(
        self, j: int, state: torch.Tensor | None, grad_output: torch.Tensor | None, grad_matrix: torch.Tensor
    ) -> torch.Tensor | None:
        """Returns dX_j for dY_j, and writes column j of dA unless `state`, X_j, is `None`."""
        gather = self.gather
        first = gather.first_of_group(j)
        if self.closed and self.begun is None:
            members = slice(first, first + gather.group)
            self.begun = _matrix_sum((gather.weights[rows, members].t(), grads) for rows, grads in self.closed)
        begun = None if self.begun is None else self.begun[j - first].view(gather.shape)
        if grad_output is not None and j in gather.reads:
            self.open[j] = grad_output
        elif grad_output is not None:
            begun = grad_output if begun is None else begun + grad_output

        readers = [i for i in self.open if j in gather.reads[i]]
        weights = gather.weights[:, j].unbind()
        grad_state = _sum(begun, [(weights[i], self.open[i]) for i in readers])
        if gather.group:
            self.seen.insert(0, state)
            if j in (first, gather.lowest):
                self.close(j, grad_matrix)
        elif state is not None:
            for i in readers:
                grad_matrix[i, j] = _dot(self.open[i], state)
        return grad_state

    def close(self, first: int, grad_matrix: torch.Tensor) -> None:
        """Ends a group: writes its states' columns of dA, and makes room for the next group."""
        if self.open:
            rows = slice(min(self.open), max(self.open) + 1)
            zero = torch.zeros_like(self.open[rows.start])  # for averages that nothing depends on
            self.closed.append((rows, _rows(self.open.get(i, zero) for i in range(rows.start, rows.stop))))
        if self.gather.learns:
            states = _rows(self.seen).t()
            for rows, grads in self.closed:
                # Of this group's block the lower triangle counts; nothing reads the rest.
                grad_matrix[rows, first : first + len(self.seen)] = grads @ states
        self.open, self.seen, self.begun = {}, [], None
        if first == self.gather.lowest:
            self.closed = []


def _rows(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Returns `(K, numbers)` of K tensors."""
    return torch.stack(list(tensors)).flatten(1)


def _matrix_sum(products: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """Returns the sum of the matrix products `(R, K) @ (K, numbers)`."""
    total = None
    for weights, rows in products:
        if total is None:
            total = rows.new_zeros(len(weights), rows.shape[1])
        # In place, autocast leaves a product in the dtype it has.
        total = total + weights @ rows if torch.is_grad_enabled() else total.addmm_(weights, rows)
    return total


def _sum(begun: torch.Tensor | None, terms: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor | None:
    """Returns begun + sum_k w_k x_k for the terms (w_k, x_k), `begun` untouched; `None` for nothing at all."""
    total, owned = begun, False
    for weight, state in terms:
        if total is None:
            total = state * weight
        elif owned and not torch.is_grad_enabled():
            total.addcmul_(state, weight)
        else:
            total = torch.addcmul(total, state, weight)
        owned = True
    return total


def _dot(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Returns <a, b>, a scalar; float32 for lower precisions, whose own dot product is slow on CPUs and coarse."""
    if a.dtype in (torch.float32, torch.float64):
        return torch.dot(a.reshape(-1), b.reshape(-1))
    return (a * b).sum(dtype=torch.float32)
