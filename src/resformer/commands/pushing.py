"""`resformer push`."""

from pathlib import Path
from typing import Annotated

import typer

from resformer.commands.terminal import AsJson, app, echo, own_command, print_json, reporting_errors, row, size


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
