"""vLLM runs our models through its Transformers backend. Here: shared layers take no memory there, and linear layers of
connections are split among ranks. What cannot work is refused by the models themselves (modeling/in_vllm.py).

vLLM calls `register`, the entry point `vllm.general_plugins`, in every process that it starts.
"""

import re
from collections.abc import Callable
from typing import Any

from torch import nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from vllm import ModelRegistry
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.model_executor.models.config import MODELS_CONFIG_MAP, VerifyAndUpdateConfig
from vllm.model_executor.models.transformers import TransformersMoEForCausalLM
from vllm.model_executor.models.transformers.moe import MoEMixin
from vllm.model_executor.models.transformers.utils import replace_linear_class
from vllm.model_executor.models.utils import extract_layer_index

from resformer.configuration import key_sources, value_sources
from resformer.modeling.connected import added_modules
from resformer.registration import register_models

logger = init_logger(f"vllm.{__name__}")  # vLLM shows what is logged below its own name


def register() -> None:
    """Makes our models known to Transformers and to vLLM."""
    register_models()
    families = {name.removeprefix("ResFormer") for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()}
    for name in {"ForCausalLM", *families}:
        ModelRegistry.register_model(f"ResFormer{name}", ConnectedForCausalLM)
        MODELS_CONFIG_MAP[f"ResFormer{name}"] = WhatSharingSaves


def sharing(config: Any) -> tuple[dict[int, int], list[int]]:
    """(reader -> source, where keys and values are both one earlier layer's; the other layers that share anything)."""
    read = list(enumerate(zip(key_sources(config), value_sources(config), strict=True)))
    both = {n: key for n, (key, value) in read if key == value != n}
    return both, [n for n, pair in read if pair != (n, n) and n not in both]


class ConnectedForCausalLM(TransformersMoEForCausalLM):
    """vLLM's own class, in which a layer that reads the keys and values of one earlier layer has no cache."""

    def recursive_replace(self) -> None:
        """Splits linear layers. vLLM's own way leaves out those in an `nn.LayerNorm`, which our modules are."""
        parent: Any = super() if self.model_config.is_moe else super(MoEMixin, self)
        parent.recursive_replace()
        for outer, connection in added_modules(self.model).items():
            for inner, module in connection.named_modules():
                name = f"{outer}.{inner}"
                style = self.model.tp_plan.get(re.sub(r"\.\d+\.", ".*.", name))
                if isinstance(module, nn.Linear) and style is not None:
                    split = replace_linear_class(module, style, self.quant_config, prefix=f"model.{name}")
                    self.model.set_submodule(name, split)

    def _get_attn_cls(self) -> Callable[..., Any]:
        attention_class, (sources, _) = super()._get_attn_cls(), sharing(self.text_config)

        def attention(*, prefix: str, **kwargs: Any) -> Any:
            n = extract_layer_index(prefix)
            if n in sources:
                kwargs["kv_sharing_target_layer_name"] = prefix.replace(f".{n}.", f".{sources[n]}.")
            return attention_class(prefix=prefix, **kwargs)

        return attention


class WhatSharingSaves(VerifyAndUpdateConfig):
    """vLLM calls it once, before it starts processes and loads weights."""

    @staticmethod
    def verify_and_update_config(vllm_config: VllmConfig) -> None:
        config = vllm_config.model_config.hf_text_config
        both, one = sharing(config)
        layers = config.num_hidden_layers
        if both:
            kept = f"the cache holds {layers - len(both)} of {layers} layers."
            logger.info(f"Layers {', '.join(map(str, both))} read the keys and values of one earlier layer: {kept}")
        if one:
            logger.warning(
                f"Sharing saves no memory in layers {', '.join(map(str, one))}: vLLM stores the keys and the values of "
                "a layer or neither, and these do not read both of one earlier layer."
            )
