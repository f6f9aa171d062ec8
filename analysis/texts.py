"""Cuts files into texts for the models to read, one after the other, never whole in memory."""

from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

from resformer.errors import CheckpointError

#: Characters that are read for each wanted token: more than tokenizers put into one, on average.
_CHARACTERS_PER_TOKEN = 8


def read_texts(files: Iterable[Path], *, texts: int, max_tokens: int) -> Iterator[str]:
    """The first `texts` texts of UTF-8 files, each long enough for `max_tokens` tokens; a file's last may be shorter.

    Files are cut at line ends where lines are of a usual length, and the same way for every tokenizer.

    Raises:
        CheckpointError: a file cannot be read as text.
    """
    return islice((text for file in files for text in _cut(file, _CHARACTERS_PER_TOKEN * max_tokens)), texts)


def standard_texts(texts: int) -> Iterator[str]:
    """The first `texts` held-out source files of Python's standard library."""
    from resformer.training.data import STANDARD_HELD_OUT, is_held_out, standard_library  # imports `datasets`

    held_out = (file["text"] for file in standard_library() if is_held_out(file["group"], STANDARD_HELD_OUT))
    return islice(held_out, texts)


def _cut(file: Path, size: int) -> Iterator[str]:
    try:
        with file.open(encoding="utf-8") as opened:
            while text := opened.read(size):
                yield text + opened.readline(size)
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{file}: cannot be read as text: {error}") from error
