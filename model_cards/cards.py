"""The builder of model cards. Every number in a card is one of its arguments, or computed from them."""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import cache
from importlib.resources import files
from pathlib import PurePath
from typing import Any

import torch
from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.utils import yaml_dump  # type: ignore[attr-defined]
from jinja2 import Environment, FunctionLoader, StrictUndefined, Template
from transformers.initialization import no_init_weights

from resformer.configuration import ResFormerConfig, cache_bytes_by_method, cache_bytes_per_token
from resformer.configuration.about import About, Paper
from resformer.configuration.methods import METHODS, about_of, connections_of, method_of, without_connections
from resformer.errors import plain
from resformer.model_cards.heads import HEADS, auto_class
from resformer.model_cards.metrics import Metric, notes_of
from resformer.model_cards.source_card import well_formed
from resformer.modeling.connections import KINDS
from resformer.modeling.families import PREFIX, language_model_class

#: Ends a card: `is_as_made` compares the digest to find edits by hand.
_MARK = "<!-- Made by `resformer card`. SHA-256 of the text above: "


@dataclass
class Run:
    """One training of one model."""

    name: str  # the method's, or "the model", for the model of the card
    perplexity_before: float | None  # of the held-out text; None: there is none
    perplexity_after: float | None
    training_tokens: int | None
    steps: int | None


@dataclass
class Part:
    """A part of the training data."""

    source: str
    license: str | None
    tokens: int  # that were trained on, again where it was repeated
    passes: float | None = None  # over the whole source; of a stream, how many have begun


@dataclass
class Evaluation:
    """A point of the curve of a training."""

    step: int
    loss: float  # nats a token of the held-out text


@dataclass
class Recipe:
    """How a model was trained."""

    train: str  # which parameters: all or connections
    trained: int  # the number of these
    parameters: int
    hardware: str | None = None
    seconds: float | None = None


@dataclass(kw_only=True)
class Training:
    """The part of a `metrics.json` that a card states; fields that are not set are not known."""

    source: str | None = None  # the checkpoint that it was made from; None: unknown, or from scratch
    revision: str | None = None  # its commit on the Hub
    corpus: str | None = None  # the training data
    evaluation_tokens: int = 0  # in the held-out part of it
    datasets: list[str] = field(default_factory=list)  # Hub ids
    recipe: Recipe | None = None
    data: list[Part] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)  # one of each model that was trained
    evaluations: list[Evaluation] = field(default_factory=list)  # of the model of the card


@dataclass(frozen=True)
class Alone:
    """Connections in a folder without the other weights of their model."""

    numbers: int
    changed: bool | None  # whether the other weights are others than the source's; None: not known


#: The values of a card where they are not known.
_UNKNOWN = {**asdict(Training()), "parameters": None, "from_scratch": False}


def model_card(
    report: Mapping[str, Any],
    repository: str,
    *,
    config: Any,
    source_card: Mapping[str, Any] | None = None,
    metrics: Iterable[Metric] = (),
    base_model: str | None = None,
    bundle: bool = False,
    tokenizer: bool = True,
    changed: Sequence[str] | None = (),
    alone: Alone | None = None,
) -> ModelCard:
    """The card of a checkpoint, from its conversion record, or from what is known of its training.

    Args:
        report: the record of a converted folder (`resformer_conversion.json`). Or, as far as they are known, the fields
            of `Training`, `parameters`, `dtype` (of the weights, and so of the cache), `from_scratch`.
        repository: the Hub id, or path, that the card's code loads.
        source_card: licence, languages and data from the source's card (`carried_metadata`).
        base_model: Hub id of the source; default: the source, if it came from the Hub.
        bundle: the folder holds its own code (`auto_map` in config.json).
        changed: files that are not those of `report`: what it says of the model is not repeated. `None`: all may be.
        alone: the folder has the connections and no other weights.
    """
    converted = "added" in report and "runs" not in report
    values = {name: report.get(name, default) for name, default in _UNKNOWN.items()}
    source, revision, corpus = values["source"], values["revision"], values["corpus"]
    method = report["method"] if converted else method_of(config)
    fields = report["fields"] if converted else connections_of(config)
    title = repository.rstrip("/").rpartition("/")[2]
    if source is not None:
        title = f"{PurePath(source).name} with {method or 'cross-layer connections'}" + ", fine-tuned" * bool(corpus)
        if alone:
            title = f"{method or 'Cross-layer connections'} for {PurePath(source).name}"
        if base_model is None and revision is not None:  # of a GGUF file, the repository that holds it
            base_model = "/".join(source.split("/")[:2])
    results = list(metrics)
    carried = well_formed(source_card or report.get("source_card") or {})
    licence: dict[str, Any] = {name: carried.get(name) for name in ("license", "license_name", "license_link")}
    about = about_of(fields)
    family = None if isinstance(config, ResFormerConfig) else config.model_type.removeprefix(PREFIX)
    papers = [] if family and not fields else _papers(method, about)  # a plain model of another family has its own
    loads = auto_class(config).__name__
    head = HEADS[loads]
    tags = [
        "resformer",
        *([method] if method and fields else []),
        *(tag for each in about.values() for tag in each.tags.split()),
    ]
    card_data = ModelCardData(
        library_name="resformer" if alone else "transformers",
        pipeline_tag=head["task"],
        base_model=base_model,
        base_model_relation=("adapter" if alone else "finetune") if base_model is not None else None,
        **licence,
        language=carried.get("language"),
        datasets=list(dict.fromkeys([*carried.get("datasets", []), *values["datasets"]])) or None,
        tags=[*dict.fromkeys(tags), *(f"arxiv:{paper.arxiv}" for paper in papers)],
        model_name=title if results else None,
        eval_results=[metric.as_eval_result(head["task"]) for metric in results] or None,
    )
    if converted:
        changed = ["its files"] if changed is None else changed
        values["logits"] = _logits(report)
        values["sampled"] = sorted(name for name, file in report["files"].items() if file.get("sha256") is None)
    dtype = report.get("dtype") or str(config.dtype or torch.float32).removeprefix("torch.")
    cache = None
    if family is None:
        size, full = cache_bytes_per_token(config, dtype), cache_bytes_by_method(config, dtype)["transformer"]
        cache = {"bytes": size, "full": full, "share": size / full, "dtype": dtype}
    values |= {
        "report": report,
        "card_data": yaml_dump(_in_lines(card_data.to_dict()), sort_keys=False).strip(),
        "title": " ".join(title.split()),
        "repository": repository,
        "method": method,
        "fields": fields,
        "head": head,
        "auto_class": loads,
        "alone": alone,
        "own": {kind.name: kind.__module__ for kind in KINDS if kind.fields_of is None and kind.is_in(config)},
        "connections": [*filter(None, dict.fromkeys(_as_the_hub_reads(each.equation) for each in about.values()))],
        "named": METHODS.get(method or ""),
        "papers": papers,
        "licence": licence,
        "results": results,
        "notes": notes_of(results),
        "cache": cache,
        "family": family,
        "added": alone.numbers if alone else added_parameters(config),
        "bundle": bundle,
        "tokenizer": tokenizer,
        "changed": changed,
        "runs": () if changed else values["runs"],
        # Some ten, the last among them.
        "evaluations": values["evaluations"][:: -max(1, len(values["evaluations"]) // 10)][::-1],
    }
    # ModelCard.from_template would leave missing values blank instead of raising an error.
    name = "alone.md.jinja" if alone else "retrofit.md.jinja" if converted else "trained.md.jinja"
    text = _template(name).render(**values)
    card = ModelCard(re.sub(r"\n{3,}", "\n\n", text))
    card.text += f"\n{_MARK}{_digest(f'{card}{chr(10)}')} -->\n"
    return card


def _papers(method: str | None, about: Mapping[str, About]) -> list[Paper]:
    """The papers of a method, then those of the connection fields that are set beside it."""
    named = METHODS.get(method or "")
    covered = named(2) if named else {}
    beside = [each.paper for field, each in about.items() if field not in covered and each.paper]
    return [*dict.fromkeys([*(named.papers if named else ()), *beside])]


def is_as_made(text: str) -> bool:
    """Whether `text` is a card that this package has written, without later edits."""
    above, mark, rest = text.rpartition(_MARK)
    return bool(mark) and rest == f"{_digest(above)} -->\n"


@cache
def _template(name: str) -> Template:
    environment = Environment(
        loader=FunctionLoader(lambda name: files("resformer.model_cards").joinpath(name).read_text(encoding="utf-8")),
        undefined=StrictUndefined,
        finalize=_as_text,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["safe"] = _Markdown
    environment.filters["duration"] = lambda seconds: str(timedelta(seconds=round(seconds)))
    environment.filters["code"] = lambda text: _Markdown(f"`{_line(text).strip().replace('`', chr(39))}`")
    environment.filters["quoted"] = lambda text: _Markdown(json.dumps(str(text), ensure_ascii=False))
    environment.filters["number"] = lambda number: f"{number + 0:,}"  # + 0: an undefined value raises, by name
    return environment.get_template(name)


def added_parameters(config: Any) -> int:
    """How many parameters the connections add to a model of this shape; negative where layers share projections."""
    with no_init_weights(), torch.device("meta"):
        connected, without = (
            language_model_class(each).from_config(each).num_parameters()
            for each in (config, without_connections(config))
        )
    return int(connected - without)


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


def _as_the_hub_reads(sentence: str) -> str:
    r"""`$x$` -> `\\(x\\)`, the Hub's delimiters within a line; `$$x$$` is its own."""
    return re.sub(r"(?<!\$)\$([^$]+)\$(?!\$)", r"\\\\(\1\\\\)", sentence)


def _line(text: object) -> str:
    return plain(re.sub(r"\s+", " ", str(text)))


def _as_text(value: object) -> str:
    """Text of a record or of results, which is untrusted: without a line, link, table cell or HTML tag of its own.

    Web and mail addresses, which renderers take for links, become code.
    """
    if isinstance(value, _Markdown):
        return value
    words = re.split(r"(\S*(?:://|@|www\.)\S*)", _line(value), flags=re.IGNORECASE)
    for n, word in enumerate(words):
        address = word.replace("`", "'").replace("|", r"\|")
        words[n] = f"`{address}`" if n % 2 else re.sub(r"[\\`\[\]<|]", r"\\\g<0>", word)
    return "".join(words)


def _logits(report: Mapping[str, Any]) -> str:
    """A sentence on how far the logits are from the source's, and in which dtype the source computed its own."""
    logits, source = report["logits"], "the source's"
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
