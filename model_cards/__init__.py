"""Model cards: a template per kind of checkpoint, filled in from what was measured."""

from resformer.model_cards.cards import finetuned_card, retrofit_card

__all__ = ["finetuned_card", "retrofit_card"]
