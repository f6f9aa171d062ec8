"""`resformer shrink`."""

from pathlib import Path
from typing import Annotated

import typer

from resformer.commands.conversion import Durable, Force, Output, Revision, Source, print_result
from resformer.commands.terminal import AsJson, app, print_json, reporting_errors, row


@app.command()
def shrink(
    source: Source,
    output: Output,
    calibrate: Annotated[
        list[str],
        typer.Option(
            metavar="TEXT", help="Text like that the model is used for: a file, folder or Hub id; repeatable."
        ),
    ],
    cache: Annotated[float | None, typer.Option(help="The largest share of the cache to keep, 0.83 for one.")] = None,
    evaluate: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="Text to measure the cost on.  [default: held-out documents of --calibrate]"),
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to calibrate on.")] = 32768,
    block: Annotated[int, typer.Option(min=2, help="Tokens of a sequence.")] = 512,
    plan: Annotated[
        Path | None,
        typer.Option(help="JSON with key_sources and value_sources, of --dry-run --json, instead of --cache."),
    ] = None,
    method: Annotated[str | None, typer.Option(help="svformer, cla2 or fusedkv-lite, instead of --cache.")] = None,
    share: Annotated[
        str, typer.Option(help="any, values (no keys), or both: keys and values of the same layer, which vLLM needs.")
    ] = "any",
    split: Annotated[str, typer.Option(help="Split of a Hub dataset.")] = "train",
    text_column: Annotated[str, typer.Option(help="Column with the text.")] = "text",
    sample_by: Annotated[
        str, typer.Option(help="A document in a text file: the whole file (document), a paragraph, or a line.")
    ] = "document",
    force: Force = False,
    revision: Revision = None,
    durable: Durable = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Search and measure as usual, for minutes, and write nothing.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Make the key/value cache of a checkpoint smaller, without training: layers share keys and values."""
    given = {name: value for name, value in locals().items() if name != "as_json"}  # the arguments of `shrink`
    with reporting_errors():
        from resformer.shrinking.shrink import shrink as shrink_checkpoint

        report = shrink_checkpoint(**{**given, "evaluate": evaluate or ()})
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
        print_result(report, dry_run)
