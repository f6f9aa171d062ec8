"""The application, errors and exit codes, and output of all commands: data to stdout, messages to stderr."""

import json
import logging
import os
import re
import shlex
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import fields, is_dataclass
from functools import wraps
from importlib import metadata
from inspect import Parameter, Signature, isgeneratorfunction, signature
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, get_origin, get_type_hints

import typer
from typer.core import TyperGroup
from typer.models import ArgumentInfo

from resformer.errors import CheckpointError, OutputError, ResFormerError, VerificationError, one_line, plain
from resformer.own_files import import_connections
from resformer.training.options import TYPED
from resformer.version import __version__

FAILED, USAGE, INVALID_INPUT, VERIFICATION_FAILED, INTERRUPTED = 1, 2, 3, 4, 130

#: What other packages call a command of ours.
_SYNONYMS = {"retrofit": "convert", "evaluate": "eval", "analyse": "analyze", "upload": "push"}


class _Commands(TyperGroup):
    """Lists commands by what they are for, in whole sentences, and takes the names of `_SYNONYMS`."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return super().get_command(ctx, _SYNONYMS.get(cmd_name, cmd_name))

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        panels: dict[str, list[tuple[str, str]]] = {}
        for name in self.list_commands(ctx):
            command: Any = self.get_command(ctx, name)
            if not command.hidden:
                panels.setdefault(command.rich_help_panel, []).append((name, command.get_short_help_str(limit=200)))
        for panel in PANELS:
            with formatter.section(panel):
                formatter.write_dl(panels.pop(panel))
        assert not panels


PANELS = START, CONNECT, TRAIN, MEASURE, SHARE = "Start", "Add connections", "Train", "Measure", "Share and serve"

app = typer.Typer(
    cls=_Commands,
    help="Cross-layer connections for Hugging Face Transformers. COMMAND --help has an example.",
    no_args_is_help=True,
    rich_markup_mode=None,  # Rich takes `[default: 8]` for markup, and drops it
    pretty_exceptions_enable=False,
)
_options = {"traceback": False}
#: The field that an error of a dataclass begins with: `batch is 0`.
_FIELD = re.compile(r"^\w+(?= (?:is|are) )")
_COLOURS = re.compile(r"\x1b\[[\d;]*m")
#: Commands read and write checkpoints with parts of Transformers that older versions lack.
COMMANDS_NEED = (5, 23)
#: Settings of a command that passes on what it is given.
ANYTHING = {"ignore_unknown_options": True, "allow_extra_args": True}
#: And whose help is that of the other command line, too.
HANDED_OVER: dict[str, Any] = {"context_settings": ANYTHING, "add_help_option": False}

AsJson = Annotated[bool, typer.Option("--json", help="Print the report as JSON.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        echo(__version__)
        raise typer.Exit()


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    traceback: Annotated[bool, typer.Option(help="Show Python's traceback of an error.")] = False,
    import_: Annotated[
        list[Path] | None,
        typer.Option("--import", metavar="FILE.py", help="Import connections of your own first; repeatable."),
    ] = None,
) -> None:
    _options["traceback"] = traceback
    for file in import_ or ():
        with reporting_errors():
            import_connections(file.expanduser())


def check_transformers() -> None:
    """Raises `ResFormerError` where Transformers is too old for a command; models work from 5.9 on."""
    installed = metadata.version("transformers")
    if tuple(map(int, installed.split(".")[:2])) < COMMANDS_NEED:
        needed = ".".join(map(str, COMMANDS_NEED))
        raise ResFormerError(
            f"Commands need transformers {needed} or newer, and {installed} is installed: pip install -U "
            f"'transformers>={needed},<6'. Models load, generate and train with this one."
        )


@contextmanager
def reporting_errors(
    interrupted: str = "Nothing was left behind; run the command again.", any_transformers: bool = False
) -> Iterator[None]:
    """Turns exceptions into one line on stderr and an exit code: see `_exit_code`.

    Args:
        interrupted: what to say after Ctrl-C; {command} is the command as it was given.
        any_transformers: the command does not use Transformers.
    """
    # PEFT and Transformers import them; they warn of what they could use, and torch of how torchao registers its enums.
    for name in ("bitsandbytes", "torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
    before, logged, shown = {}, logging.getLogRecordFactory(), warnings.formatwarning
    logging.setLogRecordFactory(lambda *parts, **named: _plain_record(logged(*parts, **named)))
    warnings.formatwarning = lambda *parts, **named: plain(shown(*parts, **named))
    try:
        if not sys.stderr.isatty():
            os.environ.setdefault("TQDM_DISABLE", "1")  # must be set before tqdm is imported
        if not any_transformers:
            check_transformers()
        if threading.current_thread() is threading.main_thread():
            before = {number: signal.signal(number, _interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
        yield
    except KeyboardInterrupt:
        if is_first_process():
            echo(f"Interrupted. {interrupted.format(command=own_command(leave_out='--resume'))}", err=True)
        raise typer.Exit(INTERRUPTED) from None
    except Exception as error:
        if _options["traceback"] or isinstance(error, (typer.Exit, BrokenPipeError)):  # Click ends quietly
            raise
        from resformer.configuration.connection_fields import reason

        echo(f"Error: {one_line(reason(error), 4000)}", err=True)
        if isinstance(error, CheckpointError) and error.option is not None:
            echo(f"Try: {own_command(error.option)}", err=True)
        raise typer.Exit(_exit_code(error)) from None
    finally:
        logging.setLogRecordFactory(logged)
        warnings.formatwarning = shown
        for number, handler in before.items():
            signal.signal(number, handler)


def is_first_process() -> bool:
    """Of those that torchrun or accelerate has started, which would all print the same."""
    return os.environ.get("RANK", "0") == "0"


def _plain_record(record: logging.LogRecord) -> logging.LogRecord:
    """What a library says, for example of a checkpoint's tensors, without control characters and colours."""
    with suppress(TypeError, ValueError):  # the arguments do not fit the message; `logging` reports that
        record.msg, record.args = plain(_COLOURS.sub("", record.getMessage())), ()
    if record.exc_info:
        record.exc_text = plain(logging.Formatter().formatException(record.exc_info))
    return record


def echo(text: object = "", err: bool = False) -> None:
    """Prints a line without control characters: a hostile file name could move the cursor."""
    typer.echo(plain(text), err=err)


def assignments(pairs: list[str]) -> dict[str, Any]:
    """The `name=value` pairs of `--set`; each value goes through `json_or_text`."""
    values = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            raise ValueError(f"--set {pair}: expected name=value.")
        values[name] = json_or_text(value)
    return values


def json_or_text(value: Any) -> Any:
    """Reads a text as JSON if it is JSON: `true`, `[0,0,2,2]`, or 5e-5, which YAML takes for text."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except json.JSONDecodeError:
        return value


def command(
    panel: str,
    example: str,
    interrupted: str = "Nothing was left behind; run the command again.",
    *,
    any_transformers: bool = False,
    **settings: Any,
) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Makes a command of a function, which runs within `reporting_errors`; `settings` are those of `app.command`.

    If the first parameter is a dataclass, what its fields declare with `option` and `argument` stands in its place. A
    field of a mapping takes `name=value` pairs. A generator yields its report: with `--json` that is printed and is
    all, else the generator goes on and prints rows.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., None]:
        own = list(signature(function, eval_str=True).parameters.values())
        options: Any = own.pop(0).annotation if own and is_dataclass(own[0].annotation) else None
        known = () if options is None else fields(options)
        declared = {each.name: each.metadata[TYPED] for each in known if TYPED in each.metadata}
        hints = get_type_hints(options) if declared else {}
        pairs = [name for name in declared if get_origin(hints[name]) is dict]
        hints |= dict.fromkeys(pairs, list[str])
        every = [
            Parameter("context", Parameter.KEYWORD_ONLY, annotation=typer.Context),
            *(Parameter(x, Parameter.KEYWORD_ONLY, default=declared[x], annotation=hints[x]) for x in declared),
            *(each.replace(kind=Parameter.KEYWORD_ONLY) for each in own if each.name != "context"),
        ]
        if isgeneratorfunction(function):
            every.append(Parameter("as_json", Parameter.KEYWORD_ONLY, default=False, annotation=AsJson))

        @wraps(function)
        def run(context: typer.Context, **values: Any) -> None:
            with reporting_errors(interrupted, any_transformers):
                more = {each.name: context if each.name == "context" else values.pop(each.name) for each in own}
                as_json = values.pop("as_json", False)
                for name in pairs:  # those of a file, and of the command line
                    values[name] = assignments([*(context.default_map or {}).get(name, ()), *values[name]])
                try:
                    first = [] if options is None else [options(**values)]
                except ValueError as error:  # it names fields, and a user has typed options
                    raise ValueError(_FIELD.sub(lambda field: _as_typed(field[0], declared), str(error))) from error
                for report in function(*first, **more) or ():
                    if not is_first_process() or print_json(report, as_json):
                        break

        run.__signature__ = Signature(every)  # type: ignore[attr-defined]
        run.__annotations__ = {each.name: each.annotation for each in every}
        return app.command(**listed(panel, example), **settings)(run)

    return decorate


def listed(panel: str, example: str) -> dict[str, Any]:
    """Arguments of `app.command`: where `resformer --help` lists it, and what its own help ends with."""
    return {"rich_help_panel": panel, "epilog": f"\b\nExample:\n  {example}"}


def _as_typed(field: str, declared: Mapping[str, Any]) -> str:
    """How a command line gives a field: `--from`, or `OUTPUT` of an argument; of another one, its name."""
    if isinstance(parameter := declared.get(field), ArgumentInfo):
        return field.upper()
    option = next((name for name in getattr(parameter, "param_decls", None) or () if name.startswith("--")), None)
    return field if parameter is None else (option or f"--{field.replace('_', '-')}").partition("/")[0]


def hand_over(context: typer.Context, module: str) -> None:
    """Runs the command line of a module with the arguments of ours; without any it prints our help before theirs."""
    from importlib import import_module

    if context.args in ([], ["--help"]):
        echo(context.get_help())
        context.args = ["--help"]
    sys.argv = [f"resformer {context.info_name}", *context.args]
    import_module(module).main()


def own_command(*more: str, leave_out: str = "") -> str:
    """The command as the user gave it, without the option `leave_out`, and with further options."""
    return " ".join(["resformer", shlex.join(word for word in sys.argv[1:] if word != leave_out), *more])


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Handles SIGTERM like Ctrl-C: the run cleans up. Later signals are ignored: they would interrupt the clean-up."""
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
    from huggingface_hub.errors import StrictDataclassError

    return USAGE if isinstance(error, (ValueError, typer.BadParameter, StrictDataclassError)) else FAILED


def row(name: str, value: object) -> None:
    echo(f"{name:13} {one_line(value, 4000)}")


def size(count: float) -> str:
    """A number of bytes, from bytes to TB."""
    if count < 1000:
        return f"{count:,.0f} bytes"
    power = next((power for power in (1, 2, 3) if count < 999.95 * 1000**power), 4)
    return f"{count / 1000**power:,.1f} {' kMGT'[power]}B"


def print_json(report: Any, as_json: bool) -> bool:
    """Prints the warnings to stderr and, with `as_json`, the report to stdout; returns `as_json`."""
    for warning in getattr(report, "warnings", ()):
        echo(f"Warning: {one_line(warning, 4000)}", err=True)
    if as_json:
        values = report if isinstance(report, dict) else report.as_dict()
        echo(json.dumps(values, indent=2, sort_keys=values is not report, default=str))
    return as_json
