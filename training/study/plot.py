"""The plot of a study: one row per size with the loss curves, their paired differences, and the final differences."""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import Any

from resformer.training.study.table import BASELINE

__all__ = ["check_packages", "plot"]

Curve = list[tuple[float, float]]  # millions of tokens, loss


def check_packages() -> None:
    """Raises ImportError if the plot or the intervals cannot be made; called before anything is trained."""
    if missing := [package for package in ("matplotlib", "scipy") if find_spec(package) is None]:
        raise ImportError(f"A study needs {' and '.join(missing)}: pip install 'resformer[study]'")


def plot(study: Mapping[str, Any], runs: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Writes the PNG of a `study.json` and its runs."""
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    sizes = study["sizes"]
    methods = list(dict.fromkeys(run["method"] for run in runs))
    colours = {method: colormaps["tab20"](2 * index % 20 + index // 10 % 2) for index, method in enumerate(methods)}
    colours[BASELINE] = (0.0, 0.0, 0.0, 1.0)
    figure = Figure(figsize=(17, max(5.0, 1.5 + 0.3 * len(methods)) * len(sizes)), layout="constrained")
    FigureCanvasAgg(figure)
    for part, (size, rows) in zip(figure.subfigures(len(sizes), 1, squeeze=False)[:, 0], sizes.items(), strict=True):
        seeds = len(rows[0]["seeds"])
        part.suptitle(f"{size}, {seeds} paired seed{'s' * (seeds > 1)}")
        curves, differences, final = part.subplots(1, 3)
        means = {method: _mean_curve(runs, size, method) for method in methods}
        for method, curve in means.items():
            if curve:
                curves.plot(
                    *zip(*curve, strict=True), label=method, color=colours[method], linewidth=1 + (method == BASELINE)
                )
            if curve and means[BASELINE]:
                lines = [(x, y - base) for (x, y), (_, base) in zip(curve, means[BASELINE], strict=True)]
                differences.plot(*zip(*lines, strict=True), marker=".", color=colours[method])
        curves.set(title="held-out loss, mean of the seeds", ylabel="nats per token")
        curves.legend(fontsize=8)
        differences.set(title=f"minus {BASELINE}'s; below 0 is better", ylabel="nats per token")
        for axes in (curves, differences):
            axes.set_xlabel("training tokens, millions")

        shown = [row for row in rows if row["difference"] is not None]
        final.axvline(0.0, color="black", linewidth=1)
        for place, row in enumerate(shown):
            difference, colour = row["difference"], colours[row["method"]]
            half = None if difference["low"] is None else difference["high"] - difference["mean"]
            final.errorbar(difference["mean"], place, xerr=half, fmt="o", capsize=4, color=colour)
            values = difference["values"]
            final.scatter(values, [place] * len(values), marker="x", s=40, color=colour)
        final.set_yticks(range(len(shown)), [row["method"] for row in shown])
        final.invert_yaxis()
        title = "mean and 95 % interval" if seeds > 1 else "one seed, no interval"
        final.set(title=f"the same at the end: {title}", xlabel="nats per token; left of 0 is better")
        for axes in (curves, differences, final):
            axes.grid(alpha=0.3)
    figure.savefig(path, format="png", dpi=110)


def _mean_curve(runs: Sequence[Mapping[str, Any]], size: str, method: str) -> Curve:
    """From the first evaluation after the start on, if there is more than one; empty if any loss is not finite."""
    of_seeds = [run["curve"] for run in runs if (run["size"], run["method"]) == (size, method)]
    if any(point["validation_loss"] is None for curve in of_seeds for point in curve):
        return []
    return [
        (together[0]["tokens"] / 1e6, fmean(point["validation_loss"] for point in together))
        for together in zip(*of_seeds, strict=True)
        if together[0]["step"] or len(of_seeds[0]) == 2
    ]
