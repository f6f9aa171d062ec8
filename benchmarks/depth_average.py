"""The cost of depth-weighted averaging in training: alone, and in a model's step.

    python benchmarks/depth_average.py --output benchmarks/results/depth_average.json
    python benchmarks/depth_average.py --device cuda --cases 24x1024x8192xbfloat16 --parts alone memory

Alone: a chain of cheap blocks (a sine, which keeps its input as a norm does) with an average after each, forward and
backward. Times and memory of the same chain without averages are subtracted. Results are ratios to stacking all states
and calling einsum. In a model: forward, loss and backward of a method against `LlamaForCausalLM`.

All that is compared runs in one process, one after the other in every round, in an order that turns with the rounds.
Times are medians over the rounds, on one thread of the process's CPU time, which other processes disturb least, else of
the wall clock. `again` is the same thing a second time: how far its ratio is from 1 is how far the others can be
trusted.

The C library is set to keep freed memory. By default it gives blocks above 32 MiB back at once, and clearing new pages
for every stack of states would then be most of what stacking costs (`"allocator": "default"` shows it). Peak memory is
the resident set's, each form in a process of its own with the default allocator, or what torch allocates on a GPU.
"""

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from decode import device_facts, synchronise
from transformers import LlamaConfig, LlamaForCausalLM

import resformer
from resformer import ResFormerConfig, ResFormerForCausalLM
from resformer.modeling.connection import weighted_sum
from resformer.modeling.depth_average import DepthAverage, RunningAverage, depth_average

#: Layers, width, tokens, dilation and period, dtype.
Case = tuple[int, int, int, tuple[int, int], str]
CASES: list[Case] = [
    (30, 576, 2048, (1, 1), "float32"),
    (30, 576, 2048, (1, 1), "bfloat16"),
    (30, 576, 2048, (4, 5), "float32"),
    (12, 512, 1024, (1, 1), "float32"),
    (12, 512, 1024, (1, 1), "bfloat16"),
    (48, 768, 1024, (1, 1), "float32"),
]
MEASURED_MEMORY = CASES[:2]
METHODS = ["denseformer", "denseformer-4x5", "resformer", "resformer-denseformer"]
MODEL = {
    "hidden_size": 512,
    "intermediate_size": 1792,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "vocab_size": 32000,
}
BATCH, TOKENS = 2, 512
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(2**35), "MALLOC_TRIM_THRESHOLD_": str(2**35)}


class WriteInPlace(torch.autograd.Function):
    """A state written into a buffer of all states, as the authors' code does (epfml/DenseFormer on GitHub)."""

    @staticmethod
    def forward(
        ctx: Any, buffer: torch.Tensor, before: torch.Tensor | None, number: int, state: torch.Tensor
    ) -> torch.Tensor:
        ctx.number = number
        buffer[number] = state
        return buffer.new_empty(0).set_(buffer[: number + 1])  # autograd does not see that it was written to

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor | None, None, torch.Tensor]:
        return None, gradient[: ctx.number] if ctx.number else None, None, gradient[ctx.number]


def forms(module: DepthAverage, case: Case) -> dict[str, Callable[[], Callable[[torch.Tensor], torch.Tensor]]]:
    """Form -> what makes, for one forward pass, the function that turns X_0, X_1, .. into what is read next."""

    def plain(average: Callable[[list[torch.Tensor], torch.Tensor], torch.Tensor]) -> Callable:
        def start() -> Callable[[torch.Tensor], torch.Tensor]:
            weights, states = module(), []

            def append(state: torch.Tensor) -> torch.Tensor:
                states.append(state)
                block = len(states) - 2
                if block not in weights:
                    return state
                return average([states[j] for j in module.columns[block]], weights[block])

            return append

        return start

    def authors() -> Callable[[torch.Tensor], torch.Tensor]:
        weights, states = module(), []  # the buffer, and the part of it that is written

        def append(state: torch.Tensor) -> torch.Tensor:
            if not states:
                states.extend((state.new_zeros(case[0] + 1, *state.shape), None, 0))
            buffer, before, number = states
            states[1:] = WriteInPlace.apply(buffer, before, number, state), number + 1
            if number == 0:
                return state
            return torch.tensordot(weights[number - 1].to(state.dtype), states[1], dims=1)

        return append

    def ours() -> Callable[[torch.Tensor], torch.Tensor]:
        return RunningAverage(module, module()).append

    def einsum(states: list[torch.Tensor], weights: torch.Tensor) -> torch.Tensor:
        return torch.einsum("k,kth->th", weights.to(states[0].dtype), torch.stack(states))

    return {
        "no averages": lambda: lambda state: state,
        "no averages, again": lambda: lambda state: state,
        "stack + einsum": plain(einsum),
        "addcmul chain": plain(weighted_sum),
        "resformer": ours,
        "resformer, again": ours,
        **({"authors' buffer": authors} if case[3] == (1, 1) else {}),
    }


def case_of(text: str) -> Case:
    layers, width, tokens, dtype = text.split("x")
    return int(layers), int(width), int(tokens), (1, 1), dtype


def steps_alone(case: Case) -> dict[str, Callable[[], None]]:
    layers, width, tokens, (dilation, period), dtype_name = case
    dtype = getattr(torch, dtype_name)
    config = ResFormerConfig(num_hidden_layers=layers, dwa=True, dwa_dilation=dilation, dwa_period=period)
    module = depth_average(config)
    module.reset_parameters()
    with torch.no_grad():
        module.bias += 0.05 * torch.randn_like(module.bias)
    embeddings = torch.randn(tokens, width).to(dtype).requires_grad_()
    upstream = torch.randn(tokens, width).to(dtype)

    def step(start: Callable[[], Callable[[torch.Tensor], torch.Tensor]]) -> None:
        append = start()
        hidden = append(embeddings)
        for _ in range(layers):
            hidden = append(torch.sin(hidden))
        hidden.backward(upstream)
        module.bias.grad = embeddings.grad = None

    return {form: lambda start=start: step(start) for form, start in forms(module, case).items()}


def steps_of_models() -> dict[str, Callable[[], None]]:
    def step_of(model: torch.nn.Module) -> Callable[[], None]:
        model.train()
        ids = torch.randint(3, MODEL["vocab_size"], (BATCH, TOKENS))

        def step() -> None:
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            model.zero_grad()

        return step

    llama = step_of(LlamaForCausalLM(LlamaConfig(**MODEL)))
    methods = {name: step_of(ResFormerForCausalLM(ResFormerConfig.for_method(name, **MODEL))) for name in METHODS}
    return {"llama": llama, "llama, again": llama, **methods}


def seconds(
    steps: dict[str, Callable[[], None]], rounds: int, clock: Callable[[], float], device: torch.device
) -> dict[str, list[float]]:
    names = list(steps)
    took: dict[str, list[float]] = {name: [] for name in names}
    for number in range(-1, rounds):  # the first warms up and does not count
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            start = clock()
            steps[name]()
            synchronise(device)
            if number >= 0:
                took[name].append(clock() - start)
    return took


def peak_bytes(device: torch.device) -> int:
    """This process's largest resident set so far, by Linux; on a GPU the most allocated since the last call."""
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return peak
    return 1024 * int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text()).group(1))


def child(arguments: list[str], keep_memory: bool) -> dict:
    """The output of this script for these arguments."""
    environment = {name: value for name, value in os.environ.items() if name not in KEEP_MEMORY}
    environment |= {"OMP_NUM_THREADS": arguments[1], **(KEEP_MEMORY if keep_memory else {})}
    command = [sys.executable, __file__, *arguments]
    return json.loads(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)


def work(kind: str, threads: int, rounds: int, detail: str, device: str) -> dict:
    """Runs in a process of its own."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    case, names = json.loads(detail or "[null, []]")
    with torch.device(device) as place:
        steps = steps_of_models() if kind == "models" else steps_alone(case)
    if kind == "memory":
        peaks = {}
        for form in names:
            for _ in range(3):
                steps[form]()
            peaks[form] = peak_bytes(place)
        return peaks
    clock = time.process_time if threads == 1 and device == "cpu" else time.perf_counter
    return seconds(steps, rounds, clock, place)


def described(case: Case) -> dict:
    layers, width, tokens, (dilation, period), dtype = case
    shape = {"layers": layers, "width": width, "tokens": tokens}
    return {**shape, "dilation x period": f"{dilation}x{period}", "dtype": dtype}


def measure_alone(case: Case, threads: int, rounds: int, keep_memory: bool, device: str) -> dict:
    took = child(["alone", str(threads), str(rounds), json.dumps([case, []]), device], keep_memory)
    medians = {form: statistics.median(times) for form, times in took.items()}
    bare = medians.pop("no averages")
    again = medians.pop("no averages, again")
    net = {form: median - bare for form, median in medians.items()}
    return {
        **described(case),
        "threads": threads,
        "allocator": "keeps memory" if keep_memory else "default",
        "no averages, ms": round(1e3 * bare, 1),
        "no averages again, ratio": round(again / bare, 3),
        "net ms": {form: round(1e3 * value, 1) for form, value in net.items()},
        "of stack + einsum": {form: round(value / net["stack + einsum"], 3) for form, value in net.items()},
        "of the addcmul chain": round(net["resformer"] / net["addcmul chain"], 3),
    }


def measure_memory(case: Case, device: str) -> dict:
    names = ["no averages", "stack + einsum", "addcmul chain", "resformer"]
    names += ["authors' buffer"] if device != "cpu" else []
    peaks: dict[str, int] = {}
    for together in [[form] for form in names] if device == "cpu" else [names]:
        peaks |= child(["memory", "2", "0", json.dumps([case, together]), device], keep_memory=False)
    net = {form: peaks[form] - peaks["no averages"] for form in names[1:]}
    layers, width, tokens, _, dtype = case
    states = (layers + 1) * width * tokens * getattr(torch, dtype).itemsize
    return {
        **described(case),
        "all states, MB": round(states / 1e6),
        "peak beyond no averages, MB": {form: round(value / 1e6) for form, value in net.items()},
        "of stack + einsum": {form: round(value / net["stack + einsum"], 3) for form, value in net.items()},
    }


def measure_models(threads: int, rounds: int, device: str) -> dict:
    took = child(["models", str(threads), str(rounds), "", device], keep_memory=True)
    llama = took["llama"]
    return {
        **MODEL,
        "batch": BATCH,
        "tokens": TOKENS,
        "dtype": "float32",
        "threads": threads,
        "llama, ms": round(1e3 * statistics.median(llama), 1),
        "of llama": {
            name: round(statistics.median(mine / its for mine, its in zip(times, llama, strict=True)), 3)
            for name, times in took.items()
        },
    }


def main() -> None:
    if sys.argv[1:2] and sys.argv[1] in ("alone", "memory", "models"):
        kind, threads, rounds, *details = sys.argv[1:]
        print(json.dumps(work(kind, int(threads), int(rounds), *details)))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="where the JSON goes; default: stdout alone")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, os.cpu_count() or 1])
    parser.add_argument("--parts", nargs="+", default=["alone", "memory", "models"], help="others stay as they are")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--cases", type=case_of, nargs="+", default=CASES, metavar="LAYERSxWIDTHxTOKENSxDTYPE")
    arguments = parser.parse_args()
    device = arguments.device
    processor = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    results = {
        "versions": {
            "resformer": resformer.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        **device_facts(torch.device(device)),
        "hardware": f"{os.cpu_count()} cores, {processor.group(1) if processor else platform.machine()}",
        "must be": "alone, forward and backward: time under 0.40 of stack + einsum (aim 0.27 float32, 0.30 bfloat16), "
        "memory under 0.20 (aim 0.15); models: denseformer 1.06, denseformer-4x5 1.02, resformer 1.03 of llama",
    }
    command = "python benchmarks/depth_average.py " + " ".join(sys.argv[1:])
    parts: dict[str, Callable[[], list[dict]]] = {
        "alone": lambda: (
            [
                measure_alone(case, threads, arguments.rounds, keep_memory=True, device=device)
                for case in arguments.cases
                for threads in arguments.threads
            ]
            + [
                measure_alone(case, arguments.threads[-1], 3, keep_memory=False, device=device)
                for case in CASES[:1]
                if device == "cpu"
            ]
        ),
        "memory": lambda: [
            measure_memory(case, device) for case in (MEASURED_MEMORY if device == "cpu" else arguments.cases)
        ],
        "models": lambda: [measure_models(threads, arguments.rounds, device) for threads in arguments.threads],
    }
    before = {}
    if arguments.output is not None and arguments.output.exists():
        before = json.loads(arguments.output.read_text())
    for name, measure in parts.items():
        if name in arguments.parts:
            results[name] = {"command": command, "rounds": arguments.rounds, "measured": measure()}
        elif name in before:
            results[name] = before[name]
    text = json.dumps(results, indent=2) + "\n"
    print(text, end="")
    if arguments.output is not None:
        arguments.output.write_text(text)


if __name__ == "__main__":
    main()
