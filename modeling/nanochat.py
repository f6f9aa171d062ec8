"""nanochat's decoder as it has been since January 2026, without the connections that it has by then, which are any
family's; the one of October 2025 is Transformers' `NanoChat`.

It is Qwen3's, but for an MLP without a gate, and logits bounded to c tanh(logits / c). From March 2026 on there is a
smear: each token's embedding takes some of that of the token before it,

    X_0[t] = x_t + l sigmoid(W x_t[:24]) x_{t-1}

x are the embeddings; what is called X_0 elsewhere has been smeared. The first token of a sequence has none before it.
l, a scalar, and W, one gate for all channels, start at 0, which is no smear.

Decoding needs the token before the current ones. A cache holds the tokens' numbers, 8 bytes each, in one layer more, so
that beams, crops, copies and static caches treat them as they treat keys.
"""

import functools
import inspect
from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3Model,
    Qwen3PreTrainedModel,
)
from transformers import initialization as init
from transformers.cache_utils import Cache, DynamicCache, StaticLayer
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.arcee.modeling_arcee import ArceeMLP
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults

from resformer.configuration.connection_fields import positive_number
from resformer.modeling.connection import StartsAsStated, Undecayed, coefficient
from resformer.modeling.connections.value_residual import GateProjection
from resformer.modeling.families import known_to_transformers, named_in_transformers
from resformer.modeling.growing_cache import GrowingLayer
from resformer.modeling.versions import CACHE

#: Of Qwen3's forward, in their order.
_ARGUMENTS = tuple(inspect.signature(Qwen3ForCausalLM.forward).parameters)[1:]

_NOT_KEPT = (
    "`smear` reads the embedding of the token before, which vLLM and continuous batching do not keep: use generate(), "
    "or `resformer serve MODEL`."
)


@strict
class Nanochat2026Config(Qwen3Config):
    """[`~transformers.Qwen3Config`] with two fields more; the defaults are those of nanochat's d12 without windows.

    Args:
        final_logit_softcapping (`float`, defaults to 15.0):
            The bound c of the logits, above 0.
        smear (`bool`, defaults to `False`):
            Whether there is a smear. The model then needs `input_ids`.
    """

    model_type = "nanochat_2026"
    base_model_tp_plan = {name: how for name, how in Qwen3Config.base_model_tp_plan.items() if "gate" not in name}

    vocab_size: int = 32768
    hidden_size: int = 768
    intermediate_size: int = 3072
    num_hidden_layers: int = 12
    num_attention_heads: int = 6
    num_key_value_heads: int | None = 6
    hidden_act: str = "relu2"
    max_position_embeddings: int = 2048
    rms_norm_eps: float = torch.finfo(torch.float32).eps
    use_sliding_window: bool = True
    sliding_window: int | None = None
    mlp_bias: bool = False
    final_logit_softcapping: int | float = positive_number(default=15.0)
    smear: bool = False


class Smear(StartsAsStated, Undecayed):
    """The l and W of the decoder, in float32 in a model of lower precision too."""

    def __init__(self, config: Nanochat2026Config):
        nn.Module.__init__(self)
        self.channels = min(24, config.hidden_size)
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


class Nanochat2026PreTrainedModel(Qwen3PreTrainedModel):
    """What both are."""

    config: Nanochat2026Config
    config_class = Nanochat2026Config
    _keep_in_fp32_modules_strict = ["smear"]
    _keep_in_fp32_modules = ["smear.gate", ".*smear.gate"]  # quantisers leave these linear layers alone

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, StartsAsStated):
            module.reset_parameters()


class Nanochat2026Model(Nanochat2026PreTrainedModel, Qwen3Model):
    """The decoder without a head.

    Raises:
        ValueError: there is a smear, and the tokens, or those before them, are not known.
    """

    def __init__(self, config: Nanochat2026Config):
        super().__init__(config)
        for layer in self.layers:
            layer.mlp = ArceeMLP(config)
        if config.smear:
            if str(config._attn_implementation).startswith(("vllm", "paged")):
                raise ValueError(_NOT_KEPT)
            self.smear = Smear(config)
        self.post_init()

    @merge_with_config_defaults
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: Any = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """As [`~transformers.Qwen3Model`]."""
        cache = kwargs.pop(CACHE, past_key_values)
        if self.config.smear and (input_ids is None) != (inputs_embeds is None):
            if input_ids is None:
                raise ValueError(
                    "`smear` reads the tokens before, which `inputs_embeds` does not name: pass `input_ids` instead "
                    "(soft prompts are not supported)."
                )
            packed = position_ids is not None and cache is None and not isinstance(attention_mask, torch.Tensor)
            if use_cache and cache is None:
                cache = DynamicCache(config=self.config)
            inputs_embeds = self.smeared(input_ids, position_ids, attention_mask, cache, packed)
            input_ids = None
        return super().forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **{CACHE: cache},
            **kwargs,
        )

    def smeared(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor | None, attention_mask: Any, cache: Any, packed: bool
    ) -> torch.Tensor:
        """Returns X_0 of the current tokens, whose numbers it adds to the cache.

        Args:
            attention_mask: 0 for padding, `(batch, tokens so far)`; others name no padding, which positions of 0 end.
            packed: a token whose position is not the one before it plus 1 begins a sequence.
        """
        past, last = _recall(cache, self.config.num_hidden_layers, input_ids)
        embeddings, before = self.embed_tokens(input_ids), self.embed_tokens(last)
        index = torch.arange(input_ids.shape[1], device=input_ids.device) + past
        follows = (index > 0).unsqueeze(0)
        if position_ids is not None:
            follows = follows & (position_ids > 0)
        if isinstance(attention_mask, torch.Tensor) and attention_mask.dim() == 2:
            follows = follows & nn.functional.pad(attention_mask, (1, 0)).index_select(1, index).bool()
        if packed:
            follows = follows & nn.functional.pad(position_ids.diff() == 1, (1, 0))
        return self.smear(embeddings, torch.cat([before, embeddings[:, :-1]], dim=1), follows)


class Nanochat2026ForCausalLM(Nanochat2026PreTrainedModel, Qwen3ForCausalLM):
    """The decoder with a language modelling head."""

    def __init__(self, config: Nanochat2026Config):
        super(Qwen3ForCausalLM, self).__init__(config)
        self.model = Nanochat2026Model(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    @functools.wraps(Qwen3ForCausalLM.forward)  # its signature is read
    def forward(self, *args: Any, **kwargs: Any) -> CausalLMOutputWithPast:
        kwargs = {**dict(zip(_ARGUMENTS, args, strict=False)), **kwargs, "return_dict": True}
        labels, bound = kwargs.pop("labels", None), self.config.final_logit_softcapping
        output = Qwen3ForCausalLM.forward(self, **kwargs)
        output.logits = bound * torch.tanh(output.logits.float() / bound)
        if labels is not None:
            loss = self.loss_function(logits=output.logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
            output = CausalLMOutputWithPast(loss=loss, **output)  # made anew: as a tuple, the loss is first
        return output

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        if self.config.smear:
            raise ValueError(_NOT_KEPT)
        return super().init_continuous_batching(*args, **kwargs)


def _recall(cache: Any, layers: int, input_ids: torch.Tensor) -> tuple[Any, torch.Tensor]:
    """(the number of past tokens, the last of them, `(batch, 1)`, or any if there are none); adds the current ones."""
    if cache is None:
        return 0, input_ids[:, :1]
    if not isinstance(cache, Cache):
        raise ValueError(_NOT_KEPT)
    new = input_ids[:, None, :, None]  # as keys: (batch, heads, tokens, head_dim)
    layer: Any = _tokens_layer(cache, layers)
    if isinstance(layer, StaticLayer):
        if not layer.is_initialized:
            layer.lazy_initialization(new, new[..., :0])
        past = layer.cumulative_length.clone()
        last = layer.keys.index_select(2, (past - 1).clamp(min=0).view(1))
    else:
        past = layer.keys.shape[-2] if layer.is_initialized else 0
        last = layer.keys[..., -1:, :] if past else new[..., :1, :]
    layer.update(new, new[..., :0])
    return past, last.reshape(-1, 1)


def _tokens_layer(cache: Cache, layers: int) -> Any:
    """The layer with the tokens' numbers, behind those of the decoder's `layers`; put there if it is not."""
    while len(cache.layers) < layers:  # made without a configuration
        cache.layers.append(cache.layer_class_to_replicate())
    last: Any = cache.layers[-1]
    if getattr(getattr(last, "keys", None), "dtype", None) == torch.long:
        return last
    if isinstance(last, StaticLayer):
        if all(layer.is_sliding for layer in cache.layers):
            raise ValueError("`smear` needs a layer with full attention in a static cache: use another one.")
        layer: Any = StaticLayer(max(each.max_cache_len for each in cache.layers))
    else:
        layer = GrowingLayer()
    cache.layers.append(layer)
    return layer


AutoConfig.register(Nanochat2026Config.model_type, named_in_transformers(Nanochat2026Config), exist_ok=True)
AutoModel.register(Nanochat2026Config, known_to_transformers(Nanochat2026Model, Qwen3Model), exist_ok=True)
AutoModelForCausalLM.register(
    Nanochat2026Config, known_to_transformers(Nanochat2026ForCausalLM, Qwen3ForCausalLM), exist_ok=True
)
