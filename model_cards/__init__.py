"""Model cards of retrofitted, fine-tuned and from-scratch checkpoints, and one card for each named method."""

from resformer.model_cards.cards import TRAINING_FIELDS, finetuned_card, is_as_made, retrofit_card, scratch_card
from resformer.model_cards.method_cards import method_card, packaged_method_card, write_method_cards
from resformer.model_cards.metrics import Metric, eval_result_files, harness_metrics, metrics_of
from resformer.model_cards.source_card import carried_metadata, well_formed

__all__ = [
    "TRAINING_FIELDS",
    "Metric",
    "carried_metadata",
    "eval_result_files",
    "finetuned_card",
    "harness_metrics",
    "is_as_made",
    "method_card",
    "metrics_of",
    "packaged_method_card",
    "retrofit_card",
    "scratch_card",
    "well_formed",
    "write_method_cards",
]
