"""Plain configurations are Transformers' own models, bit for bit, and their checkpoints load with no logit changed."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import EXACT
from conftest import RAGGED, TINY, randomise, starting_as_llama
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from resformer import ResFormerConfig, ResFormerForCausalLM, connected_config
from resformer.training.optimizer import is_connection

#: With windows, norms of their own, layers without a rotary embedding.
FAMILIES: dict[str, dict[str, Any]] = {"llama": {}, "mistral": {"sliding_window": 8}, "smollm3": {}}


def twins(
    family: str, dtype: torch.dtype = torch.float32, attention: str = "sdpa", **fields: Any
) -> tuple[PreTrainedModel, PreTrainedModel]:
    """The original and the ResFormer with its weights, both in eval mode."""
    fields = {**TINY, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}, **FAMILIES[family], **fields}
    config = AutoConfig.for_model(family, **fields)
    original = randomise(AutoModelForCausalLM.from_config(config)).to(dtype).eval()
    model = AutoModelForCausalLM.from_config(connected_config(config, "transformer")).to(dtype).eval()
    model.load_state_dict(original.state_dict(), strict=True)
    for each in (original, model):
        each.set_attn_implementation(attention)
    return original, model


def assert_same_logits(original: PreTrainedModel, model: PreTrainedModel) -> None:
    ids, mask = RAGGED["input_ids"], RAGGED["attention_mask"]
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    for inputs in (
        {"input_ids": ids},
        {"input_ids": ids, "position_ids": 3 * torch.arange(ids.shape[1]).expand_as(ids)},  # no restart: one sequence
        {"input_ids": ids, "attention_mask": mask},
        {"input_ids": ids, "attention_mask": mask, "position_ids": positions},
        {"input_ids": ids.flip(1), "attention_mask": mask.flip(1)},
        {"input_ids": ids, "logits_to_keep": 2, "use_cache": False},
    ):
        with torch.no_grad():
            expected, logits = original(**inputs).logits, model(**inputs).logits
        assert expected.isfinite().all()
        assert logits.dtype == expected.dtype
        assert torch.equal(logits, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_loss_and_gradients_are_the_originals_bit_for_bit(
    family: str, attention: str, dtype: torch.dtype
) -> None:
    original, model = twins(family, dtype, attention)
    assert_same_logits(original, model)
    labels = RAGGED["input_ids"].masked_fill(RAGGED["attention_mask"] == 0, -100)
    losses = [each.train()(**RAGGED, labels=labels).loss for each in (original, model)]
    assert torch.equal(*losses)
    sum(losses).backward()
    for (name, parameter), (same_name, twin) in zip(original.named_parameters(), model.named_parameters(), strict=True):
        assert name == same_name
        assert parameter.grad.abs().sum() > 0, name
        assert torch.equal(twin.grad, parameter.grad), name


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("family", FAMILIES)
def test_generation_gives_the_originals_logits_bit_for_bit(family: str, cache: str | None) -> None:
    # Weights as large as real models', for which PyTorch has other kernels than for tiny ones.
    options = {"max_new_tokens": 6, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    expected, got = (
        model.generate(**RAGGED, **options, cache_implementation=cache)
        for model in twins(family, hidden_size=256, intermediate_size=512)
    )
    assert torch.equal(got.sequences, expected.sequences)
    assert all(torch.equal(a, b) for a, b in zip(got.logits, expected.logits, strict=True))
    assert len(got.sequences[:, 11:].unique()) > 3


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Uninitialised memory is NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", EXACT)
def test_plain_checkpoints_load_with_added_parameters_at_their_start(
    name: str, dtype: torch.dtype, tmp_path: Path, poisoned_memory: None
) -> None:
    assert torch.empty(3).isnan().all()
    randomise(LlamaForCausalLM(LlamaConfig(**TINY))).save_pretrained(tmp_path)
    config = ResFormerConfig.from_pretrained(tmp_path, **starting_as_llama(name, TINY["num_hidden_layers"]))
    model, info = ResFormerForCausalLM.from_pretrained(tmp_path, config=config, dtype=dtype, output_loading_info=True)
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    added = {key for key, _ in model.named_parameters() if is_connection(key)}
    assert info["missing_keys"] == added
    assert bool(added) == (name != "transformer")
    for key, tensor in model.state_dict().items():
        assert tensor.dtype == (torch.float32 if key in added and "table" not in key else dtype), key

    # What was not initialised would be NaN.
    original = LlamaForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    assert_same_logits(original.eval(), model.eval())
