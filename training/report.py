"""What a training reports: metrics.json, and what its card says."""

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from transformers import PreTrainedConfig
from transformers.utils import cached_file

from resformer.errors import CheckpointError
from resformer.files import LISTING
from resformer.model_cards import base_model_of, carried_metadata, licences, well_formed
from resformer.record import RECORD
from resformer.training.data import STANDARD_LIBRARY
from resformer.training.options import FinetuneOptions
from resformer.untrusted import read_json


@dataclass
class FinetuneReport:
    """What `metrics.json` holds. Losses are in nats per token, on the held-out blocks."""

    arguments: dict[str, Any]
    method: str | None  # the named method of the model; None: plain, or connections without a name
    parameters: int
    trained_parameters: int
    block: int
    training_blocks: int | None  # None: a stream
    held_out_blocks: int
    held_out_tokens: int
    held_out_documents: int  # that have tokens in these blocks
    held_out_by_source: dict[str, int]  # the same, for each source
    notes: list[str] = field(default_factory=list)  # on the data: which documents were cut
    loss_before: float | None = None
    loss_after: float | None = None
    perplexity_before: float | None = None
    perplexity_after: float | None = None
    steps: int | None = None
    resumed_from: int = 0  # the step
    tokens: int | None = None  # seen in training, on all devices, before a resumption too
    seconds: float | None = None  # of training in this process, evaluation left out
    tokens_per_second: float | None = None
    peak_memory: int | None = None  # bytes, most at once: resident in this process, or allocated on the accelerator
    url: str | None = None  # of the commit that pushed the output
    evaluations: list[dict[str, float]] = field(default_factory=list)
    #: What `resformer card --metrics` reads, by the names of `model_card`.
    source: str | None = None
    revision: str | None = None
    corpus: str | None = None
    evaluation_tokens: int = 0
    datasets: list[str] = field(default_factory=list)
    recipe: dict[str, Any] = field(default_factory=dict)
    data: list[dict[str, Any]] = field(default_factory=list)  # the parts of the training data, with their licences
    runs: list[dict[str, Any]] = field(default_factory=list)
    metrics: list[dict[str, Any]] = field(default_factory=list)  # scores of `--eval`, by the fields of `Metric`
    versions: dict[str, str] = field(default_factory=dict)


def perplexity(loss: float) -> float:
    """Infinite where it would overflow."""
    return math.exp(loss) if loss < 700 else math.inf


def record_origin(
    options: FinetuneOptions, config: PreTrainedConfig, report: FinetuneReport, tokens: Mapping[str, int]
) -> dict[str, Any]:
    """Notes in the report what a card says of the run, and returns what the source's own card says."""
    model = Path(options.model)
    commit = getattr(config, "_commit_hash", None)
    card, record = (_file(options.model, name, revision=commit) for name in ("README.md", RECORD))
    base = base_model_of(config)
    report.source, report.revision = (model.resolve().name if model.is_dir() else options.model), commit
    listing = model / LISTING
    if listing.is_file() and read_json(listing).get("made_by") == "new":
        report.source = None  # from scratch
    if commit is None and base:  # saved elsewhere after a training
        report.source, report.revision = base["name"], base["revision"]
    with suppress(CheckpointError, KeyError, TypeError):
        conversion = read_json(Path(record or ""))
        report.source, report.revision = conversion["source"], conversion["revision"]
    for source, count in tokens.items():
        dataset = None
        if source != STANDARD_LIBRARY and not Path(source).expanduser().exists():
            report.datasets.append(dataset := source.partition(":")[0])
        readme = None if dataset is None else _file(dataset, "README.md", repo_type="dataset")
        licence = None if readme is None else ", ".join(licences(Path(readme))) or None
        name = Path(source).name if dataset is None else source
        report.data.append({"source": name, "license": licence, "tokens": count})
    report.corpus = ", ".join(each["source"] for each in report.data)
    teacher = Path(options.distill) if options.distill is not None else None
    report.recipe = {
        "train": options.train,
        "trained": report.trained_parameters,
        "parameters": report.parameters,
        "teacher": teacher.resolve().name if teacher is not None and teacher.is_dir() else options.distill,
        "weight": options.distill_weight,
        "temperature": options.temperature,
        "hidden_weight": options.distill_hidden,
        "hidden_layers": options.distill_hidden_layers,
        "hardware": _hardware(),
        "seconds": report.seconds,
    }
    report.runs = [
        {
            "name": report.method or "the model",
            "perplexity_before": report.perplexity_before,
            "perplexity_after": report.perplexity_after,
            "training_tokens": report.tokens,
            "steps": report.steps,
        }
    ]
    return {**well_formed(base), **({} if card is None else carried_metadata(Path(card)))}


def _file(repository: str, name: str, **options: Any) -> str | None:
    """A file of a repository; `None` where it has none, or the Hub is out of reach."""
    return cached_file(
        repository,
        name,
        **options,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
        _raise_exceptions_for_gated_repo=False,
    )


def _hardware() -> str:
    processes = PartialState().num_processes
    if torch.cuda.is_available():
        return f"{processes} x {torch.cuda.get_device_name()}"
    return f"{processes * torch.get_num_threads()} CPU core{'s' * (processes * torch.get_num_threads() > 1)}"
