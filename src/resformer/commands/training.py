"""`resformer finetune`, `new`, `tokenize`, `pretrain` and `compare`."""

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from resformer.commands.conversion import DRY_RUN
from resformer.commands.terminal import (
    HANDED_OVER,
    MEASURE,
    TRAIN,
    app,
    command,
    echo,
    hand_over,
    json_or_text,
    listed,
    own_command,
    reporting_errors,
    row,
    size,
)
from resformer.errors import did_you_mean, one_line
from resformer.training.options import FinetuneOptions, NewOptions, PretrainOptions, StudyOptions, TokenizeOptions


def _from_file(context: typer.Context, path: Path | None) -> Path | None:
    """Makes values of a YAML file the options' defaults; fields of `TrainingArguments` go to --set or --trainer."""
    if path is None:
        return None
    import yaml
    from transformers import TrainingArguments

    with reporting_errors():
        try:
            values = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise ValueError(f"{path}: cannot be read: {one_line(error)}") from error
        if not isinstance(values, dict):
            raise ValueError(f"{path}: expected lines of `name: value`.")
        options = {option.removeprefix("--"): each for each in context.command.params for option in each.opts}
        settings = {each.name for each in fields(TrainingArguments) if each.init}
        given: dict[str, Any] = {}
        for name, value in values.items():
            option = options.get(str(name).replace("_", "-"))
            if option is None and name in settings:
                option, value = options.get("trainer", options["set"]), {name: value}
            if option is None:
                hint = did_you_mean(str(name).replace("_", "-"), [*options, *settings])
                raise ValueError(f"{path}: there is no option {name!r}.{hint}")
            if name in ("set", "trainer") and not isinstance(value or {}, (dict, list)):
                raise ValueError(f"{path}: {name} is {value!r}; expected lines of `name: value`.")
            if isinstance(value, dict):
                value = [f"{key}={json.dumps(json_or_text(each))}" for key, each in value.items()]
            entries = value if isinstance(value, list) else [] if value is None else [value]
            entries = [os.path.expanduser(str(each)) for each in entries]  # as a shell expands the home folder
            if getattr(option, "multiple", False):
                given[option.name] = [*given.get(option.name, ()), *entries]
            elif isinstance(value, list):
                raise ValueError(f"{path}: {name} is {value!r}; expected one value.")
            elif entries:
                given[option.name] = entries[0]
    context.default_map = given
    return path


_GO_ON = "Go on from the last checkpoint with: {command} --resume"

PlanAlone = Annotated[bool, typer.Option("--dry-run", help="Print the plan; write nothing.")]
Config = Annotated[
    Path | None,
    typer.Option(callback=_from_file, is_eager=True, help="YAML file of these options; the command line wins."),
]


@command(TRAIN, "resformer finetune smollm2-resformer finetuned --data notes.txt --sample-by line", _GO_ON)
def finetune(options: FinetuneOptions, config: Config = None) -> Iterator[dict[str, Any]]:
    """Train a checkpoint further, all weights or the connections.

    Writes a checkpoint, metrics.json and a card.

    All weights are trained, in float32: 16 bytes a parameter with AdamW, and
    activations. For adapters (LoRA), 4-bit weights, preferences and rewards, and
    for models that do not fit, take `resformer trl`.
    """
    from resformer.files import check_apart
    from resformer.training.recipe import finetune_checkpoint

    if config is not None:
        check_apart(Path(options.output), config)
    report = finetune_checkpoint(options)
    yield asdict(report)
    trained = "" if options.train == "all" else f", {report.trained_parameters:,} of them trained"
    row("model", f"{options.model}, {report.parameters:,} parameters{trained}")
    row("data", f"{report.training_blocks:,} blocks, {report.held_out_blocks:,} held out, of {report.block:,} tokens")
    for source, count in report.held_out_by_source.items() if report.held_out_blocks else ():
        row("held out", f"{count:,} documents of {source}")
    for source, passes in report.passes.items():
        row("passes", f"{passes:,.3g} over {source}")
    for note in report.notes:
        row("data", note)
    if options.dry_run:
        row("memory", f"{size(report.peak_memory or 0)}, the most in one step")
        row("would write", options.output)
        return
    print_result(report, options.output)


def print_result(report: Any, output: str) -> None:
    """The last lines of `finetune` and `pretrain`, of a `FinetuneReport`."""
    resumed = f", resumed from step {report.resumed_from:,}" if report.resumed_from else ""
    row("trained", f"{report.steps:,} steps, {report.tokens:,} tokens{resumed}")
    row("speed", f"{report.tokens_per_second:,.0f} tokens/s, {report.seconds:,.1f} s, {size(report.peak_memory or 0)}")
    if report.loss_before is not None:
        row("loss", f"{report.loss_before:.4f} -> {report.loss_after:.4f} on the held-out blocks")
        row("bits per byte", "not known" if report.bits_per_byte is None else f"{report.bits_per_byte:.4f}")
        row("perplexity", f"{report.perplexity_before:.3f} -> {report.perplexity_after:.3f}")
    row("wrote", output)


@command(TRAIN, "resformer new untrained --size 82m --method svformer --tokenizer bytes")
def new(
    options: NewOptions,
    weights: Annotated[bool, typer.Option("--weights/--no-weights", help="Whether to write random weights.")] = True,
    dry_run: Annotated[bool, typer.Option("--dry-run", help=DRY_RUN)] = False,
) -> Iterator[dict[str, Any]]:
    """Write an untrained checkpoint, with its tokenizer, for any engine."""
    from resformer.convert.connections import meta_model
    from resformer.training.untrained import new_checkpoint

    config = new_checkpoint(options, weights=weights, dry_run=dry_run)
    parameters = meta_model(config).num_parameters()
    yield {**config.to_dict(), "parameters": parameters}
    backbone = "" if options.backbone is None else f"{options.backbone}, "
    row("model", f"{backbone}{options.size}, {options.method}, {parameters:,} parameters")
    row("shape", f"{config.num_hidden_layers} layers, {config.num_attention_heads} heads, width {config.hidden_size}")
    row("tokenizer", f"{config.vocab_size:,} tokens")
    row("would write" if dry_run else "wrote", options.output)


@command(
    TRAIN,
    "resformer tokenize notes.txt tokens --tokenizer bytes --sample-by line --workers 4",
    "Give the command again to go on.",
)
def tokenize(options: TokenizeOptions) -> Iterator[dict[str, Any]]:
    """Write documents as files of token ids, for --data.

    A run that was stopped goes on when the command is given again.
    """
    from resformer.training.tokenizing import tokenize as run

    index = run(options)
    yield index
    for side in ("train", "validation"):
        sums = index[side]
        row(side, f"{sums['tokens']:,} tokens of {sums['documents']:,} documents, {size(sums['bytes'])}")
    row("wrote", options.output)


@command(TRAIN, "resformer pretrain model --size tiny --data notes.txt --tokens 2M --dry-run", _GO_ON)
def pretrain(options: PretrainOptions, config: Config = None, dry_run: PlanAlone = False) -> Iterator[dict[str, Any]]:
    """Train a model from scratch.

    The size decides shape, tokens, batch and learning rate, and each can be set.
    Writes what `finetune` writes, and log.json.
    """
    from resformer.training.pretraining import plan_pretraining
    from resformer.training.pretraining import pretrain as run

    plan, report = (plan_pretraining(options), None) if dry_run else run(options)
    yield {"plan": asdict(plan), **({} if report is None else asdict(report))}
    backbone = "" if options.backbone is None else f"{options.backbone}, "
    row("model", f"{backbone}{options.size}, {options.method}, {plan.parameters:,} parameters")
    each = plan.tokens / plan.plain_parameters
    ratio = f"{each:,.1f}" if each >= 0.1 else f"{each:.1g}"
    row("tokens", f"{plan.tokens:,}, {ratio} an active parameter without connections, {size(plan.bytes)} of ids")
    passes = f", in {plan.accumulate} passes" if plan.accumulate > 1 else ""
    row("steps", f"{plan.steps:,} of {plan.sequences:,} sequences of {plan.block:,} tokens{passes}")
    rates = ", ".join(f"{kind} {rate:.2g}" for kind, rate in plan.rates.items())
    row("rate", f"{plan.learning_rate:.2g}, {options.schedule}; {rates}")
    row("operations", f"{plan.flops:.3g}")
    if report is None:
        row("would write", options.output)
        return
    print_result(report, options.output)


@app.command(
    **listed(TRAIN, "resformer trl sft --model_name_or_path smollm2-resformer --dataset_name chats --use_peft"),
    **HANDED_OVER,
)
def trl(context: typer.Context) -> None:
    """Run TRL's scripts (sft, dpo, grpo, ...) on these models.

    For adapters, 4-bit weights, preferences and rewards. `resformer trl sft --help` lists the options of one.
    """
    hand_over(context, "resformer.trl")


@command(
    MEASURE,
    "resformer compare study --methods resformer,svformer:learning_rate=4e-3 --steps 500 --dry-run",
    "Finished runs are kept. Go on with: {command}",
)
def compare(options: StudyOptions, dry_run: PlanAlone = False) -> Iterator[dict[str, Any]]:
    """Train methods under one budget and compare their losses.

    Runs are those of `pretrain`, or with --from of `finetune`, paired by seed.
    Losses are of the whole held-out text.

    A study that was stopped goes on when the command is given again.
    """
    from resformer.training.study.comparison import plan_study, run_study
    from resformer.training.study.report import markdown

    if not dry_run:
        yield (report := run_study(options, own_command()))
        echo(markdown(report))
        return
    yield (plan := plan_study(options))
    for each in plan["runs"]:
        shape = f"{each['method']}, {each['parameters']:,} parameters, rate {each['learning_rate']:.2g}"
        length = f"{each['steps']:,} steps of {each['batch']:,} sequences, {each['epochs']:.2f} epochs"
        row(each["size"], f"{shape}, {length}")
        row("", f"runs to do: {each['to_do']}, of {each['training_flops']:.3g} operations")
    data = plan["data"]
    row("data", f"{data['name']}, {data['training_tokens']:,} tokens to train on")
    row("held out", f"{data['held_out_tokens']:,} tokens of {data['held_out_documents']:,} documents")
    row("would write", options.output)
