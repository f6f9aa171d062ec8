r"""Value embeddings: modded-nanogpt, nanochat; in the last third of the layers, Bank of Values (arXiv 2606.02780).

    V_n = W^V_n h + a sigmoid(W_n h[:c]) E_n[token]      for the layers in `value_embeddings`

E_n has a row of the width of the values for each token of the vocabulary. The gate, one per token and key/value head,
reads c = 12 channels of the layer's normed input h, and a = 3: nanochat's form (`value_embeddings_gate_channels`,
`value_embeddings_gate_limit`). Bank of Values has the row in place of W^V_n h. These V_n are the raw values of
`value_residual.py`.

W_n starts at 0, where the gate is a / 2, and E_n as `value_embeddings_init` says. A retrofit starts with E_n = 0, which
is plain Llama; then E_n learns first.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import initialization as init

from resformer.configuration.connection_fields import ValueEmbeddingFields
from resformer.modeling.connection import TOKENS, Connection, Reads, StartsAsStated
from resformer.modeling.connections.value_residual import GateProjection


class ValueEmbedding(Connection):
    """The term that one layer adds to its values. The table is as large as embeddings are, so it has their dtype."""

    by_heads = True
    name = "value_embedding"
    place = "raw_values"
    fields_of = ValueEmbeddingFields
    plain = {"value_embeddings_init": 0.0}
    tables = ("table.weight",)

    def __init__(self, config: Any, layer: int):
        super().__init__(config, layer)
        self.table = ValueTable(config)  # E
        self.limit = config.value_embeddings_gate_limit  # a
        self.channels = min(config.value_embeddings_gate_channels, config.hidden_size)  # c
        self.gate = GateProjection(self.channels, config.num_key_value_heads)  # W

    def forward(self, values: torch.Tensor, hidden_states: torch.Tensor, input_ids: torch.Tensor) -> torch.Tensor:
        """Returns the values plus the gated rows of the tokens."""
        channels = hidden_states[..., : self.channels].contiguous()  # vLLM ignores strides in bfloat16 on some CPUs
        gate = self.limit * torch.sigmoid(self.gate(channels))
        rows = self.table(input_ids).unflatten(-1, (values.shape[-2], -1))
        return torch.addcmul(values, rows.to(values.dtype), gate.to(values.dtype).unsqueeze(-1))

    @torch.no_grad()
    def deviations(self) -> list[tuple[float, str]]:
        return [
            (float(self.table.weight.detach().abs().max()), ".table"),
            (float((0 * self.gate.weight).sum()), ".gate"),
        ]

    @classmethod
    def layers(cls, config: Any) -> Sequence[int]:
        return config.value_embeddings or ()

    @classmethod
    def reads(cls, config: Any, layer: int) -> Reads:
        return {"input_ids": TOKENS}

    @classmethod
    def flops(cls, config: Any) -> int:
        """2 x key/value heads x (head_dim + the gate's channels) a layer."""
        per_head = config.head_dim + min(config.value_embeddings_gate_channels, config.hidden_size)
        return 2 * config.num_key_value_heads * per_head * len(cls.layers(config))

    @classmethod
    def tp_plan(cls, config: Any) -> dict[str, str]:
        return {
            "layers.*.value_embedding.gate": "colwise",
            "layers.*.value_embedding.table": "local_params",
            "layers.*.value_embedding.table.weight": "rowwise",  # by channels, not by tokens
        }


class ValueTable(StartsAsStated, nn.Embedding):
    def __init__(self, config: Any):
        start = config.value_embeddings_init
        self.deviation = config.initializer_range if start is None else start
        shape = config.vocab_size, config.num_key_value_heads * config.head_dim
        super().__init__(*shape, _weight=torch.empty(shape))

    def reset_parameters(self, first: int = 0) -> None:
        """Of the rows from `first` on."""
        rows = self.weight[first:] if first else self.weight
        init.normal_(rows, std=self.deviation) if self.deviation else init.zeros_(rows)
