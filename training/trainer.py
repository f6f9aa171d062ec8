"""The Trainer of `finetune`, `pretrain` and `compare`: what it prints and writes, and when it stops by itself."""

import json
import math
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from tqdm import tqdm
from transformers import ProgressCallback, Trainer, TrainerCallback

from resformer.errors import CheckpointError, OutputError, one_line
from resformer.files import json_value, replace_text
from resformer.modeling.any_decoder import text_config
from resformer.training.optimizer import ConnectionTrainer, is_connection
from resformer.training.packing import PackedBlocks, bytes_per_token
from resformer.training.report import perplexity

#: The file of the log: one entry a step that was logged or evaluated.
LOG = "log.json"
#: Begins the names of coefficients where each is a number of its own.
DRAWN = "eval_coefficients/"

_FEW = 64  # coefficients of a parameter that are recorded each
#: Name in that of a device -> its dense products in bfloat16, operations a second, by the vendor's data sheet.
_PEAKS = {"B200": 2.25e15, "H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12}


@contextmanager
def saving(folder: Path) -> Iterator[None]:
    """Turns an error of the disk, which torch and safetensors tell as their own, into an `OutputError`."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:  # torch says nothing of a full disk
        free = shutil.disk_usage(folder.parent).free
        told = f"{folder}: a checkpoint cannot be written, {free:,} bytes are free"
        raise OutputError(f"{told} ({one_line(error)}). Make room, then go on with --resume.") from error


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
            self.bytes_per_token = bytes_per_token(self.eval_dataset, self.processing_class) or None  # 0: no text

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        with saving(Path(self.args.output_dir)):
            super()._save_checkpoint(model, trial)

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        if self.model.training:  # the model's own forward, whatever is between this class and the stock one
            loss, outputs = Trainer.compute_loss(self, model, inputs, True, num_items_in_batch)
            loss = loss + self._balance(outputs, whole_step=num_items_in_batch is not None)
            return (loss, outputs) if return_outputs else loss
        outputs = model(**{name: value for name, value in inputs.items() if name != "labels"}, use_cache=False)
        nats, labels = losses_by_row(outputs.logits, inputs["labels"])
        self.sums.append(self.accelerator.gather_for_metrics(torch.stack([nats, labels], dim=1)).cpu().double())
        loss = nats.sum() / labels.sum().clamp(min=1)
        return (loss, outputs) if return_outputs else loss

    def _balance(self, outputs: Any, *, whole_step: bool) -> torch.Tensor | float:
        """What makes the balancing loss of experts a mean over the passes and processes of a step.

        The stock Trainer adds up losses, each of which was divided by the labels of the `whole_step`; this one was not.
        """
        found, args = outputs if isinstance(outputs, dict) else {}, self.args
        balance, own, dft = found.get("aux_loss"), "loss" in found, getattr(args, "loss_type", None) == "dft"
        if balance is None or not (own or dft):
            return 0.0
        times = 1
        if whole_step and args.average_tokens_across_devices:
            times = self.accelerator.num_processes // self.get_tp_size() if args.n_gpu <= 1 else args.n_gpu
        due = 1 / self.current_gradient_accumulation_steps if whole_step else 1.0
        return balancing(self.model) * balance * (due - own * times)

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
        self.state.compute_steps(self.args, self.state.max_steps)  # resumed, it has those of the run before
        if self.state.global_step < self.state.max_steps:
            super()._run_epoch(**arguments)
        else:  # resumed from the last checkpoint: the stock loop would train one step more
            self.control.should_training_stop = True


def balancing(model: Any) -> float:
    """By how much a model's forward weighs the balancing loss of experts."""
    names = ("router_aux_loss_coef", "aux_loss_coef")  # the latter is JetMoE's
    places = chain(map(vars, model.modules()), [vars(text_config(model.config))])
    return next((place[name] for place in places for name in names if name in place), 0.0)


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
            loss, bits = metrics["eval_loss"], metrics.get("eval_bits_per_byte")
            line = f"step {state.global_step}/{state.max_steps}: held-out loss {loss:.4f}"
            line += f", perplexity {perplexity(loss):.3f}" + (f", {bits:.4f} bits per byte" if bits is not None else "")
            left = next((each["hours_left"] for each in reversed(state.log_history) if "hours_left" in each), 0.0)
            line += f", {left:.1f} hours left" if left >= 0.05 else ""
            tqdm.write(line, file=sys.stderr)


class Bar(ProgressCallback):
    """The Trainer's bar, with the loss beside it instead of lines on stdout."""

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if self.training_bar is not None and logs and "loss" in logs:
            self.training_bar.set_postfix(loss=f"{float(logs['loss']):.4f}")


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
