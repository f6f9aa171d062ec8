"""The record of a study: a file of JSON lines, one that says what is trained on what, then one for each run."""

import json
from pathlib import Path
from typing import Any

from resformer.errors import CheckpointError, first_names, one_line
from resformer.files import locked, replace_text

Study = dict[str, Any]
Run = dict[str, Any]


def read_record(path: Path) -> list[tuple[Study, list[Run]]]:
    """Each study of a file, and its runs. A file can hold several: records joined by `cat`.

    Raises:
        CheckpointError: the file, or a line of it, cannot be read.
    """
    studies: list[tuple[Study, list[Run]]] = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: cannot be read ({one_line(error)}).") from error
    for number, line in enumerate(lines, 1):
        try:
            value = json.loads(line)
            if "study" in value:
                studies.append((value["study"], []))
            else:
                studies[-1][1].append(value)
        except (ValueError, TypeError, IndexError) as error:
            told = f"{path}: line {number} is no run of a study ({one_line(error)})"
            raise CheckpointError(f"{told}; remove it to train that run again.") from error
    return studies


def joined(path: Path) -> tuple[Study, dict[tuple[str, str, int], Run]]:
    """The study of a file, and each run by size, method and seed.

    Raises:
        CheckpointError: the file cannot be read, joins studies with other plans, or has two results of a run.
    """
    studies = read_record(path)
    if not studies:
        raise CheckpointError(f"{path}: has no study.")
    first, _ = studies[0]
    runs: dict[tuple[str, str, int], Run] = {}
    for study, of_study in studies:
        if different := sorted(x for x in {*first, *study} - {"command"} if first.get(x) != study.get(x)):
            told = f"{path}: joins studies that differ in {first_names(different)}"
            raise CheckpointError(f"{told}; compare the runs of one plan.")
        for run in of_study:
            key = run["size"], run["method"], run["seed"]
            if runs.setdefault(key, run)["loss"] != run["loss"]:
                raise CheckpointError(f"{path}: has two results of {' '.join(map(str, key))}; remove the line of one.")
    return first, runs


def add_line(path: Path, value: dict[str, Any]) -> None:
    """Appends a study (`{"study": ...}`) or a run. If the process is killed, the file is as it was before."""
    with locked(path.with_name(f".{path.name}.lock"), wait=True):
        before = path.read_text(encoding="utf-8") if path.exists() else ""
        replace_text(path, f"{before}{json.dumps(value, allow_nan=False)}\n")
