"""What models refuse and set when vLLM builds them, asked without vLLM; tests/test_vllm.py runs it."""

import re
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._inductor.config
from small_decoders import small_config
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from resformer import connected_config
from resformer.modeling.in_vllm import DIVIDED, OTHER_HEADS
from resformer.modeling.measured import MEASURED


def head_is_vllms(model_type: str) -> bool:
    """Whether logits are `lm_head` of the last hidden states, scaled and capped by the two fields that vLLM reads."""
    config = small_config(model_type)
    text = config.get_text_config(decoder=True)
    for name, value in vars(text).items():
        if isinstance(value, float) and re.search(r"logit|lm_head_mult|mup|softcap", name):
            setattr(text, name, 3.0 if "cap" in name else 1.7)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    ids = torch.arange(3, 12)[None]
    head, decoder = model.get_output_embeddings(), model.model if model.base_model is model else model.base_model
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
        logits = model(ids, use_cache=False).logits
        hidden_states = decoder(input_ids=ids, use_cache=False, return_dict=False)[0]
        if hidden_states.shape[-1] != head.weight.shape[-1]:
            return False
        expected = nn.functional.linear(hidden_states, head.weight, getattr(head, "bias", None))
    if scale := getattr(text, "logit_scale", None):
        expected = expected * scale
    if cap := getattr(text, "final_logit_softcapping", None):
        expected = cap * torch.tanh(expected / cap)
    return torch.allclose(logits, expected, rtol=1e-3, atol=1e-4 * logits.abs().max().item())


@pytest.mark.slow
def test_heads_that_do_more_than_vllm_computes_are_known() -> None:
    causal = MEASURED & MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys()
    assert {each for each in causal if not head_is_vllms(each)} == causal & (DIVIDED | OTHER_HEADS)


def built(family: str, method: str, monkeypatch: pytest.MonkeyPatch, stages: int = 1, ranks: int = 1) -> Any:
    """The text model's configuration that vLLM reads, after it has built the model."""
    config = connected_config(small_config(family), method)
    settings = SimpleNamespace(
        parallel_config=SimpleNamespace(pipeline_parallel_size=stages, tensor_parallel_size=ranks),
        model_config=SimpleNamespace(hf_text_config=config.get_text_config()),
        device_config=SimpleNamespace(device_type="cpu"),
    )
    monkeypatch.setitem(sys.modules, "vllm.config", SimpleNamespace(get_current_vllm_config=lambda: settings))
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "vllm", ALL_ATTENTION_FUNCTIONS["sdpa"])
    config.get_text_config()._attn_implementation = "vllm"
    with torch.device("meta"), torch._inductor.config.patch():
        AutoModel.from_config(config)
    return config.get_text_config()


@pytest.mark.parametrize(
    ("family", "method", "options", "words"),
    [
        ("llama", "resformer", {"stages": 2}, "earlier layers do not reach another stage"),
        ("qwen3", "value-embeddings", {"ranks": 2}, "cannot split `value_embedding.table` of this model"),
        ("llama", "depth-attention", {"ranks": 2}, "cannot split `value_residual` of this model"),
        ("qwen3_moe", "resformer", {"ranks": 4}, "`num_key_value_heads` is 2, not a multiple"),
        ("minicpm3", "resformer", {}, "minicpm3: vLLM computes logits as `lm_head`"),
    ],
)
def test_what_vllm_cannot_serve_is_refused(
    family: str, method: str, options: dict[str, int], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=words):
        built(family, method, monkeypatch, **options)


def test_vllm_scales_granites_logits_and_fuses_nothing_on_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch._inductor.config.patch(max_fusion_size=64):
        config = built("granite", "resformer", monkeypatch, ranks=2)
        assert torch._inductor.config.max_fusion_size == 1
    assert config.logit_scale == 1 / config.logits_scaling
