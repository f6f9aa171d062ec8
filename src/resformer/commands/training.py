"""`resformer finetune`."""

import json
import os
from dataclasses import asdict, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from resformer.commands.terminal import AsJson, app, echo, from_file, row, size, takes
from resformer.training.options import FinetuneOptions


def _from_file(context: typer.Context, path: Path | None) -> Path | None:
    """Fields of `TrainingArguments` go to --set."""
    if path is None:
        return None
    from transformers import TrainingArguments

    return from_file(context, path, {each.name for each in fields(TrainingArguments) if each.init})


@app.command()
@takes(FinetuneOptions, "Go on from the last checkpoint with: {command} --resume")
def finetune(
    options: FinetuneOptions,
    config: Annotated[
        Path | None,
        typer.Option(callback=_from_file, is_eager=True, help="YAML file of these options; the command line wins."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Fine-tune a checkpoint with the stock Trainer: a trained checkpoint, metrics.json and a card.

    All weights are trained, in float32: 16 bytes a parameter with AdamW, and
    activations. For adapters (LoRA), 4-bit weights, preferences and rewards, and
    for models that do not fit, take `python -m resformer.trl`.
    """
    from resformer.files import check_apart
    from resformer.training.recipe import finetune_checkpoint

    if config is not None:
        check_apart(Path(options.output), config)
    report = finetune_checkpoint(options)
    if os.environ.get("RANK", "0") != "0":  # of the processes that torchrun or accelerate has started
        return
    if as_json:
        echo(json.dumps(asdict(report), indent=2, sort_keys=True, default=str))
        return
    training = "a stream" if report.training_blocks is None else f"{report.training_blocks:,} blocks"
    trained = "" if options.train == "all" else f", {report.trained_parameters:,} of them trained"
    row("model", f"{options.model}, {report.parameters:,} parameters{trained}")
    row("data", f"{training}, {report.held_out_blocks:,} held out, of {report.block:,} tokens")
    for source, count in report.held_out_by_source.items() if report.held_out_blocks else ():
        row("held out", f"{count:,} documents of {source}")
    for note in report.notes:
        row("data", note)
    if options.dry_run:
        row("memory", f"{size(report.peak_memory or 0)}, the most in one step")
        row("would write", options.output)
        return
    print_result(report, options.output)


def print_result(report: Any, output: str) -> None:
    """The last lines of `finetune` and `pretrain`, of a `FinetuneReport`."""
    resumed = f", resumed from step {report.resumed_from:,}" if report.resumed_from else ""
    row("trained", f"{report.steps:,} steps, {report.tokens:,} tokens{resumed}")
    row("speed", f"{report.tokens_per_second:,.0f} tokens/s, {report.seconds:,.1f} s, {size(report.peak_memory or 0)}")
    if report.loss_before is not None:
        row("loss", f"{report.loss_before:.4f} -> {report.loss_after:.4f} on the held-out blocks")
        row("perplexity", f"{report.perplexity_before:.3f} -> {report.perplexity_after:.3f}")
    row("wrote", output)
    if report.url is not None:
        row("pushed", report.url)
