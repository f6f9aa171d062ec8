"""Distillation: the loss against a naive float64 twin, its trainer against the gradient of the whole batch."""

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import tiny_model, training_arguments, training_rows
from transformers import PreTrainedModel, default_data_collator

from resformer.training.distillation import DistillationTrainer, distillation_loss


def counted(labels: torch.Tensor) -> list[list[int]]:
    """[row, position] of each position that predicts a label."""
    return (labels[:, 1:] != -100).nonzero().tolist()


def naive(
    logits: torch.Tensor, teacher: torch.Tensor, labels: torch.Tensor, weight: float, temperature: float
) -> torch.Tensor:
    """Position by position, in float64, from the definitions."""
    total = torch.zeros((), dtype=torch.float64)
    for row, position in counted(labels):
        p = torch.softmax(logits[row, position].double(), -1)
        p_soft = torch.softmax(logits[row, position].double() / temperature, -1)
        q_soft = torch.softmax(teacher[row, position].double() / temperature, -1)
        divergence = (q_soft * (q_soft / p_soft).log()).sum()
        total = total - (1 - weight) * p[labels[row, position + 1]].log() + weight * temperature**2 * divergence
    return total / len(counted(labels))


@pytest.mark.parametrize("weight", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("chunk", [1, 5, 512])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_loss_and_gradient_are_the_naive_twins(
    weight: float, temperature: float, chunk: int, dtype: torch.dtype
) -> None:
    logits = (2 * torch.randn(3, 7, 11)).to(dtype).requires_grad_()
    teacher = (2 * torch.randn(3, 7, 11)).to(dtype)
    labels = torch.randint(0, 11, (3, 7))
    labels[0, :3] = labels[1, 6] = -100
    twin = logits.detach().double().requires_grad_()
    expected = naive(twin, teacher, labels, weight, temperature)
    loss = distillation_loss(logits, teacher, labels, weight=weight, temperature=temperature, chunk=chunk)
    (expected_gradient,) = torch.autograd.grad(expected, twin)
    (gradient,) = torch.autograd.grad(loss, logits)
    assert gradient.dtype == dtype
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]
    torch.testing.assert_close(loss.double(), expected, rtol=min(tolerance, 1e-5), atol=0.0)
    torch.testing.assert_close(gradient.double(), expected_gradient, rtol=tolerance, atol=tolerance / 10)
    # Ignored labels and last positions get no gradient at all.
    counts = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100) != -100
    assert (gradient[~counts] == 0).all()


def _trainer(
    model: PreTrainedModel, teacher: PreTrainedModel, folder: Path, *, batch: int, accumulate: int
) -> DistillationTrainer:
    steps = {"max_steps": 1, "per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulate}
    arguments = training_arguments(folder, learning_rate=0.5, max_grad_norm=0.0, **steps)
    given: dict[str, Any] = {"teacher": teacher, "weight": 0.7, "temperature": 2.0}
    return DistillationTrainer(model, arguments, default_data_collator, training_rows(4), **given)


@pytest.mark.parametrize(("batch", "accumulate"), [(4, 1), (1, 4), (2, 2)])
def test_a_step_follows_the_gradient_of_the_whole_batch(tmp_path: Path, batch: int, accumulate: int) -> None:
    teacher, model = tiny_model("transformer"), tiny_model("svformer", seed=1)
    trainer = _trainer(model, teacher, tmp_path, batch=batch, accumulate=accumulate)
    rows = default_data_collator(trainer.train_dataset)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    reference = tiny_model("svformer", seed=1)
    with torch.no_grad():
        taught = tiny_model("transformer")(rows["input_ids"]).logits
    naive(reference(rows["input_ids"]).logits, taught, rows["labels"], 0.7, 2.0).backward()
    trainer.train()
    for name, parameter in reference.named_parameters():
        moved = before[name] - model.get_parameter(name).detach()
        torch.testing.assert_close(moved, 0.5 * parameter.grad, rtol=1e-4, atol=1e-5, msg=name)
    assert not [
        parameter for parameter in teacher.parameters() if parameter.requires_grad or parameter.grad is not None
    ]
    assert not teacher.training


def test_evaluation_is_the_plain_cross_entropy(tmp_path: Path) -> None:
    model = tiny_model("svformer", seed=1)
    trainer = _trainer(model, tiny_model("transformer"), tmp_path, batch=4, accumulate=1)
    trainer.args.per_device_eval_batch_size = 4
    rows = default_data_collator(trainer.train_dataset)
    with torch.no_grad():
        expected = model(**rows).loss.item()
    assert trainer.evaluate(trainer.train_dataset)["eval_loss"] == pytest.approx(expected, rel=1e-5)


def test_a_teacher_of_another_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match=r"are of shape \(1, 2, 97\), the teacher's \(1, 2, 98\)"):
        distillation_loss(torch.zeros(1, 2, 97), torch.zeros(1, 2, 98), torch.zeros(1, 2).long(), weight=0.5)
