r"""Depth-weighted averaging (DWA), DenseFormer, arXiv 2402.02622.

    Y_n = sum_{j <= n+1, j = n+1 mod k} D[n, j] X_j    if p divides n + 1, else    Y_n = X_{n+1}

X_0 are the embeddings, X_{n+1} the raw output of block n; block n + 1 reads Y_n and the final norm Y_{N-1}. k is the
dilation, p the period. D[n, n+1] starts at 1 and the rest at 0, which is plain Llama.
"""

import torch

from resformer.configuration import ResFormerConfig
from resformer.modeling.mixing import FreeRows, weighted_sum

__all__ = ["DepthAverage", "depth_average"]


def depth_average(config: ResFormerConfig) -> "DepthAverage | None":
    """The module that averages; `None` if nothing is averaged."""
    return DepthAverage(config) if config.dwa and config.dwa_period <= config.num_hidden_layers else None


class DepthAverage(FreeRows):
    """The weights of DWA, N(N + 3)/2 of them for dilation 1 and period 1, and the average itself."""

    def __init__(self, config: ResFormerConfig):
        dilation, period = config.dwa_dilation, config.dwa_period
        super().__init__(
            {
                block: [state for state in range(block + 2) if (block + 1 - state) % dilation == 0]
                for block in range(period - 1, config.num_hidden_layers, period)
            }
        )
        #: State j -> the last block whose average reads it; a state that no average reads is not kept.
        self.last_reader = {state: block for block, states in self.columns.items() for state in states}

    def reset_parameters(self) -> None:
        self.start_at([[0.0] * (size - 1) + [1.0] for size in self.sizes])

    def average(self, block: int, states: dict[int, torch.Tensor], weights: dict[int, torch.Tensor]) -> torch.Tensor:
        """Returns Y_block, and drops from `states` what no later block reads.

        Args:
            block: n, the block that has just run.
            states: X_j by j, each `(batch, tokens, hidden_size)`, X_{n+1} among them.
            weights: what `forward()` returned.
        """
        output = states[block + 1]
        if block in weights:
            # Layers may sit on several devices (`device_map`); elsewhere `to` does nothing.
            terms = [states[state].to(output.device) for state in self.columns[block]]
            output = weighted_sum(terms, weights[block])
        for state in [state for state in states if self.last_reader.get(state, -1) <= block]:
            del states[state]
        return output
