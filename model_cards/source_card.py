"""What a source's own card says about licence, languages and data, as far as it can be trusted to be just that."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub.repocard import metadata_load
from yaml import YAMLError

__all__ = ["carried_metadata", "well_formed"]

_MOST_BYTES = 4 * 2**20
_FORMS = {
    "license": r"[\w.+-]{1,100}",
    "license_name": r"[\w.+ -]{1,200}",
    "license_link": r"https://[^\s<>\"'`()\[\]]{1,500}|LICEN[SC]E[\w.-]{0,50}",
    "language": r"[A-Za-z]{2,20}(-[A-Za-z0-9]{2,8})*",
    "datasets": r"[\w.-]{1,100}(/[\w.-]{1,100})?",
}
_LISTS = ("language", "datasets")


def carried_metadata(card: Path) -> dict[str, Any]:
    """`license`, `license_name`, `license_link`, `language` and `datasets` of a `README.md`, those that it states.

    A card is a stranger's text: what does not have a field's form is left out, and no card at all is no error.
    """
    try:
        if not card.is_file() or card.stat().st_size > _MOST_BYTES:
            return {}
        stated = metadata_load(card)
    except (OSError, ValueError, YAMLError, RecursionError):
        return {}
    return well_formed(stated or {})


def well_formed(stated: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `stated` that are carried and have their form; the lists as lists."""
    found: dict[str, Any] = {}
    for name, form in _FORMS.items():
        value = stated.get(name)
        entries = value if isinstance(value, list) else [value]
        fit = [entry for entry in entries if isinstance(entry, str) and re.fullmatch(form, entry)]
        if fit and name in _LISTS:
            found[name] = fit
        elif fit and not isinstance(value, list):
            found[name] = fit[0]
    return found
