"""`resformer new`, `tokenize` and `pretrain`."""

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from resformer.commands.conversion import DryRun
from resformer.commands.terminal import AsJson, app, echo, from_file, reporting_errors, row, size, takes
from resformer.commands.training import print_result
from resformer.training.options import NewOptions, PretrainOptions, TokenizeOptions


@app.command()
@takes(NewOptions)
def new(
    options: NewOptions,
    weights: Annotated[bool, typer.Option("--weights/--no-weights", help="Whether to write random weights.")] = True,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Write an untrained checkpoint, from which any engine trains: configuration, tokenizer, random weights."""
    from resformer.training.untrained import new_checkpoint, parameter_count

    config = new_checkpoint(options, weights=weights, dry_run=dry_run)
    if as_json:
        echo(json.dumps({**config.to_dict(), "parameters": parameter_count(config)}, indent=2, sort_keys=True))
        return
    row("model", f"{options.size}, {options.method}, {parameter_count(config):,} parameters")
    row("shape", f"{config.num_hidden_layers} layers, {config.num_attention_heads} heads, width {config.hidden_size}")
    row("tokenizer", f"{config.vocab_size:,} tokens")
    row("would write" if dry_run else "wrote", options.output)


@app.command()
@takes(TokenizeOptions, "Give the command again to go on.")
def tokenize(options: TokenizeOptions, as_json: AsJson = False) -> None:
    """Write documents as parquet files of token ids, which `pretrain` and `finetune` read as --data.

    A run that was stopped goes on when the command is given again.
    """
    from resformer.training.tokenizing import tokenize as run

    index = run(options)
    if index is None:
        row("wrote", f"part {options.shard} of {options.output}; other parts are not done")
    elif as_json:
        echo(json.dumps(index, indent=2))
    else:
        for side in ("train", "validation"):
            sums = index[side]
            row(side, f"{sums['tokens']:,} tokens of {sums['documents']:,} documents, {size(sums['bytes'])}")
        row("wrote", options.output)


def _from_file(context: typer.Context, path: Path | None) -> Path | None:
    return None if path is None else from_file(context, path)


@app.command()
@takes(PretrainOptions, "Go on from the last checkpoint with: {command} --resume")
def pretrain(
    options: PretrainOptions,
    config: Annotated[
        Path | None,
        typer.Option(callback=_from_file, is_eager=True, help="YAML file of these options; the command line wins."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan, with a speed that is measured here; write nothing.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Train a model from scratch: the size decides shape, tokens, batch and learning rate.

    All of it can be set. Writes what `finetune` writes, and log.json.
    """
    from resformer.training.pretraining import plan_pretraining
    from resformer.training.pretraining import pretrain as run

    first = os.environ.get("RANK", "0") == "0"  # of the processes that torchrun or accelerate has started
    if dry_run:
        plan, report = plan_pretraining(options), None
    else:
        plan, report = run(options)
    if not first:
        return
    if as_json:
        facts = {"plan": asdict(plan), **({} if report is None else asdict(report))}
        echo(json.dumps(facts, indent=2, default=str))
        return
    row("model", f"{options.size}, {options.method}, {plan.parameters:,} parameters")
    row("tokens", f"{plan.tokens:,}, {plan.tokens / plan.parameters:,.1f} a parameter, {size(plan.bytes)} of ids")
    passes = f", in {plan.accumulate} passes" if plan.accumulate > 1 else ""
    row("steps", f"{plan.steps:,} of {plan.sequences:,} sequences of {plan.block:,} tokens{passes}")
    row("rate", f"{plan.learning_rate:.2g}, {options.schedule}")
    row("operations", f"{plan.flops:.3g}")
    if report is None:
        row("speed", f"{plan.tokens_per_second:,.0f} tokens/s: {plan.hours:,.1f} hours")
        row("memory", f"{size(plan.memory or 0)} on this device, with the whole model")
        row("would write", options.output)
        return
    print_result(report, options.output)


@app.command(hidden=True, context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
def train() -> None:
    """What other packages call `train` has three names here."""
    with reporting_errors():
        raise ValueError(
            "There is no `resformer train`: `resformer pretrain` trains from scratch, `resformer finetune` a "
            "checkpoint, `resformer compare` several methods under one budget."
        )
