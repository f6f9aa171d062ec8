"""Associative recall: how many steps until a model looks values up by their keys (arXiv 2312.04927).

    python benchmarks/recall.py benchmarks/results/study/recall.jsonl --layers 4 --seeds 10

A sequence is a beginning-of-sequence token, 64 pairs of a key and a value, then the keys again in another order, each
followed by its value; only these values are learned. All methods of a seed see the same sequences. A line of OUTPUT is
a run: accuracy on 128 new sequences at each evaluation, and the coefficients at the end. Runs that are there are kept.
"""

import argparse
import json
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from resformer.configuration import METHODS, ResFormerConfig
from resformer.environment import describe_environment
from resformer.files import locked
from resformer.training.optimizer import is_connection
from resformer.training.study.record import add_line, read_record

BOS, KEYS, VALUES, PAIRS = 0, 128, 128, 64
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPE = {"hidden_size": 64, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4}


def sequences(count: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids [count, 1 + 4 * PAIRS], and labels that are -100 but for the values that are asked for."""
    keys = 1 + torch.rand(count, KEYS, generator=generator).argsort(1)[:, :PAIRS]
    values = 1 + KEYS + torch.randint(VALUES, (count, PAIRS), generator=generator)
    order = torch.rand(count, PAIRS, generator=generator).argsort(1)
    parts = [
        torch.stack([part.gather(1, index) for part in (keys, values)], dim=2).flatten(1)
        for index in (torch.arange(PAIRS).expand(count, -1), order)
    ]
    ids = torch.cat([torch.full((count, 1), BOS), *parts], dim=1)
    labels = ids.masked_fill(torch.arange(ids.shape[1]) < 1 + 2 * PAIRS, -100)
    labels[:, 1 + 2 * PAIRS :: 2] = -100  # keys
    return ids.to(DEVICE), labels.to(DEVICE)


def accuracy(model: Any, generator: torch.Generator) -> float:
    ids, labels = sequences(128, generator)
    with torch.no_grad():
        predicted = model(ids).logits[:, :-1].argmax(-1)
    asked = labels[:, 1:] != -100
    return (predicted == labels[:, 1:])[asked].double().mean().item()


def trained(method: str, layers: int, seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    torch.manual_seed(seed)
    config = ResFormerConfig.for_method(
        method,
        vocab_size=1 + KEYS + VALUES,
        num_hidden_layers=layers,
        bos_token_id=BOS,
        initializer_range=0.08,
        **SHAPE,
    )
    model: Any = AutoModelForCausalLM.from_config(config).to(DEVICE)
    named = dict(model.named_parameters())
    connections = [parameter for name, parameter in named.items() if is_connection(name)]
    others = [parameter for name, parameter in named.items() if not is_connection(name)]
    groups = [
        {"params": others},
        {"params": connections, "lr": arguments.rate * arguments.connections, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        groups[: 1 + bool(connections)], lr=arguments.rate, betas=(0.9, 0.95), weight_decay=0.1
    )
    warm = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 50))
    order, begun, curve = torch.Generator().manual_seed(seed), time.monotonic(), []
    for step in range(1, arguments.steps + 1):
        ids, labels = sequences(arguments.batch, order)
        model(ids, labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        warm.step()
        optimizer.zero_grad()
        if step % arguments.every == 0:
            curve.append([step, accuracy(model, torch.Generator().manual_seed(10_000))])
    coefficients = {
        name: p.detach().flatten().tolist() for name, p in named.items() if is_connection(name) and p.numel() < 1000
    }
    return {"accuracy": curve, "coefficients": coefficients, "seconds": time.monotonic() - begun}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument(
        "--methods", nargs="+", choices=METHODS, default=["transformer", "resformer", "svformer", "denseformer"]
    )
    parser.add_argument("--layers", type=int, nargs="+", default=[4])
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--connections", type=float, default=1.0, help="times --rate")
    parser.add_argument("--every", type=int, default=100, help="steps between two evaluations")
    arguments = parser.parse_args()
    file: Path = arguments.output
    if not file.exists():
        add_line(
            file,
            {
                "study": {
                    "command": shlex.join(["python", *sys.argv]),
                    **SHAPE,
                    "pairs": PAIRS,
                    "keys": KEYS,
                    "values": VALUES,
                }
            },
        )
    settings = {name: getattr(arguments, name) for name in ("steps", "batch", "rate", "connections")}
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    for seed, layers, method in ((s, n, m) for s in seeds for n in arguments.layers for m in arguments.methods):
        described = {"method": method, "layers": layers, "seed": seed, **settings}
        with locked(file.with_name(".".join(map(str, described.values())) + ".lock")) as free:
            if free and not any(described.items() <= run.items() for run in read_record(file)[0][1]):
                add_line(
                    file,
                    {**described, **trained(method, layers, seed, arguments), "environment": describe_environment()},
                )
                print(json.dumps(described), read_record(file)[0][1][-1]["accuracy"][-1], flush=True)


if __name__ == "__main__":
    main()
