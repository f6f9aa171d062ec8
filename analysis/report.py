"""Writes one or several analyses as analysis.json and PNG figures."""

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


#: From which factor on the first token counts as a sink, a drain or a peak, and from which cosine states as alike. The
#: papers give no limits; trained models without connections lie far beyond these, random ones within.
BAND, ALIKE = 2.0, 0.9


def findings(analysis: Analysis) -> list[str]:
    """What the numbers say of sinks, drains, peaks and over-smoothing: a verdict only beyond `BAND` or `ALIKE`."""
    uniform = analysis.uniform["importance_ratio"]
    found = []
    for name, what, quantity, factors in (
        ("sink", "receives", "importance_ratio", [x / uniform for x in analysis.mean("importance_ratio")]),
        ("value drain", "has values of", "value_norm_ratio", [1 / x for x in analysis.mean("value_norm_ratio")]),
        ("hidden peak", "has hidden states of", "hidden_norm_ratio", analysis.mean("hidden_norm_ratio")),
    ):
        layer = max(range(len(factors)), key=factors.__getitem__)
        value, count = analysis.mean(quantity)[layer], sum(factor > BAND for factor in factors)
        verdict = f"{name} in {count} of {len(factors)} layers" if count else f"no {name} beyond a factor of {BAND:g}"
        against = f" ({uniform:.3g} under uniform attention)" if name == "sink" else ""
        told = f"in layer {layer} the first token {what} {value:.3g} times the mean of the others{against}"
        found.append(f"{verdict.capitalize()}: {told}.")
    similarity = analysis.mean("similarity")[-1]
    verdict = "Over-smoothing" if similarity > ALIKE else f"No over-smoothing beyond a cosine of {ALIKE:g}"
    return [*found, f"{verdict}: after the last layer two tokens have a mean cosine of {similarity:.3g}."]


def write_report(report: Report, folder: Path, *, force: bool = False) -> None:
    """Writes analysis.json and the figures as PNG to `folder`, all of them or nothing.

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
        for plot in figures:
            with writing(partial / f"{plot.key}.png"):
                (partial / f"{plot.key}.png").write_bytes(plot.png)
