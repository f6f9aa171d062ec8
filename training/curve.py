"""The losses of trainings as a picture."""

import json
from collections.abc import Sequence
from pathlib import Path

from resformer.training.log import LOG

#: The picture in an output.
CURVE = "curve.png"


def draw_curves(folders: Sequence[Path], picture: Path) -> None:
    """Draws the losses over the tokens, of `LOG` in each folder: lines in training, points on the held-out text.

    Raises:
        ImportError: matplotlib is missing.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for number, folder in enumerate(folders):
        log = json.loads((folder / LOG).read_text(encoding="utf-8"))
        for key, style, what in (("loss", "-", "in training"), ("eval_loss", "o--", "held-out text")):
            points = [(entry["tokens"] / 1e6, entry[key]) for entry in log if key in entry]
            if points:
                label = f"{folder.name}, {what}" if len(folders) > 1 else what
                alpha = 0.5 if key == "loss" else 1.0
                axes.plot(*zip(*points, strict=True), style, label=label, color=f"C{number}", ms=4, alpha=alpha)
    axes.set(xlabel="training tokens, millions", ylabel="loss, nats per token")
    axes.legend()
    figure.savefig(picture, dpi=120)
