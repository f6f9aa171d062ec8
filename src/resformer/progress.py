"""Progress of long work: a bar on a terminal and in notebooks, elsewhere a line every 10 seconds."""

import sys
from typing import Any

from tqdm.asyncio import tqdm as terminal_bar
from tqdm.auto import tqdm

_SECONDS = 10.0


class _Lines:
    """A file for tqdm whose every new state of a bar is a line of stderr."""

    def write(self, text: str) -> None:
        if line := text.strip():
            print(line, file=sys.stderr, flush=True)

    def flush(self) -> None:
        pass


def progress_bar(*, show: bool = True, **arguments: Any) -> "tqdm[Any]":
    """tqdm's bar with its `arguments`, to be used as a context manager; it prints nothing without `show`."""
    in_notebook = tqdm is not terminal_bar
    if show and not in_notebook and not sys.stderr.isatty():
        arguments |= {"file": _Lines(), "mininterval": _SECONDS, "delay": _SECONDS, "miniters": 1, "leave": False}
        rest = (
            " [{elapsed}]" if arguments.get("total") is None else " of {total_fmt} [{elapsed}<{remaining}, {rate_fmt}]"
        )
        arguments["bar_format"] = "{desc}: {n_fmt}" + rest
    return tqdm(disable=not show, **arguments)
