"""The command line: `resformer COMMAND`. Each module of `resformer.commands` adds its commands to `app`."""

import os
import sys

from resformer.commands import analysis as analysis
from resformer.commands import cards as cards
from resformer.commands import comparison as comparison
from resformer.commands import conversion as conversion
from resformer.commands import evaluation as evaluation
from resformer.commands import general as general
from resformer.commands import pretraining as pretraining
from resformer.commands import pushing as pushing
from resformer.commands import shrinking as shrinking
from resformer.commands import training as training
from resformer.commands.terminal import app


def main() -> None:
    """Runs the command line."""
    sys.argv = list(map(_expanded, sys.argv))
    app()


def _expanded(word: str) -> str:
    """`--output=~/x` with the home folder, which bash expands only at the beginning of a word."""
    option, mark, path = word.partition("=")
    return option + mark + os.path.expanduser(path) if option.startswith("--") else word
