"""The command line: `resformer COMMAND`. Data goes to stdout, words for people to stderr.

Nothing here imports torch or Transformers before a command runs.
"""

import json
import os
import shlex
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer

from resformer.convert.errors import CheckpointError, OutputError, VerificationError, brief, plain
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
        _echo(__version__)
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
    before = {}
    try:
        _quiet_off_a_terminal()
        if threading.current_thread() is threading.main_thread():
            before = {number: signal.signal(number, _interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
        yield
    except KeyboardInterrupt:
        _echo("Interrupted. Nothing was left behind; run the command again.", err=True)
        raise typer.Exit(INTERRUPTED) from None
    except Exception as error:
        if _options["traceback"] or isinstance(error, typer.Exit):
            raise
        _echo(f"Error: {brief(error, 4000)}", err=True)
        if isinstance(error, CheckpointError) and error.option is not None:
            _echo(f"Try: {_own_command(error.option)}", err=True)
        raise typer.Exit(_exit_code(error)) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _echo(text: object = "", err: bool = False) -> None:
    """Prints a line of ours; a stranger's file may have named something in it: letters alone reach the terminal."""
    typer.echo(plain(text), err=err)


def _own_command(*more: str) -> str:
    """The command as the user gave it, with something added."""
    return " ".join(["resformer", shlex.join(sys.argv[1:]), *more])


def _interrupt(number: int, frame: FrameType | None) -> None:
    """A polite kill is a Ctrl-C, which clears up what was begun; a second one must not stop the clearing up."""
    for other in (signal.SIGINT, signal.SIGTERM):
        signal.signal(other, signal.SIG_IGN)
    raise KeyboardInterrupt


def _exit_code(error: Exception) -> int:
    if isinstance(error, VerificationError):
        return VERIFICATION_FAILED
    if isinstance(error, OutputError):
        return FAILED
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


_Source = Annotated[str, typer.Argument(help="A checkpoint folder, a .gguf file, or a Hub id.")]
_Output = Annotated[Path, typer.Argument(help="The folder to write; new or empty.")]
_Force = Annotated[bool, typer.Option("--force", help="Replace what OUTPUT holds.")]
_Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a Hub id.")]
_Link = Annotated[
    bool, typer.Option("--link", help="Hard-link weight files that do not change: instant, but edits reach both.")
]
_Durable = Annotated[bool, typer.Option("--durable", help="Wait until all of it is on the disk: power may fail.")]
_DryRun = Annotated[bool, typer.Option("--dry-run", help="Check everything, say what would be done, write nothing.")]
_Json = Annotated[bool, typer.Option("--json", help="Print the report as JSON.")]


class Verification(StrEnum):
    """What `--verify` takes."""

    AUTO = "auto"
    HEADERS = "headers"
    HASHES = "hashes"
    LOGITS = "logits"


_Verify = Annotated[
    Verification,
    typer.Option(
        help="How the result is checked: names and shapes read back; every byte too; logits too. auto: logits where "
        "the model fits into free memory."
    ),
]


@app.command()
def convert(
    source: _Source,
    output: _Output,
    method: Annotated[str, typer.Option(help="A method, `resformer methods` lists them.")] = "resformer",
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="FIELD=VALUE", help="A connection field on top of the method's; repeatable."),
    ] = None,
    lossy: Annotated[bool, typer.Option("--lossy", help="Allow methods that change what the model computes.")] = False,
    force: _Force = False,
    revision: _Revision = None,
    dtype: Annotated[str, typer.Option(help="Convert the weights: float32, bfloat16, float16.")] = "auto",
    link: _Link = False,
    verify: _Verify = Verification.AUTO,
    durable: _Durable = False,
    max_shard_size: Annotated[
        int | None, typer.Option(help="Split weight files that are larger, in bytes.", min=1)
    ] = None,
    allow_pickle: Annotated[
        bool, typer.Option("--allow-pickle", help="Read pytorch_model*.bin where there are no safetensors.")
    ] = False,
    dry_run: _DryRun = False,
    as_json: _Json = False,
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
            link=link,
            verify=verify.value,
            durable=durable,
            max_shard_size=max_shard_size,
            allow_pickle=allow_pickle,
            **_parse_fields(set_ or []),
        )
        if _told_as_json(report, as_json):
            return
        added = sum(report.added.values())
        _row("source", f"{report.source} ({report.family}, {report.dtype})")
        _row("method", f"{report.method} {json.dumps(report.fields)}")
        _row("parameters", f"{report.parameters:,}: {added:,} added in {len(report.added)} tensors")
        _row("tensors", f"{report.kept} kept, {len(report.added)} new, {len(report.dropped)} dropped")
        _tell_transfer(report)
        if report.rounding.overflowed or report.rounding.flushed:
            _row(
                "rounding",
                f"{report.rounding.overflowed:,} numbers became infinite, {report.rounding.flushed:,} became 0",
            )
        for loss in report.losses:
            _row("lossy", loss)
        if report.left_behind:
            _row("left behind", ", ".join(report.left_behind))
        if dry_run:
            _row("memory", f"{_size(report.memory)} to compare logits, little else")
        _tell_result(report, dry_run)


@app.command()
def revert(
    source: Annotated[str, typer.Argument(help="A ResFormer checkpoint: a folder or a Hub id.")],
    output: _Output,
    force: _Force = False,
    revision: _Revision = None,
    link: _Link = False,
    verify: _Verify = Verification.AUTO,
    durable: _Durable = False,
    dry_run: _DryRun = False,
    as_json: _Json = False,
) -> None:
    """Make a retrofit that has learned nothing plain again, every tensor byte for byte."""
    with _reporting_errors():
        from resformer.convert import revert as revert_checkpoint

        report = revert_checkpoint(
            source,
            output,
            force=force,
            dry_run=dry_run,
            revision=revision,
            link=link,
            verify=verify.value,
            durable=durable,
        )
        if _told_as_json(report, as_json):
            return
        _row("source", report.source)
        _row("family", report.family)
        _row("tensors", f"{report.kept} kept, {len(report.removed)} removed")
        _tell_transfer(report)
        _tell_result(report, dry_run)


@app.command()
def verify(
    one: Annotated[str, typer.Argument(help="A checkpoint folder, a .gguf file, or a Hub id.")],
    other: Annotated[str, typer.Argument(help="Another one, its retrofit for example.")],
    verify: _Verify = Verification.AUTO,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of ONE.")] = None,
    as_json: _Json = False,
) -> None:
    """Compare two checkpoints' tensors byte for byte, and their logits. Exit code 4 if they differ."""
    with _reporting_errors():
        from resformer.convert import verify as compare

        comparison = compare(one, other, verify=verify.value, revision=revision)
        if as_json:
            _echo(json.dumps(comparison.as_dict(), indent=2, sort_keys=True))
        else:
            what = "of one form" if verify is Verification.HEADERS else "identical byte for byte"
            _row("tensors", f"{comparison.identical} {what}, {len(comparison.different)} different")
            for name, far in comparison.different.items():
                _row("", f"{name}: " + ("shapes or kinds differ" if far is None else f"by up to {far:.3g}"))
            _row("only in one", ", ".join(comparison.only_in_one) or "-")
            _row("only in other", ", ".join(comparison.only_in_other) or "-")
            _row("logits", comparison.logits or "not compared")
            _row("same", "yes" if comparison.same else "no")
        if not comparison.same:
            raise typer.Exit(VERIFICATION_FAILED)


@app.command()
def inspect(
    source: _Source,
    revision: _Revision = None,
    as_json: _Json = False,
) -> None:
    """Print what a checkpoint holds: family, method, mixing matrices, sizes, cache bytes per token."""
    with _reporting_errors():
        from resformer.convert import inspect as inspect_checkpoint

        found = inspect_checkpoint(source, revision=revision)
        if _told_as_json(found, as_json):
            return
        _row("source", found.source)
        _row("model", f"{found.model_type}, backbone of {found.family or 'no family'}")
        _row("method", f"{found.method or 'without a name'} {json.dumps(found.fields)}")
        _row("files", f"{found.files}, {_size(found.bytes)}")
        dtypes = ", ".join(f"{count:,} {dtype}" for dtype, count in found.dtypes.items())
        _row("parameters", f"{found.parameters:,} ({dtypes})")
        for name, shape in found.added.items():
            _row("", f"{name} {shape}")
        heads = f"{found.attention_heads} heads, {found.key_value_heads} for keys and values, of {found.head_dim}"
        tied = ", tied" if found.tied else ""
        _row("shape", f"{found.layers} layers, {found.hidden_size} wide, {heads}, {found.vocab_size:,} tokens{tied}")
        _row("cache", f"{found.cache_bytes_per_token:,} bytes a token, {found.cache_share:.0%} of the full one")
        _tell_matrix("M, values", found.value_mixing_matrix, shift=0)
        _tell_matrix("D, depth", found.depth_mixing_matrix, shift=1)


def _row(name: str, value: object) -> None:
    _echo(f"{name:14}{brief(value, 4000)}")


def _size(count: float) -> str:
    """Bytes, in the unit that suits them."""
    unit = "bytes"
    for larger in ("kB", "MB", "GB", "TB"):
        if count < 1000:
            break
        count, unit = count / 1000, larger
    return f"{count:,.0f} {unit}" if unit == "bytes" else f"{count:,.1f} {unit}"


def _told_as_json(report: Any, as_json: bool) -> bool:
    """Warnings go to stderr in any case; returns whether the rest has been told too."""
    for warning in report.warnings:
        _echo(f"Warning: {brief(warning, 4000)}", err=True)
    if as_json:
        _echo(json.dumps(report.as_dict(), indent=2, sort_keys=True))
    return as_json


def _tell_transfer(report: Any) -> None:
    moved = ", ".join(f"{_size(count)} {how}" for how, count in vars(report.transfer).items() if count)
    _row("files", f"{report.carried_files} carried over whole, {report.written_files} written: {moved}")


def _tell_result(report: Any, dry_run: bool) -> None:
    if dry_run:
        _row("would write", report.output)
        _row("do it", shlex.join(["resformer", *(word for word in sys.argv[1:] if word != "--dry-run")]))
        return
    levels = {"headers": "headers", "hashes": "headers, bytes", "logits": "headers, bytes"}
    logits = f", logits {report.verification}" if report.verification is not None else ""
    _row("verified", levels[report.verified] + logits)
    _row("wrote", report.output)


def _tell_matrix(name: str, matrix: list[list[float]] | None, shift: int) -> None:
    """The rows that are not plain Llama's, each with its coefficients."""
    if matrix is None:
        _row(name, "plain Llama")
        return
    for n, row in enumerate(matrix):
        plain = [float(m == n + shift) for m in range(len(row))]
        if row != plain:
            entries = " ".join(
                f"[{m}]=" + ("gate" if entry != entry else f"{entry:.4g}") for m, entry in enumerate(row) if entry != 0
            )
            _row(name, f"row {n}: {entries}")
            name = ""


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
            _echo(json.dumps(fields, indent=2))
            return
        for name, values in fields.items():
            _echo(f"{name:22} {json.dumps(values)}")


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
