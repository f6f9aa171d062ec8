"""`resformer analyze`."""

import os
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from resformer.commands.terminal import AsJson, app, echo, own_command, print_json, reporting_errors, row

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


@app.command()
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
    output: Annotated[Path | None, typer.Option(help="Folder for analysis.json, figures and report.html.")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="The checkpoint whose tokenizer all of them use.")] = None,
    dtype: Annotated[Literal["float32", "bfloat16", "float16"], typer.Option(help="Of the model.")] = "float32",
    device: Annotated[str | None, typer.Option(help="cpu, cuda, ... [default: an accelerator if there is one]")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an earlier report.")] = False,
    as_json: AsJson = False,
) -> None:
    """Measure attention sinks, value drains, hidden peaks and token similarity of checkpoints, layer by layer."""
    with reporting_errors():
        import torch
        from tqdm import tqdm

        from resformer.analysis import Report, read_texts, standard_texts, write_report
        from resformer.analysis import analyze as analyze_one
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
            with tqdm(total=texts, desc=name, unit="text", leave=False) as bar:
                options: dict[str, Any] = {"tokenizer": tokenizer, "max_tokens": max_tokens, "device": device}
                options |= {"dtype": getattr(torch, dtype), "progress": bar.update}
                analyses.append(analyze_one(checkpoint, read, name=name, **options))
        report = Report(analyses, own_command())
        if output is not None:
            write_report(report, output, force=force)
        if print_json(report, as_json):
            return
        for analysis in analyses:
            _print(analysis)
        if output is not None:
            row("report", output / "report.html")


def _names(checkpoints: list[str]) -> list[str]:
    """The last part of each path or id, or all of it where two last parts are equal."""
    short = [os.path.basename(os.path.normpath(checkpoint)) for checkpoint in checkpoints]
    return [
        checkpoint if Counter(short)[name] > 1 else name for checkpoint, name in zip(checkpoints, short, strict=True)
    ]


def _print(analysis: "Analysis") -> None:
    from resformer.analysis.page import number

    echo(f"{analysis.name}: {analysis.texts:,} texts, {analysis.tokens:,} tokens")
    echo("layer" + "".join(f"{heading:>13}" for heading in _SHOWN.values()))
    for layer in range(analysis.layers):
        echo(f"{layer:5}" + "".join(f"{number(analysis.mean(quantity)[layer]):>13}" for quantity in _SHOWN))
    echo()
