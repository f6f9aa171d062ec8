r"""Depth-weighted averaging (DWA), DenseFormer, arXiv 2402.02622.

    Y_n = sum_{j <= n+1, j = n+1 mod k} D[n, j] X_j    if p divides n + 1, else    Y_n = X_{n+1}

X_0 are the embeddings, X_{n+1} the raw output of block n; block n + 1 reads Y_n and the final norm Y_{N-1}. k is the
dilation, p the period. D[n, n+1] starts at 1 and the rest at 0, which is plain Llama.

A weight of 0 adds nothing to finite states. An X_j with an infinity makes later averages of its token NaN even where
its weight is 0; plain Llama makes NaN of it too, in the next norm.
"""

from typing import Any

import torch
from torch import nn

from resformer.configuration import ResFormerConfig
from resformer.modeling.connection import ConnectionKind, FreeRows, weighted_sum


def depth_average(config: ResFormerConfig) -> "DepthAverage | None":
    """The module with the weights; `None` if the configuration averages nothing."""
    return DepthAverage(config) if _columns(config) else None


def _columns(config: ResFormerConfig) -> dict[int, list[int]]:
    """Block n -> the states that its average reads, ascending, X_{n+1} last."""
    if not config.dwa:
        return {}
    return {
        block: [state for state in range(block + 2) if (block + 1 - state) % config.dwa_dilation == 0]
        for block in range(config.dwa_period - 1, config.num_hidden_layers, config.dwa_period)
    }


class DepthAverage(FreeRows):
    """The weights of DWA, N(N + 3)/2 of them for dilation 1 and period 1.

    ```python
    >>> running = RunningAverage(depth_average, depth_average())
    >>> hidden_states = running.append(embeddings)  # X_0
    >>> for block in blocks:
    ...     hidden_states = running.append(block(hidden_states))  # X_{n+1} -> Y_n
    ```"""

    def __init__(self, config: ResFormerConfig):
        super().__init__(_columns(config))
        #: i -> the states that Y_i, the i-th thing that `append` returns, is made of. X_i for every other i.
        self.reads = {block + 1: states for block, states in self.columns.items()}
        #: j -> the last Y_i that X_j is part of.
        self.last_read = {state: i for i, states in self.reads.items() for state in states}
        #: (i, j) -> the place of the weight of X_j in Y_i, of all weights one row after the other.
        self.places = {pair: n for n, pair in enumerate((i, j) for i, row in self.reads.items() for j in row)}


class RunningAverage:
    """The averages of one forward pass: takes X_0, X_1, .. X_N in turn and returns what the next block reads.

    In training plain autograd would write one gradient of X_j for every average that reads it, and then add them up.
    `AverageNode` adds as it goes, in one pass over memory. It needs plain tensors on one device.
    """

    def __init__(self, module: DepthAverage, weights: dict[int, torch.Tensor]):
        self.module, self.reads, self.last_read = module, module.reads, module.last_read
        self.weights = {block + 1: row for block, row in weights.items()}  # i -> row i of A
        self.states: dict[int, torch.Tensor] = {}  # j -> X_j, as long as a later average reads it
        self.count = 0
        self.like: tuple[object, ...] | None = None  # dtype and device of all states so far; None once they differ
        self.backward: Backward | None = None
        #: An output of each node and an input of the next: autograd then runs them in reverse order in any case.
        self.chain = torch.empty(0)

    def append(self, state: torch.Tensor) -> torch.Tensor:
        """Returns Y_n for X_{n+1}, and X_0 for X_0, each `(batch, tokens, hidden_size)`."""
        number = self.count
        self.count += 1
        self.states[number] = state
        if number == 0 and _is_ordinary(state, *self.weights.values()):
            self.like = state.dtype, state.device
            self.chain = torch.cat(list(self.weights.values())).to(state.device)
        elif (state.dtype, state.device) != self.like:  # with `device_map`, layers are on several devices
            self.like = None

        learns = torch.is_grad_enabled() and (state.requires_grad or self.chain.requires_grad)
        if self.like is not None and learns and number in self.last_read:
            if self.backward is None:
                self.backward = Backward(self.module, self.chain, state.dtype, lowest=number)
            output, self.chain = AverageNode.apply(state, self.chain, self, number)
        else:
            output = self.average(number)
        for earlier in [j for j in self.states if self.last_read.get(j, 0) <= number]:
            del self.states[earlier]
        return output

    def average(self, i: int) -> torch.Tensor:
        """Returns Y_i of the states: a new tensor, or X_i itself."""
        state = self.states[i]
        if i not in self.reads:
            return state
        return weighted_sum([self.states[j].to(state) for j in self.reads[i]], self.weights[i])


class Backward:
    """The backward passes through the nodes of a `RunningAverage`, one at a time, from the last state to the first.

    Args:
        module: says which states each average reads.
        weights: A, its rows one after the other, in the coefficients' dtype.
        dtype: of the states.
        lowest: the first state that has a node.
    """

    def __init__(self, module: DepthAverage, weights: torch.Tensor, dtype: torch.dtype, lowest: int):
        self.reads, self.places = module.reads, module.places
        self.learns = weights.requires_grad
        self.no_gradient = torch.zeros_like(weights)
        self.weights = weights.to(dtype).unbind()
        self.lowest = lowest
        self.open: dict[int, torch.Tensor] = {}  # i -> dY_i


class AverageNode(torch.autograd.Function):
    """State j: X_j in, Y_j out, and the chain through both.

        Y_i = sum_{j <= i} A[i, j] X_j        dX_j = sum_{i >= j} A[i, j] dY_i        dA[i, j] = <dY_i, X_j>

    The backward of node j runs after those of all i > j, so every dY_i is known: one sum gives dX_j, and dot products
    give column j of dA. Only X_j is saved for this, once. With `create_graph=True` autograd records every operation.
    """

    @staticmethod
    def forward(
        ctx: Any, state: torch.Tensor, chain: torch.Tensor, running: RunningAverage, number: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)
        # Not `running` itself: it holds the chain, which holds this node, and such a cycle is never freed.
        ctx.pass_, ctx.number = running.backward, number
        if ctx.pass_.learns:
            ctx.save_for_backward(state)
        output = running.average(number)
        return (output.view_as(output) if output is state else output), chain.view_as(chain)

    @staticmethod
    def backward(
        ctx: Any, grad_output: torch.Tensor | None, grad_weights: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, torch.Tensor, None, None]:
        through: Backward = ctx.pass_
        j, grads = ctx.number, through.open
        if grad_weights is None:  # the first node of this backward pass; the one before may have stopped early
            grads.clear()
            grad_weights = through.no_gradient.clone()
        if grad_output is not None and j in through.reads:
            grads[j], grad_output = grad_output, None
        readers = [i for i in grads if j in through.reads[i]]
        grad_state = grad_output
        if readers:
            terms = weighted_sum([grads[i] for i in readers], [through.weights[through.places[i, j]] for i in readers])
            grad_state = terms if grad_output is None else grad_output + terms
        if through.learns:
            (state,) = ctx.saved_tensors
            for i in readers:
                grad_weights[through.places[i, j]] = _dot(grads[i], state)
        if j == through.lowest:
            grads.clear()
        return grad_state, grad_weights, None, None


def _is_ordinary(*tensors: torch.Tensor) -> bool:
    """Whether these are plain tensors with data, outside of torch.compile, torch.jit tracing and torch.func transforms.

    Compilers fuse plain operations by themselves, and tracers and transforms do not support Python autograd functions.
    """
    return not (
        torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None
        or torch._C._are_functorch_transforms_active()
        or any(type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.is_meta for tensor in tensors)
    )


def _dot(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Returns <a, b>, a scalar; float32 for lower precisions, where `torch.dot` is slow on CPUs and inexact."""
    if a.dtype in (torch.float32, torch.float64):
        return torch.dot(a.reshape(-1), b.reshape(-1))
    return (a * b).sum(dtype=torch.float32)


def _flops(config: ResFormerConfig) -> int:
    """2 x hidden_size for each term of an average."""
    return 2 * config.hidden_size * sum(map(len, _columns(config).values()))


DEPTH_AVERAGE = ConnectionKind(("dwa", "dwa_dilation", "dwa_period"), "depth_average", flops=_flops)
