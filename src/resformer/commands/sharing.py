"""`resformer bundle`."""

from typing import Annotated

import typer

from resformer.commands.conversion import (
    Verification,
    _DryRun,
    _Durable,
    _Force,
    _Link,
    _Output,
    _Revision,
    _tell_result,
    _tell_transfer,
    _Verify,
)
from resformer.commands.terminal import AsJson, app, reporting_errors, row, size, told_as_json

__all__ = ["bundle"]


@app.command()
def bundle(
    source: Annotated[str, typer.Argument(help="A ResFormer checkpoint: a folder or a Hub id.")],
    output: _Output,
    force: _Force = False,
    revision: _Revision = None,
    link: _Link = False,
    verify: _Verify = Verification.AUTO,
    durable: _Durable = False,
    dry_run: _DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Put the code beside a checkpoint, so that it loads with trust_remote_code where resformer is not installed."""
    with reporting_errors():
        from resformer.convert import bundle as bundle_checkpoint

        report = bundle_checkpoint(
            source,
            output,
            force=force,
            dry_run=dry_run,
            revision=revision,
            link=link,
            verify=verify.value,
            durable=durable,
        )
        if told_as_json(report, as_json):
            return
        row("source", report.source)
        row("code", ", ".join(f"{name} ({size(count)})" for name, count in report.code.items()))
        row("loads with", ", ".join(report.auto_map))
        _tell_transfer(report)
        if report.left_behind:
            row("left behind", ", ".join(report.left_behind))
        _tell_result(report, dry_run)
