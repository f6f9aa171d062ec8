"""The builders of model cards. Every number in a card is an argument: nothing is made up here."""

from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import PurePath
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

__all__ = ["finetuned_card", "retrofit_card"]


def retrofit_card(report: Mapping[str, Any], repository: str | None = None) -> ModelCard:
    """The card of a retrofitted checkpoint.

    Args:
        report: `RetrofitReport.as_dict()`.
        repository: the Hub id, or path, that the card's code loads; default: the output folder's name.
    """
    return _render(
        "retrofit.md.jinja",
        _metadata(report["source"], report["revision"]),
        title=f"{PurePath(report['source']).name} with {report['method']}",
        repository=repository or PurePath(report["output"]).name,
        added_parameters=sum(report["added"].values()),
        **{key: value for key, value in report.items() if key not in ("output", "added", "verification")},
        verification=_logits(report["verification"]),
    )


def finetuned_card(
    *,
    source: str,
    revision: str | None,
    method: str,
    corpus: str,
    evaluation_tokens: int,
    runs: Sequence[Mapping[str, Any]],
    repository: str,
) -> ModelCard:
    """The card of a fine-tuned retrofit.

    Args:
        source, revision: the checkpoint that was retrofitted.
        runs: for each model trained side by side its `name`, `perplexity_before`, `perplexity_after`, `training_tokens`
            and `steps`.
        repository: the Hub id, or path, that the card's code loads.
    """
    return _render(
        "finetuned.md.jinja",
        _metadata(source, revision),
        title=f"{PurePath(source).name} with {method}, fine-tuned",
        source=source,
        method=method,
        corpus=corpus,
        evaluation_tokens=evaluation_tokens,
        runs=runs,
        repository=repository,
    )


def _logits(verification: Mapping[str, Any] | None) -> str:
    if verification is None:
        return "Its logits were not compared with the source's: `resformer verify` does it"
    tokens = verification["tokens"]
    if verification["identical"]:
        return f"Its logits are identical to the source's to the bit on {tokens} tokens"
    return (
        f"Against its source, the logits differ by at most {verification['max_difference']:.3g}, KL "
        f"{verification['mean_kl']:.3g} nats, top-1 agreement {verification['top1_agreement']:.1%} on {tokens} tokens"
    )


def _metadata(source: str, revision: str | None) -> ModelCardData:
    card_data = ModelCardData(
        library_name="transformers", pipeline_tag="text-generation", tags=["resformer", "value-residual"]
    )
    if revision is not None:  # it came from the Hub
        card_data["base_model"], card_data["base_model_relation"] = source, "finetune"
    return card_data


def _render(template: str, card_data: ModelCardData, **values: Any) -> ModelCard:
    text = files("resformer.model_cards").joinpath(template).read_text(encoding="utf-8")
    return ModelCard.from_template(card_data, template_str=text, **values)
