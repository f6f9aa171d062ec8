"""The HTML page of a report: a summary, the figures, then every number, all in one file without scripts."""

from base64 import b64encode
from collections.abc import Sequence
from html import escape
from typing import Any

from resformer.analysis.figures import Plot

_STYLE = """
body { margin: 0 auto; max-width: 84rem; padding: 2rem; color: #1c2430; font: 16px/1.5 system-ui, sans-serif; }
p { max-width: 46rem; }
p, figcaption, dd { color: #5b6675; overflow-wrap: anywhere; }
.cards { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); }
section, figure { border: 1px solid #dde2e9; border-radius: .8rem; margin: 0; padding: 1rem; min-width: 0; }
figure.wide { grid-column: 1 / -1; }
img { width: 100%; max-height: 34rem; object-fit: contain; }
summary { cursor: pointer; font-weight: 600; padding: .5rem 0; }
details { overflow-x: auto; }
th, td { padding: .25rem .7rem; text-align: right; border-bottom: 1px solid #dde2e9; }
"""

#: The captions of figures that are of no single quantity; the others have its definition.
_CAPTIONS = {
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
    checkpoints, definitions = report["checkpoints"], report["definitions"]
    names = ", ".join(checkpoint["name"] for checkpoint in checkpoints)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8"/>
<meta name="viewport" content="width=device-width, initial-scale=1"/>
<title>{escape(names)}: attention, values and hidden states</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>Attention, value states and hidden states by layer</h1>
<p>Attention concentration, value-state drains, hidden-state peaks and over-smoothing, as "Value Residual Learning"
defines them. Layers are counted from 0. Lines are means over texts, bands one standard deviation.</p>
<h2>Summary</h2>
<div class="cards">{"".join(map(_summary, checkpoints))}</div>
<h2>Layer by layer</h2>
<div class="cards">{"".join(_figure(plot, {**definitions, **_CAPTIONS}[plot.key]) for plot in plots)}</div>
<h2>All numbers</h2>
{"".join(map(_numbers, checkpoints))}
<details><summary>Definitions</summary><dl>
{"".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in definitions.items())}
</dl></details>
<details><summary>Command and versions</summary>
<p><code>{escape(report["command"] or "resformer.analysis.write_report")}</code></p>
<p>{", ".join(f"{escape(name)} {escape(version)}" for name, version in report["versions"].items())}</p>
</details>
</body>
</html>
"""


def _summary(checkpoint: dict[str, Any]) -> str:
    method = f", method {checkpoint['method']}" if checkpoint["model_type"] == "resformer" else ""
    lines = []
    for name, values in checkpoint["quantities"].items():
        means = values["mean"]
        low, high = (f"{number(end)} (layer {means.index(end)})" for end in (min(means), max(means)))
        uniform = checkpoint["uniform"].get(name)
        more = "" if uniform is None else f"; {number(uniform)} if attention were uniform"
        lines.append(f"{name}: {low} to {high}{more}")
    return f"""<section><h3>{escape(checkpoint["name"])}</h3>
<p>{escape(checkpoint["model_type"])}{escape(method)}: {checkpoint["layers"]} layers,
{checkpoint["parameters"]:,} parameters. {checkpoint["texts"]:,} texts, {checkpoint["tokens"]:,} tokens, in
{escape(checkpoint["dtype"])} on {escape(checkpoint["device"])}.</p>
<ul>{"".join(f"<li>{line}</li>" for line in lines)}</ul></section>
"""


def _figure(plot: Plot, caption: str) -> str:
    style = ' class="wide"' if plot.key.endswith("_mixing") else ""
    image = f'<img alt="{plot.title}" src="data:image/png;base64,{b64encode(plot.png).decode()}"/>'
    return f"<figure{style}>{image}<figcaption>{escape(caption)}</figcaption></figure>"


def _numbers(checkpoint: dict[str, Any]) -> str:
    quantities = checkpoint["quantities"]
    rows = ["".join(f'<th scope="col">{escape(name)}</th>' for name in ("layer", *quantities))]
    for layer in range(checkpoint["layers"]):
        cells = "".join(f"<td>{_cell(values, layer)}</td>" for values in quantities.values())
        rows.append(f'<th scope="row">{layer}</th>{cells}')
    table = "".join(f"<tr>{row}</tr>" for row in rows)
    return f"<details><summary>{escape(checkpoint['name'])}</summary><table>{table}</table></details>\n"


def _cell(values: dict[str, list[float | None]], layer: int) -> str:
    deviation = values["deviation"][layer]
    return number(values["mean"][layer]) + ("" if deviation is None else f" ± {number(deviation)}")
