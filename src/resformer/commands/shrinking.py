"""`resformer shrink`."""

from resformer.commands.conversion import Output, Source, print_result
from resformer.commands.terminal import AsJson, app, print_json, row, takes
from resformer.shrinking.options import ShrinkOptions


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
