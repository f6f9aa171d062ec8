r"""Backout: a middle layer's output is taken out of what the final norm reads; nanochat.

    Y_{N-1} = X_N - l X_{N // 2 + 1}

X_{n+1} is the output of block n, of N blocks: one column more in the last row of the depth matrix. l is learned and
starts at `backout_init`; 0 is plain Llama.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from resformer.configuration.connection_fields import BackoutFields
from resformer.modeling.connection import BetweenLayers, Connection, Weights, coefficient
from resformer.modeling.sums import weighted_sum


class Backout(Weights, Connection):
    """The l of the decoder, in its last layer."""

    name = "backout"
    fields_of = BackoutFields
    plain = {"backout_init": 0.0}
    at_end = True

    def __init__(self, config: Any, layer: int):
        super().__init__(config, layer)
        self.middle, self.start = config.num_hidden_layers // 2, [config.backout_init]
        self.weight = coefficient(1)  # l

    @classmethod
    def layers(cls, config: Any) -> Sequence[int]:
        return [config.num_hidden_layers - 1] if config.backout else []

    @classmethod
    def between(cls, modules: Mapping[int, Any], of_decoder: Any) -> BetweenLayers:
        [(last, module)] = modules.items()
        return TakenOut(last, module.middle, module())

    @classmethod
    def flops(cls, config: Any) -> int:
        return 2 * config.hidden_size * len(cls.layers(config))


class TakenOut(BetweenLayers):
    """The middle layer's output of one forward pass."""

    def __init__(self, last: int, middle: int, weight: torch.Tensor):
        self.last, self.middle, self.weight = last, middle, weight
        self.output: torch.Tensor | None = None

    def after(self, layer: int, hidden_states: torch.Tensor) -> torch.Tensor:
        if layer == self.middle:
            self.output = hidden_states
        if layer != self.last:
            return hidden_states
        if self.output is None:
            raise ValueError(f"Layer {layer} subtracts the output of layer {self.middle}: it cannot be called alone.")
        weight = self.weight.to(hidden_states.device)
        return weighted_sum((hidden_states, self.output.to(hidden_states.device)), (1.0, -weight[0]))
