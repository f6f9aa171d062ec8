"""Draws what models learned to read, and gains over costs, of the records: `python benchmarks/pictures.py [FOLDER]`."""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from tables import RESULTS, contrasts, read, runs_of

from resformer.configuration.methods import FIRST

STUDIES = {"b12": "ours, 12 layers, 2.4 tokens a parameter", "n20": "ours, 6 layers, 20 tokens a parameter"}
OTHERS = "others', 304M parameters, one seed"


def learned(method: str, name: str = "b12", seed: int = 0) -> list[list[float]]:
    """The coefficients of each layer that has some, at the end of a run."""
    (run,) = (run for run in runs_of(name)[0][1] if (run["architecture"], run["seed"]) == (method, seed))
    return list(run["curve"][-1]["coefficients"].values())


def value_map() -> np.ndarray:
    """M of `resformer`, (layers, layers): layer n attends to the sum of M[n, m] V_m."""
    rows = learned("resformer")
    matrix = np.eye(len(rows) + 1)
    for layer, (first, own) in enumerate(rows, start=1):
        matrix[layer, 0], matrix[layer, layer] = first, own
    return matrix


def depth_map() -> np.ndarray:
    """D of `denseformer`, (layers, layers + 1): after block n the state is the sum of D[n, j] X_j."""
    rows = learned("denseformer")
    return np.array([row + [0.0] * (len(rows) + 1 - len(row)) for row in rows])


def maps() -> Figure:
    figure = Figure(figsize=(13, 5.6), layout="constrained")
    drawn = (
        ("M of resformer", value_map(), "values of layer", "in layer"),
        ("D of denseformer", depth_map(), "state (0: the embeddings)", "after layer"),
    )
    for axes, (title, matrix, columns, rows) in zip(figure.subplots(1, 2), drawn, strict=True):
        image = axes.imshow(np.ma.masked_equal(matrix, 0), cmap="RdBu_r", vmin=-2, vmax=2)
        for (row, column), weight in np.ndenumerate(matrix):
            if weight:
                colour = "white" if abs(weight) > 1.3 else "black"
                axes.text(column, row, f"{weight:z.1f}", ha="center", va="center", fontsize=7, color=colour)
        axes.set(title=title, xlabel=columns, ylabel=rows, xticks=range(matrix.shape[1]), yticks=range(len(matrix)))
    figure.colorbar(image, ax=figure.axes, shrink=0.8, extend="both", label="weight")
    figure.suptitle("What layers learned to read, from scratch (b12, seed 0)")
    return figure


def gains() -> dict[str, list[tuple[str, float, tuple[float, float] | None]]]:
    """Source -> method, loss minus plain Llama's, and its 95 % interval."""
    found = {
        told: [
            (row["architecture"], difference["mean"], (difference["low"], difference["high"]))
            for row in contrasts(name)[1:]
            if " " not in row["architecture"]
            for difference in [row["difference"]]
        ]
        for name, told in STUDIES.items()
    }
    said = {method: re.match(r"(-?\d\.\d+) at 304M", gain) for method, (gain, _) in FIRST.items()}
    return found | {OTHERS: [(method, float(each[1]), None) for method, each in said.items() if each]}


def costs() -> dict[str, float]:
    """Method -> bytes of a forward and backward pass at 8B, more than Llama's, in percent of those."""
    counted = read("traffic")["counted"]["8B"]
    moved = {method: each["forward"]["bytes"] + each["backward"]["bytes"] for method, each in counted.items()}
    return {method: 100 * (each / moved["llama"] - 1) for method, each in moved.items()}


def gain_over_cost() -> Figure:
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes, cost = figure.subplots(), costs()
    for place, (source, methods) in enumerate(gains().items()):
        offset = 0.8 * (place - 1)
        for number, (method, mean, interval) in enumerate(methods):
            around = None if interval is None else [[mean - interval[0]], [interval[1] - mean]]
            axes.errorbar(
                cost[method] + offset,
                mean,
                around,
                fmt="os^"[place],
                color=f"C{place}",
                capsize=3,
                label=source if number == 0 else None,
            )
            beside: Any = {"xytext": (-5, 4), "ha": "right"} if cost[method] < 0 else {"xytext": (5, 4)}
            axes.annotate(method, (cost[method] + offset, mean), textcoords="offset points", fontsize=8, **beside)
    axes.axhline(0, color="grey", linewidth=0.8)
    axes.set(
        title="Gain from scratch over cost",
        xlabel="bytes that a training step moves, more than Llama's, without attention [%]",
        ylabel="loss minus plain Llama's [nats a token]; below 0: better",
    )
    axes.margins(x=0.1)
    axes.legend(fontsize=9)
    return figure


PICTURES: dict[str, Callable[[], Figure]] = {"maps": maps, "gain": gain_over_cost}

if __name__ == "__main__":
    folder = Path(*sys.argv[1:]) if sys.argv[1:] else RESULTS / "study"
    for name, draw in PICTURES.items():
        draw().savefig(folder / f"{name}.png", dpi=110)
