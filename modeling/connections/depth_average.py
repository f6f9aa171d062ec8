r"""Depth-weighted averaging (DWA), DenseFormer, arXiv 2402.02622.

    Y_n = sum_{j <= n+1, j = n+1 mod k} D[n, j] X_j    if p divides n + 1, else    Y_n = X_{n+1}

X_0 are the embeddings, X_{n+1} the raw output of block n; block n + 1 reads Y_n and the final norm Y_{N-1}. k is the
dilation, p the period. D[n, n+1] starts at 1 and the rest at 0, which is plain Llama.

A weight of 0 adds nothing to finite states. An X_j with an infinity makes later averages of its token NaN even where
its weight is 0; plain Llama makes NaN of it too, in the next norm.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from resformer.configuration.connection_fields import DepthAverageFields
from resformer.modeling.connection import BetweenLayers, MixingRow, Weights, coefficient
from resformer.modeling.sums import is_differentiated, is_ordinary, weighted_sum

HALVES = (torch.float16, torch.bfloat16)


class DepthAverage(Weights, MixingRow):
    """The weights of Y_n; N(N + 3)/2 of them in all layers, for dilation 1 and period 1."""

    name = "depth_average"
    fields_of = DepthAverageFields

    def __init__(self, config: Any, layer: int):
        super().__init__(config, layer)
        step = config.dwa_dilation
        self.columns: range = range((layer + 1) % step, layer + 2, step)  # the states that make Y_n, X_{n+1} last
        self.start = [*[0.0] * (len(self.columns) - 1), 1.0]
        self.weight = coefficient(len(self.columns))

    def row(self, of_decoder: Any) -> list[float]:
        return self().tolist()

    @classmethod
    def layers(cls, config: Any) -> Sequence[int]:
        return range(config.dwa_period - 1, config.num_hidden_layers, config.dwa_period) if config.dwa else ()

    @classmethod
    def between(cls, modules: Mapping[int, Any], of_decoder: Any) -> BetweenLayers:
        return RunningAverage({n: (module.columns, module()) for n, module in modules.items()})

    @classmethod
    def flops(cls, config: Any) -> int:
        """2 x hidden_size for each term of an average."""
        return 2 * config.hidden_size * sum((layer + 1) // config.dwa_dilation + 1 for layer in cls.layers(config))


class RunningAverage(BetweenLayers):
    """The averages of one forward pass: takes X_0, X_1, .. X_N in turn and returns what the next block reads.

    Plain tensors on one device are copied into a buffer, from which one product of a matrix and a vector makes an
    average, and one its gradient: each state is read once. All else is summed term by term, which compilers fuse.

    Args:
        rows: layer n -> the states that Y_n reads, and their weights.
    """

    def __init__(self, rows: Mapping[int, tuple[range, torch.Tensor]]):
        #: i -> the states that Y_i, the i-th thing that `append` returns, is made of. X_i for every other i.
        self.reads = {layer + 1: columns for layer, (columns, _) in rows.items()}
        #: j -> the last Y_i that X_j is part of.
        self.last_read = {j: i for i, columns in self.reads.items() for j in columns}
        self.weights = {layer + 1: row for layer, (_, row) in rows.items()}  # i -> row i of A
        self.states: dict[int, torch.Tensor] = {}  # j -> X_j, as long as a later average reads it, without buffers
        self.count = 0
        self.buffers: list[Buffer] = []
        #: Of each buffer its weights, an output of each node and an input of the next: autograd then runs the nodes in
        #: reverse order in any case.
        self.chains: list[torch.Tensor] = []

    def before(self, layer: int, hidden_states: torch.Tensor, earlier: dict[str, Any], added: Any) -> torch.Tensor:
        if layer != max(0, self.count - 1):
            raise ValueError(
                f"Layer {layer} runs after {max(0, self.count - 1)} others, but `dwa` reads the outputs of all layers "
                "in their order: layers cannot be removed, moved or called alone."
            )
        return hidden_states if layer else self.append(hidden_states)

    def after(self, layer: int, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.append(hidden_states)

    def append(self, state: torch.Tensor) -> torch.Tensor:
        """Returns Y_n for X_{n+1}, and X_0 for X_0, each `(batch, tokens, hidden_size)`."""
        number = self.count
        self.count += 1
        if number == 1 and is_ordinary([self.states.get(0, state), state], self.weights.values()):
            step = next(iter(self.reads.values())).step
            alike = [[i for i in self.reads if i and i % step == remainder] for remainder in range(step)]
            if all(len({after - i for i, after in pairwise(rows)}) <= 1 for rows in alike):  # evenly spaced
                self.buffers = [Buffer({i: self.weights[i] for i in rows}, step, state) for rows in alike if rows]
                self.chains = [buffer.weights for buffer in self.buffers]
                for first in self.states.values():
                    self.buffered(first, 0)
                self.states.clear()
        if self.buffers:
            return self.buffered(state, number)
        if number in self.last_read:
            self.states[number] = state
        if number in self.reads:
            for j in self.reads[number]:  # once to a device, not once for each reader
                self.states[j] = self.states[j].to(state)
            states = [self.states[j] for j in self.reads[number]]
            state = weighted_sum(states, self.weights[number].to(state.device))
        for earlier in [j for j in self.states if self.last_read[j] <= number]:
            del self.states[earlier]
        return state

    def buffered(self, state: torch.Tensor, number: int) -> torch.Tensor:
        for n, buffer in enumerate(self.buffers):
            if number in buffer.columns:
                output = state.to(buffer.states)
                if torch.is_grad_enabled():
                    output, self.chains[n] = AverageNode.apply(output, self.chains[n], buffer, number)
                else:
                    output = buffer.average(output, number)
                if number == buffer.columns[-1]:
                    del buffer.states
                return output.to(state)
        return state


class Buffer:
    """States that are averaged with each other, every k-th, and in the backward pass the gradients of their averages.

    Args:
        weights: i -> the weights of Y_i.
        step: k.
        like: has the shape, dtype and device of the states.
    """

    def __init__(self, weights: Mapping[int, torch.Tensor], step: int, like: torch.Tensor):
        first, last = min(weights), max(weights)
        self.columns = range(last % step, last + 1, step)  # the states
        self.rows = range(first, last + 1, max(1, (last - first) // max(1, len(weights) - 1)))  # the averages
        #: `(averages, states)`, zero where an average does not read a state.
        self.weights = pad_sequence([*weights.values()], batch_first=True)
        self.rounded = self.weights.detach().to(like.dtype)
        #: In halves, an average reads its own state twice, with what rounding has left of the weight.
        self.copies = 2 if like.dtype in HALVES else 1
        self.forward_weights = nn.functional.pad(self.rounded, (0, self.copies - 1))
        if self.copies > 1:
            first_own, step_own = self.columns.index(first), max(1, self.rows.step // step)
            left = self.weights.detach() - self.rounded
            own = self.forward_weights[:, first_own + 1 :: step_own].diagonal()
            own.copy_(left[:, first_own::step_own].diagonal())
        self.states = like.new_empty(len(self.columns) + self.copies - 1, *like.shape)
        self.shape, self.empty = like.shape, like.new_empty(0)
        self.lowest: int | None = None  # the first state with a gradient
        self.gradients: torch.Tensor | None = None  # of the averages
        self.newest = -1  # the last average with a gradient in this backward pass

    def average(self, state: torch.Tensor, number: int) -> torch.Tensor:
        """Keeps X_j; returns Y_j, or X_j where no average is made."""
        stop = self.columns.index(number) + self.copies
        self.states.data[stop - self.copies : stop] = state  # `data`: what is saved of the others has not changed
        if number not in self.rows:
            return state
        return _sum(None, self.states[:stop], self.forward_weights[self.rows.index(number), :stop])


class AverageNode(torch.autograd.Function):
    """State j: X_j in, Y_j out, and the chain through both.

        Y_i = sum_{j <= i} A[i, j] X_j        dX_j = sum_{i >= j} A[i, j] dY_i        dA[i, j] = <dY_i, X_j>

    The backward of node j runs after those of all i > j, so every dY_i is known: one product gives dX_j, and another
    column j of dA. Only the buffer's copy of X_j is saved for this.
    """

    @staticmethod
    def forward(
        ctx: Any, state: torch.Tensor, chain: torch.Tensor, buffer: Buffer, number: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)
        ctx.buffer, ctx.number = buffer, number
        if buffer.lowest is None and any(ctx.needs_input_grad):
            buffer.lowest = number
        output = buffer.average(state, number)
        if buffer.weights.requires_grad:
            ctx.save_for_backward(buffer.states[buffer.columns.index(number)])
        return output if number in buffer.rows else output.view_as(output), chain.view_as(chain)

    @staticmethod
    def backward(
        ctx: Any, grad_output: torch.Tensor | None, grad_weights: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, torch.Tensor, None, None]:
        buffer, number = ctx.buffer, ctx.number
        if is_differentiated(buffer.empty if grad_output is None else grad_output):
            raise RuntimeError(
                "The backward pass of averages over depth has no gradients (`create_graph=True`), and takes one at a "
                "time (not `is_grads_batched=True`): `torch.func` has both."
            )
        if grad_weights is None:  # the first node of this backward pass; the one before may have stopped early
            buffer.gradients, buffer.newest = None, -1
            grad_weights = torch.zeros_like(buffer.weights)
        if number in buffer.rows:
            row = buffer.rows.index(number)
            if buffer.gradients is None:
                buffer.gradients, buffer.newest = buffer.empty.new_empty(len(buffer.rows), *buffer.shape), row
            buffer.gradients[row] = 0 if grad_output is None else grad_output
            grad_output = None
        # The averages, by their places in `rows`, that read the state and have a gradient.
        readers = slice(len([i for i in buffer.rows if i < number]), buffer.newest + 1)
        grad_state = grad_output
        if readers.start < readers.stop:
            place, gradients = buffer.columns.index(number), buffer.gradients[readers]
            grad_state = _sum(grad_output, gradients, buffer.rounded[readers, place])
            if buffer.weights.requires_grad:
                grad_weights[readers, place] = _dots(gradients, *ctx.saved_tensors)
        if number == buffer.lowest:
            buffer.gradients = None
        return grad_state, grad_weights, None, None


def _sum(base: torch.Tensor | None, states: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Returns base + sum_k weights[k] states[k]. Autocast, which would round it, leaves `out=` alone."""
    result = torch.empty_like(states[0])
    matrix, out = states.flatten(1).t(), result.flatten()
    if base is None:
        torch.mv(matrix, weights, out=out)
    else:
        torch.addmv(base.reshape(-1), matrix, weights, out=out)
    return result


def _dots(states: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Returns <states[k], other> of all k."""
    matrix, vector = states.flatten(1), other.flatten()
    if other.is_cuda and other.dtype in HALVES:
        return torch.mm(matrix, vector[:, None], out_dtype=torch.float32)[:, 0]
    return torch.mv(matrix, vector, out=other.new_empty(len(states)))
