"""The conversion record: the file in a converted checkpoint that says where it is from and what was done."""

from pathlib import Path
from typing import Any

from resformer.untrusted import read_json

__all__ = ["RECORD", "read_record"]

RECORD = "resformer_conversion.json"


def read_record(folder: Path) -> dict[str, Any] | None:
    """The record in `folder`; `None` if there is none.

    Raises:
        CheckpointError: the file cannot be read as JSON.
    """
    return read_json(folder / RECORD) if (folder / RECORD).is_file() else None
