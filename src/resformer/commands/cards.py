"""`resformer card`."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from resformer.commands.terminal import app, echo, reporting_errors, row
from resformer.errors import CheckpointError
from resformer.record import RECORD, read_record

if TYPE_CHECKING:
    from huggingface_hub import ModelCard

    from resformer.model_cards import Metric

__all__ = ["card"]

#: What a metrics.json says of a training, by the names that the builders have for it.
_TRAINING = ("source", "revision", "method", "corpus", "evaluation_tokens", "runs", "datasets")


_Files = list[Path] | None


@app.command()
def card(
    checkpoint: Annotated[Path | None, typer.Argument(help="The folder of a ResFormer checkpoint.")] = None,
    method: Annotated[str | None, typer.Option(help="Print the finished card of this method instead.")] = None,
    metrics: Annotated[_Files, typer.Option(help="metrics.json of a training, or of a study; repeatable.")] = None,
    eval_: Annotated[_Files, typer.Option("--eval", help="JSON of lm-evaluation-harness; repeatable.")] = None,
    output: Annotated[Path | None, typer.Option(help="The card. [default: README.md in CHECKPOINT]")] = None,
    repository: Annotated[str | None, typer.Option(help="Hub id in the card's code. [default: its name]")] = None,
    base_model: Annotated[str | None, typer.Option(help="Hub id of the source, if it is read from a folder.")] = None,
    license_: Annotated[str | None, typer.Option("--license", help="The Hub's name of a licence.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a card that was edited by hand.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the card, write nothing.")] = False,
) -> None:
    """Write the model card of a checkpoint, from its record and from files of results; or print a method's."""
    with reporting_errors():
        if (checkpoint is None) == (method is None):
            raise typer.BadParameter("give either the folder of a checkpoint or --method NAME.")
        from resformer.files import replace_text
        from resformer.model_cards import eval_result_files, harness_metrics, metrics_of, packaged_method_card

        if checkpoint is None:
            typer.echo(packaged_method_card(str(method)), nl=False)
            return
        trainings = {path: _read(path) for path in metrics or []}
        measured: list[Metric] = []
        try:
            for path, values in trainings.items():
                measured += metrics_of(values, str(path))
            for path in eval_ or []:
                measured += harness_metrics(_read(path), str(path))
        except ValueError as error:
            raise CheckpointError(str(error)) from error
        with_runs = [path for path, values in trainings.items() if "runs" in values]
        if len(with_runs) > 1:
            raise CheckpointError(f"{with_runs[1]}: tells of a training, as {with_runs[0]} does; a card tells of one.")
        for path in with_runs:
            if missing := [key for key in ("corpus", "evaluation_tokens") if key not in trainings[path]]:
                raise CheckpointError(f"{path}: has the `runs` of a training, but no `{missing[0]}`.")
        training = {key: trainings[path][key] for path in with_runs for key in _TRAINING if key in trainings[path]}
        kind, made = _build(
            checkpoint, training, measured, repository or checkpoint.resolve().name, base_model, license_
        )
        if dry_run:
            echo(str(made))
            return
        target = output or checkpoint / "README.md"
        if target.suffix != ".md":  # --force would replace a config.json too
            raise CheckpointError(f"{target}: is no name of a card; expected one that ends in .md.")
        _check_untouched(target, force)
        files = {target.name: str(made), **eval_result_files(measured)}
        for name, text in files.items():
            replace_text(target.parent / name, text)
        row("card", f"{target}, of a {kind} model")
        row("results", len(measured))
        for name in list(files)[1:]:
            row("also wrote", target.parent / name)


def _build(
    checkpoint: Path,
    training: dict[str, Any],
    measured: "list[Metric]",
    repository: str,
    base_model: str | None,
    license_: str | None,
) -> "tuple[str, ModelCard]":
    from jinja2 import UndefinedError

    from resformer.configuration import ResFormerConfig
    from resformer.configuration.methods import method_of
    from resformer.convert.source import open_source
    from resformer.model_cards import carried_metadata, finetuned_card, retrofit_card, scratch_card, well_formed

    if not checkpoint.is_dir():
        raise CheckpointError(f"{checkpoint}: is no folder; a card is made of a checkpoint on this disk.")
    opened = open_source(str(checkpoint), resformer=True).fetch()
    config = opened.config
    if not isinstance(config, ResFormerConfig):
        raise CheckpointError(f"{checkpoint}: is a {config.model_type}, no ResFormer; `resformer convert` makes one.")
    record = read_record(checkpoint)
    source_card = {**carried_metadata(checkpoint / "README.md"), **((record or {}).get("source_card") or {})}
    if license_ is not None:
        if not well_formed({"license": license_}):
            raise typer.BadParameter(f"--license {license_}: expected a name such as apache-2.0, mit, llama3 or other.")
        source_card = {key: value for key, value in source_card.items() if not key.startswith("license")}
        source_card["license"] = license_
    given: dict[str, Any] = {
        "repository": repository,
        "config": config,
        "source_card": source_card,
        "metrics": measured,
        "bundle": "auto_map" in opened.raw_config,
    }
    try:
        if training.get("source") is not None:
            tuned = {"revision": None, "method": method_of(config), **training}
            return "fine-tuned", finetuned_card(**tuned, **given, base_model=base_model)
        if training and record is not None:
            origin = {"source": record["source"], "revision": record["revision"], "method": record["method"]}
            return "fine-tuned", finetuned_card(**{**training, **origin}, **given, base_model=base_model)
        if record is not None:
            _check_record(checkpoint, record)
            return "retrofitted", retrofit_card(record, **given, base_model=base_model)
        told = {key: value for key, value in training.items() if key not in ("source", "revision", "method")}
        parameters = sum(tensor.elements for tensor in opened.checkpoint.tensors.values())
        return "from-scratch", scratch_card(method=method_of(config), parameters=parameters, **told, **given)
    except (KeyError, TypeError, AttributeError, UndefinedError, ValueError) as error:  # what others' JSON may lack
        raise CheckpointError(f"{checkpoint}: its record, or the metrics, do not tell all: {error}") from error


def _check_record(checkpoint: Path, record: dict[str, Any]) -> None:
    """A record tells of the weights that were written with it, not of what training has made of them."""
    for name, file in record["files"].items():
        path = checkpoint / name
        if not path.is_file() or path.stat().st_size != file["bytes"]:
            raise CheckpointError(
                f"{path}: is not the file that {RECORD} tells of. Was the model trained since? Then give --metrics, "
                f"or remove {RECORD}."
            )


def _check_untouched(target: Path, force: bool) -> None:
    from resformer.model_cards import is_as_made

    if not force and target.exists() and not is_as_made(target.read_text(encoding="utf-8")):
        raise CheckpointError(f"{target}: was written or edited by hand. Replace it with --force.", "--force")


def _read(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path}: holds a {type(values).__name__}, expected an object.")
    return values
