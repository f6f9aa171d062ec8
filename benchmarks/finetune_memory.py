"""What `resformer finetune --dry-run` predicts a run to take, and what the run takes; and the memory of 8B adapters.

    python benchmarks/finetune_memory.py CHECKPOINT --output benchmarks/results/finetune_memory.json

Every run is a process of two steps, whose largest resident memory is read, or the accelerator's, by
`resformer.training.memory.peak_memory`. The adapters are computed, not run: LoRA of a model of Llama-3.1-8B's shape in
4 bits, with the activations of `predicted_memory` in bfloat16.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from decode import run_facts, write
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import PreTrainedModel

from resformer import ResFormerConfig, ResFormerForCausalLM
from resformer.training.memory import predicted_memory

#: Sequences of a pass, tokens of a sequence, further options.
RUNS: list[tuple[int, int, list[str]]] = [
    (1, 128, []),
    (2, 256, []),
    (2, 256, ["--gradient-checkpointing"]),
    (1, 128, ["--optim", "adafactor"]),
]
LLAMA_8B: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}
#: bitsandbytes: 4 bits a weight, and a float32 scale for each 64, which nested quantisation stores in 8 bits.
BYTES_4_BIT = 0.5 + 1 / 64 + 4 / 64 / 256


def finetune(checkpoint: str, batch: int, block: int, options: list[str]) -> dict[str, Any]:
    """The predicted and the measured bytes of one run."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["finetune", checkpoint, f"{folder}/out", "--data", "standard-library", "--json", "--steps", "2"]
        command += ["--batch", str(batch), "--block", str(block), "--held-out-blocks", str(batch), *options]
        command += ["--set", "save_strategy=no", "--set", "eval_steps=2"]
        reports = []
        for more in (["--dry-run"], []):
            done = subprocess.run(
                [sys.executable, "-m", "resformer", *command, *more], stdout=subprocess.PIPE, check=True
            )
            reports.append(json.loads(done.stdout))
    predicted, measured = reports[0]["predicted_memory"], reports[1]["peak_memory"]
    run = {"batch": batch, "block": block, "options": options, "predicted": predicted, "measured": measured}
    run["ratio"] = round(predicted["peak"] / measured, 3)
    print(json.dumps(run), file=sys.stderr)
    return run


def adapter_of_8b(method: str, batch: int, block: int, rank: int) -> dict[str, Any]:
    """Bytes of LoRA in all linear layers, of 4-bit weights, with the connections trained whole."""
    config = ResFormerConfig.for_method(method, **LLAMA_8B)
    lora = LoraConfig(target_modules="all-linear", r=rank, modules_to_save=["value_residual", "depth_average"])

    def build() -> PreTrainedModel:
        torch.set_default_dtype(torch.bfloat16)
        # Tensors without data cannot be moved to where they are.
        with patch.object(nn.Module, "to", lambda module, *_, **__: module):
            model = get_peft_model(ResFormerForCausalLM(config), lora, autocast_adapter_dtype=False)
        torch.set_default_dtype(torch.float32)
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
        return model

    predicted = predicted_memory(build, batch=batch, block=block)
    with torch.device("meta"):
        layers = ResFormerForCausalLM(config).model.layers
    linear = [module.weight.numel() for module in layers.modules() if type(module) is nn.Linear]
    # What autograd sees is in bfloat16: each weight is dequantised for its product, one at a time.
    saved = round(sum(linear) * (2 - BYTES_4_BIT)) - 2 * max(linear)
    weights = predicted["weights"] - round(sum(linear) * (2 - BYTES_4_BIT))
    run = {"method": method, "batch": batch, "block": block, "rank": rank, "computed": True}
    return {**run, **predicted, "weights": weights, "peak": predicted["peak"] - saved}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    facts = argparse.Namespace(device=device, dtype="float32", threads=arguments.threads, clock="wall")
    results = {**run_facts(facts, {}), "finetune": [], "adapters of 8B": []}
    for block in (2048, 4096):
        results["adapters of 8B"].append(adapter_of_8b("resformer", 1, block, 16))
        write(results, arguments.output)
    for run in RUNS:
        results["finetune"].append(finetune(arguments.checkpoint, *run))
        write(results, arguments.output)


if __name__ == "__main__":
    main()
