"""One or several analyses as files: analysis.json, PNG figures, and report.html, which stands alone."""

import json
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from resformer.analysis.claims import CLAIMS, DEPTH_CLAIMS, judge
from resformer.analysis.figures import plots, require_matplotlib
from resformer.analysis.measuring import DEFINITIONS, Analysis
from resformer.analysis.page import page
from resformer.files import check_target, replacing, write_text
from resformer.version import __version__

__all__ = ["Report", "write_report"]


@dataclass(frozen=True)
class Report:
    """Analyses laid side by side.

    Args:
        command: what made it, for who wants to make it again.
    """

    analyses: Sequence[Analysis]
    command: str = ""

    @property
    def warnings(self) -> list[str]:
        return [warning for analysis in self.analyses for warning in analysis.warnings]

    def as_dict(self) -> dict[str, Any]:
        """All numbers, what they mean, and what made them."""
        return {
            "checkpoints": [{**analysis.as_dict(), "claims": judge(analysis)} for analysis in self.analyses],
            "claims": {**CLAIMS, **DEPTH_CLAIMS},
            "command": self.command,
            "definitions": DEFINITIONS,
            "versions": {
                "python": platform.python_version(),
                "resformer": __version__,
                "torch": torch.__version__,
                "transformers": transformers.__version__,
            },
        }


def write_report(report: Report, folder: Path, *, force: bool = False) -> None:
    """Writes analysis.json, the figures as PNG and report.html, all of them or nothing.

    Raises:
        ImportError: there is no matplotlib.
        CheckpointError: `folder` is not empty and `force` is not set, or holds anything but an earlier report.
        OutputError: it cannot be written.
    """
    require_matplotlib()
    checkpoints = [analysis.checkpoint for analysis in report.analyses if analysis.checkpoint is not None]
    check_target(folder, *checkpoints, mark="analysis.json", force=force)
    drawn = plots(report.analyses)
    values = report.as_dict()
    with replacing(folder, force=force) as partial:
        write_text(partial / "analysis.json", json.dumps(values, indent=1, allow_nan=False) + "\n")
        write_text(partial / "report.html", page(values, drawn))
        for plot in drawn:
            (partial / f"{plot.key}.png").write_bytes(plot.png())
