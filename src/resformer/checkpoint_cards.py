"""The model card of a checkpoint folder, from its conversion record and from files of results."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from huggingface_hub import ModelCard
from huggingface_hub.dataclasses import type_validator
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from resformer.configuration.connection_fields import ConnectionFields
from resformer.convert.retrofitting import UNRECORDED, RetrofitReport
from resformer.convert.source import Source, open_source
from resformer.errors import CheckpointError, one_line
from resformer.files import fingerprint, listed, replace_listed
from resformer.model_cards import (
    Alone,
    Metric,
    Training,
    base_model_of,
    carried_metadata,
    harness_metrics,
    is_as_made,
    metrics_of,
    model_card,
    well_formed,
)
from resformer.names import RECORD
from resformer.record import config_digest, file_digest, read_record
from resformer.safetensors_format import Shard
from resformer.untrusted import MOST_BYTES, read_bounded, read_json

#: What a card needs of a record: name -> type.
_RECORD: dict[str, Any] = {
    **{name: kind for name, kind in get_type_hints(RetrofitReport).items() if name not in UNRECORDED},
    "dtype": Literal["float64", "float32", "float16", "bfloat16"],
    "exact": bool,
    "source_card": dict,
    "files": dict[str, dict],
    "config_sha256": str,
}


@dataclass(frozen=True)
class CheckpointCard:
    """A model card."""

    card: ModelCard
    origin: str  # of the model: "retrofitted", "fine-tuned", "derived", "from scratch" or "unknown"

    def write(self, path: Path, *, force: bool = False) -> None:
        """Writes the card to `path`.

        Raises:
            CheckpointError: `path` does not end in .md, or a card there was edited by hand and `force` is not set.
            OutputError: it cannot be written.
        """
        if path.suffix != ".md":  # `force` would replace a config.json too
            raise CheckpointError(f"{path}: is not a card's file name; expected one that ends in .md.")
        old = read_bounded(path, MOST_BYTES).decode(errors="replace") if os.path.lexists(path) and not force else None
        if old is not None and not is_as_made(old):
            raise CheckpointError(f"{path}: was written or edited by hand. Replace it with --force.", "--force")
        replace_listed(path, str(self.card))


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
        metrics: `metrics.json` files, at most one of them of a training (default: the one in the folder).
        evaluations: JSON files of lm-evaluation-harness.
        repository: Hub id in the card's code; default: the folder's name.
        base_model: Hub id of the source, if it was read from a folder.
        license: the Hub's name of a licence; default: the licence of the source.

    Raises `CheckpointError` if it is no ResFormer checkpoint, or a file cannot be read, and `ValueError` for no name.
    """
    checkpoint = Path(checkpoint)
    if license is not None and not well_formed({"license": license}):
        raise ValueError(f"license {license!r}: expected a name such as apache-2.0, mit, llama3 or other.")
    for given in (repository, base_model):
        if given is not None:
            validate_repo_id(given)
    if not checkpoint.is_dir():
        raise CheckpointError(f"{checkpoint}: is not a folder; a card needs a local checkpoint.")
    training, results = _read_results(
        *([Path(os.path.realpath(path)) for path in paths] for paths in (metrics, evaluations))
    )
    measured: list[Metric] = []  # by the training itself
    if not training and os.path.lexists(checkpoint / "metrics.json"):  # written by `resformer finetune`
        training, measured = _read_results([checkpoint / "metrics.json"], [])
    opened = open_source(str(checkpoint), heads=True)
    config, record = opened.config, read_record(checkpoint)
    if not isinstance(config, ConnectionFields):
        raise CheckpointError(
            f"{checkpoint}: is a {config.model_type} without connections; `resformer convert` adds some."
        )
    if record is not None:
        _check(record, _RECORD, str(checkpoint / RECORD))
    base = base_model_of(config)
    source_card = {**well_formed(base), **carried_metadata(checkpoint / "README.md")}
    source_card |= {} if record is None else record["source_card"]
    if license is not None:
        source_card = {name: value for name, value in source_card.items() if not name.startswith("license")}
        source_card["license"] = license
    name = repository or checkpoint.resolve().name
    arguments: dict[str, Any] = {
        "config": config,
        "source_card": source_card,
        "metrics": results,
        "base_model": base_model,
    }
    if opened.alone:
        shard = opened.fetch_alone()
        shards, facts = [shard], dict[str, Any](parameters=None)
        changed_base = (getattr(config, "base_model", None) or {}).get("changed")
        arguments["alone"] = Alone(sum(each.elements for each in shard.tensors), changed_base)
    else:
        fetched = opened.fetch()
        shards = [*fetched.checkpoint.shards]
        facts = {"parameters": fetched.built.parameters, "dtype": str(fetched.built.dtype).removeprefix("torch.")}
        arguments["bundle"] = "auto_map" in opened.raw_config and (checkpoint / "modeling_resformer.py").is_file()
        arguments["tokenizer"] = bool(fetched.checkpoint.tokenizer_files)
    if record is not None and not training:
        card = model_card(record, name, changed=_changed(opened, shards, record), **arguments)
        return CheckpointCard(card, "retrofitted")
    changed = _changed(opened, shards, training) if training else []
    results += [] if changed else measured
    from_scratch = "source" in training and training["source"] is None and not base and record is None
    if training.get("source") is None:
        known = base if record is None else {"name": record["source"], "revision": record["revision"]}
        training |= {"source": known.get("name"), "revision": known.get("revision")}
    training |= {**facts, "from_scratch": from_scratch}
    origin = "from scratch" if from_scratch else "unknown"
    if training["source"]:
        origin = "fine-tuned" if "runs" in training else "derived"
    return CheckpointCard(model_card(training, name, changed=changed, **arguments), origin)


def _read_results(metrics: list[Path], evaluations: list[Path]) -> tuple[dict[str, Any], list[Metric]]:
    """(the description of a training, from one of the `metrics`; the results of all files)."""
    contents = {path: read_json(path, MOST_BYTES) for path in metrics}
    for path, values in contents.items():
        if not {"runs", "metrics"} & values.keys():
            raise CheckpointError(f"{path}: has neither `runs`, of a training, nor `metrics`, a list of results.")
    try:
        results = [metric for path, values in contents.items() for metric in metrics_of(values, str(path))]
        results += [
            metric for path in evaluations for metric in harness_metrics(read_json(path, MOST_BYTES), str(path))
        ]
    except ValueError as error:
        raise CheckpointError(str(error)) from error
    trainings = [path for path, values in contents.items() if "runs" in values]
    if len(trainings) > 1:
        raise CheckpointError(f"{trainings[1]}: describes a training, as {trainings[0]} does; a card takes one.")
    for path in trainings:
        values = contents[path]
        stated = {name: kind for name, kind in get_type_hints(Training).items() if name in values}
        _check(values, stated | {"corpus": str, "evaluation_tokens": int}, str(path))
        return values, results
    return {}, results


def _check(value: Mapping[str, Any], form: Mapping[str, Any], where: str) -> None:
    """Refuses an object of a file that a stranger may have written if it lacks a name of `form`, name -> type.

    It may have others. In place of a dataclass JSON has an object of its fields, and a list in place of a tuple.
    """
    for name, kind in form.items():
        if name not in value:
            raise CheckpointError(f"{where}: lacks `{name}`, which a card states.")
        given, kinds = value[name], (kind, *get_args(kind))
        if isinstance(given, list) and any(get_origin(each) is tuple for each in kinds):
            given = tuple(given)
        inner = next((each for each in kinds if is_dataclass(each)), None)
        outer = dict if inner is kind else list[dict] if get_origin(kind) is list else dict | None
        try:
            type_validator(f"{where}: `{name}`", given, kind if inner is None else outer)
        except TypeError as error:
            raise CheckpointError(f"A card cannot state this: {one_line(error)}.") from error
        if inner is not None and given is not None:
            for each in given if outer == list[dict] else [given]:
                _check(each, get_type_hints(inner), f"{where}: `{name}`")


def _changed(opened: Source, found: Sequence[Shard], described: Mapping[str, Any]) -> list[str] | None:
    """The files that are not those that a record or a metrics.json describes; `None` if it does not say which.

    Weight files are compared by SHA-256 where it is described, else by the listing of the conversion that wrote them.
    """
    files, shards = described.get("files"), {shard.name: shard for shard in found}
    if not isinstance(files, dict) or not isinstance(described.get("config_sha256"), str):
        return None
    changed = ["config.json"] if described["config_sha256"] != config_digest(opened.raw_config) else []
    written = listed(opened.folder, "convert")
    for name in sorted(files.keys() | shards.keys()):
        facts, shard = files.get(name), shards.get(name)
        if not isinstance(facts, dict) or shard is None:
            same = False
        elif facts.get("sha256") is not None:
            same = file_digest(shard.path) == facts["sha256"]
        elif name not in written:
            return None
        else:
            same = fingerprint(shard.path) == written[name]
        changed += [] if same else [name]
    return changed
