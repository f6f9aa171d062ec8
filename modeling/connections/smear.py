r"""Smear: each token's embedding takes some of that of the token before it; nanochat.

    X_0[t] = x_t + l sigmoid(W x_t[:24]) x_{t-1}

x are the embeddings; what is called X_0 elsewhere has been smeared. The first token of a sequence has none before it.
l, a scalar, and W, one gate for all channels, start at 0, which is plain Llama.

Decoding needs the token before the current ones. A cache holds the tokens' numbers, 8 bytes each, in one layer more, so
that beams, crops, copies and static caches treat them as they treat keys.
"""

from typing import Any

import torch
from torch import nn
from transformers import initialization as init
from transformers.cache_utils import Cache, StaticLayer

from resformer.modeling.connection import Added, Connection, coefficient
from resformer.modeling.connections.value_residual import GateProjection
from resformer.modeling.growing_cache import GrowingLayer

GATE_CHANNELS = 24


class Smear(Connection):
    """The l and W of the decoder."""

    name = "smear"
    fields = ("smear",)
    has_modules = False

    def __init__(self, config: Any, layer: int = 0):
        super().__init__(config, layer)
        self.channels = min(GATE_CHANNELS, config.hidden_size)
        self.gate = GateProjection(self.channels, 1)  # W
        self.weight = coefficient(1)  # l

    def forward(self, embeddings: torch.Tensor, previous: torch.Tensor, follows: torch.Tensor) -> torch.Tensor:
        """Returns X_0.

        Args:
            embeddings, previous: of the tokens, and of those before them, `(batch, tokens, hidden_size)`.
            follows: whether a token has one before it, `(batch or 1, tokens)`.
        """
        gate = self.weight.to(embeddings.dtype) * torch.sigmoid(self.gate(embeddings[..., : self.channels]))
        return torch.addcmul(embeddings, previous, gate * follows.unsqueeze(-1))

    def reset_parameters(self) -> None:
        init.zeros_(self.weight)

    @torch.no_grad()
    def deviations(self) -> list[tuple[float, str]]:
        return [(abs(float(self.weight)), ".weight"), (float((0 * self.gate.weight).sum()), ".gate")]

    @classmethod
    def layers(cls, config: Any) -> list[int]:
        return []

    @classmethod
    def of_decoder(cls, config: Any) -> Added | None:
        return cls(config) if config.smear else None

    @classmethod
    def flops(cls, config: Any) -> int:
        return 2 * (config.hidden_size + GATE_CHANNELS) if config.smear else 0


def smeared(
    decoder: Any,
    embeddings: torch.Tensor,
    input_ids: torch.Tensor,
    position_ids: torch.Tensor,
    attention_mask: Any,
    cache: Any,
    packed: bool,
) -> torch.Tensor:
    """Returns X_0 of the current tokens, whose numbers it adds to the cache.

    Args:
        decoder: has the smear.
        attention_mask: 0 for padding, `(batch, tokens so far)`; others name no padding, which positions of 0 end.
        packed: a token whose position is not the one before it plus 1 begins a sequence.
    """
    tokens = input_ids.shape[1]
    past, last = _recall(cache, decoder.config.num_hidden_layers, input_ids)
    previous = torch.cat([decoder.embed_tokens(last), embeddings[:, :-1]], dim=1)
    index = torch.arange(tokens, device=input_ids.device) + past
    follows = (index > 0) & (position_ids > 0)
    if isinstance(attention_mask, torch.Tensor) and attention_mask.dim() == 2:
        follows = follows & nn.functional.pad(attention_mask, (1, 0)).index_select(1, index).bool()
    if packed:
        follows = follows & nn.functional.pad(position_ids.diff() == 1, (1, 0))
    return decoder.smear(embeddings, previous, follows)


def _recall(cache: Any, layers: int, input_ids: torch.Tensor) -> tuple[Any, torch.Tensor]:
    """(the number of past tokens, the last of them, `(batch, 1)`, or any if there are none); adds the current ones."""
    if cache is None:
        return 0, input_ids[:, :1]
    if not isinstance(cache, Cache):
        raise ValueError("`smear` reads the token before, which continuous batching does not keep: use generate().")
    new = input_ids[:, None, :, None]  # as keys: (batch, heads, tokens, head_dim)
    layer: Any = _tokens_layer(cache, layers)
    if not layer.is_initialized:
        layer.lazy_initialization(new, new[..., :0])
        if isinstance(layer, GrowingLayer):
            layer.keys, layer.values = new[..., :0, :], new[..., :0, :0]
    if isinstance(layer, StaticLayer):
        past = layer.cumulative_length.clone()
        last = layer.keys.index_select(2, (past - 1).clamp(min=0).view(1))
    else:
        past = layer.keys.shape[-2]
        last = layer.keys[..., -1:, :] if past else new[..., :1, :]
    layer.update(new, new[..., :0])
    return past, last.reshape(-1, 1)


def _tokens_layer(cache: Cache, layers: int) -> Any:
    """The layer with the tokens' numbers, behind those of the decoder's `layers`; put there if it is not."""
    while len(cache.layers) < layers:  # made without a configuration
        cache.layers.append(cache.layer_class_to_replicate())
    last: Any = cache.layers[-1]
    if getattr(last, "holds_tokens", False) or (last.is_initialized and not last.keys.is_floating_point()):
        return last
    if isinstance(last, StaticLayer):
        if all(layer.is_sliding for layer in cache.layers):
            raise ValueError("`smear` needs a layer with full attention in a static cache: use another one.")
        layer: Any = StaticLayer(max(each.max_cache_len for each in cache.layers))
    else:
        layer = GrowingLayer()
    layer.holds_tokens = True
    cache.layers.append(layer)
    return layer
