"""What added parameters gain on a frozen checkpoint, beside LoRA of as many.

    python benchmarks/capacity.py CHECKPOINT OUTPUT.jsonl --seed 10 --steps 610 --rate 4e-3

Only what is added is trained, on the text and in the order of `resformer compare`: the connections of exact methods,
and adapters. The arm `checkpoint` adds nothing, and is evaluated. OUTPUT is a record as `compare` writes it, with `arm`
and `trained` of each run and the source of each held-out document. Finished runs are kept; several processes share the
runs.
"""

import argparse
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from resformer import retrofit
from resformer.configuration import METHODS
from resformer.environment import describe_environment
from resformer.files import locked
from resformer.training.data import STANDARD_HELD_OUT, STANDARD_LIBRARY, is_row_held_out, load_documents
from resformer.training.optimizer import is_connection
from resformer.training.options import StudyOptions, refuse_other
from resformer.training.study.data import study_data
from resformer.training.study.paired_run import losses_by_document, paired_run
from resformer.training.study.record import add_line, read_record

LORA: dict[str, dict[str, Any]] = {
    "lora-all-linear": {"r": 4, "target_modules": "all-linear"},
    "lora-values": {"r": 2, "target_modules": ["v_proj"]},
    "lora-values-1": {"r": 1, "target_modules": ["v_proj"]},
}
#: The bare checkpoint, methods whose effect depends on the input, and LoRA of about as many parameters.
ARMS = [
    *("checkpoint", "value-embeddings", "lora-all-linear", "resformer-gated", "attention-residuals", "depth-attention"),
    "lora-values",
]


def model_of(arm: str, checkpoint: Path, converted: Path) -> Any:
    """The checkpoint, frozen, with the arm's parameters."""
    torch.manual_seed(0)
    method = arm if arm in METHODS else "transformer"
    retrofit(checkpoint, converted, method, force=True, verify="headers", progress=False)
    model = AutoModelForCausalLM.from_pretrained(converted, dtype=torch.float32)
    if arm in LORA:
        return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **LORA[arm]))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_connection(name))
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--seed", type=int, default=0, help="of the order of the batches")
    parser.add_argument("--steps", type=int, default=610)
    parser.add_argument("--rate", type=float, default=4e-3)
    parser.add_argument("--block", type=int, default=256)
    parser.add_argument("--held-out-blocks", type=int, default=512)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--micro-batch", type=int)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--arms", nargs="+", choices=["checkpoint", *METHODS, *LORA], default=ARMS)
    parser.add_argument("--data", nargs="+", default=[STANDARD_LIBRARY])
    parser.add_argument("--held-out", type=float, default=STANDARD_HELD_OUT)
    arguments = parser.parse_args()
    options = StudyOptions(
        output="",
        data=arguments.data,
        held_out=arguments.held_out,
        steps=arguments.steps,
        batch=arguments.batch,
        micro_batch=arguments.micro_batch,
        block=arguments.block,
        held_out_blocks=arguments.held_out_blocks,
        learning_rate=arguments.rate,
        connection_learning_rate=arguments.rate,
        bf16=arguments.bf16,
    )
    data = study_data(options, str(arguments.checkpoint))
    documents = load_documents(arguments.data, held_out=arguments.held_out)
    sources = [
        Path(source).name
        for source, part in documents.items()
        for row in part
        if row["text"] and is_row_held_out(row, row["text"], arguments.held_out)
    ]
    study = {
        **{name: getattr(arguments, name) for name in ("block", "batch", "bf16")},
        "checkpoint": str(arguments.checkpoint),
        "data": {"name": data.name, **data.fingerprint},
        "held_out_sources": sources,
    }
    file, settings = arguments.output, {"seed": arguments.seed, "rate": arguments.rate, "steps": arguments.steps}
    with locked(file.with_suffix(".beginning"), wait=True):
        if file.exists():
            refuse_other(file, read_record(file)[0][0], study, "study")
        else:
            add_line(file, {"study": {"command": shlex.join(["python", *sys.argv]), **study}})
    for arm in arguments.arms:
        described = {"arm": arm, **(settings if arm != "checkpoint" else {})}
        unfinished = file.with_suffix(".unfinished") / "-".join(map(str, described.values()))
        with locked(unfinished.with_suffix(".lock")) as free:
            (_, runs), *_ = read_record(file)
            if not free or any(described.items() <= run.items() for run in runs):
                continue
            model = model_of(arm, arguments.checkpoint, unfinished / "converted")
            trained = sum(each.numel() for each in model.parameters() if each.requires_grad)
            if arm == "checkpoint":
                with torch.autocast(model.device.type, torch.bfloat16, enabled=arguments.bf16):
                    held_out = losses_by_document(model, data.blocks.held_out.whole, arguments.batch)
                    run = {"held_out": held_out, "loss": held_out["loss"]}
            else:
                run = paired_run(model, data.blocks, options.settings, arguments.seed, folder=unfinished / "run")
            add_line(file, {**described, "trained": trained, **run, "environment": describe_environment()})
            shutil.rmtree(unfinished, ignore_errors=True)
            print(f"{arm}: {run['loss']:.4f}, {trained:,} parameters trained", flush=True)


if __name__ == "__main__":
    main()
