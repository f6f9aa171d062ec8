"""Models with other heads are inspected, compared, described and pushed as language models are, and not converted."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from checkpoints import SIZES, byte_tokenizer, change_json
from conftest import training_arguments
from huggingface_hub import ModelCard
from transformers import AutoConfig, AutoModelForSequenceClassification, Trainer

from resformer import (
    ResFormerConfig,
    ResFormerForSequenceClassification,
    ResFormerForTokenClassification,
    connected_config,
    inspect,
    push,
    verify,
)
from resformer.checkpoint_cards import checkpoint_card
from resformer.convert import CheckpointError


@pytest.fixture
def classifier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of three labels, in the working folder."""
    monkeypatch.chdir(tmp_path)
    config = ResFormerConfig.for_method("resformer", **{**SIZES, "num_labels": 3})
    ResFormerForSequenceClassification(config).save_pretrained("classifier")
    byte_tokenizer().save_pretrained("classifier")
    return Path("classifier")


def test_it_is_inspected_and_compared_tensor_by_tensor(classifier: Path) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(classifier)
    found = inspect(classifier)
    assert (found.head, found.labels) == ("ResFormerForSequenceClassification", 3)
    assert (found.method, found.parameters) == ("resformer", model.num_parameters())
    assert found.warnings == []
    assert verify(classifier, classifier).same
    with torch.no_grad():
        model.score.weight[1] += 0.5
    model.save_pretrained("other")
    comparison = verify(classifier, "other")
    assert (comparison.same, list(comparison.different)) == (False, ["score.weight"])
    assert "logits (only language models have them)" in comparison.not_compared


@pytest.mark.parametrize("tokenizer", [True, False])
@pytest.mark.parametrize(
    ("family", "head", "task", "kind"),
    [
        ("llama", "CausalLM", "text-generation", "Llama-style decoder"),
        ("llama", "QuestionAnswering", "question-answering", "Llama-style model that answers questions"),
        ("llama", "SequenceClassification", "text-classification", "Llama-style sequence classifier"),
        ("llama", "TokenClassification", "token-classification", "Llama-style token classifier"),
        ("qwen3", "SequenceClassification", "text-classification", "qwen3 sequence classifier"),
    ],
)
def test_a_card_says_what_it_is_of_and_runs(
    family: str, head: str, task: str, kind: str, tokenizer: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = connected_config(AutoConfig.for_model(family, **SIZES), "resformer")
    model = getattr(transformers, f"AutoModelFor{head}").from_config(config)
    model.save_pretrained("model")
    if tokenizer:
        byte_tokenizer().save_pretrained("model")
    assert inspect("model").parameters == model.num_parameters()
    checkpoint_card("model").write(Path("model/README.md"))
    card = ModelCard.load("model/README.md")
    assert (card.data.pipeline_tag, f"A {kind} with" in card.text) == (task, True)
    assert ("AutoTokenizer" in card.text) == tokenizer
    code = "".join(re.findall(r"^```python\n(.*?)^```", card.text, flags=re.MULTILINE | re.DOTALL))
    assert "import resformer  #" in code
    names: dict[str, Any] = {}
    exec(code, names)
    assert type(names["model"]) is type(model)
    assert "model.safetensors" in push("model", "you/model", dry_run=True).files


@pytest.mark.parametrize("kind", ["sequence", "several", "regression", "token"])
def test_a_step_of_several_passes_has_the_gradient_of_the_whole_batch(kind: str, tmp_path: Path) -> None:
    numbers = torch.Generator().manual_seed(0)
    rows = []
    for length in (1, 9, 4, 12, 2, 7):
        labels: dict[str, Any] = {
            "sequence": torch.randint(3, (), generator=numbers),
            "several": torch.rand(3, generator=numbers).round(),
            "regression": torch.rand((), generator=numbers),
            "token": torch.randint(3, (12,), generator=numbers).masked_fill(torch.arange(12) >= length, -100),
        }
        rows.append({"input_ids": torch.randint(1, 97, (12,), generator=numbers), "labels": labels[kind]})

    def gradient(**options: int) -> torch.Tensor:
        torch.manual_seed(0)
        fields = {**SIZES, "num_labels": 1 if kind == "regression" else 3, "pad_token_id": 0}
        head = ResFormerForTokenClassification if kind == "token" else ResFormerForSequenceClassification
        model, found = head(ResFormerConfig.for_method("resformer", **fields)), list[torch.Tensor]()
        arguments = training_arguments(tmp_path, max_steps=1, max_grad_norm=0.0, optim="sgd", **options)
        trainer = Trainer(model=model, args=arguments, train_dataset=rows)
        trainer.create_optimizer()
        trainer.optimizer.register_step_pre_hook(lambda *_: found.append(model.score.weight.grad.clone()))
        trainer.train()
        return found[0]

    whole = gradient(per_device_train_batch_size=6)
    assert whole.abs().max() > 1e-3
    torch.testing.assert_close(gradient(per_device_train_batch_size=2, gradient_accumulation_steps=3), whole)


def test_labels_that_are_not_the_heads_are_refused(classifier: Path) -> None:
    change_json(classifier / "config.json", id2label={str(n): f"LABEL_{n}" for n in range(5)})
    with pytest.raises(CheckpointError, match=r"score.weight.*has shape \[3, 32\], config.json asks for \[5, 32\]"):
        inspect(classifier)
