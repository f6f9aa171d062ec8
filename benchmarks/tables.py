"""Writes the tables that pages take from results: `python benchmarks/tables.py`; `--check` only compares.

A table of a page stands between `<!-- table: NAME ARGUMENT -->` and `<!-- end -->`. NAME is one of `TABLES`.
"""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from resformer.configuration import METHODS
from resformer.training.study.table import markdown

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
TABLE = re.compile(r"(<!-- table: (\S+) (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def read(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def studies(names: str) -> str:
    """What each study trained, on what."""
    lines = [
        "| study | text | parameters | tokens | per parameter | context | learning rate | seeds | held-out files |",
        f"|{'---|' * 9}",
    ]
    for name in names.split(","):
        report = read(f"study/{name}")
        (rows,) = report["sizes"].values()
        plain = next(row for row in rows if row["method"] == report["baseline"])
        tokens = report["steps"] * report["batch"] * report["block"]
        swept = {rate for row in rows for rate in re.findall(r":(?:learning_rate)=([^:]+)", row["method"])}
        cells = [
            f"[{name}](../benchmarks/results/study/{name}.json)",
            report["data"]["name"],
            f"{plain['parameters']:,}",
            f"{tokens:,}",
            f"{tokens / plain['parameters']:.2f}",
            str(report["block"]),
            ", ".join(sorted(swept, key=float)) or f"{report['learning_rate']:g}",
            str(len(plain["seeds"])),
            f"{report['data']['held_out_documents']:,}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def study(name: str) -> str:
    """All methods of a study, without the notes."""
    return "\n".join(line for line in markdown(read(f"study/{name}")).splitlines() if line.startswith("|"))


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


def _made_by(report: dict[str, Any]) -> str:
    versions = ", ".join(f"{package} {version}" for package, version in report["versions"].items())
    return f"`{report['command']}`, with {versions}."


TABLES: dict[str, Callable[[str], str]] = {
    "studies": studies,
    "study": study,
    "sinks": sinks,
    "coefficients": coefficients,
    "passages": passages,
    "served": served,
    "shrunken": shrunken,
    "rivals": rivals,
    "serving_speed": serving_speed,
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
    if "--check" in sys.argv:
        names = ", ".join(sorted(path.name for path in stale))
        sys.exit(f"{names}: differ from the results. Run: python benchmarks/tables.py" if stale else 0)
    for path, text in stale.items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
