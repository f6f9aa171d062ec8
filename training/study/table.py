"""The results of a study: differences to the baseline, their intervals over seeds and documents, a table a size."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

Run = Mapping[str, Any]


@dataclass(frozen=True)
class PooledError:
    """The error of differences between the means of methods that were trained with the same seeds."""

    comparisons: int
    degrees_of_freedom: int
    standard_error: float

    @property
    def half_width(self) -> float:
        """Of the 95 % intervals of all differences to one baseline together."""
        return dunnett_critical_value(self.comparisons, self.degrees_of_freedom) * self.standard_error


@lru_cache
def dunnett_critical_value(comparisons: int, degrees_of_freedom: int) -> float:
    """The standard errors that no difference to one baseline exceeds with probability 0.95, two-sided (Dunnett 1955).

    Differences of equally many values have a correlation of 1/2.
    """
    from scipy import optimize, stats

    if comparisons == 1:
        return float(stats.t.ppf(0.975, degrees_of_freedom))
    correlation = 0.5 * np.eye(comparisons) + 0.5

    def excess(value: float) -> float:
        limits = np.full(comparisons, value)
        within = stats.multivariate_t.cdf(
            limits, shape=correlation, df=degrees_of_freedom, lower_limit=-limits, maxpts=100_000, random_state=0
        )
        return float(within) - 0.95

    one, bonferroni = stats.t.ppf(1 - 0.025 / np.array([1, comparisons]), degrees_of_freedom)
    return float(optimize.brentq(excess, one, bonferroni, xtol=1e-6))


def pooled_error(losses: Mapping[str, Sequence[float | None]]) -> PooledError | None:
    """The error of the two-way layout method x seed: the mean square of what neither method nor seed explains.

    Args:
        losses: method -> the loss of each seed. Methods with a loss of `None` are left out.

    Returns:
        `None` for one seed, or less than two methods.
    """
    values = np.array([of_method for of_method in losses.values() if None not in of_method], dtype=float)
    methods, seeds = values.shape if values.size else (0, 0)
    if methods < 2 or seeds < 2:
        return None
    residuals = values - values.mean(axis=0) - values.mean(axis=1, keepdims=True) + values.mean()
    degrees = (methods - 1) * (seeds - 1)
    return PooledError(methods - 1, degrees, math.sqrt(2 / seeds * float((residuals**2).sum()) / degrees))


def for_choices(tokens: Sequence[int], groups: Sequence[str] | None) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Whether each held-out document serves choices, such as that of a learning rate, and not reports.

    From the largest group to the smallest, or from the longest document if there are no groups, every second one does,
    the first included. With one group all documents serve reports.
    """
    numbers = np.arange(len(tokens)) if groups is None else np.unique(groups, return_inverse=True)[1]
    sizes = np.bincount(numbers, tokens)
    order = np.argsort(-sizes, kind="stable")
    return np.isin(numbers, order[::2] if len(order) > 1 else [])


def losses_of(run: Run, groups: Sequence[str] | None) -> tuple[float | None, float | None]:
    """The losses on the held-out documents of choices and on those of reports; `None` if there are none, or of a run
    that diverged."""
    documents = run["held_out"]["documents"]
    if documents is None:
        return None, None
    tokens, nats = np.array(documents).T
    chosen = for_choices(tokens, groups)
    choices, reports = (
        float(nats[part].sum() / tokens[part].sum()) if part.any() else None for part in (chosen, ~chosen)
    )
    return choices, reports


def rows_of(runs: Sequence[Run], baseline: str, groups: Sequence[str] | None = None) -> dict[str, list[dict[str, Any]]]:
    """Size -> a row for each method, in the order of the runs. Every method has the same seeds.

    `loss` is that of the documents of reports, see `for_choices`. `difference` is this minus the baseline's of the same
    seed: its mean over the seeds; `low` and `high`, the simultaneous 95 % interval by `pooled_error`; `own`, the 95 %
    interval of a paired t-test of these differences alone, its p-value and that with Holm's correction for all rows.
    `over_documents` is the 95 % interval of the same mean if the documents are drawn anew, by the percentiles of a
    bootstrap; those of one of `groups` are drawn together. `None` are both for the baseline, and where a loss is not
    finite; intervals over seeds with one seed.
    """
    tables: dict[str, list[dict[str, Any]]] = {}
    for size in dict.fromkeys(run["size"] for run in runs):
        by_method: dict[str, list[Run]] = {}
        for run in runs:
            if run["size"] == size:
                by_method.setdefault(run["method"], []).append(run)
        parts = {method: [losses_of(run, groups) for run in of_method] for method, of_method in by_method.items()}
        losses = {method: [reports for _, reports in of_method] for method, of_method in parts.items()}
        error, base = pooled_error(losses), by_method[baseline]
        tables[size] = [
            {
                "method": method,
                "seeds": [run["seed"] for run in of_method],
                "losses": losses[method],
                "loss": _mean(losses[method]),
                "choice_loss": _mean([choices for choices, _ in parts[method]]),
                "difference": None if of_method is base else paired_difference(losses[method], losses[baseline], error),
                "over_documents": None if of_method is base else _over_documents(of_method, base, groups),
                "relative_flops": of_method[0]["training_flops"] / base[0]["training_flops"],
                **{name: of_method[0][name] for name in ("architecture", "parameters", "cache_bytes_per_token")},
            }
            for method, of_method in by_method.items()
        ]
        _correct([row["difference"]["own"] for row in tables[size] if row["difference"] and row["difference"]["own"]])
    return tables


def _mean(losses: Sequence[float | None]) -> float | None:
    finite = [loss for loss in losses if loss is not None]
    return statistics.fmean(finite) if len(finite) == len(losses) else None


def paired_difference(
    losses: Sequence[float | None], baseline: Sequence[float | None], error: PooledError | None = None
) -> dict[str, Any] | None:
    """`difference` of `rows_of`, of losses of the same seeds; without `error`, `low` and `high` are `None`."""
    pairs = zip(losses, baseline, strict=True)
    values = [loss - base for loss, base in pairs if loss is not None and base is not None]
    if len(values) < len(losses):
        return None
    mean = statistics.fmean(values)
    low, high = (None, None) if error is None else (mean - error.half_width, mean + error.half_width)
    own = None
    if len(values) > 1 and len(set(values)) > 1:
        from scipy import stats

        test = stats.ttest_1samp(values, 0.0)
        interval = test.confidence_interval(0.95)
        own = {"low": float(interval.low), "high": float(interval.high), "p": float(test.pvalue)}
    return {"mean": mean, "low": low, "high": high, "own": own, "values": values}


def _correct(tests: Sequence[dict[str, Any]]) -> None:
    """Adds to each test its p-value with Holm's correction for all of them (1979)."""
    largest = 0.0
    for place, test in enumerate(sorted(tests, key=lambda test: test["p"])):
        test["holm"] = largest = max(largest, min(1.0, (len(tests) - place) * test["p"]))


def _over_documents(
    runs: Sequence[Run], baseline: Sequence[Run], groups: Sequence[str] | None
) -> dict[str, float] | None:
    from scipy import stats

    if any(run["loss"] is None for run in (*runs, *baseline)):
        return None
    nats, base = (np.mean([run["held_out"]["documents"] for run in each], axis=0) for each in (runs, baseline))
    reports = ~for_choices(nats[:, 0], groups)
    nats, base = nats[reports], base[reports]
    if groups is not None:
        groups = [group for group, counts in zip(groups, reports, strict=True) if counts]
        numbers = np.unique(groups, return_inverse=True)[1]
        nats, base = (np.stack([np.bincount(numbers, column) for column in each.T], axis=1) for each in (nats, base))
    if len(nats) < 2:
        return None
    interval = stats.bootstrap(
        (nats[:, 1] - base[:, 1], nats[:, 0]),
        lambda difference, tokens, axis: difference.sum(axis) / tokens.sum(axis),
        paired=True,
        vectorized=True,
        batch=100,
        method="percentile",
        random_state=np.random.default_rng(0),
    ).confidence_interval
    return {"low": float(interval.low), "high": float(interval.high)}


def markdown(study: Mapping[str, Any]) -> str:
    """The tables of a `study.json`, one a size."""
    titles = ["method", "loss", "bits/byte", "Δ [pooled]", "[own]", "p", "[over documents]"]
    titles += ["parameters", "FLOPs", "cache/token"]
    lines = []
    for size, rows in study["sizes"].items():
        lines += ["", f"**{size}**, {len(rows[0]['seeds'])} seed{'s' * (len(rows[0]['seeds']) > 1)}", ""]
        lines += [f"| {' | '.join(titles)} |", f"|{'---|' * len(titles)}"]
        for row in rows:
            cells = [row["method"]]
            cells += ["diverged", ""] if row["loss"] is None else [f"{row['loss']:.4f}", f"{row['bits_per_byte']:.4f}"]
            difference = row["difference"]
            cells += ["" if difference is None else f"{difference['mean']:+.4f}{_interval(difference, ' ')}"]
            own = None if difference is None else difference["own"]
            cells += [_interval(own), "" if own is None else f"{own['holm']:.3f}", _interval(row["over_documents"])]
            cells += [f"{row['parameters']:,}", f"{row['relative_flops']:.3f}", f"{row['cache_bytes_per_token']:,} B"]
            lines.append(f"| {' | '.join(cells)} |")
    lines += ["", *study["notes"]]
    return "\n".join(lines[1:])


def _interval(estimate: Mapping[str, Any] | None, before: str = "") -> str:
    if estimate is None or estimate["low"] is None:
        return ""
    return f"{before}[{estimate['low']:+.4f}, {estimate['high']:+.4f}]"
