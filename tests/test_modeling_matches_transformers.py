"""Plain configurations are Transformers' own models, bit for bit, and their checkpoints load with no logit changed."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import EXACT, FAMILIES
from conftest import RAGGED, TINY, Batch, randomise
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from resformer import METHODS, ResFormerConfig, ResFormerForCausalLM
from resformer.convert.families import backbone_config
from resformer.training.optimizer import is_connection

ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 500.0},
    "linear": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 2.0},
    "yarn": {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 4},
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 500.0,
        "factor": 2.0,
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [1.5, 2.0, 3.0, 4.0],
        "original_max_position_embeddings": 8,
    },
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8,
    },
}


def twins(
    family: str, dtype: torch.dtype = torch.float32, attention: str = "sdpa", **fields: Any
) -> tuple[PreTrainedModel, PreTrainedModel]:
    """The original and the ResFormer with its weights, both in eval mode."""
    fields = {**TINY, "rope_parameters": ROPES["default"], **FAMILIES[family], **fields}
    config = AutoConfig.for_model(family.partition("-")[0], **fields)
    original = randomise(AutoModelForCausalLM.from_config(config)).to(dtype).eval()
    model = ResFormerForCausalLM(backbone_config(config)).to(dtype).eval()
    model.load_state_dict(original.state_dict(), strict=True)
    for each in (original, model):
        each.set_attn_implementation(attention)
    return original, model


def assert_same_logits(original: PreTrainedModel, model: PreTrainedModel, batch: Batch = RAGGED) -> None:
    ids, mask = batch["input_ids"], batch["attention_mask"]
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    for inputs in (
        {"input_ids": ids},
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
def test_logits_are_the_originals_bit_for_bit(family: str, attention: str, dtype: torch.dtype) -> None:
    assert_same_logits(*twins(family, dtype, attention))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("rope", ROPES)
def test_every_rope_type_gives_llamas_logits_bit_for_bit(rope: str, attention: str, dtype: torch.dtype) -> None:
    # 11 tokens are more than "dynamic" and "longrope" expect, so that both of their branches run.
    pair = twins("llama", dtype, attention, rope_parameters=dict(ROPES[rope]), max_position_embeddings=8)
    assert pair[1].model.rotary_emb.rope_type == rope
    assert_same_logits(*pair)
    assert_same_logits(*pair, {name: tensor[:, 5:] for name, tensor in RAGGED.items()})


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_are_the_originals_bit_for_bit(family: str, attention: str) -> None:
    labels = RAGGED["input_ids"].masked_fill(RAGGED["attention_mask"] == 0, -100)
    losses, gradients = [], []
    for model in twins(family, attention=attention):
        # Seed-OSS drops residuals in training, which is left behind.
        loss = model.train(not family.startswith("seed_oss"))(**RAGGED, labels=labels).loss
        loss.backward()
        losses.append(loss.detach())
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    assert torch.equal(*losses)
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        assert gradient.abs().sum() > 0, name
        assert torch.equal(gradients[1][name], gradient), name


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("family", FAMILIES)
def test_generation_gives_the_originals_logits_bit_for_bit(family: str, cache: str | None) -> None:
    # Weights as large as real models', for which PyTorch has other kernels than for tiny ones.
    expected, got = (
        model.generate(
            **RAGGED,
            max_new_tokens=6,
            do_sample=False,
            cache_implementation=cache,
            output_logits=True,
            return_dict_in_generate=True,
        )
        for model in twins(family, hidden_size=256, intermediate_size=512)
    )
    assert torch.equal(got.sequences, expected.sequences)
    assert all(torch.equal(a, b) for a, b in zip(got.logits, expected.logits, strict=True))
    assert len(got.sequences[:, 11:].unique()) > 3


# Plain checkpoints read with connections added


@pytest.fixture
def plain_checkpoint(tmp_path: Path) -> Path:
    randomise(LlamaForCausalLM(LlamaConfig(**TINY))).save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Uninitialised memory is NaN within; before, small blocks that held NaN were handed back to the allocator."""
    blocks = [torch.full((size,), float("nan")) for size in [*range(1, 130), 256, 512, 1024] for _ in range(8)]
    del blocks
    assert torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def load(path: Path, method: str, **options: Any) -> tuple[PreTrainedModel, dict[str, Any]]:
    fields = {"value_residual_init": [0.0, 1.0], "attention_residual_init": 0.0, **METHODS[method](6)}
    if method == "depth-attention":
        fields["depth_attention_init"] = 0.0
    if "value_embeddings" in fields:
        fields["value_embeddings_init"] = 0.0
    config = ResFormerConfig.from_pretrained(path, **fields)
    with poisoned_memory():
        return ResFormerForCausalLM.from_pretrained(path, config=config, output_loading_info=True, **options)


def assert_starts_as_plain_llama(model: PreTrainedModel) -> None:
    expected = torch.eye(6)
    if model.config.value_residual == "gated":
        expected[1:, 0] = float("nan")
        for layer in model.model.layers[1:]:
            assert torch.equal(layer.self_attn.value_residual.bias_gate.weight, torch.zeros(2, 32))
    torch.testing.assert_close(model.model.value_mixing_matrix(), expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(model.model.depth_mixing_matrix(), torch.eye(7)[1:])
    if model.config.attention_residuals:
        assert not any(parameter.any() for parameter in model.model.attention_residuals.parameters())
    for name, parameter in model.named_parameters():
        assert parameter.isfinite().all(), name
        assert "value_embedding" not in name or not parameter.any(), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", EXACT)
def test_plain_checkpoints_load_with_added_parameters_at_their_start(
    plain_checkpoint: Path, name: str, dtype: torch.dtype
) -> None:
    model, info = load(plain_checkpoint, name, dtype=dtype)
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    added = {key for key, _ in model.named_parameters() if is_connection(key)}
    assert info["missing_keys"] == added
    assert bool(added) == (name != "transformer")
    assert_starts_as_plain_llama(model)
    for key, tensor in model.state_dict().items():
        assert tensor.dtype == (torch.float32 if key in added and "table" not in key else dtype), key

    original = LlamaForCausalLM.from_pretrained(plain_checkpoint, dtype=dtype)
    assert_same_logits(original.eval(), model.eval())
