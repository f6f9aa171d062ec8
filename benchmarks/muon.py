"""Muon against AdamW on the 3-million Llama of `make pretrain`: each at three rates, then at its best on another seed.

    python benchmarks/muon.py benchmarks/results/muon.json --folder FOLDER

FOLDER keeps the tokens and the models; finished runs are not trained again, and several processes share the rest.
"""

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any

from resformer.environment import describe_environment
from resformer.files import locked, replace_text
from resformer.training.data import STANDARD_LIBRARY
from resformer.training.options import PretrainOptions, TokenizeOptions
from resformer.training.pretraining import pretrain
from resformer.training.tokenizing import tokenize

OPTIMIZERS, RATES, SEEDS = ("adamw", "muon"), (3e-3, 6e-3, 1.2e-2), (0, 1)


def run(folder: Path, optimizer: str, rate: float, seed: int) -> dict[str, Any] | None:
    """What was measured; `None` while another process trains it."""
    output = folder / f"{optimizer}-{rate}-{seed}"
    with locked(folder / f"{output.name}.lock") as free:
        if not free:
            return None
        if not output.exists():
            given = {"optim": "muon"} if optimizer == "muon" else {}
            options = {
                "tokens": 2_000_000,
                "batch_tokens": 8192,
                "learning_rate": rate,
                "evaluations": 1,
                "resume": True,
            }
            pretrain(
                PretrainOptions(
                    output=str(output),
                    data=[str(folder / "tokens")],
                    method="transformer",
                    seed=seed,
                    **options,
                    **given,
                )
            )
        metrics = json.loads((output / "metrics.json").read_text(encoding="utf-8"))
    kept = {name: metrics[name] for name in ("parameters", "tokens", "loss_before", "loss_after", "seconds")}
    return {"optimizer": optimizer, "learning_rate": rate, "seed": seed, **kept}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--folder", type=Path, required=True)
    arguments = parser.parse_args()
    tokens = arguments.folder / "tokens"
    with locked(arguments.folder / "tokens.lock", wait=True):
        if not tokens.exists():
            tokenize(TokenizeOptions(data=[STANDARD_LIBRARY], output=str(tokens), tokenizer="bpe:4096", held_out=0.1))
    runs = [run(arguments.folder, optimizer, rate, SEEDS[0]) for rate in RATES for optimizer in OPTIMIZERS]
    if None in runs:
        print("Other processes train the rest.")
        return
    for optimizer in OPTIMIZERS:
        best = min(
            (each for each in runs if each and each["optimizer"] == optimizer), key=lambda each: each["loss_after"]
        )
        runs += [run(arguments.folder, optimizer, best["learning_rate"], seed) for seed in SEEDS[1:]]
    described = {"command": shlex.join(["python", *sys.argv]), "environment": describe_environment(), "runs": runs}
    replace_text(arguments.output, json.dumps(described, indent=1) + "\n")


if __name__ == "__main__":
    main()
