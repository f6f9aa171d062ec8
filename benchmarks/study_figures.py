"""Figures of docs/results.md that studies do not draw themselves: python benchmarks/study_figures.py

results/study/lead.png: the difference from plain Llama against the training tokens a parameter.
results/study/moment.png: that from a plain Llama that was not converted, against the moment of the conversion.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from resformer.training.study.table import losses_of, paired_difference

STUDIES = Path(__file__).resolve().parent / "results" / "study"
#: Studies from scratch whose leads are drawn, each in its own panel.
LEADS = ("budget20", "context1024", "five")
#: Per cent of the training after which a plain model was converted; 0: trained with the connections from the start.
MOMENTS = (0, 10, 25, 50, 100)
ALIGNED = ", values aligned"


def runs_of(study: str) -> list[dict[str, Any]]:
    """The runs of a study, those of its report alone."""
    report = json.loads((STUDIES / f"{study}.json").read_text(encoding="utf-8"))
    methods = {row["method"] for rows in report["sizes"].values() for row in rows}
    runs = [json.loads(path.read_text(encoding="utf-8")) for path in (STUDIES / study).glob("runs/**/*.json")]
    return sorted((run for run in runs if run["method"] in methods), key=lambda run: (run["architecture"], run["seed"]))


def by_architecture(runs: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        found.setdefault(run["architecture"], []).append(run)
    return found


def leads(study: str) -> dict[str, list[tuple[float, dict[str, Any]]]]:
    """Method -> (tokens a parameter of plain Llama, the paired difference from it) for each evaluation."""
    methods = by_architecture(runs_of(study))
    budgets = [point["tokens"] / run["parameters"] for run in methods["transformer"][:1] for point in run["curve"][1:]]
    curves = {
        method: list(zip(*([point["validation_loss"] for point in run["curve"][1:]] for run in runs), strict=True))
        for method, runs in methods.items()
    }
    plain = curves.pop("transformer")
    return {
        method: list(zip(budgets, map(paired_difference, losses, plain), strict=True))
        for method, losses in curves.items()
    }


def moments() -> dict[str, dict[int, dict[str, Any]]]:
    """Method -> per cent of the training before the conversion -> the paired difference at the end, and how far the
    coefficient that moved most is from its start."""
    losses: dict[tuple[str, int], list[tuple[float, float, float]]] = {}
    for moment, study in _studies():
        methods = by_architecture(runs_of(study))
        groups = json.loads((STUDIES / f"{study}.json").read_text(encoding="utf-8"))["held_out_groups"]
        plain = methods.pop("transformer")
        if study.endswith("-aligned"):  # Llama in other coordinates: how much runs differ that begin as one function
            methods["transformer"] = plain
            plain = by_architecture(runs_of(study.removesuffix("-aligned")))["transformer"]
        for method, runs in methods.items():
            name = method + ALIGNED * study.endswith("-aligned")
            for run, base in zip(runs, plain, strict=True):
                pair = [losses_of(each, groups)[1] for each in (run, base)]
                losses.setdefault((name, moment), []).append((*pair, moved(run)))  # type: ignore[arg-type]
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for (method, moment), values in losses.items():
        run_losses, base_losses, moves = zip(*values, strict=True)
        difference = paired_difference(run_losses, base_losses)
        found.setdefault(method, {})[moment] = {**difference, "moved": fmean(moves)}
    return found


def capacity(study: str) -> dict[str, dict[str, Any]]:
    """Arm -> the paired difference from the frozen checkpoint, and how many parameters were trained."""
    losses: dict[str, list[tuple[float, float]]] = {}
    trained: dict[str, int] = {}
    for folder in sorted((STUDIES / study).iterdir()):
        (frozen,) = by_architecture(runs_of(f"early/100-{folder.name}"))["transformer"]  # the same bits as `annealed`
        for file in sorted(folder.glob("*.json")):
            run = json.loads(file.read_text(encoding="utf-8"))
            pair = [losses_of(each, run["held_out_groups"])[1] for each in (run, frozen)]
            losses.setdefault(run["arm"], []).append(pair)  # type: ignore[arg-type]
            trained[run["arm"]] = run["trained"]
    found = {arm: paired_difference(*zip(*pairs, strict=True)) for arm, pairs in losses.items()}
    arms = sorted(found, key=lambda arm: -trained[arm])
    return {arm: {**found[arm], "trained": trained[arm]} for arm in arms}  # type: ignore[dict-item]


def smollm2() -> list[dict[str, Any]]:
    """The runs on SmolLM2, with `differences`: of each text, the loss minus the bare checkpoint's on the documents for
    choices and on those for reports."""
    folder = STUDIES / "smollm2"
    base = _by_text(json.loads((folder / "checkpoint.json").read_text(encoding="utf-8")))
    runs = [json.loads(file.read_text(encoding="utf-8")) for file in folder.glob("*/*.json")]
    for run in runs:
        run["differences"] = {
            text: [loss - other for loss, other in zip(losses, base[text], strict=True)]
            for text, losses in _by_text(run).items()
        }
    return sorted(runs, key=lambda run: (run["steps"], run["arm"], run["rate"], run["seed"]))


def _by_text(run: dict[str, Any]) -> dict[str, Any]:
    pairs = list(zip(run["held_out_sources"], run["held_out"]["documents"], strict=True))
    return {
        text: losses_of({"held_out": {"documents": [each for source, each in pairs if source == text]}}, None)
        for text in dict.fromkeys(run["held_out_sources"])
    }


def _studies() -> Iterator[tuple[int, str]]:
    for moment in MOMENTS:
        names = sorted((STUDIES / "early").glob(f"{moment}-*.json")) if moment else [STUDIES / "scratch.json"]
        yield from ((moment, str(path.relative_to(STUDIES).with_suffix(""))) for path in names if path.is_file())


def moved(run: dict[str, Any]) -> float:
    """How far the coefficient that moved most is from its start; of large parameters the root mean square moves."""
    start, end = (run["curve"][place].get("coefficients", {}) for place in (0, -1))
    pairs = ((begin, end[name]) for name, begin in start.items())
    lists = ((a, b) if isinstance(a, list) else ([a], [b]) for a, b in pairs)
    return max((abs(x - y) for a, b in lists for x, y in zip(a, b, strict=True)), default=0.0)


def draw(panels: dict[str, dict[str, list[tuple[float, dict[str, Any]]]]], axis: str, path: Path) -> None:
    """A panel for each study: method -> points (x, paired difference)."""
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.5 * len(panels)), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (title, methods) in zip(figure.subplots(len(panels), squeeze=False)[:, 0], panels.items(), strict=True):
        axes.axhline(0.0, color="black", linewidth=1)
        for place, (method, points) in enumerate(methods.items()):
            colour = colormaps["tab10"](place % 10)
            x = [at for at, _ in points]
            axes.plot(x, [each["mean"] for _, each in points], marker="o", color=colour, label=method)
            own = [(at, each["own"]) for at, each in points if each["own"] is not None]
            low, high = ([interval[end] for _, interval in own] for end in ("low", "high"))
            axes.fill_between([at for at, _ in own], low, high, color=colour, alpha=0.12)
        axes.set(title=title, xlabel=axis, ylabel="loss minus plain Llama's, nats a token")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.savefig(path, format="png", dpi=110)


def draw_moments(found: dict[str, dict[int, dict[str, Any]]], path: Path) -> None:
    """The paired differences of each method at each moment: the mean, its interval, and a cross for each start."""
    from matplotlib.figure import Figure

    moments = [moment for moment in MOMENTS if any(moment in by_moment for by_moment in found.values())]
    figure = Figure(figsize=(10, 5), layout="constrained")
    axes = figure.subplots()
    axes.axhline(0.0, color="black", linewidth=1)
    for place, (method, by_moment) in enumerate(found.items()):
        for moment, each in by_moment.items():
            x = moments.index(moment) + 0.1 * (place - (len(found) - 1) / 2)
            half = each["own"]["high"] - each["mean"]
            label = method if moment == max(by_moment) else None
            axes.errorbar(x, each["mean"], yerr=half, fmt="o", capsize=4, color=f"C{place}", label=label)
            axes.scatter([x] * len(each["values"]), each["values"], marker="x", s=30, color=f"C{place}")
    axes.set_xticks(range(len(moments)), [f"after {moment} %" if moment else "from scratch" for moment in moments])
    axes.set(xlabel="moment of the conversion", ylabel="loss minus plain Llama's, nats a token; below 0 is better")
    axes.set_title("mean, 95 % interval of the method's own paired t-test, each start")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, format="png", dpi=110)


def main() -> None:
    here = [study for study in LEADS if (STUDIES / f"{study}.json").is_file()]
    draw({study: leads(study) for study in here}, "training tokens a parameter", STUDIES / "lead.png")
    draw_moments(moments(), STUDIES / "moment.png")


if __name__ == "__main__":
    main()
