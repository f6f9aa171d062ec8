"""The heads of models, and what a card says of them."""

from typing import Any

import transformers
from transformers import PreTrainedConfig

from resformer.modeling.families import language_model_class

#: Heads that commands other than conversions take, by the end of the class's name in `architectures`.
_HEADS = ("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")
_DECODER = {
    "kind": "decoder",
    "use": "print(tokenizer.decode(model.generate(**inputs, max_new_tokens=20)[0]))",
    "use_of_ids": "print(model.generate(**inputs, max_new_tokens=20)[0])",  # without a tokenizer
}
#: Auto class -> the Hub's task, what a card calls the model, and the card's code.
HEADS: dict[str, dict[str, str]] = {
    "AutoModelForCausalLM": {"task": "text-generation", **_DECODER},
    "AutoModelForImageTextToText": {"task": "image-text-to-text", **_DECODER},
    "AutoModelForSequenceClassification": {
        "task": "text-classification",
        "kind": "sequence classifier",
        "use": "print(model.config.id2label[model(**inputs).logits.argmax().item()])",
    },
    "AutoModelForTokenClassification": {
        "task": "token-classification",
        "kind": "token classifier",
        "use": "print([model.config.id2label[label] for label in model(**inputs).logits.argmax(-1)[0].tolist()])",
    },
    "AutoModelForQuestionAnswering": {
        "task": "question-answering",
        "kind": "model that answers questions",
        "use": "print([logits.argmax().item() for logits in model(**inputs).values()])  "
        "# the answer: its first and last token",
    },
}


def head_of(config: PreTrainedConfig) -> str | None:
    """The class in `architectures` if it is not a language model's."""
    names = config.architectures if isinstance(config.architectures, list) else []
    return next((name for name in names if isinstance(name, str) and name.endswith(_HEADS)), None)


def auto_class(config: PreTrainedConfig) -> Any:
    """The Auto class of the head."""
    head = head_of(config)
    if head is None:
        return language_model_class(config)
    return getattr(transformers, f"AutoModel{head[head.rindex('For') :]}")
