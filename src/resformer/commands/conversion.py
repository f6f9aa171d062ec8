"""`resformer convert`, `revert`, `bundle`, `shrink`, `verify` and `inspect`."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from resformer.commands.terminal import (
    VERIFICATION_FAILED,
    AsJson,
    app,
    assignments,
    echo,
    own_command,
    print_json,
    reporting_errors,
    row,
    size,
    takes,
)
from resformer.shrinking.options import ShrinkOptions

Source = Annotated[str, typer.Argument(help="A checkpoint folder, a .gguf file, or a Hub id.")]
Output = Annotated[Path, typer.Argument(help="The folder to write; new or empty.")]
Force = Annotated[bool, typer.Option("--force", help="Replace an earlier result.")]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a Hub id.")]
Durable = Annotated[bool, typer.Option("--durable", help="Wait until the disk has all of it, against power failures.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Check everything, say what would be done, write nothing.")]


_Verify = Annotated[
    Literal["auto", "headers", "hashes", "logits"],
    typer.Option(
        help="How the result is checked: names and shapes read back; every byte too; logits too. auto: logits where "
        "the model fits into free memory."
    ),
]


@dataclass(frozen=True)
class Writing:
    """The options of all commands that write a converted checkpoint; `resformer.retrofit` says what each does."""

    force: Force = False
    revision: Revision = None
    link: Annotated[
        bool, typer.Option("--link", help="Hard-link weight files that do not change: instant, but edits reach both.")
    ] = False
    verify: _Verify = "auto"
    durable: Durable = False
    max_shard_size: Annotated[str | None, typer.Option(help="Split weight files that are larger, for example 5GB.")] = (
        None
    )
    dry_run: DryRun = False


@app.command()
@takes(Writing)
def convert(
    writing: Writing,
    source: Source,
    output: Annotated[Path | None, typer.Argument(help="The folder to write; new or empty.")] = None,
    push: Annotated[
        str | None,
        typer.Option(metavar="OWNER/NAME", help="Make the result on the Hub instead: weights are copied there."),
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="With --push: make the repository private.")] = False,
    accept_license: Annotated[
        bool,
        typer.Option("--accept-license", help="With --push: you accepted the source's license, and it allows a copy."),
    ] = False,
    method: Annotated[str, typer.Option(help="Name of a method; `resformer methods` lists them.")] = "resformer",
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="FIELD=VALUE", help="A connection field on top of the method's; repeatable."),
    ] = None,
    lossy: Annotated[bool, typer.Option("--lossy", help="Allow methods that change what the model computes.")] = False,
    dtype: Annotated[str, typer.Option(help="Convert the weights: float32, bfloat16, float16.")] = "auto",
    allow_pickle: Annotated[
        bool, typer.Option("--allow-pickle", help="Read pytorch_model*.bin where there are no safetensors.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Retrofit a Llama-style checkpoint with cross-layer connections, its logits unchanged."""
    on_hub = () if push is None else (f"{push} may exist, empty or complete. See: resformer inspect {push}",)
    with reporting_errors(*on_hub):
        from resformer.convert import retrofit

        report = retrofit(
            source,
            output,
            method,
            push_to=push,
            private=private,
            accept_license=accept_license,
            lossy=lossy,
            dtype=dtype,
            allow_pickle=allow_pickle,
            **vars(writing),
            **assignments(set_ or []),
        )
        if print_json(report, as_json):
            return
        added = sum(report.added.values())
        dequantised = " dequantised" if report.dequantised else ""
        row("source", f"{report.source} ({report.family}, {report.source_dtype}{dequantised})")
        row("method", f"{report.method or 'without a name'} {json.dumps(report.fields)}")
        if report.source_fields:
            row("as they were", json.dumps(report.source_fields))
        row("parameters", f"{report.parameters:,}: {added:,} added in {len(report.added)} tensors")
        row("tensors", f"{report.kept} kept, {len(report.added)} new, {len(report.dropped)} dropped")
        if report.rounding.changed or report.dtype != report.source_dtype:
            counts, changed = report.rounding, ""
            if not writing.dry_run:
                changed = f": {counts.changed:,} numbers rounded"
            if counts.overflowed or counts.flushed:
                changed += f", {counts.overflowed:,} became infinite, {counts.flushed:,} became 0"
            row("dtype", f"{report.source_dtype} to {report.dtype}{changed}")
        for reason in report.inexact_because:
            row("lossy", reason)
        if report.terms:
            row("terms", ", ".join(f"{name} {value}" for name, value in report.terms.items()) + ", as the source's")
        if writing.dry_run:
            row("memory", f"{size(report.memory)} to compare logits, little else")
        print_result(report, writing.dry_run)


@app.command()
@takes(Writing)
def revert(
    writing: Writing,
    source: Annotated[str, typer.Argument(help="A ResFormer checkpoint: a folder or a Hub id.")],
    output: Output,
    all_: Annotated[bool, typer.Option("--all", help="Take out all connections, not only the last added.")] = False,
    as_json: AsJson = False,
) -> None:
    """Take out connections that have learned nothing, every other tensor byte for byte."""
    from resformer.convert import revert as revert_checkpoint

    report = revert_checkpoint(source, output, all=all_, **vars(writing))
    if print_json(report, as_json):
        return
    row("source", report.source)
    row("family", report.family)
    if report.remaining:
        row("remaining", json.dumps(report.remaining))
    row("tensors", f"{report.kept} kept, {len(report.removed)} removed")
    print_result(report, writing.dry_run)


@app.command()
@takes(Writing)
def bundle(
    writing: Writing,
    source: Annotated[str, typer.Argument(help="A ResFormer checkpoint: a folder or a Hub id.")],
    output: Output,
    as_json: AsJson = False,
) -> None:
    """Put the code beside a checkpoint, so that it loads with trust_remote_code where resformer is not installed."""
    from resformer.convert import bundle as bundle_checkpoint

    report = bundle_checkpoint(source, output, **vars(writing))
    if print_json(report, as_json):
        return
    row("source", report.source)
    row("code", ", ".join(f"{name} ({size(count)})" for name, count in report.code.items()))
    row("loads with", ", ".join(report.auto_map))
    print_result(report, writing.dry_run)


@app.command()
@takes(ShrinkOptions)
def shrink(options: ShrinkOptions, source: Source, output: Output, as_json: AsJson = False) -> None:
    """Make the key/value cache of a checkpoint smaller, without training: layers share keys and values."""
    from resformer.shrinking.shrink import shrink as shrink_checkpoint

    report = shrink_checkpoint(source, output, **vars(options))
    if print_json(report, as_json):
        return
    cost = report.summary
    row("source", f"{report.source} ({report.family}, {report.source_dtype})")
    row("cache", f"{report.cache:.1%} of the source's: {cost.bytes_per_token:,} bytes a token")
    row("calibrated", f"on {report.calibration['tokens']:,} tokens; {report.refitted} tensors changed")
    for note in report.calibration["notes"]:
        row("text", note)
    for reader in report.shares:
        n = reader["layer"]
        read = [f"{kind} of {reader[f'{kind}_of']}" for kind in ("keys", "values") if reader[f"{kind}_of"] != n]
        row(f"layer {n}", f"{' and '.join(read)}, error {reader['output_error']:.1%}")
    row("loss", f"{cost.source_loss:.4f} to {cost.loss:.4f} nats a token, on {cost.tokens:,} held-out tokens")
    row("divergence", f"{cost.kl_mean:.4f} nats a token, 95th percentile {cost.kl_p95:.3f}")
    row("top-1", f"{cost.top1_agreement:.1%} agree")
    equal = f"{cost.greedy_median:.0f} of {cost.greedy_limit} tokens (median of {cost.greedy_prompts})"
    row("greedy text", f"equal for {equal}")
    if cost.last_words:
        accuracies = f"{cost.source_last_word_accuracy:.1%} to {cost.last_word_accuracy:.1%}"
        low, high = cost.intervals["last_word_accuracy"]
        row("last words", f"{accuracies} right, of {cost.last_words} (95 %: {low:.1%} to {high:.1%})")
    for asked in cost.passkey or ():
        row("passkey", f"{asked['length']:,} tokens: {asked['source']:.0%} to {asked['result']:.0%}")
    print_result(report, options.dry_run)


@app.command()
def verify(
    one: Annotated[str, typer.Argument(help="A checkpoint folder, a .gguf file, or a Hub id.")],
    other: Annotated[str, typer.Argument(help="Another one, its retrofit for example.")],
    verify: _Verify = "auto",
    tokens: Annotated[int, typer.Option(help="At which logits are compared.")] = 128,
    text: Annotated[Path | None, typer.Option(help="Compare logits on this text. [default: random tokens]")] = None,
    device: Annotated[str | None, typer.Option(help="Where the models run: cuda. [default: cpu]")] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of ONE.")] = None,
    other_revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of OTHER.")] = None,
    as_json: AsJson = False,
) -> None:
    """Compare two models: configurations, tensors, logits. Exit code 0 if they are the same, else 4."""
    given = {name: value for name, value in locals().items() if name != "as_json"}  # the arguments of `verify`
    with reporting_errors():
        from resformer.convert import verify as compare

        result = compare(**given)
        if as_json:
            echo(json.dumps(result.as_dict(), indent=2, sort_keys=True))
        else:
            what = "same byte for byte" if result.bytes_compared else "of the same dtype and shape"
            row("tensors", f"{result.identical} {what}, {len(result.different)} different")
            for name, difference in result.different.items():
                how = "dtypes or shapes differ" if difference is None else f"by up to {difference:.3g}"
                row("", f"{name}: {how}")
            row("only in one", ", ".join(result.only_in_one) or "-")
            row("only in other", ", ".join(result.only_in_other) or "-")
            pairs = [
                f"{name} ({first} / {second}{', without effect' if name in result.without_effect else ''})"
                for name, (first, second) in result.configuration.items()
            ]
            row("configuration", f"differs in {', '.join(pairs)}" if pairs else "same")
            if result.logits is not None:
                row("logits", result.logits)
                of_one, of_other = result.logits.cache_differences
                row("with a cache", f"up to {of_one:.3g} / {of_other:.3g} from the logits without")
            row("not compared", ", ".join(result.not_compared) or "-")
            row("same", {True: "yes", False: "no", None: "not known, see `not compared`"}[result.same])
        if not result.same:
            raise typer.Exit(VERIFICATION_FAILED)


@app.command()
def inspect(source: Source, revision: Revision = None, as_json: AsJson = False) -> None:
    """Print what a checkpoint holds: family, method, mixing matrices, sizes, cache bytes per token."""
    with reporting_errors():
        from resformer.convert import inspect as inspect_checkpoint

        report = inspect_checkpoint(source, revision=revision)
        if print_json(report, as_json):
            return
        row("source", report.source)
        head = "" if report.head is None else f", {report.head} of {report.labels} labels"
        row("model", f"{report.model_type}, backbone of {report.family or 'no family'}{head}")
        row("method", f"{report.method or 'without a name'} {json.dumps(report.fields)}")
        row("files", f"{report.files}, {size(report.bytes)}")
        dtypes = ", ".join(f"{count:,} {dtype}" for dtype, count in report.dtypes.items())
        row("parameters", f"{report.parameters:,} ({dtypes})")
        for name, shape in report.added.items():
            row("", f"{name} {shape}")
        heads = f"{report.attention_heads} heads, {report.key_value_heads} for keys and values, of {report.head_dim}"
        tied = ", tied" if report.tied else ""
        row("shape", f"{report.layers} layers, {report.hidden_size} wide, {heads}, {report.vocab_size:,} tokens{tied}")
        row("cache", f"{report.cache_bytes_per_token:,} bytes a token, {report.cache_share:.0%} of the full one")
        _print_matrix("M, values", report.value_mixing_matrix, shift=0)
        _print_matrix("D, depth", report.depth_mixing_matrix, shift=1)


def print_result(report: Any, dry_run: bool) -> None:
    moved = ", ".join(f"{size(count)} {how.replace('_', ' ')}" for how, count in vars(report.transfer).items() if count)
    row("files", f"{report.carried_files} carried over whole, {report.written_files} written: {moved}")
    if report.left_behind:
        row("left behind", ", ".join(report.left_behind))
    if dry_run:
        row("would write", report.output)
        row("do it", own_command(leave_out="--dry-run"))
        return
    levels = {"headers": "headers", "copies": "headers, hashes of all files"}
    logits = f", logits {report.logits}" if report.logits is not None else ""
    row("verified", levels.get(report.verified, "headers, bytes") + logits)
    row("wrote", report.output)
    if report.url is not None:
        echo(report.url)


def _print_matrix(name: str, matrix: list[list[float]] | None, shift: int) -> None:
    """The rows that are not plain Llama's, each with its coefficients."""
    if matrix is None:
        row(name, "plain Llama")
        return
    for n, entries in enumerate(matrix):
        plain = [float(m == n + shift) for m in range(len(entries))]
        if entries != plain:
            shown = [f"[{m}]={entry:.4g}".replace("nan", "gate") for m, entry in enumerate(entries) if entry != 0]
            row(name, f"row {n}: {' '.join(shown)}")
            name = ""
