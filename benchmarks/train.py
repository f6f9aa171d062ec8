"""How fast and how lean the models train, against `LlamaForCausalLM`.

    python benchmarks/train.py --output benchmarks/results/train.json
    python benchmarks/train.py --threads 1 --clock cpu --output benchmarks/results/train-1-thread.json
    python benchmarks/train.py --device cuda --dtype bfloat16 --output benchmarks/results/train-cuda.json

Time: a step is forward, loss and backward; AdamW's update after it is timed too. All models of a shape are in one
process, share Llama's parameters and take a step each in every round, in an order that turns with the rounds. A ratio
is the median over the rounds of the ratio within a round. `llama again` is Llama a second time: how far its ratio is
from 1 is how far the others can be trusted. Rounds in which other processes took more than a tenth of a core are left
out where enough others remain.

Memory: the parameters, and the most that torch has allocated at once beyond them between the start of a step and the
end of its backward pass, gradients included: on a CPU by the profiler's record of every allocation, which no other
process and no allocator disturbs, on a GPU by its allocator's count.

The C library is set to keep freed memory: by default it gives blocks above 32 MiB back at once, and clearing new pages
for them varies more than what is measured.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Iterable
from typing import Any

import psutil
import torch
from decode import QUIET, Timings, busy_seconds, parsed, print_targets, run_facts, synchronise, verdict, write
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from resformer import METHODS, ResFormerConfig, ResFormerForCausalLM
from resformer.training.memory import peak_allocation
from resformer.training.optimizer import is_connection

SHAPES: dict[str, dict[str, Any]] = {
    "12 x 512": {
        "hidden_size": 512,
        "intermediate_size": 1792,
        "num_hidden_layers": 12,
        "num_attention_heads": 8,
        "vocab_size": 32000,
    },
    "SmolLM2-135M": {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
    },
    "tiny": {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 256,
    },
}
#: Method -> the most that its step's time may be of Llama's, and what is aimed at.
TIME_TARGETS = {
    "resformer": (1.03, 1.00),
    "svformer": (1.00, 0.97),
    "depth-attention": (1.05, 1.02),
    "value-embeddings": (1.05, 1.02),
    "denseformer": (1.06, 1.02),
    "denseformer-4x5": (1.02, 1.00),
}
#: The same for memory.
MEMORY_TARGETS = {name: (1.05, 1.03) if name == "resformer-denseformer" else (1.03, 1.01) for name in METHODS}
MEMORY_TARGETS["depth-attention"] = (1.08, 1.05)
del MEMORY_TARGETS["value-embeddings"]  # its tables can outweigh the model
AGAIN = "llama again"
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(2**35), "MALLOC_TRIM_THRESHOLD_": str(2**35)}


class Training:
    """Steps of one model on the same random tokens."""

    def __init__(self, model: PreTrainedModel, options: argparse.Namespace):
        self.model = model.to(device=options.device, dtype=getattr(torch, options.dtype)).train()
        for name, parameter in model.named_parameters():
            if is_connection(name) and "bias_table" not in name:
                parameter.data = parameter.data.float()  # as they are loaded
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
        shape = (options.batch, options.tokens)
        self.ids = torch.randint(model.config.vocab_size, shape, generator=torch.Generator().manual_seed(0))
        self.ids = self.ids.to(options.device)

    def gradients(self) -> None:
        self.model(input_ids=self.ids, labels=self.ids, use_cache=False).loss.backward()

    def update(self) -> None:
        self.optimizer.step()

    def clear(self) -> None:
        self.optimizer.zero_grad()


def build(arm: str, shape: dict[str, Any]) -> PreTrainedModel:
    torch.manual_seed(0)
    if arm in ("llama", AGAIN):
        return LlamaForCausalLM(LlamaConfig(**shape))
    return ResFormerForCausalLM(ResFormerConfig.for_method(arm, **shape))


def trainings(arms: Iterable[str], shape: dict[str, Any], options: argparse.Namespace) -> dict[str, Training]:
    """One for each arm; what Llama has too is the same parameter in all, and has one optimizer state."""
    llama = Training(build("llama", shape), options)
    made = {"llama": llama}
    for arm in arms:
        model = build(arm, shape)
        model.load_state_dict(llama.model.state_dict(keep_vars=True), strict=False, assign=True)
        model.tie_weights()
        made[arm] = Training(model, options)
        made[arm].optimizer.state = llama.optimizer.state
    return made


def measure_time(arms: dict[str, Training], options: argparse.Namespace) -> tuple[Timings, Timings]:
    """Timings without and with the optimizer's update; all rounds, or after three those that the budget allows."""
    clock = time.process_time if options.clock == "cpu" else time.perf_counter
    others: list[float] = []
    without, with_update = Timings({arm: [] for arm in arms}, others), Timings({arm: [] for arm in arms}, others)
    names = list(arms)
    process = psutil.Process()
    start_of_all = time.perf_counter()
    give_up = start_of_all + options.patience
    for number in range(-1, options.rounds):  # the first warms up
        if number >= 3 and time.perf_counter() - start_of_all > options.budget:
            break
        while (
            options.clock == "wall"
            and time.perf_counter() < give_up
            and psutil.cpu_percent(interval=0.3) * psutil.cpu_count() > 100 * QUIET
        ):
            time.sleep(0.2)
        start, own, began = busy_seconds(), sum(process.cpu_times()[:2]), time.perf_counter()
        for name in names[number % len(names) :] + names[: number % len(names)]:
            training = arms[name]
            synchronise(training.model.device)
            at = clock()
            training.gradients()
            synchronise(training.model.device)
            between = clock()
            training.update()
            synchronise(training.model.device)
            end = clock()
            training.clear()
            if number >= 0:
                without.seconds[name].append(between - at)
                with_update.seconds[name].append(end - at)
        taken = busy_seconds() - start - (sum(process.cpu_times()[:2]) - own)
        if number >= 0:
            others.append(max(taken, 0.0) / (time.perf_counter() - began))
    return without, with_update


def spread(timings: Timings, arm: str) -> list[float]:
    """The quartiles of the ratio to Llama within a round."""
    ratios = [timings.seconds[arm][index] / timings.seconds["llama"][index] for index in timings.counted()]
    return [round(each, 3) for each in statistics.quantiles(ratios, method="inclusive")[::2]]


def time_case(shape: dict[str, Any], options: argparse.Namespace) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    without, with_update = measure_time(trainings([AGAIN, *options.methods], shape, options), options)
    result: dict[str, Any] = {**without.report(), "arms": {}}
    met = []
    for arm in without.seconds:
        ratio = 1 / without.ratio(arm, "llama")
        result["arms"][arm] = {
            "ms": round(1e3 * without.median(arm), 1),
            "of llama": round(ratio, 3),
            "quartiles": spread(without, arm),
            "ms with AdamW": round(1e3 * with_update.median(arm), 1),
            "of llama with AdamW": round(1 / with_update.ratio(arm, "llama"), 3),
        }
        if arm in TIME_TARGETS:
            must, aim = TIME_TARGETS[arm]
            met.append(verdict(f"{arm}: time of llama's", ratio, must, aim, ratio <= must, ratio <= aim))
    return result, met


def peak_bytes(training: Training) -> int:
    """The most bytes allocated at once in a step and its backward pass, gradients included, beyond those before it."""

    def step() -> None:
        training.gradients()
        training.clear()

    step()  # what is made once is made
    return peak_allocation(step, training.model.device.type)


def memory_case(shape: dict[str, Any], options: argparse.Namespace) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    result: dict[str, Any] = {"arms": {}}
    met = []
    sizes: dict[str, tuple[int, int]] = {}
    for arm in ("llama", *METHODS):
        training = Training(build(arm, shape), options)
        sizes[arm] = sum(each.nbytes for each in training.model.parameters()), peak_bytes(training)
        parameters, beyond = sizes[arm]
        ratio = (parameters + beyond) / sum(sizes["llama"])
        result["arms"][arm] = {
            "MB": round((parameters + beyond) / 1e6, 1),
            "of these parameters": round(parameters / 1e6, 1),
            "of llama": round(ratio, 4),
            "of llama beyond parameters": round(beyond / sizes["llama"][1], 4),
        }
        if arm in MEMORY_TARGETS:
            must, aim = MEMORY_TARGETS[arm]
            met.append(verdict(f"{arm}: memory of llama's", ratio, must, aim, ratio <= must, ratio <= aim))
    return result, met


CASES = {"time": time_case, "memory": memory_case}


def main() -> None:
    if not KEEP_MEMORY.keys() <= os.environ.keys():
        os.execve(sys.executable, [sys.executable, *sys.argv], {**KEEP_MEMORY, **os.environ})
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--methods", nargs="+", default=list(TIME_TARGETS), choices=METHODS, help="those that are timed"
    )
    parser.add_argument("--shapes", nargs="+", default=[name for name in SHAPES if name != "tiny"], choices=SHAPES)
    parser.add_argument("--parts", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--budget", type=float, default=600.0, help="seconds after which the timing of a shape ends")
    options = parsed(parser)

    before = json.loads(options.output.read_text(encoding="utf-8")) if options.update else {}
    results: dict[str, Any] = {
        **run_facts(options, before),
        "shapes": {name: SHAPES[name] for name in options.shapes} | before.get("shapes", {}),
        "batch x tokens": [options.batch, options.tokens],
        **{part: before.get(part, {}) for part in CASES},
        "targets": before.get("targets", []),
    }
    for part in options.parts:
        for name in options.shapes:
            result, met = CASES[part](SHAPES[name], options)
            results[part][name] = result
            case = f"{part}, {name}"
            results["targets"] = [each for each in results["targets"] if each["case"] != case]
            results["targets"] += [{"case": case, **each} for each in met]
            arms = "  ".join(f"{arm} {each['of llama']}" for arm, each in result["arms"].items())
            rounds = f" [{result['rounds counted']}/{result['rounds']} rounds]" if "rounds" in result else ""
            print(f"{case}{rounds}: {arms}", flush=True)
            write(results, options.output)
    print_targets(results["targets"])


if __name__ == "__main__":
    main()
