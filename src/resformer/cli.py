"""The command line: `resformer COMMAND`. Data goes to stdout, words for people to stderr.

Nothing here imports torch or Transformers before a command runs.
"""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from resformer.convert.errors import CheckpointError, VerificationError
from resformer.version import __version__

__all__ = ["app", "main"]

FAILED, USAGE, INVALID_INPUT, VERIFICATION_FAILED, INTERRUPTED = 1, 2, 3, 4, 130

app = typer.Typer(
    help="Cross-layer connections for Hugging Face Transformers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
_options = {"traceback": False}


def main() -> None:
    """Runs the command line."""
    app()


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit()


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    traceback: Annotated[bool, typer.Option(help="Show Python's traceback of an error.")] = False,
) -> None:
    _options["traceback"] = traceback


@contextmanager
def _reporting_errors() -> Iterator[None]:
    """Turns exceptions into one line on stderr and the exit code that the design gives them."""
    try:
        _quiet_off_a_terminal()
        yield
    except KeyboardInterrupt:
        typer.echo("Interrupted.", err=True)
        raise typer.Exit(INTERRUPTED) from None
    except Exception as error:
        if _options["traceback"] or isinstance(error, typer.Exit):
            raise
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(_exit_code(error)) from None


def _exit_code(error: Exception) -> int:
    if isinstance(error, VerificationError):
        return VERIFICATION_FAILED
    if isinstance(error, CheckpointError):
        return INVALID_INPUT
    return USAGE if isinstance(error, (ValueError, typer.BadParameter)) or _is_validation(error) else FAILED


def _is_validation(error: Exception) -> bool:
    from huggingface_hub.errors import StrictDataclassError

    return isinstance(error, StrictDataclassError)


def _quiet_off_a_terminal() -> None:
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")  # read when tqdm is imported, which nothing has done yet


def _parse_fields(assignments: list[str]) -> dict[str, Any]:
    """`name=value` pairs, the values as JSON (`dwa=true`, `value_sources=[0,0,2,2]`) or else as text."""
    fields = {}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not equals:
            raise ValueError(f"--set {assignment}: expected name=value.")
        try:
            fields[name] = json.loads(value)
        except json.JSONDecodeError:
            fields[name] = value
    return fields


@app.command()
def convert(
    source: Annotated[str, typer.Argument(help="A checkpoint folder, a .gguf file, or a Hub id.")],
    output: Annotated[Path, typer.Argument(help="The folder to write; new or empty.")],
    method: Annotated[str, typer.Option(help="A method, `resformer methods` lists them.")] = "resformer",
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="FIELD=VALUE", help="A connection field on top of the method's; repeatable."),
    ] = None,
    lossy: Annotated[bool, typer.Option("--lossy", help="Allow methods that change what the model computes.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace what OUTPUT holds.")] = False,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a Hub id.")] = None,
    dtype: Annotated[str, typer.Option(help="Convert the weights: float32, bfloat16, float16.")] = "auto",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done and write nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Retrofit a Llama-style checkpoint with cross-layer connections, its logits unchanged."""
    with _reporting_errors():
        from resformer.convert import retrofit

        report = retrofit(
            source,
            output,
            method,
            lossy=lossy,
            force=force,
            dry_run=dry_run,
            revision=revision,
            dtype=dtype,
            **_parse_fields(set_ or []),
        )
        for warning in report.warnings:
            typer.echo(f"Warning: {warning}", err=True)
        if as_json:
            typer.echo(json.dumps(report.as_dict(), indent=2, sort_keys=True))
            return
        typer.echo(f"source      {report.source} ({report.family})")
        typer.echo(f"method      {report.method} {json.dumps(report.fields)}")
        added = sum(report.added.values())
        typer.echo(f"parameters  {report.parameters:,}: {added:,} added, {len(report.dropped)} tensors dropped")
        typer.echo(f"logits      {report.verification or 'not compared: a dry run'}")
        for loss in report.losses:
            typer.echo(f"lossy       {loss}")
        typer.echo(f"{'would write' if dry_run else 'wrote      '} {report.output}")


@app.command()
def methods(
    layers: Annotated[int, typer.Option(help="Show the fields for a model of this many layers.", min=1)] = 8,
    as_json: Annotated[bool, typer.Option("--json", help="Print them as JSON.")] = False,
) -> None:
    """List the named methods and the configuration fields that they set."""
    with _reporting_errors():
        from resformer.configuration import METHODS

        fields = {name: method(layers) for name, method in METHODS.items()}
        if as_json:
            typer.echo(json.dumps(fields, indent=2))
            return
        for name, values in fields.items():
            typer.echo(f"{name:22} {json.dumps(values)}")


@app.command()
def demo(
    output: Annotated[Path, typer.Option(help="Where the checkpoints go.")] = Path("demo"),
    model: Annotated[
        str | None, typer.Option(help="A checkpoint folder, .gguf file or Hub id instead of SmolLM2-135M.")
    ] = None,
    method: Annotated[str, typer.Option(help="An exact method.")] = "resformer-denseformer",
    steps: Annotated[int, typer.Option(help="Fine-tuning steps of each model.", min=1)] = 12,
    block: Annotated[int, typer.Option(help="Tokens per training sequence.", min=8)] = 512,
    batch: Annotated[int, typer.Option(help="Sequences per step.", min=1)] = 2,
    prompt: Annotated[str, typer.Option(help="What to generate from at the end.")] = "def read_lines(path):\n",
) -> None:
    """Retrofit a real model, prove it unchanged, fine-tune it beside the original, save, reload, generate."""
    with _reporting_errors():
        from resformer.demo import run_demo

        run_demo(output=output, model=model, method=method, steps=steps, block=block, batch=batch, prompt=prompt)
