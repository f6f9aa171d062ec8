"""The fine-tuning recipe: a checkpoint and text in, a trained checkpoint with its metrics and its card out."""

import difflib
import hashlib
import json
import math
import os
import platform
import shlex
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import MISSING, asdict, dataclass, field, fields
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import psutil
import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]
from torch import nn
from tqdm import tqdm
from transformers import (
    MODEL_FOR_MASKED_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PrinterCallback,
    ProgressCallback,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
)
from transformers.trainer_callback import ExportableState
from transformers.training_args import OptimizerNames
from transformers.utils import cached_file

from resformer.configuration import ResFormerConfig
from resformer.configuration.methods import method_of
from resformer.environment import cpu_has_bf16
from resformer.errors import CheckpointError, OutputError, ResFormerError, brief
from resformer.files import LISTING, check_apart, check_target, locked, replacing
from resformer.model_cards import TRAINING_FIELDS, base_model_of, carried_metadata, trained_card, well_formed
from resformer.pushing import HubError
from resformer.pushing import push as push_checkpoint
from resformer.record import RECORD, weight_digests
from resformer.training.data import (
    SAMPLE_BY,
    STANDARD_LIBRARY,
    Blocks,
    PackedBlocks,
    StreamedBlocks,
    load_documents,
    load_tokenizer,
    pack_documents,
    weighted_sources,
)
from resformer.training.distillation import DistillationTrainer
from resformer.training.freezing import TRAIN, trained_parameters
from resformer.training.log import LOG
from resformer.training.memory import peak_memory, predicted_memory
from resformer.training.optimizer import ConnectionTrainer
from resformer.untrusted import check_folder, read_json

__all__ = [
    "START",
    "FinetuneOptions",
    "FinetuneReport",
    "finetune_checkpoint",
    "last_checkpoint",
    "processor_has_bf16",
]

#: The folder, in that of an unfinished run, of an untrained checkpoint that it has begun with.
START = "start"
_LAUNCH_OPTIONS = ("resume", "force", "dry_run")  # options that do not change the result
_OPTION_NAMES = {  # field of TrainingArguments -> the option that sets it
    "activation_checkpointing": "gradient_checkpointing",
    "data_seed": "seed",
    "gradient_accumulation_steps": "accumulate",
    "hub_model_id": "push",
    "max_steps": "steps",
    "num_train_epochs": "epochs",
    "output_dir": "output",
    "per_device_train_batch_size": "batch",
    "push_to_hub": "push",
    "resume_from_checkpoint": "resume",
    "torch_compile": "compile",
}
_PUSH_FIELDS = ("hub_private_repo", "hub_revision")
_TRAINER_FIELDS = {argument.name for argument in fields(TrainingArguments) if argument.init}


@dataclass(frozen=True)
class FinetuneOptions:
    """What `resformer finetune` takes; every field but the first three has a default.

    Raises:
        ValueError: a value is out of its range, or two contradict each other.
    """

    model: str  # a checkpoint folder or a Hub id
    output: str
    data: list[str]  # files, folders, Hub ids (owner/name:configuration); all or none with a weight (name:0.7)
    split: str = "train"
    text_column: str = "text"
    sample_by: str = "document"  # what is a document in a plain text file, one of SAMPLE_BY
    streaming: bool = False
    steps: int | None = None
    epochs: float | None = None  # 1 if steps are not given either
    block: int | None = None  # tokens a sequence; default: 1,024 or as many as the model has positions
    separate_documents: bool = True  # a token sees its own document only, of those that are packed into a block
    batch: int = 8  # sequences a device and a step
    accumulate: int = 1
    learning_rate: float = 5e-5
    connection_learning_rate: float = 3e-4
    held_out: float = 0.02  # the share of documents, below 1; 0: no evaluation
    held_out_blocks: int = 256
    seed: int = 0
    distill: str | None = None  # the teacher: a checkpoint folder or a Hub id
    distill_weight: float = 0.5  # in [0, 1]
    temperature: float = 1.0
    distill_hidden: float = 0.0  # weight of the teacher's hidden states
    distill_hidden_layers: list[int] = field(default_factory=lambda: [-2])  # indices into `hidden_states`
    train: str = "all"  # which parameters, one of TRAIN
    bf16: bool | None = None  # autocast; default: where the processor has it
    gradient_checkpointing: bool = False
    compile: bool = False
    dtype: str = "float32"  # of the weights in training
    save_dtype: str | None = None  # of the weights as saved; default: that of training
    attn_implementation: str | None = None  # as in Transformers; default: sdpa
    tokenizer: str | None = None  # default: the model's
    push: str | None = None  # the Hub id that the finished output is pushed to
    trainer: dict[str, Any] = field(default_factory=dict)  # further fields of TrainingArguments
    resume: bool = False
    force: bool = False
    dry_run: bool = False

    def __post_init__(self) -> None:
        for name in ("steps", "epochs", "block", "batch", "accumulate", "held_out_blocks", "temperature"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} is {value}; expected more than 0.")
        if not 0 <= self.held_out < 1:
            raise ValueError(f"held_out is {self.held_out}; expected a share of the documents, from 0 to below 1.")
        if not 0 <= self.distill_weight <= 1:
            raise ValueError(f"distill_weight is {self.distill_weight}; expected 0 to 1.")
        if not (math.isfinite(self.distill_hidden) and self.distill_hidden >= 0):
            raise ValueError(f"distill_hidden is {self.distill_hidden}; expected a finite number from 0 up.")
        if self.distill_hidden and self.distill is None:
            raise ValueError(f"distill_hidden is {self.distill_hidden}, without a teacher; name it with --distill.")
        if not self.distill_hidden_layers:
            raise ValueError("distill_hidden_layers is empty; expected a layer at least.")
        if self.train not in TRAIN:
            raise ValueError(f"train is {self.train!r}; expected one of {', '.join(TRAIN)}.")
        if self.block == 1:
            raise ValueError("block is 1; a sequence needs 2 tokens at least, one to predict the other.")
        if self.steps is not None and self.epochs is not None:
            raise ValueError(f"steps is {self.steps} and epochs {self.epochs}; give one of them.")
        if self.streaming and self.steps is None:
            raise ValueError("streaming needs steps: the length of a stream is not known.")
        if self.streaming and (workers := self.trainer.get("dataloader_num_workers")):
            raise ValueError(
                f"dataloader_num_workers is {workers}; a stream is read by the training process: leave it out."
            )
        if self.sample_by not in SAMPLE_BY:
            raise ValueError(f"sample_by is {self.sample_by!r}; expected one of {', '.join(SAMPLE_BY)}.")
        if self.separate_documents and self.batch > 1 and "flash" in (self.attn_implementation or ""):
            raise ValueError(
                f"batch is {self.batch}; with FlashAttention, documents of a block are kept apart in batches of one "
                "alone. Use --batch 1 and --accumulate, --attn-implementation sdpa, or --join-documents."
            )
        if self.dtype == "float16":
            raise ValueError(
                "dtype is float16; its gradients underflow. Train in float32, and save in it with --save-dtype float16."
            )
        if self.dtype not in ("float32", "bfloat16"):
            raise ValueError(f"dtype is {self.dtype!r}; expected float32 or bfloat16.")
        if self.save_dtype not in (None, "float32", "bfloat16", "float16"):
            raise ValueError(f"save_dtype is {self.save_dtype!r}; expected float32, bfloat16 or float16.")
        weighted_sources(self.data)
        if self.push is not None:
            validate_repo_id(self.push)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> "FinetuneOptions":
        """Options from a file or a command line: names with `-` or `_`, fields of `TrainingArguments` among them.

        Raises:
            ValueError: a name is unknown, a needed one missing, or a value of the wrong kind.
        """
        types = get_type_hints(cls)
        known: dict[str, Any] = {}
        trainer: dict[str, Any] = {}
        for key, value in values.items():
            name = str(key).replace("-", "_")
            if name in types and name != "trainer":
                known[name] = _checked_type(name, value, types[name])
                if name in ("model", "output", "distill", "tokenizer") and known[name] is not None:
                    known[name] = os.path.expanduser(known[name])  # no shell expands ~ in a file
            elif name in _OPTION_NAMES:
                raise ValueError(f"{key}: is called {_OPTION_NAMES[name]} here.")
            elif name == "hub_token":
                raise ValueError(f"{key}: would be written to metrics.json; set HF_TOKEN instead.")
            elif name.startswith("hub_") and name not in _PUSH_FIELDS:
                raise ValueError(
                    f"{key}: only the finished output is pushed, once; expected {', '.join(_PUSH_FIELDS)}."
                )
            elif name == "label_smoothing_factor" and value:
                raise ValueError(f"{key}: held-out losses and perplexities would be smoothed, too; leave it out.")
            elif name in _TRAINER_FIELDS:
                trainer[name] = value
            else:
                close = difflib.get_close_matches(name, [*types, *_TRAINER_FIELDS], n=1)
                raise ValueError(f"There is no option {key!r}." + (f" Did you mean {close[0]!r}?" if close else ""))
        for option in fields(cls):
            if option.default is MISSING and option.default_factory is MISSING and not known.get(option.name):
                raise ValueError(f"{option.name} is missing: give it on the command line or in the file.")
        return cls(**known, trainer=trainer)

    @property
    def run(self) -> dict[str, Any]:
        """What decides the result: all but how this process was started."""
        return {name: value for name, value in asdict(self).items() if name not in _LAUNCH_OPTIONS}

    @property
    def sources(self) -> list[str]:
        """`data` without weights."""
        return weighted_sources(self.data)[0]

    @property
    def unfinished(self) -> Path:
        """The folder beside the output that holds the checkpoints until the run ends."""
        output = Path(self.output)
        return output.with_name(f"{output.name}.training")


@dataclass
class FinetuneReport:
    """What `metrics.json` holds. Losses are in nats per token, on the held-out blocks."""

    arguments: dict[str, Any]
    method: str | None  # the named method of the model; None: plain, or connections without a name
    parameters: int
    trained_parameters: int
    block: int
    training_blocks: int | None  # None: a stream
    held_out_blocks: int
    held_out_tokens: int
    held_out_documents: int  # that have tokens in these blocks
    held_out_by_source: dict[str, int]  # the same, for each source
    notes: list[str] = field(default_factory=list)  # on the data: which documents were cut
    loss_before: float | None = None
    loss_after: float | None = None
    perplexity_before: float | None = None
    perplexity_after: float | None = None
    steps: int | None = None
    resumed_from: int = 0  # the step
    tokens: int | None = None  # seen in training, on all devices, before a resumption too
    seconds: float | None = None  # of training in this process, evaluation left out
    tokens_per_second: float | None = None
    peak_memory: int | None = None  # bytes, most at once: resident in this process, or allocated on the accelerator
    predicted_memory: dict[str, Any] | None = None  # bytes, of a dry run: see `predicted_memory`
    url: str | None = None  # of the commit that pushed the output
    evaluations: list[dict[str, float]] = field(default_factory=list)
    #: What `resformer card --metrics` reads, by the names of `trained_card`.
    source: str | None = None
    revision: str | None = None
    corpus: str | None = None
    evaluation_tokens: int = 0
    datasets: list[str] = field(default_factory=list)
    recipe: dict[str, Any] = field(default_factory=dict)
    runs: list[dict[str, Any]] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def finetune_checkpoint(
    options: FinetuneOptions,
    *,
    begin: Callable[[], None] | None = None,
    callbacks: Sequence[TrainerCallback] = (),
    command: str = "finetune",
) -> FinetuneReport:
    """Runs the recipe: packs the data, trains with the stock Trainer, writes `options.output` when all is done.

    Under torchrun or `accelerate launch` every process calls it; the first one writes.

    Args:
        begin: is called on the first process before the model is read, to write it to `START` in `options.unfinished`.
        callbacks: further ones of the Trainer.
        command: whose results are replaced with `options.force`.

    Raises:
        CheckpointError: the model or its tokenizer cannot be loaded, it has nothing of what `options.train` names, or
            the output or an unfinished run is in the way.
        DataError: the data cannot be read or do not suffice.
        OutputError: another process is training the same output, or it cannot be written.
        ValueError: an argument of the Trainer makes no sense.
    """
    arguments = _training_arguments(options)
    target = Path(os.path.realpath(options.unfinished))
    writes = arguments.process_index == 0 and not options.dry_run
    with locked(target.with_name(f".{target.name}.resformer-lock")) if writes else nullcontext(True) as free:
        if not free:
            raise OutputError(f"{options.output}: another process is training it; wait for it, or choose another.")
        return _finetune(options, arguments, begin, callbacks, command)


def _finetune(
    options: FinetuneOptions,
    arguments: TrainingArguments,
    begin: Callable[[], None] | None,
    callbacks: Sequence[TrainerCallback],
    command: str,
) -> FinetuneReport:
    output = Path(options.output)
    first = arguments.process_index == 0
    if first:
        inputs = [name for name in (options.model, *options.sources, options.distill, options.tokenizer) if name]
        check_target(output, *inputs, made_by=command, force=options.force)
        check_apart(options.unfinished, *inputs[begin is not None :])
        _check_unfinished(options, {**options.run, "processes": arguments.world_size})
        if begin is not None:
            begin()
    PartialState().wait_for_everyone()
    config = _loaded(AutoConfig, options.model)
    if type(config) in MODEL_FOR_MASKED_LM_MAPPING and not getattr(config, "is_decoder", False):
        raise CheckpointError(f"{options.model}: is an encoder ({config.model_type}); only causal models are trained.")
    if options.push is not None and not isinstance(config, ResFormerConfig):
        raise CheckpointError(
            f"{options.model}: is no ResFormer model, and a push needs its model card; leave out --push."
        )
    tokenizer = load_tokenizer(
        options.tokenizer or options.model,
        config.vocab_size,
        "name a checkpoint that has the right one with --tokenizer",
    )
    block = _block(options, config)
    with torch.device("meta"):
        shape = AutoModelForCausalLM.from_config(config)
    trained = trained_parameters(shape, options.train)
    with arguments.main_process_first(desc="packing"):
        blocks = _blocks(options, tokenizer, block)
    report = FinetuneReport(
        arguments=options.run,
        method=method_of(config) if isinstance(config, ResFormerConfig) else None,
        parameters=shape.num_parameters(),
        trained_parameters=sum(shape.get_parameter(name).numel() for name in trained),
        block=block,
        training_blocks=len(blocks.train) if isinstance(blocks.train, PackedBlocks) else None,
        held_out_blocks=len(blocks.held_out),
        held_out_tokens=len(blocks.held_out) * block,
        held_out_documents=sum(blocks.held_out_documents.values()),
        held_out_by_source=dict(blocks.held_out_documents),
        notes=list(blocks.notes),
        versions={"python": platform.python_version()}
        | {name: version(name) for name in ("resformer", "torch", "transformers", "datasets", "accelerate")},
    )
    begun = {**options.run, "processes": arguments.world_size, "data_sha256": blocks.digest}
    if first:
        begun["weights"] = [_weights(name) for name in (options.model, options.distill) if name is not None]
        _check_unfinished(options, begun)
    if options.dry_run:
        report.predicted_memory = _predicted_memory(options, arguments, config, block, trained)
        return report

    torch.manual_seed(options.seed)
    if options.dtype != "float32":
        warnings.warn(
            f"Weights are trained in {options.dtype}: updates of less than about three thousandths of a weight are "
            "rounded away. Train in float32, which --bf16 computes with at the same speed.",
            stacklevel=2,
        )
    attention = {"attn_implementation": options.attn_implementation}
    model = _model(options.model, getattr(torch, options.dtype), **attention)
    for name, parameter in model.named_parameters():
        if name not in trained:
            parameter.requires_grad_(False)
    teacher = None
    if options.distill is not None:
        teacher = _model(options.distill, torch.bfloat16 if arguments.bf16 else torch.float32, **attention)
    stream = blocks.train if isinstance(blocks.train, StreamedBlocks) else None
    arguments.ignore_data_skip = stream is not None  # which goes on where it was
    trainer = _RecipeTrainer(
        model=model,
        args=arguments,
        train_dataset=blocks.train,
        eval_dataset=blocks.held_out if options.held_out else None,
        data_collator=default_data_collator,
        processing_class=tokenizer,  # saved with each checkpoint
        callbacks=[*callbacks, _EvaluationLines(), *([] if stream is None else [_Place(stream)])],
        teacher=teacher,
        weight=options.distill_weight,
        temperature=options.temperature,
        hidden_weight=options.distill_hidden,
        hidden_layers=options.distill_hidden_layers,
        connection_learning_rate=options.connection_learning_rate,
    )
    for callback in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(callback)
    if not arguments.disable_tqdm:
        trainer.add_callback(_Bar())

    last = broadcast_object_list([last_checkpoint(options.unfinished) if first and options.resume else None])[0]
    if last is not None and not all(gather_object([(last / "trainer_state.json").is_file()])):
        raise CheckpointError(f"{last}: is on the first process's disk and not on those of all; use a shared one.")
    if first:
        options.unfinished.mkdir(parents=True, exist_ok=True)
        (options.unfinished / "arguments.json").write_text(json.dumps(begun, indent=2))
    PartialState().wait_for_everyone()
    loss = _train(trainer, last, report)
    if not math.isfinite(loss):
        raise CheckpointError(f"The loss is {loss}; nothing was written. Try a lower --learning-rate.")

    source_card = _record_origin(options, config, report)
    with replacing(output, made_by=command, force=options.force) if first else nullcontext(output) as folder:
        model.config.use_cache = config.use_cache  # which the Trainer sets to False
        saved = folder if options.save_dtype is None else options.unfinished / "trained"
        trainer.save_model(str(saved))  # every process takes part where the weights are sharded
        if first:
            if options.save_dtype is not None:
                _model(str(saved), getattr(torch, options.save_dtype)).save_pretrained(folder)
                tokenizer.save_pretrained(folder)
            (folder / "training_args.bin").unlink(missing_ok=True)  # a pickle
            if (options.unfinished / LOG).exists():
                shutil.copyfile(options.unfinished / LOG, folder / LOG)
            if (options.unfinished / "runs").exists():  # TensorBoard's
                shutil.copytree(options.unfinished / "runs", folder / "runs")
            facts = {**report.as_dict(), **weight_digests(folder)}
            (folder / "metrics.json").write_text(json.dumps(facts, indent=2, default=str) + "\n")
            if isinstance(config, ResFormerConfig):  # cards are for models with cross-layer connections
                card = trained_card(
                    **{name: getattr(report, name) for name in TRAINING_FIELDS},
                    parameters=report.parameters,
                    dtype=options.save_dtype or options.dtype,
                    repository=options.push or output.name,
                    config=config,
                    source_card=source_card,
                    from_scratch=report.source is None,
                )
                card.save(folder / "README.md")
    if first:
        shutil.rmtree(options.unfinished)
    PartialState().wait_for_everyone()
    if first and options.push is not None:
        report.url = _push(options)
    return report


class _RecipeTrainer(ConnectionTrainer, DistillationTrainer):
    """Combines both trainers. The evaluation loss is a mean over all labels, not over batches."""

    def __init__(self, *args: Any, eval_dataset: PackedBlocks | None, **kwargs: Any):
        super().__init__(*args, eval_dataset=eval_dataset, **kwargs)
        self.random_states: str | None = None  # the checkpoint that has those of the first step
        if eval_dataset is not None:
            rows = [eval_dataset[index]["labels"] for index in range(len(eval_dataset))]
            self.labels_per_block = _labels_per_row(torch.stack(rows))

    def get_batch_samples(self, *given: Any) -> Any:
        samples = super().get_batch_samples(*given)
        if self.random_states is not None:  # the loader of a stream has drawn a number when it began
            self._load_rng_state(self.random_states)
            self.random_states = None
        return samples

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        if model.training:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True)
        loss = loss * _labels_per_row(inputs["labels"]) / self.labels_per_block
        return (loss, outputs) if return_outputs else loss

    def _run_epoch(self, **arguments: Any) -> None:
        if self.state.global_step < self.state.max_steps:
            super()._run_epoch(**arguments)
        else:  # resumed from the last checkpoint: the stock loop would train one step more
            self.control.should_training_stop = True


def _labels_per_row(labels: torch.Tensor) -> float:
    return (labels[:, 1:] != -100).sum().item() / len(labels)


class _Place(TrainerCallback, ExportableState):
    """Has the place in a stream saved with each checkpoint, in its trainer_state.json."""

    def __init__(self, stream: StreamedBlocks):
        self.stream, self.blocks = stream, 0

    def on_step_end(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:
        self.blocks = state.global_step * args.train_batch_size * args.gradient_accumulation_steps * args.world_size

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": self.stream.place(self.blocks)}


class _EvaluationLines(TrainerCallback):
    """One line an evaluation, on stderr."""

    def on_evaluate(
        self, args: TrainingArguments, state: Any, control: Any, metrics: dict[str, float], **kwargs: Any
    ) -> None:
        if state.is_world_process_zero:
            loss = metrics["eval_loss"]
            steps = f"{state.global_step}/{state.max_steps}"
            line = f"step {steps}: held-out loss {loss:.4f}, perplexity {_perplexity(loss):.3f}"
            tqdm.write(line, file=sys.stderr)


class _Bar(ProgressCallback):
    """The Trainer's bar, with the loss beside it instead of lines on stdout."""

    def on_log(
        self, args: TrainingArguments, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        if self.training_bar is not None and logs and "loss" in logs:
            self.training_bar.set_postfix(loss=f"{float(logs['loss']):.4f}")


def _train(trainer: _RecipeTrainer, last: Path | None, report: FinetuneReport) -> float:
    """Evaluates, trains, evaluates, and fills in the report; the loss afterwards, or without held-out text in all."""
    seen_before = 0
    # Not by `evaluate()` before `train()`: Accelerate takes a model that was prepared for evaluation to be prepared for
    # training too, and the gradients of several processes would not be averaged.
    trainer.args.eval_on_start = last is None and trainer.eval_dataset is not None
    if last is not None:
        state = json.loads((last / "trainer_state.json").read_text())
        report.resumed_from, seen_before = state["global_step"], state["num_input_tokens_seen"]
        if isinstance(trainer.train_dataset, StreamedBlocks):
            trainer.train_dataset.start = state["stateful_callbacks"][_Place.__name__]["attributes"]
            trainer.random_states = str(last)
    start = time.perf_counter()
    result = trainer.train(resume_from_checkpoint=None if last is None else str(last))
    report.seconds = time.perf_counter() - start
    state = trainer.state
    evaluations = [entry for entry in state.log_history if "eval_loss" in entry]
    within = [entry for entry in evaluations if last is None or entry["step"] > report.resumed_from]
    report.seconds -= sum(entry["eval_runtime"] for entry in within)
    report.steps, report.tokens = state.global_step, int(state.num_input_tokens_seen)
    report.tokens_per_second = (report.tokens - seen_before) / report.seconds
    report.peak_memory = peak_memory()
    if trainer.eval_dataset is None:
        return float(result.training_loss)
    if not evaluations or evaluations[-1]["step"] != state.global_step:
        evaluations.append({**trainer.evaluate(), "step": state.global_step})
    report.evaluations = [{"step": entry["step"], "loss": entry["eval_loss"]} for entry in evaluations]
    best = trainer.args.load_best_model_at_end  # loaded after the last evaluation
    after = trainer.evaluate() if best else evaluations[-1]
    report.loss_before, report.loss_after = evaluations[0]["eval_loss"], after["eval_loss"]
    report.perplexity_before, report.perplexity_after = _perplexity(report.loss_before), _perplexity(report.loss_after)
    report.evaluation_tokens = round(trainer.labels_per_block * report.held_out_blocks)
    return report.loss_after


def processor_has_bf16() -> bool:
    """Whether bfloat16 matrix products are in hardware, on the accelerator or else on the CPU."""
    return torch.cuda.is_bf16_supported(including_emulation=False) if torch.cuda.is_available() else cpu_has_bf16()


def _training_arguments(options: FinetuneOptions) -> TrainingArguments:
    """Options that have a name here are fixed, other fields have defaults that `options.trainer` may override."""
    fixed = {
        "output_dir": str(options.unfinished),
        "per_device_train_batch_size": options.batch,
        "gradient_accumulation_steps": options.accumulate,
        "learning_rate": options.learning_rate,
        "seed": options.seed,
        "data_seed": options.seed,
        "bf16": processor_has_bf16() if options.bf16 is None else options.bf16,
        "activation_checkpointing": options.gradient_checkpointing,
        "torch_compile": options.compile,
        "num_train_epochs": 1.0 if options.epochs is None else options.epochs,
        "max_steps": -1 if options.steps is None else options.steps,
    }
    defaults = {
        "per_device_eval_batch_size": options.batch,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 0.05,  # shares of all steps, as the next two are
        "eval_steps": 0.1,
        "save_steps": 0.1,
        "eval_strategy": "steps" if options.held_out else "no",
        "save_strategy": "steps",
        "save_total_limit": 2,
        "logging_steps": 10,
        "logging_nan_inf_filter": False,
        "prediction_loss_only": True,
        "include_num_input_tokens_seen": "all",
        "report_to": "none",
        "disable_tqdm": not sys.stderr.isatty(),
        "use_cpu": not torch.accelerator.is_available(),
    }
    try:
        return TrainingArguments(**{**defaults, **options.trainer, **fixed})
    except TypeError as error:
        raise ValueError(f"An argument of the Trainer is of the wrong kind: {brief(error)}") from error


def from_scratch(model: str) -> bool:
    """Whether `resformer new` has written the checkpoint."""
    path = Path(model) / LISTING
    return path.is_file() and read_json(path).get("made_by") == "new"


def _weights(name: str) -> str:
    """The commit of a checkpoint on the Hub, or a digest of the weights of one on this disk."""
    if not (folder := Path(name)).is_dir():
        return str(getattr(_loaded(AutoConfig, name), "_commit_hash", None))
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def _check_unfinished(options: FinetuneOptions, now: dict[str, Any]) -> None:
    """Refuses to lose an unfinished run, or to go on with one that had begun otherwise than `now`."""
    folder = options.unfinished
    if not folder.exists() or not any(path.name != START for path in folder.iterdir()):
        return
    if options.resume:
        try:
            before = json.loads((folder / "arguments.json").read_text())
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{folder}: is no unfinished run ({brief(error)}); remove it.") from error
        now = json.loads(json.dumps(now))
        if different := sorted(name for name in now if now[name] != before.get(name)):
            changes = ", ".join(f"{name} was {before.get(name)!r}, is {now[name]!r}" for name in different)
            raise CheckpointError(f"{folder}: holds another run: {changes}. Go on as it began, or use --force alone.")
    elif options.force and (folder / "arguments.json").is_file():
        if not options.dry_run:
            shutil.rmtree(folder)
    else:
        raise CheckpointError(
            f"{folder}: holds an unfinished run; go on with --resume, or begin again with --force.", "--resume"
        )


def last_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint that was written to its end: its state comes last."""
    for path in sorted(folder.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]), reverse=True):
        try:
            json.loads((path / "trainer_state.json").read_text())
        except (OSError, ValueError):
            continue
        return path
    return None


def _loaded(auto_class: Any, name: str, **options: Any) -> Any:
    """Never runs, nor asks on stdin to run, a checkpoint's code."""
    check_folder(name)
    try:
        return auto_class.from_pretrained(name, trust_remote_code=False, **options)
    except (OSError, ValueError, ImportError) as error:
        raise CheckpointError(
            f"{name}: is no checkpoint folder or Hub id that can be loaded: {brief(error)}"
        ) from error


def _push(options: FinetuneOptions) -> str | None:
    """The URL of the commit that holds the finished output."""
    assert options.push is not None
    private, revision = (options.trainer.get(name) for name in ("hub_private_repo", "hub_revision"))
    again = ["resformer", "push", options.output, options.push]
    again += ["--private"] * bool(private) + ([] if revision is None else ["--revision", revision])
    try:
        return push_checkpoint(options.output, options.push, private=bool(private), revision=revision).url
    except (ResFormerError, KeyboardInterrupt) as error:
        raise HubError(
            f"{options.output}: is finished, but was not pushed: {str(error) or 'interrupted.'} To push it: "
            f"{shlex.join(again)}"
        ) from error


def _model(name: str, dtype: torch.dtype, **kwargs: Any) -> PreTrainedModel:
    return _loaded(AutoModelForCausalLM, name, dtype=dtype, use_safetensors=True, **kwargs)


def _predicted_memory(
    options: FinetuneOptions, arguments: TrainingArguments, config: PreTrainedConfig, block: int, trained: list[str]
) -> dict[str, Any]:
    """What `predicted_memory` says of the run, and its peak with gradient checkpointing; on a CPU with this process."""

    def build(checkpointing: bool) -> PreTrainedModel:
        dtype = getattr(torch, options.dtype)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=options.attn_implementation)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in trained)
        if checkpointing:
            model.gradient_checkpointing_enable()
        return model

    teacher = None
    if options.distill is not None:
        teacher_dtype = torch.bfloat16 if arguments.bf16 else torch.float32
        teacher = partial(AutoModelForCausalLM.from_config, _loaded(AutoConfig, options.distill), dtype=teacher_dtype)
    optim = OptimizerNames(arguments.optim).value
    process = psutil.Process().memory_info().rss if arguments.device.type == "cpu" else 0
    predicted, checkpointed = (
        predicted_memory(
            partial(build, checkpointing),
            batch=options.batch,
            block=block,
            bf16=arguments.bf16,
            passes=options.accumulate,
            moment_bytes=2.0 if "8bit" in optim else 0.0 if optim in ("sgd", "adafactor") else None,
            build_teacher=teacher,
            device=arguments.device.type,
        )
        for checkpointing in (options.gradient_checkpointing, True)
    )
    return {
        **predicted,
        "process": process,
        "peak": process + predicted["peak"],
        "peak_with_gradient_checkpointing": process + checkpointed["peak"],
    }


def _block(options: FinetuneOptions, config: PreTrainedConfig) -> int:
    positions = config.max_position_embeddings
    if options.block is None:
        return min(1024, positions)
    if options.block > positions:
        raise ValueError(f"block is {options.block:,}, the model has {positions:,} positions; use --block {positions}.")
    return options.block


def _blocks(options: FinetuneOptions, tokenizer: PreTrainedTokenizerBase, block: int) -> Blocks:
    documents = load_documents(
        options.sources,
        split=options.split,
        text_column=options.text_column,
        sample_by=options.sample_by,
        streaming=options.streaming,
        chats=True,
        held_out=options.held_out,
    )
    return pack_documents(
        documents,
        tokenizer,
        block=block,
        held_out=options.held_out,
        held_out_blocks=options.held_out_blocks,
        separate=options.separate_documents,
        seed=options.seed,
        weights=weighted_sources(options.data)[1],
    )


def _perplexity(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf


def _record_origin(options: FinetuneOptions, config: PreTrainedConfig, report: FinetuneReport) -> dict[str, Any]:
    """Notes in the report what a card says of the run, and returns what the source's own card says."""
    model = Path(options.model)
    commit = getattr(config, "_commit_hash", None)
    card, record = (
        cached_file(
            options.model,
            name,
            revision=commit,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
        for name in ("README.md", RECORD)
    )
    base = base_model_of(config)
    report.source, report.revision = (model.resolve().name if model.is_dir() else options.model), commit
    if from_scratch(options.model):
        report.source = None
    if commit is None and base:  # saved elsewhere after a training
        report.source, report.revision = base["name"], base["revision"]
    with suppress(CheckpointError, KeyError, TypeError):
        conversion = read_json(Path(record))
        report.source, report.revision = conversion["source"], conversion["revision"]
    local = [source for source in options.sources if source == STANDARD_LIBRARY or Path(source).expanduser().exists()]
    report.datasets = [source.partition(":")[0] for source in options.sources if source not in local]
    report.corpus = ", ".join(Path(source).name if source in local else source for source in options.sources)
    teacher = Path(options.distill) if options.distill is not None else None
    report.recipe = {
        "train": options.train,
        "trained": report.trained_parameters,
        "parameters": report.parameters,
        "teacher": teacher.resolve().name if teacher is not None and teacher.is_dir() else options.distill,
        "weight": options.distill_weight,
        "temperature": options.temperature,
        "hidden_weight": options.distill_hidden,
        "hidden_layers": options.distill_hidden_layers,
    }
    report.runs = [
        {
            "name": report.method or "the model",
            "perplexity_before": report.perplexity_before,
            "perplexity_after": report.perplexity_after,
            "training_tokens": report.tokens,
            "steps": report.steps,
        }
    ]
    return {**well_formed(base), **({} if card is None else carried_metadata(Path(card)))}


def _checked_type(name: str, value: Any, expected: Any) -> Any:
    """`value` as the field's type has it: a whole number is a float too, one name a list of one."""
    types = get_args(expected) or (expected,)
    if get_origin(expected) is list:
        values = value if isinstance(value, list) else [value]
        if all(type(item) is types[0] for item in values):
            return values
    elif value is None and type(None) in types:
        return None
    elif float in types and isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    elif type(value) in types:
        return value
    names = " or ".join(option.__name__ for option in types if option is not type(None))
    raise ValueError(f"{name} is {value!r}; expected {'a list of ' * (get_origin(expected) is list)}{names}.")
