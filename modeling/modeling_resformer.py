"""Llama's decoder with connections between layers.

Tensors that cross layers are positional arguments and come back in a tuple: reentrant gradient checkpointing tracks no
others, and Accelerate's device hooks move them.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import AutoModel
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation import GenerationConfig, GenerationMixin
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_layers import (
    GenericForQuestionAnswering,
    GenericForSequenceClassification,
    GenericForTokenClassification,
    GradientCheckpointingLayer,
)
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel, slice_logits_to_keep
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
    eager_attention_forward,
)
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, can_return_tuple
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from resformer.configuration import ResFormerConfig, key_sources, value_sources
from resformer.modeling.attention_residuals import add_deltas, attention_residuals
from resformer.modeling.connection import Connection, Crossing
from resformer.modeling.depth_attention import depth_values
from resformer.modeling.depth_average import depth_average
from resformer.modeling.growing_cache import GrowingCache
from resformer.modeling.mixing import mixing_matrix, weighted_sum
from resformer.modeling.neutreno import neutreno_term
from resformer.modeling.sharing import update_cache
from resformer.modeling.value_embedding import ValueEmbedding, ValueTable
from resformer.modeling.value_residual import ValueGate, mixed_layers, mixed_states, value_residual
from resformer.modeling.wiring import KINDS, LayerWiring, wire

__all__ = [
    "ResFormerForCausalLM",
    "ResFormerForQuestionAnswering",
    "ResFormerForSequenceClassification",
    "ResFormerForTokenClassification",
    "ResFormerModel",
    "ResFormerPreTrainedModel",
]

MASKS: dict[str, Callable[..., Any]] = {
    "full_attention": create_causal_mask,
    "sliding_attention": create_sliding_window_causal_mask,
}


class ResFormerAttention(nn.Module):
    """Multi-head attention, whose keys may be another layer's, and whose values may be mixed or another layer's.

    A layer that reads another's keys has no `k_proj`, one that reads another's values no `v_proj`.
    """

    def __init__(self, config: ResFormerConfig, layer_idx: int, wiring: LayerWiring):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.wiring = wiring
        self.key_source = key_sources(config)[layer_idx]
        self.value_source = value_sources(config)[layer_idx]
        mixed = mixed_layers(config).get(layer_idx, [])
        self.mixes = mixed[:-1]  # earlier layers whose values it mixes with its own
        self.mixed_states = mixed_states(config)
        self.mixed_keys = [key_sources(config)[layer] for layer in mixed]  # the layers that make their keys
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = self.head_dim**-0.5
        self.attention_dropout = config.attention_dropout
        self.is_causal = True
        # Copied: attributes of a configuration are slow to read, and decoding reads them for every token and layer.
        self.qk_norm = config.qk_norm
        self.gated = config.value_residual == "gated"
        self.attends_over_depth = config.value_residual == "depth_attention"
        self.neutreno_lambda = config.neutreno_lambda
        self.use_rope = config.no_rope_layers is None or bool(config.no_rope_layers[layer_idx])
        sliding = config.layer_types[layer_idx] == "sliding_attention"
        self.sliding_window = config.sliding_window if sliding else None

        query_width = config.num_attention_heads * self.head_dim
        key_value_width = config.num_key_value_heads * self.head_dim
        out_bias = config.attention_bias if config.attention_out_bias is None else config.attention_out_bias
        self.q_proj = nn.Linear(config.hidden_size, query_width, bias=config.attention_bias)
        if config.qk_norm:
            self.q_norm = LlamaRMSNorm(self.head_dim, eps=config.rms_norm_eps)
        if self.key_source == layer_idx:
            self.k_proj = nn.Linear(config.hidden_size, key_value_width, bias=config.attention_bias)
            if config.qk_norm:
                self.k_norm = LlamaRMSNorm(self.head_dim, eps=config.rms_norm_eps)
        if self.value_source == layer_idx:
            self.v_proj = nn.Linear(config.hidden_size, key_value_width, bias=config.attention_bias)
        self.embeds_values = layer_idx in (config.value_embeddings or ())
        if self.embeds_values:
            self.value_embedding = ValueEmbedding(config)
        if self.gated and self.mixes:
            self.value_residual = ValueGate(config)
        self.o_proj = nn.Linear(query_width, config.hidden_size, bias=out_bias)

    def forward(
        self,
        hidden_states: torch.Tensor,
        *crossing: Any,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> tuple[torch.Tensor | None, ...]:
        """Returns (output, attention weights, *what later layers read of this one, `wiring.gives`).

        Args:
            hidden_states: H_n, `(batch, tokens, hidden_size)`.
            crossing: `wiring.reads`, by name and layer m:

                * `input_ids`: of the current tokens, `(batch, tokens)`;
                * `mixing_weights`: the row of layer m = n in the value mixing matrix;
                * `raw_values`, `current_values`, `current_keys`: V_m, V'_m and K_m of the current tokens, the keys
                  before the rotary embedding, `(batch, key/value heads, tokens, head_dim)`;
                * `keys`, `values`: those that layer m attends to, past tokens included.
        """
        read = dict(zip(self.wiring.reads, crossing, strict=True))
        input_shape = hidden_states.shape[:-1]
        head_shape = (*input_shape, -1, self.head_dim)

        query_states = self.q_proj(hidden_states).view(head_shape)
        if self.qk_norm:
            query_states = self.q_norm(query_states)
        query_states = query_states.transpose(1, 2)

        key_states = None
        if self.key_source == self.layer_idx:
            key_states = self.k_proj(hidden_states).view(head_shape)
            if self.qk_norm:
                key_states = self.k_norm(key_states)
            key_states = key_states.transpose(1, 2)
        current_keys = key_states

        raw_values = value_states = None
        if self.value_source == self.layer_idx:
            raw_values = value_states = self.v_proj(hidden_states).view(head_shape).transpose(1, 2)
            if self.embeds_values:
                input_ids = read["input_ids", self.layer_idx]
                raw_values = value_states = self.value_embedding(hidden_states, input_ids, raw_values)
            if self.mixes:
                # V'_n = l1 V_0 + l2 V_n
                terms = [*(read[self.mixed_states, earlier] for earlier in self.mixes), raw_values]
                weights = read["mixing_weights", self.layer_idx]
                if self.gated:
                    value_states = self.value_residual(hidden_states, *terms, weights)
                elif self.attends_over_depth:
                    mixed_keys = [read.get(("current_keys", source), current_keys) for source in self.mixed_keys]
                    value_states = depth_values(query_states, mixed_keys, terms, weights)
                else:
                    value_states = weighted_sum(terms, weights)

        if self.use_rope:
            cos, sin = position_embeddings
            if key_states is None:
                query_states, _ = apply_rotary_pos_emb(query_states, query_states[:, :1], cos, sin)
            else:
                query_states, key_states = apply_rotary_pos_emb(query_states, key_states, cos, sin)

        shared = read.get(("keys", self.key_source)), read.get(("values", self.value_source))
        keys, values = update_cache(past_key_values, self.layer_idx, (key_states, value_states), shared)

        attention_interface: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        attn_output, attn_weights = attention_interface(
            self,
            query_states,
            keys,
            values,
            attention_mask,
            dropout=0.0 if not self.training else self.attention_dropout,
            scaling=self.scaling,
            sliding_window=self.sliding_window,
            **kwargs,
        )
        if self.neutreno_lambda and self.layer_idx > 0:
            current = read["current_values", self.value_source] if value_states is None else value_states
            attn_output = neutreno_term(
                attn_output.reshape(head_shape), read["raw_values", 0], current, self.neutreno_lambda
            )
        attn_output = self.o_proj(attn_output.reshape(*input_shape, -1).contiguous())
        given = {
            "raw_values": raw_values,
            "current_values": value_states,
            "current_keys": current_keys,
            "keys": keys,
            "values": values,
        }
        return attn_output, attn_weights, *[given[name] for name in self.wiring.gives]


class ResFormerDecoderLayer(GradientCheckpointingLayer):
    def __init__(self, config: ResFormerConfig, layer_idx: int, wiring: LayerWiring):
        super().__init__()
        self.self_attn = ResFormerAttention(config, layer_idx, wiring)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self,
        hidden_states: torch.Tensor,
        *crossing: Any,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = False,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> tuple[torch.Tensor | None, ...]:
        """Returns X_{n+1} and what later layers read.

        Args:
            crossing: what the attention reads, then what `add_deltas` takes, if anything.
        """
        reads = len(self.self_attn.wiring.reads)
        crossing, deltas = crossing[:reads], crossing[reads:]

        residual = hidden_states
        hidden_states = self.input_layernorm(add_deltas(hidden_states, 0, *deltas))
        hidden_states, _, *given = self.self_attn(
            hidden_states,
            *crossing,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            use_cache=use_cache,
            position_embeddings=position_embeddings,
            **kwargs,
        )
        hidden_states = residual + hidden_states

        residual = hidden_states
        hidden_states = self.post_attention_layernorm(add_deltas(hidden_states, 1, *deltas))
        hidden_states = self.mlp(hidden_states)
        hidden_states = residual + hidden_states
        return hidden_states, *given


class ResFormerPreTrainedModel(PreTrainedModel):
    config: ResFormerConfig
    config_class = ResFormerConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["ResFormerDecoderLayer"]
    _skip_keys_device_placement = ["past_key_values"]
    _keep_in_fp32_modules = ["bias_gate"]  # a linear layer, which some quantisers would replace
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True

    _can_compile_fullgraph = True
    _supports_attention_backend = True
    _can_record_outputs = {
        "hidden_states": ResFormerDecoderLayer,
        "attentions": ResFormerAttention,
    }

    def __init__(self, config: ResFormerConfig, *args: Any, **kwargs: Any):
        super().__init__(config, *args, **kwargs)
        # In a bundle (remote code), AutoConfig loads its own copy of the configuration class. The heads of Transformers
        # build the decoder by `AutoModel.from_config`, which must know that copy too.
        if type(config).__name__ == ResFormerConfig.__name__ and type(config) not in AutoModel._model_mapping:
            AutoModel.register(type(config), ResFormerModel)

    def _get_dtype_plan(self, dtype: torch.dtype) -> dict[str, torch.dtype]:
        # Coefficients are in float32 at least: bfloat16 would round away what they learn.
        kept = [kind.coefficients or kind.module for kind in KINDS if kind.module is not None]
        return super()._get_dtype_plan(dtype) | dict.fromkeys(kept, torch.promote_types(dtype, torch.float32))

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, Connection):
            module.reset_parameters()

    def _resize_token_embeddings(
        self, new_num_tokens: int | None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Module:
        for module in self.modules():
            if isinstance(module, ValueTable):
                self._get_resized_embeddings(module, new_num_tokens, pad_to_multiple_of, mean_resizing)
        return super()._resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)


class ResFormerModel(ResFormerPreTrainedModel):
    """The decoder without a head.

    `hidden_states` asked for with `output_hidden_states=True` are the raw X_0 .. X_{N-1}, before depth-weighted
    averaging, and the normed output last.
    """

    def __init__(self, config: ResFormerConfig):
        config.validate()  # fields may have been assigned since it was made
        super().__init__(config)
        self.padding_idx = config.pad_token_id
        self.vocab_size = config.vocab_size

        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, self.padding_idx)
        self.wiring = wire(config)
        self.layers = nn.ModuleList(
            [ResFormerDecoderLayer(config, layer_idx, wiring) for layer_idx, wiring in enumerate(self.wiring)]
        )
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = LlamaRotaryEmbedding(config=config)
        self.value_residual = value_residual(config)
        self.depth_average = depth_average(config)
        self.attention_residuals = attention_residuals(config)
        self.gradient_checkpointing = False

        self.post_init()

    @torch.no_grad()
    def value_mixing_matrix(self) -> torch.Tensor:
        """M, `(N, N)`: layer n attends to V' = sum_m M[n, m] V_m of the raw values V_m.

        float32, detached, on the CPU; lower triangular; the identity for plain Llama. The row of a layer that shares
        values is its source's. NaN where the mix depends on the token (`"gated"`, `"depth_attention"`).
        """
        layers = self.config.num_hidden_layers
        return mixing_matrix(layers, layers, self.value_residual)[value_sources(self.config)]

    @torch.no_grad()
    def depth_mixing_matrix(self) -> torch.Tensor:
        """D, `(N, N + 1)`: block n + 1, or the final norm, reads Y_n = sum_j D[n, j] X_j.

        X_0 are the embeddings, X_{j+1} the raw output of block j. float32, detached, on the CPU; D[n, n+1] = 1 and 0
        elsewhere for plain Llama.
        """
        layers = self.config.num_hidden_layers
        return mixing_matrix(layers, layers + 1, self.depth_average)

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
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("You must specify exactly one of input_ids or inputs_embeds")
        if input_ids is None and self.config.value_embeddings:
            raise ValueError(
                f"`value_embeddings`={self.config.value_embeddings} looks up rows of tokens, which `inputs_embeds` "
                "does not name: pass `input_ids` instead (soft prompts are not supported)."
            )
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)

        # Masks are made before the cache: Transformers detects packed sequences only without a cache, and an empty
        # cache does not change a mask. Only positions given by the caller can be packed.
        masks = attention_mask
        if not isinstance(masks, dict):
            masks = {
                kind: MASKS[kind](
                    config=self.config,
                    inputs_embeds=inputs_embeds,
                    attention_mask=attention_mask,
                    past_key_values=past_key_values,
                    position_ids=position_ids,
                )
                for kind in dict.fromkeys(self.config.layer_types)
            }
        if use_cache and past_key_values is None:
            # Compilers and exporters know `DynamicCache`; in a graph, growing in place gains nothing.
            new_cache = DynamicCache if torch.compiler.is_compiling() else GrowingCache
            past_key_values = new_cache(config=self.config)
        if position_ids is None:
            past_seen_tokens = past_key_values.get_seq_length() if past_key_values is not None else 0
            position_ids = torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device) + past_seen_tokens
            position_ids = position_ids.unsqueeze(0)

        hidden_states = inputs_embeds
        position_embeddings = self.rotary_emb(hidden_states, position_ids=position_ids)
        crossing: dict[Crossing, Any] = {
            ("input_ids", layer): input_ids for layer in self.config.value_embeddings or ()
        }
        if self.value_residual is not None:
            crossing |= {("mixing_weights", layer): weights for layer, weights in self.value_residual().items()}
        averages = None if self.depth_average is None else self.depth_average.start(self.depth_average())
        if averages is not None:
            hidden_states = averages.append(hidden_states)
        deltas = (
            None if self.attention_residuals is None else self.attention_residuals.start(*self.attention_residuals())
        )

        layer_types = self.config.layer_types
        layers = self.layers[: self.config.num_hidden_layers]  # fewer while `assistant_early_exit` drafts
        for n, (layer, wiring) in enumerate(zip(layers, self.wiring, strict=False)):
            outputs = layer(
                hidden_states,
                *[crossing[read] for read in wiring.reads],
                *([] if deltas is None else deltas.read(n, hidden_states)),
                attention_mask=masks[layer_types[n]],
                position_embeddings=position_embeddings,
                position_ids=position_ids,
                past_key_values=past_key_values,
                use_cache=use_cache,
                **kwargs,
            )
            if isinstance(outputs, torch.Tensor):  # the placeholder for a layer of another pipeline stage
                raise NotImplementedError(
                    "Pipeline parallelism is not supported: values, keys and states of earlier layers do not reach "
                    "another stage. Use tensor parallelism or FSDP2."
                )
            hidden_states, *given = outputs
            crossing.update({(name, n): tensor for name, tensor in zip(wiring.gives, given, strict=True)})
            if averages is not None:
                hidden_states = averages.append(hidden_states)

        return BaseModelOutputWithPast(
            last_hidden_state=self.norm(hidden_states),
            past_key_values=past_key_values,
        )


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
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | dict[str, torch.Tensor | None] | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs: Unpack[TransformersKwargs],
    ) -> CausalLMOutputWithPast:
        """As [`~transformers.LlamaForCausalLM`]."""
        outputs: BaseModelOutputWithPast = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        hidden_states = slice_logits_to_keep(outputs.last_hidden_state, logits_to_keep)
        logits = self.lm_head(hidden_states)

        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)

        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    def _prepare_cache_for_generation(
        self, generation_config: GenerationConfig, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        config, cache = self.config, model_kwargs.get("past_key_values")
        if generation_config.cache_implementation == "quantized":
            # Transformers refuses layers that store nothing. Here they are never updated.
            storing = copy.copy(config)
            storing.key_sources = None
            generation_config.cache_config = {"config": storing, **(generation_config.cache_config or {})}
        is_chosen_by_caller = cache is not None or generation_config.cache_implementation is not None
        super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)
        if not is_chosen_by_caller and type(model_kwargs.get("past_key_values")) is DynamicCache:
            model_kwargs["past_key_values"] = cache = GrowingCache(config)
            if generation_config.is_assistant:  # rejected tokens are cropped
                cache.activate_past_recording()

    def _get_static_cache_init_shape(self) -> tuple[int | list[int], int | list[int]] | None:
        # Early allocation would give full-size memory to layers that share keys or values.
        if self.config.key_sources is not None or self.config.value_sources is not None:
            return None
        return super()._get_static_cache_init_shape()


class ResFormerForSequenceClassification(GenericForSequenceClassification, ResFormerPreTrainedModel):
    """The decoder with a classifier on the last token that is not padding."""


class ResFormerForTokenClassification(GenericForTokenClassification, ResFormerPreTrainedModel):
    """The decoder with a classifier on every token."""


class ResFormerForQuestionAnswering(GenericForQuestionAnswering, ResFormerPreTrainedModel):
    """The decoder with start and end logits on every token."""
