"""The record of a study, and the report that is made of it alone: rows, with differences paired by seed, and notes.

A record is a file of JSON lines, one that says what is trained on what, then one for each run.
"""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from resformer.errors import CheckpointError, first_names, one_line
from resformer.files import locked, replace_text
from resformer.training.options import KIND_RATES

Study = dict[str, Any]
Run = dict[str, Any]

#: Of finding a difference that is there, at a level of 5 %.
POWER = 0.8


def read_record(path: Path) -> list[tuple[Study, list[Run]]]:
    """Each study of a file, and its runs. A file can hold several: records joined by `cat`.

    Raises:
        CheckpointError: the file, or a line of it, cannot be read.
    """
    studies: list[tuple[Study, list[Run]]] = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: cannot be read ({one_line(error)}).") from error
    for number, line in enumerate(lines, 1):
        try:
            value = json.loads(line)
            if "study" in value:
                studies.append((value["study"], []))
            else:
                studies[-1][1].append(value)
        except (ValueError, TypeError, IndexError) as error:
            told = f"{path}: line {number} is no run of a study ({one_line(error)})"
            raise CheckpointError(f"{told}; remove it to train that run again.") from error
    return studies


def joined(path: Path) -> tuple[Study, dict[tuple[str, str, int], Run]]:
    """The study of a file, and each run by size, method and seed.

    Raises:
        CheckpointError: the file cannot be read, joins studies with other plans, or has two results of a run.
    """
    studies = read_record(path)
    if not studies:
        raise CheckpointError(f"{path}: has no study.")
    first, _ = studies[0]
    runs: dict[tuple[str, str, int], Run] = {}
    for study, of_study in studies:
        if different := sorted(x for x in {*first, *study} - {"command"} if first.get(x) != study.get(x)):
            told = f"{path}: joins studies that differ in {first_names(different)}"
            raise CheckpointError(f"{told}; compare the runs of one plan.")
        for run in of_study:
            key = run["size"], run["method"], run["seed"]
            if runs.setdefault(key, run)["loss"] != run["loss"]:
                raise CheckpointError(f"{path}: has two results of {' '.join(map(str, key))}; remove the line of one.")
    return first, runs


def add_line(path: Path, value: dict[str, Any]) -> None:
    """Appends a study (`{"study": ...}`) or a run. If the process is killed, the file is as it was before."""
    with locked(path.with_name(f".{path.name}.lock"), wait=True):
        before = path.read_text(encoding="utf-8") if path.exists() else ""
        replace_text(path, f"{before}{json.dumps(value, allow_nan=False)}\n")


def report_of(study: Mapping[str, Any], runs: Sequence[Run], baseline: str) -> dict[str, Any]:
    """What is in `study.json`: the study, as its record describes it, and the results of these runs."""
    sizes = rows_of(runs, baseline)
    for row in (row for rows in sizes.values() for row in rows):
        loss = row["loss"]
        size = study["bytes_per_token"]
        row["bits_per_byte"] = loss / math.log(2) / size if size and loss is not None else None
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
            cells += ["diverged" if (loss := row["loss"]) is None else f"{loss:.4f}"]
            cells += ["" if (bits := row["bits_per_byte"]) is None else f"{bits:.4f}"]
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
            notes.append(f"{size}: no loss, since a run diverged: {', '.join(diverged)}.")
    rates = {(run["size"], *map(run.get, ("learning_rate", *KIND_RATES))) for run in runs}
    own = {(run["size"], rate) for run in runs if (rate := run["connection_learning_rate"]) is not None}
    highest = {run["size"]: f"{run['learning_rate']:.2g} ({run['size']})" for run in runs if run["method"] == baseline}
    notes.append(f"The highest learning rate: {', '.join(highest.values())}.")
    if max(len(rates), len(own)) > len(sizes):
        notes.append("The methods have different learning rates: each difference is one of rates, too.")
    return notes


def rows_of(runs: Sequence[Run], baseline: str) -> dict[str, list[dict[str, Any]]]:
    """Size -> a row for each method, in the order of the runs. Every method has the same seeds.

    `loss` is that of the whole held-out text, the mean over the seeds, and `difference` is that of `paired_difference`
    to the baseline, with `holm`, its p-value with Holm's correction for all rows; `None` for the baseline. Where a run
    diverged both are `None`.
    """
    tables: dict[str, list[dict[str, Any]]] = {}
    for size in dict.fromkeys(run["size"] for run in runs):
        by_method: dict[str, list[Run]] = {}
        for run in sorted(runs, key=lambda run: run["seed"]):
            if run["size"] == size:
                by_method.setdefault(run["method"], []).append(run)
        losses = {method: [run["loss"] for run in of_method] for method, of_method in by_method.items()}
        seeds = {method: [run["seed"] for run in of_method] for method, of_method in by_method.items()}
        for method, of_method in seeds.items():
            if of_method != [*dict.fromkeys(seeds[baseline])]:
                told = f"{size}: {method} has the seeds {of_method}, {baseline} {seeds[baseline]}"
                raise CheckpointError(f"{told}; each needs one run of every seed.")
        base = by_method[baseline][0]
        tables[size] = [
            {
                "method": method,
                "seeds": [run["seed"] for run in of_method],
                "losses": losses[method],
                "loss": None if None in losses[method] else statistics.fmean(losses[method]),
                "difference": None if method == baseline else paired_difference(losses[method], losses[baseline]),
                "relative_flops": of_method[0]["training_flops"] / base["training_flops"],
                **{name: of_method[0][name] for name in ("architecture", "parameters", "cache_bytes_per_token")},
            }
            for method, of_method in by_method.items()
        ]
        correct([row["difference"] for row in tables[size] if row["difference"]])
    return tables


def paired_difference(losses: Sequence[float | None], baseline: Sequence[float | None]) -> dict[str, Any] | None:
    """Losses minus those of the same seeds: `values`, `mean`, and `low` and `high`, the 95 % interval of a paired
    t-test, its `p` and what is `detectable`; these are `None` for one seed, or equal values. `None` if a run diverged.
    """
    pairs = zip(losses, baseline, strict=True)
    values = [loss - base for loss, base in pairs if loss is not None and base is not None]
    if len(values) < len(losses):
        return None
    unknown = dict.fromkeys(("low", "high", "p", "detectable"))
    difference: dict[str, Any] = {"mean": statistics.fmean(values), "values": values, **unknown}
    if len(set(values)) > 1:
        from scipy import stats

        test = stats.ttest_1samp(values, 0.0)
        low, high = test.confidence_interval(0.95)
        seen = detectable(statistics.stdev(values), len(values))
        difference |= {"low": float(low), "high": float(high), "p": float(test.pvalue), "detectable": seen}
    return difference


def detectable(deviation: float, count: int) -> float:
    """The smallest true difference that a paired t-test finds with a probability of `POWER`, at a level of 5 %.

    Of `count` differences with this standard deviation. A mean on the other side of 0 is left out.
    """
    from scipy import special, stats

    critical = stats.t.ppf(0.975, count - 1)
    return float(special.nctdtrinc(count - 1, 1 - POWER, critical)) * deviation / count**0.5


def correct(tests: Sequence[dict[str, Any]]) -> None:
    """Adds to each test `holm`, its p-value with Holm's correction for all of them (1979)."""
    largest, tested = 0.0, sorted((test for test in tests if test["p"] is not None), key=lambda test: test["p"])
    for test in tests:
        test["holm"] = None
    for place, test in enumerate(tested):
        test["holm"] = largest = max(largest, min(1.0, (len(tested) - place) * test["p"]))
