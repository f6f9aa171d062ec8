"""`resformer methods` and `env`."""

import json
from typing import Annotated

import typer

from resformer.commands.terminal import START, app, echo, example, reporting_errors, row, size


@app.command(**example(START, "resformer methods --layers 30"))
def methods(
    layers: Annotated[int, typer.Option(help="Show the fields for a model of this many layers.", min=1)] = 8,
    as_json: Annotated[bool, typer.Option("--json", help="Print them as JSON.")] = False,
) -> None:
    """List the named methods: what each does and its fields; first those to begin with, with their losses and costs."""
    with reporting_errors(any_transformers=True):
        from resformer.configuration.methods import FIRST, METHODS

        listed = {name: METHODS[name] for name in FIRST} | METHODS
        if as_json:
            echo(json.dumps({name: method(layers) for name, method in listed.items()}, indent=2))
            return
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


@app.command(**example(START, "resformer env --json"))
def env(as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False) -> None:
    """Print versions and hardware for a bug report; no secrets."""
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
