"""`resformer card` and `push`."""

from pathlib import Path
from typing import Annotated

import typer

from resformer.commands.terminal import AsJson, app, echo, own_command, print_json, reporting_errors, row, size
from resformer.files import EVAL_RESULTS


@app.command()
def card(
    checkpoint: Annotated[Path | None, typer.Argument(help="The folder of a ResFormer checkpoint.")] = None,
    method: Annotated[str | None, typer.Option(help="Print the card of this method instead.")] = None,
    metrics: Annotated[
        list[Path] | None,
        typer.Option(help="metrics.json of a training, study.json of a study; repeatable."),
    ] = None,
    eval_: Annotated[
        list[Path] | None, typer.Option("--eval", help="JSON of lm-evaluation-harness; repeatable.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="The file. [default: README.md in CHECKPOINT]")] = None,
    repository: Annotated[str | None, typer.Option(help="Hub id in the card's code. [default: folder's name]")] = None,
    base_model: Annotated[str | None, typer.Option(help="Hub id of the source, if it was read from a folder.")] = None,
    license_: Annotated[str | None, typer.Option("--license", help="The Hub's name of a licence.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a card that was edited by hand.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the card, write nothing.")] = False,
) -> None:
    """Write the model card of a checkpoint from its record and files of results, or print the card of a method."""
    with reporting_errors():
        if (checkpoint is None) == (method is None):
            raise typer.BadParameter("give either the folder of a checkpoint or --method NAME.")
        of_checkpoints = {"output": output, "repository": repository, "base-model": base_model, "license": license_}
        if method is not None and (given := [name for name, value in of_checkpoints.items() if value is not None]):
            raise typer.BadParameter(f"--{given[0]} is for the card of a checkpoint, and --method prints a method's.")
        from resformer.checkpoint_cards import checkpoint_card, read_results

        if checkpoint is None:
            from resformer.model_cards import method_card

            typer.echo(method_card(str(method), read_results(metrics or [], eval_ or [])[1]), nl=False)
            return
        built = checkpoint_card(
            checkpoint,
            metrics=metrics or [],
            evaluations=eval_ or [],
            repository=repository,
            base_model=base_model,
            license=license_,
        )
        if dry_run:
            echo(built.card)
            return
        target, *others = built.write(output or checkpoint / "README.md", force=force)
        row("card", f"{target}, origin: {built.origin}")
        row("results", len(built.card.data.get("eval_results") or ()))
        for path in others:
            row("also wrote", path)
        results = target.parent / EVAL_RESULTS
        for path in sorted({*results.glob("*.yaml")} - {*others}) if not results.is_symlink() else ():
            echo(f"Warning: {path} is not of these results: remove it if it is out of date.", err=True)


@app.command()
def push(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint folder with a model card, README.md.")],
    repo_id: Annotated[str, typer.Argument(help="OWNER/NAME on the Hub; made if there is none.")],
    private: Annotated[bool, typer.Option("--private", help="Make the repository private.")] = False,
    revision: Annotated[str | None, typer.Option(help="The branch; made if there is none. Default: main.")] = None,
    message: Annotated[str | None, typer.Option(help="The commit's message.")] = None,
    create_pr: Annotated[bool, typer.Option("--create-pr", help="Open a pull request; main does not change.")] = False,
    bundle: Annotated[
        bool, typer.Option("--bundle", help="Add the code that loads the checkpoint without this package.")
    ] = False,
    tag: Annotated[str | None, typer.Option(help="Tag the commit, for example v1.0.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check the folder, list what would go.")] = False,
    as_json: AsJson = False,
) -> None:
    """Put a checkpoint on the Hub, in one commit. The token is HF_TOKEN, or that of `hf auth login`."""
    given = {name: value for name, value in locals().items() if name != "as_json"}  # the arguments of `push`
    look = "look whether the pull request was opened, or " if create_pr else ""
    with reporting_errors(f"What was uploaded is not sent again: {look}run the command again."):
        from resformer.pushing import push as push_checkpoint

        report = push_checkpoint(**given)
        if print_json(report, as_json):
            return
        row("checkpoint", report.checkpoint)
        row("repository", f"{report.repo_id}, {report.revision}")
        for name, count in report.files.items():
            row("", f"{name}  {size(count)}")
        row("size", f"{len(report.files)} files, {size(report.bytes)}")
        if report.left_behind:
            row("left behind", ", ".join(report.left_behind))
        if report.deleted:
            row("deleted", ", ".join(report.deleted))
        if dry_run:
            row("do it", own_command(leave_out="--dry-run"))
            return
        if report.tag is not None:
            row("tag", report.tag)
        row("commit", report.commit)
        echo(report.url)
