"""Llama's decoder, whose layers may share keys and values, with connections at the places of `connection.py`."""

import copy
import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import AutoModel
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation import GenerationConfig, GenerationMixin
from transformers.integrations import use_kernelized_func
from transformers.masking_utils import LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING
from transformers.modeling_layers import (
    GenericForQuestionAnswering,
    GenericForSequenceClassification,
    GenericForTokenClassification,
    GradientCheckpointingLayer,
)
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
from transformers.models.arcee.modeling_arcee import ArceeMLP
from transformers.models.llama.modeling_llama import (
    LlamaForCausalLM,
    LlamaMLP,
    LlamaPreTrainedModel,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
    eager_attention_forward,
)
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from resformer.configuration import ResFormerConfig, key_sources, value_sources
from resformer.modeling.connected import (
    ConnectedLayer,
    ConnectedModel,
    ForwardPass,
    Places,
    Wiring,
    depth_matrix,
    modules_of,
    value_matrix,
)
from resformer.modeling.connection import kinds_in
from resformer.modeling.connections.sharing import update_cache
from resformer.modeling.connections.smear import smeared
from resformer.modeling.growing_cache import GrowingCache
from resformer.modeling.versions import CACHE, record_rejected_tokens

__all__ = [
    "ResFormerForCausalLM",
    "ResFormerForQuestionAnswering",
    "ResFormerForSequenceClassification",
    "ResFormerForTokenClassification",
    "ResFormerModel",
    "ResFormerPreTrainedModel",
]


@use_kernelized_func(apply_rotary_pos_emb)
class ResFormerAttention(nn.Module):
    """A layer that reads another's keys has no `k_proj`, one that reads another's values no `v_proj`."""

    def __init__(self, config: ResFormerConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx  # in a cache
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = self.head_dim**-0.5
        self.attention_dropout = config.attention_dropout
        self.is_causal = True
        # Copied: attributes of a configuration are slow to read, and decoding reads them for every token and layer.
        # Booleans, not numbers of layers: torch.compile makes one graph for all layers that have the same.
        self.has_keys = key_sources(config)[layer_idx] == layer_idx
        self.has_values = value_sources(config)[layer_idx] == layer_idx
        self.qk_norm = config.qk_norm
        self.use_rope = config.no_rope_layers is None or bool(config.no_rope_layers[layer_idx])
        sliding = config.layer_types[layer_idx] == "sliding_attention"
        self.sliding_window = config.sliding_window if sliding else None

        query_width = config.num_attention_heads * self.head_dim
        key_value_width = config.num_key_value_heads * self.head_dim
        out_bias = config.attention_bias if config.attention_out_bias is None else config.attention_out_bias
        self.q_proj = nn.Linear(config.hidden_size, query_width, bias=config.attention_bias)
        if config.qk_norm:
            self.q_norm = LlamaRMSNorm(self.head_dim, eps=config.rms_norm_eps)
        if self.has_keys:
            self.k_proj = nn.Linear(config.hidden_size, key_value_width, bias=config.attention_bias)
            if config.qk_norm:
                self.k_norm = LlamaRMSNorm(self.head_dim, eps=config.rms_norm_eps)
        if self.has_values:
            self.v_proj = nn.Linear(config.hidden_size, key_value_width, bias=config.attention_bias)
        self.o_proj = nn.Linear(query_width, config.hidden_size, bias=out_bias)

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        places: Places,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns the output, `(batch, tokens, hidden_size)`, and the attention weights."""
        input_shape = hidden_states.shape[:-1]
        head_shape = (*input_shape, -1, self.head_dim)
        tensors = places.tensors

        queries = self.q_proj(hidden_states).view(head_shape)
        if self.qk_norm:
            queries = self.q_norm(queries)
        query_states = queries.transpose(1, 2)

        key_states = value_states = None
        if self.has_keys:
            keys = self.k_proj(hidden_states).view(head_shape)
            if self.qk_norm:
                keys = self.k_norm(keys)
            tensors["keys"] = keys
            key_states = keys.transpose(1, 2)
        if self.has_values:
            values = self.v_proj(hidden_states).view(head_shape)
            tensors["hidden_states"], tensors["queries"] = hidden_states, queries
            values = places("raw_values", values)
            value_states = places("mixed_values", values).transpose(1, 2)

        if self.use_rope:
            cos, sin = position_embeddings
            if self.has_keys:
                query_states, key_states = apply_rotary_pos_emb(query_states, key_states, cos, sin)
            else:
                query_states, _ = apply_rotary_pos_emb(query_states, query_states[:, :1], cos, sin)

        key_states, value_states = update_cache(
            past_key_values,
            self.layer_idx,
            key_states,
            value_states,
            None if self.has_keys else tensors["shared_keys"],
            None if self.has_values else tensors["shared_values"],
            kwargs,
        )
        tensors["attended_keys"], tensors["attended_values"] = key_states, value_states

        attention_interface: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        attn_output, attn_weights = attention_interface(
            self,
            query_states,
            key_states,
            value_states,
            attention_mask,
            dropout=0.0 if not self.training else self.attention_dropout,
            scaling=self.scaling,
            sliding_window=self.sliding_window,
            **kwargs,
        )
        attn_output = places("attention_output", attn_output.reshape(head_shape))
        return self.o_proj(attn_output.reshape(*input_shape, -1).contiguous()), attn_weights


class ResFormerDecoderLayer(ConnectedLayer, GradientCheckpointingLayer):
    def __init__(self, config: ResFormerConfig, layer_idx: int, wiring: Wiring | None = None):
        super().__init__()
        self.attention_type = config.layer_types[layer_idx]
        self.self_attn = ResFormerAttention(config, layer_idx)
        self.mlp = LlamaMLP(config) if config.gated_mlp else ArceeMLP(config)  # without a gate, under Llama's names
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.add_connections(wiring or Wiring(config), layer_idx)

    def forward(
        self,
        hidden_states: torch.Tensor,
        earlier: dict[str, Any] | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Returns X_{n+1} and what later layers read.

        Args:
            earlier: what the layer reads of earlier ones.
            kwargs: of `ResFormerAttention.forward`.
        """
        places = Places(self, earlier)
        hidden_states = places("layer_input", hidden_states)
        cache = kwargs.pop(CACHE, None)
        residual = hidden_states
        hidden_states, _ = self.self_attn(
            self.input_layernorm(places("attention_input", hidden_states)),
            places=places,
            past_key_values=kwargs.pop("past_key_values", None) if cache is None else cache,
            **kwargs,
        )
        hidden_states = residual + hidden_states
        residual = hidden_states
        hidden_states = self.mlp(self.post_attention_layernorm(places("mlp_input", hidden_states)))
        return residual + hidden_states, places.returned()


class ResFormerPreTrainedModel(ConnectedModel, LlamaPreTrainedModel):
    config: ResFormerConfig
    config_class = ResFormerConfig
    _no_split_modules = ["ResFormerDecoderLayer"]
    _can_record_outputs = {"hidden_states": ResFormerDecoderLayer, "attentions": ResFormerAttention}

    def __init__(self, config: ResFormerConfig, *args: Any, **kwargs: Any):
        super().__init__(config, *args, **kwargs)
        # In a bundle (remote code), AutoConfig loads its own copy of the configuration class. The heads of Transformers
        # build the decoder by `AutoModel.from_config`, which must know that copy too.
        if type(config).__name__ == ResFormerConfig.__name__ and type(config) not in AutoModel._model_mapping:
            AutoModel.register(type(config), ResFormerModel)


class ResFormerModel(ResFormerPreTrainedModel):
    """The decoder without a head.

    `hidden_states` asked for with `output_hidden_states=True` are the raw X_0 .. X_{N-1}, before depth-weighted
    averaging, and the normed output last. The first is what layer 0 reads: with `embedding_residual`, (r_0 + s_0) X_0.
    """

    def __init__(self, config: ResFormerConfig):
        config.validate()  # fields may have been assigned since it was made
        super().__init__(config)
        self.padding_idx = config.pad_token_id
        self.vocab_size = config.vocab_size

        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, self.padding_idx)
        wiring = Wiring(config)
        self.layers = nn.ModuleList(
            [ResFormerDecoderLayer(config, layer_idx, wiring) for layer_idx in range(config.num_hidden_layers)]
        )
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = LlamaRotaryEmbedding(config=config)
        for kind in kinds_in(config):
            if (module := kind.of_decoder(config)) is not None:
                self.add_module(kind.name, module)
        self.gradient_checkpointing = False
        self.keep_full_precision()
        self.post_init()

    def init_parallel_plans(self) -> None:
        super().init_parallel_plans()
        for kind in kinds_in(self.config):
            self._tp_plan |= kind.tp_plan(self.config)

    def value_mixing_matrix(self) -> torch.Tensor:
        """M, `(N, N)`: layer n attends to V' = sum_m M[n, m] V_m of the raw values V_m.

        float32, detached, on the CPU; lower triangular; the identity for plain Llama. The row of a layer that shares
        values is its source's. NaN where the mix depends on the token (`"gated"`, `"depth_attention"`).
        """
        of_decoder = getattr(self, "value_residual", None)
        return value_matrix(self.config, modules_of(self.layers, "value_residual"), of_decoder)

    def depth_mixing_matrix(self) -> torch.Tensor:
        """D, `(N, N + 1)`: block n + 1, or the final norm, reads Y_n = sum_j D[n, j] X_j.

        X_0 are the embeddings, X_{j+1} the raw output of block j. float32, detached, on the CPU; D[n, n+1] = 1 and 0
        elsewhere for plain Llama.
        """
        return depth_matrix(self.config, modules_of(self.layers, "depth_average"))

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | dict[str, torch.Tensor | None] | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPast:
        """As [`~transformers.LlamaModel`].

        Without an `attention_mask` and `past_key_values`, a token whose position is not the one before it plus 1 begins
        a packed sequence, which is kept apart; whether a cache is made does not matter, as it does for Llama. For
        positions with gaps within one sequence give an `attention_mask` of ones.
        """
        past_key_values = kwargs.pop(CACHE, past_key_values)  # `cache` is its name from Transformers 5.24 on
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("You must specify exactly one of input_ids or inputs_embeds")
        if input_ids is None and (self.config.value_embeddings or self.config.smear):
            field = "value_embeddings" if self.config.value_embeddings else "smear"
            raise ValueError(
                f"`{field}`={getattr(self.config, field)} looks up rows of tokens, which `inputs_embeds` "
                "does not name: pass `input_ids` instead (soft prompts are not supported)."
            )
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)

        # Masks are made before the cache: Transformers detects packed sequences only without a cache, and an empty
        # cache does not change a mask. Only positions given by the caller can be packed.
        masks = attention_mask
        if not isinstance(masks, dict):
            masks = {
                kind: LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING[kind](
                    config=self.config,
                    inputs_embeds=inputs_embeds,
                    attention_mask=attention_mask,
                    position_ids=position_ids,
                    **{CACHE: past_key_values},
                )
                for kind in dict.fromkeys(self.config.layer_types)
            }
        packed = position_ids is not None and past_key_values is None and attention_mask is None
        if use_cache and past_key_values is None:
            # Compilers and exporters know `DynamicCache`; in a graph, growing in place gains nothing.
            new_cache = DynamicCache if torch.compiler.is_compiling() else GrowingCache
            past_key_values = new_cache(config=self.config)
        if position_ids is None:
            past_seen_tokens = past_key_values.get_seq_length() if past_key_values is not None else 0
            position_ids = torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device) + past_seen_tokens
            position_ids = position_ids.unsqueeze(0)

        hidden_states = inputs_embeds
        if self.config.smear:
            hidden_states = smeared(
                self, inputs_embeds, input_ids, position_ids, attention_mask, past_key_values, packed
            )
        position_embeddings = self.rotary_emb(hidden_states, position_ids=position_ids)
        layers: Any = self.layers[: self.config.num_hidden_layers]  # fewer while `assistant_early_exit` drafts
        if not all(hasattr(layer, "layer_idx") for layer in layers):  # placeholders for layers of other stages
            raise NotImplementedError("Pipeline parallelism is not supported. Use tensor parallelism or FSDP2.")
        forward_pass = ForwardPass(layers, self, input_ids)
        for layer in layers:
            hidden_states = layer(
                hidden_states,
                forward_pass=forward_pass,
                attention_mask=masks[layer.attention_type],
                position_embeddings=position_embeddings,
                position_ids=position_ids,
                use_cache=use_cache,
                **{CACHE: past_key_values},
                **kwargs,
            )

        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden_states), **{CACHE: past_key_values})


#: Of Llama's forward, in their order.
_ARGUMENTS = tuple(inspect.signature(LlamaForCausalLM.forward).parameters)[1:]


class ResFormerForCausalLM(ResFormerPreTrainedModel, GenerationMixin):
    """The decoder with a language modelling head.

    ```python
    >>> from transformers import AutoModelForCausalLM, AutoTokenizer
    >>> import resformer

    >>> model = AutoModelForCausalLM.from_pretrained("path/to/a-resformer-checkpoint")
    ```"""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}
    _fsdp_plan = {"lm_head": "keep_full_weight"}

    def __init__(self, config: ResFormerConfig):
        super().__init__(config)
        self.model = ResFormerModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

        self.post_init()

    @can_return_tuple
    @functools.wraps(LlamaForCausalLM.forward)  # its signature is read
    def forward(self, *args: Any, **kwargs: Any) -> CausalLMOutputWithPast:
        bound = self.config.final_logit_softcapping
        if bound is None:
            return LlamaForCausalLM.forward(self, *args, **kwargs)
        kwargs = {**dict(zip(_ARGUMENTS, args, strict=False)), **kwargs, "return_dict": True}
        labels = kwargs.pop("labels", None)
        output = LlamaForCausalLM.forward(self, **kwargs)
        output.logits = bound * torch.tanh(output.logits.float() / bound)
        if labels is not None:
            loss = self.loss_function(logits=output.logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
            output = CausalLMOutputWithPast(loss=loss, **output)  # made anew: as a tuple, the loss is first
        return output

    def _prepare_cache_for_generation(
        self, generation_config: GenerationConfig, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        config, cache = self.config, model_kwargs.get(CACHE)
        if generation_config.cache_implementation == "quantized":
            # Transformers refuses layers that store nothing. Here they are never updated.
            storing = copy.copy(config)
            storing.key_sources = None
            generation_config.cache_config = {"config": storing, **(generation_config.cache_config or {})}
        is_chosen_by_caller = cache is not None or generation_config.cache_implementation is not None
        super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)
        if not is_chosen_by_caller and type(model_kwargs.get(CACHE)) is DynamicCache:
            model_kwargs[CACHE] = cache = GrowingCache(config)
            if generation_config.is_assistant:  # rejected tokens are cropped
                record_rejected_tokens(cache)

    def _get_static_cache_init_shape(self) -> tuple[int | list[int], int | list[int]] | None:
        # Early allocation would give full-size memory to layers that share keys or values.
        if self.config.key_sources is not None or self.config.value_sources is not None:
            return None
        return super()._get_static_cache_init_shape()


_loss_of_task = PreTrainedModel.loss_function.fget  # by this name: torch.compile refuses super() of a property


class _WholeStepLoss:
    """Of a step of several passes, the Trainer adds up the losses of all: each is divided by the labels of the step.

    The generic heads leave `num_items_in_batch` out, and the gradient would be as many times too large.
    """

    _items: torch.Tensor | int | None = None

    @PreTrainedModel.loss_function.getter  # the setter stays: a user may give a loss of their own
    def loss_function(self) -> Callable[..., torch.Tensor]:
        mean, items = _loss_of_task(self), self._items

        def loss(*given: Any, **named: Any) -> torch.Tensor:
            labels = named["labels"] if "labels" in named else given[1]
            value: torch.Tensor = mean(*given, **named)
            return value if items is None else value * labels.ne(-100).sum() / items

        return loss

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        forward = cls.forward  # type: ignore[attr-defined]

        @functools.wraps(forward)  # the Trainer reads the names of the arguments
        def counted(self: Any, *given: Any, num_items_in_batch: Any = None, **named: Any) -> Any:
            self._items = num_items_in_batch
            return forward(self, *given, **named)

        cls.forward = counted  # type: ignore[attr-defined]


class ResFormerForSequenceClassification(_WholeStepLoss, GenericForSequenceClassification, ResFormerPreTrainedModel):
    """The decoder with a classifier on the last token that is not padding."""


class ResFormerForTokenClassification(_WholeStepLoss, GenericForTokenClassification, ResFormerPreTrainedModel):
    """The decoder with a classifier on every token."""


class ResFormerForQuestionAnswering(GenericForQuestionAnswering, ResFormerPreTrainedModel):
    """The decoder with start and end logits on every token."""
