"""Connected families in other engines, beside `generate` or the model itself, on the CPU in float32.

    python benchmarks/engines.py benchmarks/results/engines.json

Continuous batching: prompts of 7, 40 and 130 tokens, 16 greedy tokens each. torch.export and ONNX, for another batch
and length than those that were traced, without a cache: the largest difference of logits. ONNX is left out where the
packages `onnx`, `onnxscript` and `onnxruntime` are not installed.
"""

import json
import platform
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers
from serve import FAMILIES, NEW, PROMPTS, SMALL, save
from transformers import AutoConfig, AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

import resformer

CASES = [(family, method) for family in ("llama", "gemma3_text", "qwen3_moe") for method in ("resformer-denseformer",)]
CASES += [("qwen3", "svformer"), ("qwen3", "value-embeddings"), ("llama", "cla2")]


class Logits(torch.nn.Module):
    """The logits alone, which is what exporters take."""

    def __init__(self, model: Any):
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=input_ids, use_cache=False).logits


def batched(model: Any) -> int:
    """Tokens of continuous batching that are `generate`'s."""
    settings = GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0)
    pages = ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=256)
    answers = [each.generated_tokens for each in model.generate_batch(PROMPTS[:3], settings, pages).values()]
    equal = 0
    for prompt, answer in zip(PROMPTS, answers, strict=False):
        expected = model.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False)[0, -NEW:].tolist()
        equal += sum(one == other for one, other in zip(answer, expected, strict=True))
    return equal


def largest(found: torch.Tensor, expected: torch.Tensor) -> float:
    return (found - expected).abs().max().item()


def main(output: Path) -> None:
    traced, other = (
        torch.randint(1, 300, shape, generator=torch.Generator().manual_seed(0)) for shape in [(2, 9), (3, 17)]
    )
    dynamic = ({0: torch.export.Dim("batch"), 1: torch.export.Dim("tokens")},)
    rows: list[dict[str, Any]] = []
    for family, method in CASES:
        with tempfile.TemporaryDirectory() as scratch:
            save(method, AutoConfig.for_model(family, **{**SMALL, **FAMILIES[family]}), Path(scratch))
            model = AutoModelForCausalLM.from_pretrained(scratch, dtype=torch.float32).eval()
            row: dict[str, Any] = {"family": family, "method": method, "batched": batched(model), "of": 3 * NEW}
            if family == "qwen3_moe":
                model.set_experts_implementation("batched_mm")  # the loop over experts depends on the tokens
            with torch.no_grad():
                expected = model(other, use_cache=False).logits
                program = torch.export.export(Logits(model), (traced,), dynamic_shapes=dynamic, strict=False)
                row["export"] = largest(program.module()(other), expected)
                if find_spec("onnxruntime"):
                    import onnxruntime

                    file = str(Path(scratch, "model.onnx"))
                    torch.onnx.export(program, dynamo=True).save(file)
                    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
                    (found,) = session.run(None, {session.get_inputs()[0].name: other.numpy()})
                    row["onnx"] = largest(torch.from_numpy(found), expected)
        rows.append(row)
        print(row, flush=True)
    versions = {
        "resformer": resformer.__version__,
        "transformers": transformers.__version__,
        "torch": torch.__version__,
    }
    if find_spec("onnxruntime"):
        import onnxruntime

        versions["onnxruntime"] = onnxruntime.__version__
    report = {
        "command": f"python benchmarks/engines.py {output}",
        "versions": {**versions, "python": platform.python_version()},
        "rows": rows,
    }
    output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
