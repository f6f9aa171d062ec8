"""`resformer pretrain` learns what a bare loop does that is written from the pages, each document by itself."""

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from resformer.training.options import NewOptions, PretrainOptions
from resformer.training.pretraining import pretrain
from resformer.training.untrained import new_checkpoint

SHAPE = {"hidden_size": 32, "num_hidden_layers": 3, "intermediate_size": 48, "num_attention_heads": 4}
BLOCK, SEQUENCES, STEPS, RATE = 32, 8, 20, 0.01
LINES = [f"Value {number} of the first layer reaches layer {number % 7}." for number in range(300)]


def blocks_of(lines: list[str]) -> list[list[list[int]]]:
    """Blocks of the lines that are not held out, each as its parts of documents; a byte is a token."""
    letters = [
        *range(33, 127),
        *range(161, 173),
        *range(174, 256),
    ]  # GPT-2's alphabet of bytes, in the order of its letters
    letters += [byte for byte in range(256) if byte not in letters]
    number = {byte: index for index, byte in enumerate(letters, start=1)}
    tokens: list[tuple[int, int]] = []
    for document, line in enumerate(lines):
        if int.from_bytes(hashlib.sha256(line.encode()).digest()[:8]) >= 0.1 * 2**64:
            tokens += [(document, token) for token in (*(number[byte] for byte in line.encode()), 0)]
    blocks = []
    for begin in range(0, len(tokens) // BLOCK * BLOCK, BLOCK):
        parts: dict[int, list[int]] = {}
        for document, token in tokens[begin : begin + BLOCK]:
            parts.setdefault(document, []).append(token)
        blocks.append([*parts.values()])
    return blocks


def rate_at(step: int, schedule: str) -> float:
    """Of the highest, after a warm-up of one step."""
    if step < 1:
        return 0.0
    if schedule == "wsd":
        return min(1.0, (STEPS - step) / 4)
    return 0.1 + 0.9 * (1 + math.cos(math.pi * (step - 1) / (STEPS - 1))) / 2 if schedule == "cosine" else 1.0


@pytest.mark.parametrize(
    ("method", "schedule", "micro"),
    [("resformer-denseformer", "cosine", 8), ("transformer", "wsd", 8), ("svformer", "constant", 2)],
)
def test_losses_are_those_of_a_bare_loop(method: str, schedule: str, micro: int, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("\n".join(LINES))
    common: dict[str, Any] = {"method": method, "tokenizer": "bytes", "fields": SHAPE, "block": BLOCK, "seed": 3}
    new_checkpoint(NewOptions(output=str(tmp_path / "new"), **common))
    tokens = STEPS * SEQUENCES * BLOCK
    options = {"schedule": schedule, "learning_rate": RATE, "micro_batch": micro, "evaluations": 2, "held_out": 0.1}
    options |= {"sample_by": "line", "tokens": tokens, "batch_tokens": SEQUENCES * BLOCK, "bf16": False}
    given = PretrainOptions(output=str(tmp_path / "out"), data=[str(tmp_path / "text.txt")], **common, **options)
    pretrain(given)
    log = json.loads((tmp_path / "out" / "log.json").read_text())
    logged = [entry["loss"] for entry in log if "loss" in entry]  # means of two steps

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "new").train()
    groups: dict[tuple[float, float], list[Any]] = {}
    for name, parameter in model.named_parameters():
        added = "value_residual" in name or "depth_average" in name
        groups.setdefault((0.2 if added else RATE, 0.1 if parameter.ndim > 1 and not added else 0.0), []).append(
            parameter
        )
    optimizer = torch.optim.AdamW(
        [{"params": each, "lr": lr, "weight_decay": decay, "base": lr} for (lr, decay), each in groups.items()],
        betas=(0.9, 0.95),
    )
    blocks = blocks_of(LINES)
    passes = range(-(-STEPS * SEQUENCES // len(blocks)))
    order = np.concatenate([np.random.default_rng([3, 0, each]).permutation(len(blocks)) for each in passes])
    losses = []
    for step in range(STEPS):
        documents = [part for n in order[step * SEQUENCES : (step + 1) * SEQUENCES] for part in blocks[n]]
        count = sum(len(part) - 1 for part in documents)
        total = sum(
            cross_entropy(model(torch.tensor([part])).logits[0, :-1], torch.tensor(part[1:]), reduction="sum")
            for part in documents
            if len(part) > 1
        )
        (total / count).backward()
        losses.append(total.item() / count)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = group["base"] * rate_at(step, schedule)
        optimizer.step()
        optimizer.zero_grad()
    expected = [(losses[n] + losses[n + 1]) / 2 for n in range(0, STEPS, 2)]
    assert logged == pytest.approx(expected, abs=2e-3)
    assert losses[-1] < 0.6 * losses[0]
