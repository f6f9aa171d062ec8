"""What a training writes while it runs, and when it stops by itself."""

import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import TrainerCallback

from resformer.errors import CheckpointError
from resformer.files import json_value, replace_text
from resformer.training.optimizer import is_connection

#: The file of the log: one entry a step that was logged or evaluated.
LOG = "log.json"
#: The picture of it in an output.
CURVE = "curve.png"

_FEW = 64  # coefficients of a parameter that are recorded each
_SPIKE = 2.0  # nats above the lowest loss
#: Name in that of a device -> its dense products in bfloat16, operations a second, by the vendor's data sheet.
_PEAKS = {"B200": 2.25e15, "H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12}


class TrainingLog(TrainerCallback):
    """Writes `LOG`, and stops a training whose loss is lost, before a checkpoint is made of it.

    Each entry of the Trainer's history gets the tokens so far, tokens a second since the last one, the share of the
    devices' peak that they use, where it is known, and with evaluations the coefficients of connections. The history is
    in the checkpoints, so that a run that goes on has it from its beginning.

    Args:
        folder: of the file.
        flops: operations a token, forward and backward.

    Raises:
        CheckpointError: from the Trainer: the loss or the norm of the gradient is not a number, or the loss is 2 nats
            above the lowest one.
    """

    def __init__(self, folder: Path, flops: float):
        self.folder, self.flops = folder, flops
        self.since: tuple[float, int] | None = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.since is None:
            self.since = time.perf_counter(), int(state.num_input_tokens_seen)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_log = control.should_log or control.should_save  # a lost loss is seen before it is saved

    def on_log(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        entry = state.log_history[-1]
        entry["tokens"] = int(state.num_input_tokens_seen)
        if "loss" in entry and self.since is not None:
            seconds = time.perf_counter() - self.since[0]
            speed = (entry["tokens"] - self.since[1]) / seconds
            entry["tokens_per_second"] = speed
            if args.bf16 and (peak := _peak()) is not None:
                entry["flops_utilisation"] = speed * self.flops / (peak * args.world_size)
        if "eval_loss" in entry:
            entry["coefficients"] = coefficients(model)
        self.since = None  # an evaluation or a checkpoint may come before the next step
        if state.is_world_process_zero:
            replace_text(self.folder / LOG, json.dumps(json_value(state.log_history)))
        losses = [each["loss"] for each in state.log_history if "loss" in each]
        if "loss" in entry and not (
            math.isfinite(entry["loss"])
            and math.isfinite(entry.get("grad_norm", 0))
            and entry["loss"] < min(losses) + _SPIKE
        ):
            raise CheckpointError(
                f"Step {state.global_step}: the loss is {entry['loss']:.4f}, the norm of the gradient "
                f"{entry.get('grad_norm', math.nan):.4f}, the lowest loss was {np.nanmin(losses):.4f}. The checkpoints "
                f"before it are in {self.folder}: go on from the last with --resume, or begin again with --force and a "
                "lower --learning-rate."
            )


def coefficients(model: torch.nn.Module) -> dict[str, list[float] | float]:
    """Name of a connection's parameter -> its values, to 5 digits; of more than 64, their root mean square."""
    found: dict[str, list[float] | float] = {}
    for name, parameter in model.named_parameters():
        if is_connection(name):
            values = parameter.detach().float().flatten().cpu()
            few = values if len(values) <= _FEW else values.square().mean().sqrt()
            found[name.removeprefix("module.")] = np.round(few.double().numpy(), 5).tolist()
    return found


def _peak() -> float | None:
    """Operations a second of one device; `None`: not known."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return next((peak for part, peak in _PEAKS.items() if part in name), None)


def draw_curves(folders: Sequence[Path], picture: Path) -> None:
    """Draws the losses over the tokens, of `LOG` in each folder: lines in training, points on the held-out text."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for number, folder in enumerate(folders):
        log = json.loads((folder / LOG).read_text(encoding="utf-8"))
        for key, style, what in (("loss", "-", "in training"), ("eval_loss", "o--", "held-out text")):
            points = [(entry["tokens"] / 1e6, entry[key]) for entry in log if key in entry]
            if points:
                label = f"{folder.name}, {what}" if len(folders) > 1 else what
                alpha = 0.5 if key == "loss" else 1.0
                axes.plot(*zip(*points, strict=True), style, label=label, color=f"C{number}", ms=4, alpha=alpha)
    axes.set(xlabel="training tokens, millions", ylabel="loss, nats per token")
    axes.legend()
    figure.savefig(picture, dpi=120)
