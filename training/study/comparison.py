"""A comparison study: methods trained under one budget, from scratch or from a checkpoint, paired and resumable."""

import difflib
import json
import math
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from tqdm import tqdm
from transformers import PreTrainedConfig

from resformer.configuration import METHODS, ResFormerConfig, cache_bytes_per_token
from resformer.convert.retrofitting import retrofit
from resformer.environment import describe_environment
from resformer.errors import CheckpointError, brief
from resformer.files import replace_text, replacing
from resformer.modeling import ResFormerForCausalLM
from resformer.training.data import SAMPLE_BY
from resformer.training.study.data import StudyData, study_data
from resformer.training.study.paired_run import RunSettings, paired_model, paired_run, whole_batches
from resformer.training.study.plot import check_packages, plot
from resformer.training.study.table import BASELINE, rows_of

__all__ = ["SIZES", "StudyOptions", "names", "plan_study", "run_study"]

#: Shapes by name; 82m and 180m are the ResFormer paper's, whose vocabulary of 50,257 makes them that large. The narrow
#: ones start at sqrt(2 / (5 hidden_size)), arXiv 1910.05895: Llama's 0.02 is for wide models, and leaves narrow ones
#: at the loss of a unigram model for hundreds of steps.
SIZES: dict[str, dict[str, float]] = {
    "tiny": {
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "hidden_size": 128,
        "intermediate_size": 448,
        "initializer_range": 0.056,
    },
    "10m": {
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "hidden_size": 256,
        "intermediate_size": 896,
        "initializer_range": 0.04,
    },
    "82m": {"num_hidden_layers": 8, "num_attention_heads": 8, "hidden_size": 512, "intermediate_size": 1792},
    "180m": {"num_hidden_layers": 12, "num_attention_heads": 12, "hidden_size": 768, "intermediate_size": 2688},
}
_FIELDS = {field.name for field in fields(ResFormerConfig)} - {field.name for field in fields(PreTrainedConfig)}


@dataclass(frozen=True)
class StudyOptions:
    """The options of `resformer compare`.

    Raises:
        ValueError: a value is out of its range.
    """

    output: str
    settings: RunSettings
    methods: Sequence[str] = (BASELINE, "resformer")  # NAME[:FIELD=VALUE...]; the baseline is always among them
    start: str | None = None  # a checkpoint, which `retrofit` converts to every method; None: from scratch
    sizes: Sequence[str] = ()  # NAME[:FIELD=VALUE...]; none: tiny, or the checkpoint's
    seeds: int = 3
    data: Sequence[str] = ()  # as of `load_documents`; none: Python's standard library
    split: str = "train"
    text_column: str = "text"
    sample_by: str = "document"
    tokenizer: str | None = None  # bytes, bpe:N, a folder, a Hub id; None: bpe:4096, or the checkpoint's
    block: int = 512
    held_out: float = 0.02
    held_out_blocks: int = 128
    save_models: bool = False  # those of the first seed

    def __post_init__(self) -> None:
        numbers = {"seeds": self.seeds, "held_out_blocks": self.held_out_blocks} | {
            name: getattr(self.settings, name)
            for name in ("steps", "batch", "micro_batch", "learning_rate", "evaluations")
        }
        for name, value in numbers.items():
            if value is not None and not value > 0:
                raise ValueError(f"{name} is {value}; expected more than 0.")
        if self.block < 2:
            raise ValueError(f"block is {self.block}; a sequence needs 2 tokens at least, one to predict the other.")
        if not 0 < self.held_out < 1:
            raise ValueError(f"held_out is {self.held_out}; expected a share of the documents between 0 and 1.")
        if not 0 <= self.settings.warmup < 1:
            raise ValueError(f"warmup is {self.settings.warmup}; expected a share of the steps from 0 to less than 1.")
        if self.sample_by not in SAMPLE_BY:
            raise ValueError(f"sample_by is {self.sample_by!r}; expected one of {', '.join(SAMPLE_BY)}.")
        if self.start is not None and self.sizes:
            raise ValueError(
                f"sizes are {', '.join(self.sizes)}, but the size is that of {self.start}; give one of them."
            )

    @property
    def all_methods(self) -> list[str]:
        return list(dict.fromkeys((BASELINE, *self.methods)))


def names(text: str) -> list[str]:
    """The names of a list such as `svformer,transformer:num_key_value_heads=4`; lists among the values keep commas."""
    return [name.strip() for name in re.split(r",(?=\s*[a-z0-9]*[a-z])", text) if name.strip()]


@dataclass(frozen=True)
class _Run:
    """One model to train."""

    size: str
    method: str
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
        return Path(*map(_file_name, (self.size, self.method, str(self.seed))))


@dataclass
class _Study:
    """The data, the tokenizer and the runs of a study."""

    options: StudyOptions
    data: StudyData
    runs: list[_Run] = field(default_factory=list)

    @property
    def output(self) -> Path:
        return Path(self.options.output)

    def file(self, run: _Run) -> Path:
        return self.output / "runs" / run.place.with_name(f"{run.place.name}.json")

    @property
    def plan(self) -> dict[str, Any]:
        """Options that must stay the same in a study; methods, sizes and seeds can be added to it."""
        return {
            "data": {"name": self.data.name, **self.data.fingerprint},
            "start": self.options.start,
            "tokenizer": self.options.tokenizer,
            "block": self.options.block,
            "save_models": self.options.save_models,
            **asdict(self.options.settings),
        }


def run_study(options: StudyOptions, command: str = "") -> dict[str, Any] | None:
    """Trains what is not trained yet and writes `study.json` and `study.png`; returns what is in the former.

    Below the output, `runs` has a file for each run, `tokenizer` the tokenizer and `models` the trained models; until
    the end, `starts` has the converted checkpoints and `unfinished` the checkpoints of a run that was stopped. Under
    `accelerate launch` every process calls this; the first one writes, and the others return `None`.

    Raises:
        CheckpointError: the output holds something else, or the data or the tokenizer cannot be read.
        ImportError: matplotlib or scipy is missing.
        ValueError: an option is out of its range.
    """
    check_packages()
    first = options.settings.arguments(Path(options.output), 0).process_index == 0  # joins the processes, too
    with PartialState().main_process_first():
        study = _prepared(options, Path(options.output, "starts"), write=first)
    pending = [run for run in study.runs if not study.file(run).is_file()]
    PartialState().wait_for_everyone()  # the first one is about to write such files
    environment = {key: value for key, value in describe_environment().items() if key != "variables"}
    with _progress(len(pending), options.settings.steps, quiet=not first) as (on_step, on_run):
        for number, run in enumerate(pending, start=1):
            result = paired_run(
                run.model(),
                study.data.blocks,
                options.settings,
                run.seed,
                folder=study.output / "unfinished" / run.place,
                save_to=study.output / "models" / run.place if options.save_models and run.seed == 0 else None,
                on_step=on_step,
            )
            if first:
                if options.save_models and run.seed == 0:
                    study.data.tokenizer.save_pretrained(study.output / "models" / run.place)
                _write_json(study.file(run), {**_described(run), **result, "environment": environment})
                on_run(f"{number}/{len(pending)} {run.size} {run.method} seed {run.seed}", result)
            PartialState().wait_for_everyone()
    if not first:
        return None
    unfinished = study.output / "unfinished"
    if not any(path.is_file() for path in unfinished.rglob("*")):  # else those of other methods or sizes
        shutil.rmtree(unfinished, ignore_errors=True)
    shutil.rmtree(study.output / "starts", ignore_errors=True)
    results = [json.loads(study.file(run).read_text(encoding="utf-8")) for run in study.runs]
    report = _report(study, results, command)
    _write_json(study.output / "study.json", report)
    plot(report, results, study.output / "study.png")
    return report


def plan_study(options: StudyOptions) -> dict[str, Any]:
    """The runs of `run_study`, and their time at the speed of the baseline's first steps. Writes nothing.

    Raises: as `run_study`.
    """
    check_packages()
    short = RunSettings(**{**asdict(options.settings), "steps": 5, "evaluations": 1})
    seconds = 0.0
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        study = _prepared(options, Path(scratch, "starts"), write=False)
        for size in dict.fromkeys(run.size for run in study.runs):
            of_size = [run for run in study.runs if run.size == size]
            measured = paired_run(of_size[0].model(), study.data.blocks, short, 0, folder=Path(scratch, "unfinished"))
            each = options.settings.steps * measured["step_seconds"]
            each += (options.settings.evaluations + 1) * measured["evaluation_seconds"]
            for run in of_size:
                done = study.file(run).is_file()
                seconds += 0 if done else each
                if run.seed == 0:
                    rows.append({**_described(run), "parameters": _parameters(run.config), "to_do": 0})
                    del rows[-1]["seed"]
                next(row for row in rows if (row["size"], row["method"]) == (size, run.method))["to_do"] += not done
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
    output = Path(options.output)
    saved, record = output / "tokenizer", output / "plan.json"
    if output.exists() and not (output.is_dir() and (record.is_file() or not any(output.iterdir()))):
        raise CheckpointError(f"{output}: exists and is not a study folder; give another folder.")
    tokenizer = options.tokenizer or options.start or "bpe:4096"
    data = study_data(
        options.data,
        tokenizer=str(saved) if record.is_file() and saved.is_dir() else tokenizer,
        block=options.block,
        held_out=options.held_out,
        held_out_blocks=options.held_out_blocks,
        split=options.split,
        text_column=options.text_column,
        sample_by=options.sample_by,
    )
    study = _Study(options, data)
    whole_batches(data.blocks, options.settings.batch)  # raises if there are too few, before anything is written
    if record.is_file():
        _check_same(record, study.plan)
    new = [path for path in (output, saved, record, starts) if not path.exists()]
    try:
        if write and record in new:
            with replacing(saved, force=True) as folder:
                data.tokenizer.save_pretrained(folder)
            _write_json(record, study.plan)
        study.runs = _runs_from_scratch(options, data) if options.start is None else _continued_runs(options, starts)
        if len({run.place for run in study.runs}) < len(study.runs):
            raise ValueError("Two of the methods, or of the sizes, have the same name but for punctuation.")
    except BaseException:
        for path in new:
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        raise
    return study


def _write_json(path: Path, value: Any) -> None:
    replace_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def _check_same(record: Path, plan: Mapping[str, Any]) -> None:
    try:
        before = json.loads(record.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{record}: cannot be read: {brief(error)}") from error
    if different := sorted(name for name in plan if plan[name] != before.get(name)):
        changes = ", ".join(f"{name} was {before.get(name)!r}, is {plan[name]!r}" for name in different)
        raise CheckpointError(f"{record.parent}: holds another study: {changes}. Give another folder.")


def _runs_from_scratch(options: StudyOptions, data: StudyData) -> list[_Run]:
    """Size by size and seed by seed, so that a study that is cut short has whole pairs."""
    runs = []
    for size in options.sizes or ("tiny",):
        name, overrides = _parsed(size, SIZES, "size")
        shape = {
            "vocab_size": len(data.tokenizer),
            "max_position_embeddings": options.block,
            "bos_token_id": data.tokenizer.bos_token_id,
            "eos_token_id": data.tokenizer.eos_token_id,
            **SIZES[name],
            **overrides,
        }
        backbone = ResFormerConfig.for_method(BASELINE, **shape)
        configs = {}
        for method in options.all_methods:
            name, overrides = _parsed(method, METHODS, "method")
            configs[method] = ResFormerConfig.for_method(name, **{**shape, **overrides})
        runs += [
            _Run(size, method, seed, config, backbone, None)
            for seed in range(options.seeds)
            for method, config in configs.items()
        ]
    return runs


def _continued_runs(options: StudyOptions, starts: Path) -> list[_Run]:
    """Converts the checkpoint to each method, once, into a folder of `starts`."""
    assert options.start is not None
    size = Path(options.start).resolve().name if Path(options.start).exists() else options.start.rpartition("/")[2]
    runs = []
    for method in options.all_methods:
        name, overrides = _parsed(method, METHODS, "method")
        folder = starts / _file_name(method)
        if not folder.exists():
            # A lossy conversion is allowed: the first point of its curve shows the loss.
            retrofit(options.start, folder, name, lossy=True, link=True, verify="headers", progress=False, **overrides)
        config = ResFormerConfig.from_pretrained(folder)
        if options.block > config.max_position_embeddings:
            raise ValueError(
                f"block is {options.block}, but {options.start} has {config.max_position_embeddings} positions."
            )
        runs += [_Run(size, method, seed, config, config, folder) for seed in range(options.seeds)]
    return sorted(runs, key=lambda run: run.seed)


def _file_name(name: str) -> str:
    return re.sub(r"[^\w.-]+", "-", name)


def _parsed(text: str, known: Mapping[str, Any], what: str) -> tuple[str, dict[str, Any]]:
    """`NAME:FIELD=VALUE...` as a known name and the fields, their values read as JSON."""
    name, *pairs = text.split(":")
    if name not in known:
        raise ValueError(f"Unknown {what} {name!r}: expected one of {', '.join(known)}.")
    values = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or key not in _FIELDS:
            close = difflib.get_close_matches(key, _FIELDS, n=1)
            hint = f" Did you mean {close[0]!r}?" if close and equals else ""
            raise ValueError(f"{what} {text}: {pair!r} is no FIELD=VALUE of a ResFormerConfig.{hint}")
        try:
            values[key] = json.loads(value)
        except json.JSONDecodeError:
            values[key] = value
    return name, values


def _parameters(config: ResFormerConfig) -> int:
    with torch.device("meta"):
        return int(ResFormerForCausalLM(config).num_parameters())


def _described(run: _Run) -> dict[str, Any]:
    return {
        "size": run.size,
        "method": run.method,
        "seed": run.seed,
        "cache_bytes_per_token": cache_bytes_per_token(run.config),
    }


@contextmanager
def _progress(
    runs: int, steps: int, *, quiet: bool
) -> Iterator[tuple[Callable[[int], None], Callable[[str, Mapping[str, Any]], None]]]:
    """One bar for all steps of all runs, and a line for each run that is done, on stderr."""
    done = 0
    with tqdm(total=runs * steps, unit="step", disable=quiet or not sys.stderr.isatty()) as bar:

        def on_step(step: int) -> None:
            bar.update(done + step - bar.n)

        def on_run(what: str, result: Mapping[str, Any]) -> None:
            nonlocal done
            done += steps
            loss = "diverged" if result["loss"] is None else f"held-out loss {result['loss']:.4f}"
            tqdm.write(f"{what}: {loss}, {result['step_seconds'] * 1e3:,.1f} ms a step", file=sys.stderr)

        yield on_step, on_run


def _report(study: _Study, results: Sequence[Mapping[str, Any]], command: str) -> dict[str, Any]:
    sizes = rows_of(results)
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
        "notes": _notes(study.options),
        "metrics": _metrics(study, sizes),
        "environments": environments,
    }


def _notes(options: StudyOptions) -> list[str]:
    budget = f"{options.settings.steps:,} steps of {options.settings.batch} x {options.block} tokens"
    return [
        f"Loss: nats per token on the held-out blocks after {budget}. Δ: minus {BASELINE}'s of the same seed"
        + (", with its 95 % confidence interval by Student's t." if options.seeds > 1 else "; one seed, no interval."),
        "Equal FLOPs: the same after as many operations as the cheapest method's training took.",
        f"Equal parameters: the same to {BASELINE} with as many parameters, between its sizes."
        if len(options.sizes) > 1
        else f"Equal parameters need {BASELINE} at two --sizes at least, and are left out.",
    ]


def _metrics(study: _Study, sizes: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """The results that cards print, by the fields of `resformer.model_cards.Metric`."""
    options = study.options
    tokens = options.settings.steps * options.settings.batch * options.block
    budget = f"{tokens:,} tokens, {options.seeds} seeds, "
    budget += "from scratch" if options.start is None else "continued from the checkpoint"
    metrics: list[dict[str, Any]] = []

    def add(name: str, value: float, method: str, note: str) -> None:
        data = {"dataset": study.data.name, "split": "held-out"}
        metrics.append({"name": name, "type": "loss", "value": value, **data, "method": method, "note": note})

    for size, row in ((size, row) for size, rows in sizes.items() for row in rows if row["loss"] is not None):
        note = f"{size}, {row['parameters']:,} parameters, {budget}"
        add(f"loss, {size}", row["loss"], row["method"], note)
        if (difference := row["difference"]) is not None:
            if difference["low"] is not None:
                note += f"; 95 % interval {difference['low']:+.4f} to {difference['high']:+.4f}"
            add(f"loss minus {BASELINE}'s, {size}", difference["mean"], row["method"], note)
    return metrics
