"""The results of a study: differences to the baseline, their intervals over seeds and documents, a table a size."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

__all__ = ["PooledError", "dunnett_critical_value", "markdown", "pooled_error", "rows_of"]

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


def rows_of(runs: Sequence[Run], baseline: str, groups: Sequence[str] | None = None) -> dict[str, list[dict[str, Any]]]:
    """Size -> a row for each method, in the order of the runs. Every method has the same seeds.

    `difference` is the loss minus the baseline's of the same seed, its mean over the seeds with the simultaneous 95 %
    interval by `pooled_error`, which one seed does not have. `over_documents` is the 95 % interval of the same mean if
    the held-out documents are drawn anew, by the percentiles of a bootstrap; those of one of `groups` are drawn
    together. Both are `None` for the baseline, and where a loss is not finite.
    """
    tables: dict[str, list[dict[str, Any]]] = {}
    for size in dict.fromkeys(run["size"] for run in runs):
        by_method: dict[str, list[Run]] = {}
        for run in runs:
            if run["size"] == size:
                by_method.setdefault(run["method"], []).append(run)
        losses = {method: [run["loss"] for run in of_method] for method, of_method in by_method.items()}
        error, base = pooled_error(losses), by_method[baseline]
        tables[size] = [
            {
                "method": method,
                "seeds": [run["seed"] for run in of_method],
                "losses": losses[method],
                "loss": _mean(losses[method]),
                "difference": None if of_method is base else _difference(losses[method], losses[baseline], error),
                "over_documents": None if of_method is base else _over_documents(of_method, base, groups),
                "relative_flops": of_method[0]["training_flops"] / base[0]["training_flops"],
                **{name: of_method[0][name] for name in ("architecture", "parameters", "cache_bytes_per_token")},
            }
            for method, of_method in by_method.items()
        ]
    return tables


def _mean(losses: Sequence[float | None]) -> float | None:
    finite = [loss for loss in losses if loss is not None]
    return statistics.fmean(finite) if len(finite) == len(losses) else None


def _difference(
    losses: Sequence[float | None], baseline: Sequence[float | None], error: PooledError | None
) -> dict[str, Any] | None:
    pairs = zip(losses, baseline, strict=True)
    values = [loss - base for loss, base in pairs if loss is not None and base is not None]
    if len(values) < len(losses):
        return None
    mean = statistics.fmean(values)
    low, high = (None, None) if error is None else (mean - error.half_width, mean + error.half_width)
    return {"mean": mean, "low": low, "high": high, "values": values}


def _over_documents(
    runs: Sequence[Run], baseline: Sequence[Run], groups: Sequence[str] | None
) -> dict[str, float] | None:
    from scipy import stats

    if any(run["loss"] is None for run in (*runs, *baseline)):
        return None
    nats, base = (np.mean([run["held_out"]["documents"] for run in each], axis=0) for each in (runs, baseline))
    if groups is not None:
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
    titles = ["method", "loss", "bits/byte", "Δ [over seeds]", "[over documents]", "parameters", "FLOPs", "cache/token"]
    lines = []
    for size, rows in study["sizes"].items():
        lines += ["", f"**{size}**, {len(rows[0]['seeds'])} seed{'s' * (len(rows[0]['seeds']) > 1)}", ""]
        lines += [f"| {' | '.join(titles)} |", f"|{'---|' * len(titles)}"]
        for row in rows:
            cells = [row["method"]]
            cells += ["diverged", ""] if row["loss"] is None else [f"{row['loss']:.4f}", f"{row['bits_per_byte']:.4f}"]
            difference = row["difference"]
            cells += ["" if difference is None else f"{difference['mean']:+.4f}{_interval(difference, ' ')}"]
            cells += [_interval(row["over_documents"])]
            cells += [f"{row['parameters']:,}", f"{row['relative_flops']:.3f}", f"{row['cache_bytes_per_token']:,} B"]
            lines.append(f"| {' | '.join(cells)} |")
    lines += ["", *study["notes"]]
    return "\n".join(lines[1:])


def _interval(estimate: Mapping[str, Any] | None, before: str = "") -> str:
    if estimate is None or estimate["low"] is None:
        return ""
    return f"{before}[{estimate['low']:+.4f}, {estimate['high']:+.4f}]"
