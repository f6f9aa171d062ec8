"""What added parameters gain on a frozen checkpoint, beside LoRA of as many.

    python benchmarks/capacity.py CHECKPOINT OUTPUT --seed 10 --steps 610 --rate 4e-3

Only what is added is trained, on the text and in the order of `resformer compare`: the connections of four exact
methods, whose effect depends on the input, and adapters of two sizes. OUTPUT/ARM.json has what a run of a study has,
and `trained`. Finished runs are kept; several processes share the runs.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from resformer import retrofit
from resformer.files import locked, replace_text
from resformer.training.optimizer import is_connection
from resformer.training.options import StudyOptions
from resformer.training.study.data import study_data
from resformer.training.study.paired_run import paired_run

#: Options of LoRA; `None`: the arm is a method.
ARMS: dict[str, dict[str, Any] | None] = {
    "value-embeddings": None,
    "lora-all-linear": {"r": 4, "target_modules": "all-linear"},
    "resformer-gated": None,
    "attention-residuals": None,
    "depth-attention": None,
    "lora-values": {"r": 2, "target_modules": ["v_proj"]},
}


def model_of(arm: str, checkpoint: Path, converted: Path) -> Any:
    """The checkpoint, frozen, with the arm's parameters."""
    torch.manual_seed(0)
    if ARMS[arm] is None:
        retrofit(checkpoint, converted, arm, force=True, verify="headers", progress=False)
        model = AutoModelForCausalLM.from_pretrained(converted, dtype=torch.float32)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(is_connection(name))
        return model
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **ARMS[arm]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--seed", type=int, default=0, help="of the order of the batches")
    parser.add_argument("--steps", type=int, default=610)
    parser.add_argument("--rate", type=float, default=4e-3)
    parser.add_argument("--block", type=int, default=256)
    parser.add_argument("--held-out-blocks", type=int, default=512)
    arguments = parser.parse_args()
    options = StudyOptions(
        output="",
        steps=arguments.steps,
        batch=16,
        block=arguments.block,
        held_out_blocks=arguments.held_out_blocks,
        learning_rate=arguments.rate,
        connection_learning_rate=arguments.rate,
        bf16=False,
    )
    data = study_data(options, str(arguments.checkpoint))
    for arm in ARMS:
        file, unfinished = arguments.output / f"{arm}.json", arguments.output / "unfinished" / arm
        with locked(unfinished.with_suffix(".lock")) as free:
            if not free or file.exists():
                continue
            model = model_of(arm, arguments.checkpoint, unfinished / "converted")
            trained = sum(each.numel() for each in model.parameters() if each.requires_grad)
            run = paired_run(model, data.blocks, options.settings, arguments.seed, folder=unfinished)
            facts = {"arm": arm, "trained": trained, "rate": arguments.rate, "held_out_groups": data.groups}
            replace_text(file, json.dumps({**facts, **run}, indent=2) + "\n")
            print(f"{file}: {run['loss']:.4f}, {trained:,} parameters trained", flush=True)


if __name__ == "__main__":
    main()
