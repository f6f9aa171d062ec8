"""`resformer compare`."""

import json
import math
import os
from dataclasses import fields
from typing import Annotated, Any

import typer

from resformer.commands.terminal import INTERRUPTED, AsJson, app, echo, own_command, reporting_errors, row

__all__ = ["compare"]


@app.command()
def compare(
    output: Annotated[str, typer.Argument(help="The folder of the study; new, empty, or one to go on with.")],
    methods: Annotated[
        str, typer.Option(help="NAME[:FIELD=VALUE...], separated by commas; transformer is always one of them.")
    ] = "resformer,denseformer,svformer",
    baseline: Annotated[
        str | None,
        typer.Option(help="The one that the others are compared with.  [default: the first plain transformer]"),
    ] = None,
    start: Annotated[
        str | None,
        typer.Option(
            "--from", help="Continue this Llama-style checkpoint, converted to each method, instead of from scratch."
        ),
    ] = None,
    sizes: Annotated[
        str | None,
        typer.Option(help="tiny, 10m, 82m, 180m, 320m, 468m, or NAME:FIELD=VALUE...; commas between.  [default: tiny]"),
    ] = None,
    seeds: Annotated[int, typer.Option(help="Paired runs of each method.")] = 3,
    first_seed: Annotated[int, typer.Option(min=0, help="The first run's; the others count on from it.")] = 0,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps of each run; or give --tokens.")] = None,
    tokens: Annotated[int | None, typer.Option(help="Training tokens of each run, rounded up to steps.")] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            help="Text, JSON, CSV or parquet file, folder, Hub id[:configuration]; repeatable. Default: "
            "Python's standard library."
        ),
    ] = None,
    split: Annotated[str, typer.Option(help="Split of a Hub dataset.")] = "train",
    text_column: Annotated[str, typer.Option(help="Column that holds the text.")] = "text",
    sample_by: Annotated[
        str, typer.Option(help="A document in a text file: the whole file (document), a paragraph, or a line.")
    ] = "document",
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="bytes, bpe:N trained on the data, a folder or a Hub id.  [default: bpe:4096, or the checkpoint's]"
        ),
    ] = None,
    block: Annotated[int, typer.Option(help="Tokens per sequence.")] = 512,
    batch: Annotated[int, typer.Option(help="Sequences per step, on all devices together.")] = 8,
    micro_batch: Annotated[int | None, typer.Option(help="Sequences per device and pass.  [default: all]")] = None,
    learning_rate: Annotated[
        float | None,
        typer.Option(help="The highest.  [default: 6e-4, or 5e-5 with --from]"),
    ] = None,
    connection_learning_rate: Annotated[
        float | None,
        typer.Option(help="Of the connections.  [default: --learning-rate, or 3e-4 with --from]"),
    ] = None,
    warmup: Annotated[float, typer.Option(help="Share of the steps.")] = 0.05,
    schedule: Annotated[
        str,
        typer.Option(help="cosine, constant, or wsd: constant, then down to a tenth in the last --decay of the steps."),
    ] = "cosine",
    decay: Annotated[float, typer.Option(help="Share of the steps, with --schedule wsd.")] = 0.2,
    weight_decay: Annotated[float, typer.Option(help="Of matrices; never of connections.")] = 0.1,
    evaluations: Annotated[
        int, typer.Option(help="Evaluations in a run, at even intervals; each saves a checkpoint.")
    ] = 10,
    held_out: Annotated[float, typer.Option(help="Share of the documents of --data to evaluate on.")] = 0.02,
    held_out_blocks: Annotated[
        int, typer.Option(help="Evaluate on at most this many blocks during the training; on all at its end.")
    ] = 128,
    bf16: Annotated[
        bool | None, typer.Option("--bf16/--no-bf16", help="Autocast.  [default: where the processor has bfloat16]")
    ] = None,
    save_models: Annotated[bool, typer.Option("--save-models", help="Keep the models of the first seed.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and its time; write nothing.")] = False,
    as_json: AsJson = False,
) -> None:
    """Train methods under one budget, paired by seed, and compare their held-out losses.

    A study that was stopped goes on when the command is given again.
    """
    given: dict[str, Any] = dict(locals())  # by the names of the fields of `StudyOptions` and `RunSettings`
    for name in ("tokens", "dry_run", "as_json"):
        del given[name]
    with reporting_errors("Finished runs are kept; give the command again to go on."):
        if steps is None:
            if tokens is None:
                raise ValueError("the budget is missing: give --steps or --tokens.")
            steps = math.ceil(tokens / max(batch * block, 1))
        elif tokens is not None:
            raise ValueError(f"--steps is {steps} and --tokens {tokens}: give one of them.")
        from resformer.training.study.comparison import StudyOptions, names, plan_study, run_study
        from resformer.training.study.paired_run import RunSettings
        from resformer.training.study.table import markdown

        if learning_rate is None:
            learning_rate = 6e-4 if start is None else 5e-5
        if connection_learning_rate is None and start is not None:
            connection_learning_rate = 3e-4
        given |= {"steps": steps, "learning_rate": learning_rate, "connection_learning_rate": connection_learning_rate}
        given |= {"methods": names(methods), "sizes": names(sizes or ""), "data": data or []}
        settings = RunSettings(**{field.name: given.pop(field.name) for field in fields(RunSettings)})
        options = StudyOptions(settings=settings, **given)
        if dry_run:
            plan = plan_study(options)
            if as_json:
                echo(json.dumps(plan, indent=2))
                return
            for each in plan["runs"]:
                row(each["size"], f"{each['method']}, {each['parameters']:,} parameters, runs to do: {each['to_do']}")
            row("data", f"{plan['data']['name']}, {plan['data']['training_tokens']:,} tokens to train on")
            row(
                "held out",
                f"{plan['data']['held_out_tokens']:,} tokens of {plan['data']['held_out_documents']:,} documents",
            )
            row("budget", f"{plan['steps']:,} steps, {plan['tokens']:,} tokens, {plan['epochs']:.2f} epochs a run")
            row(
                "time",
                f"{plan['seconds'] / 60:,.1f} min at the speed of the first steps of {plan['runs'][0]['method']}",
            )
            row("would write", output)
            return
        try:
            report = run_study(options, own_command())
        except KeyboardInterrupt:
            if os.environ.get("RANK", "0") == "0":
                echo(f"Interrupted. Go on with: {own_command()}", err=True)
            raise typer.Exit(INTERRUPTED) from None
        if report is None:  # another process writes it
            return
        echo(json.dumps(report, indent=2) if as_json else markdown(report))
