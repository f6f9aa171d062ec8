"""`resformer eval`."""

from pathlib import Path
from typing import Annotated

import typer

from resformer.commands.terminal import app, echo, reporting_errors, row


def _batch_size(text: str | None) -> int | str | None:
    if text in (None, "auto"):
        return text
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise ValueError(f"--batch-size {text}: expected auto, or a number from 1 up.")


@app.command("eval")
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
