"""The plan that `resformer shrink` searches for against plans by rule, at equal bytes, all refitted in the same way.

    python benchmarks/shrink_plans.py --source SmolLM2-135M-Instruct --calibrate valid.txt --evaluate test.txt \
        --plan SHRUNKEN/resformer_conversion.json

By rule, as many layers as it takes share both keys and values: uniform pairs, every second layer of the middle, the
lowest, the highest, the pairs of KVSharer (arXiv 2410.18517: most distant mean keys and values first), and 5 random
plans, each of whose layers reads the keys, or the values, of a random earlier layer. Writes results/shrink_plans.json.
"""

import argparse
import json
import random
import shlex
import sys
import time
from pathlib import Path

import torch
from transformers import AutoTokenizer

from resformer.convert.families import backbone_config
from resformer.convert.source import open_source
from resformer.shrinking.accounting import block_logits, compare_predictions
from resformer.shrinking.calibration import Calibration, calibrating, student_of
from resformer.shrinking.readers import Plan, Readers
from resformer.shrinking.shrink import plain_model
from resformer.training.data import load_documents
from resformer.training.packing import pack_all

RESULTS = Path(__file__).parent / "results" / "shrink_plans.json"


def whole_layers(layers: int, pairs: dict[int, int]) -> Plan:
    """Layers that read both the keys and the values of another."""
    sources = tuple(pairs.get(n, n) for n in range(layers))
    return Plan(sources, sources)


def nearest(readers: list[int]) -> dict[int, int]:
    """Each reader with the nearest lower layer that keeps its own."""
    return {n: next(a for a in range(n - 1, -1, -1) if a not in readers) for n in readers}


def kvsharer(calibration: Calibration, count: int) -> dict[int, int]:
    """The `count` pairs whose mean keys and values are the most distant; the later layer reads the earlier one."""
    rows = calibration.fitted[:4]
    means = []
    for n in range(len(calibration.layers)):
        parts = [torch.cat((calibration.keys(n, [row]), calibration.values(n, [row])), -1) for row in rows]
        means.append(torch.cat(parts).mean((0, 1)).flatten())
    distance = {(a, n): float((means[n] - means[a]).norm()) for n in range(len(means)) for a in range(n)}
    pairs: dict[int, int] = {}
    for a, n in sorted(distance, key=distance.__getitem__, reverse=True):
        if len(pairs) < count and n not in pairs and a not in pairs and n not in pairs.values():
            pairs[n] = a
    return pairs


def random_plan(layers: int, shares: int, seed: int) -> Plan:
    """`shares` layers that read the keys, or the values, of a random earlier layer that keeps its own."""
    generator = random.Random(seed)
    slots = generator.sample([(kind, n) for kind in (0, 1) for n in range(1, layers)], shares)
    sources = [list(range(layers)), list(range(layers))]
    for kind, n in slots:
        sources[kind][n] = generator.choice([a for a in range(n) if (kind, a) not in slots])
    return Plan(tuple(sources[0]), tuple(sources[1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", required=True)
    parser.add_argument("--calibrate", required=True)
    parser.add_argument("--evaluate", required=True)
    parser.add_argument("--plan", required=True, help="JSON with `fields`: the plan that was searched for.")
    parser.add_argument("--steps", type=int, default=100, help="Steps for each query projection.")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    source = open_source(options.source).fetch()
    model = plain_model(source, backbone_config(source.config))
    tokenizer = AutoTokenizer.from_pretrained(source.folder)
    blocks, held_out = (
        torch.stack(
            [item["input_ids"] for item in pack_all(load_documents([text]), tokenizer, block=512, most=most, side=text)]
        )
        for text, most in ((options.calibrate, 64), (options.evaluate, 12))
    )
    layers = model.config.num_hidden_layers
    own = list(range(layers))
    fields = json.loads(Path(options.plan).read_text())["fields"]
    searched = Plan(tuple(fields.get("key_sources", own)), tuple(fields.get("value_sources", own)))
    shares = 2 * layers - searched.kept
    whole = shares // 2
    rows = []
    with calibrating(model, blocks) as calibration, torch.inference_mode():
        stride = layers / whole
        plans = {
            "searched": searched,
            "uniform pairs": whole_layers(layers, nearest([int(i * stride) + 1 for i in range(whole)])),
            "every second layer": whole_layers(layers, nearest(own[layers // 2 - whole : layers // 2 + whole : 2])),
            "lowest": whole_layers(layers, nearest(own[1 : 1 + whole])),
            "highest": whole_layers(layers, nearest(own[-whole:])),
            "KVSharer": whole_layers(layers, kvsharer(calibration, whole)),
            **{f"random {seed}": random_plan(layers, shares, seed) for seed in range(5)},
        }
        readers = Readers(calibration, options.steps)
        plain = student_of(model, model.config, {})
        for name, plan in plans.items():
            begin = time.perf_counter()
            both = (block_logits(each, held_out) for each in (plain, readers.student(plan)))
            predictions = compare_predictions(*both, held_out)
            rise = (predictions.losses - predictions.source_losses).double().mean().item()
            rows.append(
                {
                    "plan": name,
                    **plan.fields(),
                    "kept": plan.kept,
                    "loss_rise": rise,
                    "kl": predictions.divergences.double().mean().item(),
                }
            )
            print(
                f"{name}: {plan.kept} of {2 * layers}, loss +{rise:.4f}, {time.perf_counter() - begin:.0f} s",
                flush=True,
            )
            result = {
                "command": shlex.join(["python", *sys.argv]),
                "calibration_tokens": blocks.numel(),
                "evaluation_tokens": int(predictions.targets.numel()),
                "plans": rows,
            }
            RESULTS.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
