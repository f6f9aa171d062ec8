"""Recomputes each row of a page's tables of studies from the records: `python benchmarks/recompute.py docs/results.md`.

Uses none of this package: differences paired by seed, their t intervals, Holm's correction, sign-flips and power are
computed here anew, with NumPy and SciPy. Names the rows that differ, and ends with 1 if there are any.
"""

import itertools
import json
import re
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
from scipy import optimize, stats

STUDY = Path(__file__).parent / "results" / "study"
CONTRASTS = {
    "b12": ("svformer minus GQA", "svformer", "transformer:num_key_value_heads=2"),
    "n20": ("value-embeddings minus resformer", "value-embeddings", "resformer"),
}


def lines(name):
    """The lines of a record: `{"study": ...}`, or a run."""
    return [json.loads(line) for line in (STUDY / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def by(runs, key, value=lambda run: run["loss"]):
    """Key of the runs -> their values, in the order of seeds."""
    groups = defaultdict(list)
    for run in sorted(runs, key=lambda run: run.get("seed", 0)):
        groups[key(run)].append(value(run))
    return groups


def shared(name):
    """The runs of a record whose seed each method has."""
    runs = [line for line in lines(name) if "study" not in line]
    seeds = by(runs, lambda run: run["method"], lambda run: run["seed"]).values()
    return [run for run in runs if all(run["seed"] in each for each in seeds)]


def interval(ours, theirs):
    """Mean, 95 % interval, p and detectable difference of a paired t-test, the first two and the last as text."""
    values = np.subtract(ours, theirs)
    error, free = values.std(ddof=1) / len(values) ** 0.5, len(values) - 1
    low, high = values.mean() + stats.t.ppf([0.025, 0.975], free) * error
    limit = stats.t.ppf(0.975, free)
    shift = optimize.brentq(lambda shift: stats.nct.sf(limit, free, shift) - 0.8, 0.1, 50)
    p = 2 * stats.t.sf(abs(values.mean() / error), free)
    if 2.0**-free < 0.05:
        sums = [abs(np.dot(signs, values)) for signs in itertools.product((-1, 1), repeat=len(values))]
        p = np.mean(np.array(sums) >= abs(values.sum()) - 1e-9)
    return f"{values.mean():+.4f} [{low:+.4f}, {high:+.4f}]", f"{shift * error:.4f}", values, (low, high), p


def scratch(names):
    for name in names.split(","):
        runs = shared(name)
        losses = by(runs, lambda run: run["architecture"])
        cache = {run["architecture"]: run["cache_bytes_per_token"] for run in runs}
        plain = runs[0]["architecture"]
        pairs = {method: (method, plain) for method in losses if method != plain}
        if name in CONTRASTS:
            label, ours, theirs = CONTRASTS[name]
            pairs = {method: pair for method, pair in pairs.items() if method != theirs or ":" not in theirs}
            pairs[label] = ours, theirs
        tests = {label: interval(losses[ours], losses[theirs]) for label, (ours, theirs) in pairs.items()}
        holm = 0.0
        for place, (label, (delta, seen, values, (low, high), p)) in enumerate(
            sorted(tests.items(), key=lambda item: item[1][-1])
        ):
            holm = max(holm, min(1.0, p * (len(tests) - place)))
            least = 0.01 * np.mean(losses[plain])
            finding = "under 1 %" if max(-low, high) < least else "cannot tell"
            finding = ("ahead" if values.mean() < 0 else "behind") if holm < 0.05 else finding
            share = cache[pairs[label][0]] / cache[plain]
            share = f"{100 * share:.0f} %" if share < 1 else ""
            yield name, label, delta, finding, "<0.001" if holm < 0.001 else f"{holm:.3f}", seen, share


def studies(names):
    for name in (each.split(":")[0] for each in names.split(",")):
        study, runs = lines(name)[0]["study"], shared(name)
        tokens, parameters = (runs[0].get("batch") or study["batch"]) * study["block"], runs[0]["parameters"]
        passes = f"{runs[0]['steps'] * tokens / parameters:.1f}"
        seeds = str(len({run["seed"] for run in runs}))
        link = f"[{name}](../benchmarks/results/study/{name}.jsonl)"
        yield link, f"{parameters:,}", passes, ..., ..., seeds


def tried(name):
    runs = [line for line in lines(name) if "study" not in line]
    seeds = sorted({run["seed"] for run in runs})
    losses = by(runs, lambda run: run["method"], lambda run: (run["seed"], run["loss"]))
    plain = dict(losses[runs[0]["method"]])
    for method, each in losses.items():
        each = dict(each)
        lead = (
            "" if method == runs[0]["method"] else f"{np.mean([each[s] - plain[s] for s in each if s in plain]):+.4f}"
        )
        yield method.split(":")[0], ..., *(f"{each[seed]:.4f}" if seed in each else "" for seed in seeds), lead


def curves(name):
    runs = shared(name)
    found = by(runs, lambda run: run["method"], lambda run: [point["validation_loss"] for point in run["curve"][1:]])
    plain = found.pop(runs[0]["method"])
    for method, each in found.items():
        yield method, *(interval(*pair)[0] for pair in zip(np.transpose(each), np.transpose(plain), strict=True))


def early(name):
    moment, losses = 0, defaultdict(list)
    for line in lines(name):
        if "study" in line:
            start = re.match(r"starts/(\d+)-", line["study"]["start"] or "")
            moment = int(start[1]) if start else 0
        else:
            losses[line["architecture"], moment].append((line["seed"], line["loss"]))
    ordered = {key: [loss for _, loss in sorted(each, key=lambda each: each[0])] for key, each in losses.items()}
    moments = sorted({moment for _, moment in ordered})
    for method in dict.fromkeys(method for method, _ in ordered if method != "transformer"):
        pairs = [(ordered.get((method, at)), ordered["transformer", at]) for at in moments]
        yield method, *("{} ({})".format(*interval(*pair)[:2]) if pair[0] else "" for pair in pairs)


def frozen(names):
    for name, label, baseline in (f"{each}:checkpoint".split(":")[:3] for each in names.split(",")):
        runs = sorted((line for line in lines(name) if "study" not in line), key=lambda line: line.get("seed", 0))
        most = {
            arm: max(each) for arm, each in by(runs, lambda run: run["arm"], lambda run: run.get("steps", 0)).items()
        }
        longest = [run for run in runs if run.get("steps", 0) == most[run["arm"]]]
        losses, trained = by(longest, lambda run: run["arm"]), {run["arm"]: run["trained"] for run in runs}
        for arm, each in losses.items():
            if arm not in ("checkpoint", baseline):
                base = np.resize(losses[baseline], len(each))
                cells = (", ".join(f"{x:+.4f}" for x in np.subtract(each, base)), "")
                cells = cells if len(each) < 3 else interval(each, base)[:2]
                yield label.replace("_", " "), arm, f"{trained[arm]:,}", *cells


def main(page):
    text, wrong, count = Path(page).read_text(encoding="utf-8"), [], 0
    for name, argument, body in re.findall(r"<!-- table: (\S+) (\S+) -->\n(.*?)<!-- end -->", text, re.DOTALL):
        if make := {each.__name__: each for each in (scratch, studies, tried, curves, early, frozen)}.get(name):
            published = [
                [cell.strip() for cell in row.split("|")[1:-1]] for row in re.findall(r"^\|.*", body, re.M)[2:]
            ]
            made, count = [*make(argument)], count + len(published)
            wrong += [row for row in published if not any(same(row, each) for each in made)]
            wrong += [[name, argument, "rows are missing"]] if len(made) != len(published) else []
    print(f"{page}: {count - len(wrong)} of {count} rows are what the records say")
    return "\n".join(" | ".join(row) for row in wrong) or 0


def same(row, made):
    """Whether two rows are equal; `...` stands for a cell that states what a run was given."""
    return len(row) == len(made) and all(cell in (..., own) for own, cell in zip(row, made, strict=True))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
