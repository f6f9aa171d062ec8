"""Writes one or several analyses as analysis.json, PNG figures, and report.html, which needs no other file."""

import json
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from resformer.analysis.figures import plots
from resformer.analysis.measuring import DEFINITIONS, Analysis
from resformer.analysis.page import page
from resformer.environment import require
from resformer.files import check_target, replacing, write_text, writing
from resformer.version import __version__


@dataclass(frozen=True)
class Report:
    """Analyses to be shown side by side.

    Args:
        command: the command line to print in the report.
    """

    analyses: Sequence[Analysis]
    command: str = ""

    @property
    def warnings(self) -> list[str]:
        return [warning for analysis in self.analyses for warning in analysis.warnings]

    def as_dict(self) -> dict[str, Any]:
        """All numbers, their definitions, the command and the versions."""
        return {
            "checkpoints": [analysis.as_dict() | {"findings": findings(analysis)} for analysis in self.analyses],
            "command": self.command,
            "definitions": DEFINITIONS,
            "versions": {
                "python": platform.python_version(),
                "resformer": __version__,
                "torch": torch.__version__,
                "transformers": transformers.__version__,
            },
        }


def findings(analysis: Analysis) -> list[str]:
    """What the numbers say of sinks, drains, peaks and over-smoothing. The papers give no limits, so none are here."""
    ratio, uniform = analysis.mean("importance_ratio"), analysis.uniform["importance_ratio"]
    sinks = sum(each > uniform for each in ratio)
    if sinks:
        sink = (
            f"Attention sink: the first token receives more than under uniform attention in {sinks} of {len(ratio)} "
            f"layers, in layer {ratio.index(max(ratio))} {max(ratio):.3g} times the mean of the others (uniform: "
            f"{uniform:.3g})."
        )
    else:
        sink = (
            f"No sink: the first token receives less than uniform attention in every layer, at most {max(ratio):.3g} "
            f"times the mean of the others (uniform: {uniform:.3g})."
        )
    values, hidden = analysis.mean("value_norm_ratio"), analysis.mean("hidden_norm_ratio")
    least, most = min(values), max(hidden)
    drain = (
        f"Value drain: the first token's values are shortest in layer {values.index(least)}, {least:.3g} of the mean "
        "length of the others."
        if least < 1
        else "No value drain: the first token's values are no shorter than the others' in any layer."
    )
    peak = (
        f"Hidden peak: the first token's hidden state is longest after layer {hidden.index(most)}, {most:.3g} times "
        "the mean of the others."
        if most > 1
        else "No hidden peak: the first token's hidden state is no longer than the others' after any layer."
    )
    similarity = analysis.mean("similarity")[-1]
    return [sink, drain, peak, f"Similarity: after the last layer two tokens have a mean cosine of {similarity:.3g}."]


def write_report(report: Report, folder: Path, *, force: bool = False) -> None:
    """Writes analysis.json, the figures as PNG and report.html to `folder`, all of them or nothing.

    Raises:
        ImportError: matplotlib is not installed.
        CheckpointError: `folder` is not empty and `force` is not set, or holds anything but an earlier report.
        OutputError: a file cannot be written.
    """
    require("matplotlib", "analysis")
    checkpoints = [analysis.checkpoint for analysis in report.analyses if analysis.checkpoint is not None]
    check_target(folder, *checkpoints, made_by="analyze", force=force)
    figures, values = [*plots(report.analyses).values()], report.as_dict()
    with replacing(folder, made_by="analyze", force=force) as partial:
        write_text(partial / "analysis.json", json.dumps(values, indent=1, allow_nan=False) + "\n")
        write_text(partial / "report.html", page(values, figures))
        for plot in figures:
            with writing(partial / f"{plot.key}.png"):
                (partial / f"{plot.key}.png").write_bytes(plot.png)
