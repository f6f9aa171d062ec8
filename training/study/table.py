"""The results of a study: paired differences with their intervals, views at equal cost, one table a size."""

import math
import statistics
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

__all__ = ["BASELINE", "interval", "markdown", "rows_of"]

BASELINE = "transformer"
_BEYOND = math.log(1.25)  # the baseline's loss is extrapolated this far in ln(parameters)

Run = Mapping[str, Any]
Points = Sequence[tuple[float, float]]


def interval(values: Sequence[float]) -> dict[str, Any]:
    """The mean with its 95 % confidence interval by Student's t, which one value does not have."""
    mean, half = statistics.fmean(values), None
    if len(values) > 1:
        from scipy import stats

        half = float(stats.t.ppf(0.975, len(values) - 1) * stats.sem(values))
    return {
        "mean": mean,
        "low": None if half is None else mean - half,
        "high": None if half is None else mean + half,
        "values": list(values),
    }


def rows_of(runs: Sequence[Run]) -> dict[str, list[dict[str, Any]]]:
    """Size -> a row for each method, in the order of the runs. Every method has the same seeds.

    `difference` is the final loss minus the baseline's of the same seed. The other views are that difference

    * `equal_flops`: after the operations of the cheapest method's whole training, each loss read from its curve, linear
      between two evaluations; a model that is read before its end has not seen the end of the learning rate's schedule;
    * `equal_parameters`: from the baseline's final loss at as many parameters, linear in their logarithm between two of
      the sizes, extended by a quarter beyond them. `None` with one size. `baseline_parameters` are those with which the
      baseline has the method's loss.

    A loss that is not finite leaves its method without a mean and without differences.
    """
    tables: dict[str, list[dict[str, Any]]] = {}
    for size in dict.fromkeys(run["size"] for run in runs):
        of_size = [run for run in runs if run["size"] == size]
        flops = min(run["training_flops"] for run in of_size)
        matched = {(run["method"], run["seed"]): _loss_after(run, flops) for run in of_size}
        final = {(run["method"], run["seed"]): run["loss"] for run in of_size}
        tables[size] = []
        for method in dict.fromkeys(run["method"] for run in of_size):
            of_method = [run for run in of_size if run["method"] == method]
            losses = [run["loss"] for run in of_method]
            seeds = [run["seed"] for run in of_method]
            by_size = [_baseline(runs, seed) for seed in seeds]
            expected = [
                _on_line(points, math.log(run["parameters"]), _BEYOND)
                for run, points in zip(of_method, by_size, strict=True)
            ]
            views = {
                "difference": _differences(losses, [final[BASELINE, seed] for seed in seeds]),
                "equal_flops": _differences(*([matched[name, seed] for seed in seeds] for name in (method, BASELINE))),
                "equal_parameters": _differences(losses, expected),
            }
            comparable = views["equal_parameters"] is not None
            tables[size].append(
                {
                    "method": method,
                    "seeds": seeds,
                    "losses": losses,
                    "loss": None if None in losses else statistics.fmean(losses),
                    **(dict.fromkeys(views) if method == BASELINE else views),
                    "baseline_parameters": _parameters_for(losses, by_size) if comparable else None,
                    "parameters": of_method[0]["parameters"],
                    "cache_bytes_per_token": of_method[0]["cache_bytes_per_token"],
                    "training_flops": of_method[0]["training_flops"],
                    "step_seconds": statistics.median(run["step_seconds"] for run in of_method),
                    "tokens_per_second": statistics.median(run["tokens_per_second"] for run in of_method),
                    "peak_memory": max(run["peak_memory"] for run in of_method),
                }
            )
    return tables


def _differences(losses: Sequence[float | None], baseline: Sequence[float | None]) -> dict[str, Any] | None:
    pairs = zip(losses, baseline, strict=True)
    differences = [loss - base for loss, base in pairs if loss is not None and base is not None]
    return interval(differences) if len(differences) == len(losses) else None


def _loss_after(run: Run, flops: float) -> float | None:
    points = run["curve"]
    if any(point["validation_loss"] is None for point in points):
        return None
    each = run["training_flops"] / points[-1]["step"]
    return _on_line([(point["step"] * each, point["validation_loss"]) for point in points], flops, 1e-9 * flops)


def _baseline(runs: Sequence[Run], seed: int) -> Points:
    """ln parameters and final loss of the baseline's sizes, ascending."""
    sizes = [run for run in runs if run["method"] == BASELINE and run["seed"] == seed and run["loss"] is not None]
    return sorted((math.log(run["parameters"]), run["loss"]) for run in sizes)


def _on_line(points: Points, x: float, beyond: float) -> float | None:
    """y at x on the lines from point to point, the outer ones extended by `beyond`; `None` farther out."""
    if len(points) < 2 or not points[0][0] - beyond <= x <= points[-1][0] + beyond:
        return None
    right = min(max(bisect_left([point[0] for point in points], x), 1), len(points) - 1)
    (x0, y0), (x1, y1) = points[right - 1], points[right]
    return y0 + (x - x0) * (y1 - y0) / (x1 - x0)


def _parameters_for(losses: Sequence[float], by_size: Sequence[Points]) -> float | None:
    """The baseline's parameters for these losses, the geometric mean over the seeds; `None` if any are out of reach."""
    logarithms = []
    for loss, points in zip(losses, by_size, strict=True):
        swapped = [(y, x) for x, y in reversed(points)]
        if any(left[0] >= right[0] for left, right in pairwise(swapped)):
            return None  # a larger model with a larger loss
        logarithm = _on_line(swapped, loss, math.inf)
        if logarithm is None or not points[0][0] - _BEYOND <= logarithm <= points[-1][0] + _BEYOND:
            return None
        logarithms.append(logarithm)
    return math.exp(statistics.fmean(logarithms))


def markdown(study: Mapping[str, Any]) -> str:
    """The tables of a `study.json`, one a size."""
    lines = []
    for size, rows in study["sizes"].items():
        views = [("difference", "Δ"), ("equal_flops", "Δ, equal FLOPs")]
        if any(row["equal_parameters"] is not None for row in rows):
            views.append(("equal_parameters", "Δ, equal parameters"))
        titles = ["method", "loss", "bits/byte", *[title for _, title in views], "parameters", "tokens/s", "step"]
        titles += ["memory", "cache/token"]
        lines += ["", f"**{size}**, {len(rows[0]['seeds'])} seed{'s' * (len(rows[0]['seeds']) > 1)}", ""]
        lines += [f"| {' | '.join(titles)} |", f"|{'---|' * len(titles)}"]
        for row in rows:
            cells = [row["method"]]
            cells += ["diverged", ""] if row["loss"] is None else [f"{row['loss']:.4f}", f"{row['bits_per_byte']:.4f}"]
            cells += [_with_interval(row[view]) for view, _ in views]
            cells += [f"{row['parameters']:,}", f"{row['tokens_per_second']:,.0f}"]
            cells += [f"{row['step_seconds'] * 1e3:,.1f} ms", f"{row['peak_memory'] / 1e6:,.1f} MB"]
            cells += [f"{row['cache_bytes_per_token']:,} B"]
            lines.append(f"| {' | '.join(cells)} |")
    lines += ["", *study["notes"]]
    return "\n".join(lines[1:])


def _with_interval(estimate: Mapping[str, Any] | None) -> str:
    if estimate is None:
        return ""
    if estimate["low"] is None:
        return f"{estimate['mean']:+.4f}"
    return f"{estimate['mean']:+.4f} [{estimate['low']:+.4f}, {estimate['high']:+.4f}]"
