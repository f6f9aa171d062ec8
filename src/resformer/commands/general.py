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
    """List the named methods: what each does, and its fields."""
    with reporting_errors(any_transformers=True):
        from resformer.configuration import METHODS

        if as_json:
            echo(json.dumps({name: method(layers) for name, method in METHODS.items()}, indent=2))
            return
        for name, method in METHODS.items():
            echo(f"{name}: {method.summary}")
            row("", json.dumps(method(layers)))
        echo(f"Fields for {layers} layers; --layers shows those of another depth.")


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
