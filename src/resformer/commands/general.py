"""`resformer methods`, `env`, `analyze`, `eval`, `card`, `push` and `serve`."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from resformer.commands.terminal import (
    ANYTHING,
    HANDED_OVER,
    MEASURE,
    SHARE,
    START,
    app,
    command,
    echo,
    hand_over,
    listed,
    own_command,
    reporting_errors,
    row,
    size,
)

_SHOWN = {
    "entropy": "entropy",
    "first_importance": "first share",
    "importance_ratio": "first/others",
    "value_norm_ratio": "first value",
    "hidden_norm_ratio": "first hidden",
    "similarity": "similarity",
}


@command(START, "resformer methods --layers 30", any_transformers=True)
def methods(
    layers: Annotated[int, typer.Option(help="Show the fields for a model of this many layers.", min=1)] = 8,
) -> Iterator[dict[str, Any]]:
    """List the named methods: what each does and its fields; first those to begin with, with their losses and costs."""
    from resformer.configuration.methods import FIRST, METHODS

    listed = {name: METHODS[name] for name in FIRST} | METHODS
    yield {name: method(layers) for name, method in listed.items()}
    for number, (name, method) in enumerate(listed.items()):
        if number == len(FIRST):
            echo("\nTo reproduce a paper, or to compare:\n")
        echo(f"{name}: {method.summary}")
        row("", json.dumps(method(layers)))
        for label, said in zip(("  loss", "  cost"), FIRST.get(name, ()), strict=False):
            row(label, said)
    echo(f"\nFields for {layers} layers; --layers shows those of another depth.")
    echo(
        "Loss: from scratch, minus plain Llama's, in nats a token; others' is hyper-connection-factory's, ours in "
        "docs/results.md. Cost: parameters added and cache of SmolLM2-135M's shape, kernels of Llama-3.1-8B's."
    )


@command(START, "resformer env --json", any_transformers=True)
def env() -> Iterator[dict[str, Any]]:
    """Print versions and hardware for a bug report; no secrets."""
    from resformer.environment import describe_environment

    environment = describe_environment()
    yield environment
    packages, variables = environment.pop("packages"), environment.pop("variables")
    if isinstance(environment["memory"], int):
        environment["memory"] = size(environment["memory"])
    for name, value in {**packages, **environment, **variables}.items():
        row(f"{name} ", "-" if value is None or value == [] else value)


@command(MEASURE, "resformer analyze HuggingFaceTB/SmolLM2-135M finetuned --output analysis")
def analyze(
    checkpoints: Annotated[
        list[str], typer.Argument(metavar="CHECKPOINT...", help="Folders or Hub ids; several are compared.")
    ],
    text: Annotated[
        list[Path] | None,
        typer.Option(help="A UTF-8 file to read; repeatable. [default: sources of Python's standard library]"),
    ] = None,
    texts: Annotated[int, typer.Option(min=1, help="Read at most this many texts.")] = 32,
    max_tokens: Annotated[int, typer.Option(min=2, help="Cut each text to at most this many tokens.")] = 512,
    output: Annotated[Path | None, typer.Option(help="Folder for analysis.json and figures.")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="The checkpoint whose tokenizer all of them use.")] = None,
    dtype: Annotated[Literal["float32", "bfloat16", "float16"], typer.Option(help="Of the model.")] = "float32",
    device: Annotated[str | None, typer.Option(help="cpu, cuda, ... [default: an accelerator if there is one]")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an earlier report.")] = False,
) -> Iterator[dict[str, Any]]:
    """Measure attention sinks, value drains and over-smoothing.

    Of each layer, by the definitions of the ResFormer paper.
    """
    import torch
    from tqdm import tqdm

    from resformer.analysis import analyze as analyze_one
    from resformer.analysis import read_texts, standard_texts, write_report
    from resformer.analysis import report as report_of
    from resformer.environment import require
    from resformer.files import check_target

    if output is not None:  # fail before the measuring
        require("matplotlib", "analysis")
        inputs: list[str | Path] = [*checkpoints, *(text or []), *([tokenizer] if tokenizer else [])]
        check_target(output, *inputs, made_by="analyze", force=force)
    # Before any model: a text that cannot be read is an error.
    read = list(read_texts(text, texts=texts, max_tokens=max_tokens) if text else standard_texts(texts))
    analyses = []
    for checkpoint, name in zip(checkpoints, _names(checkpoints), strict=True):
        options: dict[str, Any] = {"max_tokens": max_tokens, "device": device, "dtype": getattr(torch, dtype)}
        with tqdm(read, desc=name, unit="text", leave=False) as bar:
            analyses.append(analyze_one(checkpoint, bar, tokenizer=tokenizer, name=name, **options))
    for analysis in analyses:
        for warning in analysis.warnings:
            echo(f"Warning: {warning}", err=True)
    if output is not None:
        write_report(analyses, output, own_command(), force=force)
    yield report_of(analyses, own_command())
    for analysis in analyses:
        # Early tokens get more by causality alone: without these numbers each model seems to have a sink.
        uniform = ", ".join(f"{_SHOWN[name]} {_number(value)}" for name, value in analysis.uniform.items())
        echo(f"{analysis.name}: {analysis.texts:,} texts, {analysis.tokens:,} tokens; uniform attention: {uniform}")
        echo("layer" + "".join(f"{heading:>13}" for heading in _SHOWN.values()))
        for layer in range(analysis.layers):
            echo(f"{layer:5}" + "".join(f"{_number(analysis.mean(quantity)[layer]):>13}" for quantity in _SHOWN))
        echo()
    if output is not None:
        row("wrote", output)


def _names(checkpoints: list[str]) -> list[str]:
    """The last parts of each path or id, as many as tell them apart."""
    # `.` and `..` have no name of their own.
    paths = [os.path.abspath(each) if Path(each).name in ("", "..") else os.path.normpath(each) for each in checkpoints]
    parts = [Path(path).parts for path in paths]
    names = (["/".join(each[-count:]) for each in parts] for count in range(1, max(map(len, parts)) + 1))
    return next(each for each in names if len({*each}) == len({*parts}))


def _number(value: float) -> str:
    """Three digits, or all of them before the point."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


@command(
    MEASURE,
    "resformer eval finetuned --tasks hellaswag,arc_easy --limit 100",
    "No results were written.",
    name="eval",
    context_settings=ANYTHING,
)
def evaluate(
    context: typer.Context,
    checkpoint: Annotated[str, typer.Argument(help="A folder or Hub id, of a ResFormer or any causal model.")],
) -> None:
    """Run tasks of lm-evaluation-harness on a checkpoint.

    Options are those of `lm_eval run`: --tasks, --limit, --num_fewshot,
    --batch_size, --device, --include_path, --output_path, and others.
    """
    from resformer.evaluation import evaluate as run_harness

    run_harness(checkpoint, context.args)


@command(SHARE, "resformer card finetuned --repository you/finetuned")
def card(
    checkpoint: Annotated[Path, typer.Argument(help="The folder of a ResFormer checkpoint.")],
    metrics: Annotated[
        list[Path] | None, typer.Option(help="metrics.json of a training, as finetune writes it; repeatable.")
    ] = None,
    eval_: Annotated[
        list[Path] | None, typer.Option("--eval", help="JSON of lm-evaluation-harness; repeatable.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="The file. [default: README.md in CHECKPOINT]")] = None,
    repository: Annotated[str | None, typer.Option(help="Hub id in the card's code. [default: folder's name]")] = None,
    base_model: Annotated[str | None, typer.Option(help="Hub id of the source, if it was read from a folder.")] = None,
    license_: Annotated[str | None, typer.Option("--license", help="The Hub's name of a licence.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a card that was edited by hand.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the card, write nothing.")] = False,
) -> None:
    """Write a checkpoint's model card, from what was recorded."""
    from resformer.checkpoint_cards import checkpoint_card

    built = checkpoint_card(
        checkpoint,
        metrics=metrics or [],
        evaluations=eval_ or [],
        repository=repository,
        base_model=base_model,
        license=license_,
    )
    if dry_run:
        echo(built.card)
        return
    target = output or checkpoint / "README.md"
    built.write(target, force=force)
    row("card", f"{target}, origin: {built.origin}")
    if results := built.card.data.get("eval_results"):
        row("results", len(results))


@command(
    SHARE,
    "resformer push finetuned you/finetuned --dry-run",
    "What was uploaded is not sent again: run the command again.",
)
def push(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint folder with a model card, README.md.")],
    repo_id: Annotated[str, typer.Argument(help="OWNER/NAME on the Hub; made if there is none.")],
    private: Annotated[bool, typer.Option("--private", help="Make the repository private.")] = False,
    revision: Annotated[str | None, typer.Option(help="The branch; made if there is none. Default: main.")] = None,
    message: Annotated[str | None, typer.Option(help="The commit's message.")] = None,
    bundle: Annotated[
        bool, typer.Option("--bundle", help="Add the code that loads the checkpoint without this package.")
    ] = False,
    tag: Annotated[str | None, typer.Option(help="Tag the commit, for example v1.0.")] = None,
    create_pr: Annotated[
        bool, typer.Option("--create-pr", help="Propose the commit to a repository that may be of others.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check the folder, list what would go.")] = False,
) -> Iterator[Any]:
    """Put a checkpoint on the Hub, in one commit.

    The token is HF_TOKEN, or that of `hf auth login`.
    """
    given = dict(locals())  # the arguments of `push`
    from resformer.pushing import push as push_checkpoint

    report = push_checkpoint(**given)
    yield report
    row("checkpoint", report.checkpoint)
    row("repository", f"{report.repo_id}, {report.revision}")
    for name, count in report.files.items():
        row("", f"{name}  {size(count)}")
    row("size", f"{len(report.files)} files, {size(report.bytes)}")
    if report.left_behind:
        row("left behind", ", ".join(report.left_behind))
    if report.deleted:
        row("deleted", ", ".join(report.deleted))
    if dry_run:
        row("do it", own_command(leave_out="--dry-run"))
        return
    if report.tag is not None:
        row("tag", report.tag)
    row("commit", report.commit)
    echo(report.url)


@app.command(**listed(SHARE, "resformer serve finetuned --host 127.0.0.1"), **HANDED_OVER)
def serve(context: typer.Context) -> None:
    """Start an OpenAI server: `transformers serve` with these models.

    Options are its own.
    """
    if context.args and not context.args[0].startswith("-"):
        with reporting_errors("Nothing was started."):
            from resformer.serving import check_model

            check_model(context.args[0])
    hand_over(context, "resformer.serving")
