r"""The embeddings, mixed into what each layer reads: modded-nanogpt, nanochat (there `resid_lambdas`, `x0_lambdas`).

    x <- r_n x + s_n X_0        before layer n, for all n

x is the residual stream, or what a depth average makes of it; X_0 are the embeddings. Two numbers a layer: r_n starts
at 1 and s_n at `embedding_residual_init`; s_n = 0 starts as plain Llama.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from resformer.configuration.connection_fields import EmbeddingResidualFields
from resformer.modeling.connection import BetweenLayers, Connection, Weights, coefficient
from resformer.modeling.sums import weighted_sum


class EmbeddingResidual(Weights, Connection):
    """The r and s of a layer."""

    name = "embedding_residual"
    fields_of = EmbeddingResidualFields
    plain = {"embedding_residual_init": 0.0}

    def __init__(self, config: Any, layer: int):
        super().__init__(config, layer)
        self.start = [1.0, config.embedding_residual_init]
        self.weight = coefficient(2)  # r, s

    @torch.no_grad()
    def deviations(self) -> list[tuple[float, str]]:
        r, s = self.weight.tolist()
        return [(abs(r - 1.0), "[r]"), (abs(s), "[s]")]

    @classmethod
    def layers(cls, config: Any) -> Sequence[int]:
        return range(config.num_hidden_layers if config.embedding_residual else 0)

    @classmethod
    def between(cls, modules: Mapping[int, Any], of_decoder: Any) -> BetweenLayers:
        return EmbeddingMix({layer: module() for layer, module in modules.items()})

    @classmethod
    def flops(cls, config: Any) -> int:
        """2 x hidden_size for each of the two terms."""
        return 4 * config.hidden_size * len(cls.layers(config))


class EmbeddingMix(BetweenLayers):
    """X_0 of one forward pass."""

    def __init__(self, weights: Mapping[int, torch.Tensor]):
        self.weights = weights
        self.embeddings: torch.Tensor | None = None

    def before(self, layer: int, hidden_states: torch.Tensor, earlier: dict[str, Any], added: Any) -> torch.Tensor:
        if layer == 0:
            self.embeddings = hidden_states
        elif self.embeddings is None:
            raise ValueError(f"Layer {layer} reads the embeddings, which layer 0 has seen: it cannot be called alone.")
        self.embeddings = self.embeddings.to(hidden_states.device)  # with `device_map`, layers are on several devices
        return weighted_sum((hidden_states, self.embeddings), self.weights[layer].to(hidden_states.device))
