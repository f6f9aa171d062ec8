"""Models in vLLM, which builds them within its Transformers backend: what cannot work there is refused, what it leaves
out is set. It is the model's own code, since a bundle is served without this package's plug-in.
"""

import sys
from collections.abc import Mapping
from typing import Any

#: Model types whose logits are not what vLLM computes: `lm_head` of the last hidden states, times `logit_scale`, and
#: capped by `final_logit_softcapping`. The first divide by `logits_scaling`. Measured by tests/test_in_vllm.py.
DIVIDED = frozenset("granite granite_swa granitemoe granitemoe_swa granitemoehybrid granitemoeshared".split())
OTHER_HEADS = frozenset(
    "bert big_bird camembert data2vec-text dory electra ernie falcon_h1 hyperclovax inkling_text megatron-bert "
    "minicpm3 modernbert-decoder prophetnet recurrent_gemma rembert roberta roberta-prelayernorm roc_bert roformer "
    "xlm-roberta xlm-roberta-xl xlstm".split()
)


def prepare_for_vllm(config: Any, view: Any, plan: Mapping[str, str]) -> None:
    """Called when a model is built, before weights are loaded; does nothing outside of vLLM.

    Args:
        config: of the text model.
        view: what connections read of it.
        plan: how tensor parallelism splits the connections, by the names of their modules.

    Raises:
        ValueError: vLLM cannot serve it as it is asked to.
    """
    if not str(getattr(config, "_attn_implementation", "")).startswith("vllm") or "vllm.config" not in sys.modules:
        return
    settings = sys.modules["vllm.config"].get_current_vllm_config()
    stages = settings.parallel_config.pipeline_parallel_size
    ranks = settings.parallel_config.tensor_parallel_size
    if stages > 1:
        raise ValueError(
            f"pipeline_parallel_size={stages}: values and states of earlier layers do not reach another stage. Use 1, "
            "with tensor parallelism for several devices."
        )
    if ranks > 1:
        # vLLM splits linear layers by itself, but not those of connections: our plug-in, which a bundle lacks, does.
        whole = {"local_params"} if __name__.startswith("resformer.") else {"local_params", "colwise"}
        if names := [name.rpartition("layers.*.")[2] for name, style in plan.items() if style in whole]:
            raise ValueError(f"tensor_parallel_size={ranks}: vLLM cannot split `{names[0]}` of this model. Use 1.")
        if view.num_key_value_heads % ranks:
            raise ValueError(
                f"tensor_parallel_size={ranks}: `num_key_value_heads` is {view.num_key_value_heads}, not a multiple."
            )
    family = config.model_type.removeprefix("resformer_")
    if family in OTHER_HEADS:
        raise ValueError(
            f"{family}: vLLM computes logits as `lm_head` of the last hidden states, and this family does more. "
            "`resformer serve MODEL` serves it with Transformers."
        )
    if family in DIVIDED:
        settings.model_config.hf_text_config.logit_scale = 1 / config.logits_scaling
    if settings.device_config.device_type == "cpu":
        # On CPUs vLLM's products write into buffers in place. Inductor loses sight of that and fuses sums over several
        # layers' states into kernels that run before those states are there.
        import torch._inductor.config  # two seconds

        torch._inductor.config.max_fusion_size = 1


__all__ = ["DIVIDED", "OTHER_HEADS", "prepare_for_vllm"]
