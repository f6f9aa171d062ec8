"""A comparison study: runs of `pretrain` or `finetune`, one for each size, method and seed, paired by the seed."""

import json
import math
import os
import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm
from transformers import AutoConfig, PreTrainedTokenizerBase

from resformer.configuration import METHODS
from resformer.convert.connected_families import cache_size
from resformer.convert.connections import meta_model
from resformer.convert.retrofitting import retrofit
from resformer.environment import describe_environment
from resformer.errors import CheckpointError
from resformer.files import beside, json_value, locked, replace_text, replacing
from resformer.training.data import STANDARD_HELD_OUT, STANDARD_LIBRARY, load_documents
from resformer.training.flops import training_flops
from resformer.training.optimizer import COEFFICIENTS
from resformer.training.options import (
    BEGUN,
    KIND_RATES,
    OF_A_METHOD,
    RATES,
    FinetuneOptions,
    PretrainOptions,
    StudyOptions,
    architecture,
    refuse_other,
    shared,
)
from resformer.training.packing import bytes_per_token, pack_documents
from resformer.training.pretraining import pretrain, pretrain_plan
from resformer.training.recipe import digest_of_weights, finetune_checkpoint, uses_bf16
from resformer.training.study.plot import check_packages, plot
from resformer.training.study.report import add_line, joined, report_of
from resformer.training.tokenizers import make_tokenizer
from resformer.training.trainer import LOG, LossIsLost, RecipeTrainer, TrainingLog
from resformer.training.untrained import known_fields, schedule_arguments, scratch_config, with_fields

#: In the output of `compare`: what was trained on what, and every run.
RECORD = "runs.jsonl"

_STARTS, _UNFINISHED = "starts", "unfinished"


@dataclass(frozen=True)
class _Run:
    """One model to train."""

    facts: dict[str, Any]  # what the record says of it, whatever the seed
    options: FinetuneOptions | PretrainOptions

    @property
    def key(self) -> tuple[str, str, int]:
        return self.facts["size"], self.facts["method"], self.options.seed

    @property
    def place(self) -> Path:
        """Where its files are, below `models` and the like."""
        return Path(*map(_file_name, map(str, self.key)))

    @property
    def described(self) -> dict[str, Any]:
        rates = {name: getattr(self.options, name, None) for name in RATES}
        return {**self.facts, "architecture": architecture(self.key[1]), "seed": self.options.seed, **rates}

    def of_seed(self, seed: int, unfinished: Path) -> "_Run":
        """The same with another seed, below its folder; goes on if it has begun there."""
        run = replace(self, options=replace(self.options, seed=seed))
        output = str(unfinished / run.place)
        resume = Path(f"{output}.training", BEGUN).is_file()
        return replace(run, options=replace(run.options, output=output, resume=resume))


def run_study(options: StudyOptions, command: str = "") -> dict[str, Any]:
    """Trains what is not trained yet and writes `study.json` and `study.png`; returns what is in the former.

    In the output, `runs.jsonl` is the record, `tokenizer` has the tokenizer and `models` the trained models; until
    the end, `starts` has the converted checkpoints and `unfinished` a run that was stopped.
    """
    check_packages()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("compare trains one run after another, on one device: start it without a launcher.")
    output, record = Path(options.output), Path(options.output, RECORD)
    with locked(beside(output, "lock"), busy=f"{output}: another process is at work on this study; wait for it."):
        _, runs = _prepared(options, output / _STARTS, command)
        for run in runs:
            study, finished = joined(record)
            if run.key not in finished:
                result, environment = _trained(run, options), describe_environment()
                del environment["variables"]
                add_line(record, {**run.described, **result, "environment": environment})
                done = 1 + sum(each.key in finished for each in runs)
                loss = "diverged" if result["loss"] is None else f"held-out loss {result['loss']:.4f}"
                size, method, seed = run.key
                size = f"{size} " if len({each.key[0] for each in runs}) > 1 else ""
                tqdm.write(f"{done}/{len(runs)} {size}{method} seed {seed}: {loss}", file=sys.stderr)
            shutil.rmtree(output / _UNFINISHED / run.place, ignore_errors=True)
        for folder in (_UNFINISHED, _STARTS):
            shutil.rmtree(output / folder, ignore_errors=True)
        study, finished = joined(record)
        results = [finished[run.key] for run in runs]
        report = report_of({**study, "command": command}, results, options.compared_with)
        replace_text(output / "study.json", json.dumps(report, indent=2, allow_nan=False) + "\n")
        plot(report, results, output / "study.png")
        return report


def plan_study(options: StudyOptions) -> dict[str, Any]:
    """What `run_study` would do. Writes nothing."""
    check_packages()
    with tempfile.TemporaryDirectory() as scratch:
        plan, runs = _prepared(options, Path(scratch), None)
    record, rows = Path(options.output, RECORD), []
    finished = joined(record)[1] if record.is_file() else {}
    for run in runs:
        if run.options.seed == options.first_seed:
            keys = [(*run.key[:2], seed) for seed in options.all_seeds]
            tokens = run.facts["steps"] * run.facts["batch"] * options.block
            facts = {"tokens": tokens, "epochs": tokens / plan["data"]["training_tokens"]}
            rows.append({**run.described, **facts, "to_do": sum(key not in finished for key in keys)})
    return {"output": options.output, **plan, "seeds": options.seeds, "runs": rows}


def _prepared(options: StudyOptions, starts: Path, command: str | None) -> tuple[dict[str, Any], list[_Run]]:
    """The plan and the runs; with a `command` for the record, begins the output. Checkpoints are converted to `starts`.

    The plan has what must stay the same in a study; methods, sizes and seeds can be added, the baseline changed.
    """
    output, saved, record = Path(options.output), Path(options.output, "tokenizer"), Path(options.output, RECORD)
    methods = {text: _read_method(text, options) for text in options.all_methods}
    beginning = f".{record.name}.*"  # of a process that was killed at its first write
    if output.exists() and not (
        output.is_dir() and (record.is_file() or all(path.match(beginning) for path in output.iterdir()))
    ):
        raise CheckpointError(f"{output}: exists and is not a study folder; give another folder.")
    name = str(saved) if record.is_file() and saved.is_dir() else options.tokenizer or options.start or "bpe:4096"
    tokenizer, data, size_of_token = _data(options, name)
    plan = {
        "data": data,
        "start": options.start,
        "backbone": options.backbone,
        "start_weights": None if options.start is None else digest_of_weights(options.start),
        "tokenizer": options.tokenizer,
        **options.of_runs,
        "bf16": uses_bf16(options.bf16),
    }
    if record.is_file():
        refuse_other(output, joined(record)[0], plan, "study")
    new = [path for path in (output, saved, record, starts) if command is not None and not path.exists()]
    try:
        if record in new:
            facts = {"vocabulary": len(tokenizer), "bytes_per_token": size_of_token}
            add_line(record, {"study": {"command": command, **plan, **facts}})
        if saved in new:
            with replacing(saved, made_by="compare", force=True) as folder:
                tokenizer.save_pretrained(folder)
        make = _from_scratch if options.start is None else _continued
        of_methods = [*make(options, methods, tokenizer, starts)]
        runs = [run.of_seed(seed, output / _UNFINISHED) for seed in options.all_seeds for run in of_methods]
        if len({run.place for run in runs}) < len(runs):
            raise ValueError("Two of the methods, or of the sizes, have the same name but for punctuation.")
    except BaseException:
        for path in new:
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        raise
    return plan, runs


def _data(options: StudyOptions, name: str) -> tuple[PreTrainedTokenizerBase, dict[str, Any], float]:
    """The tokenizer, what tells the data from others, and the bytes of a held-out token."""
    sources, held_out = _sources(options)
    documents = load_documents(sources, **options.reading)
    tokenizer = make_tokenizer(name, documents, held_out)
    given: dict[str, Any] = {
        "block": options.block,
        "separate": options.separate_documents,
        "parse_special": options.parse_special,
    }
    blocks = pack_documents(documents, tokenizer, **given, held_out=held_out, held_out_blocks=options.held_out_blocks)
    whole = blocks.held_out.whole
    shown = ", ".join(Path(source).name if Path(source).exists() else source for source in sources)
    if not options.data:
        shown = f"the sources of the standard library of Python {platform.python_version()}"
    facts = {
        "name": shown + "".join(f" ({note})" for note in documents.notes),
        "training_tokens": len(blocks.train) * options.block,
        "held_out_tokens": len(whole) * options.block,
        "held_out_documents": len(whole.documents),
        "sha256": blocks.digest,
    }
    return tokenizer, facts, bytes_per_token(whole, tokenizer)


def _sources(options: StudyOptions) -> tuple[list[str], float]:
    """Python's standard library where there are none; of this one module in ten is held out."""
    return (options.data, options.held_out) if options.data else ([STANDARD_LIBRARY], STANDARD_HELD_OUT)


def _common(options: StudyOptions, kind: type) -> dict[str, Any]:
    """What a study says of the options of `pretrain` or `finetune`."""
    sources, held_out = _sources(options)
    return shared(options, kind) | {
        "tokenizer": str(Path(options.output, "tokenizer")),
        "data": sources,
        "held_out": held_out,
        "spike": 0.0,  # a lost loss is a result
        "force": True,
    }


def _from_scratch(
    options: StudyOptions, methods: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, starts: Path
) -> Iterator[_Run]:
    common = _common(options, PretrainOptions)
    batch_tokens = None if options.batch is None else options.batch * options.block
    for size in options.sizes or ("tiny",):
        plain = scratch_config("transformer", size, tokenizer, options.block, options.backbone)
        given = PretrainOptions(**common, size=size, batch_tokens=batch_tokens, keep_optimizer=False)
        of_size, sequences = pretrain_plan(given, plain), 0
        while options.steps is not None and sequences != of_size.sequences:  # the batch that suits these steps
            sequences = of_size.sequences
            of_size = pretrain_plan(replace(given, tokens=options.steps * sequences * options.block), plain)
        for text, (method, values, own) in methods.items():
            config = scratch_config(method, size, tokenizer, options.block, options.backbone, **values)
            step, steps = of_size.sequences * options.block, own.get("steps", of_size.steps)
            rates = {"learning_rate": of_size.learning_rate, **{name: x for name, x in own.items() if name != "steps"}}
            run = replace(given, method=method, fields=values, tokens=steps * step, batch_tokens=step, **rates)
            plan = pretrain_plan(run, config)
            schedule_arguments(run, plan.steps)  # raises for one that does not fit
            run = replace(run, connection_learning_rate=plan.rates[COEFFICIENTS])
            facts = {"steps": plan.steps, "batch": plan.sequences, "training_flops": plan.flops, "rates": plan.rates}
            yield _Run({"size": size, "method": text, **facts, **_costs(config)}, run)


def _continued(
    options: StudyOptions, methods: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, starts: Path
) -> Iterator[_Run]:
    """Converts the checkpoint to each architecture, once, into a folder of `starts`."""
    assert options.start is not None
    size = Path(options.start).resolve().name if Path(options.start).exists() else options.start.rpartition("/")[2]
    if size.isdecimal():  # a model of another study: models/SIZE/METHOD/SEED
        size = "-".join(Path(options.start).resolve().parts[-2:])
    batch = options.batch or 8
    all_steps = options.steps or math.ceil((options.tokens or 0) / (batch * options.block))
    for text, (method, values, own) in methods.items():
        folder = starts / _file_name(architecture(text))
        if not folder.exists():
            # A lossy conversion is allowed: the first point of its curve shows the loss.
            how: dict[str, Any] = {"lossy": True, "link": True, "verify": "headers", "progress": False}
            retrofit(options.start, folder, method, **how, **values)
        config = AutoConfig.from_pretrained(folder)
        decoder = config.get_text_config()
        if options.block > (most := decoder.max_position_embeddings):
            raise ValueError(f"block is {options.block}, but {options.start} has {most} positions.")
        if len(tokenizer) > decoder.vocab_size:
            told = f"The tokenizer has {len(tokenizer):,} tokens, but {options.start} {decoder.vocab_size:,}"
            raise ValueError(f"{told}; leave --tokenizer out.")
        steps, micro = own.get("steps", all_steps), options.micro_batch or batch
        given = {
            "model": str(folder),
            "steps": steps,
            "batch": micro,
            "accumulate": batch // micro,
            "learning_rate": own.get("learning_rate", options.learning_rate or 5e-5),
            "connection_learning_rate": own.get("connection_learning_rate", options.connection_learning_rate or 3e-4),
            "trainer": schedule_arguments(options, steps),
        }
        flops = training_flops(config, options.block) * steps * batch * options.block
        facts = {"steps": steps, "batch": batch, "training_flops": flops, "rates": None}
        run = FinetuneOptions(**_common(options, FinetuneOptions) | given)
        yield _Run({"size": size, "method": text, **facts, **_costs(config)}, run)


def _costs(config: Any) -> dict[str, Any]:
    cache, _ = cache_size(config, "bfloat16")
    return {"parameters": meta_model(config).num_parameters(), "cache_bytes_per_token": cache}


def _trained(run: _Run, options: StudyOptions) -> dict[str, Any]:
    """Trains a model, and what the record has of it; a loss that is not finite is `None`."""
    held_out: dict[str, Any] = {"tokens": 0, "loss": None}
    output, facts = Path(run.options.output), dict[str, Any]()

    def finish(trainer: RecipeTrainer) -> None:
        loss = trainer.predict(trainer.blocks.held_out.whole, metric_key_prefix="whole").metrics["whole_loss"]
        held_out.update(tokens=round(trainer.labels_of_evaluation), loss=loss if math.isfinite(loss) else None)

    try:
        if isinstance(run.options, PretrainOptions):
            _, report = pretrain(run.options, finish=finish)
        else:
            log = TrainingLog(run.options.unfinished)
            report = finetune_checkpoint(run.options, finish=finish, callbacks=[log])
        facts = {name: getattr(report, name) for name in ("tokens_per_second", "peak_memory", "resumed_from")}
        folder = output
    except LossIsLost:
        folder = Path(f"{output}.training")
    tokens = run.facts["batch"] * options.block
    result = {
        "loss": held_out["loss"],
        "held_out": held_out,
        "curve": _curve(json.loads((folder / LOG).read_text()), tokens),
        "bf16": uses_bf16(options.bf16),
        **facts,
    }
    if options.save_models and run.options.seed == options.first_seed and output.exists():
        models = Path(options.output, "models") / run.place
        models.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(models, ignore_errors=True)
        shutil.move(output, models)
    shutil.rmtree(f"{output}.training", ignore_errors=True)
    return result


def _curve(log: list[dict[str, Any]], tokens: int) -> list[dict[str, Any]]:
    """A point for each evaluation, with the training loss before it and the connections' coefficients."""
    points, training_loss = list[dict[str, Any]](), None
    for entry in log:
        training_loss = entry.get("loss", training_loss)
        if "eval_loss" in entry:
            point = {"step": entry["step"], "tokens": entry["step"] * tokens, "training_loss": training_loss}
            point |= {"validation_loss": entry["eval_loss"], "coefficients": entry.get("coefficients") or {}}
            points.append(json_value(point))
    return points


def _file_name(name: str) -> str:
    return re.sub(r"[^\w.-]+", "-", name)


def _read_method(text: str, options: StudyOptions) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """The name of a method, the fields of its configuration, and the settings of its training."""
    name, values = with_fields(text, METHODS, "method", {*known_fields(options.backbone), *OF_A_METHOD})
    own = {key: values.pop(key) for key in OF_A_METHOD if key in values}
    if not (isinstance(steps := own.get("steps", 1), int) and steps > 0):
        raise ValueError(f"{text}: steps is {steps}; expected a whole number of more than 0.")
    if options.start and (given := [key for key in KIND_RATES if key in own or getattr(options, key)]):
        raise ValueError(f"{given[0]} is of runs from scratch; with --from, give connection_learning_rate.")
    return name, values, own
