"""The command line: `resformer COMMAND`. Each module of `resformer.commands` adds its commands to `app`."""

import os
import sys

from resformer.commands import conversion, general, training  # noqa: F401
from resformer.commands.terminal import app


def main() -> None:
    """Runs the command line."""
    sys.argv = list(map(_expanded, sys.argv))
    app()


def _expanded(word: str) -> str:
    """`--output=~/x` with the home folder, which bash expands only at the beginning of a word."""
    option, mark, path = word.partition("=")
    return option + mark + os.path.expanduser(path) if option.startswith("--") else word
