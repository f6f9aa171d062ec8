"""The HTML page of a report: a summary in words, the figures, then every number, all in one file without scripts."""

from base64 import b64encode
from collections.abc import Sequence
from html import escape
from typing import Any

from resformer.analysis.figures import Plot

__all__ = ["number", "page"]

_STYLE = """
:root { --ink: #1c2430; --soft: #5b6675; --paper: #f6f7f9; --card: #fff; --line: #dde2e9;
  --tint: #eef2f7; }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.55 system-ui, sans-serif; }
main { max-width: 84rem; margin: auto; padding: 2.5rem clamp(1rem, 4vw, 3rem) 4rem; }
h1 { font-size: clamp(1.6rem, 4vw, 2.4rem); line-height: 1.15; margin: 0 0 .5rem; letter-spacing: -.02em; }
h2 { font-size: 1.3rem; margin: 2.8rem 0 .8rem; }
p { max-width: 46rem; margin: .4rem 0; }
.soft, figcaption { color: var(--soft); }
.cards { display: grid; gap: 1.1rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); }
.card, figure { background: var(--card); border: 1px solid var(--line); border-radius: .8rem; margin: 0;
  padding: 1rem 1.1rem; min-width: 0; }
.card h3 { margin: 0 0 .4rem; overflow-wrap: anywhere; }
.card ul { margin: 0; padding-left: 1.1rem; }
figure img { display: block; width: 100%; height: auto; }
figure.wide { grid-column: 1 / -1; }
figure.wide img { max-height: 34rem; object-fit: contain; }
figcaption { font-size: .92rem; padding-top: .6rem; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; border: 1px solid var(--line); border-radius: .8rem; background: var(--card); }
table { border-collapse: collapse; width: 100%; font-size: .92rem; }
th, td { padding: .5rem .8rem; text-align: left; vertical-align: top; border-bottom: 1px solid var(--line); }
tr:last-child > * { border-bottom: 0; }
thead th { background: var(--tint); }
table.numbers td, table.numbers th { text-align: right; font-variant-numeric: tabular-nums; padding: .25rem .7rem; }
details { margin: .7rem 0; }
summary { cursor: pointer; font-weight: 600; padding: .3rem 0; }
dt { font-weight: 600; margin-top: .6rem; }
dd { margin: 0; color: var(--soft); max-width: 60rem; }
code { font: .88em ui-monospace, monospace; overflow-wrap: anywhere; }
"""

#: Figure -> the first sentences of its caption; the range of each checkpoint's numbers follows.
_CAPTIONS = {
    "entropy": "How widely attention is spread: low where a few tokens receive nearly all of it.",
    "first_importance": "The share of all attention that goes to the first token; a high share is an attention sink.",
    "importance_ratio": "The same against what another token receives on average. Causal attention favours early "
    "tokens by itself: the dotted line is uniform attention.",
    "value_norm_ratio": "The length of the first token's value state V' against the others'. Far below 1 is a "
    "value-state drain: the token receives attention but adds little to the output.",
    "hidden_norm_ratio": "The length of the first token's hidden state against the others'. Far above 1 is a "
    "hidden-state peak.",
    "similarity": "How similar the hidden states of different tokens are. Near 1, tokens are hardly distinct.",
    "importance_by_position": "What each early token receives, in the layer where the first receives most.",
    "value_mixing": "The values a layer attends to are V'_n = sum_m M[n, m] V_m; the identity is plain Llama. Grey: a "
    "gate decides for each token.",
    "depth_mixing": "Block n + 1 reads Y_n = sum_j D[n, j] X_j; plain Llama has 1 right of the diagonal, 0 elsewhere.",
}


def number(value: float | None) -> str:
    """A number as the page and the terminal show it: three digits, or all of them before the point."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def page(report: dict[str, Any], plots: Sequence[Plot]) -> str:
    """The page, from `Report.as_dict()` and the figures."""
    checkpoints = report["checkpoints"]
    names = ", ".join(checkpoint["name"] for checkpoint in checkpoints)
    figures = "\n".join(_figure(plot, checkpoints) for plot in plots)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8"/>
<meta name="viewport" content="width=device-width, initial-scale=1"/>
<title>{escape(names)}: attention, values and hidden states</title>
<style>{_STYLE}</style>
</head>
<body>
<main>
<h1>Attention, value states and hidden states by layer</h1>
<p class="soft">Attention concentration, value-state drains, hidden-state peaks and over-smoothing, layer by layer, as
"Value Residual Learning" defines them. Layers are counted from 0. Lines are means over texts, bands one standard
deviation.</p>
<h2>Summary</h2>
<div class="cards">
{"".join(_summary(checkpoint) for checkpoint in checkpoints)}
</div>
<h2>Layer by layer</h2>
<div class="cards">
{figures}
</div>
<h2>All numbers</h2>
{"".join(_numbers(checkpoint) for checkpoint in checkpoints)}
<details><summary>Definitions</summary><dl>
{"".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in report["definitions"].items())}
</dl></details>
<details><summary>Command and versions</summary>
<p><code>{escape(report["command"] or "resformer.analysis.write_report")}</code></p>
<p class="soft">{", ".join(f"{escape(name)} {escape(version)}" for name, version in report["versions"].items())}</p>
</details>
</main>
</body>
</html>
"""


def _summary(checkpoint: dict[str, Any]) -> str:
    means = {name: values["mean"] for name, values in checkpoint["quantities"].items()}
    sink, sink_layer = _extreme(means["importance_ratio"], max)
    drain, drain_layer = _extreme(means["value_norm_ratio"], min)
    peak, peak_layer = _extreme(means["hidden_norm_ratio"], max)
    entropy, entropy_layer = _extreme(means["entropy"], min)
    alike, alike_layer = _extreme(means["similarity"], max)
    method = f", method {checkpoint['method']}" if checkpoint["model_type"] == "resformer" else ""
    lines = [
        f"The first token receives at most {number(sink)} times what another does (layer {sink_layer}); it would "
        f"be {number(checkpoint['uniform']['importance_ratio'])} with uniform attention.",
        f"Its value state is at least {number(drain)} times as long as the others' (layer {drain_layer}), its hidden "
        f"state at most {number(peak)} times (layer {peak_layer}).",
        f"Attention is most concentrated in layer {entropy_layer}: entropy {number(entropy)}; with uniform "
        f"attention, {number(checkpoint['uniform']['entropy'])}.",
        f"Tokens are most similar after layer {alike_layer}: {number(alike)}.",
    ]
    return f"""<section class="card"><h3>{escape(checkpoint["name"])}</h3>
<p class="soft">{escape(checkpoint["model_type"])}{escape(method)}: {checkpoint["layers"]} layers,
{checkpoint["parameters"]:,} parameters. {checkpoint["texts"]:,} texts, {checkpoint["tokens"]:,} tokens, in
{escape(checkpoint["dtype"])} on {escape(checkpoint["device"])}.</p>
<ul>{"".join(f"<li>{line}</li>" for line in lines)}</ul></section>
"""


def _figure(plot: Plot, checkpoints: Sequence[dict[str, Any]]) -> str:
    ranges = "".join(f" {escape(one['name'])}: {_range(plot.key, one)}." for one in checkpoints)
    style = ' class="wide"' if plot.key.endswith("_mixing") else ""
    image = f'<img alt="{plot.title}" src="data:image/png;base64,{b64encode(plot.png).decode()}"/>'
    return f"<figure{style}>{image}<figcaption>{escape(_CAPTIONS[plot.key])}{ranges}</figcaption></figure>"


def _range(key: str, checkpoint: dict[str, Any]) -> str:
    if key == "importance_by_position":
        layer = _extreme(checkpoint["quantities"]["importance_ratio"]["mean"], max)[1]
        first, second = checkpoint["importance_by_position"][layer][:2]
        return f"{number(first)} for the first token of layer {layer}, {number(second)} for the second"
    if key.endswith("_mixing"):
        matrix = checkpoint[f"{key}_matrix"]
        newest = len(matrix[0]) - len(matrix)  # row n ends with column n, or n + 1
        weights = [weight for n, row in enumerate(matrix) for weight in row[: n + newest + 1] if weight is not None]
        return f"weights from {number(min(weights))} to {number(max(weights))}"
    values = checkpoint["quantities"][key]["mean"]
    (low, lowest), (high, highest) = _extreme(values, min), _extreme(values, max)
    return f"from {number(low)} (layer {lowest}) to {number(high)} (layer {highest})"


def _extreme(values: list[float], of: Any) -> tuple[float, int]:
    value = of(values)
    return value, values.index(value)


def _numbers(checkpoint: dict[str, Any]) -> str:
    quantities = checkpoint["quantities"]
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in quantities)
    rows = ""
    for layer in range(checkpoint["layers"]):
        cells = "".join(f"<td>{_cell(values, layer)}</td>" for values in quantities.values())
        rows += f'<tr><th scope="row">{layer}</th>{cells}</tr>'
    return f"""<details><summary>{escape(checkpoint["name"])}</summary><div class="scroll"><table class="numbers">
<thead><tr><th scope="col">layer</th>{head}</tr></thead><tbody>{rows}</tbody></table></div></details>
"""


def _cell(values: dict[str, list[float | None]], layer: int) -> str:
    deviation = values["deviation"][layer]
    return number(values["mean"][layer]) + ("" if deviation is None else f" ± {number(deviation)}")
