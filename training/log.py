"""What a training writes while it runs, and when it stops by itself."""

import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

from resformer.errors import CheckpointError
from resformer.files import json_value, replace_text
from resformer.training.optimizer import is_connection

#: The file of the log: one entry a step that was logged or evaluated.
LOG = "log.json"
#: Begins the names of coefficients where each is a number of its own.
DRAWN = "eval_coefficients/"

_FEW = 64  # coefficients of a parameter that are recorded each
#: Name in that of a device -> its dense products in bfloat16, operations a second, by the vendor's data sheet.
_PEAKS = {"B200": 2.25e15, "H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12}


def last_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint that was written to its end: its state comes last."""
    for path in sorted(folder.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]), reverse=True):
        try:
            json.loads((path / "trainer_state.json").read_text())
        except (OSError, ValueError):
            continue
        return path
    return None


class LossIsLost(CheckpointError):
    """A training was stopped since its loss is not finite, or has risen for good."""


class LossGuard(TrainerCallback):
    """Stops a training whose loss is lost, before a checkpoint is made of it.

    Args:
        spike: nats that the mean loss of each of the last three windows lies above the lowest one before; 0: never. A
            window has the steps between two logs.

    Raises:
        LossIsLost: from the Trainer: as `spike` says, or the loss, the norm of the gradient or, where they would
            be saved, weights are not finite.
    """

    def __init__(self, spike: float):
        self.spike, self.weights = spike, True

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if control.should_save:  # a lost loss is seen before it is saved
            control.should_log = True
            self.weights = all(bool(parameter.isfinite().all()) for parameter in model.parameters())

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        entry = state.log_history[-1]
        if "loss" not in entry:
            return
        # Gradients of float16 overflow until their scale is found, and the step is left out.
        finite = math.isfinite(entry["loss"]) and (args.fp16 or math.isfinite(entry.get("grad_norm", 0)))
        known = finite and self.weights
        *before, one, two, three = [math.inf] * 4 + _means(state.log_history, state.logging_steps)
        if known and not (self.spike and min(one, two, three) > min(before) + self.spike):
            return
        last = last_checkpoint(Path(args.output_dir))
        place = "There is no checkpoint yet" if last is None else f"The last checkpoint is {last}"
        if known:
            what = f"the last losses are {one:.4f}, {two:.4f} and {three:.4f}, the lowest was {min(before):.4f}"
            way = "with --resume --spike 0 the run goes on in spite of it"
        else:
            what = f"the loss is {entry['loss']:.4f}, the norm of the gradient {entry.get('grad_norm', math.nan):.4f}"
            what += "" if self.weights else ", and weights are not finite"
            way = "--resume would come to the same step"
        told = f"Step {state.global_step}: {what}. {place}; {way}"
        raise LossIsLost(f"{told}. Begin again with --force and a lower --learning-rate.")


def _means(history: Sequence[dict[str, Any]], steps: int) -> list[float]:
    """The mean losses of windows of `steps`, which the logs before a checkpoint may cut."""
    means, total, begin, last = list[float](), 0.0, 0, 0
    for entry in history:
        if "loss" in entry:
            total, last = total + entry["loss"] * (entry["step"] - last), entry["step"]
            if last - begin >= steps:
                means.append(total / (last - begin))
                total, begin = 0.0, last
    return means


class TrainingLog(TrainerCallback):
    """Writes `LOG`.

    Each entry of the Trainer's history gets the tokens so far, tokens a second since the last one, the hours left at
    this speed, the share of the devices' peak that they use, where it is known, and with evaluations the coefficients
    of connections. The history is in the checkpoints, so that a run that goes on has it from its beginning.
    """

    def __init__(self, folder: Path, flops: float | None = None):
        self.folder, self.flops = folder, flops  # a token, forward and backward
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
        self.peak = next((peak for name, peak in _PEAKS.items() if name in device), None)
        self.since: tuple[float, int, int] | None = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.since is None:
            self.since = time.perf_counter(), int(state.num_input_tokens_seen), state.global_step

    def on_log(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        entry = state.log_history[-1]
        entry["tokens"] = int(state.num_input_tokens_seen)
        if "loss" in entry and self.since is not None:
            begin, tokens, step = self.since
            seconds = time.perf_counter() - begin
            speed = (entry["tokens"] - tokens) / seconds
            entry["tokens_per_second"] = speed
            entry["hours_left"] = seconds / (entry["step"] - step) * (state.max_steps - entry["step"]) / 3600
            if self.flops is not None and self.peak is not None and args.bf16:
                entry["flops_utilisation"] = speed * self.flops / (self.peak * args.world_size)
        if "eval_loss" in entry:
            for name in [name for name in entry if name.startswith(DRAWN)]:
                del entry[name]
            entry["coefficients"] = coefficients(model)
        self.since = None  # an evaluation or a checkpoint may come before the next step
        if state.is_world_process_zero:
            replace_text(self.folder / LOG, json.dumps(json_value(state.log_history)))


def coefficients(model: torch.nn.Module) -> dict[str, list[float] | float]:
    """Name of a connection's parameter -> its values, to 5 digits; of more than 64, their root mean square."""
    found: dict[str, list[float] | float] = {}
    for name, parameter in model.named_parameters():
        if is_connection(name):
            whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            values = whole.detach().float().flatten().cpu()
            few = values if len(values) <= _FEW else values.square().mean().sqrt()
            found[name.removeprefix("module.")] = np.round(few.double().numpy(), 5).tolist()
    return found
