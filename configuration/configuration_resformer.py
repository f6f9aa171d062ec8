"""`ResFormerConfig`: a Llama-style decoder and the cross-layer connections that it has."""

import copy
import difflib
import math
from dataclasses import fields
from importlib import import_module
from typing import Any, Literal

from huggingface_hub.dataclasses import as_validated_field, strict
from transformers.activations import ACT2FN
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, RopeParameters
from transformers.utils import logging
from transformers.utils.type_validators import interval

from resformer.configuration.methods import method_fields
from resformer.configuration.sources import (  # noqa: F401  (all three: a bundle imports them from here)
    key_sources,
    mixing_layers,
    value_sources,
)

__all__ = ["ResFormerConfig"]

logger = logging.get_logger(__name__)

#: Keys of `config.json` files and keyword arguments that are not fields here and not misspelt fields either.
_KNOWN_EXTRA_KEYS = frozenset(
    "attn_implementation experts_implementation name_or_path num_labels output_attentions rope_scaling rope_theta "
    "torch_dtype auto_map max_window_layers no_rope_layer_interval".split()
)
#: Families whose `config.json` can be read as it is. The converter translates those of other families.
_SAME_MEANING = ("resformer", "llama", "mistral")
#: Fields of checkpoints from before the first release -> what they are called now.
_RENAMED = {
    "depth_attention": "attention_residuals",
    "depth_attention_blocks": "attention_residual_blocks",
    "value_residual_stride": "depth_attention_stride",
}


@as_validated_field
def positive(value: int | None = None) -> None:
    if value is not None and value < 1:
        raise ValueError(f"Value must be a positive integer, got {value}")


@as_validated_field
def finite(value: float | None = None) -> None:
    if value is not None and not math.isfinite(value):
        raise ValueError(f"Value must be a finite number, got {value}")


@as_validated_field
def not_negative(value: float | None = None) -> None:
    if value is not None and not 0 <= value < math.inf:
        raise ValueError(f"Value must be a finite number from 0 up, got {value}")


@strict
class ResFormerConfig(PreTrainedConfig):
    r"""Configuration of a Llama-style decoder with cross-layer connections.

    With nothing set it is plain Llama, bit for bit. The backbone fields bear Llama's names and defaults; with the few
    fields of its relatives they also describe Mistral, Qwen2, Qwen3 and SmolLM3. Layers are counted from 0.

    As in [`~transformers.LlamaConfig`] are `vocab_size`, `hidden_size`, `intermediate_size`, `num_hidden_layers`,
    `num_attention_heads`, `num_key_value_heads`, `hidden_act`, `max_position_embeddings`, `initializer_range`,
    `rms_norm_eps`, `use_cache`, `pad_token_id`, `bos_token_id`, `eos_token_id`, `pretraining_tp`,
    `tie_word_embeddings`, `rope_parameters`, `attention_bias`, `attention_dropout`, `mlp_bias` and `head_dim`.
    `num_key_value_heads` below `num_attention_heads` is grouped-query attention (arXiv 2305.13245) and combines with
    everything below. `hidden_size` need not be a multiple of `num_attention_heads` when `head_dim` is given.

    Args:
        attention_out_bias (`bool`, *optional*):
            Whether `o_proj` has a bias; `None` means as `attention_bias`. Qwen2 has biases on q, k and v only.
        qk_norm (`bool`, defaults to `False`):
            RMSNorm over each head's queries and keys before the rotary embedding (Qwen3).
        sliding_window (`int`, *optional*):
            Tokens that a `"sliding_attention"` layer sees, itself included; 2 or more.
        layer_types (`list[str]`, *optional*):
            `"full_attention"` or `"sliding_attention"` for each layer. Default: sliding everywhere if `sliding_window`
            is set (Mistral), else full everywhere.
        no_rope_layers (`list[int]`, *optional*):
            SmolLM3's list: 1 where a layer uses the rotary embedding, 0 where it has none. Default: all 1.
        value_residual (`str`, defaults to `"none"`):
            How the values of a mixing layer are made from its own and earlier layers' (ResFormer, arXiv 2410.17897;
            Depth-Attention, arXiv 2606.05014): `"none"`, `"identity"`, `"constant"`, `"learnable"`,
            `"learnable_plus"`, `"dense"`, `"gated"` or `"depth_attention"`, whose equations are in
            `modeling/value_residual.py` and `modeling/depth_attention.py`. `"depth_attention"` takes `key_sources`, but
            no `value_sources`.
        value_residual_init (`list[float]`, defaults to [0.5, 0.5]):
            The coefficients on V_0 and V_n: the values of `"constant"`, the start of the learned modes. `"identity"`
            and `"depth_attention"` ignore it. (0, 1) starts as plain Llama.
        value_residual_layers (`list[int]`, *optional*):
            The layers that mix, from 1 to `num_hidden_layers - 1`, ascending (Sparse-ResFormer). Default: every layer
            but 0 that has values of its own.
        depth_attention_stride (`int`, defaults to 1):
            The stride s of `"depth_attention"`: layer n mixes layers n, n - s, n - 2s, ..., and the first to mix is s.
        depth_attention_init (`float`, defaults to 1.0):
            The start of the gates of `"depth_attention"`. 1 is the paper, 0 plain Llama.
        value_embeddings (`list[int]`, *optional*):
            The layers that add to their values a row of a table, picked by the token and gated per key/value head
            (modded-nanogpt, nanochat; Bank of Values, arXiv 2606.02780), ascending. A table has
            `vocab_size` x `num_key_value_heads` x `head_dim` numbers. The model then needs `input_ids`.
        value_embeddings_init (`float`, *optional*):
            The standard deviation that the tables start with; 0 starts as plain Llama. Default: `initializer_range`, as
            of every other embedding and projection.
        neutreno_lambda (`float`, defaults to 0.0):
            NeuTRENO's term l (V_0 - V'_n), added to the attention output of every layer but 0 (arXiv 2312.00751,
            0.4 in its language models). Finite and not negative.
        value_sources (`list[int]`, *optional*):
            Layer n attends to the values of layer `value_sources[n]` and has no `v_proj` unless that is n itself.
            `[0] * N` is SVFormer (arXiv 2410.17897, section 3.3).
        key_sources (`list[int]`, *optional*):
            The same for keys and `k_proj`. `[0, 0, 2, 2, ...]` in both is CLA2 (arXiv 2405.12981).
        dwa (`bool`, defaults to `False`):
            Depth-weighted averaging of all earlier layers' outputs (DenseFormer, arXiv 2402.02622).
        dwa_dilation, dwa_period (`int`, default to 1):
            DenseFormer's k x p: average after every p-th block, over every k-th earlier output.
        attention_residuals (`bool`, defaults to `False`):
            Sublayers read, beside the residual stream, a softmax over what earlier blocks of layers added to it (delta
            attention residuals, arXiv 2605.18855), for each head (arXiv 2607.27230), times a learned gate.
        attention_residual_blocks (`int`, defaults to 8):
            Number of blocks, from 1 to `num_hidden_layers`.
        attention_residual_init (`float`, defaults to 1.0):
            The start of the gates. 0 starts as plain Llama.

    Raises:
        huggingface_hub.errors.StrictDataclassError: a field, or two fields together, do not fit; the message names
            them, their values and what is allowed.

    ```python
    >>> from resformer import ResFormerConfig, ResFormerForCausalLM

    >>> config = ResFormerConfig.for_method("resformer", num_hidden_layers=12, hidden_size=768, num_attention_heads=12)
    >>> model = ResFormerForCausalLM(config)
    ```"""

    model_type = "resformer"
    keys_to_ignore_at_inference = ["cache", "past_key_values"]  # one thing, from and before Transformers 5.24
    # No pipeline plan: V_0, shared keys and values, and DWA's history do not cross a pipeline stage.

    vocab_size: int = positive(default=32000)
    hidden_size: int = positive(default=4096)
    intermediate_size: int = positive(default=11008)
    num_hidden_layers: int = positive(default=32)
    num_attention_heads: int = positive(default=32)
    num_key_value_heads: int | None = positive(default=None)
    hidden_act: str = "silu"
    max_position_embeddings: int = positive(default=2048)
    initializer_range: float = interval(min=0.0, max=1.0)(default=0.02)
    rms_norm_eps: float = 1e-6
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    pretraining_tp: int | None = 1
    tie_word_embeddings: bool = False
    rope_parameters: RopeParameters | dict | None = None
    attention_bias: bool = False
    attention_dropout: int | float | None = 0.0
    mlp_bias: bool = False
    head_dim: int | None = positive(default=None)

    attention_out_bias: bool | None = None
    qk_norm: bool = False
    sliding_window: int | None = positive(default=None)
    layer_types: list[str] | None = None
    no_rope_layers: list[int] | None = None

    value_residual: Literal[
        "none", "identity", "constant", "learnable", "learnable_plus", "dense", "gated", "depth_attention"
    ] = "none"
    value_residual_init: list[int | float] | tuple[int | float, ...] = (0.5, 0.5)
    value_residual_layers: list[int] | None = None
    depth_attention_stride: int = positive(default=1)
    depth_attention_init: int | float = finite(default=1.0)
    value_embeddings: list[int] | None = None
    value_embeddings_init: int | float | None = not_negative(default=None)
    neutreno_lambda: int | float = not_negative(default=0.0)
    value_sources: list[int] | None = None
    key_sources: list[int] | None = None
    dwa: bool = False
    dwa_dilation: int = positive(default=1)
    dwa_period: int = positive(default=1)
    attention_residuals: bool = False
    attention_residual_blocks: int = positive(default=8)
    attention_residual_init: int | float = finite(default=1.0)

    def __new__(cls, *args: Any, **kwargs: Any) -> "ResFormerConfig":
        # Its import registers the models, before AutoModel can be asked for one; unpickling calls no `__init__`. A
        # bundle has them in its own folder.
        if __package__ == "resformer.configuration":
            import_module("resformer.modeling")
        return super().__new__(cls)

    def __post_init__(self, **kwargs: Any) -> None:
        # A Llama checkpoint read as a ResFormerConfig would otherwise call the instance "llama".
        family = kwargs.pop("model_type", self.model_type)
        if family not in (*_SAME_MEANING, self.model_type):
            logger.warning_once(
                f"A configuration of model_type {family!r} is read as a ResFormerConfig, which takes the fields that "
                "bear the same name and nothing else. `resformer convert` (resformer.retrofit) translates all of it."
            )
        if kwargs.pop("use_sliding_window", None) is False:  # Qwen2's switch
            self.sliding_window = None
        kwargs.pop("base_model_tp_plan", None)  # follows from the fields
        for name in _RENAMED.keys() & kwargs:
            raise ValueError(f"`{name}` is called `{_RENAMED[name]}` now: rename it, in config.json too.")
        _warn_of_misspelt_fields(kwargs)
        # Copies: Transformers fills the rope dicts in place, and the caller may reuse its lists.
        for f in fields(ResFormerConfig):
            if isinstance(getattr(self, f.name), (dict, list)):
                setattr(self, f.name, copy.deepcopy(getattr(self, f.name)))
        if kwargs.get("rope_scaling") is not None:
            kwargs["rope_scaling"] = copy.deepcopy(kwargs["rope_scaling"])
        if self.head_dim is None and self.hidden_size % self.num_attention_heads == 0:
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.layer_types is None:
            kind = "full_attention" if self.sliding_window is None else "sliding_attention"
            self.layer_types = [kind] * self.num_hidden_layers
        self.value_residual_init = [float(value) for value in self.value_residual_init]
        self.neutreno_lambda = float(self.neutreno_lambda)
        self.depth_attention_init = float(self.depth_attention_init)
        self.attention_residual_init = float(self.attention_residual_init)
        super().__post_init__(**kwargs)

    @classmethod
    def for_method(cls, method: str, **kwargs: Any) -> "ResFormerConfig":
        """A configuration of the named method, one of `resformer.configuration.METHODS`; `kwargs` go on top of it.

        ```python
        >>> ResFormerConfig.for_method("svformer", num_hidden_layers=24).value_sources[-1]
        0
        ```"""
        num_hidden_layers = kwargs.get("num_hidden_layers", cls.num_hidden_layers)
        return cls(**{**method_fields(method, num_hidden_layers), **kwargs})

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """As the base class, but fields of this class given as keyword arguments replace those of the file before
        they are validated. `layer_types` that are all alike follow a new depth or window."""
        fields_here = {f.name for f in fields(cls)} - {f.name for f in fields(PreTrainedConfig)}
        overrides = {key: kwargs.pop(key) for key in fields_here & kwargs.keys()}
        _warn_of_misspelt_fields(kwargs)
        config_dict = {**config_dict, **overrides}
        uniform = len(set(config_dict.get("layer_types") or ())) == 1
        rederive = not overrides.keys().isdisjoint(("num_hidden_layers", "sliding_window"))
        if rederive and "layer_types" not in overrides and uniform:
            del config_dict["layer_types"]
        return super().from_dict(config_dict, **kwargs)

    # What the model, the cache and the converter read. All of it follows from the fields.

    @property
    def base_model_tp_plan(self) -> dict[str, str]:
        """How tensor parallelism splits each module with parameters. Only modules that exist are listed."""
        plan = {
            "layers.*.self_attn.q_proj": "colwise",
            "layers.*.self_attn.k_proj": "colwise",
            "layers.*.self_attn.v_proj": "colwise",
            "layers.*.self_attn.o_proj": "rowwise",
            "layers.*.mlp.gate_proj": "colwise",
            "layers.*.mlp.up_proj": "colwise",
            "layers.*.mlp.down_proj": "rowwise",
        }
        if self.qk_norm:
            plan["layers.*.self_attn.q_norm"] = "replicated_with_grad_allreduce"
            plan["layers.*.self_attn.k_norm"] = "replicated_with_grad_allreduce"
        mode = self.value_residual if mixing_layers(self) else "none"
        if mode == "depth_attention":
            plan["value_residual"] = "local_params"  # each rank has the gates of its own heads
            plan["value_residual.bias_gate"] = "colwise"
        elif mode not in ("none", "identity", "constant"):
            # Each rank mixes the values of its own heads only, so the coefficients' gradients are partial sums.
            plan["value_residual"] = "replicated_with_grad_allreduce"
        if mode == "gated":
            plan["layers.*.self_attn.value_residual.bias_gate"] = "colwise"
        if self.value_embeddings:
            plan["layers.*.self_attn.value_embedding.bias_gate"] = "colwise"
            plan["layers.*.self_attn.value_embedding.bias_table"] = "local_params"
            plan["layers.*.self_attn.value_embedding.bias_table.weight"] = "rowwise"  # by channels, not by tokens
        return plan

    @base_model_tp_plan.setter
    def base_model_tp_plan(self, plan: dict[str, str]) -> None:
        """Changes nothing: Transformers 5.19 sets it, with the embeddings added, where they are tied."""

    @property
    def kv_sharing_modes(self) -> list[str] | None:
        """`"reuse"` for a layer that stores neither keys nor values; Transformers' caches read it."""
        if self.value_sources is None or self.key_sources is None:
            return None
        pairs = zip(self.key_sources, self.value_sources, strict=True)
        return ["reuse" if key != n and value != n else "store" for n, (key, value) in enumerate(pairs)]

    # Every method named validate_* runs when a configuration is made or saved, and when a model is built from it, in
    # the order of their names: those after the first rely on the lengths that it checks.

    def validate_architecture(self) -> None:
        heads, groups = self.num_attention_heads, self.num_key_value_heads
        if self.head_dim is None and self.hidden_size % heads:
            raise ValueError(
                f"`hidden_size` ({self.hidden_size}) is not a multiple of `num_attention_heads` ({heads}): change one "
                "of them, or give `head_dim`."
            )
        # Filled in when the configuration was made.
        for name in ("head_dim", "num_key_value_heads", "layer_types"):
            if getattr(self, name) is None:
                raise ValueError(f"`{name}` is None: give it a value, or make a new configuration without it.")
        for name in ("layer_types", "no_rope_layers", "key_sources", "value_sources"):
            entries = getattr(self, name)
            if entries is not None and len(entries) != self.num_hidden_layers:
                raise ValueError(
                    f"`{name}` has {len(entries)} entries, but `num_hidden_layers` is {self.num_hidden_layers}."
                )
        if heads % groups:
            raise ValueError(
                f"`num_attention_heads` ({heads}) is not a multiple of `num_key_value_heads` ({groups}): every "
                "key/value head must serve the same number of query heads."
            )
        if self.head_dim % 2:
            raise ValueError(f"`head_dim` ({self.head_dim}) is odd: the rotary embedding turns pairs of channels.")
        if self.hidden_act not in ACT2FN:
            raise ValueError(f"`hidden_act` {self.hidden_act!r} is unknown: expected one of {', '.join(ACT2FN)}.")

    def validate_layer_type(self) -> None:
        # Replaces the method of the base class, whose message offers types that this decoder does not have.
        kinds = ("full_attention", "sliding_attention")
        for layer, kind in enumerate(self.layer_types):
            if kind not in kinds:
                raise ValueError(f"`layer_types`[{layer}] is {kind!r}: expected one of {', '.join(kinds)}.")
        if "sliding_attention" in self.layer_types and self.sliding_window is None:
            raise ValueError("`layer_types` holds 'sliding_attention', but `sliding_window` is None: set its length.")
        # With a window of 1, `[-sliding_window + 1 :]` in Transformers' caches keeps everything.
        if "sliding_attention" in self.layer_types and self.sliding_window == 1:
            raise ValueError("`sliding_window` is 1: expected 2 or more, a window of one token cannot be cached.")
        for layer, flag in enumerate(self.no_rope_layers or ()):
            if flag not in (0, 1):
                raise ValueError(f"`no_rope_layers`[{layer}] is {flag}: expected 1 (rotary embedding) or 0 (none).")

    def validate_rope(self) -> None:
        rope = self.rope_parameters or {}
        if not rope.keys().isdisjoint(self.layer_types):
            raise ValueError("`rope_parameters` differ between layer types: only one set for all layers is supported.")
        allowed = ("default", *ROPE_INIT_FUNCTIONS)
        if rope.get("rope_type", "default") not in allowed:
            raise ValueError(
                f"`rope_parameters`['rope_type'] is {rope['rope_type']!r}: expected one of {', '.join(allowed)}."
            )
        if rope.get("partial_rotary_factor") not in (None, 1, 1.0):
            raise ValueError(
                f"`rope_parameters`['partial_rotary_factor'] is {rope['partial_rotary_factor']}: only whole heads are "
                "rotated (1.0)."
            )
        try:
            super().validate_rope()
        except KeyError as error:  # a missing key that the rope type needs
            raise ValueError(error.args[0]) from error

    def validate_connections(self) -> None:
        # One validator, since each step relies on the one before it.
        for name in ("key_sources", "value_sources"):
            self._check_sources(name, getattr(self, name) or [])
        depth_attention = self.value_residual == "depth_attention"
        self._check_layers("value_residual_layers", self.depth_attention_stride if depth_attention else 1)
        self._check_layers("value_embeddings", 0)
        init = self.value_residual_init
        if len(init) != 2 or not all(math.isfinite(value) for value in init):
            raise ValueError(f"`value_residual_init` is {init}: expected two finite numbers (on V_0, on V_n).")
        if depth_attention and value_sources(self) != list(range(self.num_hidden_layers)):
            raise ValueError(
                f"`value_residual` is 'depth_attention', which mixes the values of all layers, but `value_sources` is "
                f"{self.value_sources}. Share keys alone (`key_sources`), or choose another mode."
            )
        if self.attention_residuals and self.attention_residual_blocks > self.num_hidden_layers:
            raise ValueError(
                f"`attention_residual_blocks` is {self.attention_residual_blocks}: expected 1 to "
                f"{self.num_hidden_layers} (`num_hidden_layers`), a block has a layer at least."
            )
        self._warn_of_settings_without_effect()

    def _check_layers(self, name: str, first: int) -> None:
        layers, sources = getattr(self, name) or [], value_sources(self)
        if layers != sorted(set(layers)) or not all(first <= layer < self.num_hidden_layers for layer in layers):
            raise ValueError(
                f"`{name}` is {layers}: expected ascending layers from {first} to {self.num_hidden_layers - 1} "
                "(`num_hidden_layers` - 1), each once."
            )
        for layer in layers:
            if sources[layer] != layer:
                raise ValueError(
                    f"`{name}` holds {layer}, but `value_sources`[{layer}] is {sources[layer]}: that layer has no "
                    "values of its own."
                )

    def _check_sources(self, name: str, sources: list[int]) -> None:
        for reader, source in enumerate(sources):
            where = f"`{name}`[{reader}] is {source}"
            if not 0 <= source <= reader:
                raise ValueError(f"{where}: a source comes no later than its reader, expected 0 to {reader}.")
            if sources[source] != source:
                raise ValueError(
                    f"{where}, but `{name}`[{source}] is {sources[source]}: a source must be its own source."
                )
            if self.layer_types[source] != self.layer_types[reader]:
                raise ValueError(
                    f"{where}, but `layer_types` differ: {self.layer_types[source]!r} in layer {source}, "
                    f"{self.layer_types[reader]!r} in layer {reader}. Share within one layer type."
                )
            rope = self.no_rope_layers
            if name == "key_sources" and rope is not None and rope[source] != rope[reader]:
                raise ValueError(
                    f"{where}, but `no_rope_layers` differ: {rope[source]} in layer {source}, {rope[reader]} in layer "
                    f"{reader}. Rotated queries need rotated keys."
                )

    def _warn_of_settings_without_effect(self) -> None:
        mode = f"`value_residual` is {self.value_residual!r}"
        depth_attention = self.value_residual == "depth_attention"
        period = f"`dwa_period` ({self.dwa_period}) is above `num_hidden_layers` ({self.num_hidden_layers})"
        for name, default, used, reason in (
            ("value_residual", "none", mixing_layers(self), "no layer has earlier values, and its own, to mix"),
            ("value_residual_layers", None, self.value_residual != "none", mode),
            ("depth_attention_stride", 1, depth_attention, mode),
            ("depth_attention_init", 1.0, depth_attention, mode),
            ("value_embeddings_init", None, self.value_embeddings, f"`value_embeddings` is {self.value_embeddings}"),
            ("dwa", False, self.dwa_period <= self.num_hidden_layers, period),
            ("dwa_dilation", 1, self.dwa, "`dwa` is False"),
            ("dwa_period", 1, self.dwa, "`dwa` is False"),
            ("attention_residual_blocks", 8, self.attention_residuals, "`attention_residuals` is False"),
        ):
            if (value := getattr(self, name)) != default and not used:
                logger.warning_once(f"`{name}`={value!r} changes nothing: {reason}.")


def _warn_of_misspelt_fields(extra: dict[str, Any]) -> None:
    # Not an error: old config files carry keys that nothing reads any more.
    names = [f.name for f in fields(ResFormerConfig)]
    for key in extra:
        if key.startswith("_") or key in _KNOWN_EXTRA_KEYS or key in names:
            continue
        if match := difflib.get_close_matches(key, names, n=1, cutoff=0.75):
            logger.warning_once(f"ResFormerConfig has no field `{key}`; did you mean `{match[0]}`? Nothing reads it.")
