"""The end of `make pretrain`: models from scratch side by side, their curves in one picture, and what each writes.

python benchmarks/scratch.py pretrained/transformer pretrained/svformer --curve pretrained/curve.png
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoConfig, pipeline

from resformer.configuration import cache_bytes_per_token
from resformer.training.trainer import LOG


def draw_curves(folders: Sequence[Path], picture: Path) -> None:
    """Draws the losses over the tokens, of `LOG` in each folder: lines in training, points on the held-out text."""
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("--curve", type=Path, required=True)
    parser.add_argument("--prompt", default="def read_lines(path):")
    arguments = parser.parse_args()
    metrics = [json.loads((model / "metrics.json").read_text(encoding="utf-8")) for model in arguments.models]
    cache = [cache_bytes_per_token(AutoConfig.from_pretrained(model)) for model in arguments.models]
    rows = {
        "parameters": [f"{each['parameters']:,}" for each in metrics],
        "training tokens": [f"{each['tokens']:,}" for each in metrics],
        "seconds": [f"{each['seconds']:,.0f}" for each in metrics],
        "held-out loss before": [f"{each['loss_before']:.4f}" for each in metrics],
        "held-out loss after": [f"{each['loss_after']:.4f}" for each in metrics],
        "cache a token, bytes": [f"{each:,}" for each in cache],
    }
    for title, cells in {"": [model.name for model in arguments.models], **rows}.items():
        print(f"{title:22}" + "".join(f"{cell:>14}" for cell in cells))
    draw_curves(arguments.models, arguments.curve)
    for model in arguments.models:
        torch.manual_seed(0)
        write = pipeline("text-generation", str(model), device="cpu")
        (text,) = write(arguments.prompt, max_new_tokens=64, max_length=None, do_sample=True, temperature=0.5)
        print(f"\n{model.name} writes:\n\n{text['generated_text']}")
    print(f"\nThe curves are in {arguments.curve}.")


if __name__ == "__main__":
    main()
