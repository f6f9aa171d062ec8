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

from resformer.convert.tokens import TokensComparison
from resformer.errors import CheckpointError
from resformer.model_cards import Part, Recipe, Run, Training, base_model_of, carried_metadata, licences, well_formed
from resformer.names import LISTING, RECORD
from resformer.training.data import STANDARD_LIBRARY
from resformer.training.options import FinetuneOptions
from resformer.untrusted import read_json


@dataclass
class FinetuneReport(Training):
    """The content of `metrics.json`. Losses are in nats per token, on the held-out blocks."""

    arguments: dict[str, Any]
    method: str | None  # the named method of the model; None: plain, or connections without a name
    parameters: int
    trained_parameters: int
    block: int
    training_blocks: int
    held_out_blocks: int
    held_out_tokens: int
    held_out_documents: int  # that have tokens in these blocks
    held_out_by_source: dict[str, int]  # the same, for each source
    processes: int = 1
    passes: dict[str, float] = field(default_factory=dict)  # over each source
    notes: list[str] = field(default_factory=list)  # on the data, and on what Muon takes
    loss_before: float | None = None
    loss_after: float | None = None
    perplexity_before: float | None = None
    perplexity_after: float | None = None
    bits_per_byte: float | None = None  # of text, afterwards
    steps: int | None = None
    resumed_from: int = 0  # the step
    tokens: int | None = None  # seen in training, on all devices, before a resumption too
    seconds: float | None = None  # of training in this process, evaluation left out
    tokens_per_second: float | None = None
    peak_memory: int | None = None  # bytes, most at once: resident in this process, or allocated on the accelerator
    tokenizer: TokensComparison | None = None  # that of the output, beside that of the training
    versions: dict[str, str] = field(default_factory=dict)


def perplexity(loss: float) -> float:
    """Infinite where it would overflow."""
    return math.exp(loss) if loss < 700 else math.inf


def public_names(options: FinetuneOptions) -> dict[str, str]:
    """Path -> the name that reports, which are public, have for it: as much of its end as tells it from the others."""
    given = [options.model, *options.sources, *options.held_out_data, *filter(None, [options.tokenizer])]
    local = [options.output, *(path for path in given if Path(path).expanduser().exists())]
    parts = {path: Path(path).expanduser().absolute().parts for path in local}

    def name(own: tuple[str, ...]) -> str:
        others = {*parts.values()} - {own}
        ends = (own[-count:] for count in range(1, len(own) + 1))
        return "/".join(next(end for end in ends if not any(other[-len(end) :] == end for other in others)))

    return {path: name(own) for path, own in parts.items()}


def public(value: Any, names: Mapping[str, str]) -> Any:
    """The same with `names` in the place of paths, which may have a weight or a note behind them."""
    if isinstance(value, dict):
        return {public(key, names): public(entry, names) for key, entry in value.items()}
    if isinstance(value, list):
        return [public(entry, names) for entry in value]
    path = next((path for path in names if value == path or str(value).startswith(f"{path}:")), None)
    return value if path is None else names[path] + value.removeprefix(path)


def record_origin(
    options: FinetuneOptions, config: PreTrainedConfig, report: FinetuneReport, read: Mapping[str, tuple[int, float]]
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
    names = public_names(options)
    for source, (count, passes) in read.items():
        dataset = None
        if source != STANDARD_LIBRARY and source not in names:
            report.datasets.append(dataset := source.partition(":")[0])
        readme = None if dataset is None else _file(dataset, "README.md", repo_type="dataset")
        licence = None if readme is None else ", ".join(licences(Path(readme))) or None
        report.data.append(Part(public(source, names), licence, count, passes))
    report.corpus = ", ".join(part.source for part in report.data)
    report.recipe = Recipe(
        train=options.train,
        trained=report.trained_parameters,
        parameters=report.parameters,
        hardware=_hardware(),
        seconds=report.seconds,
    )
    name = report.method or "the model"
    report.runs = [Run(name, report.perplexity_before, report.perplexity_after, report.tokens, report.steps)]
    return {**well_formed(base), **({} if card is None else carried_metadata(Path(card)))}


def _file(repository: str, name: str, **options: Any) -> str | None:
    """A file of a repository; `None` where it has none, or the Hub is out of reach."""
    causes = ("missing_entries", "connection_errors", "gated_repo")
    return cached_file(repository, name, **options, **{f"_raise_exceptions_for_{cause}": False for cause in causes})


def _hardware() -> str:
    processes = PartialState().num_processes
    if torch.cuda.is_available():
        return f"{processes} x {torch.cuda.get_device_name()}"
    return f"{processes * torch.get_num_threads()} CPU core{'s' * (processes * torch.get_num_threads() > 1)}"
