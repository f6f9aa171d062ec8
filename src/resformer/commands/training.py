"""`resformer finetune`."""

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from resformer.commands.terminal import (
    INTERRUPTED,
    AsJson,
    app,
    assignments,
    echo,
    json_or_text,
    own_command,
    reporting_errors,
    row,
    size,
)

__all__ = ["finetune"]


def _read_file(path: Path) -> dict[str, Any]:
    import yaml

    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path}: expected lines of `name: value`.")
    return {name: json_or_text(value) for name, value in values.items()}


@app.command()
def finetune(
    model: Annotated[str | None, typer.Argument(help="A checkpoint folder or a Hub id.")] = None,
    output: Annotated[str | None, typer.Argument(help="The folder to write; new or empty.")] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            help="Text, JSON, CSV, parquet file; folder; Hub id[:configuration]; standard-library; repeatable, with "
            "weights as in a:0.7. Columns: text, messages, or prompt and completion."
        ),
    ] = None,
    split: Annotated[str | None, typer.Option(help="Split of a Hub dataset.  [default: train]")] = None,
    text_column: Annotated[str | None, typer.Option(help="Column that holds the text.  [default: text]")] = None,
    sample_by: Annotated[
        str | None,
        typer.Option(
            help="A document in a text file: the whole file (document), a paragraph, or a line.  [default: document]"
        ),
    ] = None,
    streaming: Annotated[
        bool | None, typer.Option("--streaming", help="Read as it trains, never all; needs --steps.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps.")] = None,
    epochs: Annotated[float | None, typer.Option(help="Passes over the data.  [default: 1]")] = None,
    block: Annotated[
        int | None, typer.Option(help="Tokens per sequence.  [default: 1024, or all of the model's positions]")
    ] = None,
    separate_documents: Annotated[
        bool | None,
        typer.Option(
            "--separate-documents/--join-documents",
            help="Whether documents that are packed into a sequence are hidden from each other.  [default: separate]",
        ),
    ] = None,
    batch: Annotated[int | None, typer.Option(help="Sequences per device and pass.  [default: 8]")] = None,
    accumulate: Annotated[int | None, typer.Option(help="Passes per step.  [default: 1]")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="Of the backbone.  [default: 5e-5]")] = None,
    connection_learning_rate: Annotated[
        float | None, typer.Option(help="Of the cross-layer connections.  [default: 3e-4]")
    ] = None,
    held_out: Annotated[
        float | None, typer.Option(help="Share of the documents to evaluate on; 0: none.  [default: 0.02]")
    ] = None,
    held_out_blocks: Annotated[
        int | None, typer.Option(help="Evaluate on at most this many blocks.  [default: 256]")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of the order of the data and of dropout.  [default: 0]")] = None,
    distill: Annotated[
        str | None, typer.Option(help="Learn from the logits of this checkpoint too, MODEL's source for one.")
    ] = None,
    distill_weight: Annotated[
        float | None, typer.Option(help="Weight of the teacher's loss, 0 to 1.  [default: 0.5]")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(help="Of the teacher's and the model's softmax.  [default: 1.0]")
    ] = None,
    distill_hidden: Annotated[
        float | None, typer.Option(help="Weight of the teacher's hidden states.  [default: 0]")
    ] = None,
    distill_hidden_layers: Annotated[
        list[int] | None,
        typer.Option(help="Which of Transformers' hidden_states; repeatable.  [default: -2, the last layer's input]"),
    ] = None,
    train: Annotated[
        str | None,
        typer.Option(
            help="all parameters; sharing: projections and norms that sharing touched, and connections; connections "
            "alone.  [default: all]"
        ),
    ] = None,
    bf16: Annotated[
        bool | None, typer.Option("--bf16/--no-bf16", help="Autocast.  [default: where the processor has bfloat16]")
    ] = None,
    gradient_checkpointing: Annotated[
        bool | None, typer.Option("--gradient-checkpointing", help="Less memory, more time.")
    ] = None,
    compile_: Annotated[bool | None, typer.Option("--compile", help="Use torch.compile.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Of the weights in training.  [default: float32]")] = None,
    save_dtype: Annotated[str | None, typer.Option(help="Of the weights as saved.  [default: --dtype]")] = None,
    attn_implementation: Annotated[
        str | None, typer.Option(help="sdpa, eager, flash_attention_2, flex_attention.  [default: sdpa]")
    ] = None,
    optim: Annotated[
        str | None, typer.Option(help="An optimizer of Transformers, such as adamw_8bit.  [default: adamw_torch_fused]")
    ] = None,
    report_to: Annotated[
        list[str] | None, typer.Option(help="tensorboard, trackio, wandb; repeatable.  [default: none]")
    ] = None,
    tokenizer: Annotated[str | None, typer.Option(help="Checkpoint with the tokenizer.  [default: MODEL]")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Any field of Transformers' TrainingArguments; repeatable."),
    ] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file of these options; the command line wins.")] = None,
    push: Annotated[str | None, typer.Option(metavar="REPO", help="Push the finished OUTPUT to this Hub id.")] = None,
    resume: Annotated[bool | None, typer.Option("--resume", help="Go on with a run that was stopped.")] = None,
    force: Annotated[
        bool | None, typer.Option("--force", help="Replace an earlier result, and discard an unfinished run.")
    ] = None,
    dry_run: Annotated[
        bool | None, typer.Option("--dry-run", help="Pack the data and predict the memory; train and write nothing.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Fine-tune a checkpoint with the stock Trainer: a trained checkpoint, metrics.json and a card.

    All weights are trained, in float32: 16 bytes a parameter with AdamW, and
    activations. For adapters (LoRA), 4-bit weights, preferences and rewards, and
    for models that do not fit, take `python -m resformer.trl`.
    """
    given = {name.rstrip("_"): value for name, value in locals().items() if value is not None}
    for name in ("set", "config", "as_json"):
        given.pop(name, None)
    with reporting_errors("Nothing was written; run the command again."):
        first = os.environ.get("RANK", "0") == "0"  # of the processes that torchrun or accelerate has started
        from resformer.files import check_apart
        from resformer.training.recipe import FinetuneOptions, finetune_checkpoint

        from_file = _read_file(config) if config is not None else {}
        options = FinetuneOptions.from_mapping({**from_file, **assignments(set_ or []), **given})
        if config is not None:
            check_apart(Path(options.output), config)
        try:
            report = finetune_checkpoint(options)
        except KeyboardInterrupt:
            if first and options.unfinished.exists():
                more = [] if options.resume else ["--resume"]
                echo(f"Interrupted. Go on from the last checkpoint with: {own_command(*more)}", err=True)
                raise typer.Exit(INTERRUPTED) from None
            raise
        if not first:
            return
        if as_json:
            echo(json.dumps(report.as_dict(), indent=2, sort_keys=True, default=str))
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
            memory = report.predicted_memory or {}
            parts = [f"{part} {size(memory[part])}" for part in ("weights", "gradients", "optimizer", "activations")]
            if memory["process"]:
                parts.append(f"this process {size(memory['process'])}")
            row("memory", f"{size(memory['peak'])} predicted: {', '.join(parts)}")
            if not options.gradient_checkpointing:
                row("memory", f"{size(memory['peak_with_gradient_checkpointing'])} with --gradient-checkpointing")
            row("would write", options.output)
            return
        resumed = f", resumed from step {report.resumed_from:,}" if report.resumed_from else ""
        row("trained", f"{report.steps:,} steps, {report.tokens:,} tokens{resumed}")
        row(
            "speed",
            f"{report.tokens_per_second:,.0f} tokens/s, {report.seconds:,.1f} s, {size(report.peak_memory or 0)}",
        )
        if report.held_out_blocks:
            row("loss", f"{report.loss_before:.4f} -> {report.loss_after:.4f} on the held-out blocks")
            row("perplexity", f"{report.perplexity_before:.3f} -> {report.perplexity_after:.3f}")
        row("wrote", options.output)
        if report.url is not None:
            row("pushed", report.url)
