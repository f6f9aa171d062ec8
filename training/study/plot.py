"""The plot of a study, a row for each size: differences over the training, at the end, and learning rates or losses."""

import re
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import Any

from resformer.environment import install_hint
from resformer.training.study.table import losses_of, pooled_error

Run = Mapping[str, Any]


def check_packages() -> None:
    """Raises ImportError if the plot or the intervals cannot be made; called before anything is trained."""
    if missing := [package for package in ("matplotlib", "scipy") if find_spec(package) is None]:
        raise ImportError(f"A study needs {' and '.join(missing)}: {install_hint('study')}")


def plot(study: Mapping[str, Any], runs: Sequence[Run], path: Path) -> None:
    """Writes the PNG of a `study.json` and its runs."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    sizes, baseline = study["sizes"], study["baseline"]
    swept = next((name for name in ("learning_rate", "connection_learning_rate") if _is_swept(runs, name)), None)
    methods = {run["method"]: run["architecture" if swept else "method"] for run in runs}
    others = [name for name in dict.fromkeys(methods.values()) if name != methods[baseline]]
    of_name = {name: colormaps["tab20"](2 * index % 20 + index // 10 % 2) for index, name in enumerate(others)}
    colours = {method: of_name.get(name, (0.0, 0.0, 0.0, 1.0)) for method, name in methods.items()}
    figure = Figure(figsize=(21, max(5.0, 1.5 + 0.3 * len(methods)) * len(sizes)), layout="constrained")
    for part, (size, rows) in zip(figure.subfigures(len(sizes), 1, squeeze=False)[:, 0], sizes.items(), strict=True):
        seeds = len(rows[0]["seeds"])
        part.suptitle(f"{size}, {seeds} seed{'s' * (seeds > 1)}; differences to {baseline} in nats per token")
        of_size = [run for run in runs if run["size"] == size]
        during, final, last = part.subplots(1, 3)
        curves = {row["method"]: _losses_by_tokens(of_size, row["method"]) for row in rows}
        _draw_differences(during, curves, baseline, colours)
        _draw_final(final, [row for row in rows if row["difference"] is not None], colours, seeds)
        if swept:
            _draw_rates(last, of_size, swept, colours, study["held_out_groups"])
        else:
            for method, curve in curves.items():
                points = {tokens: fmean(losses) for tokens, losses in curve.items() if None not in losses}
                last.plot(points.keys(), points.values(), label=method, color=colours[method])
            last.set(title="loss on some of the held-out blocks, mean of the seeds", xlabel="training tokens, millions")
        last.set_ylabel("nats per token")
        last.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
        for axes in (during, final, last):
            axes.grid(alpha=0.3)
    figure.savefig(path, format="png", dpi=110)


def _losses_by_tokens(runs: Sequence[Run], method: str) -> dict[float, list[Any]]:
    """Millions of training tokens -> the loss of each seed, from the first evaluation after the start on."""
    losses: dict[float, list[Any]] = {}
    for run in (run for run in runs if run["method"] == method):
        for point in run["curve"][1:]:
            losses.setdefault(point["tokens"] / 1e6, []).append(point["validation_loss"])
    return losses


def _draw_differences(axes: Any, curves: Mapping[str, Any], baseline: str, colours: Mapping[str, Any]) -> None:
    errors = {}
    for tokens in curves[baseline]:
        error = pooled_error({method: curve[tokens] for method, curve in curves.items() if tokens in curve})
        if error is not None:
            errors[tokens] = error.half_width
    for method, curve in curves.items():
        points = {
            tokens: fmean(losses) - fmean(curves[baseline][tokens])
            for tokens, losses in curve.items()
            if None not in [*losses, *curves[baseline].get(tokens, [None])]
        }
        axes.plot(points.keys(), points.values(), marker=".", color=colours[method])
    title = "during the training, on some of the held-out blocks"
    if errors:
        axes.fill_between(
            errors.keys(), [-half for half in errors.values()], errors.values(), color="black", alpha=0.12
        )
        title += "\ngrey: less than the simultaneous 95 % interval at that time"
    axes.set(title=title, xlabel="training tokens, millions", ylabel="below 0 is better")


def _draw_final(axes: Any, rows: Sequence[Mapping[str, Any]], colours: Mapping[str, Any], seeds: int) -> None:
    axes.axvline(0.0, color="black", linewidth=1)
    for place, row in enumerate(rows):
        difference, colour = row["difference"], colours[row["method"]]
        half = None if difference["low"] is None else difference["high"] - difference["mean"]
        axes.errorbar(difference["mean"], place, xerr=half, fmt="o", capsize=4, color=colour)
        axes.scatter(difference["values"], [place] * len(difference["values"]), marker="x", s=40, color=colour)
    axes.set_yticks(range(len(rows)), [row["method"] for row in rows], fontsize=8)
    for label, row in zip(axes.get_yticklabels(), rows, strict=True):
        label.set_color(colours[row["method"]])
    axes.invert_yaxis()
    interval = "mean, simultaneous 95 % interval, seeds" if seeds > 1 else "one seed, no interval"
    axes.set(title=f"at the end, on the held-out text for reports\n{interval}", xlabel="left of 0 is better")


def _is_swept(runs: Sequence[Run], setting: str) -> bool:
    """Whether an architecture has several values of the setting."""
    values = {(run["architecture"], _rate(run, setting)) for run in runs}
    return len(values) > len({architecture for architecture, _ in values})


def _rate(run: Run, setting: str) -> float:
    """Connections that have no rate of their own have the others'."""
    return float(run["learning_rate"] if run[setting] is None else run[setting])


def _draw_rates(
    axes: Any, runs: Sequence[Run], setting: str, colours: Mapping[str, Any], groups: Sequence[str] | None
) -> None:
    losses = [(run, *losses_of(run, groups)) for run in runs]
    finite = [(run, reports if choices is None else choices) for run, choices, reports in losses if reports is not None]
    lines: dict[str, dict[float, list[float]]] = {}  # a method but for its rate -> the losses of each rate
    looks = {}
    for run, loss in finite:
        label = re.sub(rf":{setting}=[^:]*", "", run["method"])
        lines.setdefault(label, {}).setdefault(_rate(run, setting), []).append(loss)
        looks[label] = colours[run["method"]]
    for label, points in lines.items():
        means = sorted((rate, fmean(values)) for rate, values in points.items())
        axes.plot(*zip(*means, strict=True), marker="o", label=label, color=looks[label])
    axes.set_xscale("log")
    rates = sorted({_rate(run, setting) for run, _ in finite})
    axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
    axes.minorticks_off()
    axes.set(title="loss on the held-out text for choices, mean of the seeds", xlabel=setting.replace("_", " "))
