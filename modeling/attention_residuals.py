r"""Delta attention residuals, multi-head and gated: arXiv 2605.18855, 2607.27230.

What sublayer i (the attention of layer n for i = 2n, its MLP for i = 2n + 1) reads, before its norm:

    h_i = x_i + g_i concat_h sum_b a_ib^h D_b^h         a_ib^h = exp(s_ib^h) / (1 + sum_c exp(s_ic^h))
    s_ib^h = w_i^h . RMSNorm(D_b)^h

x_i is the residual stream, `(batch, tokens, hidden_size)`, to which the sublayer's output is added as in Llama. The
layers form B blocks. D_0 are the embeddings, and D_b, b >= 1, is what block b - 1 added to the stream. Sublayers read
the D_b of all blocks before their own: at most B. Heads h are contiguous slices of D_b and of w_i; their number is that
of key/value heads, or its greatest common divisor with `hidden_size`. The 1 is a null source of score 0 and value 0, so
that a head can read nothing. w_i, `(hidden_size)`, starts at 0, a mean over all sources; g_i, a scalar, starts at
`attention_residual_init`. At g = 0 this is plain Llama: for finite D, x + 0 D is x.

It departs from the published code in three points. There D_b is the stream minus D_(b-1) for b >= 2, and the attention
of a block's first layer does not read the block before it. The null source and the norm's scale are learned; here w_i
has the effect of the latter.
"""

import itertools
import math

import torch
from torch import nn
from transformers import initialization as init
from transformers.utils.generic import maybe_autocast

from resformer.configuration import ResFormerConfig
from resformer.modeling.connection import Connection, ConnectionKind, coefficient_dtype, weighted_sum


def attention_residuals(config: ResFormerConfig) -> "AttentionResiduals | None":
    """The module with the parameters; `None` if the configuration has none."""
    return AttentionResiduals(config) if config.attention_residuals else None


class AttentionResiduals(Connection):
    """The w and g of all sublayers, attention and MLP of layer 0 first.

    ```python
    >>> deltas = BlockDeltas(attention_residuals, *attention_residuals())
    >>> for n, layer in enumerate(layers):
    ...     hidden_states = layer(hidden_states, block_deltas=deltas.read(n, hidden_states))
    ```"""

    def __init__(self, config: ResFormerConfig):
        super().__init__()
        self.blocks = dict(itertools.pairwise([*_starts(config), config.num_hidden_layers]))  # first layer -> end
        self.heads = math.gcd(config.num_key_value_heads, config.hidden_size)
        self.epsilon = config.rms_norm_eps
        self.gate = config.attention_residual_init
        sublayers = 2 * config.num_hidden_layers
        # "bias": the stock `Trainer` leaves such names out of weight decay.
        self.bias_query = nn.Parameter(torch.empty(sublayers, config.hidden_size, dtype=coefficient_dtype()))  # w
        self.bias_gate = nn.Parameter(torch.empty(sublayers, dtype=coefficient_dtype()))  # g

    def forward(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns w, `(2N, heads, hidden_size / heads)`, and g, `(2N)`."""
        # Copies: FSDP2 frees the parameters themselves when this returns.
        return self.bias_query.clone().unflatten(-1, (self.heads, -1)), self.bias_gate.clone()

    def reset_parameters(self) -> None:
        init.zeros_(self.bias_query)
        init.constant_(self.bias_gate, self.gate)

    @torch.no_grad()
    def deviations(self) -> list[tuple[float, str]]:
        gates = [(abs(float(gate)), f".bias_gate[{sublayer}]") for sublayer, gate in enumerate(self.bias_gate)]
        return [*gates, (float((0 * self.bias_query).sum()), ".bias_query")]  # with gates of 0, NaN alone has an effect


class BlockDeltas:
    """The deltas of one forward pass, and how much of each the sublayers of the current block read."""

    def __init__(self, module: AttentionResiduals, query: torch.Tensor, gate: torch.Tensor):
        self.module = module
        self.query, self.gate = query, gate
        self.stream: torch.Tensor | None = None  # at the start of the current block
        self.deltas: list[torch.Tensor] = []  # D_b, (batch, tokens, heads, width)
        self.scores: list[torch.Tensor] = []  # s_ib, (sublayers from the current block on, batch, tokens, heads)
        self.weights: list[torch.Tensor] = []  # g_i a_ib of the current block's layers

    def read(self, layer: int, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What the attention and the MLP of a layer read beside the stream: sum_b g_i a_ib D_b, as the stream's shape.

        Args:
            hidden_states: the stream that the layer reads, `(batch, tokens, hidden_size)`.
        """
        if layer in self.module.blocks:
            self.begin(layer, self.module.blocks[layer], hidden_states)
        attention, mlp = self.weights.pop(0)
        return (
            weighted_sum(self.deltas, attention).view_as(hidden_states),
            weighted_sum(self.deltas, mlp).view_as(hidden_states),
        )

    def begin(self, layer: int, end: int, stream: torch.Tensor) -> None:
        """Adds the delta of the block that ended before `layer`, for the layers from there up to `end`."""
        device = stream.device  # with `device_map`, layers are on several devices
        delta = stream if self.stream is None else stream - self.stream.to(device)
        self.stream = stream
        query = self.query[2 * layer :].to(device)
        dtype = torch.promote_types(delta.dtype, torch.float32)
        with maybe_autocast(device_type=device.type, enabled=False):
            full = delta.to(dtype)
            scale = torch.rsqrt(full.pow(2).mean(-1, keepdim=True) + self.module.epsilon)
            delta = delta.unflatten(-1, (self.module.heads, -1))
            scores = scale * torch.einsum("bthk,shk->sbth", full.view_as(delta), query.to(dtype))
        self.deltas = [*(earlier.to(device) for earlier in self.deltas), delta]
        self.scores = [*(earlier[-len(query) :].to(device) for earlier in self.scores), scores]

        here = 2 * (end - layer)
        read = [scores[:here] for scores in self.scores]
        weights = torch.stack([torch.zeros_like(read[0]), *read], dim=1).softmax(dim=1)[:, 1:]  # 0: the null source
        weights = self.gate[2 * layer : 2 * end].to(weights).view(-1, 1, 1, 1, 1) * weights
        self.weights = list(weights.to(delta.dtype).unsqueeze(-1).split(2))


def _starts(config: ResFormerConfig) -> list[int]:
    """The first layer of each block; sizes differ by 1 at most."""
    blocks = config.attention_residual_blocks
    return [block * config.num_hidden_layers // blocks for block in range(blocks)]


def _flops(config: ResFormerConfig) -> int:
    """4 x hidden_size for each delta that a sublayer reads: its score, and its term of the sum."""
    layers = config.num_hidden_layers
    read = sum(2 * (layers - start) for start in _starts(config)) if config.attention_residuals else 0
    return 4 * config.hidden_size * read


ATTENTION_RESIDUALS = ConnectionKind(
    ("attention_residuals", "attention_residual_blocks", "attention_residual_init"),
    "attention_residuals",
    plain_start=lambda fields: {"attention_residual_init": 0.0} if fields.get("attention_residuals") else {},
    flops=_flops,
)
