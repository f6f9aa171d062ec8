"""Llama's decoder with connections between layers.

Tensors cross layers by name: a layer takes them as keyword arguments and returns, in a dict, those that later layers
read. `crossings` says which they are; `model.model.layers[7].reads` shows what layer 7 reads.
"""

import copy
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
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
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
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
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from resformer.configuration import ResFormerConfig, key_sources, value_sources
from resformer.modeling.attention_residuals import ATTENTION_RESIDUALS, BlockDeltas, attention_residuals
from resformer.modeling.connection import Connection, mixing_matrix, weighted_sum
from resformer.modeling.depth_attention import depth_values
from resformer.modeling.depth_average import DEPTH_AVERAGE, RunningAverage, depth_average
from resformer.modeling.growing_cache import GrowingCache
from resformer.modeling.neutreno import NEUTRENO, neutreno_term
from resformer.modeling.sharing import SHARING, update_cache
from resformer.modeling.value_embedding import VALUE_EMBEDDING, ValueEmbedding, ValueTable
from resformer.modeling.value_residual import VALUE_RESIDUAL, ValueGate, mixed_layers, value_residual
from resformer.modeling.versions import CACHE, record_rejected_tokens

__all__ = [
    "KINDS",
    "ResFormerForCausalLM",
    "ResFormerForQuestionAnswering",
    "ResFormerForSequenceClassification",
    "ResFormerForTokenClassification",
    "ResFormerModel",
    "ResFormerPreTrainedModel",
    "crossings",
]

#: All kinds of connections.
KINDS = (SHARING, NEUTRENO, VALUE_EMBEDDING, VALUE_RESIDUAL, DEPTH_AVERAGE, ATTENTION_RESIDUALS)

#: A tensor that crosses layers: its name, and the layer that makes it.
Crossing = tuple[str, int]


def crossings(config: ResFormerConfig, layer: int) -> dict[str, Crossing | list[Crossing]]:
    """What a layer reads of earlier ones: an argument of `ResFormerAttention.forward` -> the tensor or tensors.

    The names of tensors of layer m are:

    * `raw_values`, `mixed_values`, `current_keys`: V_m, V'_m, and K_m before the rotary embedding, of the current
      tokens, `(batch, key/value heads, tokens, head_dim)`;
    * `keys`, `values`: those that the layer attends to, past tokens included.
    """
    keys, values, mixed = key_sources(config), value_sources(config), mixed_layers(config, layer)
    reads: dict[str, Crossing | list[Crossing]] = {}
    if keys[layer] != layer:
        reads["shared_keys"] = ("keys", keys[layer])
    if values[layer] != layer:
        reads["shared_values"] = ("values", values[layer])
    if mixed and config.value_residual == "dense":
        reads["earlier_values"] = [("raw_values", earlier) for earlier in mixed[:-1]]
    elif mixed and config.value_residual == "depth_attention":
        reads["earlier_values"] = [("mixed_values", earlier) for earlier in mixed[:-1]]
        reads["earlier_keys"] = [("current_keys", keys[each]) for each in mixed if keys[each] != layer]
    elif mixed:
        reads["first_values"] = ("raw_values", 0)
    if config.neutreno_lambda and layer > 0:
        reads["first_values"] = ("raw_values", 0)
        if values[layer] != layer:
            reads["shared_mixed_values"] = ("mixed_values", values[layer])
    return reads


def returned_tensors(config: ResFormerConfig) -> list[tuple[str, ...]]:
    """Of each layer, the names of the tensors that it returns: those that a later one reads."""
    names: list[set[str]] = [set() for _ in range(config.num_hidden_layers)]
    for layer in range(config.num_hidden_layers):
        for read in crossings(config, layer).values():
            for name, maker in read if isinstance(read, list) else [read]:
                names[maker].add(name)
    return [tuple(sorted(each)) for each in names]


@use_kernelized_func(apply_rotary_pos_emb)
class ResFormerAttention(nn.Module):
    """Multi-head attention, whose keys may be another layer's, and whose values may be mixed or another layer's.

    A layer that reads another's keys has no `k_proj`, one that reads another's values no `v_proj`.

    Args:
        returned: the layer's entry of `returned_tensors`, which a model computes once for all layers.
    """

    def __init__(self, config: ResFormerConfig, layer_idx: int, returned: tuple[str, ...] | None = None):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx  # in a cache
        self.returned = returned_tensors(config)[layer_idx] if returned is None else returned
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = self.head_dim**-0.5
        self.attention_dropout = config.attention_dropout
        self.is_causal = True
        # Copied: attributes of a configuration are slow to read, and decoding reads them for every token and layer.
        # Booleans, not numbers of layers: torch.compile makes one graph for all layers that have the same.
        self.has_keys = key_sources(config)[layer_idx] == layer_idx
        self.has_values = value_sources(config)[layer_idx] == layer_idx
        self.mixing = config.value_residual if mixed_layers(config, layer_idx) else "none"
        self.embeds_values = layer_idx in (config.value_embeddings or ())
        self.neutreno_lambda = config.neutreno_lambda if layer_idx > 0 else 0.0
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
        if self.embeds_values:
            self.value_embedding = ValueEmbedding(config)
        if self.mixing == "gated":
            self.value_residual = ValueGate(config)
        self.o_proj = nn.Linear(query_width, config.hidden_size, bias=out_bias)

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        input_ids: torch.Tensor | None = None,
        mixing_weights: Any = None,
        first_values: torch.Tensor | None = None,
        earlier_values: Any = None,
        earlier_keys: tuple[torch.Tensor, ...] = (),
        shared_keys: torch.Tensor | None = None,
        shared_values: torch.Tensor | None = None,
        shared_mixed_values: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> tuple[torch.Tensor, torch.Tensor | None, dict[str, torch.Tensor]]:
        """Returns the output, the attention weights, and what later layers read.

        Args:
            hidden_states: H_n, `(batch, tokens, hidden_size)`.
            input_ids: of the current tokens, `(batch, tokens)`, in the layers in `value_embeddings`.
            mixing_weights: the layer's row of the value mixing matrix, or its gates; the last number in mode "dense".
            earlier_values: the rest of that row's sum in mode "dense", V'_m in mode "depth_attention".
            first_values, earlier_keys, shared_keys, shared_values, shared_mixed_values: see `crossings`.
        """
        input_shape = hidden_states.shape[:-1]
        head_shape = (*input_shape, -1, self.head_dim)

        query_states = self.q_proj(hidden_states).view(head_shape)
        if self.qk_norm:
            query_states = self.q_norm(query_states)
        query_states = query_states.transpose(1, 2)

        key_states = None
        if self.has_keys:
            key_states = self.k_proj(hidden_states).view(head_shape)
            if self.qk_norm:
                key_states = self.k_norm(key_states)
            key_states = key_states.transpose(1, 2)
        current_keys = key_states

        raw_values = value_states = None
        if self.has_values:
            raw_values = self.v_proj(hidden_states).view(head_shape).transpose(1, 2)
            if self.embeds_values:
                raw_values = self.value_embedding(hidden_states, input_ids, raw_values)
            if self.mixing == "none":
                value_states = raw_values
            elif self.mixing == "gated":
                value_states = self.value_residual(hidden_states, first_values, raw_values, mixing_weights)
            elif self.mixing == "dense":
                value_states = torch.addcmul(earlier_values, raw_values, mixing_weights.to(raw_values))
            elif self.mixing == "depth_attention":
                depth_keys = (*earlier_keys, current_keys) if self.has_keys else earlier_keys
                value_states = depth_values(query_states, depth_keys, (*earlier_values, raw_values), mixing_weights)
            else:  # V'_n = l1 V_0 + l2 V_n
                value_states = weighted_sum((first_values, raw_values), mixing_weights)
        mixed_values = value_states if self.has_values else shared_mixed_values

        if self.use_rope:
            cos, sin = position_embeddings
            if self.has_keys:
                query_states, key_states = apply_rotary_pos_emb(query_states, key_states, cos, sin)
            else:
                query_states, _ = apply_rotary_pos_emb(query_states, query_states[:, :1], cos, sin)

        keys, values = update_cache(
            past_key_values, self.layer_idx, key_states, value_states, shared_keys, shared_values, kwargs
        )

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
        if self.neutreno_lambda:
            attn_output = neutreno_term(
                attn_output.reshape(head_shape), first_values, mixed_values, self.neutreno_lambda
            )
        attn_output = self.o_proj(attn_output.reshape(*input_shape, -1).contiguous())
        made = {
            "raw_values": raw_values,
            "mixed_values": mixed_values,
            "current_keys": current_keys,
            "keys": keys,
            "values": values,
        }
        return attn_output, attn_weights, {name: made[name] for name in self.returned}


class ResFormerDecoderLayer(GradientCheckpointingLayer):
    def __init__(self, config: ResFormerConfig, layer_idx: int, returned: tuple[str, ...] | None = None):
        super().__init__()
        self.layer_idx = layer_idx
        self.reads = crossings(config, layer_idx)
        self.attention_type = config.layer_types[layer_idx]
        self.self_attn = ResFormerAttention(config, layer_idx, returned)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self,
        hidden_states: torch.Tensor,
        block_deltas: tuple[torch.Tensor, torch.Tensor] | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Returns X_{n+1} and what later layers read.

        Args:
            block_deltas: what attention and MLP read beside the stream (`attention_residuals`).
            kwargs: of `ResFormerAttention.forward`.
        """
        residual = hidden_states
        if block_deltas is not None:
            hidden_states = hidden_states + block_deltas[0]
        hidden_states, _, made = self.self_attn(
            self.input_layernorm(hidden_states), past_key_values=kwargs.pop(CACHE, None), **kwargs
        )
        hidden_states = residual + hidden_states

        residual = hidden_states
        if block_deltas is not None:
            hidden_states = hidden_states + block_deltas[1]
        hidden_states = self.mlp(self.post_attention_layernorm(hidden_states))
        return residual + hidden_states, made


class ResFormerPreTrainedModel(LlamaPreTrainedModel):
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

    def _set_gradient_checkpointing(
        self, enable: bool = True, gradient_checkpointing_func: Callable[..., Any] = checkpoint, **kwargs: Any
    ) -> None:
        if enable and getattr(gradient_checkpointing_func, "keywords", {}).get("use_reentrant"):
            raise ValueError(
                "Reentrant gradient checkpointing loses the gradients of tensors that cross layers: leave "
                "`gradient_checkpointing_kwargs` out, or set {'use_reentrant': False} in it."
            )
        # `checkpoint` takes None for True, and PEFT's `prepare_model_for_kbit_training` leaves it out.
        gradient_checkpointing_func = functools.partial(gradient_checkpointing_func, use_reentrant=False)
        super()._set_gradient_checkpointing(enable, gradient_checkpointing_func, **kwargs)

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
        returned = returned_tensors(config)
        self.layers = nn.ModuleList(
            [ResFormerDecoderLayer(config, layer_idx, returned[layer_idx]) for layer_idx in range(len(returned))]
        )
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = LlamaRotaryEmbedding(config=config)
        self.value_residual = value_residual(config)
        self.depth_average = depth_average(config)
        self.attention_residuals = attention_residuals(config)
        self.gradient_checkpointing = False

        # Coefficients are in float32 in a model of lower precision, which would round away what they learn.
        names = [name for name, _ in self.named_parameters()]
        coefficients = ("value_residual", "value_embedding.bias_gate", "depth_average", "attention_residuals")
        self._keep_in_fp32_modules_strict = {each for each in coefficients if any(f"{each}." in name for name in names)}
        # Quantisers, which would replace linear layers, look here.
        self._keep_in_fp32_modules = {each for each in ("bias_gate",) if any(f"{each}." in name for name in names)}
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
        past_key_values = kwargs.pop(CACHE, past_key_values)  # `cache` is its name from Transformers 5.24 on
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
                kind: LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING[kind](
                    config=self.config,
                    inputs_embeds=inputs_embeds,
                    attention_mask=attention_mask,
                    position_ids=position_ids,
                    **{CACHE: past_key_values},
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
        layers: Any = self.layers[: self.config.num_hidden_layers]  # fewer while `assistant_early_exit` drafts
        rows = {} if self.value_residual is None else self.value_residual()
        averages = deltas = None
        if self.depth_average is not None:
            averages = RunningAverage(self.depth_average, self.depth_average())
            hidden_states = averages.append(hidden_states)
        if self.attention_residuals is not None:
            deltas = BlockDeltas(self.attention_residuals, *self.attention_residuals())
        numbers = [getattr(layer, "layer_idx", None) for layer in layers]
        if None in numbers:  # placeholders for layers of other stages
            raise NotImplementedError("Pipeline parallelism is not supported. Use tensor parallelism or FSDP2.")
        if (averages is not None or deltas is not None) and numbers != list(range(len(numbers))):
            raise ValueError(
                f"The model has layers {numbers}, in this order, but `dwa` and `attention_residuals` read the outputs "
                "of all layers in theirs: layers cannot be removed or moved."
            )

        made: dict[Crossing, torch.Tensor] = {}
        for layer in layers:
            arguments = self._crossing_arguments(layer, made, rows, hidden_states.device)
            if layer.self_attn.embeds_values:
                arguments["input_ids"] = input_ids
            if deltas is not None:
                arguments["block_deltas"] = deltas.read(layer.layer_idx, hidden_states)
            hidden_states, given = layer(
                hidden_states,
                attention_mask=masks[layer.attention_type],
                position_embeddings=position_embeddings,
                position_ids=position_ids,
                use_cache=use_cache,
                **{CACHE: past_key_values},
                **arguments,
                **kwargs,
            )
            made.update({(name, layer.layer_idx): tensor for name, tensor in given.items()})
            if averages is not None:
                hidden_states = averages.append(hidden_states)

        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden_states), **{CACHE: past_key_values})

    @staticmethod
    def _crossing_arguments(
        layer: ResFormerDecoderLayer, made: dict[Crossing, torch.Tensor], rows: Mapping[int, Any], device: torch.device
    ) -> dict[str, Any]:
        """The arguments of a layer that come from earlier ones, and its coefficients, by the number it was built with.

        Args:
            made: the tensors that earlier layers have returned.
            rows: layer -> its row of the value mixing matrix.
        """

        def tensor(crossing: Crossing) -> torch.Tensor:
            if crossing not in made:
                name, maker = crossing
                raise ValueError(
                    f"Layer {layer.layer_idx} reads the {name} of layer {maker}, which has been removed or comes later."
                )
            return made[crossing]

        arguments: dict[str, Any] = {
            name: tuple(map(tensor, read)) if isinstance(read, list) else tensor(read)
            for name, read in layer.reads.items()
        }
        if layer.layer_idx in rows:
            arguments["mixing_weights"] = row = rows[layer.layer_idx]
            if layer.self_attn.mixing == "dense":
                # Summed here, so that all layers take as many tensors, and torch.compile makes one graph for them.
                earlier = [values.to(device) for values in arguments["earlier_values"]]
                arguments["earlier_values"] = weighted_sum(earlier, row[:-1])
                arguments["mixing_weights"] = row[-1:]
        return arguments


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

    forward = LlamaForCausalLM.forward

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


class ResFormerForSequenceClassification(GenericForSequenceClassification, ResFormerPreTrainedModel):
    """The decoder with a classifier on the last token that is not padding."""


class ResFormerForTokenClassification(GenericForTokenClassification, ResFormerPreTrainedModel):
    """The decoder with a classifier on every token."""


class ResFormerForQuestionAnswering(GenericForQuestionAnswering, ResFormerPreTrainedModel):
    """The decoder with start and end logits on every token."""
