"""Writes the tables and pictures that pages take from results: `python benchmarks/tables.py`; `--check` only compares.

A table of a page stands between `<!-- table: NAME ARGUMENT -->` and `<!-- end -->`. NAME is one of `TABLES`. Figures in
the sentences of a page are compared with `sentences`, which writes nothing. `--reports FOLDER` writes the table and the
picture of each study there.
"""

import argparse
import json
import math
import re
import statistics
import sys
from collections.abc import Callable, Iterable
from itertools import product
from pathlib import Path
from typing import Any

from resformer.commands.terminal import size
from resformer.configuration import METHODS
from resformer.training.options import RATES, PretrainOptions
from resformer.training.pretraining import pretrain_plan
from resformer.training.study.plot import plot
from resformer.training.study.report import (
    correct,
    evidence,
    markdown,
    paired_difference,
    read_record,
    report_of,
    with_interval,
)
from resformer.training.tokenizers import make_tokenizer
from resformer.training.untrained import SIZES, scratch_config

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
#: Validation losses of Identity-ResFormer and the Transformer in arXiv 2410.17897: 82, 180 and 468 million parameters,
#: 20 billion tokens of SlimPajama.
PAPERS_LOSSES = ((2.7117, 2.7389), (2.4692, 2.5015), (2.2537, 2.2806))
#: The smallest gain in them, of the loss.
PAPERS_GAIN = 0.01
#: The study of the longest training, whose picture README and docs/results.md show.
PICTURE = "budget20"
#: The planned contrasts of a study besides those with plain Llama: one method minus another.
CONTRASTS = {
    "b12": {"svformer minus GQA": ("svformer", "transformer:num_key_value_heads=2")},
    "n20": {"value-embeddings minus resformer": ("value-embeddings", "resformer")},
}
LEVEL = 0.05
#: Of `n-kinds`: methods, and what has ten times the rate in another arm.
HIGHER = (("resformer-gated", "gate"), ("attnres", "gate"), ("value-embeddings", "table"))
#: Left out of the page's table of traffic: variants, which cost nearly what `resformer`, `cla2` or their parts do.
VARIANTS = {"fusedkv-lite", *(f"resformer-{of}" for of in "identity constant plus sparse neutreno denseformer".split())}
_NUMBERS = "no one two three four five".split()
TABLE = re.compile(r"(<!-- table: (\S+) (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def read(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def runs_of(name: str) -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Each study of a record, and its runs."""
    return read_record(RESULTS / "study" / f"{name}.jsonl")


def paired(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The runs of seeds that every method has."""
    seeds = {method: {run["seed"] for run in runs if run["method"] == method} for method in {r["method"] for r in runs}}
    return [run for run in runs if run["seed"] in set.intersection(*seeds.values())]


def report(name: str) -> dict[str, Any]:
    """Of a record of one study; the first run's method is the baseline."""
    ((study, runs),) = runs_of(name)
    return report_of(study, paired(runs), runs[0]["method"])


def study_rows(name: str) -> list[dict[str, Any]]:
    (rows,) = report(name)["sizes"].values()
    return rows


def table(titles: str, rows: Iterable[Iterable[object]]) -> str:
    """In Markdown; `titles` are those of the columns, with bars between them."""
    lines = [f"|{'---|' * (titles.count('|') + 1)}", *(f"| {' | '.join(map(str, cells))} |" for cells in rows)]
    return "\n".join([f"| {titles} |", *lines])


def tokens_a_parameter(name: str) -> float:
    study = report(name)
    return study["steps"] * study["batch"] * study["block"] / study_rows(name)[0]["parameters"]


def studies(names: str) -> str:
    """What the studies from scratch trained."""
    found = []
    for name, _, sweep in (pair.partition(":") for pair in names.split(",")):
        chosen = {run["architecture"]: run["learning_rate"] for run in runs_of(name)[0][1]}
        plain, others = chosen["transformer"], {rate for method, rate in chosen.items() if method != "transformer"}
        tried = sorted({run["learning_rate"] for run in runs_of(sweep)[0][1]}) if sweep else []
        cells = [f"[{name}](../benchmarks/results/study/{name}.jsonl)", f"{study_rows(name)[0]['parameters']:,}"]
        cells += [f"{tokens_a_parameter(name):.1f}"]
        cells += [f"[{', '.join(map(power, tried))}](../benchmarks/results/study/{sweep}.jsonl)" if sweep else ""]
        cells += [power(plain) if others == {plain} else f"{power(plain)}; methods {', '.join(map(power, others))}"]
        found.append([*cells, len(study_rows(name)[0]["seeds"])])
    return table("study | parameters | tokens a parameter | rates tried | rate | seeds", found)


def power(rate: float) -> str:
    """A learning rate as it is written in a command."""
    return f"{1000 * rate:g}e-3"


def finding(difference: dict[str, Any], base: float) -> str:
    """What may be said of a difference from a loss of `base`."""
    if difference["holm"] < 0.05:
        return "ahead" if difference["mean"] < 0 else "behind"
    excluded = max(-difference["low"], difference["high"]) < PAPERS_GAIN * base
    return f"under {100 * PAPERS_GAIN:.0f} %" if excluded else "cannot tell"


def scratch(names: str) -> str:
    """The differences from plain Llama of studies from scratch, the longest training first."""
    found, few = [], set[int]()
    for name in names.split(","):
        plain, *rows = contrasts(name)
        few |= {len(plain["seeds"])} if 2 ** (1 - len(plain["seeds"])) >= LEVEL else set()
        for row in sorted(rows, key=lambda row: row["difference"]["mean"]):
            each = row["difference"]
            share = 100 * row["cache_bytes_per_token"] / plain["cache_bytes_per_token"]
            cache = f"{share:.0f} %" if share < 100 else ""
            said = finding(each, plain["loss"])
            found.append([name, row["architecture"], with_interval(each), said, *evidence(each), cache])
    made = table("study | method | Δ [95 %] | finding | p | detectable | cache, if less", found)
    least = " and ".join(f"{2 ** (1 - seeds):.2g} with {_NUMBERS[seeds]}" for seeds in sorted(few, reverse=True))
    told = f"An exact sign-flip test has no p below {least} seeds, and cannot be significant; their p are of t-tests."
    return f"{made}\n\n{told}" if few else made


def contrasts(name: str) -> list[dict[str, Any]]:
    """The rows of a study with its planned contrasts, and p by sign-flips where its seeds are enough for one."""
    plain, *rows = study_rows(name)
    by = {row["architecture"]: row for row in rows}
    for label, (method, other) in CONTRASTS.get(name, {}).items():
        difference = paired_difference(by[method]["losses"], by[other]["losses"])
        rows.append({**by[method], "architecture": label, "difference": difference})
        rows = [row for row in rows if row["architecture"] != other or other in METHODS]
    for each in (row["difference"] for row in rows):
        each["p"] = each["p"] if (exact := sign_flip(each["values"])) is None else exact
    correct([row["difference"] for row in rows])
    return [plain, *rows]


def sign_flip(values: list[float]) -> float | None:
    """The p-value of the mean among those of all choices of signs; `None` where none could be below `LEVEL`."""
    if 2 ** (1 - len(values)) >= LEVEL:
        return None
    sums = [abs(sum(map(math.copysign, map(abs, values), signs))) for signs in product((1, -1), repeat=len(values))]
    return statistics.fmean(each > abs(sum(values)) - 1e-12 for each in sums)


def tried(name: str) -> str:
    """Every run of a record: the losses of its seeds, and the mean difference from the first method."""
    ((_, runs),) = runs_of(name)
    seeds, losses = sorted({run["seed"] for run in runs}), dict[tuple[str, str], dict[int, float | None]]()
    for run in runs:
        own = {each.partition("_")[0]: run.get(each) for each in RATES[1:]}
        rates = [f"{kind} {power(rate)}" for kind, rate in own.items() if rate not in (None, run["learning_rate"])]
        key = run["architecture"], "; ".join([power(run["learning_rate"]), *rates])
        losses.setdefault(key, {})[run["seed"]] = run["loss"]
    first, rows = next(iter(losses.values())), []
    for key, each in losses.items():
        cells = [(f"{each[seed]:.4f}" if each[seed] else "diverged") if seed in each else "" for seed in seeds]
        both = [seed for seed in each if seed in first]
        leads = [] if each is first or None in map(each.get, both) else [each[seed] - first[seed] for seed in both]
        rows.append([*key, *cells, f"{statistics.fmean(leads):+.4f}" if leads else ""])
    return table(" | ".join(["method | rates", *(f"seed {seed}" for seed in seeds), "mean Δ"]), rows)


def curves(name: str) -> str:
    """Loss minus that of the first method at each evaluation, on the blocks of the curve."""
    ((_, runs),) = runs_of(name)
    steps = [point["step"] for point in runs[0]["curve"][1:]]
    losses: dict[str, list[list[float | None]]] = {}  # method -> a list of seeds for each step
    for run in sorted(paired(runs), key=lambda run: run["seed"]):
        at = {point["step"]: point["validation_loss"] for point in run["curve"]}  # ends early if it diverged
        for place, step in zip(losses.setdefault(run["method"], [[] for _ in steps]), steps, strict=True):
            place.append(at.get(step))
    base = losses.pop(runs[0]["method"])
    rows = [
        [method, *(with_interval(paired_difference(*pair)) for pair in zip(each, base, strict=True))]
        for method, each in losses.items()
    ]
    return table(" | ".join(["method", *(f"{100 * step / steps[-1]:.0f} %" for step in steps)]), rows)


def costs(name: str) -> str:
    """What each method takes, beside the first one."""
    ((_, runs),) = runs_of(name)
    seconds = {
        row["method"]: statistics.median(1 / run["tokens_per_second"] for run in runs if run["method"] == row["method"])
        for row in study_rows(name)
    }
    rows = [
        [row["method"], f"{row['parameters']:,}", f"{row['cache_bytes_per_token']:,} B"]
        + [f"{each:.2f}" for each in (row["relative_flops"], seconds[row["method"]] / seconds[runs[0]["method"]])]
        for row in study_rows(name)
    ]
    return table("method | parameters | cache a token | operations, of the first | time of a step, of the first", rows)


def conversions_early() -> dict[str, dict[int, dict[str, Any]]]:
    """Method -> per cent of the training before its connections were added (0: from the start) -> the difference from
    the plain model that went on, over the starts."""
    losses: dict[tuple[str, int], list[float]] = {}
    for study, runs in runs_of("early"):
        start = re.match(r"starts/(\d+)-", study["start"] or "")
        for run in sorted(runs, key=lambda run: run["seed"]):
            losses.setdefault((run["architecture"], int(start[1]) if start else 0), []).append(run["loss"])
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for method, moment in losses:
        if method != "transformer":
            difference = paired_difference(losses[method, moment], losses["transformer", moment])
            assert difference is not None
            found.setdefault(method, {})[moment] = difference
    correct([difference for by_moment in found.values() for difference in by_moment.values()])
    return found


def early(name: str) -> str:
    """The gain of connections against the moment at which they are added."""
    found = conversions_early()
    moments = sorted({moment for by_moment in found.values() for moment in by_moment})
    rows = []
    for method, by_moment in found.items():
        cells = (by_moment.get(moment) for moment in moments)
        rows.append([method, *(f"{with_interval(each)} ({each['detectable']:.4f})" if each else "" for each in cells)])
    return table(" | ".join(["added at", *(f"{moment} %" if moment else "the start" for moment in moments)]), rows)


def frozen(names: str) -> str:
    """What parameters that are added to a frozen checkpoint gain on it, or on an arm: `RECORD:LABEL[:ARM],...`."""
    rows = []
    for name, label, *arm in (each.split(":") for each in names.split(",")):
        for added, each in sorted(gains(name, *arm).items(), key=lambda item: item[1]["mean"]):
            seeds = ", ".join(f"{value:+.4f}" for value in each["values"]), ""
            cells = (with_interval(each), f"{each['detectable']:.4f}") if len(each["values"]) > 2 else seeds
            rows.append([label.replace("_", " "), added, f"{each['trained']:,}", *cells])
    return table("frozen | added | parameters | Δ [95 %] | detectable", rows)


def gains(name: str, baseline: str = "checkpoint") -> dict[str, dict[str, Any]]:
    """Arm -> the difference of its longest runs from the frozen checkpoint, or another arm, and what was trained."""
    runs = sorted((run for _, runs in runs_of(name) for run in runs), key=lambda run: run.get("seed", 0))
    losses, steps = dict[str, list[float]](), dict[str, int]()
    for run in runs:
        steps[run["arm"]] = max(steps.get(run["arm"], 0), run.get("steps", 0))
    for run in runs:
        if run.get("steps", 0) == steps[run["arm"]]:
            losses.setdefault(run["arm"], []).append(run["loss"])
    base = losses.pop(baseline)
    losses.pop("checkpoint", None)
    found = {arm: paired_difference(each, base * (len(each) // len(base))) for arm, each in losses.items()}
    trained = {run["arm"]: run["trained"] for run in runs}
    return {arm: {**each, "trained": trained[arm]} for arm, each in found.items() if each}


def quantised(name: str) -> str:
    """What quantised caches cost on each text, and what a cache of shared and quantised layers did."""
    texts, found = ("Python", "documentation", "news", "WikiText-2"), dict[str, dict[str, dict[str, Any]]]()
    for row in read(name)["rows"]:
        found.setdefault(cache_name(row["options"]), {})[row["text"]] = row
    rows = []
    for cache, of_text in sorted(found.items(), key=lambda item: -item[1]["news"]["share"]):
        cells = [f"{of_text[text]['rise']:+.3f} ± {of_text[text]['standard error']:.3f}" for text in texts]
        rows.append([cache, f"{100 * of_text['news']['share']:.1f} %", *cells])
    shared = shared_layers()["shared, refitted, int4", "WikiText-2"]
    last = ["layers shared, 4 bits per token", f"{100 * shared['cache']:.1f} %", "", "", "", f"{shared['rise']:+.3f}"]
    return f"{table(' | '.join(['cache', 'bytes', *texts]), [*rows, last])}\n\n{_made_by(name)}"


def cache_name(options: dict[str, Any]) -> str:
    """`cache_config` in words."""
    axes = {"quanto": {-1: "channel", 0: "token"}, "hqq": {0: "channel", 1: "token"}}.get(options["backend"])
    if axes is None:
        return f"`{options['backend']}`"
    group = f", groups of {size}" if (size := options.get("q_group_size", 64)) != 64 else ""
    keys, values = (axes[options[name]] for name in ("axis_key", "axis_value"))
    per = f"keys and values per {keys}" if keys == values else f"keys per {keys}, values per {values}"
    return f"`{options['backend']}`, {options['nbits']} bits, {per}{group}"


def shared_layers() -> dict[tuple[str, str], dict[str, Any]]:
    """What sharing layers of a trained model cost, by method and text; WikiText-2's tokens are those of `quantised`."""
    tokens = [read(name)["texts"]["WikiText-2"]["sha256 of the tokens"] for name in ("sharing", "quantized_cache")]
    assert tokens[0] == tokens[1]
    return {(row["method"], row["text"]): row for row in read("sharing")["rows"]}


def moved(name: str) -> str:
    """What a dry run on Hub ids receives and takes; `inspect` takes no more."""
    rows = []
    for source, measured in read(name)["sources"].items():
        cost = measured["cases"]["dry run"]
        cells = [f"{source}, {size(measured['bytes_of_weights'])}", size(cost["downloaded"]), str(cost["requests"])]
        rows.append([*cells, f"{cost['cpu_seconds']} s", size(1e6 * cost["peak_mb"])])
    return table("source | downloaded | requests | processor time | peak memory", rows)


def served(name: str) -> str:
    """Families in vLLM: in each mode the methods and the largest difference; then how many tokens are equal."""
    found, groups, rows = read(name)["rows"], dict[tuple[Any, ...], list[str]](), []
    measured, modes = [row for row in found if "error" not in row], ("eager", "compiled", "two ranks")
    for family in dict.fromkeys(row["family"] for row in found):
        counts = [sum((row["family"], row["mode"]) == (family, mode) for row in measured) for mode in modes]
        refused = dict.fromkeys(row["method"] for row in found if row["family"] == family and "error" in row)
        groups.setdefault((*counts, ", ".join(refused) if any(counts) else "all"), []).append(family)
    for (*counts, names), families in groups.items():
        cells = []
        for mode, count in zip(modes, counts, strict=True):
            largest = [row["largest"] for row in measured if row["family"] in families and row["mode"] == mode]
            cells.append(f"{count} method{'s' * (count > 1)}, {rounded_up(max(largest)):.0e}" if count else "")
        rows.append([", ".join(families), *cells, names])
    equal, of = (sum(row[each] for row in measured) for each in ("equal", "of"))
    titles = "families | eager: log probabilities within | compiled | two ranks | refused"
    return f"{table(titles, rows)}\n\n{equal:,} of {of:,} tokens are equal. {_made_by(name)}"


def rounded_up(value: float) -> float:
    """To one digit, so that nothing lies above it."""
    unit = 10.0 ** math.floor(math.log10(value))
    return math.ceil(value / unit) * unit


def engines(name: str) -> str:
    """Connected families in other engines."""
    rows = [
        [row["family"], row["method"], f"{row['batched']} of {row['of']}", f"{row['export']:.1g}", f"{row['onnx']:.1g}"]
        for row in read(name)["rows"]
    ]
    titles = "family | method | continuous batching: tokens equal | torch.export | ONNX"
    return f"{table(titles, rows)}\n\n{_made_by(name)}"


def serving_speed(name: str) -> str:
    """Throughput of the engines."""
    report = read(name)
    rows = [[arm, f"{row['tokens a second']:.0f}", f"{row['of Llama']:.3f}"] for arm, row in report["arms"].items()]
    written = table(" | new tokens a second of one thread | of vLLM's Llama", rows)
    return f"{written}\n\n{len(report['seconds']['Llama'])} rounds. {_made_by(name)}"


def adapters(name: str) -> str:
    """What training an adapter of an 8B model takes."""
    rows = []
    for run in read(name)["adapters of 8B"]:
        parts = run["weights"], run["gradients"] + run["optimizer"], run["activations"], run["peak"]
        rows.append([f"{run['block']:,}", *(f"{part / 1e9:.1f} GB" for part in parts)])
    return table("tokens | weights, the adapter's among them | gradients and AdamW | activations | peak", rows)


def traffic(name: str) -> str:
    """Kernels and bytes of each method, more than Llama's, at 8B, the fewest bytes that its equation needs, and the
    memory of a training step."""
    counted, rows = read(name)["counted"]["8B"], []
    memory = next(iter(read("memory")["memory"].values()))["arms"]
    for method, steps in ((each, steps) for each, steps in counted.items() if each not in VARIANTS):
        cells = [f"`{method}`"] if method != "llama" else ["Llama itself"]
        for step, found in steps.items():
            llama = counted["llama"][step]
            more = {what: found[what] - (llama[what] if method != "llama" else 0) for what in ("kernels", "bytes")}
            share = f" ({more['kernels'] / llama['kernels']:+.1%})" if method != "llama" and step == "decode" else ""
            cells.append(f"{more['kernels']:,}{share}")
            if step != "decode":
                least = f"{found['minimum'] / 1e9:.1f}" if "minimum" in found else ""
                cells += [f"{more['bytes'] / 1e9:.1f}", least]
        each = memory[method]
        rows.append([*cells, f"{each['of llama']:.2f}", f"{each['checkpointed']['of llama']:.2f}"])
    steps = "forward: kernels | GB | least GB | backward: kernels | GB | least GB"
    return table(f"method | {steps} | a decoded token: kernels | training memory | checkpointed", rows)


def on_a_gpu(name: str) -> str:
    """Milliseconds and memory of a training step against Llama's."""
    ((_, case),) = read(name)["time"].items()
    rows = [
        [f"`{arm}`" if arm in METHODS else arm, each["ms"], each["of llama"], each["memory"]["of llama"]]
        for arm, each in case["arms"].items()
        if arm not in VARIANTS
    ]
    return table("method | ms | of Llama's | memory, of Llama's", rows)


def sizes(source: str) -> str:
    """Shapes and budgets of the sizes that a model is trained from scratch in."""
    rows, tokenizer = [], make_tokenizer("bytes", {}, 0.0)
    for name, shape in SIZES.items():
        vocabulary = 50_277 if shape.hidden_size >= 512 else 4096
        config = scratch_config("transformer", name, tokenizer, vocab_size=vocabulary)
        plan = pretrain_plan(PretrainOptions(output="", data=["text"]), config)
        cells = [f"`{name}`", config.num_hidden_layers, config.num_attention_heads, config.hidden_size]
        cells += [config.intermediate_size, f"{plan.parameters / 1e6:.0f}M", f"{plan.tokens / 1e9:.2f}B"]
        rate = f"{plan.learning_rate:.1e}".replace("e-0", "e-")
        rows.append([*cells, f"{plan.sequences * plan.block:,}", rate, f"{plan.steps:,}"])
    rows.append(["ResFormer's paper, 468M", 24, 16, 1024, 3584, "468M", "20B", "2,097,152", "6e-4", "10,000"])
    return table("size | layers | heads | width | MLP | parameters | tokens | a step | rate | steps", rows)


def _made_by(name: str) -> str:
    return f"Command and versions: [{name}](../benchmarks/results/{name}.json)."


TABLES: dict[str, Callable[[str], str]] = {
    "studies": studies,
    "scratch": scratch,
    "tried": tried,
    "curves": curves,
    "costs": costs,
    "early": early,
    "frozen": frozen,
    "engines": engines,
    "served": served,
    "serving_speed": serving_speed,
    "quantised": quantised,
    "moved": moved,
    "adapters": adapters,
    "sizes": sizes,
    "traffic": traffic,
    "on_a_gpu": on_a_gpu,
}


def of_studies() -> dict[str, list[str]]:
    """What pages say of studies, where it is so."""
    rows = {name: {row["architecture"]: row for row in study_rows(name)} for name in ("budget20", "five", "main")}
    longest, plain = dict(rows["budget20"]), rows["budget20"]["transformer"]
    del longest["transformer"]
    tokens = {name: f"{tokens_a_parameter(name):.1f}".removesuffix(".0") for name in rows}
    leads = [rows[name][method]["difference"] for name in ("five", "main") for method in ("resformer", "svformer")]
    seen = {method: row["difference"]["detectable"] for method, row in longest.items()}
    shares = sorted(100 * each / plain["loss"] for each in seen.values())
    of_paper = sorted(100 * (1 - loss / other) for loss, other in PAPERS_LOSSES)
    ends = [(row["difference"]["low"], row["difference"]["high"]) for row in longest.values()]
    continued = [row["difference"] for row in study_rows("continued")[1:]]
    largest = max(-each["low"] for each in continued)
    nothing = f"gained less than {math.ceil(1000 * largest) / 1000} nats"
    added = conversions_early()
    _, *of_b12 = contrasts("b12")
    by = {row["architecture"]: -row["difference"]["mean"] for row in of_b12}
    kinds = {row["method"]: row["difference"] and row["difference"]["mean"] for row in study_rows("n-kinds")}
    costs = [kinds[f"{of}:{rate}_learning_rate=4e-2"] - kinds[of] for of, rate in HIGHER]
    n20 = {row["architecture"]: row["difference"]["values"] for row in study_rows("n20")[1:]}
    ((_, of_a),) = runs_of("a")
    at_rates: dict[str, dict[float, list[float]]] = {}  # by the connections' rate
    for run in of_a:
        if run["learning_rate"] == of_a[0]["learning_rate"]:
            of_rate = at_rates.setdefault(run["architecture"], {})
            of_rate.setdefault(run.get("connection_learning_rate") or 0.0, []).append(run["loss"])
    (base,) = map(statistics.fmean, at_rates.pop("transformer").values())
    rates = {
        method: ", ".join(f"{base - statistics.fmean(each[rate]):.3f}" for rate in sorted(each))
        for method, each in at_rates.items()
    }
    both = ", ".join(f"{each:+.4f}" for each in gains("adapters", "LoRA")["resformer-gated and LoRA"]["values"])
    plans = {name: report(name) for name in ("n20", "budget20", "five", "b12", "c", "main")}
    (context,) = {plan["block"] for plan in plans.values()}
    a_step = {name: plan["batch"] * context for name, plan in plans.items()}
    of_main, (of_others,) = a_step.pop("main"), {*a_step.values()}
    tokenised, words = report("c"), -study_rows("c")[1]["difference"]["mean"]
    (llama, *_), (smol, *_) = (read(f"analysis/{name}/analysis")["checkpoints"] for name in ("from-scratch", "smollm2"))
    first, sink = (max(model["quantities"]["importance_ratio"]["mean"]) for model in (llama, smol))
    holds = {
        "ahead at first": all(each["holm"] < 0.05 for each in [*leads, *(row["difference"] for row in of_b12)]),
        "0 and the paper's gains": all(low < -of_paper[-1] / 100 * plain["loss"] and high > 0 for low, high in ends),
        "its smallest gain": round(of_paper[0]) == 100 * PAPERS_GAIN,
        "the signs of n20": max(*n20["mudd"], *n20["attnres"]) < 0 < min(n20["value-embeddings"]),
        "no sink": first < llama["uniform"]["importance_ratio"],
    }
    if wrong := [claim for claim, so in holds.items() if not so]:
        sys.exit(f"docs/results.md: not what the results are: {', '.join(wrong)}")
    seeds = len(plain["seeds"])
    return {
        "README.md": [
            f"after {tokens['budget20']} tokens a parameter, {_NUMBERS[seeds]} seeds could not tell them apart. They "
            f"could have detected a gain of {shares[0]:.1f} to {shares[-1]:.1f} % of the loss; the papers report about "
            f"{100 * PAPERS_GAIN:.0f} %",
            f"{nothing} a token ({len(continued[0]['values'])} seeds)",
        ],
        "docs/methods.md": [f"ahead of fewer key/value heads by {by['svformer minus GQA']:.3f} nats"],
        "docs/results.md": [
            f"at {tokens_a_parameter('b12'):.1f} tokens a parameter, with rates chosen on other seeds: `svformer` by "
            f"{by['svformer']:.3f} nats a token, `resformer` by {by['resformer']:.3f} and `denseformer` by "
            f"{by['denseformer']:.3f}",
            f"`svformer` is {by['svformer minus GQA']:.3f} nats ahead of grouped-query attention",
            f"In `n20`, {_NUMBERS[len(n20['mudd'])]} of eight planned seeds",
            f"`resformer` gains {rates['resformer']} nats and `denseformer` {rates['denseformer']}",
            f"on a BPE of {tokenised['vocabulary']:,}: its lead of {words:.3f} nats a token is "
            f"{words / tokenised['bytes_per_token']:.3f} a byte, that of `b12` {by['resformer']:.3f}",
            f"At {tokens['budget20']} tokens a parameter, we cannot tell.** {_NUMBERS[seeds].capitalize()} seeds would "
            f"have seen {seen['resformer']:.3f} nats for `resformer`, {seen['svformer']:.3f} for `svformer` and "
            f"{seen['denseformer']:.3f} for `denseformer`, which is {shares[0]:.1f} to {shares[-1]:.1f} % of the loss. "
            f"The ResFormer paper gains {of_paper[0]:.1f} to {of_paper[-1]:.1f} %",
            f"ten times the rate gains Llama {-study_rows('n-rates')[2]['difference']['mean']:.3f} nats",
            f"`mudd` is {-kinds['mudd']:.3f} nats ahead, `resformer-gated` {-kinds['resformer-gated']:.3f}, `attnres` "
            f"{-kinds['attnres']:.3f}, `value-embeddings` {-kinds['value-embeddings']:.3f}. Ten times the rate costs "
            "the last three {:.3f}, {:.3f} and {:.3f}".format(*costs),
            nothing,
            f"The largest gain that any of the {len(continued)} intervals holds is {largest:.4f} nats; up to "
            f"{max(each['detectable'] for each in continued):.4f} could have been seen",
            f"a context of {context}, {of_others:,} tokens a step (`main`: {of_main:,})",
            f"Connections with LoRA differ from LoRA alone by {both} nats",
            f"no p is below {min(each['holm'] for of_method in added.values() for each in of_method.values()):.2f}",
            f"at most {first:.1f} times the importance of the others, where uniform attention gives "
            f"{llama['uniform']['importance_ratio']:.1f}",
            f"in {smol['name']} it has {sink:.0f} times",
        ],
    }


def muon() -> dict[str, tuple[float, float]]:
    """Optimizer -> its best rate, and the mean loss at it of all seeds."""
    best = {}
    for optimizer in ("adamw", "muon"):
        losses: dict[float, list[float]] = {}
        for run in read("muon")["runs"]:
            if run["optimizer"] == optimizer:
                losses.setdefault(run["learning_rate"], []).append(run["loss_after"])
        rate = max(losses, key=lambda rate: len(losses[rate]))  # the one of the other seeds
        best[optimizer] = rate, statistics.mean(losses[rate])
    return best


def sentences() -> dict[str, list[str]]:
    """Page -> what it states of results, up to line breaks."""
    hub, convert = read("hub")["imports"], read("convert")
    copied = convert["cases"]["copy, hashes"]
    of_cp = [convert["cases"][case]["of_cp"] for case in ("link, hashes", "copy, headers", "copy, hashes")]
    speed, tokenised = read("pretrain_speed"), read("tokenize")["runs"][-1]
    shared = shared_layers()["shared, refitted", "WikiText-2"]
    cached = {(row["family"], row["method"]): row.get("tokens of cache") for row in read("vllm_families")["rows"]}
    twice, in_smollm3 = (cached[name, "cla2"] / cached[name, "resformer"] for name in ("llama", "smollm3"))
    ours, bare = (statistics.median(each[arm] for each in speed["rounds, tokens/s"]) for arm in ("pretrain", "bare"))
    studied, best = of_studies(), muon()
    return {
        "docs/converting.md": [
            "{:.1f} times its time with `--link`, {:.1f} with a copy, {:.1f} with `--verify hashes`".format(*of_cp),
            f"at most {copied['peak_mb_beyond_torch']:.0f} MB of memory beyond `import torch`",
            f"imports, which alone take {hub['cpu_seconds']:.1f} s and {hub['peak_mb']} MB",
        ],
        "docs/serving.md": [
            f"{100 * shared['cache']:.1f} % of the keys and values left cost {shared['rise']:.3f} nats there and "
            f"{shared_layers()['shared, refitted', 'Python']['rise']:.3f} on Python",
            f"CLA2 holds {twice:.2g} times the tokens in the same memory, {in_smollm3:.2g} times in SmolLM3",
        ],
        "docs/pretraining.md": [
            f"{best['adamw'][1]:.2f} nats with AdamW (rate {best['adamw'][0]:g}) and {best['muon'][1]:.2f} with Muon "
            f"({best['muon'][0]:g})",
            f"{tokenised['bytes'] / 1e9:.0f} GB of text took {tokenised['seconds']:.0f} seconds with two workers",
            f"{bare:,.0f} tokens/s on one core against {ours:,.0f} (median ratio {speed['ratio']})",
        ],
        "README.md": [f"[{len(METHODS) - 8} other methods](docs/methods.md)", *studied["README.md"]],
        "docs/results.md": studied["docs/results.md"],
        "docs/methods.md": studied["docs/methods.md"],
    }


def made() -> dict[Path, str]:
    """Each page with its tables made anew."""
    return {
        path: TABLE.sub(
            lambda match: f"{match[1]}\n{TABLES[match[2]](match[3])}\n\n{match[4]}", path.read_text("utf-8")
        )
        for path in ROOT.glob("docs/*.md")
    }


def write_reports(folder: Path) -> None:
    """The table and the picture of each study that `compare` has made."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted((RESULTS / "study").glob("*.jsonl")):
        studies = [(study, runs) for study, runs in read_record(path) if "method" in runs[0]]
        for place, (study, runs) in enumerate(studies):
            name = path.stem if len(studies) == 1 else f"{path.stem}-{place}"
            made = report_of(study, paired(runs), runs[0]["method"])
            more = [tables(path.stem) for tables in (curves, costs, tried)] if len(studies) == 1 else []
            (folder / f"{name}.md").write_text("\n\n".join([markdown(made), *more, ""]), encoding="utf-8")
            plot(made, sorted(paired(runs), key=lambda run: run["seed"]), folder / f"{name}.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--reports", type=Path)
    arguments = parser.parse_args()
    if arguments.reports:
        write_reports(arguments.reports)
        return
    stale = {path: text for path, text in made().items() if path.read_text(encoding="utf-8") != text}
    for page, stated in sentences().items():
        text = " ".join((ROOT / page).read_text(encoding="utf-8").split())
        stated = [" ".join(sentence.split()) for sentence in stated]
        if missing := [sentence for sentence in stated if sentence not in text]:
            sys.exit(f"{page}: does not say what the results are: {missing}")
        if page == "docs/results.md":
            for sentence in stated:
                text = text.replace(sentence, "")
            prose = re.sub(r"<!-- table.*?<!-- end -->|\]\([^)]*\)|`[^`]*`", "", text)
            if figures := re.findall(r"\d+\.\d{2,}|\d[\d,]{4,}", prose):
                sys.exit(f"{page}: {', '.join(figures)}: in no table and none of `sentences`")
    if arguments.check:
        names = ", ".join(sorted(path.name for path in stale))
        sys.exit(f"{names}: differ from the results. Run: python benchmarks/tables.py" if stale else 0)
    for path, text in stale.items():
        path.write_text(text, encoding="utf-8")
    ((study, runs),) = runs_of(PICTURE)
    plot(report_of(study, runs, runs[0]["method"]), runs, RESULTS / "study" / f"{PICTURE}.png")


if __name__ == "__main__":
    main()
