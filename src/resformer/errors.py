"""The errors that a user may catch, and how messages show names that come from a file."""

import reprlib
from collections.abc import Collection, Iterable
from difflib import get_close_matches


class ResFormerError(Exception):
    """Base of the package's errors. Wrong arguments raise `ValueError`."""


class CheckpointError(ResFormerError):
    """A checkpoint cannot be read, converted or written; the message names the file or tensor and the way out.

    Args:
        message: for a person.
        option: the command-line option that would allow what was refused, for example `"--lossy"`.
    """

    def __init__(self, message: str, option: str | None = None):
        super().__init__(message)
        self.option = option


class OutputError(CheckpointError):
    """The result cannot be written: no space, no permission. Nothing new is left behind."""


class VerificationError(CheckpointError):
    """The result does not hold or compute what its source does. No folder was replaced; the message names a commit."""


_short = reprlib.Repr()
_short.maxstring = 120


def quoted(name: object) -> str:
    """A name from a file, quoted, with control characters and lone surrogates escaped, and of a bounded length."""
    return _short.repr(name)


def plain(text: object) -> str:
    """Escapes every character that is not printable, except newlines: a hostile file name could control a terminal."""
    return "".join(letter if letter.isprintable() or letter == "\n" else ascii(letter)[1:-1] for letter in str(text))


def one_line(text: object, most: int = 400) -> str:
    """Shortens a library's error text to one line, with control characters escaped."""
    line = " ".join(str(text).splitlines())
    return plain(line[:most]) if len(line) <= most else f"{plain(line[:most])}..."


def first_names(names: Collection[str], most: int = 5) -> str:
    """Some names from a file: the first `most`, sorted, and how many more there are."""
    ordered = sorted(names)
    more = f" and {len(ordered) - most} more" if len(ordered) > most else ""
    return ", ".join(quoted(name) for name in ordered[:most]) + more


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The last sentence of a message: the known name that is most like an unknown one; empty if none is."""
    if had_two_meanings(name):
        return (
            " What had this name is `delta-attention-residuals` now; Kimi's Attention Residuals (arXiv 2603.15031) are "
            "`attnres`."
        )
    return "".join(f" Did you mean {close!r}?" for close in get_close_matches(name, list(known), n=1))


def had_two_meanings(name: str) -> bool:
    """Whether delta attention residuals had this name of a method or field, which is also that of Kimi's."""
    return name.replace("_", "-").startswith("attention-residual")
