"""`ResFormerConfig`: a Llama-style decoder and the cross-layer connections that it has."""

import copy
import difflib
from dataclasses import fields
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers.activations import ACT2FN
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, RopeParameters
from transformers.utils import logging
from transformers.utils.type_validators import interval

from resformer.configuration.connection_fields import (
    ConnectionFields,
    check_connections,
    positive,
    positive_number,
    told_in_one_line,
)
from resformer.configuration.methods import method_fields

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


@told_in_one_line
@strict
class ResFormerConfig(ConnectionFields, PreTrainedConfig):
    r"""Configuration of a Llama-style decoder with cross-layer connections.

    With nothing set it is plain Llama, bit for bit. The backbone fields bear Llama's names and defaults; with the few
    fields of its relatives they also describe Mistral, Qwen2, Qwen3 and SmolLM3. Layers are counted from 0.

    As in [`~transformers.LlamaConfig`] are `vocab_size`, `hidden_size`, `intermediate_size`, `num_hidden_layers`,
    `num_attention_heads`, `num_key_value_heads`, `hidden_act`, `max_position_embeddings`, `initializer_range`,
    `rms_norm_eps`, `use_cache`, `pad_token_id`, `bos_token_id`, `eos_token_id`, `pretraining_tp`,
    `tie_word_embeddings`, `rope_parameters`, `attention_bias`, `attention_dropout`, `mlp_bias` and `head_dim`.
    `num_key_value_heads` below `num_attention_heads` is grouped-query attention (arXiv 2305.13245) and combines with
    everything below. `hidden_size` need not be a multiple of `num_attention_heads` when `head_dim` is given.

    Its connections are the fields of [`~resformer.configuration.ConnectionFields`], and sharing.

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
        gated_mlp (`bool`, defaults to `True`):
            Whether the MLP has a gate, as Llama's. Without, it is `down_proj(hidden_act(up_proj(x)))`; `hidden_act`
            `"relu2"` makes it nanochat's.
        final_logit_softcapping (`float`, *optional*):
            c in c tanh(logits / c), Gemma 2's and nanochat's bound of the logits, in float32; above 0.
        smear (`bool`, defaults to `False`):
            Each token's embedding takes some of that of the token before it (nanochat). The model then needs
            `input_ids`.
        value_sources (`list[int]`, *optional*):
            Layer n attends to the values of layer `value_sources[n]` and has no `v_proj` unless that is n itself.
            `[0] * N` is SVFormer (arXiv 2410.17897).
        key_sources (`list[int]`, *optional*):
            The same for keys and `k_proj`. `[0, 0, 2, 2, ...]` in both is CLA2 (arXiv 2405.12981).

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
    gated_mlp: bool = True
    final_logit_softcapping: int | float | None = positive_number(default=None)

    smear: bool = False
    value_sources: list[int] | None = None
    key_sources: list[int] | None = None
    #: Called whenever one is made: `resformer.registration` makes the models known, before AutoModel is asked for one.
    on_new = staticmethod(lambda: None)

    def __new__(cls, *args: Any, **kwargs: Any) -> "ResFormerConfig":
        ResFormerConfig.on_new()  # here, since unpickling calls no `__init__`
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
        they are validated. Fewer layers are the first ones, with their connections. `layer_types` that are all alike
        follow a new depth or window."""
        fields_here = {f.name for f in fields(cls)} - {f.name for f in fields(PreTrainedConfig)}
        overrides = {key: kwargs.pop(key) for key in fields_here & kwargs.keys()}
        _warn_of_misspelt_fields(kwargs)
        config_dict = {**config_dict, **_of_first_layers(config_dict, overrides), **overrides}
        uniform = len(set(config_dict.get("layer_types") or ())) == 1
        rederive = not overrides.keys().isdisjoint(("num_hidden_layers", "sliding_window"))
        if rederive and "layer_types" not in overrides and uniform:
            del config_dict["layer_types"]
        return super().from_dict(config_dict, **kwargs)

    # What the model, the cache and the converter read. All of it follows from the fields.

    @property
    def base_model_tp_plan(self) -> dict[str, str]:
        """How tensor parallelism splits each module of the backbone with parameters; only what exists is listed."""
        plan = {
            "layers.*.self_attn.q_proj": "colwise",
            "layers.*.self_attn.k_proj": "colwise",
            "layers.*.self_attn.v_proj": "colwise",
            "layers.*.self_attn.o_proj": "rowwise",
            "layers.*.mlp.up_proj": "colwise",
            "layers.*.mlp.down_proj": "rowwise",
        }
        if self.gated_mlp:
            plan["layers.*.mlp.gate_proj"] = "colwise"
        if self.qk_norm:
            plan["layers.*.self_attn.q_norm"] = "replicated_with_grad_allreduce"
            plan["layers.*.self_attn.k_norm"] = "replicated_with_grad_allreduce"
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
        check_connections(self)

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


def _of_first_layers(config: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """The fields of `config` that name layers, for its first layers alone, if `overrides` asks for fewer."""
    layers, before = overrides.get("num_hidden_layers"), config.get("num_hidden_layers")
    if not isinstance(layers, int) or not isinstance(before, int) or not 0 < layers < before:
        return {}
    first: dict[str, Any] = {}
    for name in ("layer_types", "no_rope_layers", "key_sources", "value_sources"):
        if isinstance(config.get(name), list):
            first[name] = config[name][:layers]
    for name in ("value_residual_layers", "value_embeddings"):
        if isinstance(config.get(name), list):
            first[name] = [layer for layer in config[name] if layer < layers]
    few = f"`num_hidden_layers`={layers} of {before} layers:"
    if config.get("value_residual") == "learnable_plus" and "value_residual" not in overrides:
        raise ValueError(
            f"{few} in mode 'learnable_plus' all layers compete for V_0, so that the first ones are no model by "
            "themselves. Load all layers, or choose another mode (`value_residual`), which starts anew."
        )
    if config.get("backout") and "backout" not in overrides:
        raise ValueError(
            f"{few} `backout` takes the middle of all layers out of the last, so that the first ones are no model by "
            "themselves. Load all layers, or give `backout=False`."
        )
    if config.get("attention_residuals") and "attention_residual_blocks" not in overrides:
        blocks = config.get("attention_residual_blocks", 8)
        starts = [start for block in range(blocks) if (start := block * before // blocks) < layers]
        if starts != [block * layers // len(starts) for block in range(len(starts))]:
            raise ValueError(
                f"{few} blocks of `attention_residuals` begin at layers {starts}, which are no equal parts of {layers} "
                f"layers. Load as many layers as a block ends with, or give `attention_residual_blocks`."
            )
        first["attention_residual_blocks"] = len(starts)
    return first


def _warn_of_misspelt_fields(extra: dict[str, Any]) -> None:
    # Not an error: old config files carry keys that nothing reads any more.
    names = [f.name for f in fields(ResFormerConfig)]
    for key in extra:
        if key.startswith("_") or key in _KNOWN_EXTRA_KEYS or key in names:
            continue
        if match := difflib.get_close_matches(key, names, n=1, cutoff=0.75):
            logger.warning_once(f"ResFormerConfig has no field {key!r}; did you mean `{match[0]}`? Nothing reads it.")
