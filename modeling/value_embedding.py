r"""Value embeddings: modded-nanogpt, nanochat; in the last third of the layers, Bank of Values (arXiv 2606.02780).

    V_n = W^V_n h + 3 sigmoid(W_n h[:12]) E_n[token]      for the layers in `value_embeddings`

E_n has a row of the width of the values for each token of the vocabulary. The gate, one per token and key/value head,
reads 12 channels of the layer's normed input h: nanochat's form. Bank of Values has the row in place of W^V_n h. These
V_n are the raw values of `value_residual.py`.

W_n starts at 0, where the gate is 1.5, and E_n as `value_embeddings_init` says. A retrofit starts with E_n = 0, which
is plain Llama; then E_n learns first.
"""

import torch
from torch import nn
from transformers import initialization as init

from resformer.configuration import ResFormerConfig
from resformer.modeling.connection import Connection, ConnectionKind, coefficient_dtype
from resformer.modeling.value_residual import GateProjection

GATE_CHANNELS = 12
LARGEST_GATE = 3.0


class ValueEmbedding(nn.Module):
    """The term that one layer adds to its values."""

    def __init__(self, config: ResFormerConfig):
        super().__init__()
        self.bias_table = ValueTable(config)  # E
        channels = min(GATE_CHANNELS, config.hidden_size)
        heads = config.num_key_value_heads
        self.bias_gate = GateProjection(channels, heads, bias=False, dtype=coefficient_dtype())  # W

    def forward(self, hidden_states: torch.Tensor, input_ids: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Returns the values plus the gated rows of the tokens.

        Args:
            hidden_states: the layer's normed input, `(batch, tokens, hidden_size)`.
            input_ids: `(batch, tokens)`.
            values: `(batch, key/value heads, tokens, head_dim)`.
        """
        channels = hidden_states[..., :GATE_CHANNELS].contiguous()  # vLLM ignores strides in bfloat16 on some CPUs
        gate = LARGEST_GATE * torch.sigmoid(self.bias_gate(channels))
        rows = self.bias_table(input_ids).unflatten(-1, (values.shape[1], -1)).transpose(1, 2)
        return torch.addcmul(values, rows.to(values.dtype), gate.to(values.dtype).transpose(1, 2).unsqueeze(-1))


class ValueTable(Connection, nn.Embedding):
    """E, `(vocab_size, key/value heads x head_dim)`: as large as embeddings are, so it has their dtype."""

    is_table = True

    def __init__(self, config: ResFormerConfig):
        start = config.value_embeddings_init
        self.deviation = config.initializer_range if start is None else start
        shape = config.vocab_size, config.num_key_value_heads * config.head_dim
        super().__init__(*shape, _weight=torch.empty(shape))

    def reset_parameters(self) -> None:
        init.normal_(self.weight, std=self.deviation) if self.deviation else init.zeros_(self.weight)


def _flops(config: ResFormerConfig) -> int:
    """2 x key/value heads x (head_dim + the gate's channels) a layer."""
    per_head = config.head_dim + min(GATE_CHANNELS, config.hidden_size)
    return 2 * config.num_key_value_heads * per_head * len(config.value_embeddings or ())


VALUE_EMBEDDING = ConnectionKind(
    ("value_embeddings", "value_embeddings_init"),
    "value_embedding",
    plain_start=lambda fields: {"value_embeddings_init": 0.0} if fields.get("value_embeddings") else {},
    flops=_flops,
)
