"""PEFT adapters hold the connections beside LoRA, and TRL's trainers take the models as they are."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import SIZES, byte_tokenizer
from conftest import others_slow
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from resformer import ResFormerConfig, ResFormerForCausalLM
from resformer.training.optimizer import is_connection

METHODS = ["transformer", "resformer", "resformer-gated", "resformer-denseformer", "svformer", "cla2"]
CONNECTIONS = ["value_residual", "depth_average"]
IDS = torch.arange(1, 41).view(2, 20)


def build(method: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A model of 6 layers that starts alike each time; connections stay in float32."""
    torch.manual_seed(0)
    model = ResFormerForCausalLM(ResFormerConfig.for_method(method, **SIZES, initializer_range=0.2))
    for name, parameter in model.named_parameters():
        if not is_connection(name):
            parameter.data = parameter.data.to(dtype)
    return model


def adapt(model: PreTrainedModel, targets: str | list[str] = "all-linear", **options: Any) -> PeftModel:
    config = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=targets, **options)
    return get_peft_model(model, config)


def train(model: nn.Module, steps: int = 3) -> None:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        model(IDS, labels=IDS).loss.backward()
        optimizer.step()


@torch.no_grad()
def logits_of(model: nn.Module) -> torch.Tensor:
    return model.eval()(IDS).logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "v_proj"]], ids=["all-linear", "q-v"])
@pytest.mark.parametrize("method", METHODS)
def test_an_adapter_trains_saves_reloads_and_merges_lora_and_connections(
    method: str, targets: str | list[str], dtype: torch.dtype, tmp_path: Path
) -> None:
    base = build(method, dtype)
    source = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    expected_base = logits_of(base)
    connections = {name for name in source if is_connection(name)}
    model = adapt(base, targets, modules_to_save=CONNECTIONS)
    before = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    assert sum(is_connection(name) for name in before) == len(connections)
    lora = {name.split(".lora_")[0].rsplit(".", 1)[1] for name in before if "lora_" in name}
    everything = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert lora == (everything if targets == "all-linear" else {"q_proj", "v_proj"})

    train(model)
    for name, parameter in model.named_parameters():
        if name in before:
            assert not torch.equal(parameter, before[name]), name
            assert parameter.dtype == torch.float32, name
    expected = logits_of(model)
    assert (expected - expected_base).abs().max() > 0.1

    model.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(build(method, dtype), tmp_path)
    assert torch.equal(logits_of(again), expected)
    with again.disable_adapter():
        assert torch.equal(logits_of(again), expected_base)

    # LoRA is taken out. The connections are PEFT's trained copies, which it puts in place of the originals.
    unloaded = again.unload()
    assert type(unloaded) is ResFormerForCausalLM
    assert unloaded.state_dict().keys() == source.keys()
    for name, tensor in unloaded.state_dict().items():
        assert torch.equal(tensor, source[name]) != (name in connections), name

    merged = model.merge_and_unload()
    assert merged.state_dict().keys() == source.keys()
    difference = (logits_of(merged) - expected).float().norm() / expected.float().norm()
    assert difference < (1e-5 if dtype == torch.float32 else 0.05)  # weights of bfloat16 take LoRA's part rounded
    merged.save_pretrained(tmp_path / "merged")
    assert torch.equal(logits_of(AutoModelForCausalLM.from_pretrained(tmp_path / "merged")), logits_of(merged))


def test_mixing_matrices_of_an_adapted_model_are_the_trained_ones() -> None:
    model = adapt(build("resformer-denseformer"), modules_to_save=CONNECTIONS)
    decoder = model.base_model.model.model
    before = decoder.value_mixing_matrix(), decoder.depth_mixing_matrix()
    train(model)
    after = decoder.value_mixing_matrix(), decoder.depth_mixing_matrix()
    assert all((b - a).abs().max() > 1e-3 for a, b in zip(before, after, strict=True))
    merged = model.merge_and_unload().model
    assert torch.equal(merged.value_mixing_matrix(), after[0])
    assert torch.equal(merged.depth_mixing_matrix(), after[1])


def test_connections_left_out_of_an_adapter_stay_and_gates_take_lora() -> None:
    model = adapt(build("resformer-gated"))
    assert any("bias_gate.lora_A" in name for name, _ in model.named_parameters())
    train(model)
    expected = logits_of(model)
    merged = model.merge_and_unload()
    assert (logits_of(merged) - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert merged.model.layers[1].self_attn.value_residual.bias_gate.weight.any()  # it started at 0
    assert torch.equal(merged.model.value_residual.bias_own, build("resformer-gated").model.value_residual.bias_own)


# TRL

TEXTS = ["Values of the first layer reach the last one. " * n for n in (1, 3, 2, 1, 2, 1, 3, 1)]


@pytest.fixture
def sft(tmp_path: Path) -> Callable[..., SFTTrainer]:
    def make(model: PreTrainedModel, dataset: dict[str, list[str]], **options: Any) -> SFTTrainer:
        config = SFTConfig(tmp_path / "sft", max_steps=2, report_to="none", use_cpu=True, bf16=False, **options)
        return SFTTrainer(
            model=model, args=config, train_dataset=Dataset.from_dict(dataset), processing_class=byte_tokenizer()
        )

    return make


@pytest.mark.parametrize("method", METHODS)
def test_packing_gives_each_text_the_loss_and_the_gradients_it_has_alone(
    method: str, sft: Callable[..., SFTTrainer]
) -> None:
    packed = sft(build(method), {"text": TEXTS}, packing=True, max_length=192, per_device_train_batch_size=4)
    (batch,) = packed.get_train_dataloader()
    assert batch["input_ids"].shape[0] == 1
    starts = (batch["position_ids"][0] == 0).nonzero().flatten().tolist()
    assert len(starts) == len(TEXTS)
    packed.model(**batch).loss.backward()

    alone = build(method)
    tokens = sum(len(text) for text in TEXTS)  # each text's bytes and its end, less the first, which none predicts
    ids = [text[None] for text in batch["input_ids"][0].tensor_split(starts[1:])]
    assert sum(text.shape[1] - 1 for text in ids) == tokens
    loss = sum(alone(text, labels=text, num_items_in_batch=tokens).loss for text in ids)
    loss.backward()
    for (name, parameter), packed_parameter in zip(alone.named_parameters(), packed.model.parameters(), strict=True):
        difference = (packed_parameter.grad - parameter.grad).abs().max()
        assert difference <= 1e-4 * parameter.grad.abs().max(), name


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("method", others_slow(METHODS, ["resformer-denseformer", "svformer"]))
def test_sft_trains_a_model_and_an_adapter(method: str, packing: bool, sft: Callable[..., SFTTrainer]) -> None:
    for model in (build(method), adapt(build(method), modules_to_save=CONNECTIONS)):
        before = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
        trainer = sft(model, {"text": TEXTS}, packing=packing, max_length=64, learning_rate=1e-2)
        trainer.train()
        for name, parameter in trainer.model.named_parameters():
            if name in before:
                assert not torch.equal(parameter, before[name]), name
        decayed = {id(p) for group in trainer.optimizer.param_groups if group["weight_decay"] for p in group["params"]}
        assert not [name for name, p in trainer.model.named_parameters() if is_connection(name) and id(p) in decayed]


def test_only_the_completion_is_learned(sft: Callable[..., SFTTrainer]) -> None:
    pairs = {"prompt": ["two and two are"] * 4, "completion": [" four", " five", " three", " one"]}
    trainer = sft(build("resformer-denseformer"), pairs, completion_only_loss=True, per_device_train_batch_size=4)
    (batch,) = trainer.get_train_dataloader()
    learned = (batch["labels"] != -100).sum(dim=1)
    assert sorted(learned.tolist()) == sorted(len(text) + 1 for text in pairs["completion"])  # its bytes and the end
    assert (batch["labels"][:, : len("two and two are")] == -100).all()
    trainer.train()
    assert trainer.state.log_history[-1]["train_loss"] > 0


@pytest.mark.parametrize("method", ["resformer-denseformer", "svformer"])
def test_dpo_prefers_what_was_chosen(method: str, tmp_path: Path) -> None:
    pairs = {"prompt": ["two and two are"] * 4, "chosen": [" four"] * 4, "rejected": [" five"] * 4}
    trainer = DPOTrainer(
        model=build(method),
        ref_model=build(method),
        args=DPOConfig(
            tmp_path, max_steps=3, logging_steps=1, learning_rate=1e-3, report_to="none", use_cpu=True, bf16=False
        ),
        train_dataset=Dataset.from_dict(pairs),
        processing_class=byte_tokenizer(),
    )
    trainer.train()
    margins = [entry["rewards/margins"] for entry in trainer.state.log_history if "rewards/margins" in entry]
    assert margins[0] == pytest.approx(0.0, abs=1e-6)
    assert margins[-1] > margins[1] > 0.0
