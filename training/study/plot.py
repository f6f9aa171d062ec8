"""The plot of a study, a row a size: differences over the training, and at the end."""

import itertools
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from resformer.environment import install_hint
from resformer.training.study.report import Run, paired_difference

_FEW = 6  # so many intervals can be told apart in one panel


def check_packages() -> None:
    """Raises ImportError if the plot or the intervals cannot be made; called before anything is trained."""
    if missing := [package for package in ("matplotlib", "scipy") if find_spec(package) is None]:
        raise ImportError(f"A study needs {' and '.join(missing)}: {install_hint('study')}")


def plot(report: Mapping[str, Any], runs: Sequence[Run], path: Path) -> None:
    """Writes the PNG of a report and its runs."""
    from matplotlib import colormaps, rc_context
    from matplotlib.figure import Figure

    sizes, baseline = report["sizes"], report["baseline"]
    methods = [*dict.fromkeys(run["method"] for run in runs if run["method"] != baseline)]
    palette = itertools.cycle(colormaps[name](place) for name in ("tab10", "Dark2") for place in range(8))
    colours = dict(zip(methods, palette, strict=False))
    with rc_context({"font.size": 11, "text.parse_math": False}):
        figure = Figure(figsize=(9, max(4.5, 1.8 + 0.4 * (len(methods) + 1)) * len(sizes)), layout="constrained")
        parts = figure.subfigures(len(sizes), 1, squeeze=False)[:, 0]
        for part, (size, rows) in zip(parts, sizes.items(), strict=True):
            seeds = len(rows[0]["seeds"])
            base = next(row for row in rows if row["method"] == baseline)
            part.suptitle(
                f"Loss minus that of {_label(baseline)}, in nats a token\n"
                f"{base['parameters']:,} parameters, {seeds} seed{'s' * (seeds > 1)}; below 0 is better"
            )
            left, right = part.subplots(1, 2, width_ratios=(3, 2))
            ended = [row for row in rows if row["difference"] is not None]  # the others' colours have no label
            named = {baseline, *(row["method"] for row in ended)}
            shown = [run for run in runs if run["size"] == size and run["method"] in named]
            _draw_differences(left, shown, baseline, colours)
            _draw_final(right, ended, colours)
            for axes in (left, right):
                axes.grid(alpha=0.3)
        figure.savefig(path, format="png", dpi=180)


def _label(method: str, between: str = ", ") -> str:
    """`resformer:learning_rate=8e-3:dwa=true` in words: `resformer, rate 0.008, dwa true`."""
    name, *settings = method.split(":")
    pairs = (each.partition("=")[::2] for each in settings)
    words = [f"rate {float(x):g}" if key == "learning_rate" else f"{key.replace('_', ' ')} {x}" for key, x in pairs]
    return between.join([name, *words])


def _draw_differences(axes: Any, runs: Sequence[Run], baseline: str, colours: Mapping[str, Any]) -> None:
    """The mean difference at each evaluation, and the 95 % interval of each method's own paired t-test.

    The labels of `_draw_final` say whose colours these are.
    """
    curves: dict[str, dict[float, list[Any]]] = {}  # method -> millions of tokens -> the loss of each seed
    for run in runs:
        for point in run["curve"][1:]:
            losses = curves.setdefault(run["method"], {}).setdefault(point["tokens"] / 1e6, [])
            losses.append(point["validation_loss"])
    base = curves.pop(baseline, {})
    shaded = False
    for method, curve in curves.items():
        pairs = {tokens: paired_difference(losses, base[tokens]) for tokens, losses in curve.items() if tokens in base}
        points = [(tokens, difference) for tokens, difference in pairs.items() if difference is not None]
        x, means = [tokens for tokens, _ in points], [each["mean"] for _, each in points]
        axes.plot(x, means, marker="o", markersize=4, color=colours[method])
        if len(curves) <= _FEW and points and all(each["p"] is not None for _, each in points):
            low, high = ([each[end] for _, each in points] for end in ("low", "high"))
            axes.fill_between(x, low, high, color=colours[method], alpha=0.15, linewidth=0)
            shaded = True
    axes.axhline(0.0, color="black", linewidth=1)
    axes.locator_params(axis="x", nbins=5)
    axes.set(title="During the training" + ": mean, 95 % interval" * shaded, xlabel="training tokens, millions")


def _draw_final(axes: Any, rows: Sequence[Mapping[str, Any]], colours: Mapping[str, Any]) -> None:
    axes.axvline(0.0, color="black", linewidth=1)
    for place, row in enumerate(rows):
        difference, colour = row["difference"], colours[row["method"]]
        half = None if difference["p"] is None else difference["high"] - difference["mean"]
        axes.errorbar(difference["mean"], place, xerr=half, fmt="o", capsize=4, color=colour)
        values = difference["values"]
        axes.scatter(values, [place] * len(values), marker="x", s=30, color=colour)
    axes.set_yticks(range(len(rows)), [_label(row["method"], "\n") for row in rows])
    for label, row in zip(axes.get_yticklabels(), rows, strict=True):
        label.set_color(colours[row["method"]])
    axes.set_ylim(max(len(rows), 1) - 0.5, -0.5)
    axes.locator_params(axis="x", nbins=4)
    interval = any(row["difference"]["p"] is not None for row in rows)
    axes.set(title="At its end", xlabel="● mean, ├─┤ 95 % interval\nx one seed" if interval else "x one seed")
