"""The decoder and its cross-layer connections, one file each. The import registers the models with the Auto classes."""

import sys

import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from resformer.configuration import ResFormerConfig
from resformer.modeling.growing_cache import GrowingCache
from resformer.modeling.modeling_resformer import (
    ResFormerForCausalLM,
    ResFormerForQuestionAnswering,
    ResFormerForSequenceClassification,
    ResFormerForTokenClassification,
    ResFormerModel,
    ResFormerPreTrainedModel,
)

__all__ = [
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
    # TRL, vLLM and `transformers serve` look the name in config.json's `architectures` up in `transformers`. Importing
    # its processors runs that module again: who imported it earlier holds the first one, who imports it now the second.
    for module in (transformers, sys.modules["transformers"]):
        setattr(module, model_class.__name__, model_class)
# The stock `Trainer` asks for the name, to smooth the labels of the next tokens.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.setdefault(ResFormerConfig.model_type, ResFormerForCausalLM.__name__)
