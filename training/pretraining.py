"""Training from scratch: a size decides the budget, `new` makes the model, and the run is that of `finetune`."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import compile_regions
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase, TrainerCallback, TrainingArguments

from resformer.configuration import ResFormerConfig
from resformer.environment import peak_memory, usable_device
from resformer.evaluation import check_tasks
from resformer.modeling import ResFormerForCausalLM
from resformer.training.flops import training_flops
from resformer.training.log import TrainingLog
from resformer.training.options import FinetuneOptions, PretrainOptions, RunOptions
from resformer.training.parallel import data_parallel, passes
from resformer.training.recipe import START, finetune_checkpoint, uses_bf16
from resformer.training.report import FinetuneReport
from resformer.training.sizes import budget, schedule_arguments
from resformer.training.untrained import parameter_count, untrained, write_untrained

_PASS = 16_384  # tokens that a device takes at a time, unless more is said
_TIMED = 20.0  # seconds for the speed of a plan


@dataclass(frozen=True, kw_only=True)
class _Run(FinetuneOptions):
    """With what the model was made of, so that no other one is gone on with."""

    size: str
    method: str
    fields: dict[str, Any]
    new_tokenizer: str | None


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
    flops: float  # of the whole training
    bytes: int  # of the tokens as int32
    tokens_per_second: float | None = None  # of all devices, measured on this one
    hours: float | None = None
    memory: int | None = None  # bytes, the most on this device, which has the whole model


def pretrain(
    options: PretrainOptions, *, callbacks: Sequence[TrainerCallback] = ()
) -> tuple[PretrainPlan, FinetuneReport]:
    """Trains a model from scratch; under torchrun or `accelerate launch` every process calls it."""
    if options.tasks:
        check_tasks(options.tasks)  # before a tokenizer is made of the data
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
    """The plan, with the speed of a model of this shape here; writes nothing and reads data for a tokenizer alone."""
    config, _ = _model(options)
    plan = pretrain_plan(options, config)
    speed, memory = _measured(options, plan, config)
    speed *= data_parallel(options, _devices())
    return replace(plan, tokens_per_second=speed, hours=plan.tokens / speed / 3600, memory=memory)


def _devices() -> int:
    return TrainingArguments(output_dir="", use_cpu=not torch.accelerator.is_available(), report_to="none").world_size


def _model(options: PretrainOptions) -> tuple[ResFormerConfig, PreTrainedTokenizerBase]:
    """The configuration and the tokenizer: those that an unfinished run has begun with, or new ones."""
    start = Path(f"{options.output}.training", START)
    if options.resume and (start / "config.json").is_file():
        return AutoConfig.from_pretrained(start), AutoTokenizer.from_pretrained(start)
    return untrained(options, options.held_out)


def pretrain_plan(options: PretrainOptions, config: ResFormerConfig) -> PretrainPlan:
    """The plan for a model of this configuration, without its speed and memory."""
    block = config.max_position_embeddings
    parameters, flops = parameter_count(config), training_flops(config, block)
    tokens, batch_tokens, rate = budget(parameters, flops, options.tokens)
    devices = data_parallel(options, _devices())
    if options.batch_tokens is None:  # a power of two is divided by most numbers of devices
        each = max(1, round(2 ** round(math.log2(max(1, batch_tokens / block))) / devices))
    else:
        each, rest = divmod(options.batch_tokens, block * devices)
        if rest or not each:
            raise ValueError(
                f"batch_tokens is {options.batch_tokens:,}; expected a multiple of {block * devices:,}: {devices} "
                f"device{'s' * (devices > 1)}, sequences of {block:,} tokens."
            )
    micro = options.micro_batch or max(
        n for n in range(1, each + 1) if each % n == 0 and n * block <= max(block, _PASS)
    )
    steps = math.ceil(tokens / (each * devices * block))
    tokens = steps * each * devices * block
    return PretrainPlan(
        parameters=parameters,
        tokens=tokens,
        steps=steps,
        block=block,
        sequences=each * devices,
        micro_batch=micro,
        accumulate=passes(each, micro),
        learning_rate=options.learning_rate or rate,
        flops=flops * tokens,
        bytes=4 * tokens,
    )


def _run(options: PretrainOptions, plan: PretrainPlan) -> _Run:
    interval = math.ceil(plan.steps / options.evaluations)
    shared = {each.name: getattr(options, each.name) for each in fields(RunOptions)}
    return _Run(
        size=options.size,
        method=options.method,
        fields=options.fields,
        new_tokenizer=options.tokenizer,
        model=str(Path(f"{options.output}.training", START)),
        output=options.output,
        **shared,
        steps=plan.steps,
        block=plan.block,
        batch=plan.micro_batch,
        accumulate=plan.accumulate,
        learning_rate=plan.learning_rate,
        connection_learning_rate=options.connection_learning_rate or plan.learning_rate,
        trainer={
            **schedule_arguments(options.schedule, plan.steps, options.warmup, options.decay),
            "weight_decay": options.weight_decay,
            "eval_steps": interval,
            "save_steps": interval,
            "logging_steps": max(1, min(10, plan.steps // 10)),
        },
    )


def _measured(options: PretrainOptions, plan: PretrainPlan, config: ResFormerConfig) -> tuple[float, int]:
    """Tokens a second on this device, and the most bytes; the first pass is not timed, and has the optimizer's step."""
    device = torch.device(usable_device(None))
    with device:
        model = ResFormerForCausalLM(config).train()
        ids = torch.randint(config.vocab_size, (plan.micro_batch, plan.block))
    if options.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    run = compile_regions(model) if options.compile else model
    times: list[float] = []
    while len(times) < 3 or (sum(times) < _TIMED and len(times) < 20):
        begin = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16, enabled=uses_bf16(options.bf16)):
            loss = run(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        if not times:
            torch.optim.AdamW(model.parameters()).step()
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        times.append(time.perf_counter() - begin)
    return ids.numel() * (len(times) - 1) / sum(times[1:]), peak_memory()
