"""The report of analyses, and the papers' plots in it, with every checkpoint in each of them.

matplotlib is imported when a plot is drawn.
"""

import io
import json
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import transformers

from resformer.analysis.measuring import Analysis
from resformer.environment import require
from resformer.files import check_target, replacing, write_text, writing
from resformer.version import __version__

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Markers tell the lines apart where colours do not.
_COLOURS = ("#3b82f6", "#f97316", "#10b981", "#a855f7", "#ef4444", "#ca8a04")
_MARKERS = tuple("os^Dv*")
_DASHES = 2 * ("-", (0, (4, 2)), (0, (1, 1.5)))  # a line stays visible under a later one
_LINES = {
    "entropy": ("Attention entropy", "entropy of token importance (nats)", False),
    "first_importance": ("Importance of the first token", "share of what all tokens receive", False),
    "importance_ratio": ("Importance of the first token against the others", "first token / mean of the others", True),
    "value_norm_ratio": ("Value-state norm of the first token", "first token / mean of the others", True),
    "hidden_norm_ratio": ("Hidden-state norm of the first token", "first token / mean of the others", True),
    "similarity": ("Token similarity", "mean cosine of hidden states", False),
}
_MAPS = {
    "value_mixing": ("Value mixing matrix M", "row n: what layer n attends to", "column m: values of layer m"),
    "depth_mixing": ("Depth mixing matrix D", "row n: what block n+1 reads", "column j: X_j (0: embeddings)"),
}


@dataclass(frozen=True)
class Plot:
    """A figure and its file name without `.png`."""

    key: str
    title: str
    figure: "Figure"

    @cached_property
    def png(self) -> bytes:
        return self._drawn(dpi=160)

    def _repr_png_(self) -> bytes:
        """What a notebook shows."""
        return self._drawn(dpi=80)

    def _drawn(self, dpi: int) -> bytes:
        with _style(), io.BytesIO() as buffer:
            self.figure.savefig(buffer, format="png", dpi=dpi, facecolor="white", metadata={"Software": None})
            return buffer.getvalue()


def plots(analyses: Sequence[Analysis], *, changes: bool = False) -> dict[str, Plot]:
    """All figures, by key: one line per checkpoint in those by layer, one map per mixing matrix that is not Llama's.

    Args:
        changes: the maps show the difference from plain Llama's matrices, all on one scale.
    """
    require("matplotlib", "analysis")
    with _style():
        drawn = [_lines(key, analyses) for key in _LINES]
        for key in _MAPS:
            if mixing := [analysis for analysis in analyses if _matrix(analysis, key, changes=True).any()]:
                drawn.append(_maps(key, mixing, changes))
    return {plot.key: plot for plot in drawn}


def _matrix(analysis: Analysis, key: str, *, changes: bool = False) -> np.ndarray:
    """A mixing matrix; with `changes` its difference from plain Llama's: 1 for the newest state, 0 for the others."""
    matrix = np.asarray(getattr(analysis, f"{key}_matrix"))
    rows, columns = matrix.shape
    return matrix - np.eye(rows, columns, k=columns - rows) if changes else matrix


def _style() -> Any:
    from matplotlib import rc_context
    from matplotlib.rcsetup import cycler

    lines = cycler(color=_COLOURS, marker=_MARKERS, linestyle=_DASHES)
    # A checkpoint's name may have a $.
    look: Any = {"axes.grid": True, "axes.titlelocation": "left", "grid.alpha": 0.3, "axes.prop_cycle": lines}
    return rc_context({**look, "text.parse_math": False})


def _figure(width: float = 6.4, height: float = 4.4, columns: int = 1) -> tuple["Figure", Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(1, columns, squeeze=False)[0]


def _lines(key: str, analyses: Sequence[Analysis]) -> Plot:
    from matplotlib.ticker import LogFormatter, MaxNLocator

    title, label, logarithmic = _LINES[key]
    figure, (axes,) = _figure()
    for analysis in analyses:
        mean = np.asarray(analysis.mean(key))
        deviation = np.nan_to_num(analysis.quantities[key]["deviation"])
        layer = np.arange(analysis.layers)
        low = np.maximum(mean - deviation, mean / 10) if logarithmic else mean - deviation
        (line,) = axes.plot(layer, mean, markersize=4, linewidth=1.6, label=analysis.name)
        axes.fill_between(layer, low, mean + deviation, color=line.get_color(), alpha=0.15, linewidth=0)
        if key in analysis.uniform:  # of the lengths of the texts, which the tokenizer decides
            named = {"label": "uniform attention"} if analysis is analyses[0] else {}
            axes.axhline(analysis.uniform[key], color=line.get_color(), alpha=0.5, linestyle=":", **named)
    axes.set(title=title, xlabel="layer", ylabel=label, yscale="log" if logarithmic else "linear")
    if logarithmic:  # Matplotlib's own labels are formulas, and formulas are not drawn here
        axes.yaxis.set_major_formatter(LogFormatter())
        axes.yaxis.set_minor_formatter(LogFormatter())
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.legend(loc="outside lower center", ncols=2, fontsize="small")
    return Plot(key, title, figure)


def _maps(key: str, analyses: Sequence[Analysis], changes: bool) -> Plot:
    from matplotlib.ticker import MaxNLocator

    title, rows_are, columns_are = _MAPS[key]
    figure, row = _figure(4.8 * len(analyses), 4.2, len(analyses))
    largest = max(np.nanmax(np.abs(_matrix(analysis, key, changes=True))) for analysis in analyses)
    for axes, analysis in zip(row, analyses, strict=True):
        matrix = _matrix(analysis, key, changes=changes)
        rows, columns = matrix.shape
        readable = np.tri(rows, columns, k=columns - rows, dtype=bool)
        gates = np.isnan(matrix)
        shown = np.ma.masked_where(gates | ~readable, matrix)  # later layers cannot be read: left empty
        most = float(largest if changes else np.abs(shown).max()) or 1.0
        image = axes.imshow(shown, cmap="RdBu_r", vmin=-most, vmax=most)
        if gates.any():
            axes.imshow(np.ma.masked_where(~gates, np.ones(matrix.shape)), cmap="Greys", vmin=0, vmax=2)
        axes.grid(False)
        axes.set(title=f"{'Changes to ' * changes}{title[-1]} of {analysis.name}", xlabel=columns_are, ylabel=rows_are)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(integer=True))
        figure.colorbar(image, ax=axes, shrink=0.8)
    return Plot(key, title, figure)


def report(analyses: Sequence[Analysis], command: str = "") -> dict[str, Any]:
    """All numbers, the command and the versions: what is in analysis.json."""
    versions = {"resformer": __version__, "torch": torch.__version__, "transformers": transformers.__version__}
    return {
        "checkpoints": [analysis.as_dict() for analysis in analyses],
        "command": command,
        "versions": {"python": platform.python_version(), **versions},
    }


def write_report(analyses: Sequence[Analysis], folder: Path, command: str = "", *, force: bool = False) -> None:
    """Writes analysis.json and the figures as PNG to `folder`, all of them or nothing.

    Raises:
        ImportError: matplotlib is not installed.
        CheckpointError: `folder` is not empty and `force` is not set, or holds anything but an earlier report.
        OutputError: a file cannot be written.
    """
    require("matplotlib", "analysis")
    checkpoints = [analysis.checkpoint for analysis in analyses if analysis.checkpoint is not None]
    check_target(folder, *checkpoints, made_by="analyze", force=force)
    figures, values = [*plots(analyses).values()], report(analyses, command)
    with replacing(folder, made_by="analyze", force=force) as partial:
        write_text(partial / "analysis.json", json.dumps(values, indent=1, allow_nan=False) + "\n")
        for plot in figures:
            with writing(partial / f"{plot.key}.png"):
                (partial / f"{plot.key}.png").write_bytes(plot.png)
