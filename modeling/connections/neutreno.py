r"""NeuTRENO, arXiv 2312.00751: every later layer adds a multiple of V_0 minus its values to its attention output.

    U_n = A_n V'_{s(n)} + l (V_0 - V'_{s(n)}),  n >= 1

s(n) is the layer whose values layer n attends to, itself unless values are shared. The term is added before `o_proj`
and needs the current tokens only.
"""

from collections.abc import Sequence
from typing import Any

import torch

from resformer.configuration import value_layers, value_sources
from resformer.configuration.connection_fields import NeutrenoFields
from resformer.modeling.connection import Connection, Reads


class Neutreno(Connection):
    by_heads = True
    name = "neutreno"
    place = "attention_output"
    fields_of = NeutrenoFields

    def __init__(self, config: Any, layer: int):
        super().__init__(config, layer)
        self.strength = config.neutreno_lambda

    def forward(
        self, attention_output: torch.Tensor, first_values: torch.Tensor, mixed_values: torch.Tensor
    ) -> torch.Tensor:
        """Returns A V' + l (V_0 - V'), the same values for all query heads that share them."""
        difference = (first_values - mixed_values).unsqueeze(-2)
        groups = attention_output.unflatten(-2, (difference.shape[-3], -1))
        return torch.add(groups, difference, alpha=self.strength).flatten(-3, -2)

    @classmethod
    def layers(cls, config: Any) -> Sequence[int]:
        sources = enumerate(value_sources(config))
        return [n for n, source in sources if value_layers(config, source) and value_layers(config, source)[0] != n]

    @classmethod
    def reads(cls, config: Any, layer: int) -> Reads:
        source = value_sources(config)[layer]
        reads: Reads = {"first_values": ("raw_values", value_layers(config, source)[0])}
        return reads if source == layer else {**reads, "mixed_values": ("mixed_values", source)}

    @classmethod
    def fixed_effects(cls, config: Any) -> list[str]:
        return [f"`neutreno_lambda`={config.neutreno_lambda} adds a fixed term to every layer but 0"]

    @classmethod
    def flops(cls, config: Any) -> int:
        """3 x query heads x head_dim in every layer but 0."""
        return 3 * config.num_attention_heads * config.head_dim * (config.num_hidden_layers - 1)
