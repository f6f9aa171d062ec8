"""The results of a study: differences from the baseline, paired by seed, and what could have been seen."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from resformer.errors import CheckpointError

Run = Mapping[str, Any]

#: Of finding a difference that is there, at a level of 5 %.
POWER = 0.8


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
