"""What a card says of models with other heads."""

#: Class in `architectures` of config.json -> the Hub's task, what a card calls the model, and the card's code.
HEADS: dict[str, dict[str, str]] = {
    "ResFormerForCausalLM": {
        "task": "text-generation",
        "kind": "decoder",
        "use": "print(tokenizer.decode(model.generate(**inputs, max_new_tokens=20)[0]))",
        "use_of_ids": "print(model.generate(**inputs, max_new_tokens=20)[0])",  # without a tokenizer
    },
    "ResFormerForSequenceClassification": {
        "task": "text-classification",
        "kind": "sequence classifier",
        "use": "print(model.config.id2label[model(**inputs).logits.argmax().item()])",
    },
    "ResFormerForTokenClassification": {
        "task": "token-classification",
        "kind": "token classifier",
        "use": "print([model.config.id2label[label] for label in model(**inputs).logits.argmax(-1)[0].tolist()])",
    },
    "ResFormerForQuestionAnswering": {
        "task": "question-answering",
        "kind": "model that answers questions",
        "use": "print([logits.argmax().item() for logits in model(**inputs).values()])  "
        "# the answer: its first and last token",
    },
}
