"""Writes one or several analyses as analysis.json and PNG figures."""

import json
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from resformer.analysis.figures import plots
from resformer.analysis.measuring import Analysis
from resformer.environment import require
from resformer.files import check_target, replacing, write_text, writing
from resformer.version import __version__


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
