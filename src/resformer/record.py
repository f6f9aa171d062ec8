"""The conversion record: the file in a converted checkpoint that says where it is from and what was done."""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from resformer.names import RECORD
from resformer.untrusted import open_regular, read_json, reading, regular_file


def read_record(folder: Path) -> dict[str, Any] | None:
    """The record in `folder`; `None` if there is none."""
    return read_json(folder / RECORD) if os.path.lexists(folder / RECORD) else None


def config_digest(config: Mapping[str, Any]) -> str:
    """SHA-256 of the content of a config.json, but for its order and `auto_map`, which `resformer bundle` adds."""
    content = {key: value for key, value in config.items() if key != "auto_map"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def file_digest(path: Path) -> str:
    """SHA-256 of a whole file."""
    with open_regular(regular_file(path)) as file, reading(path):
        return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]


def weight_digests(folder: Path) -> dict[str, Any]:
    """What a `metrics.json` says of the model that it describes, under the names of the record."""
    files = {path.name: {"sha256": file_digest(path)} for path in sorted(folder.glob("*.safetensors"))}
    return {"config_sha256": config_digest(read_json(folder / "config.json")), "files": files}
