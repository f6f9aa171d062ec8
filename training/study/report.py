"""The report of a study, made of its record alone: rows and notes."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from resformer.training.options import KIND_RATES
from resformer.training.study.table import POWER, Run, rows_of


def report_of(study: Mapping[str, Any], runs: Sequence[Run], baseline: str) -> dict[str, Any]:
    """What is in `study.json`: the study, as its record describes it, and the results of these runs."""
    sizes = rows_of(runs, baseline)
    for row in (row for rows in sizes.values() for row in rows):
        loss = row["loss"]
        row["bits_per_byte"] = None if loss is None else loss / math.log(2) / study["bytes_per_token"]
    environments = {json.dumps(run["environment"]): run["environment"] for run in runs}
    return {
        **study,
        "sizes": sizes,
        "baseline": baseline,
        "notes": _notes(study, runs, sizes, baseline),
        "environments": [*environments.values()],
    }


def markdown(report: Mapping[str, Any]) -> str:
    """The tables of a report, one a size."""
    titles = ["method", "loss", "bits/byte", "Δ [95 %]", "p", "detectable", "parameters", "FLOPs", "cache/token"]
    lines = []
    for size, rows in report["sizes"].items():
        seeds = len(rows[0]["seeds"])
        lines += ["", f"**{size}**, {seeds} seed{'s' * (seeds > 1)}", ""]
        lines += [f"| {' | '.join(titles)} |", f"|{'---|' * len(titles)}"]
        for row in rows:
            cells = [row["method"]]
            cells += ["diverged", ""] if row["loss"] is None else [f"{row['loss']:.4f}", f"{row['bits_per_byte']:.4f}"]
            cells += [with_interval(row["difference"]), *evidence(row["difference"])]
            cells += [f"{row['parameters']:,}", f"{row['relative_flops']:.3f}"]
            cells += ["not known" if (count := row["cache_bytes_per_token"]) is None else f"{count:,} B"]
            lines.append(f"| {' | '.join(cells)} |")
    lines += ["", *report["notes"]]
    return "\n".join(lines[1:])


def with_interval(difference: Mapping[str, Any] | None) -> str:
    """A difference and its interval."""
    if difference is None:
        return ""
    interval = "" if difference["low"] is None else f" [{difference['low']:+.4f}, {difference['high']:+.4f}]"
    return f"{difference['mean']:+.4f}{interval}"


def evidence(difference: Mapping[str, Any] | None) -> list[str]:
    """The corrected p-value of a difference, and the smallest one that could be seen."""
    if difference is None or difference["p"] is None:
        return ["", ""]
    holm = "<0.001" if difference["holm"] < 0.001 else f"{difference['holm']:.3f}"
    return [holm, f"{difference['detectable']:.4f}"]


def _notes(
    study: Mapping[str, Any], runs: Sequence[Run], sizes: Mapping[str, Sequence[Mapping[str, Any]]], baseline: str
) -> list[str]:
    base = {"batch": study["batch"], **next(run for run in runs if run["method"] == baseline)}
    notes = [
        f"Loss: nats per token after {base['steps']:,} steps of {base['batch']} x {study['block']} tokens (or the "
        f"method's or size's own), on {runs[0]['held_out']['tokens']:,} held-out tokens of "
        f"{study['data']['held_out_documents']:,} documents. Δ: loss minus that of {baseline}, the mean of the seeds. "
        f"FLOPs: relative to {baseline}'s."
    ]
    if len(next(iter(sizes.values()))[0]["seeds"]) == 1:
        notes.append("One seed: no interval.")
    else:
        notes.append(
            "[95 %], p: each method's own paired t-test over seeds, p with Holm's correction for all methods. "
            f"detectable: the smallest true difference that so many seeds find with {100 * POWER:.0f} % power, before "
            "the correction. An interval that holds 0 and a difference of interest says: cannot tell."
        )
    for size, rows in sizes.items():
        if diverged := [row["method"] for row in rows if row["loss"] is None]:
            notes.append(f"{size}: no differences, since a run diverged: {', '.join(diverged)}.")
    rates = {(run["size"], *map(run.get, ("learning_rate", *KIND_RATES))) for run in runs}
    own = {(run["size"], rate) for run in runs if (rate := run["connection_learning_rate"]) is not None}
    highest = {run["size"]: f"{run['learning_rate']:.2g} ({run['size']})" for run in runs if run["method"] == baseline}
    notes.append(f"The highest learning rate: {', '.join(highest.values())}.")
    if max(len(rates), len(own)) > len(sizes):
        notes.append("The methods have different learning rates: each difference is one of rates, too.")
    return notes
