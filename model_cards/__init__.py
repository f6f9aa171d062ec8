"""Model cards of retrofitted and trained checkpoints, and one card for each named method."""

from resformer.model_cards.cards import is_as_made, model_card
from resformer.model_cards.method_cards import method_card
from resformer.model_cards.metrics import Metric, eval_result_files, harness_metrics, metrics_of
from resformer.model_cards.source_card import base_model_of, carried_metadata, licences, well_formed

__all__ = [
    "Metric",
    "base_model_of",
    "carried_metadata",
    "eval_result_files",
    "harness_metrics",
    "is_as_made",
    "licences",
    "method_card",
    "metrics_of",
    "model_card",
    "well_formed",
]
