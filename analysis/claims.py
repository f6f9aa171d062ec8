"""Claims of two papers about trained models, turned into yes/no questions by thresholds of this package.

"Value Residual Learning" (arXiv 2410.17897) finds attention sinks, value-state drains and hidden-state peaks in the
Transformer, the last two in NeuTRENO as well, and less of all three in ResFormer. It gives no limits: `THRESHOLDS` is
this package's choice. DenseFormer (arXiv 2402.02622) describes its learned weights.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from resformer.analysis.measuring import Analysis

__all__ = ["CLAIMS", "DEPTH_CLAIMS", "MOVED", "THRESHOLDS", "distance_from_plain", "judge", "paper_model"]

#: Quantity -> the threshold, and whether every layer must stay below it (or above). Not from the paper.
THRESHOLDS = {
    "importance_ratio": (10.0, True),
    "value_norm_ratio": (0.5, False),
    "hidden_norm_ratio": (3.0, True),
}
#: A mixing matrix within this distance of plain Llama's, entry by entry, is read as plain Llama's: a retrofit starts
#: there, and moves by less in a short fine-tune. A ResFormer trained from scratch starts at a distance of 0.5.
MOVED = 0.05

CLAIMS = {
    "importance_ratio": "The first token receives less than 10 times what another does, in every layer.",
    "value_norm_ratio": "The first token's value state is more than half as long as the others', in every layer.",
    "hidden_norm_ratio": "The first token's hidden state is less than 3 times as long as the others', in every layer.",
}
DEPTH_CLAIMS = {
    "depth_diagonal": "DWA: the newest block has the largest weight of its row, in every row.",
    "depth_embeddings": "DWA: the embeddings weigh more than other earlier blocks, by mean absolute weight.",
    "depth_negative": "DWA: late weights on the embeddings are negative (the last third of the rows).",
}


@dataclass(frozen=True)
class _Verdict:
    """A claim's number, and whether the claim holds."""

    claim: str  # its key
    holds: bool | None  # None: no finding, since no checkpoint of the report crosses the threshold
    value: float  # of the layer that is closest to breaking the claim, or breaks it most
    layer: int | None
    detail: str
    expected: bool | None  # whether the paper expects it to hold; None where it does not say


def paper_model(analysis: Analysis) -> str | None:
    """ "resformer", "transformer" or "neutreno", whichever of the paper's models this one computes; else `None`."""
    values = np.asarray(analysis.value_mixing_matrix)
    mixes = _moved(values)
    gates_alone = not mixes and np.isnan(values).any()  # the matrix does not show whether they have moved
    if analysis.other_connections or gates_alone or (mixes and analysis.neutreno_lambda):
        return None
    if mixes:
        return "resformer"
    if _averages_depth(analysis):
        return None
    return "neutreno" if analysis.neutreno_lambda else "transformer"


def judge(analyses: Sequence[Analysis]) -> list[list[dict[str, Any]]]:
    """For each analysis its verdicts, as dictionaries; on DWA's claims where depth averages have moved.

    A claim is judged only if some checkpoint of the report crosses its threshold: short texts and little training show
    no sinks in any model, so staying below the threshold would prove nothing.
    """
    crossed = {quantity for analysis in analyses for quantity in CLAIMS if _crossing(analysis, quantity).any()}
    judged = []
    for analysis in analyses:
        verdicts = [_of_layers(analysis, quantity) for quantity in CLAIMS]
        verdicts = [v if v.claim in crossed else replace(v, holds=None, expected=None) for v in verdicts]
        if _averages_depth(analysis):
            verdicts += _of_depth(np.asarray(analysis.depth_mixing_matrix))
        judged.append([vars(verdict) for verdict in verdicts])
    return judged


def distance_from_plain(matrix: np.ndarray) -> np.ndarray:
    """The distance of each entry of a mixing matrix from plain Llama's: 1 for the newest state, 0 for the others."""
    rows, columns = matrix.shape
    return np.abs(matrix - np.eye(rows, columns, k=columns - rows))


def _moved(matrix: np.ndarray) -> bool:
    return bool(np.nanmax(distance_from_plain(matrix)) > MOVED)


def _averages_depth(analysis: Analysis) -> bool:
    return _moved(np.asarray(analysis.depth_mixing_matrix))


def _crossing(analysis: Analysis, quantity: str) -> np.ndarray:
    """`(layers,)`, True where the threshold is crossed."""
    threshold, below = THRESHOLDS[quantity]
    values = np.asarray(analysis.mean(quantity))
    return values >= threshold if below else values <= threshold


def _of_layers(analysis: Analysis, quantity: str) -> _Verdict:
    values = np.asarray(analysis.mean(quantity))
    layer = int(values.argmax() if THRESHOLDS[quantity][1] else values.argmin())
    crossing = int(_crossing(analysis, quantity).sum())
    # The paper reports drains and peaks in the other two models; of attention it says only that ResFormer spreads it.
    others = None if quantity == "importance_ratio" else False
    return _Verdict(
        claim=quantity,
        holds=not crossing,
        value=float(values[layer]),
        layer=layer,
        detail=f"{crossing} of {analysis.layers} layers break it",
        expected={"resformer": True, None: None}.get(paper_model(analysis), others),
    )


def _of_depth(matrix: np.ndarray) -> list[_Verdict]:
    if len(matrix) < 2 or not matrix[np.tril(np.ones_like(matrix, dtype=bool), k=1)].all():
        return []  # the paper's claims are about averages of all earlier states, after every block
    size = np.abs(matrix)
    rows = np.arange(len(matrix))
    diagonal = size[rows, rows + 1]
    largest = diagonal >= size.max(axis=1)
    worst = int((diagonal / size.max(axis=1)).argmin())
    between = np.tril(np.ones_like(matrix, dtype=bool))
    between[:, 0] = False
    embeddings, others = size[:, 0].mean(), size[between].mean()
    late = matrix[len(matrix) - max(1, len(matrix) // 3) :, 0]
    largest_rows, negative = f"{largest.sum()} of {len(rows)} rows do", f"{(late < 0).sum()} of {len(late)} are"
    against = f"against {others:.3g}"
    return [
        _Verdict("depth_diagonal", bool(largest.all()), float(diagonal[worst]), worst, largest_rows, True),
        _Verdict("depth_embeddings", bool(embeddings > others), float(embeddings), None, against, True),
        _Verdict("depth_negative", bool((late < 0).all()), float(late.max()), None, negative, True),
    ]
