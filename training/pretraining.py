"""Training from scratch: a size decides the budget, `new` makes the model, and the run is that of `finetune`."""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import compile_regions
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerBase,
    TrainerCallback,
    TrainingArguments,
)

from resformer.environment import free_memory, peak_memory, usable_device
from resformer.errors import CheckpointError
from resformer.training.flops import meta_model, training_flops
from resformer.training.log import TrainingLog, last_checkpoint
from resformer.training.optimizer import MuonAndAdamW, connection_learning_rate
from resformer.training.options import BEGUN, FinetuneOptions, PretrainOptions, RunOptions, read_begun, unfinished_of
from resformer.training.recipe import START, finetune_checkpoint, uses_bf16
from resformer.training.report import FinetuneReport
from resformer.training.sizes import budget, replicas, schedule_arguments
from resformer.training.untrained import untrained, write_untrained

_PASS = 16_384  # tokens that a device takes at a time, unless more is said
_TIMED = 20.0  # seconds for the speed of a plan


@dataclass(frozen=True, kw_only=True)
class _Run(FinetuneOptions):
    """With what the model was made of, so that no other one is gone on with."""

    size: str
    method: str
    backbone: str | None
    fields: dict[str, Any]
    new_tokenizer: str | None
    warmup: float


@dataclass(frozen=True)
class PretrainPlan:
    """What a training from scratch will do."""

    parameters: int
    tokens: int  # trained on, whole steps
    steps: int
    block: int
    sequences: int  # a step, on all devices
    micro_batch: int  # sequences a device takes at a time
    accumulate: int  # passes a step
    learning_rate: float
    connection_learning_rate: float | None
    flops: float  # of the whole training
    bytes: int  # of the tokens as int32
    estimated_memory: int  # bytes on a device
    free_memory: int  # bytes on this one
    tokens_per_second: float | None = None  # of all devices, measured on this one
    hours: float | None = None
    memory: int | None = None  # bytes, the most on this device, which has the whole model


def pretrain(
    options: PretrainOptions, *, callbacks: Sequence[TrainerCallback] = ()
) -> tuple[PretrainPlan, FinetuneReport]:
    """Trains a model from scratch; under torchrun or `accelerate launch` every process calls it."""
    options = _as_begun(options)
    config, tokenizer = _model(options)
    plan = pretrain_plan(options, config)
    run = _run(options, plan)
    start = replace(options, output=run.model, force=True)

    def begin() -> None:
        if not (options.resume and (Path(run.model) / "config.json").is_file()):
            write_untrained(start, config, tokenizer)

    log = TrainingLog(run.unfinished, plan.flops / plan.tokens)
    return plan, finetune_checkpoint(run, begin=begin, callbacks=[log, *callbacks], command="pretrain")


def plan_pretraining(options: PretrainOptions) -> PretrainPlan:
    """The plan, with the speed of a model of this shape if it fits here; reads data for a tokenizer alone."""
    options = _as_begun(options)
    config, _ = _model(options)
    plan = pretrain_plan(options, config)
    if plan.estimated_memory > plan.free_memory:
        return plan
    speed, memory = _measured(options, plan, config)
    speed *= _devices()
    return replace(plan, tokens_per_second=speed, hours=plan.tokens / speed / 3600, memory=memory)


def _devices() -> int:
    return TrainingArguments(output_dir="", use_cpu=not torch.accelerator.is_available(), report_to="none").world_size


def _before(options: PretrainOptions) -> Path | None:
    """The folder of the run that is gone on with, or that is branched from."""
    own = unfinished_of(options.output)
    if options.resume and (own / START / "config.json").is_file():
        return own
    return None if options.start is None else unfinished_of(options.start)


def _as_begun(options: PretrainOptions) -> PretrainOptions:
    """The options, with what follows from the size or the tokens as it was in the run before."""
    folder = _before(options)
    if folder is None or not (options.start or (folder / BEGUN).is_file()):
        return options
    if not folder.exists():
        raise CheckpointError(f"{options.start}: no run is kept to go on from: expected its folder {folder}.")
    begun = read_begun(folder)
    step = begun["batch"] * begun["accumulate"] * begun["processes"] * begun["block"]
    follows = {
        "tokens": step * begun["steps"],
        "batch_tokens": step,
        "micro_batch": begun["batch"],
        "block": begun["block"],
        "learning_rate": begun["learning_rate"],
        "connection_learning_rate": begun["connection_learning_rate"],
    }
    given: dict[str, Any] = {name: getattr(options, name) or value for name, value in follows.items()}
    if options.warmup == begun["warmup"]:
        given["trainer"] = {"warmup_steps": begun["warmup_steps"], **options.trainer}
    if folder != unfinished_of(options.output) and options.tokens is None:  # the rate falls from where it is
        last = last_checkpoint(folder)
        steps = begun["steps"] if last is None else int(last.name.rpartition("-")[2])
        given["tokens"] = step * int(steps / (1 - options.decay))
    return replace(options, **given)


def _model(options: PretrainOptions) -> tuple[Any, PreTrainedTokenizerBase]:
    """The configuration and the tokenizer: those of the run before, or new ones."""
    folder = _before(options)
    if folder is not None and (folder / START).is_dir():
        return AutoConfig.from_pretrained(folder / START), AutoTokenizer.from_pretrained(folder / START)
    return untrained(options, options.held_out)


def pretrain_plan(options: PretrainOptions, config: Any) -> PretrainPlan:
    """The plan for a model of this configuration, without its speed and memory."""
    block = config.max_position_embeddings
    model, flops = meta_model(config), training_flops(config, block)
    parameters = int(model.num_parameters())
    tokens, batch_tokens, rate = budget(parameters, flops, options.tokens)
    devices = _devices()
    replicas(options.shard, devices)  # refused before data is read
    if options.batch_tokens is None:  # a power of two is divided by most numbers of devices
        each = max(1, round(2 ** round(math.log2(max(1, batch_tokens / block))) / devices))
    else:
        each, rest = divmod(options.batch_tokens, block * devices)
        if rest or not each:
            expected = f"{block * devices:,}: {devices} device{'s' * (devices > 1)}, sequences of {block:,} tokens"
            raise ValueError(f"batch_tokens is {options.batch_tokens:,}; expected a multiple of {expected}.")
    micro = options.micro_batch or max(
        n for n in range(1, each + 1) if each % n == 0 and n * block <= max(block, _PASS)
    )
    if each % micro:
        raise ValueError(f"micro_batch is {micro}; expected a divisor of the {each} sequences of a device.")
    steps = math.ceil(tokens / (each * devices * block))
    rate = options.learning_rate or rate
    tokens = steps * each * devices * block
    return PretrainPlan(
        parameters=parameters,
        tokens=tokens,
        steps=steps,
        block=block,
        sequences=each * devices,
        micro_batch=micro,
        accumulate=each // micro,
        learning_rate=rate,
        connection_learning_rate=options.connection_learning_rate or connection_learning_rate(model, rate),
        flops=flops * tokens,
        bytes=4 * tokens,
        estimated_memory=_estimated_memory(options, config, parameters, micro * block),
        free_memory=torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else free_memory(),
    )


def _estimated_memory(options: PretrainOptions, config: Any, parameters: int, tokens: int) -> int:
    """Bytes on a device: weights, gradients and moments, and the activations of a pass."""
    size = 3 if uses_bf16(options.bf16) else 4  # of a number that autocast has in bfloat16, its float32 input beside it
    layer = tokens * (20 * config.hidden_size + 6 * config.intermediate_size) * size
    layers = config.num_hidden_layers * layer
    if options.gradient_checkpointing:
        layers = layer + config.num_hidden_layers * tokens * config.hidden_size * 4
    return round(16 * parameters / options.shard + layers + 12 * tokens * config.vocab_size)


def _run(options: PretrainOptions, plan: PretrainPlan) -> _Run:
    interval = math.ceil(plan.steps / options.evaluations)
    shared = {each.name: getattr(options, each.name) for each in fields(RunOptions)}
    return _Run(
        size=options.size,
        method=options.method,
        backbone=options.backbone,
        fields=options.fields,
        warmup=options.warmup,
        branch=None if options.start is None else str(unfinished_of(options.start)),
        new_tokenizer=options.tokenizer,
        model=str(Path(f"{options.output}.training", START)),
        output=options.output,
        **shared,
        steps=plan.steps,
        block=plan.block,
        batch=plan.micro_batch,
        accumulate=plan.accumulate,
        learning_rate=plan.learning_rate,
        connection_learning_rate=plan.connection_learning_rate or plan.learning_rate,
        trainer={
            **schedule_arguments(options.schedule, plan.steps, options.warmup, options.decay),
            "weight_decay": options.weight_decay,
            "ddp_find_unused_parameters": False,
            "eval_steps": interval,
            "save_steps": interval,
            "logging_steps": max(1, min(10, plan.steps // 10)),
            **options.trainer,
        },
    )


def _measured(options: PretrainOptions, plan: PretrainPlan, config: Any) -> tuple[float, int]:
    """Tokens a second on this device, and the most bytes; the first pass and the first step are not timed."""
    device = torch.device(usable_device(None))
    with device:
        model = AutoModelForCausalLM.from_config(config).train()
        ids = torch.randint(config.vocab_size, (plan.micro_batch, plan.block))
        positions = torch.arange(plan.block).remainder(-(-plan.block // 2)).expand_as(ids)  # two documents in each
    if options.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    run = compile_regions(model) if options.compile else model
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters())
    if options.optim == "muon":
        optimizer = MuonAndAdamW(model.parameters())
        optimizer.set_learning_rate(model, plan.learning_rate)

    def one_pass() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=uses_bf16(options.bf16)):
            loss = run(input_ids=ids, labels=ids, position_ids=positions, use_cache=False).loss
        loss.backward()

    def seconds(work: Callable[[], Any]) -> float:
        begin = time.perf_counter()
        work()
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        return time.perf_counter() - begin

    one_pass()
    optimizer.step()
    step, times = seconds(optimizer.step), [seconds(one_pass), seconds(one_pass)]
    while sum(times) < _TIMED and len(times) < 20:
        times.append(seconds(one_pass))
    return ids.numel() / (statistics.fmean(times) + step / plan.accumulate), peak_memory()
