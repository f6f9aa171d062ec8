"""The builders of model cards. Every number in a card is an argument of its builder, or computed from arguments.

Arguments come from a `RetrofitReport`, the `metrics.json` of a training, or results of an evaluation.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from pathlib import PurePath
from typing import Any

import torch
from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.utils import yaml_dump  # type: ignore[attr-defined]
from jinja2 import Environment, FunctionLoader, StrictUndefined

from resformer.configuration import ResFormerConfig, cache_bytes_by_method, cache_bytes_per_token
from resformer.configuration.methods import connections_of, without_connections
from resformer.errors import plain
from resformer.model_cards.facts import FACTS, FIELDS, HEADS, papers_of
from resformer.model_cards.metrics import Metric, table_rows
from resformer.model_cards.source_card import well_formed
from resformer.modeling import ResFormerForCausalLM

#: Fields of a metrics.json that describe a training, under the names of `trained_card`'s arguments.
TRAINING_FIELDS = ("source", "revision", "method", "corpus", "evaluation_tokens", "runs", "datasets", "data", "recipe")
#: Ends a card: `is_as_made` compares the digest to find edits by hand.
_MARK = "<!-- Made by `resformer card`. SHA-256 of the text above: "
#: Field of a run -> (its name in the table, its format).
_RUN_ROWS = {
    "perplexity_before": ("held-out perplexity before", "{:.3f}"),
    "perplexity_after": ("held-out perplexity after", "{:.3f}"),
    "training_tokens": ("training tokens", "{:,}"),
    "steps": ("steps", "{:,}"),
}


def retrofit_card(
    report: Mapping[str, Any],
    repository: str,
    *,
    config: ResFormerConfig | None = None,
    source_card: Mapping[str, Any] | None = None,
    metrics: Iterable[Metric] = (),
    base_model: str | None = None,
    bundle: bool = False,
    tokenizer: bool = True,
    changed: Sequence[str] | None = (),
) -> ModelCard:
    """The card of a retrofitted checkpoint.

    Args:
        report: the record of a converted folder (`resformer_conversion.json`); of a shrunken checkpoint, it says what
            it costs and how well its layers were fitted.
        repository: the Hub id, or path, that the card's code loads.
        config: the checkpoint's; the cost of the cache follows from it.
        source_card: licence, languages and data from the source's card (`carried_metadata`).
        metrics: further results, of `metrics_of` or `harness_metrics`.
        base_model: Hub id of the source; default: the source, if it came from the Hub.
        bundle: the folder holds its own code (`auto_map` in config.json).
        tokenizer: it holds a tokenizer.
        changed: files that are not those of the record: what it says of the model is not repeated. `None`: all may be.

    Raises:
        jinja2.UndefinedError: `report` lacks a value that the card states.
    """
    return _card(
        "shrunk.md.jinja" if "shares" in report else "retrofit.md.jinja",
        title=f"{PurePath(report['source']).name} with {report['method'] or 'cross-layer connections'}",
        repository=repository,
        method=report["method"],
        fields=report["fields"],
        config=config,
        dtype=report["dtype"],
        base_model=base_model or _hub_id(report["source"], report["revision"]),
        source_card=source_card or report.get("source_card") or {},
        metrics=metrics,
        bundle=bundle,
        tokenizer=tokenizer,
        derived=True,
        report=report,
        added_parameters=sum(report["added"].values()),
        logits=_logits(report),
        changed=["its files"] if changed is None else changed,
        sampled=sorted(name for name, file in report["files"].items() if file.get("sha256") is None),
    )


def trained_card(
    *,
    method: str | None,
    repository: str,
    config: ResFormerConfig,
    source: str | None = None,
    revision: str | None = None,
    from_scratch: bool = False,
    corpus: str | None = None,
    evaluation_tokens: int | None = None,
    runs: Sequence[Mapping[str, Any]] = (),
    datasets: Sequence[str] = (),
    data: Sequence[Mapping[str, Any]] = (),
    recipe: Mapping[str, Any] | None = None,
    dtype: str = "bfloat16",
    parameters: int | None = None,
    source_card: Mapping[str, Any] | None = None,
    metrics: Iterable[Metric] = (),
    base_model: str | None = None,
    bundle: bool = False,
    tokenizer: bool = True,
    changed: Sequence[str] | None = (),
) -> ModelCard:
    """The card of a checkpoint whose weights are not its source's: fine-tuned, from scratch, or of unknown origin.

    `source`, `revision`, `corpus`, `evaluation_tokens`, `runs`, `datasets`, `data` and `recipe` are fields of a
    `metrics.json`.

    Args:
        method: the named method; `None` for another combination of fields.
        repository: the Hub id, or path, that the card's code loads.
        config: the checkpoint's; the cost of the cache follows from it.
        source: the checkpoint that it was made from; `None`: unknown, or there is none.
        revision: its commit, if it came from the Hub.
        from_scratch: there is no source.
        corpus: the name of the training data; the evaluation is on the held-out part.
        evaluation_tokens: tokens of the held-out part.
        runs: one mapping for each model that was trained, with `name` (the method's, for the model of this card),
            `perplexity_before`, `perplexity_after`, `training_tokens` and `steps`.
        datasets: Hub ids of the training data.
        data: `source`, `tokens` and `license` (`None`: unknown) of each part of the training data.
        recipe: which of the parameters were trained, and the teacher and weights of a distillation.
        dtype: of the checkpoint's weights, which the cache takes too.
        parameters: number of parameters of the model.
        changed: files that were changed since they were measured: `runs` are left out. `None`: that is not known.
        source_card, metrics, base_model, bundle, tokenizer: as of `retrofit_card`.
    """
    runs = () if changed else runs
    measured = _perplexities(method, corpus, evaluation_tokens, runs) if corpus and evaluation_tokens else []
    title = repository.rstrip("/").rpartition("/")[2]
    if source is not None:
        title = f"{PurePath(source).name} with {method or 'cross-layer connections'}" + ", fine-tuned" * bool(corpus)
    return _card(
        "trained.md.jinja",
        title=title,
        repository=repository,
        method=method,
        fields=connections_of(config),
        config=config,
        dtype=dtype,
        base_model=base_model or (None if source is None else _hub_id(source, revision)),
        source_card=source_card or {},
        datasets=datasets,
        metrics=[*metrics, *measured],
        bundle=bundle,
        tokenizer=tokenizer,
        derived=source is not None,
        source=source,
        revision=revision,
        from_scratch=from_scratch,
        parameters=parameters,
        corpus=corpus,
        data=data,
        evaluation_tokens=evaluation_tokens,
        runs=_run_table(runs) if runs else None,
        recipe=recipe,
        changed=changed,
    )


def _hub_id(source: str, revision: str | None) -> str | None:
    """The repository of a source on the Hub; of a GGUF file, the one that holds it."""
    return None if revision is None else "/".join(source.split("/")[:2])


def is_as_made(text: str) -> bool:
    """Whether `text` is a card that this package has written, without later edits."""
    above, mark, rest = text.rpartition(_MARK)
    return bool(mark) and rest == f"{_digest(above)} -->\n"


def render(template: str, **values: Any) -> str:
    """A template of this folder, filled in with `values`; a missing value is an error."""
    environment = Environment(
        loader=FunctionLoader(lambda name: files("resformer.model_cards").joinpath(name).read_text(encoding="utf-8")),
        undefined=StrictUndefined,
        finalize=_as_text,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["safe"] = _Markdown
    environment.filters["text"] = _as_text
    environment.filters["code"] = lambda text: _Markdown(f"`{_line(text).strip().replace('`', chr(39))}`")
    environment.filters["quoted"] = lambda text: _Markdown(json.dumps(str(text), ensure_ascii=False))
    environment.filters["number"] = lambda number: f"{number + 0:,}"  # + 0: an undefined value raises, by name
    text = environment.get_template(template).render(**values)
    return re.sub(r"\n{3,}", "\n\n", text)


def added_parameters(config: ResFormerConfig) -> int:
    """How many parameters the connections add to Llama of this shape; negative where layers share projections."""
    with torch.device("meta"):
        connected, without = (
            ResFormerForCausalLM(each).num_parameters() for each in (config, without_connections(config))
        )
    return connected - without


def _card(
    template: str,
    *,
    title: str,
    method: str | None,
    fields: Mapping[str, Any],
    config: ResFormerConfig | None,
    dtype: str,
    base_model: str | None,
    source_card: Mapping[str, Any],
    metrics: Iterable[Metric],
    datasets: Sequence[str] = (),
    **values: Any,
) -> ModelCard:
    carried = well_formed(source_card)
    licence: dict[str, Any] = {name: carried.get(name) for name in ("license", "license_name", "license_link")}
    active = [name for name in FIELDS if fields.get(name) not in (None, False, 0, "none")]
    active = [mode if (mode := f"{name}.{fields[name]}") in FIELDS else name for name in active]
    papers = papers_of(method, active)
    measured = list(metrics)
    architecture = ((config and config.architectures) or ["ResFormerForCausalLM"])[0]
    head = HEADS.get(architecture, HEADS["ResFormerForCausalLM"])
    tags = ["resformer", *([method] if method else []), *(FIELDS[name]["tag"] for name in active)]
    card_data = ModelCardData(
        library_name="transformers",
        pipeline_tag=head["task"],
        base_model=base_model,
        base_model_relation="finetune" if base_model is not None else None,
        **licence,
        language=carried.get("language"),
        datasets=list(dict.fromkeys([*carried.get("datasets", []), *datasets])) or None,
        tags=[*tags, *(f"arxiv:{paper.arxiv}" for paper in papers)],
        model_name=title if measured else None,
        eval_results=[metric.as_eval_result(head["task"]) for metric in measured] or None,
    )
    text = render(
        template,
        card_data=yaml_dump(_in_lines(card_data.to_dict()), sort_keys=False).strip(),
        title=" ".join(title.split()),
        method=method,
        fields=fields,
        head=head,
        auto_class=architecture.replace("ResFormer", "AutoModel"),
        connections=list(dict.fromkeys(FIELDS[name]["means"] for name in active)),
        facts=FACTS.get(method or ""),
        papers=papers,
        licence=licence,
        results=table_rows(measured),
        cache=_cache(config, dtype),
        added=added_parameters(config) if method in FACTS and config is not None else None,
        **values,
    )
    # ModelCard.from_template would leave missing values blank instead of raising an error.
    card = ModelCard(text)
    card.text += f"\n{_MARK}{_digest(f'{card}{chr(10)}')} -->\n"
    return card


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


class _Markdown(str):
    """Text that a template takes as it is; all other values of its expressions go through `_as_text`."""


def _in_lines(value: Any) -> Any:
    """The same with every text in one line."""
    if isinstance(value, dict):
        return {key: _in_lines(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_in_lines(entry) for entry in value]
    return _line(value) if isinstance(value, str) else value


def _line(text: object) -> str:
    return plain(re.sub(r"\s+", " ", str(text)))


def _as_text(value: object) -> str:
    """Text of a record or of results, which is untrusted: without a line, link, table cell or HTML tag of its own."""
    return value if isinstance(value, _Markdown) else re.sub(r"[\\`\[\]<|]", r"\\\g<0>", _line(value))


def _cache(config: ResFormerConfig | None, dtype: str) -> dict[str, Any] | None:
    if config is None:
        return None
    size, full = cache_bytes_per_token(config, dtype), cache_bytes_by_method(config, dtype)["transformer"]
    return {"bytes": size, "full": full, "share": size / full, "dtype": dtype}


def _logits(report: Mapping[str, Any]) -> str:
    """A sentence on how far the logits are from the source's, and in which dtype the source computed its own."""
    logits, source = report["logits"], "the source's"
    if report["dequantised"]:
        source += f" (which Transformers dequantises to {report['source_dtype']})"
    elif report["source_dtype"] != report["dtype"]:
        source += f" (in {report['source_dtype']})"
    if logits is None:
        return f"Its logits can be compared with {source} by resformer verify"
    where = f"{logits['tokens']} tokens"
    if logits["window"] is not None:
        where += f", within the sliding window of {logits['window']:,}"
    if logits["identical"]:
        return f"Its logits are identical to {source} to the bit on {where}"
    return (
        f"On {where}, its logits differ from {source} by at most {logits['max_difference']:.3g}: KL "
        f"{logits['mean_kl']:.3g} nats per token, top-1 agreement {logits['top1_agreement']:.1%}"
    )


def _run_table(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    rows = [
        (title, [pattern.format(run[name]) for run in runs])
        for name, (title, pattern) in _RUN_ROWS.items()
        if all(run[name] is not None for run in runs)  # no perplexity where nothing was held out
    ]
    return {"names": [run["name"] for run in runs], "rows": rows}


def _perplexities(
    method: str | None, corpus: str, evaluation_tokens: int, runs: Sequence[Mapping[str, Any]]
) -> list[Metric]:
    """The held-out perplexity of the run whose name is the method's, or "the model"."""
    return [
        Metric("perplexity", run["perplexity_after"], corpus, "held out", note=f"{evaluation_tokens} tokens")
        for run in runs
        if run.get("name") == (method or "the model") and run.get("perplexity_after") is not None
    ]
