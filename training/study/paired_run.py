"""One run of a study: a model trained with the stock Trainer, paired with the other methods' by its seed."""

import math
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import Subset
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
    PrinterCallback,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
)

from resformer.environment import peak_memory
from resformer.files import json_value
from resformer.training.data import DataError
from resformer.training.flops import training_flops
from resformer.training.log import coefficients, last_checkpoint
from resformer.training.optimizer import ConnectionTrainer, connection_learning_rate
from resformer.training.options import RunSettings
from resformer.training.packing import Blocks, PackedBlocks
from resformer.training.recipe import uses_bf16
from resformer.training.sizes import schedule_arguments
from resformer.training.trainer import Bar, set_use_cache

_WARMING_UP = 2  # steps that are not timed, where there are more


def run_arguments(settings: RunSettings, folder: Path, seed: int) -> TrainingArguments:
    """The stock Trainer's arguments, on one device."""
    interval = -(-settings.steps // settings.evaluations)  # steps between evaluations
    micro = settings.micro_batch or settings.batch
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=settings.steps,
        per_device_train_batch_size=micro,
        per_device_eval_batch_size=micro,
        gradient_accumulation_steps=settings.batch // micro,
        learning_rate=settings.learning_rate,
        **schedule_arguments(settings.schedule, settings.steps, settings.warmup, settings.decay),
        weight_decay=settings.weight_decay,
        eval_strategy="steps",
        eval_steps=interval,
        eval_on_start=True,
        logging_steps=interval,
        logging_nan_inf_filter=False,
        save_steps=interval,
        save_total_limit=1,
        prediction_loss_only=True,
        bf16=uses_bf16(settings.bf16),
        use_cpu=not torch.accelerator.is_available(),
        report_to="none",
        disable_tqdm=True,
        seed=seed,
        data_seed=seed,
    )
    arguments._n_gpu = min(arguments.n_gpu, 1)  # the Trainer would split each batch among all that it sees
    return arguments


class _Recorder(TrainerCallback):
    """Times the steps, records the coefficients, and saves no checkpoint after the last step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.start = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.start = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()  # its kernels are queued, not done
        self.seconds.append(time.perf_counter() - self.start)
        if state.global_step == state.max_steps:
            control.should_log, control.should_save = True, False

    def on_evaluate(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        state.log_history[-1]["coefficients"] = coefficients(model)  # a checkpoint saves the history

    @property
    def median(self) -> float:
        return statistics.median(self.seconds[_WARMING_UP:] or self.seconds)


def paired_model(config: Any, backbone: Any, seed: int) -> PreTrainedModel:
    """A model with random weights, its connections at their from-scratch start.

    Tensors that a model of `backbone` also has start equal in all models of one seed; a narrower tensor (fewer
    key/value heads) takes the leading part.
    """
    torch.manual_seed(seed)
    shared = AutoModelForCausalLM.from_config(backbone).state_dict()
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            source = shared.get(name)
            if source is not None and all(n <= m for n, m in zip(parameter.shape, source.shape, strict=True)):
                parameter.copy_(source[tuple(map(slice, parameter.shape))])
    return model


def paired_run(
    model: PreTrainedModel,
    blocks: Blocks,
    settings: RunSettings,
    seed: int,
    *,
    folder: Path,
    save_to: Path | None = None,
    callbacks: Sequence[TrainerCallback] = (),
) -> dict[str, Any]:
    """Trains a model in place, or goes on from the last checkpoint in `folder`, which the caller removes.

    The order of the batches depends on `seed` alone. Losses are in nats per token; one that is not finite is `None`.
    `loss` is that of the whole held-out text after the last step, `held_out` has it document by document, and `curve`
    has that of the blocks of `blocks.held_out` during the training, with the connections' coefficients.
    """
    arguments, use_cache = run_arguments(settings, folder, seed), getattr(model.config, "use_cache", None)
    rate = settings.connection_learning_rate or connection_learning_rate(model, arguments.learning_rate)
    recorder = _Recorder()
    trainer = ConnectionTrainer(
        model=model,
        args=arguments,
        train_dataset=whole_batches(blocks, settings.batch),
        eval_dataset=blocks.held_out,
        data_collator=default_data_collator,
        callbacks=[recorder, *callbacks, *([Bar()] if sys.stderr.isatty() else [])],
        connection_learning_rate=rate,
    )
    trainer.remove_callback(PrinterCallback)
    checkpoint = last_checkpoint(folder)
    trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))

    tokens = settings.batch * blocks.held_out.block
    points: dict[int, dict[str, Any]] = {}
    for entry in trainer.state.log_history:
        for key, name in (("loss", "training_loss"), ("eval_loss", "validation_loss")):
            if key in entry:
                points.setdefault(entry["step"], {})[name] = entry[key] if math.isfinite(entry[key]) else None
        if entry.get("coefficients"):
            points[entry["step"]]["coefficients"] = json_value(entry["coefficients"])
    curve = [{"step": step, "tokens": step * tokens, **points[step]} for step in sorted(points)]
    held_out = losses_by_document(trainer.model, blocks.held_out.whole, arguments.per_device_eval_batch_size)
    if save_to is not None:
        set_use_cache(model.config, use_cache)
        model.save_pretrained(save_to)
    return {
        "seed": seed,
        "connection_learning_rate": rate,
        "loss": held_out["loss"],
        "held_out": held_out,
        "curve": curve,
        "parameters": model.num_parameters(),
        "training_flops": training_flops(model.config, blocks.held_out.block) * tokens * settings.steps,
        "step_seconds": recorder.median,
        "tokens_per_second": tokens / recorder.median,
        "peak_memory": peak_memory(),
        "bf16": arguments.bf16,
        "resumed_from": 0 if checkpoint is None else int(checkpoint.name.rpartition("-")[2]),
    }


@torch.no_grad()
def losses_by_document(model: Any, blocks: PackedBlocks, batch: int) -> dict[str, Any]:
    """The loss of all blocks, and `[tokens, nats]` of each document in the order in which they are packed.

    A block's first token is not predicted, and not counted.
    """
    tokens, nats = np.zeros(len(blocks.starts), np.int64), np.zeros(len(blocks.starts))
    model.eval()
    for first in range(0, len(blocks), batch):
        rows = np.arange(first, min(first + batch, len(blocks)))
        batch_of = default_data_collator([blocks[int(row)] for row in rows])
        inputs = {name: each.to(model.device) for name, each in batch_of.items()}
        labels = inputs.pop("labels")[:, 1:].flatten()
        logits = model(**inputs, use_cache=False).logits[:, :-1]  # under the autocast of the training
        losses = cross_entropy(logits.flatten(0, 1).float(), labels, reduction="none")[labels >= 0]
        places = (rows[:, None] * blocks.block + np.arange(1, blocks.block)).ravel()[(labels >= 0).cpu().numpy()]
        documents = np.searchsorted(blocks.starts, places, "right") - 1
        tokens += np.bincount(documents, minlength=len(tokens))
        nats += np.bincount(documents, losses.double().cpu().numpy(), minlength=len(nats))
    total = float(nats.sum() / tokens.sum())
    finite = math.isfinite(total)
    return {
        "tokens": int(tokens.sum()),
        "loss": total if finite else None,
        "documents": [[int(n), float(x)] for n, x in zip(tokens, nats, strict=True)] if finite else None,
    }


def whole_batches(blocks: Blocks, batch: int) -> Subset[dict[str, torch.Tensor]]:
    """The training blocks, cut to a multiple of the batch size; raises DataError if there is not one batch."""
    count = len(blocks.train) // batch * batch
    if not count:
        told = f"The training documents make {len(blocks.train)} blocks, too few for a batch of {batch}"
        raise DataError(f"{told}; use more text, or a smaller --block or --batch.")
    return Subset(blocks.train, range(count))
