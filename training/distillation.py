"""Distillation of a conversion's source: logits (arXiv 1503.02531) and hidden states (SwiftKV, arXiv 2410.03960)."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedConfig, PreTrainedModel, Trainer

_IGNORED = -100


def distillation_loss(
    logits: torch.Tensor,
    teacher_logits: torch.Tensor,
    labels: torch.Tensor,
    *,
    weight: float,
    temperature: float = 1.0,
    num_items: torch.Tensor | int | None = None,
    chunk: int | None = None,
) -> torch.Tensor:
    """(1 - w) CE(labels, student) + w T^2 KL(teacher || student), both distributions at temperature T in the second.

    Position t predicts label t + 1; positions whose label is -100 count in neither term. The logarithms are taken in
    float32 at least, of `chunk` positions at a time, and taken again in the backward pass: beyond the logits and their
    gradient, this takes the memory of a few chunks.

    Args:
        logits: (batch, length, vocabulary), the student's.
        teacher_logits: the same shape; no gradient goes into it.
        labels: (batch, length), not shifted.
        weight: w, in [0, 1].
        temperature: T > 0.
        num_items: the sums over positions are divided by this; default: by the number of labels that count.
        chunk: default: 64 on a CPU, whose caches hold so many positions of a large vocabulary, 512 elsewhere.

    Returns:
        A scalar, in nats per token.

    Raises:
        ValueError: the shapes of the logits differ.
    """
    if logits.shape != teacher_logits.shape:
        raise ValueError(f"The logits are of shape {tuple(logits.shape)}, the teacher's {tuple(teacher_logits.shape)}.")
    targets = _targets(labels, logits.device)
    chunk = chunk or (64 if logits.device.type == "cpu" else 512)
    parts = zip(
        logits.flatten(0, 1).split(chunk),
        teacher_logits.detach().flatten(0, 1).split(chunk),
        targets.split(chunk),
        strict=True,
    )
    sums = [checkpoint(_chunk_sum, *part, weight, temperature, use_reentrant=False) for part in parts]
    return torch.stack(sums).sum() / _number_of_items(num_items, targets)


def hidden_state_loss(
    hidden_states: Sequence[torch.Tensor],
    teacher_states: Sequence[torch.Tensor],
    labels: torch.Tensor,
    *,
    num_items: torch.Tensor | int | None = None,
) -> torch.Tensor:
    """The mean over positions t and the given hidden states of |h_t - g_t|^2 / |g_t|^2, in float32 at least.

    h_t is the student's state, g_t the teacher's. Each position is measured against the teacher's own norm there: in
    some models the first token's is a hundred times that of others, and would be all that a plain mean squared error
    sees. The positions that count are those of `distillation_loss`.

    Args:
        hidden_states: one or more of (batch, length, hidden_size), the student's.
        teacher_states: as many of the same shape; no gradient goes into them.
        labels: (batch, length), not shifted.
        num_items: as for `distillation_loss`.

    Returns:
        A scalar without unit; 1 for a student whose states are 0.
    """
    targets = _targets(labels, hidden_states[0].device)
    counted = (targets != _IGNORED).view(labels.shape)
    errors = []
    for states, teacher in zip(hidden_states, teacher_states, strict=True):
        dtype = torch.promote_types(states.dtype, torch.float32)
        states, teacher = states[counted].to(dtype), teacher.detach()[counted].to(dtype)
        errors.append(((states - teacher).square().sum(-1) / teacher.square().sum(-1)).sum())
    return torch.stack(errors).mean() / _number_of_items(num_items, targets)


def _targets(labels: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The label that each position predicts, (batch * length,)."""
    return F.pad(labels[:, 1:], (0, 1), value=_IGNORED).flatten().to(device)


def _number_of_items(num_items: torch.Tensor | int | None, targets: torch.Tensor) -> torch.Tensor | int:
    if num_items is None:
        return (targets != _IGNORED).sum()
    return num_items.to(targets.device) if isinstance(num_items, torch.Tensor) else num_items


def _chunk_sum(
    logits: torch.Tensor, teacher_logits: torch.Tensor, targets: torch.Tensor, weight: float, temperature: float
) -> torch.Tensor:
    """The loss summed over positions; (positions, vocabulary) twice, and (positions,)."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    logits, teacher_logits = logits.to(dtype), teacher_logits.to(dtype)
    likelihood = F.cross_entropy(logits, targets, ignore_index=_IGNORED, reduction="sum")
    divergence = F.kl_div(
        F.log_softmax(logits / temperature, dim=-1),
        F.log_softmax(teacher_logits / temperature, dim=-1),
        log_target=True,
        reduction="none",
    ).sum(-1)
    return (1 - weight) * likelihood + weight * temperature**2 * divergence.masked_fill(targets == _IGNORED, 0.0).sum()


class DistillationTrainer(Trainer):
    """The stock `Trainer` with `distillation_loss` in training; evaluation stays the plain cross-entropy.

    Args:
        teacher: the source model, whole on every device; `None`: no distillation.
        weight, temperature: of `distillation_loss`.
        hidden_weight: W, `hidden_state_loss` times it is added.
        hidden_layers: the states that it compares, as indices into Transformers' `hidden_states`: 0 are the embeddings,
            n is the output of the n-th layer, -2 that of the last layer but one, -1 the last layer's after the norm.

    Raises:
        ValueError: the vocabularies of teacher and student differ, or with `hidden_weight` their widths, or one has no
            such layer.
    """

    def __init__(
        self,
        *args: Any,
        teacher: PreTrainedModel | None = None,
        weight: float = 0.5,
        temperature: float = 1.0,
        hidden_weight: float = 0.0,
        hidden_layers: Sequence[int] = (-2,),
        **kwargs: Any,
    ):
        super().__init__(*args, **kwargs)
        self.teacher, self.weight, self.temperature = teacher, weight, temperature
        self.hidden_weight, self.hidden_layers = hidden_weight, list(hidden_layers)
        if teacher is not None:
            check_teacher(self.model.config, teacher.config, self.hidden_layers if hidden_weight else [])
            self.teacher = teacher.to(self.args.device).eval().requires_grad_(False)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        if self.teacher is None or not model.training:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        labels = inputs["labels"]
        inputs = {name: value for name, value in inputs.items() if name != "labels"}
        if self.hidden_weight:
            inputs["output_hidden_states"] = self.hidden_layers  # Transformers keeps these alone
        outputs = model(**inputs)
        with torch.no_grad(), self.accelerator.autocast():
            teacher_outputs = self.teacher(**inputs, use_cache=False)
        loss = distillation_loss(
            outputs.logits,
            teacher_outputs.logits,
            labels,
            weight=self.weight,
            temperature=self.temperature,
            num_items=num_items_in_batch,
        )
        if self.hidden_weight:
            states, teacher_states = (
                [each.hidden_states[layer] for layer in self.hidden_layers] for each in (outputs, teacher_outputs)
            )
            loss = loss + self.hidden_weight * hidden_state_loss(
                states, teacher_states, labels, num_items=num_items_in_batch
            )
        if num_items_in_batch is not None and self.args.average_tokens_across_devices:
            # Data-parallel training takes the mean of the processes' gradients, and num_items counts all processes.
            loss = loss * (self.accelerator.num_processes // self.get_tp_size())
        return (loss, outputs) if return_outputs else loss


def check_teacher(config: PreTrainedConfig, teacher: PreTrainedConfig, hidden_layers: Sequence[int]) -> None:
    if config.vocab_size != teacher.vocab_size:
        raise ValueError(
            f"The model has {config.vocab_size:,} tokens, the teacher {teacher.vocab_size:,}; distil from its source."
        )
    if hidden_layers and config.hidden_size != teacher.hidden_size:
        raise ValueError(
            f"The model's hidden states are {config.hidden_size:,} wide, the teacher's {teacher.hidden_size:,}; distil "
            "from its source, or from logits alone."
        )
    states = 1 + min(config.num_hidden_layers, teacher.num_hidden_layers)
    for layer in hidden_layers:
        if not -states <= layer < states:
            raise ValueError(f"Hidden state {layer} is to be learned; expected {-states} to {states - 1}.")
