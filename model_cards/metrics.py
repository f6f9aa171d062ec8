"""Results from `metrics.json` files and from lm-evaluation-harness, as rows of a card."""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from inspect import formatannotation
from typing import Any, cast

from huggingface_hub import EvalResult

#: Values of `dataset_path` that name a file format, not a dataset of the Hub.
_READERS = ("arrow", "csv", "generator", "json", "pandas", "parquet", "sql", "text", "webdataset", "xml")
#: The harness evaluates on the first of these that a task has.
_SPLITS = ("test_split", "validation_split")


@dataclass(frozen=True)
class Metric:
    """One measured number, its dataset and split."""

    name: str  # shown in tables: "perplexity"
    value: int | float
    dataset: str  # shown in tables: "WikiText-2"
    split: str
    type: str | None = None  # id in hf.co/metrics; None: the name
    dataset_id: str | None = None  # on the Hub
    config: str | None = None  # of that dataset
    revision: str | None = None  # of that dataset
    task: str | None = None  # name of a benchmark's task
    stderr: int | float | None = None
    samples: int | None = None  # number that were used
    of_samples: int | None = None  # number in the dataset; None: the same
    shots: int | None = None
    note: str | None = None  # how it was measured

    def __post_init__(self) -> None:
        where = f"of the metric {self.name!r} on {self.dataset!r}"
        for each in fields(self):
            value, form = getattr(self, each.name), cast(type, each.type)
            if isinstance(value, bool) or not isinstance(value, form) or value == "":
                raise ValueError(f"`{each.name}` {where} is {value!r}; expected {formatannotation(form)}.")
        if not math.isfinite(self.value):
            raise ValueError(f"`value` {where} is {self.value!r}: no finite number.")

    @property
    def used(self) -> str:
        """The number of samples, and of how many if not all were used."""
        if self.samples is None:
            return ""
        of = "" if self.of_samples in (None, self.samples) else f" of {self.of_samples:,}"
        return f"{self.samples:,}{of} samples"

    def as_eval_result(self, task: str) -> EvalResult:
        """The entry of the Hub's `model-index`, for a model of this `pipeline_tag`."""
        return EvalResult(
            task_type=task,
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
        where: the name of `values` in error messages, such as its file.
    """
    entries = values.get("metrics", [])
    if not isinstance(entries, list):
        raise ValueError(f"{where}: `metrics` is {type(entries).__name__}, expected a list.")
    metrics = []
    for number, entry in enumerate(entries):
        try:
            metrics.append(Metric(**entry))
        except (TypeError, ValueError) as error:  # a field is missing, unknown or wrong: the message names it
            raise ValueError(f"{where}: metrics[{number}]: {error}") from error
    return metrics


def harness_metrics(results: Mapping[str, Any], where: str = "results") -> list[Metric]:
    """The results in a JSON file of lm-evaluation-harness (`results_*.json`, or what `simple_evaluate` returns).

    Groups are left out: their tasks are included one by one.
    """
    for name, default in (("results", None), ("configs", None), ("n-samples", {}), ("n-shot", {})):
        if not isinstance(results.get(name, default), Mapping):
            raise ValueError(f"{where}: no results of lm-evaluation-harness, `{name}` is missing or no object.")
    entries = []
    for task, measured in sorted(results["results"].items()):
        if task not in results["configs"]:  # a group
            continue
        config, counts = results["configs"][task], results.get("n-samples", {}).get(task, {})
        if not all(isinstance(each, Mapping) for each in (measured, config, counts)):
            raise ValueError(f"{where}: no results of lm-evaluation-harness, a part of the task {task!r} is no object.")
        split = next((config[name] for name in _SPLITS if config.get(name)), None)
        if split is None:
            raise ValueError(f"{where}: the configuration of the task {task!r} names no split.")
        path = config.get("dataset_path")
        on_hub = isinstance(path, str) and path not in _READERS and re.fullmatch(r"[\w.-]+(/[\w.-]+)?", path)
        for key, value in sorted(measured.items()):
            metric, comma, filters = key.partition(",")
            if not comma or metric.endswith("_stderr") or isinstance(value, str):
                continue
            stderr = measured.get(f"{metric}_stderr,{filters}")
            entries.append(
                {
                    "name": metric if filters == "none" else f"{metric} ({filters})",
                    "value": value,
                    "type": metric,
                    "dataset": path if on_hub else task,
                    "dataset_id": path if on_hub else None,
                    "config": str(config["dataset_name"]) if on_hub and config.get("dataset_name") else None,
                    "split": split,
                    "task": task,
                    "stderr": stderr if isinstance(stderr, (int, float)) else None,
                    "samples": counts.get("effective"),
                    "of_samples": counts.get("original"),
                    "shots": results.get("n-shot", {}).get(task),
                    "note": "lm-evaluation-harness " + str(results.get("lm_eval_version", "")).strip(),
                }
            )
    return metrics_of({"metrics": entries}, where)


def notes_of(metrics: Iterable[Metric]) -> list[str]:
    """How results were measured: a line for each note, with the names of its metrics."""
    names: dict[str, list[str]] = {}
    for metric in metrics:
        if metric.note:
            names.setdefault(metric.note, []).append(metric.name)
    return [f"{', '.join(dict.fromkeys(each))}: {note}" for note, each in names.items()]
