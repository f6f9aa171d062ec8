"""Time and peak memory of a conversion beside `cp -r` of the same folder, in pairs, medians of rounds.

    python benchmarks/convert.py --folder /some/disk --output benchmarks/results/convert.json

Makes a bfloat16 Llama of 4 GB in 4 shards in FOLDER (which needs four times that), converts it with the command line in
new processes, and removes everything. Every conversion has its own `cp -r`, in turn right before and right after it.
The process that becomes `cp` first imports what the converter imports, so that both start alike, and background work of
the system affects both. Times are given with and without the start-up, that of a process that imports the same and
ends.
"""

import argparse
import json
import math
import os
import platform
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import torch
import transformers

import resformer
from resformer.names import standard_names
from resformer.safetensors_format import Tensor, header_bytes

_IMPORTS = "import resformer.cli, resformer.convert.retrofitting"
_TORCH = "import torch"
#: Case -> arguments of `resformer convert`, the bound on its time as a multiple of `cp -r`'s, and the aim.
CASES: dict[str, tuple[list[str], float, float]] = {
    "link, hashes": (["--link", "--verify", "hashes"], 0.05, 0.02),
    "copy, headers": (["--verify", "headers"], 1.10, 0.9),
    "copy, hashes": (["--verify", "hashes"], float("nan"), float("nan")),
}


def make_checkpoint(folder: Path, layers: int) -> int:
    """A Llama of about 0.15 GB a layer, random numbers in 4 shards. Returns the bytes of its largest tensor."""
    hidden, inner, heads, kv_heads, vocabulary = 2560, 6912, 20, 4, 32000
    head_dim = hidden // heads
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "dtype": "bfloat16",
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "tie_word_embeddings": False,
    }
    shapes = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        shapes |= {
            f"{prefix}.input_layernorm.weight": (hidden,),
            f"{prefix}.self_attn.q_proj.weight": (hidden, hidden),
            f"{prefix}.self_attn.k_proj.weight": (kv_heads * head_dim, hidden),
            f"{prefix}.self_attn.v_proj.weight": (kv_heads * head_dim, hidden),
            f"{prefix}.self_attn.o_proj.weight": (hidden, hidden),
            f"{prefix}.post_attention_layernorm.weight": (hidden,),
            f"{prefix}.mlp.gate_proj.weight": (inner, hidden),
            f"{prefix}.mlp.up_proj.weight": (inner, hidden),
            f"{prefix}.mlp.down_proj.weight": (hidden, inner),
        }
    shapes |= {"model.norm.weight": (hidden,), "lm_head.weight": (vocabulary, hidden)}
    numbers = (torch.randn(2**25, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()
    block = memoryview(numbers.view(torch.uint8).numpy().data)
    tensors = [Tensor(name, "BF16", shape, 0, 2 * math.prod(shape)) for name, shape in shapes.items()]
    total, shards, size = sum(tensor.nbytes for tensor in tensors), [[]], 0
    for tensor in tensors:
        if size > total / 4 * len(shards):
            shards.append([])
        shards[-1].append(tensor)
        size += tensor.nbytes
    folder.mkdir(parents=True)
    weight_map = {}
    for name, shard in zip(standard_names(len(shards)), shards, strict=True):
        with (folder / name).open("wb") as file:
            file.write(header_bytes(shard))
            for tensor in shard:
                weight_map[tensor.name] = name
                for start in range(0, tensor.nbytes, len(block)):
                    file.write(block[: min(len(block), tensor.nbytes - start)])
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config))
    return max(tensor.nbytes for tensor in tensors)


#: Measured from a small process: a child's peak includes its parent's size at the time of the fork.
_MEASURE = """
import os, subprocess, sys, time
start = time.perf_counter()
done = subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL)
_, status, usage = os.wait4(done.pid, 0)
print(status, time.perf_counter() - start, usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024))
"""


def run(command: list[str]) -> tuple[float, int]:
    """(seconds, peak resident bytes) of a process, by the operating system's accounting."""
    measured = subprocess.run(
        [sys.executable, "-I", "-S", "-c", _MEASURE, *command], capture_output=True, text=True, check=True
    )
    status, seconds, peak = measured.stdout.split()
    if status != "0":
        raise SystemExit(f"{' '.join(command)}: {measured.stderr}")
    return float(seconds), int(peak)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="on the disk to measure; a subfolder is made in it")
    parser.add_argument("--output", type=Path, help="where the JSON goes; default: stdout alone")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=28, help="28 are 4.2 GB")
    arguments = parser.parse_args()
    work = arguments.folder / "resformer-benchmark"
    work.mkdir(parents=True)
    try:
        results = measure(work, arguments.rounds, arguments.layers)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    text = json.dumps(results, indent=2) + "\n"
    print(text, end="")
    if arguments.output is not None:
        arguments.output.write_text(text)


def measure(work: Path, rounds: int, layers: int) -> dict[str, object]:
    source, target = work / "source", work / "target"
    largest = make_checkpoint(source, layers)
    convert = [sys.executable, "-m", "resformer", "convert", str(source), str(target)]
    become = [sys.executable, "-c", f"{_IMPORTS}; import os, sys; os.execvp(sys.argv[1], sys.argv[1:])"]
    copying = [*become, "cp", "-r", str(source), str(target)]
    seconds: dict[str, list[float]] = {name: [] for name in CASES}
    copies: dict[str, list[float]] = {name: [] for name in CASES}
    memory: dict[str, list[int]] = {name: [] for name in CASES}
    imports, torches = [], []

    def measured(name: str, command: list[str]) -> tuple[float, int]:
        os.sync()
        took, peak = run(command)
        shutil.rmtree(target, ignore_errors=True)
        print(f"{number:3} {name:28} {took:7.2f} s {peak / 1e6:8.0f} MB", file=sys.stderr)
        return took, peak

    for number in range(-1, rounds):  # the first warms the caches and does not count
        torches.append(measured("import torch", [sys.executable, "-c", _TORCH])[1])
        imports.append(measured("import the converter", [*become, "true"]))
        for name, (options, _, _) in CASES.items():
            pair = [("cp -r", copying), (name, convert + options)]
            for what, command in pair if number % 2 == 0 else reversed(pair):
                took, peak = measured(what, command)
                if number < 0:
                    continue
                if what == name:
                    seconds[name].append(took)
                    memory[name].append(peak)
                else:
                    copies[name].append(took)
    start_up, torch_alone = statistics.median(took for took, _ in imports), statistics.median(torches)
    cases = {}
    for name, (options, bound, aim) in CASES.items():
        beyond = [took - start_up for took in seconds[name]]
        of_cp = statistics.median(own / (copy - start_up) for own, copy in zip(beyond, copies[name], strict=True))
        met = of_cp <= bound or (name.startswith("link") and statistics.median(beyond) < 1.0)
        cases[name] = {
            "options": " ".join(options),
            "seconds": round(statistics.median(seconds[name]), 3),
            "seconds_beyond_start_up": round(statistics.median(beyond), 3),
            "cp_seconds_beyond_start_up": round(statistics.median(copies[name]) - start_up, 3),
            "of_cp": round(of_cp, 3),
            **({"bound_of_cp": bound, "aim_of_cp": aim, "met": met} if bound == bound else {}),
            "peak_mb_beyond_torch": round((statistics.median(memory[name]) - torch_alone) / 1e6, 1),
            "all_seconds": [round(value, 3) for value in seconds[name]],
            "all_cp_seconds": [round(value, 3) for value in copies[name]],
        }
    return {
        "command": f"python benchmarks/convert.py --folder FOLDER --rounds {rounds} --layers {layers}",
        "checkpoint": {
            "bytes": sum(path.stat().st_size for path in source.iterdir()),
            "shards": 4,
            "dtype": "bfloat16",
            "largest_tensor_mb": round(largest / 1e6, 1),
        },
        "start_up_seconds": round(start_up, 3),
        "start_up_peak_mb_beyond_torch": round((statistics.median(peak for _, peak in imports) - torch_alone) / 1e6, 1),
        "memory_bound_mb_beyond_torch": round(1.5 * largest / 1e6 + 100, 1),
        "cases": cases,
        "note": "cp -r and conversions leave data to be written to the disk later",
        "hardware": f"{os.cpu_count()} cores, {platform.machine()}, local disk, all files in the page cache",
        "versions": {
            "resformer": resformer.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
    }


if __name__ == "__main__":
    main()
