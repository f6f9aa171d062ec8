"""Licence, languages and data from the metadata of a source's model card, which is untrusted: values are checked."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub.repocard import metadata_load
from yaml import YAMLError

__all__ = ["carried_metadata", "well_formed"]

_MOST_BYTES = 4 * 2**20
_PATTERNS = {
    "license": r"[\w.+-]{1,100}",
    "license_name": r"[\w.+ -]{1,200}",
    "license_link": r"https://[^\s<>\"'`()\[\]]{1,500}|LICEN[SC]E[\w.-]{0,50}",
    "language": r"[A-Za-z]{2,20}(-[A-Za-z0-9]{2,8})*",
    "datasets": r"[\w.-]{1,100}(/[\w.-]{1,100})?",
}
_LISTS = ("language", "datasets")


def carried_metadata(card: Path) -> dict[str, Any]:
    """The fields `license`, `license_name`, `license_link`, `language` and `datasets` of a `README.md`.

    Values that do not match a field's pattern are left out. A missing or unreadable card gives an empty mapping.
    """
    try:
        if not card.is_file() or card.stat().st_size > _MOST_BYTES:
            return {}
        stated = metadata_load(card)
    except (OSError, ValueError, YAMLError, RecursionError):
        return {}
    return well_formed(stated or {})


def well_formed(stated: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `stated` that a card carries over and that match their patterns; lists stay lists."""
    carried: dict[str, Any] = {}
    for name, pattern in _PATTERNS.items():
        value = stated.get(name)
        entries = value if isinstance(value, list) else [value]
        fit = [entry for entry in entries if isinstance(entry, str) and re.fullmatch(pattern, entry)]
        if fit and name in _LISTS:
            carried[name] = fit
        elif fit and not isinstance(value, list):
            carried[name] = fit[0]
    return carried
