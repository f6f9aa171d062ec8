"""The builder of model cards. Every number in a card is one of its arguments, or computed from them."""

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
from resformer.configuration.methods import connections_of, method_of, without_connections
from resformer.errors import plain
from resformer.model_cards.facts import FACTS, FIELDS, HEADS, papers_of
from resformer.model_cards.metrics import Metric, notes_of, table_rows
from resformer.model_cards.source_card import well_formed
from resformer.modeling import ResFormerForCausalLM

#: Fields of a training's report that a card states -> their value where it is not known.
_UNKNOWN: dict[str, Any] = {
    **dict.fromkeys(("source", "revision", "corpus", "evaluation_tokens", "recipe", "parameters")),
    **dict.fromkeys(("runs", "datasets", "data"), ()),
    "from_scratch": False,
}
#: Ends a card: `is_as_made` compares the digest to find edits by hand.
_MARK = "<!-- Made by `resformer card`. SHA-256 of the text above: "
#: Field of a run -> (its name in the table, its format).
_RUN_ROWS = {
    "perplexity_before": ("held-out perplexity before", "{:.3f}"),
    "perplexity_after": ("held-out perplexity after", "{:.3f}"),
    "training_tokens": ("training tokens", "{:,}"),
    "steps": ("steps", "{:,}"),
}


def model_card(
    report: Mapping[str, Any],
    repository: str,
    *,
    config: ResFormerConfig,
    source_card: Mapping[str, Any] | None = None,
    metrics: Iterable[Metric] = (),
    base_model: str | None = None,
    bundle: bool = False,
    tokenizer: bool = True,
    changed: Sequence[str] | None = (),
) -> ModelCard:
    """The card of a checkpoint, from its conversion record, or from what is known of its training.

    Args:
        report: the record of a converted folder (`resformer_conversion.json`); of a shrunken checkpoint, it says what
            it costs and how well its layers were fitted. Or the fields of a `metrics.json`, which may be missing:
            `source` (the checkpoint that it was made from) and `revision` (its commit on the Hub); `corpus` and
            `evaluation_tokens` (the training data, and the tokens of its held-out part); `datasets` (Hub ids); `data`
            (`source`, `tokens` and `license` of each part); `recipe` (which parameters were trained; the teacher and
            weights of a distillation); `runs`, one of each model that was trained, with `name` (the method's, or "the
            model", for the model of this card), `perplexity_before`, `perplexity_after`, `training_tokens`, `steps`;
            and `parameters`, `dtype` (of the weights, and so of the cache), `from_scratch` (there is no source).
        repository: the Hub id, or path, that the card's code loads.
        config: the checkpoint's; the cost of the cache follows from it.
        source_card: licence, languages and data from the source's card (`carried_metadata`).
        metrics: further results, of `metrics_of` or `harness_metrics`.
        base_model: Hub id of the source; default: the source, if it came from the Hub.
        bundle: the folder holds its own code (`auto_map` in config.json).
        tokenizer: it holds a tokenizer.
        changed: files that are not those of `report`: what it says of the model is not repeated. `None`: all may be.

    Raises:
        jinja2.UndefinedError: a record lacks a value that the card states.
    """
    converted = "added" in report and "runs" not in report
    values = {name: report.get(name, default) for name, default in _UNKNOWN.items()}
    source, revision, corpus = values["source"], values["revision"], values["corpus"]
    method = report["method"] if converted else method_of(config)
    fields = report["fields"] if converted else connections_of(config)
    title = repository.rstrip("/").rpartition("/")[2]
    if source is not None:
        title = f"{PurePath(source).name} with {method or 'cross-layer connections'}" + ", fine-tuned" * bool(corpus)
        if base_model is None and revision is not None:  # of a GGUF file, the repository that holds it
            base_model = "/".join(source.split("/")[:2])
    runs = () if changed else values["runs"]
    measured = list(metrics)
    if corpus and values["evaluation_tokens"]:
        held_out = {"dataset": corpus, "split": "held out", "note": f"{values['evaluation_tokens']:,} tokens"}
        measured += [
            Metric("perplexity", run["perplexity_after"], **held_out)
            for run in runs
            if run.get("name") == (method or "the model") and run.get("perplexity_after") is not None
        ]
    carried = well_formed(source_card or report.get("source_card") or {})
    licence: dict[str, Any] = {name: carried.get(name) for name in ("license", "license_name", "license_link")}
    active = [name for name in FIELDS if fields.get(name) not in (None, False, 0, "none")]
    active = [mode if (mode := f"{name}.{fields[name]}") in FIELDS else name for name in active]
    papers = papers_of(method, active)
    architecture = (config.architectures or ["ResFormerForCausalLM"])[0]
    head = HEADS.get(architecture, HEADS["ResFormerForCausalLM"])
    tags = ["resformer", *([method] if method else []), *(FIELDS[name]["tag"] for name in active)]
    card_data = ModelCardData(
        library_name="transformers",
        pipeline_tag=head["task"],
        base_model=base_model,
        base_model_relation="finetune" if base_model is not None else None,
        **licence,
        language=carried.get("language"),
        datasets=list(dict.fromkeys([*carried.get("datasets", []), *values["datasets"]])) or None,
        tags=[*tags, *(f"arxiv:{paper.arxiv}" for paper in papers)],
        model_name=title if measured else None,
        eval_results=[metric.as_eval_result(head["task"]) for metric in measured] or None,
    )
    template = "trained.md.jinja"
    if converted:
        template = "shrunk.md.jinja" if "shares" in report else "retrofit.md.jinja"
        changed = ["its files"] if changed is None else changed
        values["logits"] = _logits(report)
        values["sampled"] = sorted(name for name, file in report["files"].items() if file.get("sha256") is None)
    dtype = report.get("dtype", "bfloat16")
    cache, full = cache_bytes_per_token(config, dtype), cache_bytes_by_method(config, dtype)["transformer"]
    values |= {
        "report": report,
        "card_data": yaml_dump(_in_lines(card_data.to_dict()), sort_keys=False).strip(),
        "title": " ".join(title.split()),
        "repository": repository,
        "method": method,
        "fields": fields,
        "head": head,
        "auto_class": architecture.replace("ResFormer", "AutoModel"),
        "connections": list(dict.fromkeys(FIELDS[name]["means"] for name in active)),
        "facts": FACTS.get(method or ""),
        "papers": papers,
        "licence": licence,
        "results": table_rows(measured),
        "notes": notes_of(measured),
        "cache": {"bytes": cache, "full": full, "share": cache / full, "dtype": dtype},
        "added": added_parameters(config) if method in FACTS else None,
        "bundle": bundle,
        "tokenizer": tokenizer,
        "changed": changed,
        "runs": _run_table(runs),
    }
    # ModelCard.from_template would leave missing values blank instead of raising an error.
    card = ModelCard(render(template, **values))
    card.text += f"\n{_MARK}{_digest(f'{card}{chr(10)}')} -->\n"
    return card


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


def _run_table(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    rows = [
        (title, [pattern.format(run[name]) for run in runs])
        for name, (title, pattern) in _RUN_ROWS.items()
        if all(run[name] is not None for run in runs)  # no perplexity where nothing was held out
    ]
    return {"names": [run["name"] for run in runs], "rows": rows} if runs else None
