"""Bytes, time and memory of commands that read only headers of checkpoints on the Hub.

    python benchmarks/hub.py --output benchmarks/results/hub.json

The Hub is that of the tests, on loopback: it counts the bytes of requests and answers. The sources have the tensors of
SmolLM2-135M, Llama-3.1-8B and Llama-3.1-70B, in as many files, and a tokenizer.json of about the same size; their
weights are zeros that take no space. Each command runs in a new process, whose time includes its imports.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import transformers

import resformer

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from checkpoints import SMOLLM2_135M, sparse_checkpoint
from hub_server import HubServer, Repository

#: Source -> files, bytes of tokenizer.json, configuration.
SOURCES: dict[str, tuple[int, int, dict[str, Any]]] = {
    "135M": (
        1,
        2_100_000,
        SMOLLM2_135M,
    ),
    "8B": (
        4,
        9_090_000,
        {
            "vocab_size": 128256,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
        },
    ),
    "70B": (
        30,
        9_090_000,
        {
            "vocab_size": 128256,
            "hidden_size": 8192,
            "intermediate_size": 28672,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
        },
    ),
}
#: Measured from a small process: a child's peak includes its parent's size at the time of the fork.
_MEASURE = """
import os, subprocess, sys, time
start = time.perf_counter()
done = subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL)
_, status, usage = os.wait4(done.pid, 0)
unit = 1 if sys.platform == "darwin" else 1024
print(status, time.perf_counter() - start, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * unit)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="where the JSON goes; default: stdout alone")
    parser.add_argument("--sources", nargs="+", choices=SOURCES, default=list(SOURCES))
    arguments = parser.parse_args()
    results: dict[str, Any] = {
        "command": f"python benchmarks/hub.py --sources {' '.join(arguments.sources)}",
        "imports": _measured([sys.executable, "-c", "import resformer.cli, resformer.convert.retrofitting"]),
        "sources": {},
        "hardware": f"{os.cpu_count()} cores, {platform.machine()}, shared with other work, the Hub's among it",
        "versions": {"resformer": resformer.__version__, "transformers": transformers.__version__},
    }
    for name in arguments.sources:
        results["sources"][name] = measure(name)
        if arguments.output is not None:
            arguments.output.write_text(json.dumps(results, indent=2) + "\n")
    print(json.dumps(results, indent=2))


def measure(name: str) -> dict[str, Any]:
    shards, tokenizer, fields = SOURCES[name]
    files = sparse_checkpoint(shards, **fields)
    files["tokenizer.json"] = b"{" + b" " * (tokenizer - 2) + b"}"
    source = f"them/{name}"
    weights = sum(len(content) for file, content in files.items() if file.endswith(".safetensors"))
    commands = {"inspect": ["inspect", source], "dry run": ["convert", source, "out", "--dry-run"]}
    cases: dict[str, Any] = {}
    for case, command in commands.items():
        with HubServer() as hub, tempfile.TemporaryDirectory() as home:
            hub.repositories[source] = Repository()
            hub.repositories[source].update(files)
            os.environ.update(hub.environment(Path(home)))
            cases[case] = {
                **_measured([sys.executable, "-m", "resformer", *command]),
                "downloaded": hub.sent,
                "uploaded": hub.received,
                "requests": len(hub.requests),
                "on_disk": sum(path.lstat().st_size for path in Path(home).rglob("*") if path.is_file()),
            }
            print(name, case, cases[case], file=sys.stderr)
    headers = [len(content.head) for content in files.values() if not isinstance(content, bytes)]
    return {"bytes_of_weights": weights, "files": shards, "bytes_of_headers": sum(headers), "cases": cases}


def _measured(command: list[str]) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", _MEASURE, *command], capture_output=True, text=True, check=True
    )
    status, seconds, cpu_seconds, peak = map(float, done.stdout.split())
    if status:
        raise SystemExit(f"{' '.join(command)}: {done.stderr}")
    return {"seconds": round(seconds, 1), "cpu_seconds": round(cpu_seconds, 1), "peak_mb": round(peak / 1e6)}


if __name__ == "__main__":
    main()
