"""The Trainer of `finetune` and `pretrain`, and what it prints."""

import math
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from tqdm import tqdm
from transformers import PreTrainedConfig, ProgressCallback, TrainerCallback, TrainingArguments
from transformers.trainer_callback import ExportableState

from resformer.errors import OutputError, one_line
from resformer.training.distillation import DistillationTrainer
from resformer.training.optimizer import ConnectionTrainer
from resformer.training.packing import PackedBlocks, StreamedBlocks, bytes_per_token
from resformer.training.report import perplexity

_SHARDS = "shards"  # the folder of a checkpoint that has the processes' parts


def set_use_cache(config: PreTrainedConfig, use_cache: bool | None) -> None:
    """Undoes what the Trainer sets; `None`: the configuration had none of its own, a part of it has."""
    if use_cache is None:
        del config.use_cache
    else:
        config.use_cache = use_cache


class RecipeTrainer(ConnectionTrainer, DistillationTrainer):
    """Combines both trainers. The evaluation loss is a mean over all labels, not over batches."""

    def __init__(self, *, model: Any, args: TrainingArguments, eval_dataset: PackedBlocks | None, **kwargs: Any):
        # The stock Trainer refuses to save the optimizer's state of a sharded model, which this one can.
        wanted, args.save_only_model = args.save_only_model, bool(model.is_distributed_loading_by_transformers)
        super().__init__(model=model, args=args, eval_dataset=eval_dataset, **kwargs)
        args.save_only_model = wanted
        self.random_states: str | None = None  # the checkpoint that has those of the first step
        if eval_dataset is not None:
            rows = [eval_dataset[index]["labels"] for index in range(len(eval_dataset))]
            self.labels_per_block = _labels_per_row(torch.stack(rows))
            self.bytes_per_token = bytes_per_token(eval_dataset, self.processing_class)

    def _parts(self) -> dict[str, Any]:
        """What this process has of the model and of the optimizer's state."""
        optimizer: Any = self.optimizer
        model_state, optimizer_state = get_state_dict(self.model, optimizer.optimizer)
        return {"model": model_state, "optimizer": optimizer_state}

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        try:
            super()._save_checkpoint(model, trial)
        except (OSError, RuntimeError, SafetensorError) as error:  # torch says nothing of a full disk
            free = shutil.disk_usage(self.args.output_dir).free
            told = f"{self.args.output_dir}: a checkpoint cannot be written, {free:,} bytes are free"
            raise OutputError(f"{told} ({one_line(error)}). Make room, then go on with --resume.") from error

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        # A checkpoint of a sharded model has the weights beside the optimizer's state.
        if not (_internal_call and self.is_distributed_loading_by_transformers):
            super().save_model(output_dir, _internal_call)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Of a sharded model each process writes its parts: the stock Trainer would write those of the first."""
        if not self.is_distributed_loading_by_transformers:
            return super()._save_optimizer_and_scheduler(output_dir)
        state_dict_saver.save(self._parts(), checkpoint_id=Path(output_dir) / _SHARDS)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / "scheduler.pt")

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if not self.is_distributed_loading_by_transformers:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not self.is_distributed_loading_by_transformers:
            return super()._load_optimizer_and_scheduler(checkpoint)
        optimizer: Any = self.optimizer
        parts = self._parts()
        state_dict_loader.load(parts, checkpoint_id=Path(checkpoint) / _SHARDS)
        set_state_dict(
            self.model, optimizer.optimizer, model_state_dict=parts["model"], optim_state_dict=parts["optimizer"]
        )
        self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint) / "scheduler.pt", weights_only=True))

    def get_batch_samples(self, *given: Any) -> Any:
        samples = super().get_batch_samples(*given)
        if self.random_states is not None:  # the loader of a stream has drawn a number when it began
            self._load_rng_state(self.random_states)
            self.random_states = None
        return samples

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        if model.training:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True)
        loss = loss * _labels_per_row(inputs["labels"]) / self.labels_per_block
        return (loss, outputs) if return_outputs else loss

    def log(self, logs: dict[str, float], *given: Any) -> None:
        if "eval_loss" in logs:
            logs["eval_bits_per_byte"] = logs["eval_loss"] / math.log(2) / self.bytes_per_token
        super().log(logs, *given)

    @torch.random.fork_rng(devices=[])  # loaders draw numbers: dropout would depend on the evaluations before
    def evaluate(self, *given: Any, **more: Any) -> dict[str, float]:
        return super().evaluate(*given, **more)

    def _run_epoch(self, **arguments: Any) -> None:
        if self.state.global_step < self.state.max_steps:
            super()._run_epoch(**arguments)
        else:  # resumed from the last checkpoint: the stock loop would train one step more
            self.control.should_training_stop = True


def _labels_per_row(labels: torch.Tensor) -> float:
    return (labels[:, 1:] != -100).sum().item() / len(labels)


class Place(TrainerCallback, ExportableState):
    """Has the place in a stream saved with each checkpoint, in its trainer_state.json."""

    def __init__(self, stream: StreamedBlocks):
        self.stream, self.place = stream, stream.start

    def on_train_begin(self, *given: Any, **kwargs: Any) -> None:
        self.place = self.stream.start  # once more where `auto_find_batch_size` begins again

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        blocks = state.train_batch_size * args.gradient_accumulation_steps * args.world_size
        self.place = self.stream.place(self.place["given"] + blocks)

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": self.place}


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
