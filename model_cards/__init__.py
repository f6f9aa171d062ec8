"""Model cards of retrofitted and trained checkpoints."""

from typing import TYPE_CHECKING

from resformer.lazy import on_demand

if TYPE_CHECKING:
    from resformer.model_cards.cards import *  # noqa: F403
    from resformer.model_cards.metrics import *  # noqa: F403
    from resformer.model_cards.source_card import *  # noqa: F403

__all__, __getattr__, __dir__ = on_demand(
    globals(),
    {
        "resformer.model_cards.cards": "Alone Evaluation Part Recipe Run Training is_as_made model_card",
        "resformer.model_cards.metrics": "Metric harness_metrics metrics_of",
        "resformer.model_cards.source_card": "base_model_of card_metadata carried_metadata licences well_formed",
    },
)
