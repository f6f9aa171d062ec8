"""`resformer pretrain` against a loop that is written from docs/pretraining.md and docs/finetuning.md alone."""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import others_slow
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

STEPS, SEQUENCES, BLOCK, RATE = 30, 8, 32, 4e-3
#: Options -> the names of connections' parameters, those of gates, the schedule, Muon.
RUNS: dict[str, tuple[str, str, str, str, bool]] = {
    "denseformer": ("--method resformer-denseformer", "value_residual|depth_average", "$^", "cosine", False),
    "accumulated": ("--method svformer --schedule constant --micro-batch 2", "$^", "$^", "constant", False),
    "muon": ("--method resformer-gated --schedule wsd --optim muon", "value_residual", "gate", "wsd", True),
}


def documents(file: str, tokenizer: Any) -> list[list[int]]:
    """A line each, and the end-of-sequence token."""
    return [tokenizer(line)["input_ids"] + [tokenizer.eos_token_id] for line in Path(file).read_text().splitlines()]


def blocks(texts: list[list[int]]) -> list[list[list[int]]]:
    """Back to back, the tail lost: of each block the documents, or their parts, in it."""
    tokens = [(number, token) for number, text in enumerate(texts) for token in text]
    cut = [tokens[begin : begin + BLOCK] for begin in range(0, len(tokens) - BLOCK + 1, BLOCK)]
    return [[[token for n, token in block if n == each] for each in dict(block)] for block in cut]


def nats(model: PreTrainedModel, block: list[list[int]]) -> tuple[torch.Tensor, int]:
    """Of all tokens that have one of their document before them, each document by itself."""
    total, count = torch.zeros(()), 0
    for part in (torch.tensor([each]) for each in block if len(each) > 1):
        logits = model(input_ids=part, use_cache=False).logits[0, :-1]
        total = total + cross_entropy(logits, part[0, 1:], reduction="sum")
        count += part.shape[1] - 1
    return total, count


def share(step: int, schedule: str) -> float:
    """Of the highest rate: warm-up in 5 % of the steps, then a tenth at the end, none, or 0 after a fifth."""
    warmup = math.ceil(0.05 * STEPS)
    if step < warmup:
        return step / warmup
    if schedule == "cosine":
        return 0.1 + 0.9 * (1 + math.cos(math.pi * (step - warmup) / (STEPS - warmup))) / 2
    return 1.0 if schedule == "constant" else min(1.0, (STEPS - step) / math.ceil(0.2 * STEPS))


def optimizers(model: PreTrainedModel, connections: str, gates: str, muon: bool) -> list[torch.optim.Optimizer]:
    """Matrices are decayed, connections not; coefficients learn 50 times as fast, at 0.2 at most."""
    groups: dict[tuple[bool, float, float], list[torch.nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        ours = re.search(connections, name)
        rate = min(50 * RATE, 0.2) if ours and not re.search(gates, name) else RATE
        is_layers = muon and not ours and parameter.ndim == 2 and ".layers." in name
        decay = 0.0 if ours or parameter.ndim < 2 else 0.1
        groups.setdefault((is_layers, rate, decay), []).append(parameter)
    made: list[torch.optim.Optimizer] = []
    for (is_layers, rate, decay), parameters in groups.items():
        if is_layers:
            made.append(torch.optim.Muon(parameters, rate, weight_decay=decay, adjust_lr_fn="match_rms_adamw"))
        else:
            made.append(torch.optim.AdamW(parameters, rate, betas=(0.9, 0.95), weight_decay=decay))
    return made


@pytest.mark.parametrize("name", others_slow(RUNS, ["accumulated"]))
def test_losses_are_those_of_a_bare_loop(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, invoke: Callable[..., Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    options, connections, gates, schedule, muon = RUNS[name]
    for file, numbers in (("text.txt", range(250)), ("held.txt", range(900, 930))):
        lines = [f"Value {n} of the first layer{' is read again' * (n % 3)} in layer {n % 7}." for n in numbers]
        Path(file).write_text("\n".join(lines) + "\n")
    done = invoke(
        tmp_path, "pretrain", "out", *options.split(), "--size", "tiny:num_hidden_layers=3:hidden_size=64",
        *"--data text.txt --held-out-data held.txt --sample-by line --tokenizer bytes --no-bf16 --spike 0".split(),
        *f"--block {BLOCK} --batch-tokens {SEQUENCES * BLOCK} --tokens {STEPS * SEQUENCES * BLOCK}".split(),
        *f"--learning-rate {RATE} --seed 3 --evaluations 1 --trainer logging_steps=1 --json".split(),
    )  # fmt: skip
    assert done.exit_code == 0, done.output

    model = AutoModelForCausalLM.from_pretrained("out.training/start", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained("out")
    packed, held = (blocks(documents(file, tokenizer)) for file in ("text.txt", "held.txt"))
    passes = range(-(-STEPS * SEQUENCES // len(packed)))
    order = np.concatenate([np.random.default_rng([3, 0, each]).permutation(len(packed)) for each in passes])
    made = optimizers(model, connections, gates, muon)
    rates = [optimizer.param_groups[0]["lr"] for optimizer in made]
    losses = []
    for step in range(STEPS):
        batch = [nats(model, packed[n]) for n in order[step * SEQUENCES :][:SEQUENCES]]
        loss = sum(total for total, _ in batch) / sum(count for _, count in batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, rate in zip(made, rates, strict=True):
            optimizer.param_groups[0]["lr"] = rate * share(step, schedule)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    with torch.no_grad():
        batch = [nats(model.eval(), block) for block in held]
    after = sum(total.item() for total, _ in batch) / sum(count for _, count in batch)

    report = json.loads(done.stdout)
    logged = [entry["loss"] for entry in json.loads(Path("out/log.json").read_text()) if "loss" in entry]
    assert logged == pytest.approx(losses, abs=3e-3)
    assert report["loss_after"] == pytest.approx(after, abs=3e-3)
    assert losses[-1] < losses[0] - 1
