"""`resformer compare`."""

import json
from typing import Annotated

import typer

from resformer.commands.terminal import AsJson, app, echo, own_command, row, takes
from resformer.training.options import StudyOptions


@app.command()
@takes(StudyOptions, "Finished runs are kept. Go on with: {command}")
def compare(
    options: StudyOptions,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and its time; write nothing.")] = False,
    as_json: AsJson = False,
) -> None:
    """Train methods under one budget, paired by seed, and compare their held-out losses.

    A study that was stopped goes on when the command is given again.
    """
    from resformer.training.study.comparison import plan_study, run_study
    from resformer.training.study.table import markdown

    if not dry_run:
        report = run_study(options, own_command())
        if report is not None:  # else another process writes it
            echo(json.dumps(report, indent=2) if as_json else markdown(report))
        return
    plan = plan_study(options)
    if as_json:
        echo(json.dumps(plan, indent=2))
        return
    for each in plan["runs"]:
        row(each["size"], f"{each['method']}, {each['parameters']:,} parameters, runs to do: {each['to_do']}")
    data = plan["data"]
    row("data", f"{data['name']}, {data['training_tokens']:,} tokens to train on")
    row("held out", f"{data['held_out_tokens']:,} tokens of {data['held_out_documents']:,} documents")
    row("budget", f"{plan['steps']:,} steps, {plan['tokens']:,} tokens, {plan['epochs']:.2f} epochs a run")
    row("time", f"{plan['seconds'] / 60:,.1f} min at the speed of the first steps of {plan['runs'][0]['method']}")
    row("would write", options.output)
