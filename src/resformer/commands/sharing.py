"""`resformer card`, `push` and `serve`."""

from pathlib import Path
from typing import Annotated

import typer

from resformer.commands.terminal import (
    ANYTHING,
    SHARE,
    AsJson,
    app,
    echo,
    example,
    hand_over,
    own_command,
    print_json,
    reporting_errors,
    row,
    size,
)


@app.command(**example(SHARE, "resformer card finetuned --repository you/finetuned"))
def card(
    checkpoint: Annotated[Path, typer.Argument(help="The folder of a ResFormer checkpoint.")],
    metrics: Annotated[
        list[Path] | None, typer.Option(help="metrics.json of a training, as finetune writes it; repeatable.")
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
    """Write a checkpoint's model card, from what was recorded."""
    with reporting_errors():
        from resformer.checkpoint_cards import checkpoint_card

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
        target = output or checkpoint / "README.md"
        built.write(target, force=force)
        row("card", f"{target}, origin: {built.origin}")
        if results := built.card.data.get("eval_results"):
            row("results", len(results))


@app.command(**example(SHARE, "resformer push finetuned you/finetuned --dry-run"))
def push(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint folder with a model card, README.md.")],
    repo_id: Annotated[str, typer.Argument(help="OWNER/NAME on the Hub; made if there is none.")],
    private: Annotated[bool, typer.Option("--private", help="Make the repository private.")] = False,
    revision: Annotated[str | None, typer.Option(help="The branch; made if there is none. Default: main.")] = None,
    message: Annotated[str | None, typer.Option(help="The commit's message.")] = None,
    bundle: Annotated[
        bool, typer.Option("--bundle", help="Add the code that loads the checkpoint without this package.")
    ] = False,
    tag: Annotated[str | None, typer.Option(help="Tag the commit, for example v1.0.")] = None,
    create_pr: Annotated[
        bool, typer.Option("--create-pr", help="Propose the commit to a repository that may be of others.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check the folder, list what would go.")] = False,
    as_json: AsJson = False,
) -> None:
    """Put a checkpoint on the Hub, in one commit.

    The token is HF_TOKEN, or that of `hf auth login`.
    """
    given = {name: value for name, value in locals().items() if name != "as_json"}  # the arguments of `push`
    with reporting_errors("What was uploaded is not sent again: run the command again."):
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


@app.command(
    context_settings=ANYTHING, add_help_option=False, **example(SHARE, "resformer serve finetuned --host 127.0.0.1")
)
def serve(context: typer.Context) -> None:
    """Start an OpenAI server: `transformers serve` with these models.

    Options are its own.
    """
    hand_over(context, "resformer.serving")
