"""The HTML page of a report: the figures, all in one file without scripts."""

from base64 import b64encode
from collections.abc import Sequence
from html import escape
from typing import Any

from resformer.analysis.figures import Plot
from resformer.analysis.measuring import DEFINITIONS

_STYLE = """
body { margin: 0 auto; max-width: 84rem; padding: 2rem; color: #1c2430; font: 16px/1.5 system-ui, sans-serif; }
p { max-width: 46rem; }
p, figcaption { color: #5b6675; overflow-wrap: anywhere; }
.cards { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); }
figure { border: 1px solid #dde2e9; border-radius: .8rem; margin: 0; padding: 1rem; min-width: 0; }
figure.wide { grid-column: 1 / -1; }
img { width: 100%; max-height: 34rem; object-fit: contain; }
"""

#: The captions of figures that are of no single quantity; the others have its definition.
_CAPTIONS = {
    "value_mixing": "The values a layer attends to are V'_n = sum_m M[n, m] V_m; the identity is plain Llama. Grey: a "
    "gate decides for each token.",
    "depth_mixing": "Block n + 1 reads Y_n = sum_j D[n, j] X_j; plain Llama has 1 right of the diagonal, 0 elsewhere.",
}


def page(report: dict[str, Any], plots: Sequence[Plot]) -> str:
    """The page, from `Report.as_dict()` and the figures."""
    names = ", ".join(checkpoint["name"] for checkpoint in report["checkpoints"])
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
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
{"".join(map(_findings, report["checkpoints"]))}
<div class="cards">{"".join(_figure(plot, {**DEFINITIONS, **_CAPTIONS}[plot.key]) for plot in plots)}</div>
<p>All numbers are in analysis.json. Made by
<code>{escape(report["command"] or "resformer.analysis.write_report")}</code> with {escape(versions)}.</p>
</body>
</html>
"""


def _findings(checkpoint: dict[str, Any]) -> str:
    sentences = "".join(f"<p>{escape(sentence)}</p>" for sentence in checkpoint["findings"])
    return f"<h2>{escape(checkpoint['name'])}</h2>{sentences}"


def _figure(plot: Plot, caption: str) -> str:
    style = ' class="wide"' if plot.key.endswith("_mixing") else ""
    image = f'<img alt="{plot.title}" src="data:image/png;base64,{b64encode(plot.png).decode()}"/>'
    return f"<figure{style}>{image}<figcaption>{escape(caption)}</figcaption></figure>"
