"""The Trainer of `finetune`, `pretrain` and `compare`, and what it prints."""

import math
import shutil
import sys
import tempfile
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from torch.nn.functional import cross_entropy
from tqdm import tqdm
from transformers import ProgressCallback, Trainer, TrainerCallback

from resformer.errors import CheckpointError, OutputError, one_line
from resformer.training.log import DRAWN, coefficients
from resformer.training.optimizer import ConnectionTrainer
from resformer.training.packing import PackedBlocks, bytes_per_token
from resformer.training.report import perplexity


class RecipeTrainer(ConnectionTrainer):
    """The loss of an evaluation is the cross-entropy, a mean over all labels: no balancing loss, no mean of means."""

    blocks: Any = None  # `Blocks`, where its data are ours
    has_weights_of_base = False  # if connections alone are trained, whether the others are those of its source
    bytes_per_token: float | None = None
    labels_of_evaluation = 0.0

    def __init__(self, *args: Any, **kwargs: Any):
        self.notes: list[str] = []
        super().__init__(*args, **kwargs)
        self.sums: list[torch.Tensor] = []
        if isinstance(self.eval_dataset, PackedBlocks) and len(self.eval_dataset):
            self.bytes_per_token = bytes_per_token(self.eval_dataset, self.processing_class)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        try:
            super()._save_checkpoint(model, trial)
        except (OSError, RuntimeError, SafetensorError) as error:  # torch says nothing of a full disk
            free = shutil.disk_usage(self.args.output_dir).free
            told = f"{self.args.output_dir}: a checkpoint cannot be written, {free:,} bytes are free"
            raise OutputError(f"{told} ({one_line(error)}). Make room, then go on with --resume.") from error

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        if self.model.training:  # the model's own forward, whatever is between this class and the stock one
            return Trainer.compute_loss(self, model, inputs, return_outputs, num_items_in_batch)
        outputs = model(**{name: value for name, value in inputs.items() if name != "labels"}, use_cache=False)
        nats, labels = losses_by_row(outputs.logits, inputs["labels"])
        self.sums.append(self.accelerator.gather_for_metrics(torch.stack([nats, labels], dim=1)).cpu().double())
        loss = nats.sum() / labels.sum().clamp(min=1)
        return (loss, outputs) if return_outputs else loss

    def evaluation_loop(self, *given: Any, **more: Any) -> Any:
        self.sums = []
        output = super().evaluation_loop(*given, **more)
        nats, labels = torch.cat(self.sums).sum(0).tolist() if self.sums else (0.0, 0.0)
        self.labels_of_evaluation = labels
        if labels:
            output.metrics[f"{more.get('metric_key_prefix', 'eval')}_loss"] = nats / labels
        return output

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        warmup = self.args.warmup_steps
        if warmup < 1 and warmup * num_training_steps < 1:  # the stock one takes a step, whose rate is 0
            self.args.warmup_steps = 0
        elif num_training_steps == 1:
            raise ValueError(f"warmup is {warmup}, and the run has one step, which would learn nothing; leave it out.")
        return super().create_scheduler(num_training_steps, optimizer)

    def log(self, logs: dict[str, float], *given: Any) -> None:
        if "eval_loss" in logs and self.bytes_per_token is not None:
            logs["eval_bits_per_byte"] = logs["eval_loss"] / math.log(2) / self.bytes_per_token
        if "eval_loss" in logs and self.args.report_to:  # TensorBoard and its like draw numbers
            values = [(name, np.atleast_1d(each)) for name, each in coefficients(self.model).items()]
            logs = logs | {f"{DRAWN}{name}/{n}": float(each[n]) for name, each in values for n in range(len(each))}
        super().log(logs, *given)

    @torch.random.fork_rng(devices=[])  # loaders draw numbers: dropout would depend on the evaluations before
    def evaluate(self, *given: Any, **more: Any) -> dict[str, float]:
        return super().evaluate(*given, **more)

    def _run_epoch(self, **arguments: Any) -> None:
        if self.state.global_step < self.state.max_steps:
            super()._run_epoch(**arguments)
        else:  # resumed from the last checkpoint: the stock loop would train one step more
            self.control.should_training_stop = True


def losses_by_row(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(batch, length, vocabulary), (batch, length): nats and labels of each row; its first token is no label."""
    pairs = zip(logits[:, :-1], labels[:, 1:].to(logits.device), strict=True)
    nats = torch.stack([cross_entropy(row.float(), targets, reduction="sum") for row, targets in pairs])
    return nats, (labels[:, 1:] != -100).sum(1).to(nats)


class SettingsAreSaved(TrainerCallback):
    """Refuses generation settings that Transformers would not save, before the first step and not at a checkpoint."""

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        with tempfile.TemporaryDirectory(prefix="resformer-") as folder:
            try:  # the Trainer has given them the tokenizer's special tokens
                if model.can_generate():
                    model.generation_config.save_pretrained(folder)
            except ValueError as error:
                told = f"{model.config._name_or_path}: generation_config.json could not be saved again"
                raise CheckpointError(f"{told} ({one_line(error)}). Mend that file first.") from error


class EvaluationLines(TrainerCallback):
    """One line an evaluation, on stderr."""

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, float], **kwargs: Any) -> None:
        if state.is_world_process_zero:
            loss, bits = metrics["eval_loss"], metrics["eval_bits_per_byte"]
            line = f"step {state.global_step}/{state.max_steps}: held-out loss {loss:.4f}"
            line += f", perplexity {perplexity(loss):.3f}, {bits:.4f} bits per byte"
            left = next((each["hours_left"] for each in reversed(state.log_history) if "hours_left" in each), 0.0)
            line += f", {left:.1f} hours left" if left >= 0.05 else ""
            tqdm.write(line, file=sys.stderr)


class Bar(ProgressCallback):
    """The Trainer's bar, with the loss beside it instead of lines on stdout."""

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if self.training_bar is not None and logs and "loss" in logs:
            self.training_bar.set_postfix(loss=f"{float(logs['loss']):.4f}")
