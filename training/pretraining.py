"""Training from scratch: a size decides the budget, `new` makes the model, and the run is that of `finetune`."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase, TrainerCallback, TrainingArguments

from resformer.configuration.connection_fields import ConnectionFields
from resformer.configuration.methods import method_of
from resformer.convert.connected_families import with_connections
from resformer.convert.connections import meta_model
from resformer.errors import CheckpointError
from resformer.training.flops import active_parameters, training_flops
from resformer.training.optimizer import COEFFICIENTS, EMBEDDINGS, GATES, TABLES, scratch_rates
from resformer.training.options import (
    BEGUN,
    KIND_RATES,
    FinetuneOptions,
    PretrainOptions,
    read_begun,
    shared,
    unfinished_of,
)
from resformer.training.recipe import START, finetune_checkpoint
from resformer.training.report import FinetuneReport
from resformer.training.trainer import RecipeTrainer, TrainingLog, last_checkpoint
from resformer.training.untrained import budget, schedule_arguments, untrained, write_untrained

_PASS = 16_384  # tokens that a device takes at a time, unless more is said


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
    plain_parameters: int  # of the plain decoder, those that a token passes: what the budget follows from
    tokens: int  # trained on, whole steps
    steps: int
    block: int
    sequences: int  # a step, on all devices
    micro_batch: int  # sequences a device takes at a time
    accumulate: int  # passes a step
    learning_rate: float
    rates: dict[str, float]  # of each kind of connections' parameters
    flops: float  # of the whole training
    bytes: int  # of the tokens as int32


def pretrain(
    options: PretrainOptions,
    *,
    callbacks: Sequence[TrainerCallback] = (),
    finish: Callable[[RecipeTrainer], None] | None = None,
) -> tuple[PretrainPlan, FinetuneReport]:
    """Trains a model from scratch; under torchrun or `accelerate launch` every process calls it."""
    options, config, tokenizer = _begun(options)
    plan = pretrain_plan(options, config)
    run = _run(options, plan)
    start = replace(options, output=run.model, force=True)

    def begin() -> None:
        if not (options.resume and (Path(run.model) / "config.json").is_file()):
            write_untrained(start, config, tokenizer)

    log = TrainingLog(run.unfinished, plan.flops / plan.tokens)
    report = finetune_checkpoint(run, begin=begin, finish=finish, callbacks=[log, *callbacks], command="pretrain")
    return plan, report


def plan_pretraining(options: PretrainOptions) -> PretrainPlan:
    """The plan; reads data for a tokenizer alone. How fast it is, the log says after ten steps."""
    options, config, _ = _begun(options)
    plan = pretrain_plan(options, config)
    schedule_arguments(options, plan.steps)  # raises for one that does not fit
    return plan


def _devices() -> int:
    return TrainingArguments(output_dir="", use_cpu=not torch.accelerator.is_available(), report_to="none").world_size


def _begun(options: PretrainOptions) -> tuple[PretrainOptions, Any, PreTrainedTokenizerBase]:
    """The options, the configuration and the tokenizer; what follows from the size or the tokens as in a run before.

    That is the one that is gone on with, or that is branched from.
    """
    own = unfinished_of(options.output)
    folder = None if options.start is None else unfinished_of(options.start)
    if options.resume and (own / START / "config.json").is_file():
        folder = own
    if folder is None:
        return options, *untrained(options, options.held_out)
    if not (folder / START).is_dir():
        raise CheckpointError(f"{options.start}: no run is kept to go on from: expected its folder {folder}.")
    model = AutoConfig.from_pretrained(folder / START), AutoTokenizer.from_pretrained(folder / START)
    if options.start is None and not (folder / BEGUN).is_file():
        return options, *model
    begun = read_begun(folder)
    step = begun["batch"] * begun["accumulate"] * begun["processes"] * begun["block"]
    follows = {
        "tokens": step * begun["steps"],
        "batch_tokens": step,
        "micro_batch": begun["batch"] if begun["processes"] == _devices() else None,
        "block": begun["block"],
        "learning_rate": begun["learning_rate"],
        "connection_learning_rate": begun["rates"][COEFFICIENTS],
    }
    given: dict[str, Any] = {name: getattr(options, name) or value for name, value in follows.items()}
    if options.warmup == begun["warmup"]:
        given["trainer"] = {"warmup_steps": begun["warmup_steps"], **options.trainer}
    if folder != own and options.tokens is None:  # the rate falls from where it is
        last = last_checkpoint(folder)
        steps = begun["steps"] if last is None else int(last.name.rpartition("-")[2])
        given["tokens"] = step * int(steps / (1 - options.decay))
    return replace(options, **given), *model


def pretrain_plan(options: PretrainOptions, config: Any) -> PretrainPlan:
    """The plan for a model of this configuration. Tokens, batch and rate are those of the size, for all methods."""
    plain = with_connections(config) if isinstance(config, ConnectionFields) else config
    block = config.max_position_embeddings
    active, flops = active_parameters(plain), training_flops(config, block)
    tokens, batch_tokens, rate = budget(active, training_flops(plain, block), options.tokens)
    devices = _devices()
    # A power of two is divided by most numbers of devices.
    each, rest = divmod(options.batch_tokens or block * 2 ** max(0, round(math.log2(batch_tokens / block))), block)
    if rest or not each:
        raise ValueError(f"batch_tokens is {options.batch_tokens:,}; expected a multiple of {block:,}, a sequence.")
    if each % devices:
        near = [block * devices * max(1, each // devices + more) for more in (0, 1)]
        told = f"A step has {each:,} sequences of {block:,} tokens, which {devices} devices do not divide"
        raise ValueError(f"{told}; use --batch-tokens {near[0]} or {near[1]}.")
    of_device = each // devices
    fitting = [n for n in range(1, of_device + 1) if of_device % n == 0]
    micro = options.micro_batch or max(n for n in fitting if n == 1 or n * block <= _PASS)
    if micro not in fitting:
        raise ValueError(f"micro_batch is {micro}; expected a divisor of the {of_device} sequences of a device.")
    steps = math.ceil(tokens / (each * block))
    tokens, rate = steps * each * block, options.learning_rate or rate
    rates = scratch_rates(rate, method_of(config), options.connection_learning_rate)
    given = zip((GATES, TABLES, EMBEDDINGS), (getattr(options, name) for name in KIND_RATES), strict=True)
    rates |= {kind: own for kind, own in given if own is not None}
    return PretrainPlan(
        parameters=meta_model(config).num_parameters(),
        plain_parameters=active,
        tokens=tokens,
        steps=steps,
        block=block,
        sequences=each,
        micro_batch=micro,
        accumulate=of_device // micro,
        learning_rate=rate,
        rates=rates,
        flops=flops * tokens,
        bytes=4 * tokens,
    )


def _run(options: PretrainOptions, plan: PretrainPlan) -> _Run:
    given = {
        "branch": None if options.start is None else str(unfinished_of(options.start)),
        "tokenizer": None,
        "new_tokenizer": options.tokenizer,
        "model": str(Path(f"{options.output}.training", START)),
        "batch": plan.micro_batch,
        "connection_learning_rate": plan.rates[COEFFICIENTS],
        "trainer": {
            **schedule_arguments(options, plan.steps),
            "ddp_find_unused_parameters": False,
            "logging_steps": max(1, min(10, plan.steps // 10)),
            **options.trainer,
        },
    }
    return _Run(**shared(options, _Run) | shared(plan, _Run) | given)
