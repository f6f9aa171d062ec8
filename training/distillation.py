"""Distillation of a conversion's source: its logits (arXiv 1503.02531)."""

from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedTokenizerBase, Trainer

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
    float32 at least, of `chunk` positions at a time (default: 64 on a CPU, 512 elsewhere), and taken again in the
    backward pass: beyond the logits and their gradient, this takes the memory of a few chunks.

    Args:
        logits, teacher_logits: (batch, length, vocabulary); no gradient goes into the second.
        labels: (batch, length), not shifted.
        num_items: the sums over positions are divided by this; default: by the number of labels that count.
    """
    if logits.shape != teacher_logits.shape:
        raise ValueError(f"The logits are of shape {tuple(logits.shape)}, the teacher's {tuple(teacher_logits.shape)}.")
    targets = F.pad(labels[:, 1:], (0, 1), value=_IGNORED).flatten().to(logits.device)  # what each position predicts
    chunk = chunk or (64 if logits.device.type == "cpu" else 512)
    parts = zip(
        logits.flatten(0, 1).split(chunk),
        teacher_logits.detach().flatten(0, 1).split(chunk),
        targets.split(chunk),
        strict=True,
    )
    sums = [checkpoint(_chunk_sum, *part, weight, temperature, use_reentrant=False) for part in parts]
    return torch.stack(sums).sum() / ((targets != _IGNORED).sum() if num_items is None else num_items)


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
    """

    def __init__(self, *args: Any, teacher: Any = None, weight: float = 0.5, temperature: float = 1.0, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.teacher, self.weight, self.temperature = teacher, weight, temperature
        if teacher is not None:
            self.teacher = teacher.to(self.args.device).eval().requires_grad_(False)

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        if self.teacher is None or not model.training:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        labels = inputs["labels"]
        inputs = {name: value for name, value in inputs.items() if name != "labels"}
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
        if num_items_in_batch is not None and self.args.average_tokens_across_devices:
            # Data-parallel training takes the mean of the processes' gradients, and num_items counts all processes.
            loss = loss * self.accelerator.num_processes
        return (loss, outputs) if return_outputs else loss


def check_teacher_tokens(tokenizer: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase) -> None:
    """Raises ValueError if an id means other letters to the teacher; tokens that were added to either may differ."""
    added = tokenizer.added_tokens_decoder.keys() | teacher.added_tokens_decoder.keys()
    ours, theirs = ({number: token for token, number in each.get_vocab().items()} for each in (tokenizer, teacher))
    for number in sorted(ours.keys() - added):
        token, other = ours[number], theirs.get(number)
        if token != other:
            raise ValueError(f"Id {number} is {token!r}, for the teacher {other!r}; distil from the model's source.")
