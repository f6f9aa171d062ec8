"""How fast and how lean the models train, against `LlamaForCausalLM`.

    python benchmarks/train.py --output benchmarks/results/train.json
    python benchmarks/train.py --threads 1 --clock cpu --output benchmarks/results/train-1-thread.json
    python benchmarks/train.py --device cuda --dtype bfloat16 --modes eager layers whole --output train.json

Time: a step is forward, loss and backward; AdamW's update after it is timed too. All models of a shape are in one
process, share Llama's parameters and take a step each in every round, in an order that turns with the rounds. A ratio
is the median over the rounds of the ratio within a round. `llama again` is Llama a second time: how far its ratio is
from 1 is how far the others can be trusted. Rounds in which other processes took more than a tenth of a core are left
out where enough others remain.

Modes: `layers` compiles each layer by itself (Accelerate's `compile_regions` with `fullgraph=True`), `whole` all of the
model. Llama is compiled in the same way. `kernels` are those that Inductor has written for the step.

Memory: the parameters, and the most that torch has allocated at once beyond them between the start of a step and the
end of its backward pass, gradients included: on a CPU by the profiler's record of every allocation, which no other
process and no allocator disturbs, on a GPU by its allocator's count, which takes two steps and is part of the timing.
`checkpointed` is the same with gradient checkpointing.

The C library is set to keep freed memory: by default it gives blocks above 32 MiB back at once, and clearing new pages
for them varies more than what is measured.
"""

import argparse
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import psutil
import torch
from accelerate.utils import compile_regions
from decode import (
    SHAPES,
    Timings,
    before_of,
    built,
    busy_seconds,
    kernels_of,
    parsed,
    print_targets,
    run_facts,
    synchronise,
    verdict,
    wait_for_quiet,
    write,
)
from transformers import PreTrainedModel

from resformer import METHODS

#: Method -> the most that its step's time may be of Llama's, and what is aimed at.
TIME_TARGETS = {
    "resformer": (1.03, 1.00),
    "svformer": (1.00, 0.97),
    "depth-attention": (1.05, 1.02),
    "value-embeddings": (1.05, 1.02),
    "denseformer": (1.06, 1.02),
    "denseformer-4x5": (1.02, 1.00),
    "delta-attention-residuals": (1.08, 1.03),
}
#: The same for memory.
MEMORY_TARGETS = {name: (1.05, 1.03) if name == "resformer-denseformer" else (1.03, 1.01) for name in METHODS}
MEMORY_TARGETS["depth-attention"] = (1.08, 1.05)
for name in ("value-embeddings", "nanochat", "mudd", "attnres", "hyper-connections", "mhc"):
    del MEMORY_TARGETS[name]  # tables can outweigh the model; the others keep states at each sublayer
AGAIN = "llama again"
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(2**35), "MALLOC_TRIM_THRESHOLD_": str(2**35)}


class Training:
    """Steps of one model on the same random tokens."""

    def __init__(self, model: PreTrainedModel, options: argparse.Namespace):
        self.model = model.train()
        compiled = {
            "eager": lambda model: model,
            "layers": partial(compile_regions, fullgraph=True),
            "whole": torch.compile,
        }
        self.forward = compiled[options.mode](self.model)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
        shape = (options.batch, options.tokens)
        self.ids = torch.randint(model.config.vocab_size, shape, generator=torch.Generator().manual_seed(0))
        self.ids = self.ids.to(options.device)

    def gradients(self) -> None:
        self.forward(input_ids=self.ids, labels=self.ids, use_cache=False).loss.backward()

    def update(self) -> None:
        self.optimizer.step()

    def clear(self) -> None:
        self.optimizer.zero_grad()


def trainings(arms: Iterable[str], shape: dict[str, Any], options: argparse.Namespace) -> dict[str, Training]:
    """One for each arm; what Llama has too is the same parameter in all, and has one optimizer state."""
    torch.compiler.reset()
    torch._dynamo.config.recompile_limit = 100  # all arms compile the same functions
    llama = Training(built("llama", shape, options), options)
    made = {"llama": llama}
    for arm in arms:
        model = built("llama" if arm == AGAIN else arm, shape, options)
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
        wait_for_quiet(options, give_up)
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
    began = time.perf_counter()
    arms = trainings([AGAIN, *options.methods], shape, options)
    kernels = {} if options.mode == "eager" else {arm: kernels_of(each.gradients) for arm, each in arms.items()}
    without, with_update = measure_time(arms, options)
    sizes = {} if options.device == "cpu" else {arm: size(training) for arm, training in arms.items()}
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
            **({"memory": weight(arm, sizes)} if sizes else {}),
            **({"kernels": kernels[arm]} if kernels and arm != AGAIN else {}),  # which has Llama's
        }
        if arm in TIME_TARGETS:
            must, aim = TIME_TARGETS[arm]
            met.append(verdict(f"{arm}: time of llama's", ratio, must, aim, ratio <= must, ratio <= aim))
    result["seconds"] = round(time.perf_counter() - began, 1)
    return result, met


def peak_allocation(step: Callable[[], object], device: str) -> int:
    """The most bytes that `step` has allocated at once, beyond those before it."""
    if device == "cuda":
        step()  # allocates what is kept for all later steps
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        return torch.cuda.max_memory_allocated() - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler writes to stderr without it
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


def size(training: Training) -> tuple[int, int]:
    """Bytes of the parameters, and the most allocated at once beyond them in a step and its backward pass."""

    def step() -> None:
        training.gradients()
        training.clear()

    step()  # what is made once is made
    parameters = sum(each.nbytes for each in training.model.parameters())
    return parameters, peak_allocation(step, training.model.device.type)


def weight(arm: str, sizes: dict[str, tuple[int, int]]) -> dict[str, float]:
    return {
        "MB": round(sum(sizes[arm]) / 1e6, 1),
        "of these parameters": round(sizes[arm][0] / 1e6, 1),
        "of llama": round(sum(sizes[arm]) / sum(sizes["llama"]), 4),
        "of llama beyond parameters": round(sizes[arm][1] / sizes["llama"][1], 4),
    }


def memory_case(shape: dict[str, Any], options: argparse.Namespace) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    result: dict[str, Any] = {"arms": {}}
    met = []
    sizes: dict[str, tuple[int, int]] = {}
    checkpointed: dict[str, tuple[int, int]] = {}
    for arm in ("llama", *METHODS):
        training = Training(built(arm, shape, options), options)
        sizes[arm] = size(training)
        training.model.gradient_checkpointing_enable()
        checkpointed[arm] = size(training)
        result["arms"][arm] = {**weight(arm, sizes), "checkpointed": weight(arm, checkpointed)}
        if arm in MEMORY_TARGETS:
            ratio = result["arms"][arm]["of llama"]
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
    parser.add_argument("--shapes", nargs="+", default=["12 x 512", "SmolLM2-135M"], choices=SHAPES)
    parser.add_argument("--modes", nargs="+", default=["eager"], choices=["eager", "layers", "whole"])
    parser.add_argument("--parts", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--budget", type=float, default=600.0, help="seconds after which the timing of a shape ends")
    options = parsed(parser)

    before = before_of(options)
    results: dict[str, Any] = {
        **run_facts(options, before),
        "shapes": {name: SHAPES[name] for name in options.shapes} | before.get("shapes", {}),
        "batch x tokens": [options.batch, options.tokens],
        **{part: before.get(part, {}) for part in CASES},
        "targets": before.get("targets", []),
    }
    for part in options.parts:
        modes = options.modes if part == "time" else ["eager"]
        for shape, mode in itertools.product(options.shapes, modes):
            options.mode = mode
            name = shape if mode == "eager" else f"{shape}, {mode}"
            if options.resume and name in results[part]:
                continue
            result, met = CASES[part](SHAPES[shape], options)
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
