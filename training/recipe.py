"""A training: a checkpoint and text in, a trained checkpoint with its metrics and its card out."""

import hashlib
import json
import math
import os
import platform
import shlex
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object
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

from resformer.checkpoint_cards import CheckpointCard
from resformer.configuration import ResFormerConfig
from resformer.configuration.methods import method_of
from resformer.environment import cpu_has_bf16, peak_memory
from resformer.errors import CheckpointError, OutputError, ResFormerError, did_you_mean, one_line
from resformer.evaluation import check_tasks, write_results
from resformer.files import check_apart, check_target, locked, replacing
from resformer.model_cards import harness_metrics, model_card
from resformer.pushing import HubError
from resformer.pushing import push as push_checkpoint
from resformer.record import weight_digests
from resformer.training.data import load_documents
from resformer.training.distillation import check_teacher
from resformer.training.freezing import trained_parameters
from resformer.training.log import CURVE, LOG, draw_curves
from resformer.training.options import FinetuneOptions, check_same, weighted_sources
from resformer.training.packing import Blocks, PackedBlocks, StreamedBlocks, pack_documents
from resformer.training.parallel import distributed
from resformer.training.report import FinetuneReport, perplexity, record_origin
from resformer.training.tokenizers import load_tokenizer
from resformer.training.trainer import Bar, EvaluationLines, Place, RecipeTrainer
from resformer.untrusted import check_folder

#: The folder, in that of an unfinished run, of an untrained checkpoint that it has begun with.
START = "start"
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
    first = arguments.process_index == 0
    if options.tasks:
        check_tasks(options.tasks)
    if first:
        inputs = [name for name in (options.model, *options.sources, options.distill, options.tokenizer) if name]
        check_target(Path(options.output), *inputs, made_by=command, force=options.force)
        check_apart(options.unfinished, *inputs[begin is not None :])
        _check_unfinished(options, {**options.run, "processes": arguments.world_size})
        if begin is not None:
            begin()
    PartialState().wait_for_everyone()

    config = _config(options)
    parts = distributed(options, config, arguments)
    tokenizer = load_tokenizer(
        options.tokenizer or options.model,
        config.vocab_size,
        "name a checkpoint that has the right one with --tokenizer",
    )
    with torch.device("meta"):
        shape = AutoModelForCausalLM.from_config(config)
    trained = trained_parameters(shape, options.train)
    with arguments.main_process_first(desc="packing"):
        blocks, notes = _blocks(options, config, tokenizer)
    report = FinetuneReport(
        arguments=options.run,
        method=method_of(config) if isinstance(config, ResFormerConfig) else None,
        parameters=shape.num_parameters(),
        trained_parameters=sum(shape.get_parameter(name).numel() for name in trained),
        block=blocks.held_out.block,
        training_blocks=len(blocks.train) if isinstance(blocks.train, PackedBlocks) else None,
        held_out_blocks=len(blocks.held_out),
        held_out_tokens=len(blocks.held_out) * blocks.held_out.block,
        held_out_documents=sum(blocks.held_out_documents.values()),
        held_out_by_source=dict(blocks.held_out_documents),
        notes=notes,
        versions={"python": platform.python_version()}
        | {name: version(name) for name in ("resformer", "torch", "transformers", "datasets", "accelerate")},
    )
    begun = {**options.run, "processes": arguments.world_size, "data_sha256": blocks.digest}
    if first:
        begun["weights"] = [_weights(name) for name in (options.model, options.distill) if name is not None]
        _check_unfinished(options, begun)

    trainer = _trainer(options, arguments, blocks, tokenizer, trained, parts, callbacks)
    if options.dry_run:
        trainer.train()
        report.peak_memory = peak_memory()
        return report
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

    read = blocks.training_tokens or blocks.train.tokens((report.tokens or 0) // report.block)
    source_card = record_origin(options, config, report, read)
    _write(options, config, trainer, report, source_card, command)
    if first:
        shutil.rmtree(options.unfinished)
    PartialState().wait_for_everyone()
    if first and options.push is not None:
        report.url = _push(options)
    return report


def _config(options: FinetuneOptions) -> PreTrainedConfig:
    """The model's configuration; what the options ask of it is checked before the data are read."""
    config = _loaded(AutoConfig, options.model)
    if type(config) in MODEL_FOR_MASKED_LM_MAPPING and not getattr(config, "is_decoder", False):
        raise CheckpointError(f"{options.model}: is an encoder ({config.model_type}); only causal models are trained.")
    if options.distill is not None:
        teacher_config = _loaded(AutoConfig, options.distill).get_text_config()
        check_teacher(config, teacher_config, options.distill_hidden_layers if options.distill_hidden else [])
    if options.push is not None and not isinstance(config, ResFormerConfig):
        raise CheckpointError(
            f"{options.model}: is no ResFormer model, and a push needs its model card; leave out --push."
        )
    return config


def _blocks(
    options: FinetuneOptions, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> tuple[Blocks, list[str]]:
    """The packed data, and notes on them."""
    positions = config.max_position_embeddings
    block = options.block or min(1024, positions)
    if block > positions:
        raise ValueError(f"block is {block:,}, the model has {positions:,} positions; use --block {positions}.")
    documents = load_documents(
        options.sources, **options.reading, streaming=options.streaming, chats=True, held_out=options.held_out
    )
    blocks = pack_documents(
        documents,
        tokenizer,
        block=block,
        held_out=options.held_out,
        held_out_blocks=options.held_out_blocks,
        separate=options.separate_documents,
        seed=options.seed,
        weights=weighted_sources(options.data)[1],
    )
    return blocks, documents.notes


def _trainer(
    options: FinetuneOptions,
    arguments: TrainingArguments,
    blocks: Blocks,
    tokenizer: PreTrainedTokenizerBase,
    trained: Collection[str],
    parts: Mapping[str, Any],
    callbacks: Sequence[TrainerCallback],
) -> RecipeTrainer:
    """The trainer, with the model and, to distil, its teacher.

    Args:
        trained: the names of the parameters that are trained.
        parts: of `distributed`.
    """
    torch.manual_seed(options.seed)
    if options.dtype != "float32":
        warnings.warn(
            f"Weights are trained in {options.dtype}: updates of less than about three thousandths of a weight are "
            "rounded away. Train in float32, which --bf16 computes with at the same speed.",
            stacklevel=2,
        )
    attention = {"attn_implementation": options.attn_implementation}
    model = _model(options.model, getattr(torch, options.dtype), **attention, **parts)
    for name, parameter in model.named_parameters():
        if name not in trained:
            parameter.requires_grad_(False)
    teacher = None
    if options.distill is not None:
        teacher = _model(options.distill, torch.bfloat16 if arguments.bf16 else torch.float32, **attention)
    stream = blocks.train if isinstance(blocks.train, StreamedBlocks) else None
    arguments.ignore_data_skip = stream is not None  # which goes on where it was
    trainer = RecipeTrainer(
        model=model,
        args=arguments,
        train_dataset=blocks.train,
        eval_dataset=blocks.held_out if options.held_out else None,
        data_collator=default_data_collator,
        processing_class=tokenizer,  # saved with each checkpoint
        callbacks=[*callbacks, EvaluationLines(), *([] if stream is None else [Place(stream)])],
        teacher=teacher,
        weight=options.distill_weight,
        temperature=options.temperature,
        hidden_weight=options.distill_hidden,
        hidden_layers=options.distill_hidden_layers,
        tasks=options.tasks,
        connection_learning_rate=options.connection_learning_rate,
    )
    for callback in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(callback)
    if not arguments.disable_tqdm:
        trainer.add_callback(Bar())
    return trainer


def _write(
    options: FinetuneOptions,
    config: PreTrainedConfig,
    trainer: RecipeTrainer,
    report: FinetuneReport,
    source_card: Mapping[str, Any],
    command: str,
) -> None:
    """Writes the output; where the weights are sharded, every process takes part."""
    first, output = trainer.args.process_index == 0, Path(options.output)
    scores = harness_metrics(trainer.results) if trainer.results else []
    report.metrics = [asdict(score) for score in scores]
    writer = replacing(output, made_by=command, force=options.force) if first else nullcontext(options.unfinished)
    with writer as folder:
        trainer.model.config.use_cache = config.use_cache  # which the Trainer sets to False
        saved = folder if options.save_dtype is None else options.unfinished / "trained"
        trainer.save_model(str(saved))
        if not first:
            return
        if options.save_dtype is not None:
            _model(str(saved), getattr(torch, options.save_dtype)).save_pretrained(folder)
            trainer.processing_class.save_pretrained(folder)
        (folder / "training_args.bin").unlink(missing_ok=True)  # a pickle
        if (options.unfinished / LOG).exists():
            shutil.copyfile(options.unfinished / LOG, folder / LOG)
            with suppress(ImportError):  # without matplotlib there is no picture
                draw_curves([folder], folder / CURVE)
                report.recipe["curve"] = CURVE
        if (options.unfinished / "runs").exists():  # TensorBoard's
            shutil.copytree(options.unfinished / "runs", folder / "runs")
        if scores:
            write_results(trainer.results, folder / "eval.json")
        facts = {**asdict(report), **weight_digests(folder)}
        (folder / "metrics.json").write_text(json.dumps(facts, indent=2, default=str) + "\n")
        if isinstance(config, ResFormerConfig):  # cards are for models with cross-layer connections
            facts |= {"dtype": options.save_dtype or options.dtype, "from_scratch": report.source is None}
            repository = options.push or output.name
            card = model_card(facts, repository, config=config, source_card=source_card, metrics=scores)
            CheckpointCard(card, "", scores).write(folder / "README.md", force=True)


def _train(trainer: RecipeTrainer, last: Path | None, report: FinetuneReport) -> float:
    """Evaluates, trains, evaluates, and fills in the report; the loss afterwards, or without held-out text in all."""
    seen_before = 0
    # Not by `evaluate()` before `train()`: Accelerate takes a model that was prepared for evaluation to be prepared for
    # training too, and the gradients of several processes would not be averaged.
    trainer.args.eval_on_start = last is None and trainer.eval_dataset is not None
    if last is not None:
        state = json.loads((last / "trainer_state.json").read_text())
        report.resumed_from, seen_before = state["global_step"], state["num_input_tokens_seen"]
        if isinstance(trainer.train_dataset, StreamedBlocks):
            trainer.train_dataset.resume(state["stateful_callbacks"][Place.__name__]["attributes"])
            trainer.random_states = str(last)
    start = time.perf_counter()
    result = trainer.train(resume_from_checkpoint=None if last is None else str(last))
    report.seconds = time.perf_counter() - start
    state = trainer.state
    evaluations = [entry for entry in state.log_history if "eval_loss" in entry]
    since = 0 if last is None else report.resumed_from + 1
    report.seconds -= sum(entry.get("eval_runtime", 0.0) for entry in state.log_history if entry["step"] >= since)
    report.steps, report.tokens = state.global_step, int(state.num_input_tokens_seen)
    report.tokens_per_second = (report.tokens - seen_before) / report.seconds
    report.peak_memory = peak_memory()
    if trainer.eval_dataset is None:
        trainer.evaluate()
        return float(result.training_loss)
    if not evaluations or evaluations[-1]["step"] != state.global_step:
        evaluations.append({**trainer.evaluate(), "step": state.global_step})
    report.evaluations = [{"step": entry["step"], "loss": entry["eval_loss"]} for entry in evaluations]
    best = trainer.args.load_best_model_at_end  # loaded after the last evaluation
    after = trainer.evaluate() if best else evaluations[-1]
    report.loss_before, report.loss_after = evaluations[0]["eval_loss"], after["eval_loss"]
    report.perplexity_before, report.perplexity_after = perplexity(report.loss_before), perplexity(report.loss_after)
    report.evaluation_tokens = round(trainer.labels_per_block * report.held_out_blocks)
    return report.loss_after


def uses_bf16(asked: bool | None) -> bool:
    """What was asked for, or whether bfloat16 products are in hardware, on the accelerator or else on the CPU."""
    if asked is not None:
        return asked
    return torch.cuda.is_bf16_supported(including_emulation=False) if torch.cuda.is_available() else cpu_has_bf16()


def _training_arguments(options: FinetuneOptions) -> TrainingArguments:
    """Options that have a name here are fixed, other fields have defaults that `options.trainer` may override."""
    for name, value in options.trainer.items():
        _check_argument(name, value)
    fixed: dict[str, Any] = {
        "output_dir": str(options.unfinished),
        "per_device_train_batch_size": options.batch,
        "gradient_accumulation_steps": options.accumulate,
        "learning_rate": options.learning_rate,
        "seed": options.seed,
        "data_seed": options.seed,
        "bf16": uses_bf16(options.bf16),
        "activation_checkpointing": options.gradient_checkpointing,
        "torch_compile": options.compile,
        "num_train_epochs": 1.0 if options.epochs is None else options.epochs,
        "max_steps": -1 if options.steps is None else options.steps,
        **({} if options.optim is None else {"optim": options.optim}),
        "report_to": options.report_to or "none",
    }
    if options.dry_run:  # one step, which writes nothing
        fixed |= {"max_steps": 1, "eval_strategy": "no", "save_strategy": "no", "load_best_model_at_end": False}
        fixed |= {"report_to": "none", "output_dir": tempfile.gettempdir()}
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
        "disable_tqdm": not sys.stderr.isatty(),
        "use_cpu": not torch.accelerator.is_available(),
    }
    if options.compile:  # each layer by itself: one graph for each kind of layer
        os.environ["ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION"] = "true"
    try:
        return TrainingArguments(**{**defaults, **options.trainer, **fixed})
    except TypeError as error:
        raise ValueError(f"An argument of the Trainer is of the wrong kind: {one_line(error)}") from error


def _check_argument(name: str, value: Any) -> None:
    """Refuses a field of `TrainingArguments` that does not exist, has an option of its own, or would do harm."""
    options = [each.name for each in fields(FinetuneOptions)]
    if (name in options and name != "optim") or name in _OPTION_NAMES:
        raise ValueError(f"{name}: is called {_OPTION_NAMES.get(name, name)} here, an option of its own.")
    if name == "hub_token":
        raise ValueError(f"{name}: would be written to metrics.json; set HF_TOKEN instead.")
    if name.startswith("hub_") and name not in _PUSH_FIELDS:
        raise ValueError(f"{name}: only the finished output is pushed, once; expected {', '.join(_PUSH_FIELDS)}.")
    if name == "label_smoothing_factor" and value:
        raise ValueError(f"{name}: held-out losses and perplexities would be smoothed, too; leave it out.")
    known = [each.name for each in fields(TrainingArguments) if each.init]
    if name not in known:
        raise ValueError(f"There is no option {name!r}.{did_you_mean(name, [*options, *known])}")


def _weights(name: str) -> str:
    """The commit of a checkpoint on the Hub, or a digest of one on this disk."""
    if not Path(name).is_dir():
        return str(getattr(_loaded(AutoConfig, name), "_commit_hash", None))
    return hashlib.sha256(json.dumps(weight_digests(Path(name))).encode()).hexdigest()


def _check_unfinished(options: FinetuneOptions, now: dict[str, Any]) -> None:
    """Refuses to lose an unfinished run, or to go on with one that had begun otherwise than `now`."""
    folder = options.unfinished
    # `START` may be unfinished, too, under the name that `replacing` gives it.
    if not folder.exists() or all(START in path.name.split(".") for path in folder.iterdir()):
        return
    if options.resume:
        check_same(folder / "arguments.json", now, "run", "Go on as it began, or use --force alone.")
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
            f"{name}: is no checkpoint folder or Hub id that can be loaded: {one_line(error)}"
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
