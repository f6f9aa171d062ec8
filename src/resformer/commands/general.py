"""`resformer methods`, `env` and `demo`."""

import json
from pathlib import Path
from typing import Annotated

import typer

from resformer.commands.terminal import app, echo, reporting_errors, row, size


@app.command()
def methods(
    layers: Annotated[int, typer.Option(help="Show the fields for a model of this many layers.", min=1)] = 8,
    as_json: Annotated[bool, typer.Option("--json", help="Print them as JSON.")] = False,
) -> None:
    """List the named methods: what each does, and the configuration fields that it sets."""
    with reporting_errors():
        from resformer.configuration import METHODS

        fields = {name: method(layers) for name, method in METHODS.items()}
        if as_json:
            echo(json.dumps(fields, indent=2))
            return
        from resformer.model_cards.facts import FACTS

        for name, values in fields.items():
            echo(f"{name}: {FACTS[name].summary if name in FACTS else 'no entry in model_cards/facts.yaml'}")
            row("", json.dumps(values))


@app.command()
def env(as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False) -> None:
    """Print versions, processor, accelerators and settings for a bug report; no secrets."""
    with reporting_errors(any_transformers=True):
        from resformer.environment import describe_environment

        environment = describe_environment()
        if as_json:
            echo(json.dumps(environment, indent=2))
            return
        packages, variables = environment.pop("packages"), environment.pop("variables")
        if isinstance(environment["memory"], int):
            environment["memory"] = size(environment["memory"])
        for name, value in {**packages, **environment, **variables}.items():
            row(f"{name} ", "-" if value is None or value == [] else value)


@app.command()
def demo(
    output: Annotated[Path, typer.Option(help="Folder for the checkpoints.")] = Path("demo"),
    model: Annotated[
        str | None, typer.Option(help="A checkpoint folder, .gguf file or Hub id instead of SmolLM2-135M.")
    ] = None,
    method: Annotated[str, typer.Option(help="An exact method.")] = "resformer-denseformer",
    steps: Annotated[int, typer.Option(help="Fine-tuning steps of each model.", min=1)] = 12,
    block: Annotated[int, typer.Option(help="Tokens per training sequence.", min=8)] = 512,
    batch: Annotated[int, typer.Option(help="Sequences per step.", min=1)] = 2,
) -> None:
    """Retrofit a model, check that its logits are unchanged, fine-tune both, save, reload and generate.

    The model is kept in ~/.cache/resformer, or in RESFORMER_CACHE: 0.5 GB.
    """
    with reporting_errors("Finished checkpoints stay in the output folder; run the command again."):
        from resformer.demo import run_demo

        run_demo(output=output, model=model, method=method, steps=steps, block=block, batch=batch)
