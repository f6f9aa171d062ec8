"""`resformer analyze` and `eval`."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from resformer.commands.terminal import (
    ANYTHING,
    MEASURE,
    AsJson,
    app,
    echo,
    example,
    own_command,
    reporting_errors,
    row,
)

if TYPE_CHECKING:
    from resformer.analysis import Analysis

_SHOWN = {
    "entropy": "entropy",
    "first_importance": "first share",
    "importance_ratio": "first/others",
    "value_norm_ratio": "first value",
    "hidden_norm_ratio": "first hidden",
    "similarity": "similarity",
}


@app.command(**example(MEASURE, "resformer analyze HuggingFaceTB/SmolLM2-135M finetuned --output analysis"))
def analyze(
    checkpoints: Annotated[
        list[str], typer.Argument(metavar="CHECKPOINT...", help="Folders or Hub ids; several are compared.")
    ],
    text: Annotated[
        list[Path] | None,
        typer.Option(help="A UTF-8 file to read; repeatable. [default: sources of Python's standard library]"),
    ] = None,
    texts: Annotated[int, typer.Option(min=1, help="Read at most this many texts.")] = 32,
    max_tokens: Annotated[int, typer.Option(min=2, help="Cut each text to at most this many tokens.")] = 512,
    output: Annotated[Path | None, typer.Option(help="Folder for analysis.json and figures.")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="The checkpoint whose tokenizer all of them use.")] = None,
    dtype: Annotated[Literal["float32", "bfloat16", "float16"], typer.Option(help="Of the model.")] = "float32",
    device: Annotated[str | None, typer.Option(help="cpu, cuda, ... [default: an accelerator if there is one]")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an earlier report.")] = False,
    as_json: AsJson = False,
) -> None:
    """Measure attention sinks, value drains and over-smoothing.

    Of each layer, by the definitions of the ResFormer paper.
    """
    with reporting_errors():
        import torch
        from tqdm import tqdm

        from resformer.analysis import analyze as analyze_one
        from resformer.analysis import read_texts, standard_texts, write_report
        from resformer.analysis import report as report_of
        from resformer.environment import require
        from resformer.files import check_target

        if output is not None:  # fail before the measuring
            require("matplotlib", "analysis")
            inputs: list[str | Path] = [*checkpoints, *(text or []), *([tokenizer] if tokenizer else [])]
            check_target(output, *inputs, made_by="analyze", force=force)
        # Before any model: a text that cannot be read is an error.
        read = list(read_texts(text, texts=texts, max_tokens=max_tokens) if text else standard_texts(texts))
        analyses: list[Analysis] = []
        for checkpoint, name in zip(checkpoints, _names(checkpoints), strict=True):
            with tqdm(total=len(read), desc=name, unit="text", leave=False) as bar:
                options: dict[str, Any] = {"tokenizer": tokenizer, "max_tokens": max_tokens, "device": device}
                options |= {"dtype": getattr(torch, dtype), "progress": bar.update}
                analyses.append(analyze_one(checkpoint, read, name=name, **options))
        for analysis in analyses:
            for warning in analysis.warnings:
                echo(f"Warning: {warning}", err=True)
        if output is not None:
            write_report(analyses, output, own_command(), force=force)
        if as_json:
            echo(json.dumps(report_of(analyses, own_command()), indent=2, sort_keys=True))
            return
        for analysis in analyses:
            _print(analysis)
            echo()
        if output is not None:
            row("wrote", output)


def _names(checkpoints: list[str]) -> list[str]:
    """The last parts of each path or id, as many as tell them apart."""
    # `.` and `..` have no name of their own.
    paths = [os.path.abspath(each) if Path(each).name in ("", "..") else os.path.normpath(each) for each in checkpoints]
    parts = [Path(path).parts for path in paths]
    most = max(map(len, parts))
    names = (["/".join(each[-count:]) for each in parts] for count in range(1, most + 1))
    return next(each for each in names if len({*each}) == len({*parts}))


def _print(analysis: "Analysis") -> None:
    echo(f"{analysis.name}: {analysis.texts:,} texts, {analysis.tokens:,} tokens")
    echo("layer" + "".join(f"{heading:>13}" for heading in _SHOWN.values()))
    for layer in range(analysis.layers):
        echo(f"{layer:5}" + "".join(f"{_number(analysis.mean(quantity)[layer]):>13}" for quantity in _SHOWN))


def _number(value: float) -> str:
    """Three digits, or all of them before the point."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


@app.command(
    "eval",
    **example(MEASURE, "resformer eval finetuned --tasks hellaswag,arc_easy --limit 100"),
    context_settings=ANYTHING,
)
def evaluate(
    context: typer.Context,
    checkpoint: Annotated[str, typer.Argument(help="A folder or Hub id, of a ResFormer or any causal model.")],
) -> None:
    """Run tasks of lm-evaluation-harness on a checkpoint.

    Options are those of `lm_eval run`: --tasks, --limit, --num_fewshot,
    --batch_size, --device, --include_path, --output_path, and others.
    """
    with reporting_errors("No results were written."):
        from resformer.evaluation import evaluate as hand_over

        hand_over(checkpoint, context.args)
