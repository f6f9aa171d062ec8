"""Tokens a second of `resformer pretrain` against a bare PyTorch loop of the same model and batch, on one core.

    python benchmarks/pretrain_speed.py --output benchmarks/results/pretrain_speed.json

Both take turns in one process, in its CPU time, which a busy machine disturbs little. The loop has the forward and
backward passes, AdamW, clipping and autocast, and nothing else: no data but one batch, no log, no schedule.
Evaluations and the first step are in neither time. `tokenize` is timed alike, with one worker, on the sources of the
standard library.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from decode import run_facts, write
from transformers import AutoModelForCausalLM, TrainerCallback

from resformer.training.data import STANDARD_LIBRARY
from resformer.training.options import PretrainOptions, TokenizeOptions
from resformer.training.pretraining import pretrain
from resformer.training.recipe import uses_bf16
from resformer.training.tokenizing import tokenize


class Clock(TrainerCallback):
    """CPU seconds at the end of each step."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.ends.append(time.process_time())


def bare(checkpoint: Path, batch: int, block: int, steps: int) -> list[float]:
    """CPU seconds at the end of each step of the loop."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), fused=True)
    ids = torch.randint(model.config.vocab_size, (batch, block))
    ends = []
    for _ in range(steps):
        with torch.autocast("cpu", torch.bfloat16, enabled=uses_bf16(None)):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
        ends.append(time.process_time())
    return ends


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    block, batch, steps = 512, arguments.batch, arguments.steps
    facts = argparse.Namespace(device="cpu", dtype="float32", threads=1, clock="cpu")
    results: dict[str, Any] = {**run_facts(facts, {}), "batch": batch, "block": block, "bf16": uses_bf16(None)}
    with tempfile.TemporaryDirectory() as scratch:
        first = Path(scratch, "first")
        made = TokenizeOptions(data=[STANDARD_LIBRARY], output=str(first), tokenizer="bpe:4096", held_out=0.1)
        tokenize(made)
        begin = time.process_time()
        again = TokenizeOptions(**{**vars(made), "output": f"{scratch}/again", "tokenizer": str(first / "tokenizer")})
        index = tokenize(again)
        tokens = sum(index[side]["tokens"] for side in ("train", "validation"))
        results["tokenize, tokens/s of a core"] = round(tokens / (time.process_time() - begin))
        rounds = []
        for number in range(arguments.rounds):
            options = PretrainOptions(
                output=f"{scratch}/{number}", data=[str(first)], block=block, held_out_blocks=8, evaluations=1,
                batch_tokens=batch * block, micro_batch=batch, tokens=steps * batch * block,
            )  # fmt: skip
            clock = Clock()
            pretrain(options, callbacks=[clock])
            ends = {"pretrain": clock.ends, "bare": bare(Path(options.output), batch, block, steps)}
            seconds = {name: each[-1] - each[0] for name, each in ends.items()}
            rounds.append({name: round((steps - 1) * batch * block / each, 1) for name, each in seconds.items()})
        results["rounds, tokens/s"] = rounds
        results["ratio"] = round(statistics.median(each["pretrain"] / each["bare"] for each in rounds), 3)
        write(results, arguments.output)


if __name__ == "__main__":
    main()
