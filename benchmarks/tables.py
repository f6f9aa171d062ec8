"""Writes the tables that pages take from results: `python benchmarks/tables.py`; `--check` only compares.

A table of a page stands between `<!-- table: NAME ARGUMENT -->` and `<!-- end -->`. NAME is one of `TABLES`. Figures in
the sentences of a page are compared with `sentences`, which writes nothing.
"""

import json
import re
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import study_figures

from resformer.commands.terminal import size
from resformer.configuration import METHODS
from resformer.training.options import PretrainOptions
from resformer.training.pretraining import pretrain_plan
from resformer.training.sizes import SIZES, scratch_config
from resformer.training.study.table import markdown
from resformer.training.tokenizers import make_tokenizer

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
_NUMBERS = "no one two three four five".split()
TABLE = re.compile(r"(<!-- table: (\S+) (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def read(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def studies(names: str) -> str:
    """What each study trained, on what."""
    lines = [
        "| study | text | parameters | tokens | per parameter | context | tokens a step | warm-up | dtype "
        "| learning rate | seeds | held-out files |",
        f"|{'---|' * 12}",
    ]
    for name in names.split(","):
        report, rows, plain = read(f"study/{name}"), study_rows(name), baseline(name)
        tokens = report["steps"] * report["batch"] * report["block"]
        swept = {rate for row in rows for rate in re.findall(r":(?:learning_rate)=([^:]+)", row["method"])}
        cells = [
            f"[{name}](../benchmarks/results/study/{name}.json)",
            report["data"]["name"],
            f"{plain['parameters']:,}",
            f"{tokens:,}",
            f"{tokens / plain['parameters']:.2f}",
            f"{report['block']:,}",
            f"{report['batch'] * report['block']:,}",
            f"{100 * report['warmup']:.0f} %",
            "bfloat16" if report["bf16"] else "float32",
            ", ".join(sorted(swept, key=float)) or f"{report['learning_rate']:g}",
            str(len(plain["seeds"])),
            f"{report['data']['held_out_documents']:,}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def study(name: str) -> str:
    """All methods of a study, without the notes."""
    return "\n".join(line for line in markdown(read(f"study/{name}")).splitlines() if line.startswith("|"))


def leads(name: str) -> str:
    """Loss minus plain Llama's during the training, at every third evaluation, and how far coefficients moved."""
    methods = study_figures.leads(name)
    budgets = [budget for budget, _ in next(iter(methods.values()))][::3]
    titles = [f"{budget:.1f} tokens a parameter" for budget in budgets]
    lines = [f"| method | {' | '.join(titles)} | largest change of a coefficient |", f"|{'---|' * (len(budgets) + 2)}"]
    runs = study_figures.by_architecture(study_figures.runs_of(name))
    for method, points in methods.items():
        cells = [method, *(_with_interval(difference) for _, difference in points[::3])]
        moved = [study_figures.moved(run) for run in runs[method] if run["curve"][-1].get("coefficients")]
        lines.append(f"| {' | '.join(cells)} | {f'{statistics.fmean(moved):.2f}' if moved else 'none'} |")
    return "\n".join(lines)


def moments(name: str) -> str:
    """The gain of a conversion against its moment, and how far the coefficient that moved most is from its start."""
    lines = ["| converted | as | loss minus plain Llama's | of each start | largest change of a coefficient |"]
    lines.append(f"|{'---|' * 5}")
    found = study_figures.moments()
    for moment in study_figures.MOMENTS:
        at = f"at {moment} %" if moment else "from scratch"
        for method, by_moment in found.items():
            if difference := by_moment.get(moment):
                starts = ", ".join(f"{value:+.4f}" for value in difference["values"])
                cells = [at, method, _with_interval(difference), starts, f"{difference['moved']:.2f}"]
                lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def capacity(name: str) -> str:
    """What parameters gain that are added to a frozen checkpoint."""
    lines = ["| added | parameters | loss minus the checkpoint's | of each start |", f"|{'---|' * 4}"]
    for arm, difference in study_figures.capacity(name).items():
        starts = ", ".join(f"{value:+.4f}" for value in difference["values"])
        lines.append(f"| {arm} | {difference['trained']:,} | {_with_interval(difference)} | {starts} |")
    return "\n".join(lines)


def smollm2(name: str) -> str:
    """What connections and LoRA gain on SmolLM2, frozen: each run."""
    runs = study_figures.smollm2()
    texts = list(runs[0]["differences"])
    titles = ["added", "parameters", "tokens", "rate", "seed", "for choices, mean of the texts", *texts]
    lines = [f"| {' | '.join(titles)} |", f"|{'---|' * len(titles)}"]
    for run in runs:
        reports = (run["differences"][text][1] for text in texts)
        cells = [run["arm"], f"{run['trained']:,}", f"{run['curve'][-1]['tokens']:,}", f"{run['rate']:g}", run["seed"]]
        cells += [f"{loss:+.4f}" for loss in (_for_choices(run), *reports)]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def _for_choices(run: dict[str, Any]) -> float:
    return statistics.fmean(choice for choice, _ in run["differences"].values())


def _with_interval(difference: dict[str, Any]) -> str:
    own = difference["own"]
    return f"{difference['mean']:+.4f}" + ("" if own is None else f" [{own['low']:+.4f}, {own['high']:+.4f}]")


def choices(studies: str) -> str:
    """Which method for what: what it gained, what it costs, and where that was measured."""
    lines = ["| for | method | loss minus plain Llama's | FLOPs | cache | measured |", f"|{'---|' * 6}"]
    for name in studies.split(","):
        report, plain = read(f"study/{name}"), baseline(name)
        methods = {row["architecture"] for row in study_rows(name) if row["difference"]} & set(METHODS)
        best = {method: best_row(name, method) for method in methods}
        tokens = report["steps"] * report["batch"] * report["block"] / plain["parameters"]
        seeds = f"{len(plain['seeds'])} seed{'s' * (len(plain['seeds']) > 1)}"
        where = f"`{name}`: {seeds}, {tokens:.1f} tokens a parameter"
        for method, row in sorted(best.items(), key=lambda item: item[1]["difference"]["mean"]):
            cells = ["a trained model" if report["start"] else "from scratch", f"`{method}`"]
            cells += [_with_interval(row["difference"]), f"{row['relative_flops']:.3f}"]
            cells += [f"{100 * row['cache_bytes_per_token'] / plain['cache_bytes_per_token']:.0f} %", where]
            lines.append(f"| {' | '.join(cells)} |")
    for method, by_moment in study_figures.moments().items():
        for moment, difference in sorted(by_moment.items()):
            if moment and method in METHODS:
                cells = [f"a model at {moment} % of its training", f"`{method}`", _with_interval(difference), "", ""]
                lines.append(f"| {' | '.join(cells)} | `early`: {len(difference['values'])} starts |")
    for row in read("shrink")["rows"]:
        what = f"{row['method']}, {row['setting']}"
        if row["text"] == "WikiText-2" and what in (
            "int4, stock",
            "shared, refitted, 83.3 %",
            "shared, refitted, int4, 83.3 %",
        ):
            cells = ["a trained model's cache", what, f"{row['rise']:+.3f}", "", f"{100 * row['cache']:.0f} %"]
            lines.append(f"| {' | '.join(cells)} | SmolLM2-135M on WikiText-2 |")
    return "\n".join(lines)


def sinks(name: str) -> str:
    """The first token of each analysed checkpoint: the layer with the strongest sink, drain and peak."""
    lines = [
        "| model | texts | importance, largest | of uniform attention | value norm, smallest | hidden norm, largest |",
        "|---|---|---|---|---|---|",
    ]
    for model in read(f"analysis/{name}/analysis")["checkpoints"]:
        ratios = {key: values["mean"] for key, values in model["quantities"].items() if key.endswith("_ratio")}
        cells = [model["name"], str(model["texts"])]
        for key, extreme in (("importance_ratio", max), ("value_norm_ratio", min), ("hidden_norm_ratio", max)):
            value = extreme(ratios[key])
            cells.append(f"{value:.3g} (layer {ratios[key].index(value)})")
        cells.insert(3, f"{model['uniform']['importance_ratio']:.3g}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def passages(name: str) -> str:
    """Last words that a passage has to be read for, of the source and of shrunken models."""
    lines = ["| model | right | lost, gained | nats a word, beyond the source's |", "|---|---|---|---|"]
    for model, row in read(name)["passages"].items():
        low, high = (f"{100 * end:.0f}" for end in row["interval"])
        cells = [model if model.startswith("source") else f"{model} % of the cache"]
        cells += [f"{100 * row['share']:.1f} % ({low} to {high})"]
        if model == "source":
            cells += ["", f"0, of {row['nats a word']:.3f}"]
        else:
            cells += [f"{row['lost']}, {row['gained']}", f"{row['rise']:+.3f} ± {row['standard error']:.3f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def shrunken(folder: str) -> str:
    """What each plan of `resformer shrink` costs on held-out text."""
    lines = [
        "| cache | loss | KL | 95th percentile | same top token | last words right | passkeys of 5 | plan |",
        "|---|---|---|---|---|---|---|---|",
    ]
    reports = {path.stem: read(f"{folder}/{path.stem}") for path in (RESULTS / folder).glob("*.json")}
    for name, report in sorted(reports.items(), key=lambda item: (-item[1]["cache"], item[1]["cost"]["loss"])):
        cost = report["cost"]
        low, high = (f"{100 * end:.0f}" for end in cost["intervals"]["last_word_accuracy"])
        cells = [f"{100 * report['cache']:.1f} %", f"{cost['loss'] - cost['source_loss']:+.4f}"]
        cells += [f"{cost['kl_mean']:.4f}", f"{cost['kl_p95']:.3f}", f"{100 * cost['top1_agreement']:.1f} %"]
        cells += [f"{100 * cost['last_word_accuracy']:.1f} % ({low} to {high})"]
        cells += [", ".join(f"{each['result'] * each['questions']:.0f}" for each in cost["passkey"])]
        lines.append(f"| {' | '.join(cells)} | {name.partition('-')[2].replace('-', ' ') or 'long search'} |")
    return "\n".join(lines)


def rivals(name: str) -> str:
    """Rise of the loss on each text, of shared caches and of other ways to a smaller one."""
    rises: dict[tuple[str, str, float], dict[str, float]] = {}
    for row in read(name)["rows"]:
        rises.setdefault((row["method"], row["setting"], row["cache"]), {})[row["text"]] = row["rise"]
    lines = ["| method | setting | cache | WikiText-2 | Python | chats |", "|---|---|---|---|---|---|"]
    for (method, setting, cache), by_text in sorted(rises.items(), key=lambda item: (item[0][0], -item[0][2])):
        cells = [f"{by_text[text]:+.3f}" if text in by_text else "" for text in ("WikiText-2", "Python", "chats")]
        lines.append(f"| {method} | {setting} | {100 * cache:.1f} % | {' | '.join(cells)} |")
    return "\n".join(lines)


def healed(name: str) -> str:
    """The KL divergence of shrunken models before and after all their weights were distilled."""
    kl = {(row["method"], row["setting"], row["text"]): row["KL"] for row in read(name)["rows"]}
    lines = ["| cache | rate | tokens | tokens/s on one core | KL, WikiText-2 | Python | chats |", f"|{'---|' * 7}"]
    for setting, file, before in (
        ("91.7 %", "91.7-all", "shared, refitted"),
        ("66.7 %", "66.7-all", "shared, calibrated on all three"),
    ):
        metrics = read(f"healing/{file}")
        cells = [f"{setting} ([metrics](../benchmarks/results/healing/{file}.json))"]
        cells += [f"{metrics['arguments']['learning_rate']:.0e}".replace("e-0", "e-")]
        cells += [f"{metrics['tokens']:,}", f"{metrics['tokens_per_second']:.0f}"]
        for text in ("WikiText-2", "Python", "chats"):
            after = kl["shared, all weights healed", setting, text]
            cells.append(f"{kl[before, setting, text]:.3f} to {after:.3f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def plans(name: str) -> str:
    """The rise of the loss with plans that were not searched for; the random ones together."""
    rises = {plan["plan"]: plan["loss_rise"] for plan in read(name)["plans"]}
    random = [rises.pop(plan) for plan in list(rises) if plan.startswith("random")]
    lines = ["| plan | loss |", "|---|---|"]
    lines += [f"| {plan} | {rise:+.3f} |" for plan, rise in sorted(rises.items(), key=lambda item: item[1])]
    return "\n".join([*lines, f"| {len(random)} random plans | {min(random):+.3f} to {max(random):+.3f} |"])


def conversions(name: str) -> str:
    """Times of `resformer convert`, beside copies of the same folder."""
    lines = ["| | time | `cp -r` | peak memory beyond `import torch` |", "|---|---|---|---|"]
    for case in read(name)["cases"].values():
        times = f"{case['seconds_beyond_start_up']:.2f} s | {case['cp_seconds_beyond_start_up']:.2f} s"
        lines.append(f"| `{case['options']}` | {times} | {case['peak_mb_beyond_torch']:.0f} MB |")
    return "\n".join(lines)


def moved(name: str) -> str:
    """What commands on Hub ids send and receive."""
    lines = [
        "| source | command | downloaded | uploaded | requests | processor time | peak memory |",
        f"|{'---|' * 7}",
    ]
    for source, measured in read(name)["sources"].items():
        for case, cost in measured["cases"].items():
            cells = [f"{source}, {size(measured['bytes_of_weights'])}", case]
            cells += [size(cost["downloaded"]), size(cost["uploaded"])]
            if cost.get("computed"):
                cells += ["", "", f"{size(1e6 * cost['peak_mb'])}, computed"]
            else:
                cells += [str(cost["requests"]), f"{cost['cpu_seconds']} s", size(1e6 * cost["peak_mb"])]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def coefficients(name: str) -> str:
    """The learned coefficients of value residuals, layer by layer."""
    (model,) = (each for each in read(f"analysis/{name}/analysis")["checkpoints"] if each["name"] == "resformer")
    rows = {n: row for n, row in enumerate(model["value_mixing_matrix"]) if n}
    return "\n".join(
        [
            f"| layer | {' | '.join(map(str, rows))} |",
            f"|{'---|' * (len(rows) + 1)}",
            f"| of V_0 | {' | '.join(f'{row[0]:.3f}' for row in rows.values())} |",
            f"| of its own values | {' | '.join(f'{row[n]:.3f}' for n, row in rows.items())} |",
        ]
    )


def served(name: str) -> str:
    """Every method in vLLM, and the command."""
    report = read(name)
    lines = [
        "| method | float32: tokens equal | log probabilities within | bfloat16: tokens equal | within "
        "| tokens of cache in 1 GiB, float32 | bfloat16 |",
        "|---|---|---|---|---|---|---|",
    ]
    rows = {(row["method"], row["dtype"]): row for row in report["rows"]}
    for method in METHODS:
        pair = [rows[method, dtype] for dtype in ("float32", "bfloat16")]
        cells = [cell for row in pair for cell in (f"{row['equal']} of {row['of']}", f"{row['largest']:.1g}")]
        cells += [f"{row['tokens of cache']:,}" for row in pair]
        lines.append(f"| {method} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", _made_by(report)])


def serving_speed(name: str) -> str:
    """Throughput of the engines, and the command."""
    report = read(name)
    lines = ["| | new tokens a second of one thread | of vLLM's Llama |", "|---|---|---|"]
    lines += [
        f"| {arm} | {row['tokens a second']:.0f} | {row['of Llama']:.3f} |" for arm, row in report["arms"].items()
    ]
    rounds = len(report["seconds"]["Llama"])
    return "\n".join([*lines, "", f"{rounds} {'round' if rounds == 1 else 'rounds'} of {_made_by(report)}"])


def adapters(name: str) -> str:
    """What training an adapter of an 8B model takes."""
    lines = [
        "| tokens | weights, the adapter's among them | gradients and AdamW | activations | peak |",
        f"|{'---|' * 5}",
    ]
    for run in read(name)["adapters of 8B"]:
        parts = run["weights"], run["gradients"] + run["optimizer"], run["activations"], run["peak"]
        lines.append(f"| {run['block']:,} | {' | '.join(f'{part / 1e9:.1f} GB' for part in parts)} |")
    return "\n".join(lines)


def sizes(source: str) -> str:
    """Shapes and budgets of the sizes that a model is trained from scratch in."""
    if source != "code":
        raise ValueError(f"sizes {source}: they are taken from the code")
    lines = [
        "| size | layers | heads | width | MLP | parameters | tokens | a step | rate | steps |",
        f"|{'---|' * 10}",
    ]
    tokenizer = make_tokenizer("bytes", {}, 0.0)
    for name, shape in SIZES.items():
        vocabulary = 50_277 if shape.hidden_size >= 512 else 4096
        config = scratch_config("transformer", name, tokenizer, vocab_size=vocabulary)
        plan = pretrain_plan(PretrainOptions(output="", data=["text"]), config)
        cells = [f"`{name}`", config.num_hidden_layers, config.num_attention_heads, config.hidden_size]
        cells += [config.intermediate_size, f"{plan.parameters / 1e6:.0f}M", f"{plan.tokens / 1e9:.2f}B"]
        cells += [
            f"{plan.sequences * plan.block:,}",
            f"{plan.learning_rate:.1e}".replace("e-0", "e-"),
            f"{plan.steps:,}",
        ]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(
        [*lines, "| ResFormer's paper, 468M | 24 | 16 | 1024 | 3584 | 468M | 20B | 2,097,152 | 6e-4 | 10,000 |"]
    )


def _made_by(report: dict[str, Any]) -> str:
    versions = ", ".join(f"{package} {version}" for package, version in report["versions"].items())
    return f"`{report['command']}`, with {versions}."


TABLES: dict[str, Callable[[str], str]] = {
    "studies": studies,
    "study": study,
    "choices": choices,
    "leads": leads,
    "moments": moments,
    "capacity": capacity,
    "smollm2": smollm2,
    "sinks": sinks,
    "coefficients": coefficients,
    "passages": passages,
    "served": served,
    "shrunken": shrunken,
    "rivals": rivals,
    "serving_speed": serving_speed,
    "healed": healed,
    "plans": plans,
    "conversions": conversions,
    "moved": moved,
    "adapters": adapters,
    "sizes": sizes,
}


def study_rows(name: str) -> list[dict[str, Any]]:
    """Of a study of one size: its rows."""
    (rows,) = read(f"study/{name}")["sizes"].values()
    return rows


def baseline(name: str) -> dict[str, Any]:
    report = read(f"study/{name}")
    return next(row for row in study_rows(name) if row["method"] == report["baseline"])


def best_row(name: str, method: str, loss: str = "choice_loss") -> dict[str, Any]:
    """The row of a method's best rate, by the text for choices."""
    return min((row for row in study_rows(name) if row["architecture"] == method), key=lambda row: row[loss])


def _of_studies() -> Iterator[str]:
    """What docs/results.md says of rates and seeds."""

    def rate(name: str, method: str, loss: str = "choice_loss") -> str:
        return best_row(name, method, loss)["method"].partition("learning_rate=")[2]

    def seeds(name: str, method: str, sign: int) -> str:
        values = best_row(name, method)["difference"]["values"]
        return f"{_NUMBERS[sum(sign * value > 0 for value in values)]} of {_NUMBERS[len(values)]}"

    for method in ("transformer", "resformer", "svformer", "denseformer"):
        for loss in ("choice_loss", "loss"):
            yield f"In `rates`, {rate('rates', method, loss)} is the best of four for each of four methods"
        yield f"In `five-rates`, {rate('five-rates', method)} is the best rate of each method"
    for method in ("svformer", "resformer"):
        yield f"below plain Llama**, and ahead in {seeds('five', method, -1)} seeds"
        yield f"`denseformer` is not: it is behind in {seeds('five', 'denseformer', 1)} seeds"
        trend, five = (best_row(name, method)["difference"]["mean"] for name in ("trend", "five"))
        yield f"`svformer` and `resformer` are {'further' if trend < five else 'less far'} ahead there"
    loss = {row["method"]: row["loss"] for row in study_rows("five-rates")}
    for method in ("svformer", "resformer"):
        others = [
            loss[f"{method}:learning_rate={at}"] < loss[f"transformer:learning_rate={at}"] for at in ("2e-3", "8e-3")
        ]
        where = "ahead of" if all(others) else "not ahead of"
        yield f"At 2e-3 and 8e-3, too, `svformer` and `resformer` are {where} plain Llama"
    yield f"{rate('continued-rates', 'transformer')} is the best of four for plain Llama"
    for method in ("resformer", "svformer", "denseformer"):
        best = rate("budget20-rates", "transformer"), rate("budget20-rates", method)
        yield "on the text for choices, are {} for plain Llama and {} for the others".format(*best)
    for method in ("resformer", "denseformer"):
        yield f"`resformer` and `denseformer` are ahead in {seeds('budget20', method, -1)} seeds"
    yield f"`svformer` is behind in {seeds('budget20', 'svformer', 1)}"
    yield f"in `budget20`, in {seeds('context1024', 'resformer', -1)} in `context1024`"
    yield f"and of `context1024` ahead in {seeds('context1024', 'svformer', -1)}"
    for name in ("main", "five"):
        tested = {row["method"].split(":learning_rate")[0]: row["difference"] for row in study_rows(name)}
        *first, last = (
            f"`{method}`" for method, each in tested.items() if each and each["high"] < 0 and each["own"]["holm"] < 0.05
        )
        yield f"{', '.join(first)} and {last} are significantly below plain Llama"
    added = {moment: each for moment, each in study_figures.moments()["value-embeddings"].items() if moment}
    each = "each" if max(value for difference in added.values() for value in difference["values"]) < 0 else "not each"
    yield f"**Value embeddings are ahead in {each} start** at each moment"
    certain = [str(moment) for moment, difference in added.items() if difference["own"]["high"] < 0]
    yield f"Only the intervals at {' and '.join(certain)} % leave out 0"
    runs = study_figures.smollm2()
    short = [run for run in runs if run["steps"] == runs[0]["steps"]]
    # Of each arm the run at the best rate, by the documents for choices: dict keeps the last.
    chosen = {run["arm"]: run for run in sorted(short, key=_for_choices, reverse=True)}
    highest = [run["rate"] == max(each["rate"] for each in short) for run in chosen.values()]
    yield f"{_NUMBERS[sum(highest)]} of the {_NUMBERS[len(highest)]} are best at the highest rate that was tried"
    more, gains = True, True
    for compared in (list(chosen.values()), [run for run in runs if run not in short]):
        for text in runs[0]["differences"]:
            lora, others = (
                [run["differences"][text][1] for run in compared if (run["arm"] == "lora-values-1") == is_lora]
                for is_lora in (True, False)
            )
            more, gains = more and max(lora) < min(others), gains and max(others) < 0
    yield f"**LoRA gains {'more' if more else 'not more'} than any of these connections** on each text"
    yield f"**Each connection {'gains a little' if gains else 'does not gain'} on each text.**"


def sentences() -> dict[str, list[str]]:
    """Page -> what it states of results, up to line breaks."""
    rise = {(row["method"], row["setting"], row["text"]): row["rise"] for row in read("shrink")["rows"]}
    int4 = next(row for row in read("shrink")["rows"] if row["method"] == "int4")
    plan = [rise["shared, refitted", "83.3 %", text] for text in ("Python", "chats", "WikiText-2")]
    shrunk, large = read("shrink/83.3"), read("shrink_large")
    cost, last_words = shrunk["cost"], shrunk["cost"]["intervals"]["source_last_word_accuracy"]
    lengths = [f"{each['length']:,}" for each in cost["passkey"]]
    one, two = (read(f"healing/{name}") for name in ("91.7", "83.3"))
    main = read("study/main")
    trained = main["steps"] * main["batch"] * main["block"]
    hub, convert, asked = read("hub")["imports"], read("convert"), read("shrink_passages")["passages"]
    speed, tokenised = read("pretrain_speed"), read("tokenize")["runs"][-1]
    rounds = speed["rounds, tokens/s"]
    longer, rows = baseline("budget20"), study_rows("budget20")
    cache = {row["architecture"]: row["cache_bytes_per_token"] for row in rows}
    share = 100 * cache["svformer"] / cache["transformer"]
    ours, bare = (statistics.median(each[arm] for each in rounds) for arm in ("pretrain", "bare"))
    return {
        "docs/shrinking.md": [
            f"SmolLM2-135M's cache takes {100 * int4['cache']:.0f} % of its bytes for {int4['rise']:.3f} nats a token",
            "{:.3f} nats a token on Python and {:.3f} on chats, against {:.3f} on WikiText-2 itself".format(*plan),
            f"calibrated on {shrunk['calibration']['tokens']:,} tokens of WikiText-2's validation part and measured on "
            f"{cost['tokens']:,} tokens",
            f"a loss of {cost['source_loss']:.4f} nats a token and gets "
            f"{100 * cost['source_last_word_accuracy']:.1f} % "
            f"({100 * last_words[0]:.0f} to {100 * last_words[1]:.0f}) of the last words of sentences right. "
            f"These are {cost['last_words']} words",
            f"texts of {', '.join(lengths[:-1])} and {lengths[-1]} tokens",
            f"the last words of {len(asked['source']['nats'])} sentences",
            f"{large['peak_bytes'] / 1e9:.1f} GB, of which {large['weights_bytes'] / 1e9:.1f} GB are the weights and "
            f"{large['inputs_bytes'] / 1e9:.1f} GB the inputs of all layers",
            f"bfloat16 and {large['calibration_tokens']:,} tokens",
            f"{one['tokens']:,} tokens for the first, with {one['trained_parameters'] / 1e6:.1f} of its "
            f"{one['parameters'] / 1e6:.0f} million parameters trained, in {one['seconds'] / 60:.0f} minutes",
            f"{two['tokens']:,} for the second, with {two['trained_parameters'] / 1e6:.1f} million, in "
            f"{two['seconds'] / 60:.0f} minutes",
        ],
        "docs/converting.md": [
            f"start-up ({convert['start_up_seconds']:.1f} s of imports",
            f"Imports take {convert['start_up_peak_mb_beyond_torch']:.0f} MB of the memory",
            f"imports, which alone take {hub['cpu_seconds']:.1f} s and {hub['peak_mb']} MB",
        ],
        "docs/pretraining.md": [
            f"{tokenised['bytes'] / 1e9:.0f} GB of text took {tokenised['seconds']:.0f} seconds with two workers, "
            f"{tokenised['tokens/s'] / 1e6:.1f} million tokens a second, and "
            f"{tokenised['peak RSS of the tree, GB']:.1f} GB of memory",
            f"{ours:,.0f} tokens/s against {bare:,.0f} (the medians of {len(rounds)} rounds",
            f"median ratio {speed['ratio']}). `tokenize`, alike: {speed['tokenize, tokens/s of a core']:,} tokens/s",
        ],
        "README.md": [
            f"`resformer methods` lists all {len(METHODS)}",
            f"added to a trained one ({len(baseline('continued')['seeds'])} seeds)",
            f"significantly ({len(longer['seeds'])} seeds), SVFormer with {share:.0f} % of its cache",
            f"Methods of {baseline('main')['parameters'] / 1e6:.0f} million parameters after {trained / 1e6:.1f} "
            "million bytes of Python",
        ],
        "docs/results.md": [f"SVFormer has {share:.0f} % of the cache there", *_of_studies()],
        "model_cards/facts.yaml": [
            f"nothing in our continued training ({len(baseline('continued')['seeds'])} seeds)",
            f"the difference is not significant ({len(longer['seeds'])} seeds)",
        ],
    }


def made() -> dict[Path, str]:
    """Each page with its tables made anew."""
    return {
        path: TABLE.sub(
            lambda match: f"{match[1]}\n{TABLES[match[2]](match[3])}\n\n{match[4]}", path.read_text("utf-8")
        )
        for path in ROOT.glob("docs/*.md")
    }


def main() -> None:
    stale = {path: text for path, text in made().items() if path.read_text(encoding="utf-8") != text}
    for page, stated in sentences().items():
        text = " ".join((ROOT / page).read_text(encoding="utf-8").split())
        if missing := [sentence for sentence in stated if " ".join(sentence.split()) not in text]:
            sys.exit(f"{page}: does not say what the results are: {missing}")
    if "--check" in sys.argv:
        names = ", ".join(sorted(path.name for path in stale))
        sys.exit(f"{names}: differ from the results. Run: python benchmarks/tables.py" if stale else 0)
    for path, text in stale.items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
