"""The model card of a checkpoint folder, from its conversion record and from files of results."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard
from jinja2 import UndefinedError

from resformer.configuration import ResFormerConfig
from resformer.configuration.methods import method_of
from resformer.convert.reading import Checkpoint
from resformer.convert.source import open_source
from resformer.convert.verification import first_bytes
from resformer.errors import CheckpointError, listed
from resformer.files import replace_text
from resformer.model_cards import (
    TRAINING_FIELDS,
    Metric,
    carried_metadata,
    eval_result_files,
    finetuned_card,
    harness_metrics,
    is_as_made,
    metrics_of,
    retrofit_card,
    scratch_card,
    well_formed,
)
from resformer.record import RECORD, read_record
from resformer.untrusted import parse_json, reading

__all__ = ["CheckpointCard", "checkpoint_card"]


@dataclass(frozen=True)
class CheckpointCard:
    """A model card, and the results that it states."""

    card: ModelCard
    origin: str  # of the model: "retrofitted", "fine-tuned" or "from-scratch"
    metrics: list[Metric]

    def write(self, path: Path, *, force: bool = False) -> list[Path]:
        """Writes the card to `path`, and `.eval_results/` beside it; returns the files.

        Raises:
            CheckpointError: `path` does not end in .md, or a card there was edited by hand and `force` is not set.
            OutputError: a file cannot be written.
        """
        if path.suffix != ".md":  # `force` would replace a config.json too
            raise CheckpointError(f"{path}: is not a card's file name; expected one that ends in .md.")
        if not force and path.exists() and not is_as_made(path.read_text(encoding="utf-8", errors="replace")):
            raise CheckpointError(f"{path}: was written or edited by hand. Replace it with --force.", "--force")
        files = {path: str(self.card)}
        files |= {path.parent / name: text for name, text in eval_result_files(self.metrics).items()}
        for file, text in files.items():
            replace_text(file, text)
        return list(files)


def checkpoint_card(
    checkpoint: str | Path,
    *,
    metrics: Iterable[str | Path] = (),
    evaluations: Iterable[str | Path] = (),
    repository: str | None = None,
    base_model: str | None = None,
    license: str | None = None,
) -> CheckpointCard:
    """Builds the card of a ResFormer checkpoint.

    Args:
        checkpoint: its folder.
        metrics: `metrics.json` of a training, one at most, which describes this model's (default: the one in the
            folder), and `study.json` of studies.
        evaluations: JSON files of lm-evaluation-harness.
        repository: Hub id in the card's code; default: the folder's name.
        base_model: Hub id of the source, if it was read from a folder.
        license: the Hub's name of a licence; default: the licence of the source.

    Raises:
        CheckpointError: the folder is not a ResFormer checkpoint, or a file cannot be read or lacks what a card states.
        ValueError: `license` is no such name.
    """
    checkpoint = Path(checkpoint)
    if license is not None and not well_formed({"license": license}):
        raise ValueError(f"license {license!r}: expected a name such as apache-2.0, mit, llama3 or other.")
    if not checkpoint.is_dir():
        raise CheckpointError(f"{checkpoint}: is not a folder; a card needs a local checkpoint.")
    metric_files = list(map(Path, metrics))
    training, results = _read_results(metric_files, list(map(Path, evaluations)))
    if not training and (checkpoint / "metrics.json").is_file():  # written by `resformer finetune`
        training, _ = _read_results([checkpoint / "metrics.json"], [])
    opened = open_source(str(checkpoint), resformer=True).fetch()
    config, record = opened.config, read_record(checkpoint)
    dtype = str(opened.dtype).removeprefix("torch.")
    if not isinstance(config, ResFormerConfig):
        raise CheckpointError(f"{checkpoint}: is a {config.model_type}, no ResFormer; `resformer convert` makes one.")
    of_this = [metric for metric in results if metric.is_of(config)]
    if results and not of_this:
        raise CheckpointError(
            f"{listed(list(map(str, metric_files)))}: no result is of this model; a study has those of its own models."
        )
    source_card = {**carried_metadata(checkpoint / "README.md"), **((record or {}).get("source_card") or {})}
    if license is not None:
        source_card = {name: value for name, value in source_card.items() if not name.startswith("license")}
        source_card["license"] = license
    arguments: dict[str, Any] = {
        "repository": repository or checkpoint.resolve().name,
        "config": config,
        "source_card": source_card,
        "metrics": of_this,
        "bundle": "auto_map" in opened.raw_config and (checkpoint / "modeling_resformer.py").is_file(),
    }
    try:
        if training and (record is not None or training.get("source") is not None):
            if training.get("source") is None and record is not None:
                training |= {name: record[name] for name in ("source", "revision", "method")}
            training = {"revision": None, "method": method_of(config), **training}
            card = finetuned_card(**training, **arguments, dtype=dtype, base_model=base_model)
            return CheckpointCard(card, "fine-tuned", of_this)
        if record is not None:
            _check_weights(opened.checkpoint, record)
            return CheckpointCard(retrofit_card(record, **arguments, base_model=base_model), "retrofitted", of_this)
        arguments |= {
            name: value for name, value in training.items() if name not in ("source", "revision", "method", "recipe")
        }
        parameters = sum(tensor.elements for tensor in opened.checkpoint.tensors.values())
        card = scratch_card(method=method_of(config), parameters=parameters, dtype=dtype, **arguments)
        return CheckpointCard(card, "from-scratch", of_this)
    except (KeyError, TypeError, AttributeError, UndefinedError, ValueError) as error:  # fields that JSON files lack
        raise CheckpointError(f"{checkpoint}: its record or the metrics lack what a card states: {error}") from error


def _read_results(metrics: list[Path], evaluations: list[Path]) -> tuple[dict[str, Any], list[Metric]]:
    """(the description of a training, from one of the `metrics`; the results of all files)."""
    contents = {path: _read_object(path) for path in metrics}
    try:
        results = [metric for path, values in contents.items() for metric in metrics_of(values, str(path))]
        results += [metric for path in evaluations for metric in harness_metrics(_read_object(path), str(path))]
    except ValueError as error:
        raise CheckpointError(str(error)) from error
    trainings = [path for path, values in contents.items() if "runs" in values]
    if len(trainings) > 1:
        raise CheckpointError(f"{trainings[1]}: describes a training, as {trainings[0]} does; a card takes one.")
    for path in trainings:
        if missing := [name for name in ("corpus", "evaluation_tokens") if name not in contents[path]]:
            raise CheckpointError(f"{path}: has the `runs` of a training, but no `{missing[0]}`.")
    return {
        name: contents[path][name] for path in trainings for name in TRAINING_FIELDS if name in contents[path]
    }, results


def _check_weights(checkpoint: Checkpoint, record: Mapping[str, Any]) -> None:
    """Refuses files of other sizes, or tensors of other first bytes, than the record says: trained since."""
    digests = first_bytes(checkpoint.tensors.values())
    for name, file in record["files"].items():
        path = checkpoint.folder / name
        recorded = {tensor: facts["first_bytes"] for tensor, facts in file["tensors"].items() if "first_bytes" in facts}
        if not path.is_file() or path.stat().st_size != file["bytes"] or not recorded.items() <= digests.items():
            raise CheckpointError(
                f"{path}: is not the file that {RECORD} describes. Was the model trained since? Then give --metrics, "
                f"or remove {RECORD}."
            )


def _read_object(path: Path) -> dict[str, Any]:
    with reading(path):
        return parse_json(path.read_bytes(), str(path))
