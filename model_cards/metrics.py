"""Measured results, from the files that hold them to the forms that a card takes. Nothing is filled in."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import yaml
from huggingface_hub import EvalResult, EvalResultEntry, eval_result_entries_to_yaml

__all__ = ["Metric", "eval_result_files", "harness_metrics", "metrics_of"]

#: Values of `dataset_path` that name a reader of files, not a dataset of the Hub.
_READERS = ("arrow", "csv", "generator", "json", "pandas", "parquet", "sql", "text", "webdataset", "xml")
#: The first of these that a task names is the one that the harness measures on.
_SPLITS = ("test_split", "validation_split", "training_split")


@dataclass(frozen=True)
class Metric:
    """One number, and what it was measured on."""

    name: str  # as people say it: "perplexity"
    value: float
    dataset: str  # as people say it
    split: str
    type: str | None = None  # of hf.co/metrics; None: the name
    dataset_id: str | None = None  # on the Hub
    config: str | None = None  # of that dataset
    revision: str | None = None  # of that dataset
    task: str | None = None  # of a benchmark
    stderr: float | None = None
    samples: int | None = None  # that were used ...
    of_samples: int | None = None  # ... of so many; None: all
    shots: int | None = None
    method: str | None = None  # of a study: which of its models this is about
    note: str | None = None  # what made it

    def __post_init__(self) -> None:
        for name in ("name", "dataset", "split"):
            if not isinstance(getattr(self, name), str) or not getattr(self, name).strip():
                raise ValueError(f"A metric needs a `{name}`, a text; found {getattr(self, name)!r} in {self}.")
        if isinstance(self.value, bool) or not isinstance(self.value, (int, float)) or not math.isfinite(self.value):
            raise ValueError(f"`value` of the metric {self.name!r} on {self.dataset!r} is {self.value!r}: no number.")

    def as_eval_result(self) -> EvalResult:
        """For `model-index`."""
        return EvalResult(
            task_type="text-generation",
            dataset_type=self.dataset_id or re.sub(r"[^\w.-]+", "-", self.dataset).strip("-").lower(),
            dataset_name=self.dataset,
            dataset_config=self.config,
            dataset_split=self.split,
            dataset_revision=self.revision,
            metric_type=self.type or self.name,
            metric_name=self.name,
            metric_value=self.value,
        )


def metrics_of(values: Mapping[str, Any], where: str = "metrics") -> list[Metric]:
    """The entries of `values["metrics"]`, each a mapping with the fields of `Metric`.

    Args:
        where: what to call `values` in errors, its file for one.

    Raises:
        ValueError: an entry has no name, value, dataset or split, or a field that is not known.
    """
    entries = values.get("metrics", [])
    if not isinstance(entries, list):
        raise ValueError(f"{where}: `metrics` is {type(entries).__name__}, expected a list.")
    known = {field.name for field in fields(Metric)}
    found = []
    for number, entry in enumerate(entries):
        place = f"{where}: metrics[{number}]"
        if not isinstance(entry, Mapping):
            raise ValueError(f"{place} is {type(entry).__name__}, expected a mapping.")
        for name in ("name", "value", "dataset", "split"):
            if name not in entry:
                raise ValueError(f"{place} has no `{name}`: a card does not print a number without it.")
        if unknown := sorted(entry.keys() - known):
            raise ValueError(f"{place} has the unknown field {unknown[0]!r}: expected {', '.join(sorted(known))}.")
        found.append(Metric(**entry))
    return found


def harness_metrics(results: Mapping[str, Any], where: str = "results") -> list[Metric]:
    """What lm-evaluation-harness measured, from the JSON that it writes (`results_*.json`, or `simple_evaluate`'s).

    Groups are left out: their tasks are there.

    Raises:
        ValueError: these are no such results, or a task does not say what it was measured on.
    """
    for name in ("results", "configs"):
        if not isinstance(results.get(name), Mapping):
            raise ValueError(f"{where}: no results of lm-evaluation-harness, `{name}` is missing.")
    found = []
    for task, measured in sorted(results["results"].items()):
        if task not in results["configs"]:  # a group
            continue
        config = results["configs"][task]
        split = next(
            (config[kind] for kind in ("test_split", "validation_split", "training_split") if config.get(kind)), None
        )
        if split is None:
            raise ValueError(f"{where}: the configuration of the task {task!r} names no split.")
        path = config.get("dataset_path")
        on_hub = isinstance(path, str) and path not in _READERS and re.fullmatch(r"[\w.-]+(/[\w.-]+)?", path)
        counts = results.get("n-samples", {}).get(task, {})
        for key, value in sorted(measured.items()):
            metric, comma, filters = key.partition(",")
            if not comma or metric.endswith("_stderr") or isinstance(value, str):
                continue
            stderr = measured.get(f"{metric}_stderr,{filters}")
            found.append(
                Metric(
                    name=metric if filters == "none" else f"{metric} ({filters})",
                    value=value,
                    type=metric,
                    dataset=path if on_hub else task,
                    dataset_id=path if on_hub else None,
                    config=config.get("dataset_name") if on_hub else None,
                    split=split,
                    task=task,
                    stderr=stderr if isinstance(stderr, (int, float)) else None,
                    samples=counts.get("effective"),
                    of_samples=counts.get("original"),
                    shots=results.get("n-shot", {}).get(task),
                    note="lm-evaluation-harness " + str(results.get("lm_eval_version", "")).strip(),
                )
            )
    return found


def eval_result_files(metrics: Iterable[Metric]) -> dict[str, str]:
    """`.eval_results/NAME.yaml` -> its text, the Hub's form for results on its own datasets, one file a score.

    Results on other datasets, or on a part of one, have no such form: they stay in the card and its `model-index`.
    """
    files = {}
    for metric in metrics:
        if metric.dataset_id is None or metric.task is None or metric.of_samples not in (None, metric.samples):
            continue
        said = [metric.note, metric.name, None if metric.shots is None else f"{metric.shots}-shot", samples_of(metric)]
        entry = EvalResultEntry(
            dataset_id=metric.dataset_id,
            task_id=metric.task,
            value=metric.value,
            dataset_revision=metric.revision,
            notes=", ".join(filter(None, said)),
        )
        name = re.sub(r"[^\w.-]+", "-", f"{metric.dataset_id}_{metric.task}_{metric.name}").strip("-.")
        files[f".eval_results/{name}.yaml"] = yaml.safe_dump(eval_result_entries_to_yaml([entry]), sort_keys=False)
    return files


def samples_of(metric: Metric) -> str:
    """How many samples, and of how many if not of all."""
    if metric.samples is None:
        return ""
    if metric.of_samples in (None, metric.samples):
        return f"{metric.samples:,} samples"
    return f"{metric.samples:,} of {metric.of_samples:,} samples"


def table_rows(metrics: Sequence[Metric]) -> list[dict[str, str]]:
    """The rows of a card's table of results."""
    return [
        {
            "what": metric.name + ("" if metric.task in (None, metric.dataset) else f" ({metric.task})"),
            "dataset": metric.dataset + ("" if metric.config is None else f" ({metric.config})"),
            "split": metric.split,
            "shots": "" if metric.shots is None else str(metric.shots),
            "samples": samples_of(metric),
            "value": f"{metric.value:.4g}" + ("" if metric.stderr is None else f" ± {metric.stderr:.2g}"),
        }
        for metric in metrics
    ]
