"""How fast the models decode and prefill, against `LlamaForCausalLM` with the cache that `generate` gives it.

    python benchmarks/decode.py --output benchmarks/results/decode.json
    python benchmarks/decode.py --threads 1 --clock cpu --output benchmarks/results/decode-1-thread.json
    python benchmarks/decode.py --device cuda --dtype bfloat16 --batches 1 8 --contexts 4096 --output decode.json

Decoding is timed through `generate()` on caches filled with random numbers; the weights are random too. All that is
compared runs in the same process, one after the other in every round, in an order that turns with the rounds. A ratio
is the median over the rounds of the ratio within a round. `llama again` is Llama a second time: how far its ratio is
from 1 is how far the others can be trusted. Rounds in which other processes took more than a tenth of a core are left
out where enough others remain.

A growing cache copies itself to larger memory now and then. That is timed apart and added to each token's time.

`--batches` and `--contexts` choose other cases, `--arms` what is timed in them: Llama or a method, and its cache unless
that is the default: `growing`, `static`, or `static compiled`, whose step `generate()` compiles, with the number of
kernels that Inductor writes for it. `--largest` looks for the largest batch whose caches fit into the accelerator's
memory.
"""

import argparse
import functools
import gc
import json
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
import transformers
from torch._inductor import config as inductor_config
from torch._inductor import metrics as inductor_metrics
from transformers import (
    AutoModelForCausalLM,
    Cache,
    CompileConfig,
    DynamicCache,
    LlamaConfig,
    PreTrainedModel,
    StaticCache,
)

import resformer
from resformer import METHODS, GrowingCache, ResFormerConfig
from resformer.configuration import cache_bytes_per_token
from resformer.modeling.connections.sharing import update_cache
from resformer.modeling.growing_cache import moved_to_larger_memory, spare_room
from resformer.modeling.versions import CACHE


def shape(layers: int, width: int, inner: int, heads: int, vocabulary: int = 32000, **more: Any) -> dict[str, Any]:
    return {
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "vocab_size": vocabulary,
        **more,
    }


SHAPES = {
    "12 x 512": shape(12, 512, 1792, 8),
    "SmolLM2-135M": shape(30, 576, 1536, 9, 49152, num_key_value_heads=3, tie_word_embeddings=True),
    "tiny": shape(4, 32, 64, 4, 256, num_key_value_heads=2),
    "8 x 512": shape(8, 512, 1408, 8),
    "12 x 768": shape(12, 768, 2048, 12),
    "24 x 1024": shape(24, 1024, 2816, 16),
    "32 x 2048": shape(32, 2048, 4096, 32, num_key_value_heads=8),  # 1.2 billion parameters
}
#: Of the models that decode; `--shape` chooses another.
SHAPE: dict[str, Any] = {
    **SHAPES["12 x 512"],
    "max_position_embeddings": 32768,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
#: Most of a core that others may use in a round that counts.
QUIET = 0.1


@dataclass(frozen=True)
class Case:
    batch: int
    context: int
    tokens: int  #: generated in each round
    arms: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"batch {self.batch}, context {self.context}"


CASES = [
    Case(
        1,
        128,
        16,
        ("llama", "llama again", "transformer", "resformer", "svformer", "denseformer", "delta-attention-residuals"),
    ),
    Case(1, 2048, 16, ("llama", "llama again", "resformer", "svformer", "denseformer")),
    Case(1, 4096, 16, ("llama", "resformer", "resformer static", "svformer")),
    Case(1, 16384, 6, ("llama", "resformer", "svformer")),
    Case(8, 128, 16, ("llama", "llama again", "resformer", "svformer")),
    Case(8, 2048, 6, ("llama", "resformer", "svformer")),
]

#: (case, faster, slower, must be, aim): tokens per second of the one over those of the other.
TARGETS = [
    ("batch 1, context 128", "resformer", "llama", 1.00, 1.10),
    ("batch 1, context 2048", "resformer", "llama", 2.0, 2.6),
    ("batch 1, context 4096", "resformer", "llama", 3.0, 3.7),
    ("batch 1, context 16384", "resformer", "llama", 4.5, 5.5),
    ("batch 8, context 2048", "resformer", "llama", 3.5, 5.5),
    ("batch 1, context 4096", "resformer", "resformer static", 1 / 1.05, 1 / 0.95),
    ("batch 8, context 2048", "svformer", "resformer", 0.98, 1.13),
    ("batch 1, context 128", "denseformer", "transformer", 0.97, 1.00),
]
#: Of prefill time over Llama's: (must be, aim), for every method but those that do more work by design.
PREFILL_TARGET = {"svformer": (1.05, 0.93)}
PREFILL_DEFAULT = (1.05, 1.00)
PREFILL_METHODS = [name for name in METHODS if name not in ("resformer-dense", "resformer-gated", "depth-attention")]
PREFILL_TOKENS = 1024


@dataclass
class Timings:
    """Seconds by arm, one entry a round, and how much of a core others used in that round."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    others: list[float] = field(default_factory=list)

    def counted(self) -> list[int]:
        quiet = [index for index, load in enumerate(self.others) if load <= QUIET]
        return quiet if len(quiet) >= 3 else list(range(len(self.others)))

    def median(self, arm: str) -> float:
        return statistics.median(self.seconds[arm][index] for index in self.counted())

    def ratio(self, faster: str, slower: str, added: dict[str, float] | None = None) -> float:
        """Median of slower / faster within a round: how many times as fast the first is."""
        more = added or {}
        return statistics.median(
            (self.seconds[slower][index] + more.get(slower, 0.0))
            / (self.seconds[faster][index] + more.get(faster, 0.0))
            for index in self.counted()
        )

    def report(self) -> dict[str, Any]:
        return {
            "rounds": len(self.others),
            "rounds counted": len(self.counted()),
            "others' load in them": round(max(self.others[index] for index in self.counted()), 2),
        }


def synchronise(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize()


def busy_seconds() -> float:
    times = psutil.cpu_times()
    return times.user + times.system + getattr(times, "nice", 0.0) + getattr(times, "irq", 0.0)


def wait_for_quiet(options: argparse.Namespace, give_up: float) -> None:
    """Waits until other processes take little of the processor, if that is what is timed."""
    while (
        options.clock == "wall"
        and options.device == "cpu"
        and time.perf_counter() < give_up
        and psutil.cpu_percent(interval=0.3) * psutil.cpu_count() > 100 * QUIET
    ):
        time.sleep(0.2)


def measure(
    arms: dict[str, Callable[[], object]], options: argparse.Namespace, device: torch.device, rounds: int
) -> Timings:
    """Runs every arm once in each round, until all rounds are done or, after three, the time is up."""
    clock = time.process_time if options.clock == "cpu" else time.perf_counter
    timings = Timings({name: [] for name in arms})
    names = list(arms)
    process = psutil.Process()
    start_of_all = time.perf_counter()
    give_up = start_of_all + options.patience
    for number in range(-1, rounds):  # the first warms up
        if number >= 3 and time.perf_counter() - start_of_all > options.budget:
            break
        wait_for_quiet(options, give_up)
        start, own = busy_seconds(), sum(process.cpu_times()[:2])
        began = time.perf_counter()
        for name in names[number % len(names) :] + names[: number % len(names)]:
            synchronise(device)
            at = clock()
            arms[name]()
            synchronise(device)
            if number >= 0:
                timings.seconds[name].append(clock() - at)
        others = busy_seconds() - start - (sum(process.cpu_times()[:2]) - own)
        if number >= 0:
            timings.others.append(max(others, 0.0) / (time.perf_counter() - began))
    return timings


def built(method: str, shape: dict[str, Any], options: argparse.Namespace) -> PreTrainedModel:
    """Llama, or a method, with random parameters, in the dtypes that checkpoints load in."""
    torch.manual_seed(0)
    config = LlamaConfig(**shape) if method == "llama" else ResFormerConfig.for_method(method, **shape)
    with torch.device(options.device):
        return AutoModelForCausalLM.from_config(config, dtype=getattr(torch, options.dtype)).eval()


def filled(cache: Cache, model: PreTrainedModel, case: Case) -> Cache:
    """`cache`, holding `case.context` random tokens."""
    config = model.config
    heads, head_dim, layers = config.num_key_value_heads, config.head_dim, config.num_hidden_layers
    shape = (case.batch, heads, case.context, head_dim)
    sources = {kind: getattr(config, f"{kind}_sources", None) or list(range(layers)) for kind in ("key", "value")}
    for layer in range(layers):
        keys, values = (
            torch.randn(shape, device=model.device, dtype=model.dtype) if sources[kind][layer] == layer else None
            for kind in ("key", "value")
        )
        update_cache(cache, layer, keys, values)
    return cache


class Decoding:
    """Generates `case.tokens` tokens after the cached ones, and takes them back."""

    def __init__(self, model: PreTrainedModel, arm: str, case: Case):
        self.model, self.case = model, case
        name, _, kind = arm.partition(" ")
        if kind.startswith("static"):
            self.cache: Cache = StaticCache(config=model.config, max_cache_len=case.context + 256)
        else:
            stock = name == "llama" and kind != "growing"
            self.cache = (DynamicCache if stock else GrowingCache)(config=model.config)
        self.compilation = CompileConfig() if kind.endswith("compiled") else None
        if self.compilation:
            self.compilation._compile_all_devices = True
        filled(self.cache, model, case)
        self.ids = torch.randint(1, SHAPE["vocab_size"], (case.batch, case.context + 1), device=model.device)

    def __call__(self) -> None:
        self.model.generate(
            self.ids,
            attention_mask=torch.ones_like(self.ids),
            max_new_tokens=self.case.tokens,
            do_sample=False,
            disable_compile=self.compilation is None,
            compile_config=self.compilation,
            **{CACHE: self.cache},
        )
        if isinstance(self.cache, StaticCache):
            for layer in self.cache.layers:
                layer.cumulative_length.fill_(self.case.context)
        else:
            self.cache.crop(-self.case.tokens)

    @torch.no_grad()
    def growth(self) -> float:
        """Seconds that copying the cache to larger memory takes for each token, copied as seldom as it is."""
        cached = [states for layer in self.cache.layers for states in (layer.keys, layer.values) if states is not None]
        synchronise(self.model.device)
        started = time.perf_counter()
        for states in cached:
            moved_to_larger_memory(states, 1)
        synchronise(self.model.device)
        return (time.perf_counter() - started) / spare_room(self.case.context)


def bandwidth(device: torch.device) -> float:
    """Bytes a second that memory is read with, by the best of several sums over 512 MiB, or 8 GiB of an accelerator."""
    numbers = torch.ones(2**27 if device.type == "cpu" else 2**31, device=device)
    best = float("inf")
    for _ in range(8):
        synchronise(device)
        at = time.perf_counter()
        numbers.sum()
        synchronise(device)
        best = min(best, time.perf_counter() - at)
    return numbers.nbytes / best


def limits(decoding: "Decoding", seconds: float, speed: float) -> dict[str, Any]:
    """The fewest bytes that a token reads and writes, against the time that it took."""
    model, case = decoding.model, decoding.case
    weights = sum(parameter.nbytes for parameter in model.parameters()) - model.get_input_embeddings().weight.nbytes
    stored = cache_bytes_per_token(model.config, model.dtype) * case.batch * case.context
    full = cache_bytes_per_token(LlamaConfig(**SHAPE), model.dtype) * case.batch * case.context
    moved = {"weights read": weights, "keys and values read": full}  # every layer reads, also what others store
    if type(decoding.cache) is DynamicCache:
        moved["cache copied, read and written"] = 2 * stored
    floor = sum(moved.values()) / speed
    largest = max(moved, key=lambda name: moved[name])
    bound = f"memory: {largest}" if floor > 0.5 * seconds else f"operations and Python, then memory: {largest}"
    return {
        "MB": {name: round(size / 1e6, 1) for name, size in moved.items()},
        "least ms": round(1e3 * floor, 2),
        "share of the time": round(floor / seconds, 2),
        "limited by": bound,
    }


def kernels_of(step: Callable[[], object]) -> int:
    """The number of kernels that Inductor writes for what `step` compiles."""
    with inductor_config.patch(force_disable_caches=True):
        before = inductor_metrics.generated_kernel_count
        step()
    return inductor_metrics.generated_kernel_count - before


def decode(
    case: Case, model_of: Callable[[str], PreTrainedModel], options: argparse.Namespace, speed: float
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    began = time.perf_counter()
    with torch.no_grad():
        arms = {arm: Decoding(model_of(arm.split()[0]), arm, case) for arm in case.arms}
    kernels = {arm: kernels_of(each) for arm, each in arms.items() if each.compilation}
    timings = measure(dict(arms), options, torch.device(options.device), options.rounds)
    growth = {arm: arms[arm].growth() for arm in arms if isinstance(arms[arm].cache, GrowingCache)}
    added = {arm: seconds * case.tokens for arm, seconds in growth.items()}
    result: dict[str, Any] = {"tokens a round": case.tokens, **timings.report(), "arms": {}}
    for arm, decoding in arms.items():
        seconds = timings.median(arm) / case.tokens + growth.get(arm, 0.0)
        result["arms"][arm] = {
            "ms a step": round(1e3 * seconds, 3),
            **({"kernels": kernels[arm]} if arm in kernels else {}),
            "of these growth": round(1e3 * growth.get(arm, 0.0), 3),
            "tokens/s": round(case.batch / seconds, 1),
            "against llama": round(timings.ratio(arm, "llama", added), 3),
            **limits(decoding, seconds, speed),
        }
    result["seconds"] = round(time.perf_counter() - began, 1)
    met: list[dict[str, Any]] = []
    for name, faster, slower, must, aim in TARGETS:
        if name == case.name and {faster, slower} <= set(arms):
            ratio = timings.ratio(faster, slower, added)
            met.append(verdict(f"{faster} against {slower}", ratio, must, aim, ratio >= must, ratio >= aim))
    return result, met


def largest(arm: str, context: int, options: argparse.Namespace) -> dict[str, Any]:
    """The most sequences of `context` tokens that can be decoded at once, tried from as many as caches alone fit."""
    model = built(arm.split()[0], SHAPE, options)
    free = options.memory or torch.cuda.mem_get_info()[0]
    sequence = cache_bytes_per_token(model.config, model.dtype) * context
    batch, decoding = free // sequence, None
    while batch:
        try:
            with torch.no_grad():
                decoding = Decoding(model, arm, Case(batch, context, 8, ()))
            timings = measure({arm: decoding}, options, model.device, 3)
            rate = round(batch * 8 / timings.median(arm), 1)
            return {"batch": batch, "cache, GB": round(batch * sequence / 1e9, 1), "tokens/s": rate}
        except torch.OutOfMemoryError:
            decoding = None
        gc.collect()
        torch.cuda.empty_cache()
        batch -= max(1, batch // 20)
    return {"batch": 0}


def prefill(options: argparse.Namespace, device: torch.device) -> Any:
    ids = torch.randint(1, SHAPE["vocab_size"], (1, PREFILL_TOKENS), device=device)
    models = {name: built(name, SHAPE, options) for name in ("llama", *PREFILL_METHODS)}
    models["llama again"] = models["llama"]

    @torch.no_grad()
    def once(model: PreTrainedModel) -> None:
        model(ids, use_cache=True, logits_to_keep=1)

    arms = {name: lambda model=model: once(model) for name, model in models.items()}
    timings = measure(arms, options, device, max(5, options.rounds // 2))
    result: dict[str, Any] = {"tokens": PREFILL_TOKENS, **timings.report(), "arms": {}}
    met = []
    for name in models:
        ratio = 1 / timings.ratio(name, "llama")
        result["arms"][name] = {"ms": round(1e3 * timings.median(name), 1), "time of llama's": round(ratio, 3)}
        if not name.startswith("llama"):
            must, aim = PREFILL_TARGET.get(name, PREFILL_DEFAULT)
            met.append(verdict(f"{name}: time of llama's", ratio, must, aim, ratio <= must, ratio <= aim))
    result["limited by"] = "arithmetic: the products with the weights and the attention"
    return result, met


def verdict(what: str, got: float, must: float, aim: float, met: bool, aimed: bool) -> dict[str, Any]:
    return {
        "what": what,
        "got": round(got, 3),
        "must": round(must, 3),
        "aim": round(aim, 3),
        "met": met,
        "aim met": aimed,
    }


def cache_sizes(model: PreTrainedModel, device: torch.device) -> Any:
    """Bytes that an SVFormer's cache holds and has allocated after each of many lengths, against Llama's."""
    layers = SHAPE["num_hidden_layers"]
    per_token = cache_bytes_per_token(LlamaConfig(**SHAPE), model.dtype)
    worst, exact = 0.0, True
    case = Case(1, 1000, 0, ())
    cache = filled(GrowingCache(model.config), model, case)
    ids = torch.ones(1, 1, dtype=torch.long, device=device)
    with torch.no_grad():
        for tokens in range(1001, 1601):
            model(ids, logits_to_keep=1, **{CACHE: cache})
            held = [states for layer in cache.layers for states in (layer.keys, layer.values) if states.numel()]
            exact &= sum(states.nbytes for states in held) * 2 * layers == per_token * tokens * (layers + 1)
            bound = 1 + spare_room(tokens)
            allocated = max(states.untyped_storage().nbytes() / states.nbytes for states in held)
            worst = max(worst, (allocated - 1) * tokens / bound)
    return {
        "share of llama's bytes": f"{layers + 1}/{2 * layers}",
        "exact at 1001 to 1600 tokens": exact,
        "most slack, as a share of what may be": round(worst, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--cases", default="", help="only the cases whose name holds this; 'prefill' or 'cache' for none"
    )
    parser.add_argument("--budget", type=float, default=120.0, help="seconds after which a case ends (120)")
    parser.add_argument("--shape", choices=SHAPES, default="12 x 512")
    parser.add_argument("--batches", type=int, nargs="*", help="other cases than the usual: these sequences at once")
    parser.add_argument("--contexts", type=int, nargs="*", default=[], help="tokens in the cache of other cases")
    parser.add_argument("--arms", nargs="+", default=["llama", "llama growing", "resformer", "svformer", "cla2"])
    parser.add_argument("--largest", type=int, help="tokens in the cache of sequences; how many fit?")
    parser.add_argument("--memory", type=int, default=0, help="bytes for --largest (what the accelerator has free)")
    options = parsed(parser)
    device = torch.device(options.device)
    SHAPE.update(SHAPES[options.shape])
    usual = options.batches is None
    grid = [
        Case(batch, context, 16, (*options.arms,)) for context in options.contexts for batch in options.batches or ()
    ]

    before = before_of(options)
    results: dict[str, Any] = {**before, **run_facts(options, before), "shape": SHAPE}
    results = {**results, "decoding": before.get("decoding", {}), "targets": before.get("targets", [])}
    results["machine"]["read bandwidth, GB/s"] = round((speed := bandwidth(device)) / 1e9, 1)
    model_of = functools.cache(lambda name: built(name, SHAPE, options))
    for case in CASES if usual else grid:
        if options.cases in case.name and not (options.resume and case.name in results["decoding"]):
            result, met = decode(case, model_of, options, speed)
            results["decoding"][case.name] = result
            results["targets"] = [each for each in results["targets"] if each["case"] != case.name]
            results["targets"] += [{"case": case.name, **each} for each in met]
            arms = "  ".join(
                f"{arm} {each['ms a step']} ms ({each['against llama']})" for arm, each in result["arms"].items()
            )
            print(f"{case.name} [{result['rounds counted']}/{result['rounds']} rounds]: {arms}", flush=True)
            write(results, options.output)
    if usual and options.cases in ("", "cache"):
        results["cache"] = cache_sizes(model_of("svformer"), device)
        print(results["cache"])
    model_of.cache_clear()
    if usual and options.cases in ("", "prefill"):
        results["prefill"], met = prefill(options, device)
        results["targets"] = [each for each in results["targets"] if not each["case"].startswith("prefill")]
        results["targets"] += [{"case": f"prefill of {PREFILL_TOKENS}", **each} for each in met]
    for arm in options.arms if options.largest else ():
        name = f"largest batch at context {options.largest}"
        if not (options.resume and arm in results.setdefault(name, {})):
            results.setdefault(name, {})[arm] = largest(arm, options.largest, options)
            print(f"{name}: {arm} {results[name][arm]}", flush=True)
            write(results, options.output)
    print_targets(results["targets"])
    write(results, options.output)


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The options, with those that both benchmarks of speed have; sets the number of threads."""
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (2)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--patience", type=float, default=60.0, help="seconds to wait for quiet in each case (60)")
    parser.add_argument(
        "--clock", choices=["wall", "cpu"], default="wall", help="'cpu' for one thread that is disturbed"
    )
    parser.add_argument("--update", action="store_true", help="replace the cases of this run only in the output")
    parser.add_argument("--resume", action="store_true", help="measure only what the output lacks")
    parser.add_argument("--output", type=Path, help="where to write the results as JSON")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    return options


def before_of(options: argparse.Namespace) -> dict[str, Any]:
    """What the output holds, if it is to be gone on with."""
    if options.update or (options.resume and options.output.exists()):
        return json.loads(options.output.read_text(encoding="utf-8"))
    return {}


def device_facts(device: torch.device) -> dict[str, str]:
    if device.type == "cpu":
        return {"device": "cpu"}
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
    return {"device": torch.cuda.get_device_name(device), "driver": driver, "CUDA": str(torch.version.cuda)}


def run_facts(options: argparse.Namespace, before: dict[str, Any]) -> dict[str, Any]:
    """The command, the versions and the machine; `before` is what the output held."""
    return {
        "command": shlex.join(["python", *sys.argv]),
        "commands before": [*before.get("commands before", []), *([before["command"]] if before else [])],
        "versions": {
            "resformer": resformer.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "machine": {
            **device_facts(torch.device(options.device)),
            "cores": psutil.cpu_count(),
            "threads": options.threads,
            "dtype": options.dtype,
            "clock": options.clock,
        },
    }


def print_targets(targets: list[dict[str, Any]]) -> None:
    for each in targets:
        state = "aim met" if each["aim met"] else "met" if each["met"] else "MISSED"
        print(f"{each['case']}: {each['what']} {each['got']} (must {each['must']}, aim {each['aim']}): {state}")


def write(results: dict[str, Any], output: Path | None) -> None:
    """Writes the results so far: a run that is cut short leaves its finished cases."""
    if output:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
