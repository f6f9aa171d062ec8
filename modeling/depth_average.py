r"""Depth-weighted averaging (DWA), DenseFormer, arXiv 2402.02622.

    Y_n = sum_{j <= n+1, j = n+1 mod k} D[n, j] X_j    if p divides n + 1, else    Y_n = X_{n+1}

X_0 are the embeddings, X_{n+1} the raw output of block n; block n + 1 reads Y_n and the final norm Y_{N-1}. k is the
dilation, p the period. D[n, n+1] starts at 1 and the rest at 0, which is plain Llama.

A weight of 0 adds nothing to finite states. An X_j with an infinity makes later averages of its token NaN even where
its weight is 0; plain Llama makes NaN of it too, in the next norm.
"""

import functools
import math

import torch
from torch import nn

from resformer.configuration import ResFormerConfig
from resformer.modeling.connection import ConnectionKind, FreeRows, weighted_sum
from resformer.modeling.depth_gather import Gather

__all__ = ["DEPTH_AVERAGE", "DepthAverage", "RunningAverage", "depth_average"]

#: States in a group of `Gather`, and the number of layers from which groups are used. One matrix product for 8 averages
#: moves fewer bytes than 8 sums, but needs its states stacked. CPUs have instructions for it in bfloat16, but not in
#: float16.
GROUP = 8
GROUPED_FROM = {torch.float32: 24, torch.float64: 24, torch.bfloat16: 8}


def depth_average(config: ResFormerConfig) -> "DepthAverage | None":
    """The module with the weights; `None` if the configuration averages nothing."""
    return DepthAverage(config) if config.dwa and config.dwa_period <= config.num_hidden_layers else None


class DepthAverage(FreeRows):
    """The weights of DWA, N(N + 3)/2 of them for dilation 1 and period 1.

    ```python
    >>> running = depth_average.start(depth_average())
    >>> hidden_states = running.append(embeddings)  # X_0
    >>> for block in blocks:
    ...     hidden_states = running.append(block(hidden_states))  # X_{n+1} -> Y_n
    ```"""

    def __init__(self, config: ResFormerConfig):
        layout = config.num_hidden_layers, config.dwa_dilation, config.dwa_period
        super().__init__(_columns(*layout))
        self.layout = layout
        #: Number i of an average -> the states that Y_i is made of.
        self.reads = {block + 1: states for block, states in self.columns.items()}
        last_read = {state: i for i, states in self.reads.items() for state in states}
        #: Number of a state -> the states that no later average reads.
        self.done = [
            [j for j in range(i + 1) if max(last_read.get(j, j), j) == i] for i in range(config.num_hidden_layers + 1)
        ]

    def reset_parameters(self) -> None:
        self.start_at([[0.0] * (size - 1) + [1.0] for size in self.sizes])

    def start(self, weights: dict[int, torch.Tensor]) -> "RunningAverage":
        """Returns the averages of one forward pass; `weights` are what `forward()` returned."""
        return RunningAverage(self, weights)

    def matrix(self, weights: dict[int, torch.Tensor]) -> torch.Tensor:
        """Returns `(N + 1, N + 1)`: row n + 1 makes Y_n of X_0 .. X_{n+1}, and is 0 where Y_n = X_{n+1}."""
        flat = torch.cat(list(weights.values()))
        size = self.layout[0] + 1
        return flat.new_zeros(size * size).index_copy(0, _places(*self.layout, flat.device), flat).view(size, size)

    def group(self, dtype: torch.dtype) -> int:
        """How many states of this dtype go together in a `Gather`; 0 for none."""
        layers, dilation, period = self.layout
        return GROUP if dilation == period == 1 and layers >= GROUPED_FROM.get(dtype, math.inf) else 0


class RunningAverage:
    """The averages of one forward pass: takes X_0, X_1, .. X_N in turn and returns what the next block reads.

    Example: 4 states in memory, dilation 1, period 1. Row i of A makes Y_i.

              X_0   X_1   X_2   X_3
        Y_0    1                          the embeddings, unchanged
        Y_1   a10   a11                   read by block 1
        Y_2   a20   a21   a22             read by block 2
        Y_3   a30   a31   a32   a33       read by the final norm

    Two ways give the same averages, up to rounding: `Gather`, and a plain weighted sum where that cannot be used:
    compilers, tensor subclasses, layers on several devices.
    """

    def __init__(self, module: DepthAverage, weights: dict[int, torch.Tensor]):
        self.module = module
        self.weights = weights
        self.states: dict[int, torch.Tensor] = {}  # j -> X_j, as long as a later average reads it
        self.count = 0
        self.gather: Gather | None = None
        self.layout: tuple[object, ...] = ()  # of X_0

    def append(self, state: torch.Tensor) -> torch.Tensor:
        """Returns Y_n for X_{n+1}, and X_0 for X_0, each `(batch, tokens, hidden_size)`."""
        number = self.count
        self.count += 1
        self.states[number] = state
        layout = (state.shape, state.dtype, state.device)
        if number == 0:
            self.layout, self.gather = layout, self.start_gather(state)
        elif layout != self.layout:  # with `device_map`, layers are on several devices
            self.gather = None

        if self.gather is not None:
            output = self.gather.append(number, state)
        elif number in self.module.reads:
            terms = [self.states[earlier].to(state.device) for earlier in self.module.reads[number]]
            output = weighted_sum(terms, self.weights[number - 1])
        else:
            output = state
        for earlier in self.module.done[number]:
            del self.states[earlier]
        return output

    def start_gather(self, state: torch.Tensor) -> Gather | None:
        """Returns a `Gather` for states like X_0; `None` where only a plain weighted sum works."""
        if not _is_ordinary(state, *self.weights.values()):
            return None
        matrix = self.module.matrix(self.weights).to(state.device)
        return Gather(matrix, self.module.reads, self.states, self.module.group(state.dtype), state)


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


def _columns(layers: int, dilation: int, period: int) -> dict[int, list[int]]:
    """Block n -> the states that its average reads."""
    return {
        block: [state for state in range(block + 2) if (block + 1 - state) % dilation == 0]
        for block in range(period - 1, layers, period)
    }


def _flops(config: ResFormerConfig) -> int:
    """2 x hidden_size for each term of an average."""
    rows = _columns(config.num_hidden_layers, config.dwa_dilation, config.dwa_period).values() if config.dwa else ()
    return 2 * config.hidden_size * sum(map(len, rows))


DEPTH_AVERAGE = ConnectionKind(("dwa", "dwa_dilation", "dwa_period"), "depth_average", flops=_flops)


@functools.lru_cache
def _places(layers: int, dilation: int, period: int, device: torch.device) -> torch.Tensor:
    """The index in the flattened matrix of each weight, row after row."""
    rows = _columns(layers, dilation, period).items()
    with torch.inference_mode(False):  # the cached tensor is used in training too
        return torch.tensor(
            [(row + 1) * (layers + 1) + state for row, states in rows for state in states], device=device
        )
