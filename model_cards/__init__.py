"""Model cards of retrofitted and trained checkpoints, and one card for each named method."""

from resformer.model_cards.cards import TRAINING_FIELDS, is_as_made, retrofit_card, trained_card
from resformer.model_cards.method_cards import method_card
from resformer.model_cards.metrics import Metric, eval_result_files, harness_metrics, metrics_of
from resformer.model_cards.source_card import base_model_of, carried_metadata, licences, well_formed

__all__ = [
    "TRAINING_FIELDS",
    "Metric",
    "base_model_of",
    "carried_metadata",
    "eval_result_files",
    "harness_metrics",
    "is_as_made",
    "licences",
    "method_card",
    "metrics_of",
    "retrofit_card",
    "trained_card",
    "well_formed",
]
