"""vLLM runs our models through its Transformers backend. Here: shared layers take no memory there, and what cannot work
is refused at start-up.

vLLM calls `register`, the entry point `vllm.general_plugins`, in every process that it starts.
"""

from collections.abc import Callable
from typing import Any

from vllm import ModelRegistry
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.model_executor.models.config import MODELS_CONFIG_MAP, VerifyAndUpdateConfig
from vllm.model_executor.models.transformers import TransformersForCausalLM
from vllm.model_executor.models.utils import extract_layer_index

from resformer.configuration import key_sources, value_sources
from resformer.registration import register_models

__all__ = ["ResFormerForCausalLM", "StartupChecks", "register"]

logger = init_logger(f"vllm.{__name__}")  # vLLM shows what is logged below its own name


def register() -> None:
    """Makes our models known to Transformers and to vLLM."""
    register_models()
    ModelRegistry.register_model("ResFormerForCausalLM", ResFormerForCausalLM)
    MODELS_CONFIG_MAP["ResFormerForCausalLM"] = StartupChecks


def whole_layers_of(config: Any) -> dict[int, int]:
    """Reader -> source, of layers whose keys and values are both those of one earlier layer."""
    pairs = enumerate(zip(key_sources(config), value_sources(config), strict=True))
    return {n: key for n, (key, value) in pairs if key == value != n}


class ResFormerForCausalLM(TransformersForCausalLM):
    """vLLM's own class, in which a layer that reads the keys and values of one earlier layer has no cache."""

    def _get_attn_cls(self) -> Callable[..., Any]:
        attention_class, sources = super()._get_attn_cls(), whole_layers_of(self.text_config)

        def attention(*, prefix: str, **kwargs: Any) -> Any:
            n = extract_layer_index(prefix)
            if n in sources:
                kwargs["kv_sharing_target_layer_name"] = prefix.replace(f".{n}.", f".{sources[n]}.")
            return attention_class(prefix=prefix, **kwargs)

        return attention


class StartupChecks(VerifyAndUpdateConfig):
    """Called by vLLM once, before processes are started and weights are loaded."""

    @staticmethod
    def verify_and_update_config(vllm_config: VllmConfig) -> None:
        """Refuses what cannot work, and says what sharing saves.

        Raises:
            ValueError: more than one pipeline stage, or a tensor parallelism that the model's plan does not allow.
        """
        config = vllm_config.model_config.hf_text_config
        stages = vllm_config.parallel_config.pipeline_parallel_size
        ranks = vllm_config.parallel_config.tensor_parallel_size
        if stages > 1:
            raise ValueError(
                f"pipeline_parallel_size={stages}: values and states of earlier layers do not reach another stage. Use "
                "1, with tensor parallelism for several devices."
            )
        # vLLM splits linear layers alone: other parameters of which a rank needs its part stay whole.
        whole = [name for name, style in config.base_model_tp_plan.items() if style == "local_params"]
        if ranks > 1 and whole:
            raise ValueError(
                f"tensor_parallel_size={ranks}: vLLM cannot split {', '.join(whole)} of this model. Use 1."
            )
        if config.num_key_value_heads % ranks:
            raise ValueError(
                f"tensor_parallel_size={ranks}: num_key_value_heads is {config.num_key_value_heads}, which is not a "
                "multiple of it."
            )
        layers, whole_layers = range(config.num_hidden_layers), whole_layers_of(config)
        if whole_layers:
            logger.info(
                "Layers %s read the keys and values of one earlier layer: the cache holds %d of %d layers.",
                _listed(whole_layers),
                len(layers) - len(whole_layers),
                len(layers),
            )
        keys, values = key_sources(config), value_sources(config)
        partly = [n for n in layers if n not in whole_layers and (keys[n], values[n]) != (n, n)]
        if partly:
            logger.warning(
                "Sharing saves no memory in layers %s: vLLM stores the keys and the values of a layer or neither, and "
                "these do not read both of one earlier layer.",
                _listed(partly),
            )


def _listed(layers: Any) -> str:
    return ", ".join(map(str, layers))
