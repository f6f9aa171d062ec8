"""The decoder and its cross-layer connections, one file each. The import registers the models with the Auto classes."""

import transformers
from transformers import LlamaConfig

from resformer.configuration import ResFormerConfig
from resformer.modeling.connections import Connection
from resformer.modeling.families import known_to_transformers
from resformer.modeling.growing_cache import GrowingCache
from resformer.modeling.modeling_resformer import (
    ResFormerForCausalLM,
    ResFormerForQuestionAnswering,
    ResFormerForSequenceClassification,
    ResFormerForTokenClassification,
    ResFormerModel,
    ResFormerPreTrainedModel,
)
from resformer.modeling.nanochat import Nanochat2026Config as Nanochat2026Config

__all__ = [
    "Connection",
    "GrowingCache",
    "ResFormerForCausalLM",
    "ResFormerForQuestionAnswering",
    "ResFormerForSequenceClassification",
    "ResFormerForTokenClassification",
    "ResFormerModel",
    "ResFormerPreTrainedModel",
]

for auto_class, model_class in {
    transformers.AutoModel: ResFormerModel,
    transformers.AutoModelForCausalLM: ResFormerForCausalLM,
    transformers.AutoModelForSequenceClassification: ResFormerForSequenceClassification,
    transformers.AutoModelForTokenClassification: ResFormerForTokenClassification,
    transformers.AutoModelForQuestionAnswering: ResFormerForQuestionAnswering,
}.items():
    if ResFormerConfig not in auto_class._model_mapping:  # the user may have registered a class of their own
        auto_class.register(ResFormerConfig, model_class)
    known_to_transformers(model_class, auto_class._model_mapping[LlamaConfig])
