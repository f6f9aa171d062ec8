"""The corpus, the optimizer groups and fine-tuning with the stock Trainer."""

import math
import mmap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoints import byte_tokenizer, save_checkpoint
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
)

from resformer import METHODS, ResFormerConfig, ResFormerForCausalLM, retrofit
from resformer.training.corpus import pack, standard_library
from resformer.training.finetune import PeakMemory, finetune
from resformer.training.optimizer import is_connection, parameter_groups

SMALL = {
    "vocab_size": 257,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def test_held_out_modules_are_not_trained_on_and_the_order_is_fixed() -> None:
    train, held_out = (list(standard_library(held_out=flag)) for flag in (False, True))
    assert len(train) > 3 * len(held_out) > 30
    assert not {text for text in train if len(text) > 500} & {text for text in held_out if len(text) > 500}
    assert train == list(standard_library(held_out=False))
    assert train != list(standard_library(held_out=False, seed=1))


def test_blocks_are_the_texts_end_to_end() -> None:
    dataset = pack(["abc", "de"], byte_tokenizer(), block=3, count=2)
    tokens = [token for block in dataset["input_ids"] for token in block]
    assert tokens == [*byte_tokenizer()("abc")["input_ids"], 0, *byte_tokenizer()("de")["input_ids"]]
    assert dataset["labels"] == dataset["input_ids"]


def test_blocks_take_a_bounded_part_of_each_text() -> None:
    dataset = pack(["a" * 100, "b" * 100], byte_tokenizer(), block=4, count=4, blocks_per_text=2)
    letters = byte_tokenizer().decode([token for block in dataset["input_ids"] for token in block])
    assert letters.replace("<end>", "|").replace(" ", "") == "aaaaaaaa|bbbbbbb"


def test_too_little_text_is_said() -> None:
    assert len(pack(["abcdef"], byte_tokenizer(), block=3, count=9)) == 2
    with pytest.raises(ValueError, match="have 7 tokens, too few for one block of 8"):
        pack(["abcdef"], byte_tokenizer(), block=8, count=9)


@pytest.mark.parametrize("method", METHODS)
def test_groups_hold_every_parameter_once_and_never_decay_a_connection(method: str) -> None:
    model = ResFormerForCausalLM(ResFormerConfig.for_method(method, **SMALL))
    groups = parameter_groups(model, learning_rate=1.0, connection_learning_rate=2.0, weight_decay=0.1)
    held = [id(parameter) for group in groups for parameter in group["params"]]
    assert sorted(held) == sorted(id(parameter) for parameter in model.parameters())
    settings = {id(p): (group["lr"], group["weight_decay"]) for group in groups for p in group["params"]}
    for name, parameter in model.named_parameters():
        if is_connection(name):
            assert settings[id(parameter)] == (2.0, 0.0), name
        else:
            assert settings[id(parameter)] == (1.0, 0.1 if parameter.dim() == 2 else 0.0), name


def test_the_stock_trainer_decays_no_connection(method: str, tmp_path: Path) -> None:
    model = ResFormerForCausalLM(ResFormerConfig.for_method(method, **SMALL))
    trainer = Trainer(model=model, args=TrainingArguments(tmp_path, use_cpu=True, weight_decay=0.1, report_to="none"))
    decayed = {
        id(p) for group in trainer.create_optimizer().param_groups if group["weight_decay"] for p in group["params"]
    }
    names = [name for name, parameter in model.named_parameters() if id(parameter) in decayed]
    assert names
    assert not [name for name in names if is_connection(name)]


@pytest.fixture
def exact_start() -> Callable[[str], PreTrainedModel]:
    def build(method: str) -> PreTrainedModel:
        torch.manual_seed(0)
        if method == "llama":
            return LlamaForCausalLM(LlamaConfig(**SMALL))
        llama = build("llama")
        model = ResFormerForCausalLM(ResFormerConfig.for_method(method, **SMALL, value_residual_init=[0.0, 1.0]))
        model.load_state_dict(llama.state_dict(), strict=False)
        return model

    return build


def test_finetuning_learns_and_starts_both_models_alike(exact_start: Callable[[str], PreTrainedModel]) -> None:
    train = pack(standard_library(held_out=False), byte_tokenizer(), block=64, count=64)
    evaluation = pack(standard_library(held_out=True), byte_tokenizer(), block=64, count=8)
    results = {}
    for name in ("llama", "resformer-denseformer"):
        model = exact_start(name)
        result = finetune(
            model, train, evaluation, name=name, steps=8, batch=8, learning_rate=3e-3, connection_learning_rate=1e-2
        )
        results[name] = result
        assert result.training_tokens == 8 * 8 * 64
        assert result.perplexity_after < 0.8 * result.perplexity_before
        assert result.peak_memory > 0
        # No autocast is left around the forward: what is saved computes what is here.
        ids = torch.tensor([evaluation[0]["input_ids"]])
        with torch.no_grad():
            loss = model.eval()(ids, labels=ids).loss
        assert loss.dtype == torch.float32
        # With gradients the depth average is summed in another order.
        torch.testing.assert_close(model(ids, labels=ids).loss.detach(), loss, rtol=1e-6, atol=0.0)
        assert "autocast" not in repr(model.forward)
    assert results["llama"].perplexity_before == results["resformer-denseformer"].perplexity_before
    matrix = model.model.value_mixing_matrix()
    assert (matrix[1:, 0] != 0).all()
    assert math.isfinite(results["resformer-denseformer"].perplexity_after)


@pytest.mark.parametrize("method", ["resformer", "resformer-plus", "resformer-dense", "resformer-gated", "denseformer"])
def test_coefficients_learn_in_a_bfloat16_model_and_reload_as_they_were_saved(method: str, tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "llama", dtype=torch.bfloat16)
    retrofit(tmp_path / "llama", tmp_path / "out", method)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.dtype == torch.bfloat16
    connections = {name: parameter for name, parameter in model.named_parameters() if is_connection(name)}
    assert {parameter.dtype for parameter in connections.values()} == {torch.float32}
    before = {name: parameter.detach().clone() for name, parameter in connections.items()}
    optimizer = torch.optim.AdamW(connections.values(), lr=1e-4, weight_decay=0.0)
    ids = torch.arange(1, 41).view(2, 20)
    for _ in range(2):  # s of learnable_plus moves first
        optimizer.zero_grad()
        model(ids, labels=ids).loss.backward()
        optimizer.step()
    for name, parameter in connections.items():
        assert 5e-5 < (parameter - before[name]).abs().max() < 5e-4, name
    model.save_pretrained(tmp_path / "trained")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "trained", dtype=torch.bfloat16)
    for (name, parameter), (_, reloaded) in zip(model.named_parameters(), again.named_parameters(), strict=True):
        assert reloaded.dtype == parameter.dtype, name
        assert torch.equal(reloaded, parameter), name


def test_peak_memory_sees_an_allocation() -> None:
    with PeakMemory(interval=0.005) as small:
        pass
    with PeakMemory(interval=0.005) as large, mmap.mmap(-1, 200_000_000) as fresh:  # not what an allocator has kept
        for page in range(0, len(fresh), mmap.PAGESIZE):
            fresh[page] = 1
    assert large.peak - small.peak > 150_000_000
