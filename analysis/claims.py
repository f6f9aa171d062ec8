"""What the papers say of trained models, judged by number.

"Value Residual Learning" (arXiv 2410.17897) says it of ResFormer and the opposite of the Transformer and of NeuTRENO;
DenseFormer (arXiv 2402.02622) of its learned weights.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from resformer.analysis.measuring import Analysis

__all__ = ["CLAIMS", "DEPTH_CLAIMS", "LIMITS", "judge", "kind_of"]

#: Quantity -> the limit, and whether it must stay below it (or above), in every layer.
LIMITS = {
    "importance_ratio": (10.0, True),
    "value_norm_ratio": (0.5, False),
    "hidden_norm_ratio": (3.0, True),
}

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
    """A claim's number, and whether the claim holds of it."""

    claim: str  # its key
    holds: bool
    value: float  # of the layer that is furthest on the wrong side
    layer: int | None
    detail: str
    expected: bool | None  # whether the paper expects it to hold; None where it does not say


def kind_of(analysis: Analysis) -> str | None:
    """ "resformer", "transformer" or "neutreno", of which the paper speaks, by what the model computes; else `None`.

    A value mixing matrix that is the identity is a Transformer's, whatever could be learned.
    """
    mixes = not np.array_equal(analysis.value_mixing_matrix, np.eye(analysis.layers))
    if analysis.shares or (mixes and analysis.neutreno_lambda):
        return None
    if mixes:
        return "resformer"
    if averages_depth(analysis):
        return None
    return "neutreno" if analysis.neutreno_lambda else "transformer"


def averages_depth(analysis: Analysis) -> bool:
    """Whether a later layer reads anything but the block before it."""
    layers = analysis.layers
    return not np.array_equal(analysis.depth_mixing_matrix, np.eye(layers, layers + 1, k=1))


def judge(analysis: Analysis) -> list[dict[str, Any]]:
    """A verdict on each claim, as a dictionary; on DWA's where there is one."""
    kind = kind_of(analysis)
    verdicts = [_of_layers(analysis, quantity, kind) for quantity in CLAIMS]
    if averages_depth(analysis):
        verdicts += _of_depth(np.asarray(analysis.depth_mixing_matrix))
    return [vars(verdict) for verdict in verdicts]


def _of_layers(analysis: Analysis, quantity: str, kind: str | None) -> _Verdict:
    limit, below = LIMITS[quantity]
    values = np.asarray(analysis.mean(quantity))
    layer = int(values.argmax() if below else values.argmin())
    wrong = int((values >= limit).sum() if below else (values <= limit).sum())
    # Of attention the paper says only that ResFormer spreads it; drains and peaks it finds in the others.
    expected = {"resformer": True, None: None}.get(kind, None if quantity == "importance_ratio" else False)
    return _Verdict(
        claim=quantity,
        holds=not wrong,
        value=float(values[layer]),
        layer=layer,
        detail=f"{wrong} of {analysis.layers} layers break it",
        expected=expected,
    )


def _of_depth(matrix: np.ndarray) -> list[_Verdict]:
    size = np.abs(matrix)
    rows = np.arange(len(matrix))
    diagonal = size[rows, rows + 1]
    largest = diagonal >= size.max(axis=1)
    worst = int((diagonal / size.max(axis=1)).argmin())
    between = np.tril(np.ones_like(matrix, dtype=bool))
    between[:, 0] = False
    embeddings, others = size[:, 0].mean(), size[between].mean()
    late = matrix[len(matrix) - max(1, len(matrix) // 3) :, 0]
    return [
        _Verdict(
            "depth_diagonal",
            bool(largest.all()),
            float(diagonal[worst]),
            worst,
            f"{largest.sum()} of {len(rows)} rows do",
            True,
        ),
        _Verdict("depth_embeddings", bool(embeddings > others), float(embeddings), None, f"against {others:.3g}", True),
        _Verdict(
            "depth_negative",
            bool((late < 0).all()),
            float(late.max()),
            None,
            f"{(late < 0).sum()} of {len(late)} are",
            True,
        ),
    ]
