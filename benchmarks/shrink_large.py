"""Time and memory of the steps of `resformer shrink`, a layer at a time, on random weights in a large model's shape.

    python benchmarks/shrink_large.py --tokenizer SmolLM2-135M --calibrate text.txt

The shape is that of Llama-3.2-1B with the tokenizer's vocabulary, in bfloat16. Random weights take the same bytes and
arithmetic as trained ones; what the refits lose says nothing here and is not reported. Resident memory includes the
pages of the temporary file with the inputs of all layers that are in memory. Writes results/shrink_large.json.
"""

import argparse
import json
import platform
import shlex
import sys
import time
from pathlib import Path

import torch
from transformers import AutoTokenizer

from resformer import ResFormerConfig, ResFormerForCausalLM
from resformer.environment import peak_memory
from resformer.shrinking.calibration import calibrating
from resformer.shrinking.readers import Plan, Readers
from resformer.training.data import load_documents
from resformer.training.packing import pack_all

RESULTS = Path(__file__).parent / "results" / "shrink_large.json"
SHAPE = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--calibrate", required=True)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
    config = ResFormerConfig(vocab_size=len(tokenizer), tie_word_embeddings=True, **SHAPE)
    packed = pack_all(
        load_documents([options.calibrate]), tokenizer, block=512, most=options.tokens // 512, side="calibration"
    )
    blocks = torch.stack([each["input_ids"] for each in packed])
    layers = tuple(range(config.num_hidden_layers))
    steps: list[dict[str, float | str]] = []
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    model = ResFormerForCausalLM(config).to("cuda" if torch.cuda.is_available() else "cpu").eval()
    torch.set_default_dtype(dtype)
    begin = time.perf_counter()
    with calibrating(model, blocks) as calibration, torch.inference_mode():
        steps.append({"step": "inputs of all layers", "seconds": round(time.perf_counter() - begin, 1)})
        print(steps[-1], flush=True)
        for n in (1, 8, 15):
            for kind in ("value", "key"):
                begin = time.perf_counter()
                sources = [list(layers), list(layers)]
                sources[kind == "value"][n] = n - 1
                plan = Plan(*map(tuple, sources))
                Readers(calibration, 200, plan).fit(plan)
                seconds = round(time.perf_counter() - begin, 1)
                name = f"{kind}s of layer {n - 1} for layer {n}"
                steps.append({"step": name, "seconds": seconds, "peak_bytes": peak_memory()})
                print(steps[-1], flush=True)
    result = {
        "command": shlex.join(["python", *sys.argv]),
        "torch": torch.__version__,
        "machine": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine(),
        "threads": torch.get_num_threads(),
        "shape": SHAPE,
        "calibration_tokens": blocks.numel(),
        "weights_bytes": sum(parameter.nbytes for parameter in model.parameters()),
        "inputs_bytes": blocks.numel() * config.hidden_size * 2 * (config.num_hidden_layers + 1),
        "peak_bytes": peak_memory(),
        "steps": steps,
    }
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
