"""`resformer new`."""

import json
from typing import Annotated

import typer

from resformer.commands.conversion import DryRun
from resformer.commands.terminal import AsJson, app, echo, reporting_errors, row, takes
from resformer.training.options import NewOptions

__all__ = ["new", "train"]


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


@app.command(hidden=True, context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
def train() -> None:
    """What other packages call `train` has three names here."""
    with reporting_errors():
        raise ValueError(
            "There is no `resformer train`: `resformer pretrain` trains from scratch, `resformer finetune` a "
            "checkpoint, `resformer compare` several methods under one budget."
        )
