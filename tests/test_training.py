"""Which parameters are trained, optimizer groups, coefficients in low precision, memory of a run."""

import mmap
from pathlib import Path

import pytest
import torch
from checkpoints import save_checkpoint
from conftest import COMBINATIONS, TinyConfig, TinyModel
from transformers import AutoModelForCausalLM, TrainingArguments

from resformer import ResFormerForCausalLM, retrofit
from resformer.configuration import key_sources, value_sources
from resformer.errors import CheckpointError
from resformer.training.freezing import trained_parameters
from resformer.training.memory import peak_memory
from resformer.training.optimizer import ConnectionTrainer, is_connection


@pytest.mark.parametrize("rate", [None, 2.0])
def test_groups_hold_every_parameter_once_and_never_decay_a_connection(
    method: str, rate: float | None, tiny_config: TinyConfig, tmp_path: Path
) -> None:
    model = ResFormerForCausalLM(tiny_config(method))
    arguments = TrainingArguments(tmp_path, use_cpu=True, learning_rate=1.0, weight_decay=0.1, report_to="none")
    groups = ConnectionTrainer(model=model, args=arguments, connection_learning_rate=rate).create_optimizer()
    held = [id(parameter) for group in groups.param_groups for parameter in group["params"]]
    assert sorted(held) == sorted(id(parameter) for parameter in model.parameters())
    settings = {id(p): (group["lr"], group["weight_decay"]) for group in groups.param_groups for p in group["params"]}
    for name, parameter in model.named_parameters():
        if is_connection(name):
            assert settings[id(parameter)] == (rate or 1.0, 0.0), name
        else:
            assert settings[id(parameter)] == (1.0, 0.1 if parameter.dim() == 2 else 0.0), name


@pytest.mark.parametrize("variant", [*COMBINATIONS, "svformer", "cla2"])
def test_sharing_trains_what_reads_and_what_is_read(variant: str, tiny_model: TinyModel) -> None:
    model = tiny_model(variant)
    names = {name for name, _ in model.named_parameters()}
    expected = {name for name in names if is_connection(name)}
    for n in range(6):
        key, value = key_sources(model.config)[n], value_sources(model.config)[n]
        layer = f"model.layers.{n}."
        read = {f"{layer}self_attn.k_proj": n in [k for m, k in enumerate(key_sources(model.config)) if m > n],
                f"{layer}self_attn.v_proj": n in [v for m, v in enumerate(value_sources(model.config)) if m > n],
                f"{layer}self_attn.q_proj": (key, value) != (n, n), f"{layer}self_attn.o_proj": (key, value) != (n, n),
                f"{layer}input_layernorm": (key, value) != (n, n)}  # fmt: skip
        expected |= {f"{module}.{kind}" for module, trained in read.items() for kind in ("weight", "bias") if trained}
    assert set(trained_parameters(model, "sharing")) == expected & names
    assert trained_parameters(model, "all") == [name for name, _ in model.named_parameters()]
    connections = [name for name in names if is_connection(name)]
    if connections:
        assert sorted(trained_parameters(model, "connections")) == sorted(connections)


@pytest.mark.parametrize(("train", "method"), [("sharing", "resformer"), ("connections", "svformer")])
def test_nothing_to_train_is_an_error(train: str, method: str, tiny_model: TinyModel) -> None:
    with pytest.raises(CheckpointError, match=f"train is '{train}', but .* use --train all"):
        trained_parameters(tiny_model(method), train)


@pytest.mark.parametrize(
    "method",
    "resformer resformer-plus resformer-dense resformer-gated depth-attention denseformer attention-residuals".split(),
)
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
    before = peak_memory()
    with mmap.mmap(-1, before) as fresh:  # not what an allocator has kept
        for page in range(0, len(fresh), mmap.PAGESIZE):
            fresh[page] = 1
    assert peak_memory() > before
