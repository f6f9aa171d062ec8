"""`resformer analyze` and `eval`."""

import os
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from resformer.commands.terminal import (
    MEASURE,
    AsJson,
    app,
    echo,
    example,
    own_command,
    print_json,
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
    output: Annotated[Path | None, typer.Option(help="Folder for analysis.json, figures and report.html.")] = None,
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

        from resformer.analysis import Report, findings, read_texts, standard_texts, write_report
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
            with tqdm(total=len(read), desc=name, unit="text", leave=False) as bar:
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
            for sentence in findings(analysis):
                echo(sentence)
            echo()
        if output is not None:
            row("report", output / "report.html")


def _names(checkpoints: list[str]) -> list[str]:
    """The last part of each path or id; where two are equal, the parts in which the paths differ."""
    parts = [Path(os.path.normpath(checkpoint)).parts for checkpoint in checkpoints]
    if len({names[-1] for names in parts}) == len({*parts}):
        return [names[-1] for names in parts]

    def shared(paths: list[tuple[str, ...]]) -> int:
        return len([*takewhile(lambda same: len(set(same)) == 1, zip(*paths, strict=False))])

    first, last = shared(parts), shared([names[::-1] for names in parts])
    return ["/".join(names[first : len(names) - last]) or names[-1] for names in parts]


def _print(analysis: "Analysis") -> None:
    echo(f"{analysis.name}: {analysis.texts:,} texts, {analysis.tokens:,} tokens")
    echo("layer" + "".join(f"{heading:>13}" for heading in _SHOWN.values()))
    for layer in range(analysis.layers):
        echo(f"{layer:5}" + "".join(f"{_number(analysis.mean(quantity)[layer]):>13}" for quantity in _SHOWN))


def _number(value: float) -> str:
    """Three digits, or all of them before the point."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _batch_size(text: str | None) -> int | str | None:
    if text in (None, "auto"):
        return text
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise ValueError(f"--batch-size {text}: expected auto, or a number from 1 up.")


@app.command("eval", **example(MEASURE, "resformer eval finetuned --tasks hellaswag,arc_easy --limit 100"))
def evaluate(
    checkpoint: Annotated[
        str, typer.Argument(help="A checkpoint folder or Hub id, of a ResFormer or any causal model.")
    ],
    tasks: Annotated[str, typer.Option(help="Names of tasks or groups, patterns, task files; separated by commas.")],
    include_path: Annotated[Path | None, typer.Option(help="A folder with further task files.")] = None,
    limit: Annotated[int | None, typer.Option(help="Use at most this many documents of each task.", min=1)] = None,
    batch_size: Annotated[
        str | None,
        typer.Option(
            metavar="auto|N",
            help="Sequences at a time; auto fills an accelerator's memory.  [default: 1, with vLLM auto]",
        ),
    ] = None,
    num_fewshot: Annotated[
        int | None, typer.Option(help="Examples before each question; default: the task's.", min=0)
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Write the results to this JSON file.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the results file.")] = False,
    device: Annotated[str | None, typer.Option(help="cpu, cuda:1; default: the accelerator, if any.")] = None,
    dtype: Annotated[str, typer.Option(help="Of the weights: auto, float32, bfloat16, float16, float64.")] = "auto",
    backend: Annotated[str, typer.Option(help="What runs the model: hf (Transformers), or vllm if installed.")] = "hf",
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a Hub id.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
) -> None:
    """Run tasks of lm-evaluation-harness on a checkpoint."""
    given = dict(locals())  # the arguments of `evaluate`, and three
    for name in ("output", "force", "as_json"):
        del given[name]
    with reporting_errors("No results were written."):
        from resformer import evaluation

        if output is not None:
            evaluation.check_output(output, force=force)
        names = [name.strip() for name in tasks.split(",") if name.strip()]
        results = evaluation.evaluate(**given | {"tasks": names, "batch_size": _batch_size(batch_size)})
        if results is None:  # not the first of several processes
            return
        from lm_eval.utils import make_table

        # Printed before it is written, so that a full disk does not lose the results.
        echo(evaluation.results_json(results) if as_json else make_table(results))
        if output is not None:
            evaluation.write_results(results, output)
            if not as_json:
                row("wrote", output)
