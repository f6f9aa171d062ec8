"""Licence, languages and data from the metadata of a source's model card, which is untrusted: values are checked."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub.repocard import REGEX_YAML_BLOCK

from resformer.errors import CheckpointError
from resformer.untrusted import MIB, read_bounded

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

    Values that do not match a field's pattern are left out. A card that is missing, unreadable or a link out of its
    folder gives an empty mapping.
    """
    try:
        return well_formed(card_metadata(read_bounded(card, 4 * MIB).decode("utf-8-sig")))
    except (CheckpointError, ValueError):
        return {}


def licences(card: Path) -> list[str]:
    """The licences that the `README.md` of a dataset names: one, several or none."""
    named = carried_metadata(card).get("license", [])
    return [named] if isinstance(named, str) else named


class _WithoutAliases(yaml.SafeLoader):
    """Reads plain YAML: merged aliases of aliases make a few hundred bytes take hours."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases (*name) are not read")
        return super().compose_node(parent, index)


def card_metadata(text: str) -> dict[str, Any]:
    """The metadata of a model card; empty if it has none.

    Raises:
        ValueError: they are no mapping in plain YAML.
    """
    block = REGEX_YAML_BLOCK.search(text)
    try:
        stated = yaml.load(block[2], _WithoutAliases) if block else None
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(str(error) or "it is nested too deeply") from error
    if stated is not None and not isinstance(stated, dict):
        raise ValueError(f"expected a mapping, found {type(stated).__name__}")
    return stated or {}


def well_formed(stated: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `stated` that a card carries over and that match their patterns: languages and data as lists."""
    carried: dict[str, Any] = {}
    for name, pattern in _PATTERNS.items():
        value = stated.get(name)
        entries = value if isinstance(value, list) else [value]
        if name == "language":  # Norwegian is a false value in YAML 1.1, and a word for the Hub
            entries = ["no" if entry is False else entry for entry in entries]
        fit = [entry for entry in entries if isinstance(entry, str) and re.fullmatch(pattern, entry)]
        several = isinstance(value, list)
        if fit and (not several or name in ("license", *_LISTS)):
            carried[name] = fit if several or name in _LISTS else fit[0]
    return carried


def base_model_of(config: object) -> dict[str, Any]:
    """`name`, `revision` (`None`: it was no repository of the Hub) and licence of the model that `config` names.

    They are in the `base_model` of config.json, which is untrusted. Empty if it names none.
    """
    stated = getattr(config, "base_model", None)
    if not isinstance(stated, dict) or not isinstance(name := stated.get("name"), str) or not name.isprintable():
        return {}
    revision = stated.get("revision")
    on_hub = isinstance(revision, str) and re.fullmatch(r"\w+", revision) and re.fullmatch(r"[\w./-]+", name)
    licence = {key: value for key, value in well_formed(stated).items() if key.startswith("license")}
    return {"name": name[:200], "revision": revision if on_hub else None, **licence}
