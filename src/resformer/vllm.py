"""vLLM runs our models through its Transformers backend. Here: shared layers take no memory there, and what cannot work
is refused at start-up.

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
from vllm.model_executor.models.transformers import TransformersForCausalLM
from vllm.model_executor.models.transformers.utils import replace_linear_class
from vllm.model_executor.models.utils import extract_layer_index
from vllm.platforms import current_platform

from resformer.configuration import key_sources, value_sources
from resformer.modeling.connection import kinds_in
from resformer.registration import register_models

logger = init_logger(f"vllm.{__name__}")  # vLLM shows what is logged below its own name


def register() -> None:
    """Makes our models known to Transformers and to vLLM."""
    register_models()
    ModelRegistry.register_model("ResFormerForCausalLM", ResFormerForCausalLM)
    for name in {f"ResFormer{family}" for family in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()}:
        ModelRegistry.register_model(name, TransformersForCausalLM)
        MODELS_CONFIG_MAP[name] = OtherFamily
    MODELS_CONFIG_MAP["ResFormerForCausalLM"] = StartupChecks


def sharing(config: Any) -> tuple[dict[int, int], list[int]]:
    """(reader -> source, where keys and values are both one earlier layer's; the other layers that share anything)."""
    read = list(enumerate(zip(key_sources(config), value_sources(config), strict=True)))
    both = {n: key for n, (key, value) in read if key == value != n}
    return both, [n for n, pair in read if pair != (n, n) and n not in both]


class ResFormerForCausalLM(TransformersForCausalLM):
    """vLLM's own class, in which a layer that reads the keys and values of one earlier layer has no cache."""

    def recursive_replace(self) -> None:
        """Splits linear layers. vLLM's own way leaves out those in an `nn.LayerNorm`, which our modules are."""
        super().recursive_replace()
        plan = [entry for kind in kinds_in(self.text_config) for entry in kind.tp_plan(self.text_config).items()]
        for pattern, style in plan:
            for name, module in list(self.model.named_modules()):
                if isinstance(module, nn.Linear) and re.fullmatch(pattern.replace("*", r"\d+"), name):
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


class OtherFamily(VerifyAndUpdateConfig):
    """A decoder of another family, whose connections vLLM would leave out."""

    @staticmethod
    def verify_and_update_config(vllm_config: VllmConfig) -> None:
        raise ValueError(
            f"{vllm_config.model_config.architectures[0]}: vLLM puts its own code in the place of this family's "
            "attention, past the connections. `resformer serve MODEL` serves it with Transformers."
        )


class StartupChecks(VerifyAndUpdateConfig):
    """vLLM calls it once, before it starts processes and loads weights."""

    @staticmethod
    def verify_and_update_config(vllm_config: VllmConfig) -> None:
        """Refuses what cannot work, avoids what works wrongly, and says what sharing saves."""
        config = vllm_config.model_config.hf_text_config
        stages = vllm_config.parallel_config.pipeline_parallel_size
        ranks = vllm_config.parallel_config.tensor_parallel_size
        if stages > 1:
            raise ValueError(
                f"pipeline_parallel_size={stages}: values and states of earlier layers do not reach another stage. Use "
                "1, with tensor parallelism for several devices."
            )
        if config.smear:
            raise ValueError(
                "`smear` reads the embedding of the token before, which vLLM does not keep. `resformer serve "
                "MODEL` serves it with Transformers."
            )
        # vLLM splits linear layers only: a parameter of which each rank needs a part would stay whole.
        plan = [entry for kind in kinds_in(config) for entry in kind.tp_plan(config).items()]
        whole = [name.rpartition("layers.*.")[2] for name, style in plan if style == "local_params"]
        if ranks > 1 and whole:
            raise ValueError(f"tensor_parallel_size={ranks}: vLLM cannot split `{whole[0]}` of this model. Use 1.")
        if config.num_key_value_heads % ranks:
            raise ValueError(
                f"tensor_parallel_size={ranks}: `num_key_value_heads` is {config.num_key_value_heads}, not a multiple."
            )
        if current_platform.is_cpu():
            # On CPUs vLLM's products write into buffers in place. Inductor loses sight of that and fuses sums over
            # several layers' states into kernels that run before those states are there.
            vllm_config.compilation_config.inductor_compile_config["max_fusion_size"] = 1
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
