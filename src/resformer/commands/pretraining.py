"""`resformer new` and `tokenize`."""

import json
from typing import Annotated

import typer

from resformer.commands.conversion import DryRun
from resformer.commands.terminal import AsJson, app, echo, reporting_errors, row, size, takes
from resformer.training.options import NewOptions, TokenizeOptions

__all__ = ["new", "tokenize", "train"]


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


@app.command(hidden=True, context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
def train() -> None:
    """What other packages call `train` has three names here."""
    with reporting_errors():
        raise ValueError(
            "There is no `resformer train`: `resformer pretrain` trains from scratch, `resformer finetune` a "
            "checkpoint, `resformer compare` several methods under one budget."
        )
