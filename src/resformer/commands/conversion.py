"""`resformer convert`, `revert`, `bundle`, `verify` and `inspect`."""

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from resformer.commands.terminal import (
    CONNECT,
    SHARE,
    VERIFICATION_FAILED,
    AsJson,
    command,
    own_command,
    print_json,
    row,
    size,
)
from resformer.own_files import method_named
from resformer.training.options import option

Source = Annotated[str, typer.Argument(help="A checkpoint folder or a Hub id.")]
Output = Annotated[Path, typer.Argument(help="The folder to write; new or empty.")]
Verify = Literal["auto", "headers", "hashes", "logits"]

_REVISION = "Branch, tag or commit of a Hub id."
_SET = "A connection field on top of the method's, or a constant of a nanochat run; repeatable."
_VERIFY = (
    "How the result is checked: names and shapes read back; every byte too; logits too. auto: logits where the model "
    "fits into free memory."
)
DRY_RUN = "Check everything, say what would be done, write nothing."


@dataclass(frozen=True)
class Writing:
    """The options of all commands that write a converted checkpoint; `resformer.retrofit` says what each does."""

    force: bool = option(False, "Replace an earlier result.", "--force")
    revision: str | None = option(None, _REVISION)
    link: bool = option(
        False, "Hard-link weight files: instant, but edits reach both, and of a Hub id its cache.", "--link"
    )
    verify: Verify = option("auto", _VERIFY)
    dry_run: bool = option(False, DRY_RUN, "--dry-run")


@dataclass(frozen=True)
class Converting(Writing):
    """The options of `convert`."""

    method: str = option("resformer", "Name of a method; `resformer methods` lists them. Or FILE.py:NAME.")
    fields: dict[str, Any] = option({}, _SET, "--set", metavar="FIELD=VALUE")
    lossy: bool = option(False, "Allow methods that change what the model computes.", "--lossy")
    dtype: str | None = option(None, None, hidden=True)  # `retrofit` says how Transformers does that, and the next
    max_shard_size: str | None = option(None, None, hidden=True)


@command(CONNECT, "resformer convert HuggingFaceTB/SmolLM2-135M smollm2-resformer --method resformer")
def convert(options: Converting, source: Source, output: Output) -> Iterator[Any]:
    """Add connections to a trained model, or take a nanochat run.

    Logits stay the source's. Methods that change them need --lossy.
    """
    from resformer.convert import retrofit
    from resformer.convert.nanochat import is_run

    if is_run(source, options.revision):
        useless = {"lossy": options.lossy, "method": options.method != "resformer"}
        useless |= {"link": options.link, "verify": options.verify != "auto"}
        if asked := [f"--{name}" for name, value in useless.items() if value]:
            raise ValueError(f"{', '.join(asked)}: a nanochat run is converted as it is, into one file of a folder.")
        yield from _convert_nanochat(source, output, options)
        return
    given = {name: value for name, value in vars(options).items() if value is not None and name != "fields"}
    report = retrofit(source, output, **{**given, "method": method_named(options.method)}, **options.fields)
    yield report
    added = sum(report.added.values())
    row("source", f"{report.source} ({report.family}, {report.dtype})")
    row("method", f"{report.method or 'without a name'} {json.dumps(report.fields)}")
    if report.source_fields:
        row("as they were", json.dumps(report.source_fields))
    row("parameters", f"{report.parameters:,}, of which {added:,} are added")
    row("tensors", f"{report.kept} kept, {len(report.added)} new, {len(report.dropped)} dropped")
    for reason in report.inexact_because:
        row("lossy", reason)
    if options.dry_run:
        row("memory", f"{size(report.memory)} to compare logits, little else")
    print_result(report, options.dry_run)


def _convert_nanochat(run: str, output: Path, options: Converting) -> Iterator[Any]:
    from resformer.convert.nanochat import convert_nanochat

    taken = {name: getattr(options, name) for name in ("force", "dry_run", "revision")}
    report = convert_nanochat(run, output, **taken, **options.fields)
    yield report
    row("source", f"{report.source} ({report.weights}, era {report.era} of nanochat)")
    row("constants", ", ".join(f"{name}={value}" for name, value in report.constants.items()) + "; other: --set")
    row("method", f"{report.method or 'without a name'} {json.dumps(report.fields)}")
    row("parameters", f"{report.parameters:,} in {report.dtype}")
    row("tokenizer", f"{report.tokens:,} tokens, {report.bos} first, {'a' if report.chat else 'no'} chat template")
    for warning in report.warnings:
        row("warning", warning)
    row("would write" if options.dry_run else "wrote", report.output)


@command(CONNECT, "resformer revert smollm2-resformer smollm2-again")
def revert(
    writing: Writing,
    source: Annotated[str, typer.Argument(help="A ResFormer checkpoint: a folder or a Hub id.")],
    output: Output,
    all_: Annotated[bool, typer.Option("--all", help="Take out all connections, not only the last added.")] = False,
) -> Iterator[Any]:
    """Take out connections that have learned nothing.

    Every other tensor is the source's, byte for byte.
    """
    from resformer.convert import revert as revert_checkpoint

    report = revert_checkpoint(source, output, all=all_, **vars(writing))
    yield report
    row("source", report.source)
    row("family", report.family)
    if report.remaining:
        row("remaining", json.dumps(report.remaining))
    row("tensors", f"{report.kept} kept, {len(report.removed)} removed")
    print_result(report, writing.dry_run)


@command(SHARE, "resformer bundle smollm2-resformer smollm2-bundle")
def bundle(
    writing: Writing,
    source: Annotated[str, typer.Argument(help="A ResFormer checkpoint: a folder or a Hub id.")],
    output: Output,
) -> Iterator[Any]:
    """Add the code that loads a checkpoint without this package.

    It then loads with trust_remote_code=True.
    """
    from resformer.convert import bundle as bundle_checkpoint

    report = bundle_checkpoint(source, output, **vars(writing))
    yield report
    row("source", report.source)
    row("code", ", ".join(f"{name} ({size(count)})" for name, count in report.code.items()))
    row("loads with", ", ".join(report.auto_map))
    print_result(report, writing.dry_run)


@command(CONNECT, "resformer verify HuggingFaceTB/SmolLM2-135M smollm2-resformer")
def verify(
    one: Annotated[str, typer.Argument(help="A checkpoint folder or a Hub id.")],
    other: Annotated[str, typer.Argument(help="Another one, its retrofit for example.")],
    verify: Annotated[Verify, typer.Option(help=_VERIFY)] = "auto",
    tokens: Annotated[int, typer.Option(help="At which logits are compared.")] = 128,
    text: Annotated[Path | None, typer.Option(help="Compare logits on this text. [default: random tokens]")] = None,
    device: Annotated[str | None, typer.Option(help="Where the models run: cuda. [default: cpu]")] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of ONE.")] = None,
    other_revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of OTHER.")] = None,
    as_json: AsJson = False,
) -> None:
    """Compare two models: configurations, tensors, tokens, logits.

    Exit code 0 if they are the same, else 4.
    """
    given = {name: value for name, value in locals().items() if name != "as_json"}  # the arguments of `verify`
    from resformer.convert import verify as compare

    result = compare(**given)
    if not print_json(result, as_json):
        _print_comparison(result)
    if not result.same:
        raise typer.Exit(VERIFICATION_FAILED)


@command(CONNECT, "resformer inspect smollm2-resformer")
def inspect(source: Source, revision: Annotated[str | None, typer.Option(help=_REVISION)] = None) -> Iterator[Any]:
    """Print what a checkpoint holds: method, coefficients, sizes."""
    from resformer.convert import inspect as inspect_checkpoint

    report = inspect_checkpoint(source, revision=revision)
    yield report
    row("source", report.source)
    head = "" if report.head is None else f", {report.head} of {report.labels} labels"
    row("model", f"{report.model_type}, of the family {report.family}{head}")
    row("method", f"{report.method or 'without a name'} {json.dumps(report.fields)}")
    if report.needs:
        at = f" at {report.needs.revision}" if report.needs.revision else ""
        row("needs", f"the weights of {report.needs.base or 'a model without a name'}{at}: they are not here")
        if report.needs.changed:
            row("", "and those that they were trained with are others, which are lost")
    row("files", f"{report.files}, {size(report.bytes)}")
    dtypes = ", ".join(f"{count:,} {dtype}" for dtype, count in report.dtypes.items())
    row("parameters", f"{report.parameters:,} ({dtypes})")
    for name in _of_all_layers(report.added):
        row("added", name)
    heads = f"{report.attention_heads} heads, {report.key_value_heads} for keys and values, of {report.head_dim}"
    vocabulary = f"vocabulary of {report.vocab_size:,}{', tied' if report.tied else ''}"
    row("shape", f"{report.layers} layers, {report.hidden_size} wide, {heads}, {vocabulary}")
    if report.cache_bytes_per_token is not None:
        row("cache", f"{report.cache_bytes_per_token:,} bytes a token, {report.cache_share:.0%} of the full one")
    others = {kind: far for kind, far in report.learned.items() if kind not in ("value_residual", "depth_average")}
    for kind, distance in others.items():
        row("learned", f"{kind}, up to {distance:.4g} from no effect" if distance else f"{kind}, nothing yet")
    for name, matrix in (("M, values", report.value_mixing_matrix), ("D, depth", report.depth_mixing_matrix)):
        if matrix or not others:
            _print_matrix(name, matrix, int(name[0] == "D"))


def _print_comparison(result: Any) -> None:
    what = "same byte for byte" if result.bytes_compared else "of the same dtype and shape"
    row("tensors", f"{result.identical} {what}, {len(result.different)} different")
    for name, difference in result.different.items():
        how = "dtypes or shapes differ" if difference is None else f"by up to {difference:.3g}"
        row("", f"{name}: {how}")
    row("only in one", ", ".join(_of_all_layers(result.only_in_one)) or "-")
    row("only in other", ", ".join(_of_all_layers(result.only_in_other)) or "-")
    pairs = [
        f"{name} ({first} / {second}{', without effect' if name in result.without_effect else ''})"
        for name, (first, second) in result.configuration.items()
    ]
    row("configuration", f"differs in {', '.join(pairs)}" if pairs else "same")
    if result.tokens is not None:
        row("tokens", result.tokens)
    if result.logits is not None:
        row("logits", result.logits)
    row("not compared", ", ".join(result.not_compared) or "-")
    row("same", {True: "yes", False: "no", None: "not known, see `not compared`"}[result.same])


def _of_all_layers(names: Iterable[str]) -> list[str]:
    """The names, those that differ in the layer alone as one."""
    counts = Counter(re.sub(r"\.\d+\.", ".*.", name) for name in names)
    return [f"{name} ({count})" if "*" in name else name for name, count in counts.items()]


def print_result(report: Any, dry_run: bool) -> None:
    moved = ", ".join(f"{size(count)} {how.replace('_', ' ')}" for how, count in vars(report.transfer).items() if count)
    row("files", f"{report.carried_files} carried over whole, {report.written_files} written: {moved}")
    if report.left_behind:
        row("left behind", ", ".join(report.left_behind))
    if dry_run:
        row("would write", report.output)
        row("do it", own_command(leave_out="--dry-run"))
        return
    logits = f", logits {report.logits}" if report.logits is not None else ""
    tokens = f", tokens {report.tokens}" if report.tokens is not None else ""
    row("verified", ("headers" if report.verified == "headers" else "headers, bytes") + tokens + logits)
    row("wrote", report.output)


def _print_matrix(name: str, matrix: list[list[float]] | None, shift: int) -> None:
    """How far it is from plain Llama's."""
    rows = {} if matrix is None else {n: {m: x for m, x in enumerate(entries) if x} for n, entries in enumerate(matrix)}
    rows = {n: entries for n, entries in rows.items() if entries != {n + shift: 1.0}}
    if not rows:
        row(name, "plain Llama")
    elif any(math.isnan(x) for entries in rows.values() for x in entries.values()):
        row(name, f"{len(rows)} rows with gates that depend on the token; --json has all")
    else:
        distances = {(n, m): x - (m == n + shift) for n, entries in rows.items() for m, x in entries.items()}
        n, m = max(distances, key=lambda place: abs(distances[place]))
        row(name, f"{len(rows)} rows are not Llama's, [{n}, {m}] the furthest: {rows[n][m]:.4g}; --json has all")
