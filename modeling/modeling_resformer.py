"""Llama with cross-layer connections: Transformers' own classes, in whose layers connections act."""

from transformers import (
    LlamaForCausalLM,
    LlamaForQuestionAnswering,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
    LlamaModel,
    LlamaPreTrainedModel,
)

from resformer.configuration import ResFormerConfig
from resformer.modeling.connected import ConnectedModel, WholeStepLoss

__all__ = [
    "ResFormerForCausalLM",
    "ResFormerForQuestionAnswering",
    "ResFormerForSequenceClassification",
    "ResFormerForTokenClassification",
    "ResFormerModel",
    "ResFormerPreTrainedModel",
]


class ResFormerPreTrainedModel(ConnectedModel, LlamaPreTrainedModel):
    """The base of `ResFormerModel` and its heads: their configuration, and how Transformers may split and save them."""

    config: ResFormerConfig
    config_class = ResFormerConfig


class ResFormerModel(ResFormerPreTrainedModel, LlamaModel):
    """The decoder without a head.

    `hidden_states` asked for with `output_hidden_states=True` are what layers get and return, before averages over
    depth. The first is what layer 0 reads: with `embedding_residual`, (r_0 + s_0) X_0.
    """


class ResFormerForCausalLM(ResFormerPreTrainedModel, LlamaForCausalLM):
    """The decoder with a language modelling head.

    ```python
    >>> from transformers import AutoModelForCausalLM, AutoTokenizer
    >>> import resformer

    >>> model = AutoModelForCausalLM.from_pretrained("path/to/a-resformer-checkpoint")
    ```"""


class ResFormerForSequenceClassification(WholeStepLoss, ResFormerPreTrainedModel, LlamaForSequenceClassification):
    """The decoder with a classifier on the last token that is not padding."""


class ResFormerForTokenClassification(WholeStepLoss, ResFormerPreTrainedModel, LlamaForTokenClassification):
    """The decoder with a classifier on every token."""


class ResFormerForQuestionAnswering(ResFormerPreTrainedModel, LlamaForQuestionAnswering):
    """The decoder with start and end logits on every token."""
