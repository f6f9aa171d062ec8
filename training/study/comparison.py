"""A comparison study: methods trained under one budget, from scratch or from a checkpoint, paired and resumable."""

import hashlib
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from resformer.configuration import METHODS
from resformer.convert.connected_families import cache_size
from resformer.convert.retrofitting import retrofit
from resformer.convert.source import open_source
from resformer.environment import describe_environment
from resformer.errors import CheckpointError
from resformer.files import fingerprint, locked, replace_text, replacing
from resformer.training.flops import training_flops
from resformer.training.options import OF_A_METHOD, PLAIN, RunSettings, StudyOptions, architecture, refuse_other
from resformer.training.recipe import uses_bf16
from resformer.training.sizes import budget, known_fields, scratch_config, with_fields
from resformer.training.study.data import StudyData, study_data
from resformer.training.study.paired_run import paired_model, paired_run, whole_batches
from resformer.training.study.plot import check_packages, plot
from resformer.training.study.record import add_line, read_record
from resformer.training.study.report import report_of
from resformer.training.untrained import parameter_count

#: In the output of `compare`: what was trained on what, and every run.
RECORD = "runs.jsonl"

_Method = tuple[str, dict[str, Any], RunSettings]


@dataclass(frozen=True)
class _Run:
    """One model to train."""

    size: str
    method: str  # as it is written, with fields and settings of its own
    settings: RunSettings
    seed: int
    config: Any
    backbone: Any
    start: Path | None  # the converted checkpoint; None: random weights

    def model(self) -> PreTrainedModel:
        if self.start is None:
            return paired_model(self.config, self.backbone, self.seed)
        return AutoModelForCausalLM.from_pretrained(self.start, dtype=torch.float32)

    @property
    def key(self) -> tuple[str, str, int]:
        return self.size, self.method, self.seed

    @property
    def place(self) -> Path:
        """Where its files are, below `models` and the like."""
        return Path(*map(_file_name, map(str, self.key)))


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

    @property
    def record(self) -> Path:
        return self.output / RECORD

    def finished(self) -> dict[tuple[str, str, int], dict[str, Any]]:
        """The runs of the record, by size, method and seed."""
        studies = read_record(self.record) if self.record.is_file() else []
        return {(run["size"], run["method"], run["seed"]): run for _, runs in studies for run in runs}

    @property
    def plan(self) -> dict[str, Any]:
        """Options that must stay the same in a study; methods, sizes and seeds can be added, the baseline changed."""
        return {
            "data": {"name": self.data.name, **self.data.fingerprint},
            "start": self.options.start,
            "backbone": self.options.backbone,
            "start_weights": self.start_weights,
            "tokenizer": self.options.tokenizer,
            "block": self.options.block,
            **asdict(self.options.settings),
            "bf16": uses_bf16(self.options.settings.bf16),
        }


def run_study(options: StudyOptions, command: str = "") -> dict[str, Any] | None:
    """Trains what is not trained yet and writes `study.json` and `study.png`; returns what is in the former.

    In the output, `runs.jsonl` is the record, `tokenizer` has the tokenizer and `models` the trained models; until
    the end, `starts` has the converted checkpoints and `unfinished` the checkpoints of a run that was stopped.

    Several processes may call this for one output at the same time: each takes the next run that is in work in no
    other. Those that end while others have runs in work return `None`.
    """
    check_packages()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("A launcher shares each step; here processes share runs: start the command several times.")
    target = Path(os.path.realpath(options.output))
    lock = target.with_name(f".{target.name}.resformer-lock")  # of the output's beginning, and of the report
    with locked(lock, wait=True):
        study = _prepared(options, Path(options.output, "starts"), command)
    # From the first run on each time: a process that had one in work may have been killed.
    while any(_work_on(run, study) for run in study.runs):
        pass
    finished = study.finished()
    if in_work := [run for run in study.runs if run.key not in finished]:
        told = f"In work in other processes: {len(in_work)} runs. The last process to end writes the report."
        tqdm.write(told, file=sys.stderr)
        return None
    with locked(lock, wait=True):
        unfinished = study.output / "unfinished"
        for run in study.runs:  # a process may have died after it recorded one
            shutil.rmtree(unfinished / run.place, ignore_errors=True)
        if not any(path.is_file() for path in unfinished.rglob("*")):  # else those of other methods or sizes
            shutil.rmtree(unfinished, ignore_errors=True)
            shutil.rmtree(study.output / "starts", ignore_errors=True)
        results = [finished[run.key] for run in study.runs]
        described, _ = read_record(study.record)[0]
        report = report_of({**described, "command": command}, results, options.compared_with)
        replace_text(study.output / "study.json", json.dumps(report, indent=2, allow_nan=False) + "\n")
        plot(report, results, study.output / "study.png")
    return report


def _work_on(run: _Run, study: _Study) -> bool:
    """Trains and records a run unless it is done, or in work in another process."""
    folder = study.output / "unfinished" / run.place
    with locked(folder.with_name(f"{folder.name}.lock")) as free:
        if not free or run.key in study.finished():
            return False
        saved = study.options.save_models and run.seed == study.options.first_seed
        save_to = study.output / "models" / run.place if saved else None
        result = paired_run(run.model(), study.data.blocks, run.settings, run.seed, folder=folder, save_to=save_to)
        if save_to is not None:
            study.data.tokenizer.save_pretrained(save_to)
        environment = {key: value for key, value in describe_environment().items() if key != "variables"}
        add_line(study.record, {**_described(run), **result, "environment": environment})
        shutil.rmtree(folder, ignore_errors=True)
    done = study.finished().keys() & {each.key for each in study.runs}
    what = f"{len(done)}/{len(study.runs)} {run.size} {run.method} seed {run.seed}"
    loss = "diverged" if result["loss"] is None else f"held-out loss {result['loss']:.4f}"
    tqdm.write(f"{what}: {loss}, {result['step_seconds'] * 1e3:,.1f} ms a step", file=sys.stderr)
    return True


def plan_study(options: StudyOptions) -> dict[str, Any]:
    """What `run_study` would do. Writes nothing."""
    check_packages()
    with tempfile.TemporaryDirectory() as scratch:
        study = _prepared(options, Path(scratch, "starts"), None)
    finished = study.finished()
    rows = []
    for run in study.runs:
        if run.seed == options.first_seed:
            to_do = sum(replace(run, seed=seed).key not in finished for seed in options.all_seeds)
            operations = training_flops(run.config, options.block) * run.settings.steps * options.batch
            facts = {"parameters": parameter_count(run.config), "training_flops": operations * options.block}
            rows.append({**_described(run), **facts, "to_do": to_do})
    tokens = options.settings.steps * options.settings.batch * options.block
    return {
        "output": options.output,
        **study.plan,
        "seeds": options.seeds,
        "tokens": tokens,
        "epochs": tokens / study.data.fingerprint["training_tokens"],
        "runs": rows,
    }


def _prepared(options: StudyOptions, starts: Path, command: str | None) -> _Study:
    """Reads the data and, with a `command` for the record, begins the output; converted checkpoints go to `starts`."""
    output, methods = Path(options.output), {text: _read_method(text, options) for text in options.all_methods}
    saved, record = output / "tokenizer", output / RECORD
    beginning = f".{record.name}.*"  # of a process that was killed at its first write
    if output.exists() and not (
        output.is_dir() and (record.is_file() or all(path.match(beginning) for path in output.iterdir()))
    ):
        raise CheckpointError(f"{output}: exists and is not a study folder; give another folder.")
    tokenizer = options.tokenizer or options.start or "bpe:4096"
    data = study_data(options, str(saved) if record.is_file() and saved.is_dir() else tokenizer)
    study = _Study(options, data, None if options.start is None else _weights(options.start))
    whole_batches(data.blocks, options.settings.batch)  # raises if there are too few, before anything is written
    if record.is_file():
        for described, _ in read_record(record):
            refuse_other(output, described, study.plan, "study")
    new = [path for path in (output, saved, record, starts) if command is not None and not path.exists()]
    try:
        if record in new:
            size = {"vocabulary": len(data.tokenizer), "bytes_per_token": data.bytes_per_token}
            add_line(record, {"study": {"command": command, **study.plan, **size}})
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


def _runs_from_scratch(options: StudyOptions, methods: Mapping[str, _Method], data: StudyData) -> list[_Run]:
    runs = []
    for size in options.sizes or ("tiny",):
        backbone = scratch_config(PLAIN, size, data.tokenizer, options.block, options.backbone)
        _, _, rate = budget(parameter_count(backbone), training_flops(backbone, options.block))
        for text, (method, values, settings) in methods.items():
            if settings.learning_rate is None:
                settings = replace(settings, learning_rate=rate)
            config = scratch_config(method, size, data.tokenizer, options.block, options.backbone, **values)
            runs += [_Run(size, text, settings, seed, config, backbone, None) for seed in options.all_seeds]
    return runs


def _weights(checkpoint: str) -> str:
    """The commit of a checkpoint on the Hub, or a digest of one on this disk: of the first bytes of each tensor."""
    source = open_source(checkpoint)
    files = sorted(source.folder.glob("*.safetensors")) if source.revision is None else ()
    return source.revision or hashlib.sha256(json.dumps([*map(fingerprint, files)]).encode()).hexdigest()


def _continued_runs(options: StudyOptions, methods: Mapping[str, _Method], data: StudyData, starts: Path) -> list[_Run]:
    """Converts the checkpoint to each architecture, once, into a folder of `starts`."""
    assert options.start is not None
    size = Path(options.start).resolve().name if Path(options.start).exists() else options.start.rpartition("/")[2]
    if size.isdecimal():  # a model of another study: models/SIZE/METHOD/SEED
        size = "-".join(Path(options.start).resolve().parts[-2:])
    runs = []
    for text, (method, values, settings) in methods.items():
        folder = starts / _file_name(architecture(text))
        if not folder.exists():
            # A lossy conversion is allowed: the first point of its curve shows the loss.
            how: dict[str, Any] = {"lossy": True, "link": True, "verify": "headers", "progress": False}
            retrofit(options.start, folder, method, **how, **values)
        config = AutoConfig.from_pretrained(folder)
        decoder = config.get_text_config()
        if options.block > (most := decoder.max_position_embeddings):
            raise ValueError(f"block is {options.block}, but {options.start} has {most} positions.")
        if len(data.tokenizer) > decoder.vocab_size:
            told = f"The tokenizer has {len(data.tokenizer):,} tokens, but {options.start} {decoder.vocab_size:,}"
            raise ValueError(f"{told}; leave --tokenizer out.")
        runs += [_Run(size, text, settings, seed, config, config, folder) for seed in options.all_seeds]
    return runs


def _file_name(name: str) -> str:
    return re.sub(r"[^\w.-]+", "-", name)


def _read_method(text: str, options: StudyOptions) -> _Method:
    """The name of a method, the fields of its configuration, and the settings of its training."""
    name, values = with_fields(text, METHODS, "method", {*known_fields(options.backbone), *OF_A_METHOD})
    own = {key: values.pop(key) for key in OF_A_METHOD if key in values}
    return name, values, replace(options.settings, **own)


def _described(run: _Run) -> dict[str, Any]:
    return {
        "size": run.size,
        "method": run.method,
        "architecture": architecture(run.method),
        "seed": run.seed,
        **{name: getattr(run.settings, name) for name in OF_A_METHOD},
        "cache_bytes_per_token": cache_size(run.config, "bfloat16")[0],
    }
