"""A training: a checkpoint and text in, a trained checkpoint with its metrics and its card out."""

import copy
import hashlib
import json
import math
import os
import platform
import re
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, fields
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, get_args

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object
from safetensors import SafetensorError
from tqdm import tqdm
from transformers import (
    MODEL_FOR_MASKED_LM_MAPPING,
    PreTrainedConfig,
    PreTrainedModel,
    PrinterCallback,
    ProgressCallback,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
)

from resformer.configuration.connection_fields import ConnectionFields
from resformer.configuration.methods import method_of
from resformer.convert.carrying import write_files
from resformer.convert.connections import read_connections, write_connections
from resformer.convert.judging import loading_problem
from resformer.convert.reading import read_checkpoint, side_file
from resformer.convert.source import check_language_model
from resformer.environment import cpu_has_bf16, peak_memory, require
from resformer.errors import CheckpointError, did_you_mean, one_line
from resformer.files import beside, check_apart, check_target, locked, replace_text, replacing, write_text
from resformer.loading import load_config
from resformer.model_cards import Evaluation, base_model_of, model_card
from resformer.modeling.families import language_model_class
from resformer.modeling.saved_connections import checksums, coefficients, weights_have_changed
from resformer.names import BESIDE_TRAINED
from resformer.record import read_record, weight_digests
from resformer.training.data import load_documents
from resformer.training.optimizer import check_muon, is_connection
from resformer.training.options import BEGUN, FinetuneOptions, read_begun, refuse_other, weighted_sources
from resformer.training.packing import pack_documents, spelt_specials
from resformer.training.report import FinetuneReport, perplexity, public, public_names, record_origin
from resformer.training.tokenizers import load_tokenizer, save_tokenizer
from resformer.training.trainer import (
    LOG,
    Bar,
    EvaluationLines,
    LossGuard,
    RecipeTrainer,
    SettingsAreSaved,
    last_checkpoint,
    saving,
)
from resformer.training.untrained import why_not_trained
from resformer.untrusted import names_in

#: The folder, in that of an unfinished run, of an untrained checkpoint that it has begun with.
START = "start"
_MANY_PASSES = 4  # over the same text, which teach about as much as new text would, arXiv 2305.16264
_OF_A_STEP = ("batch", "accumulate", "processes")
#: Options and fields of `TrainingArguments` that may be others where a run is resumed: they change no step, or what
#: they come to is compared.
_FREE = {"report_to", "evaluations", "gradient_checkpointing", "keep_optimizer", "spike", "branch", "warmup"}
_FREE_ARGUMENTS = re.compile(
    r"(save|eval|logging|log|dataloader)_.*|disable_tqdm|run_name|project|enable_jit_checkpoint|warmup_steps"
)


def finetune_checkpoint(
    options: FinetuneOptions,
    *,
    begin: Callable[[], None] | None = None,
    finish: Callable[[RecipeTrainer], None] | None = None,
    callbacks: Sequence[TrainerCallback] = (),
    command: str = "finetune",
) -> FinetuneReport:
    """Runs the recipe: packs the data, trains with the stock Trainer, writes `options.output` when all is done.

    Under torchrun or `accelerate launch` every process calls it; the first one writes.

    Args:
        begin: is called on the first process before the model is read, to write it to `START` in `options.unfinished`.
        finish: is called with the trainer after the last step, before anything is written.
        callbacks: further ones of the Trainer.
        command: whose results are replaced with `options.force`.

    Raises:
        CheckpointError: the model, its tokenizer or the data cannot be used, the output or an unfinished run is in the
            way, or the training ended before its last step.
        OutputError: another process is training the same output, or it cannot be written.
        ValueError: an argument of the Trainer makes no sense.
    """
    arguments = _training_arguments(options)
    first, unfinished = arguments.process_index == 0, options.unfinished
    busy = f"{options.output}: another process is training it; wait for it, or choose another."
    with locked(beside(unfinished, "lock"), busy=busy) if first and not options.dry_run else nullcontext():
        begun = {**options.run, "processes": arguments.world_size}
        force = options.force or (options.resume and (unfinished / BEGUN).is_file())  # or as a run that goes on
        if first:
            inputs = [options.model, *options.sources, *options.held_out_data, *filter(None, [options.tokenizer])]
            check_target(Path(options.output), *inputs, made_by=command, force=force)
            check_apart(unfinished, *inputs[begin is not None :])
            _check_unfinished(options, begun)
            if begin is not None:
                begin()
        PartialState().wait_for_everyone()

        trainer, config = build_trainer(options, callbacks=callbacks)
        blocks, model = trainer.blocks, trainer.model
        names = public_names(options)
        report = FinetuneReport(
            arguments=public(options.run, names),
            method=method_of(config) if isinstance(config, ConnectionFields) else None,
            parameters=model.num_parameters(),
            trained_parameters=model.num_parameters(only_trainable=True),
            block=blocks.held_out.block,
            training_blocks=blocks.train.one_pass,
            held_out_blocks=len(blocks.held_out),
            held_out_tokens=len(blocks.held_out) * blocks.held_out.block,
            held_out_documents=sum(blocks.held_out_documents.values()),
            held_out_by_source=public(blocks.held_out_documents, names),
            processes=arguments.world_size,
            notes=public(trainer.notes, names),
            versions={"python": platform.python_version()}
            | {name: version(name) for name in ("resformer", "torch", "transformers", "datasets", "accelerate")},
        )
        read = blocks.train.read(len(blocks.train))
        report.passes = public({source: passes for source, (_, passes) in read.items()}, names)
        begun |= {"data_sha256": blocks.digest, "warmup_steps": arguments.get_warmup_steps(arguments.max_steps)}
        if first:
            for note in report.notes:
                tqdm.write(note, file=sys.stderr)
            for source, passes in report.passes.items():
                tqdm.write(f"data: {passes:.3g} passes over {source}", file=sys.stderr)
                if passes > _MANY_PASSES:
                    warnings.warn(
                        f"{source}: is read {passes:.3g} times. Beyond {_MANY_PASSES} passes, text teaches less and "
                        "less (arXiv 2305.16264): use more text, a smaller weight or a shorter training.",
                        stacklevel=2,
                    )
            begun["weights"] = [digest_of_weights(options.model)]
            _check_unfinished(options, begun)
        if options.dry_run:
            trainer.train()
            report.peak_memory = peak_memory()
            return report
        last = broadcast_object_list([_last(options, begun) if first else None])[0]
        if last is not None and not all(gather_object([(last / "trainer_state.json").is_file()])):
            raise CheckpointError(f"{last}: is on the first process's disk and not on those of all; use a shared one.")
        if last is not None and not (last / "scheduler.pt").is_file():
            told = f"{last}: has no state of the optimizer (save_only_model); a run cannot go on from it as it began"
            raise CheckpointError(f"{told}. Begin again with --force.")
        if first:
            replace_text(unfinished / BEGUN, json.dumps(begun, indent=2))
        PartialState().wait_for_everyone()
        _train(trainer, last, report)
        if finish is not None:
            finish(trainer)

        read = blocks.train.read((report.tokens or 0) // report.block)
        report.passes = public({source: passes for source, (_, passes) in read.items()}, names)
        source_card = record_origin(options, config, report, read)
        output = replacing(Path(options.output), made_by=command, force=force) if first else nullcontext(unfinished)
        with output as folder, saving(Path(options.output)):
            _write(options, config, trainer, report, source_card, folder)
        if first:
            kept = last_checkpoint(unfinished) if options.keep_optimizer else None
            for path in [unfinished] if kept is None else unfinished.glob("checkpoint-*"):
                if path != kept:
                    shutil.rmtree(path)
        PartialState().wait_for_everyone()
        return report


def build_trainer(
    options: FinetuneOptions, *, callbacks: Sequence[TrainerCallback] = ()
) -> tuple[RecipeTrainer, PreTrainedConfig]:
    """The trainer, with its `blocks` and `notes` on them, and the configuration as the checkpoint has it."""
    arguments = _training_arguments(options)
    config = _loaded(options.model)
    check_language_model(options.model, config)
    if type(config) in MODEL_FOR_MASKED_LM_MAPPING and not getattr(config, "is_decoder", False):
        raise CheckpointError(f"{options.model}: is an encoder ({config.model_type}); only causal models are trained.")
    if reason := why_not_trained(config):
        raise CheckpointError(f"{options.model}: {reason}; it is not trained here.")
    tokenizer = load_tokenizer(
        options.tokenizer or options.model,
        config.get_text_config().vocab_size,
        "name a checkpoint that has the right one with --tokenizer",
    )
    if arguments.process_index == 0:  # a tokenizer that cannot go along is told before the training
        with tempfile.TemporaryDirectory(prefix="resformer-") as folder:
            config.save_pretrained(folder)
            save_tokenizer(tokenizer, Path(folder))
    positions = getattr(config.get_text_config(), "max_position_embeddings", None) or math.inf  # Mamba has no limit
    block = options.block or int(min(1024, positions))
    if block > positions:
        raise ValueError(f"block is {block:,}, the model has {positions:,} positions; use --block {positions}.")
    with arguments.main_process_first(desc="reading"):
        documents, held_out = (
            load_documents(sources, **options.reading, chats=True)
            for sources in (options.sources, options.held_out_data)
        )
    sequences = arguments.train_batch_size * options.accumulate * arguments.world_size
    pack = partial(
        pack_documents,
        documents,
        tokenizer,
        block=block,
        held_out=0.0 if held_out else options.held_out,
        held_out_blocks=options.held_out_blocks,
        held_out_data=held_out,
        separate=options.separate_documents,
        seed=options.seed,
        weights=weighted_sources(options.data)[1],
        length=lambda one_pass: sequences * (options.steps or math.ceil((options.epochs or 1) * one_pass / sequences)),
        parse_special=options.parse_special,
    )
    chats = [part for part in (*documents.values(), *held_out.values()) if "chat" in part.column_names]
    if chats:
        require("trl", "train")
        if not options.separate_documents:
            raise ValueError("Chats of a sequence are kept apart from each other: leave --join-documents out.")
    else:
        with arguments.main_process_first(desc="packing"):
            blocks = pack()

    torch.manual_seed(options.seed)
    model = _model(options.model, torch.float32, attn_implementation=options.attn_implementation)
    trained = [name for name, _ in model.named_parameters() if options.train == "all" or is_connection(name)]
    if not trained:
        raise CheckpointError("The connections of the model have no parameters; use --train all, or another method.")
    has_rates = any(map(is_connection, trained))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)
    if has_weights_of_base := options.train == "connections" and _has_weights_of_base(options, model):
        model.config.base_model = {**model.config.base_model, "checksums": checksums(model)}
    notes = [*documents.notes, *held_out.notes]
    if (
        not has_rates
        and not options.rates
        and options.connection_learning_rate != FinetuneOptions.connection_learning_rate
    ):
        notes.append("the model has no connections that learn: their learning rate is not used")
    notes += [] if options.parse_special else spelt_specials({**documents, **held_out}, tokenizer)
    muon = (options.muon_learning_rate or options.learning_rate) if options.optim == "muon" else None
    notes += [] if muon is None else [check_muon(model)]
    common: dict[str, Any] = {
        "model": model,
        "data_collator": default_data_collator,
        "processing_class": tokenizer,  # saved with each checkpoint
        "callbacks": [*callbacks, SettingsAreSaved(), EvaluationLines(), LossGuard(options.spike)],
        "connection_learning_rate": options.rates or (options.connection_learning_rate if has_rates else None),
        "muon_learning_rate": muon,
    }
    trainer: RecipeTrainer
    if chats:
        from trl import SFTConfig

        from resformer.training.chats import ChatTrainer

        arguments = _training_arguments(options, SFTConfig)
        common |= {"pack": pack, "block": block, "truncate": options.truncate, "chats": chats[0]}
        trainer = ChatTrainer(args=arguments, **common)
    else:
        held = blocks.held_out if len(blocks.held_out) else None
        trainer = RecipeTrainer(args=arguments, train_dataset=blocks.train, eval_dataset=held, **common)
        trainer.blocks = blocks
    trainer.notes = [*dict.fromkeys([*notes, *trainer.notes])]  # both sides of a source may have the same
    trainer.has_weights_of_base = has_weights_of_base
    for callback in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(callback)
    if not arguments.disable_tqdm:
        trainer.add_callback(Bar())
    return trainer, config


def _write(
    options: FinetuneOptions,
    config: PreTrainedConfig,
    trainer: RecipeTrainer,
    report: FinetuneReport,
    source_card: Mapping[str, Any],
    folder: Path,
) -> None:
    """Writes the output into a folder; where the weights are sharded, every process takes part.

    Connections that were trained alone also get a folder of their own, as `save_connections` makes it. They are for
    the source of the model if its other weights are known to be those, else for the model itself.
    """
    if (use_cache := getattr(config, "use_cache", None)) is None:  # of families a part of whose configuration has it
        del trainer.model.config.use_cache
    else:
        trainer.model.config.use_cache = use_cache
    saved = folder if options.save_dtype is None else options.unfinished / "trained"
    trainer.save_model(str(saved))
    if trainer.args.process_index:
        return
    if options.save_dtype is not None:
        _model(str(saved), getattr(torch, options.save_dtype)).save_pretrained(folder)
    report.tokenizer = save_tokenizer(trainer.processing_class, folder)
    source = Path(options.model)
    for name in names_in(source) if source.is_dir() else ():
        if BESIDE_TRAINED.fullmatch(name) and not (folder / name).exists():
            with suppress(CheckpointError):  # a link out of the folder
                write_files([side_file(source, name)], folder, progress=lambda moved: None)
    (folder / "training_args.bin").unlink(missing_ok=True)  # a pickle
    if (options.unfinished / LOG).exists():
        shutil.copyfile(options.unfinished / LOG, folder / LOG)
    events = sorted(options.unfinished.glob("runs/*/events.out.tfevents.*"))  # TensorBoard's, one for each start
    for number, path in enumerate(events):  # their names say the time, the host and the process
        (folder / "runs").mkdir(exist_ok=True)
        shutil.copyfile(path, folder / "runs" / f"events.out.tfevents.{path.name.split('.')[3]}.{number}")

    def write_metrics(folder: Path, facts: Mapping[str, Any]) -> dict[str, Any]:
        facts = {**facts, **weight_digests(folder)}
        (folder / "metrics.json").write_text(json.dumps(facts, indent=2, default=str) + "\n")
        return facts

    facts = write_metrics(folder, asdict(report))
    if not isinstance(config, ConnectionFields):  # cards are for models with cross-layer connections
        return
    facts |= {"dtype": options.save_dtype or "float32", "from_scratch": report.source is None}
    card = model_card(facts, Path(options.output).name, config=config, source_card=source_card)
    write_text(folder / "README.md", str(card))
    if options.train == "connections":
        trained: Any = copy.copy(config)
        alone, local = folder / "connections", Path(options.model).is_dir()
        if not (trainer.has_weights_of_base and base_model_of(config).get("name")):
            name = Path(options.model).resolve().name if local else options.model
            trained.base_model = {"name": name, "revision": getattr(config, "_commit_hash", None)}
        tensors = coefficients(read_connections(config, read_checkpoint(folder).shards))
        write_connections(tensors, trained, alone, changed=False, report=facts, source_card=source_card)
        base = {"source": trained.base_model["name"], "revision": trained.base_model.get("revision")}
        write_metrics(alone, {**facts, **base})


def _has_weights_of_base(options: FinetuneOptions, model: PreTrainedModel) -> bool:
    """Whether the weights beside connections are known to be those of the model that config.json names."""
    if (changed := weights_have_changed(model)) is not None:
        return not changed
    record = read_record(Path(options.model)) if Path(options.model).is_dir() else None
    return record is not None and record.get("files") == weight_digests(Path(options.model))["files"]


def _train(trainer: RecipeTrainer, last: Path | None, report: FinetuneReport) -> None:
    """Evaluates, trains, evaluates, and fills in the report; raises CheckpointError if it ends before the last step."""
    seen_before = 0
    # Not by `evaluate()` before `train()`: Accelerate takes a model that was prepared for evaluation to be prepared for
    # training too, and the gradients of several processes would not be averaged.
    trainer.args.eval_on_start = last is None and trainer.eval_dataset is not None
    if last is not None:
        state = json.loads((last / "trainer_state.json").read_text())
        report.resumed_from, seen_before = state["global_step"], state["num_input_tokens_seen"]
    start = time.perf_counter()
    trainer.train(resume_from_checkpoint=None if last is None else str(last))
    report.seconds = time.perf_counter() - start
    state = trainer.state
    if state.global_step < state.max_steps:
        saved = last_checkpoint(Path(trainer.args.output_dir))
        place = "There is no checkpoint" if saved is None else f"The last checkpoint is {saved}"
        stopped = f"The training was stopped at step {state.global_step:,} of {state.max_steps:,}"
        raise CheckpointError(f"{stopped}, and nothing was written. {place}.", "--resume")
    evaluations = [entry for entry in state.log_history if "eval_loss" in entry]
    since = 0 if last is None else report.resumed_from + 1
    report.seconds -= sum(entry.get("eval_runtime", 0.0) for entry in state.log_history if entry["step"] >= since)
    report.steps, report.tokens = state.global_step, int(state.num_input_tokens_seen)
    report.tokens_per_second = (report.tokens - seen_before) / report.seconds
    report.peak_memory = peak_memory()
    optimizer: Any = trainer.optimizer
    optimizer.eval()  # of a schedule-free optimizer: the averaged weights are saved
    if trainer.eval_dataset is None:
        return
    if not evaluations or evaluations[-1]["step"] != state.global_step:
        evaluations.append({**trainer.evaluate(), "step": state.global_step})
    report.evaluations = [Evaluation(entry["step"], entry["eval_loss"]) for entry in evaluations]
    best = trainer.args.load_best_model_at_end  # loaded after the last evaluation
    after = trainer.evaluate() if best else evaluations[-1]
    report.loss_before, report.loss_after = evaluations[0]["eval_loss"], after["eval_loss"]
    report.perplexity_before, report.perplexity_after = perplexity(report.loss_before), perplexity(report.loss_after)
    report.bits_per_byte = trainer.bytes_per_token and report.loss_after / math.log(2) / trainer.bytes_per_token
    report.evaluation_tokens = round(trainer.labels_of_evaluation)


def uses_bf16(asked: bool | None) -> bool:
    """What was asked for, or whether bfloat16 products are in hardware, on the accelerator or else on the CPU."""
    if asked is not None:
        return asked
    return torch.cuda.is_bf16_supported(including_emulation=False) if torch.cuda.is_available() else cpu_has_bf16()


def _training_arguments(
    options: FinetuneOptions, kind: type[TrainingArguments] = TrainingArguments
) -> TrainingArguments:
    """Options that have a name here are fixed, other fields have defaults that `options.trainer` may override."""
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
        "num_train_epochs": 1.0,  # of `RunBlocks`, which are all that the run takes, in order
        "max_steps": -1 if options.steps is None else options.steps,
        **({} if options.optim in (None, "muon") else {"optim": options.optim}),
        "report_to": options.report_to or "none",
        "resume_from_checkpoint": None,
    }
    for name, value in options.trainer.items():
        _check_argument(name, value, fixed)
    if options.dry_run:  # one step, which writes nothing
        fixed |= {"max_steps": 1, "eval_strategy": "no", "save_strategy": "no", "load_best_model_at_end": False}
        fixed |= {"report_to": "none", "output_dir": tempfile.gettempdir()}
    defaults = {
        "per_device_eval_batch_size": options.batch,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 0.05,  # shares of all steps, as the next two are
        "eval_steps": 0.1,
        "save_steps": 0.1,
        "eval_strategy": "steps" if options.held_out or options.held_out_data else "no",
        "save_strategy": "steps",
        "save_total_limit": 2,
        "greater_is_better": False,  # of a loss, and of bits per byte
        "logging_steps": 10,
        "logging_nan_inf_filter": False,
        "prediction_loss_only": True,
        "train_sampling_strategy": "sequential",
        "include_num_input_tokens_seen": "all",
        "disable_tqdm": not sys.stderr.isatty(),
        "use_cpu": not torch.accelerator.is_available(),
    }
    if options.compile:  # each layer by itself: one graph for each kind of layer
        os.environ["ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION"] = "true"
    given, epochs = dict(options.trainer), options.epochs or 1
    for what in ("eval", "save", "logging"):
        if epochs > 1 and given.get(f"{what}_strategy") == "epoch":  # the Trainer takes the run for one
            given |= {f"{what}_strategy": "steps", f"{what}_steps": 1 / epochs}
    try:
        arguments = kind(**{**defaults, **given, **fixed})
    except TypeError as error:
        raise ValueError(f"An argument of the Trainer is of the wrong kind: {one_line(error)}") from error
    # What TensorBoard and others are given, who publish it.
    vars(arguments)["to_dict"] = partial(dict, {**arguments.to_dict(), "output_dir": options.unfinished.name})
    return arguments


#: Field of `TrainingArguments` -> the options of `finetune` and `pretrain` that set it, where they have another name.
_OPTIONS_OF = {
    "per_device_train_batch_size": "--batch, of pretrain --micro-batch",
    "gradient_accumulation_steps": "--accumulate, of pretrain --batch-tokens",
    "max_steps": "--steps, of pretrain --tokens",
    "num_train_epochs": "--epochs, of pretrain --tokens",
    "data_seed": "--seed",
    "activation_checkpointing": "--gradient-checkpointing",
    "torch_compile": "--compile",
    "output_dir": "OUTPUT",
    "resume_from_checkpoint": "--resume",
}


def _check_argument(name: str, value: Any, fixed: Collection[str]) -> None:
    """Refuses a field of `TrainingArguments` that does not exist, has an option of its own, or would do harm."""
    options = {each.name for each in fields(FinetuneOptions)} - {"optim"}
    known = {each.name: {each.type, *get_args(each.type)} for each in fields(TrainingArguments) if each.init}
    if name in options or name in fixed:
        option = _OPTIONS_OF.get(name, f"--{name.replace('_', '-')}")
        raise ValueError(f"{name}: is set by an option of its own, {option}.")
    if name.startswith(("hub_", "push_")):
        raise ValueError(f"{name}: nothing is pushed in training; push the finished output with `resformer push`.")
    harm = {
        "label_smoothing_factor": "held-out losses and perplexities would be smoothed, too; leave it out",
        "include_num_input_tokens_seen": "tokens in metrics.json and the card would be others; leave it out",
        "dataloader_drop_last": "held-out blocks would be dropped, too; every step is a full batch without it",
    }
    if value and name in harm:
        raise ValueError(f"{name}: {harm[name]}.")
    if name not in known:
        raise ValueError(f"There is no option {name!r}.{did_you_mean(name, [*options, *known])}")
    if isinstance(value, str) and str not in known[name] and known[name] & {bool, int, float}:  # "False" would be true
        raise ValueError(f"{name} is {value!r}; expected {'true or false' if bool in known[name] else 'a number'}.")


def digest_of_weights(name: str) -> str:
    """The commit of a checkpoint on the Hub, or a digest of one on this disk."""
    if not Path(name).is_dir():
        return str(getattr(_loaded(name), "_commit_hash", None))
    return hashlib.sha256(json.dumps(weight_digests(Path(name))).encode()).hexdigest()


def _deciding(begun: Mapping[str, Any]) -> dict[str, Any]:
    """What decides the result of a run that has begun; of a step, the sequences, on however many processes."""
    others = {name: value for name, value in begun.items() if name not in (*_FREE, *_OF_A_STEP)}
    trainer = {name: value for name, value in begun["trainer"].items() if not _FREE_ARGUMENTS.fullmatch(name)}
    return {"sequences a step": math.prod(begun[name] for name in _OF_A_STEP), **others, "trainer": trainer}


def _check_unfinished(options: FinetuneOptions, now: dict[str, Any]) -> None:
    """Refuses to lose an unfinished run, or to go on with one that had begun otherwise than `now`."""
    folder = options.unfinished
    # `START` may be unfinished, too, under the name that `replacing` gives it.
    if not folder.exists() or all(START in path.name.split(".") for path in folder.iterdir()):
        return
    if options.resume:
        before, now = read_begun(folder), _deciding(now)
        if (now["steps"] or 0) > (before["steps"] or 0) and _is_constant(before):
            now.pop("steps")
        way_out = "Go on as it began, or use --force alone."
        if (step := _deciding(before)["sequences a step"]) != now["sequences a step"]:
            way_out = f"--batch, --accumulate and the number of processes must be {step}, multiplied."
        refuse_other(folder, _deciding(before), now, "run", way_out)
    elif options.force and (folder / BEGUN).is_file():
        if not options.dry_run:
            shutil.rmtree(folder)
    else:
        told = f"{folder}: holds an unfinished run; go on with --resume, or begin again with --force."
        raise CheckpointError(told, "--resume")


def _is_constant(begun: Mapping[str, Any]) -> bool:
    """Whether the rate has not begun to fall at the end of a run, which then may be longer."""
    return str(begun["trainer"].get("lr_scheduler_type")).startswith("constant")


def _last(options: FinetuneOptions, now: dict[str, Any]) -> Path | None:
    """The checkpoint to go on from: of this run, or else of the one from which it branches."""
    if options.resume and (own := last_checkpoint(options.unfinished)) is not None:
        return own
    if options.branch is None:
        return None
    folder = Path(options.branch)
    before, last = read_begun(folder), last_checkpoint(folder)
    own_ones = ("steps", "model", "output", "branch", "trainer")
    common, others = ({k: v for k, v in _deciding(each).items() if k not in own_ones} for each in (before, now))
    refuse_other(folder, common, others, "run", "A branch differs in --tokens, --schedule and --decay alone.")
    begun = 0 if last is None else int(last.name.rpartition("-")[2])
    steps = options.steps or 0  # with a cosine, the rate falls from the beginning
    falls = steps - options.trainer["lr_scheduler_kwargs"].get("num_decay_steps", 0 if _is_constant(now) else steps)
    if last is None or not _is_constant(before) or falls < begun:
        raise CheckpointError(
            f"{folder}: is at step {begun:,} of a run with --schedule {before['trainer'].get('lr_scheduler_type')}; "
            f"expected constant_with_warmup, and a rate that falls from then on: here it falls at {falls:,}."
        )
    return last


def _loaded(name: str, **options: Any) -> Any:
    """The configuration, or with options the model. Never runs, nor asks on stdin to run, a checkpoint's code."""
    try:
        config = load_config(name)
        return language_model_class(config).from_pretrained(name, config=config, **options) if options else config
    except (OSError, ValueError, ImportError, RuntimeError, SafetensorError) as error:
        no_folder = "" if Path(name).is_dir() else "local folder, and no "
        raise CheckpointError(f"{name}: is no {no_folder}checkpoint that can be loaded: {one_line(error)}") from error


def _model(name: str, dtype: torch.dtype, **kwargs: Any) -> PreTrainedModel:
    kwargs |= {"dtype": dtype, "use_safetensors": True, "output_loading_info": True, "ignore_mismatched_sizes": True}
    model, loading = _loaded(name, **kwargs)
    if problem := loading_problem(loading):  # Transformers would train what it has drawn
        raise CheckpointError(f"{name}: {problem}")
    if getattr(model, "is_quantized", False):
        raise CheckpointError(
            f"{name}: is quantised, and its weights are not trained. Train an adapter: resformer trl sft --use_peft."
        )
    return model
