"""A comparison study: methods trained under one budget, from scratch or from a checkpoint, paired and resumable."""

import hashlib
import json
import math
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from tqdm import tqdm

from resformer.configuration import METHODS, ResFormerConfig, cache_bytes_per_token
from resformer.convert.retrofitting import retrofit
from resformer.convert.safetensors_format import first_bytes
from resformer.convert.source import open_source
from resformer.environment import describe_environment
from resformer.errors import CheckpointError, did_you_mean
from resformer.files import locked, replace_text, replacing
from resformer.model_cards.metrics import architecture_digest
from resformer.modeling import ResFormerForCausalLM
from resformer.training.options import OF_A_METHOD, PLAIN, RunSettings, StudyOptions, architecture, check_same
from resformer.training.packing import PackedBlocks
from resformer.training.recipe import uses_bf16
from resformer.training.sizes import CONFIG_FIELDS, SIZES, scratch_config
from resformer.training.study.data import StudyData, study_data
from resformer.training.study.paired_run import paired_model, paired_run, run_arguments, whole_batches
from resformer.training.study.plot import check_packages, plot
from resformer.training.study.table import pooled_error, rows_of
from resformer.training.untrained import parameter_count


@dataclass(frozen=True)
class _Method:
    """A method as it is written, read."""

    text: str
    name: str
    fields: dict[str, Any]  # of ResFormerConfig
    settings: RunSettings


@dataclass(frozen=True)
class _Run:
    """One model to train."""

    size: str
    method: _Method
    seed: int
    config: ResFormerConfig
    backbone: ResFormerConfig
    start: Path | None  # the converted checkpoint; None: random weights

    def model(self) -> ResFormerForCausalLM:
        if self.start is None:
            return paired_model(self.config, self.backbone, self.seed)
        return ResFormerForCausalLM.from_pretrained(self.start, dtype=torch.float32)

    @property
    def place(self) -> Path:
        """Where its files are, below `runs` and the like."""
        return Path(*map(_file_name, (self.size, self.method.text, str(self.seed))))


@dataclass
class _Study:
    """The data, the tokenizer and the runs of a study."""

    options: StudyOptions
    data: StudyData
    start_weights: str | None  # which the checkpoint has: see `_weights`
    runs: list[_Run] = field(default_factory=list)

    @property
    def output(self) -> Path:
        return Path(self.options.output)

    def file(self, run: _Run) -> Path:
        return self.output / "runs" / run.place.with_name(f"{run.place.name}.json")

    @property
    def plan(self) -> dict[str, Any]:
        """Options that must stay the same in a study; methods, sizes and seeds can be added, the baseline changed."""
        return {
            "data": {"name": self.data.name, **self.data.fingerprint},
            "start": self.options.start,
            "start_weights": self.start_weights,
            "tokenizer": self.options.tokenizer,
            "block": self.options.block,
            "save_models": self.options.save_models,
            **asdict(self.options.settings),
            "bf16": uses_bf16(self.options.settings.bf16),
        }


def run_study(options: StudyOptions, command: str = "") -> dict[str, Any] | None:
    """Trains what is not trained yet and writes `study.json` and `study.png`; returns what is in the former.

    Below the output, `runs` has a file for each run, `tokenizer` the tokenizer and `models` the trained models; until
    the end, `starts` has the converted checkpoints and `unfinished` the checkpoints of a run that was stopped. Under
    `accelerate launch` every process calls this; the first one writes, and the others return `None`.

    Several processes may call this for one output at the same time: each takes the next run that is in work in no
    other. Those that end while others have runs in work return `None`; the last one writes the report.

    Raises:
        CheckpointError: the output holds something else, or the data or the tokenizer cannot be read.
        ImportError: matplotlib or scipy is missing.
        ValueError: an option is out of its range.
    """
    check_packages()
    first = run_arguments(options.settings, Path(options.output), 0).process_index == 0  # joins the processes, too
    target = Path(os.path.realpath(options.output))
    lock = target.with_name(f".{target.name}.resformer-lock")  # of the output's beginning, and of the report
    with PartialState().main_process_first(), locked(lock, wait=True) if first else nullcontext():
        study = _prepared(options, Path(options.output, "starts"), write=first)
    # From the first run on each time: a process that had one in work may have been killed.
    while any(_work_on(run, study, first=first) for run in study.runs):
        pass
    if not first:
        return None
    if in_work := [run for run in study.runs if not study.file(run).is_file()]:
        told = f"In work in other processes: {len(in_work)} runs. The last process to end writes the report."
        tqdm.write(told, file=sys.stderr)
        return None
    with locked(lock, wait=True):
        unfinished = study.output / "unfinished"
        if not any(path.is_file() for path in unfinished.rglob("*")):  # else those of other methods or sizes
            shutil.rmtree(unfinished, ignore_errors=True)
            shutil.rmtree(study.output / "starts", ignore_errors=True)
        results = [json.loads(study.file(run).read_text(encoding="utf-8")) for run in study.runs]
        report = _report(study, results, command)
        _write_json(study.output / "study.json", report)
        plot(report, results, study.output / "study.png")
    return report


def _work_on(run: _Run, study: _Study, *, first: bool) -> bool:
    """Trains and writes a run unless it is done, or in work in another process that is not of this launch."""
    folder = study.output / "unfinished" / run.place
    pending = first and not study.file(run).is_file()
    with locked(folder.with_name(f"{folder.name}.lock")) if pending else nullcontext(False) as free:
        if not broadcast_object_list([free and not study.file(run).is_file()])[0]:
            return False
        saved = study.options.save_models and run.seed == study.options.first_seed
        save_to = study.output / "models" / run.place if saved else None
        settings = run.method.settings
        result = paired_run(run.model(), study.data.blocks, settings, run.seed, folder=folder, save_to=save_to)
        if first:
            if save_to is not None:
                study.data.tokenizer.save_pretrained(save_to)
            environment = {key: value for key, value in describe_environment().items() if key != "variables"}
            _write_json(study.file(run), {**_described(run), **result, "environment": environment})
            done = sum(study.file(run).is_file() for run in study.runs)
            what = f"{done}/{len(study.runs)} {run.size} {run.method.text} seed {run.seed}"
            loss = "diverged" if result["loss"] is None else f"held-out loss {result['loss']:.4f}"
            tqdm.write(f"{what}: {loss}, {result['step_seconds'] * 1e3:,.1f} ms a step", file=sys.stderr)
        PartialState().wait_for_everyone()
    return True


def plan_study(options: StudyOptions) -> dict[str, Any]:
    """The runs of `run_study`, and their time at the speed of the first one's first steps. Writes nothing."""
    check_packages()
    short = RunSettings(**{**asdict(options.settings), "steps": 5, "evaluations": 1})
    seconds = 0.0
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        study = _prepared(options, Path(scratch, "starts"), write=False)
        curve = study.data.blocks.held_out
        few = PackedBlocks(curve.tokens.slice(0, len(curve) * curve.block), curve.starts, curve.block)
        blocks = replace(study.data.blocks, held_out=few)  # the whole held-out text would take longer than the steps
        for size in dict.fromkeys(run.size for run in study.runs):
            of_size = [run for run in study.runs if run.size == size]
            measured = paired_run(of_size[0].model(), blocks, short, 0, folder=Path(scratch, "unfinished"))
            at_the_end = len(curve.whole) / len(curve)
            evaluating = (options.settings.evaluations + 1 + at_the_end) * measured["evaluation_seconds"]
            to_do = [run for run in of_size if not study.file(run).is_file()]
            seconds += sum(run.method.settings.steps * measured["step_seconds"] + evaluating for run in to_do)
            for run in (run for run in of_size if run.seed == options.first_seed):
                left = sum(each.method == run.method for each in to_do)
                rows.append({**_described(run), "parameters": parameter_count(run.config), "to_do": left})
    tokens = options.settings.steps * options.settings.batch * options.block
    return {
        "output": options.output,
        **study.plan,
        "seeds": options.seeds,
        "tokens": tokens,
        "epochs": tokens / study.data.fingerprint["training_tokens"],
        "runs": rows,
        "seconds": seconds,
    }


def _prepared(options: StudyOptions, starts: Path, *, write: bool) -> _Study:
    """Reads the data and, if it is to `write`, starts the output; converted checkpoints go to `starts`."""
    output, methods = Path(options.output), [_read_method(text, options.settings) for text in options.all_methods]
    saved, record = output / "tokenizer", output / "plan.json"
    beginning = f".{record.name}.*.partial"  # of a process that was killed at its first write
    if output.exists() and not (
        output.is_dir() and (record.is_file() or all(path.match(beginning) for path in output.iterdir()))
    ):
        raise CheckpointError(f"{output}: exists and is not a study folder; give another folder.")
    tokenizer = options.tokenizer or options.start or "bpe:4096"
    data = study_data(options, str(saved) if record.is_file() and saved.is_dir() else tokenizer)
    study = _Study(options, data, None if options.start is None else _weights(options.start))
    whole_batches(data.blocks, options.settings.batch)  # raises if there are too few, before anything is written
    if record.is_file():
        check_same(record, study.plan, "study")
    new = [path for path in (output, saved, record, starts) if write and not path.exists()]
    try:
        if record in new:
            _write_json(record, study.plan)
        if saved in new:
            with replacing(saved, made_by="compare", force=True) as folder:
                data.tokenizer.save_pretrained(folder)
        if options.start is None:
            runs = _runs_from_scratch(options, methods, data)
        else:
            runs = _continued_runs(options, methods, data, starts)
        study.runs = sorted(runs, key=lambda run: run.seed)  # a study that is cut short has whole pairs
        if len({run.place for run in study.runs}) < len(study.runs):
            raise ValueError("Two of the methods, or of the sizes, have the same name but for punctuation.")
    except BaseException:
        for path in new:
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        raise
    return study


def _write_json(path: Path, value: Any) -> None:
    replace_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def _runs_from_scratch(options: StudyOptions, methods: Sequence[_Method], data: StudyData) -> list[_Run]:
    runs = []
    for size in options.sizes or ("tiny",):
        name, overrides = _parsed(size, SIZES, "size", CONFIG_FIELDS)
        backbone = scratch_config(PLAIN, name, data.tokenizer, options.block, **overrides)
        for method in methods:
            values = {**overrides, **method.fields}
            config = scratch_config(method.name, name, data.tokenizer, options.block, **values)
            runs += [_Run(size, method, seed, config, backbone, None) for seed in options.all_seeds]
    return runs


def _weights(checkpoint: str) -> str:
    """The commit of a checkpoint on the Hub, or a digest of one on this disk: of the first bytes of each tensor."""
    source = open_source(checkpoint, resformer=True)
    tensors = source.fetch(headers_only=True).checkpoint.tensors.values() if source.revision is None else ()
    return source.revision or hashlib.sha256(json.dumps(first_bytes(tensors), sort_keys=True).encode()).hexdigest()


def _continued_runs(options: StudyOptions, methods: Sequence[_Method], data: StudyData, starts: Path) -> list[_Run]:
    """Converts the checkpoint to each architecture, once, into a folder of `starts`."""
    assert options.start is not None
    size = Path(options.start).resolve().name if Path(options.start).exists() else options.start.rpartition("/")[2]
    if size.isdecimal():  # a model of another study: models/SIZE/METHOD/SEED
        size = "-".join(Path(options.start).resolve().parts[-2:])
    runs = []
    for method in methods:
        folder = starts / _file_name(architecture(method.text))
        if not folder.exists():
            # A lossy conversion is allowed: the first point of its curve shows the loss.
            retrofit(
                options.start, folder, method.name,
                lossy=True, link=True, verify="headers", progress=False, **method.fields,
            )  # fmt: skip
        config = ResFormerConfig.from_pretrained(folder)
        if options.block > config.max_position_embeddings:
            raise ValueError(
                f"block is {options.block}, but {options.start} has {config.max_position_embeddings} positions."
            )
        if len(data.tokenizer) > config.vocab_size:
            raise ValueError(
                f"The tokenizer has {len(data.tokenizer):,} tokens, but {options.start} {config.vocab_size:,}; give it "
                "the checkpoint's own with --tokenizer."
            )
        runs += [_Run(size, method, seed, config, config, folder) for seed in options.all_seeds]
    return runs


def _file_name(name: str) -> str:
    return re.sub(r"[^\w.-]+", "-", name)


def _read_method(text: str, settings: RunSettings) -> _Method:
    name, values = _parsed(text, METHODS, "method", {*CONFIG_FIELDS, *OF_A_METHOD})
    own = {key: values.pop(key) for key in OF_A_METHOD if key in values}
    return _Method(text, name, values, replace(settings, **own))


def _parsed(text: str, known: Mapping[str, Any], what: str, allowed: Collection[str]) -> tuple[str, dict[str, Any]]:
    """`NAME:FIELD=VALUE...` as a known name and the fields, their values read as JSON."""
    name, *pairs = text.split(":")
    if name not in known:
        raise ValueError(f"Unknown {what} {name!r}: expected one of {', '.join(known)}.")
    values = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or key not in allowed:
            hint = did_you_mean(key, allowed) if equals else ""
            settings = f", nor of {', '.join(OF_A_METHOD)}" if what == "method" else ""
            raise ValueError(f"{what} {text}: {pair!r} is no FIELD=VALUE of a ResFormerConfig{settings}.{hint}")
        try:
            values[key] = json.loads(value)
        except json.JSONDecodeError:
            values[key] = value
    return name, values


def _described(run: _Run) -> dict[str, Any]:
    return {
        "size": run.size,
        "method": run.method.text,
        "architecture": architecture(run.method.text),
        "seed": run.seed,
        **{name: getattr(run.method.settings, name) for name in OF_A_METHOD},
        "cache_bytes_per_token": cache_bytes_per_token(run.config),
    }


def _report(study: _Study, results: Sequence[Mapping[str, Any]], command: str) -> dict[str, Any]:
    baseline = study.options.compared_with
    sizes = rows_of(results, baseline, study.data.groups)
    for row in (row for rows in sizes.values() for row in rows):
        loss = row["loss"]
        row["bits_per_byte"] = None if loss is None else loss / math.log(2) / study.data.bytes_per_token
    environments: list[Any] = []
    for result in results:
        if result["environment"] not in environments:
            environments.append(result["environment"])
    return {
        "command": command,
        **study.plan,
        "shapes": {run.size: run.backbone.to_diff_dict() for run in study.runs},
        "vocabulary": len(study.data.tokenizer),
        "bytes_per_token": study.data.bytes_per_token,
        "sizes": sizes,
        "baseline": baseline,
        "held_out_groups": study.data.groups,
        "notes": _notes(study, sizes, results[0]["held_out"]["tokens"]),
        "metrics": _metrics(study, sizes),
        "environments": environments,
    }


def _notes(study: _Study, sizes: Mapping[str, Sequence[Mapping[str, Any]]], tokens: int) -> list[str]:
    options = study.options
    budget = f"{options.settings.steps:,} steps of {options.settings.batch} x {options.block} tokens"
    split = any(row["choice_loss"] is not None for rows in sizes.values() for row in rows)
    half = "the half for reports of " if split else ""
    rest = "; the other half is for choices, as of a learning rate" if split else ""
    notes = [
        f"Loss: nats per token after {budget} (or the method's own steps), on {half}the held-out text ({tokens:,} "
        f"tokens of {study.data.fingerprint['held_out_documents']:,} documents{rest}). Δ: loss minus that of "
        f"{options.compared_with}, the mean of the seeds. FLOPs: relative to {options.compared_with}'s."
    ]
    for size, rows in sizes.items():
        losses = {row["method"]: row["losses"] for row in rows}
        if None in losses[options.compared_with]:
            notes.append(f"{size}: no differences, since {options.compared_with} diverged.")
        elif (error := pooled_error(losses)) is None:
            notes.append(f"{size}: one {'seed' if options.seeds == 1 else 'method'}, no interval over seeds.")
        else:
            notes.append(
                f"{size}: [pooled] are simultaneous 95 % intervals over seeds for all {error.comparisons} comparisons "
                f"(Dunnett), with a pooled standard error of {error.standard_error:.4f}, {error.degrees_of_freedom} "
                "degrees of freedom; [own] are 95 % intervals of each method's own paired t-test, and p is its p-value "
                "with Holm's correction."
            )
        if diverged := [method for method in losses if None in losses[method]]:
            notes.append(f"{size}: left out, since a run diverged: {', '.join(diverged)}.")
    settings = [run.method.settings for run in study.runs]
    if len({(own.learning_rate, own.connection_learning_rate) for own in settings}) > 1:
        notes.append(
            "The methods have different learning rates. A difference is then one of rates, too, unless each method has "
            "its best one."
        )
    groups = study.data.groups
    drawn = "these held-out documents" if groups is None else "the groups of these held-out documents"
    return [*notes, f"[over documents]: 95 % of a bootstrap of {drawn}, for these models; not simultaneous."]


def _metrics(study: _Study, sizes: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """The results that cards print, by the fields of `resformer.model_cards.Metric`."""
    options = study.options
    seeds = "1 seed" if options.seeds == 1 else f"mean of {options.seeds} seeds"
    seeds += ", from scratch" if options.start is None else ", continued from the checkpoint"
    runs = {(run.size, run.method.text): run for run in study.runs}
    metrics: list[dict[str, Any]] = []

    for size, row in ((size, row) for size, rows in sizes.items() for row in rows if row["loss"] is not None):
        run = runs[size, row["method"]]
        budget = f"{run.method.settings.steps * options.settings.batch * options.block:,} tokens, {seeds}"
        note = f"{size}, {row['parameters']:,} parameters, {budget}"
        place = size if row["method"] == row["architecture"] else f"{size}, {row['method']}"
        common = {
            "dataset": study.data.name,
            "split": "held-out",
            "method": row["architecture"],
            "model": architecture_digest(run.config),
        }
        metrics.append({"name": f"loss, {place}", "type": "loss", "value": row["loss"], **common, "note": note})
        if (difference := row["difference"]) is not None:
            if difference["low"] is not None:
                note += f"; simultaneous 95 % interval {difference['low']:+.4f} to {difference['high']:+.4f}"
                if (own := difference["own"]) is not None:
                    note += f", p {own['holm']:.3f} by its own t-test with Holm's correction"
            name = f"loss minus {options.compared_with}'s, {place}"
            metrics.append({"name": name, "value": difference["mean"], **common, "note": note})
    return metrics
