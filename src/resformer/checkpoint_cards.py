"""The model card of a checkpoint folder, from its conversion record and from files of results."""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from huggingface_hub import ModelCard
from huggingface_hub.dataclasses import type_validator

from resformer.configuration import ResFormerConfig
from resformer.convert.safetensors_format import first_bytes
from resformer.convert.source import OpenedSource, open_source
from resformer.errors import CheckpointError, first_names, one_line
from resformer.files import replace_text
from resformer.model_cards import (
    Metric,
    base_model_of,
    carried_metadata,
    eval_result_files,
    harness_metrics,
    is_as_made,
    metrics_of,
    model_card,
    well_formed,
)
from resformer.record import RECORD, config_digest, file_digest, read_record
from resformer.untrusted import MOST_BYTES, read_bounded, read_json

_NUMBER = int | float
_LOGITS: dict[str, Any] = {"tokens": int, "window": int | None, "identical": bool}
_LOGITS |= dict.fromkeys(("max_difference", "mean_kl", "top1_agreement"), _NUMBER)
#: What a card states of a record: key -> a type, the form of an object, [the form of each entry], or (a form or null,).
_RECORD: dict[str, Any] = {
    **dict.fromkeys(("source", "family", "verified"), str),
    **dict.fromkeys(("revision", "method"), str | None),
    **dict.fromkeys(("fields", "source_fields", "source_card", "terms"), dict),
    **dict.fromkeys(("exact", "dequantised"), bool),
    "parameters": int,
    **dict.fromkeys(("dtype", "source_dtype"), Literal["float64", "float32", "float16", "bfloat16"]),
    **dict.fromkeys(("inexact_because", "dropped"), list[str]),
    "added": dict[str, int],
    "files": dict[str, dict],
    "logits": (_LOGITS,),
    "rounding": dict.fromkeys(("changed", "overflowed", "flushed"), int),
    "config_sha256": str,
}
_COSTS: dict[str, Any] = {
    **dict.fromkeys("source_loss loss kl_mean kl_p95 top1_agreement greedy_median".split(), _NUMBER),
    **dict.fromkeys(("tokens", "greedy_prompts", "greedy_limit"), int),
    **dict.fromkeys(("last_words", "source_last_word_accuracy", "last_word_accuracy"), _NUMBER | None),
    "passkey": ([dict.fromkeys(("length", "questions", "source", "result"), _NUMBER)],),
}
#: The same of a shrunken checkpoint.
_SHRUNK: dict[str, Any] = {
    "cache": _NUMBER,
    "calibration": {"tokens": int, "texts": list[str], "evaluated_on": list[str]},
    "cost": _COSTS,
    "shares": [{"layer": int, "keys_of": int, "values_of": int, "output_error": _NUMBER}],
}
#: The same of a `metrics.json`, and of its `recipe`.
_TRAINING: dict[str, Any] = {
    "corpus": str,
    "evaluation_tokens": int,
    "runs": [
        {"name": str, "training_tokens": int, "steps": int}
        | dict.fromkeys(("perplexity_before", "perplexity_after"), _NUMBER | None)
    ],
}
_RECIPE: dict[str, Any] = {
    "train": Literal["all", "connections", "sharing"],
    "teacher": str | None,
    "hidden_layers": list[int],
    **dict.fromkeys(("trained", "parameters"), int),
    **dict.fromkeys(("weight", "temperature", "hidden_weight"), _NUMBER),
}

#: The same of fields that older ones lack.
_STATED: dict[str, Any] = {
    **dict.fromkeys(("source", "revision", "method"), str | None),
    "datasets": list[str],
    "data": [{"source": str, "license": str | None, "tokens": int}],
    "recipe": _RECIPE,
}


@dataclass(frozen=True)
class CheckpointCard:
    """A model card, and the results that it states."""

    card: ModelCard
    origin: str  # of the model: "retrofitted", "fine-tuned", "derived", "from scratch" or "unknown"
    metrics: list[Metric]

    def write(self, path: Path, *, force: bool = False) -> list[Path]:
        """Writes the card to `path`, and `.eval_results/` beside it; returns the files.

        Raises:
            CheckpointError: `path` does not end in .md, or a card there was edited by hand and `force` is not set.
            OutputError: a file cannot be written.
        """
        if path.suffix != ".md":  # `force` would replace a config.json too
            raise CheckpointError(f"{path}: is not a card's file name; expected one that ends in .md.")
        old = read_bounded(path, MOST_BYTES).decode(errors="replace") if os.path.lexists(path) and not force else None
        if old is not None and not is_as_made(old):
            raise CheckpointError(f"{path}: was written or edited by hand. Replace it with --force.", "--force")
        files = {path: str(self.card)}
        files |= {path.parent / name: text for name, text in eval_result_files(self.metrics).items()}
        for file, text in reversed(files.items()):  # the card last: it is not written if another file cannot be
            replace_text(file, text, path.parent)
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
    files = [Path(os.path.realpath(path)) for path in metrics]
    training, results = read_results(files, [Path(os.path.realpath(path)) for path in evaluations])
    measured: list[Metric] = []  # by the training itself
    if not training and os.path.lexists(checkpoint / "metrics.json"):  # written by `resformer finetune`
        training, measured = read_results([checkpoint / "metrics.json"], [])
    opened = open_source(str(checkpoint), resformer=True, heads=True).fetch()
    config, record = opened.config, read_record(checkpoint)
    if not isinstance(config, ResFormerConfig):
        raise CheckpointError(f"{checkpoint}: is a {config.model_type}, no ResFormer; `resformer convert` makes one.")
    if record is not None:
        _check_form(record, _RECORD | (_SHRUNK if "shares" in record else {}), str(checkpoint / RECORD))
    of_this = [metric for metric in results if metric.is_of(config)]
    if results and not of_this:
        raise CheckpointError(
            f"{first_names(set(map(str, files)))}: no result is of this model; a study has those of its own models."
        )
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
        "metrics": of_this,
        "bundle": "auto_map" in opened.raw_config and (checkpoint / "modeling_resformer.py").is_file(),
        "tokenizer": opened.checkpoint.has_tokenizer,
        "base_model": base_model,
    }
    if record is not None and not training:
        card = model_card(record, name, changed=_changed(opened, record), **arguments)
        return CheckpointCard(card, "retrofitted", of_this)
    changed = _changed(opened, training) if training else []
    of_this += [] if changed else measured
    from_scratch = "source" in training and training["source"] is None and not base and record is None
    if training.get("source") is None:
        known = base if record is None else {"name": record["source"], "revision": record["revision"]}
        training |= {"source": known.get("name"), "revision": known.get("revision")}
    training |= {
        "parameters": sum(tensor.elements for tensor in opened.checkpoint.tensors.values()),
        "dtype": str(opened.dtype).removeprefix("torch."),
        "from_scratch": from_scratch,
    }
    origin = "from scratch" if from_scratch else "unknown"
    if training["source"]:
        origin = "fine-tuned" if "runs" in training else "derived"
    return CheckpointCard(model_card(training, name, changed=changed, **arguments), origin, of_this)


def read_results(metrics: list[Path], evaluations: list[Path]) -> tuple[dict[str, Any], list[Metric]]:
    """(the description of a training, from one of the `metrics`; the results of all files)."""
    contents = {path: read_json(path, MOST_BYTES) for path in metrics}
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
        stated = {name: form for name, form in _STATED.items() if name in values and (values[name] or name != "recipe")}
        _check_form(values, _TRAINING | stated, str(path))
        return values, results
    return {}, results


def _check_form(value: Any, form: Any, where: str) -> None:
    """Refuses a part of a record or of results that has not the form, as in `_RECORD`, that a card states."""
    if isinstance(form, tuple):
        if value is None:
            return
        (form,) = form
    try:
        type_validator(where, value, type(form) if isinstance(form, (dict, list)) else form)
    except TypeError as error:
        raise CheckpointError(f"A card cannot state this: {one_line(error)}.") from error
    if isinstance(form, dict):
        for name, inner in form.items():
            if name not in value:
                raise CheckpointError(f"{where}: lacks `{name}`, which a card states.")
            _check_form(value[name], inner, f"{where}: `{name}`")
    elif isinstance(form, list):
        for entry in value:
            _check_form(entry, form[0], where)


def _changed(opened: OpenedSource, described: Mapping[str, Any]) -> list[str] | None:
    """The files that are not those that a record or a metrics.json describes; `None` if it does not say which.

    Weight files are compared by SHA-256 where it is described, else by their size and the first bytes of each tensor.
    """
    files, shards = described.get("files"), {shard.name: shard for shard in opened.checkpoint.shards}
    if not isinstance(files, dict) or not isinstance(described.get("config_sha256"), str):
        return None
    changed = ["config.json"] if described["config_sha256"] != config_digest(opened.raw_config) else []
    for name in sorted(files.keys() | shards.keys()):
        facts, shard = files.get(name), shards.get(name)
        if not isinstance(facts, dict) or shard is None or shard.path is None:
            same = False
        elif facts.get("sha256") is not None:
            same = file_digest(shard.path) == facts["sha256"]
        else:
            _check_form(facts, {"bytes": int, "tensors": dict[str, dict]}, str(opened.folder / RECORD))
            starts = {tensor: each.get("first_bytes") for tensor, each in facts["tensors"].items()}
            same = shard.size == facts["bytes"] and starts == first_bytes(shard.tensors)
        changed += [] if same else [name]
    return changed
