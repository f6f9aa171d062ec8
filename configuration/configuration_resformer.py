"""`ResFormerConfig`: Llama's configuration with cross-layer connections."""

import copy
from dataclasses import fields
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers.models.llama.configuration_llama import LlamaConfig

from resformer.configuration.connected_config import ConnectedConfig
from resformer.configuration.connection_fields import told_in_one_line
from resformer.configuration.methods import method_fields

__all__ = ["ResFormerConfig"]

#: What decoders like Llama's have and Llama lacks -> its values without effect, and a family that has it.
_NOT_LLAMAS: dict[str, tuple[tuple[Any, ...], str]] = {
    "qk_norm": ((False,), "qwen3"),
    "no_rope_layers": ((None,), "smollm3"),
    "sliding_window": ((None,), "mistral"),
    "layer_types": ((None, "full_attention"), "qwen3"),
    "gated_mlp": ((True,), "arcee"),
    "attention_out_bias": ((None,), "qwen2"),
    "final_logit_softcapping": ((None,), "gemma2"),
    "smear": ((False,), "nanochat_2026"),
}
_SIZES = (
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads "
    "max_position_embeddings head_dim"
).split()


@told_in_one_line
@strict
class ResFormerConfig(ConnectedConfig, LlamaConfig):
    r"""[`~transformers.LlamaConfig`] with cross-layer connections. With none set it is plain Llama, bit for bit.

    Its connections are the fields of [`~resformer.configuration.ConnectionFields`]. `num_key_value_heads` below
    `num_attention_heads` is grouped-query attention (arXiv 2305.13245) and combines with all of them. Layers are
    counted from 0. The configuration of another family with connections: `resformer.connected_config`.

    Raises:
        huggingface_hub.errors.StrictDataclassError: a field, or two fields together, do not fit; the message names
            them, their values and what is allowed.

    ```python
    >>> from resformer import ResFormerConfig, ResFormerForCausalLM

    >>> config = ResFormerConfig.for_method("resformer", num_hidden_layers=12, hidden_size=768, num_attention_heads=12)
    >>> model = ResFormerForCausalLM(config)
    ```"""

    model_type = "resformer"
    #: Called whenever one is made: `resformer.registration` makes the models known, before AutoModel is asked for one.
    on_new = staticmethod(lambda: None)

    def __new__(cls, *args: Any, **kwargs: Any) -> "ResFormerConfig":
        ResFormerConfig.on_new()  # here, since unpickling calls no `__init__`
        return super().__new__(cls)

    def __post_init__(self, **kwargs: Any) -> None:
        # A Llama checkpoint read as a ResFormerConfig would otherwise call the instance "llama".
        if (family := kwargs.pop("model_type", self.model_type)) not in (self.model_type, LlamaConfig.model_type):
            raise ValueError(
                f"A configuration of model_type {family!r} is not Llama's: `resformer.connect` and `resformer convert` "
                "give a model of that family connections, in its own class."
            )
        _refuse_what_llama_lacks(kwargs)
        for name in _SIZES:  # Llama's configuration divides by some
            if isinstance(value := getattr(self, name), int) and value < 1:
                raise ValueError(f"`{name}` is {value}: expected a positive integer.")
        if self.num_key_value_heads and self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"`num_attention_heads` ({self.num_attention_heads}) is not a multiple of `num_key_value_heads` "
                f"({self.num_key_value_heads}): every key/value head must serve the same number of query heads."
            )
        # Copies: Transformers fills the rope dicts in place, and the caller may reuse its lists.
        for f in fields(self):
            if isinstance(value := getattr(self, f.name), (dict, list)):
                setattr(self, f.name, copy.deepcopy(value))
        if kwargs.get("rope_scaling") is not None:
            kwargs["rope_scaling"] = copy.deepcopy(kwargs["rope_scaling"])
        super().__post_init__(**kwargs)

    def validate_rope(self) -> None:
        try:
            super().validate_rope()
        except KeyError as error:  # a missing key that the rope type needs
            raise ValueError(error.args[0]) from error

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
        """As of `ConnectedConfig`; fields of other families are refused."""
        _refuse_what_llama_lacks(dict(kwargs))
        return super().from_dict(config_dict, **kwargs)


def _refuse_what_llama_lacks(extra: dict[str, Any]) -> None:
    """Transformers keeps unknown fields as attributes that nothing reads."""
    for name, (allowed, family) in _NOT_LLAMAS.items():
        value = extra.pop(name, allowed[0])
        if not all(each in allowed for each in (value if isinstance(value, list) else [value])):
            raise ValueError(
                f"`{name}`={value!r} is no field of Llama's decoder, which `ResFormerConfig` is. Another family has "
                f"it, such as {family!r}: `resformer.connected_config(AutoConfig.for_model({family!r}, ...), METHOD)`."
            )
