"""Bundles: a ResFormer checkpoint with the code that loads it, for those who have Transformers and not this package."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from resformer.configuration.connected_config import ConnectedConfig
from resformer.convert.carrying import File
from resformer.convert.judging import without_code
from resformer.convert.reading import side_file
from resformer.convert.remote_code import auto_map, remote_code
from resformer.convert.to_folder import Decision, Options, Report, carry_out
from resformer.errors import CheckpointError, quoted
from resformer.names import DESCRIPTIONS
from resformer.untrusted import names_in


@dataclass(frozen=True, kw_only=True)
class BundleReport(Report):
    """The result of a bundling, or the forecast of a dry run."""

    code: dict[str, int]  # file that was added -> its bytes
    auto_map: dict[str, str]  # in config.json


def bundle(
    source: str | Path, output: str | Path, *, force: bool = False, revision: str | None = None, **options: Any
) -> BundleReport:
    """Writes a checkpoint with connections with its code, so that it loads where this package is not installed.

    `AutoModelForCausalLM.from_pretrained(output, trust_remote_code=True)` then needs only torch and Transformers, and
    so do the other Auto classes. Weights, tokenizer and model card go along byte for byte; config.json gets an
    `auto_map`. Where the package is imported its own classes are used, with or without `trust_remote_code`.

    Args:
        source: a folder or a Hub id; a bundle may be bundled again, with the code of this version.
        output: a new or empty folder.
        force, revision: as for `resformer.retrofit`.
        options: `dry_run`, `link`, `verify`, `progress`, as for `resformer.retrofit`.

    Raises:
        CheckpointError: the source is no language model with connections, a class of connections that it has cannot go
            along, or `output` is in the way.
        OutputError, VerificationError: as for `resformer.retrofit`.
    """
    settings = Options(made_by="bundle", force=force, **options)
    target, opened = settings.start(source, output, revision, heads=True)
    known = {"model_type": opened.config.model_type, **without_code(opened.raw_config)}
    config = config_with_code(known, opened.config, opened.name)
    code = {name: text.encode() for name, text in remote_code(opened.config).items()}
    fetched = opened.fetch(headers_only=settings.dry_run)
    if fetched.config.tie_word_embeddings and not fetched.built.tied:
        config["tie_word_embeddings"] = False
    # What describes it goes along.
    described = [side_file(opened.folder, name) for name in names_in(opened.folder) if DESCRIPTIONS.fullmatch(name)]
    decision = Decision(
        source=fetched,
        config=json.dumps(config, indent=2, sort_keys=True) + "\n",
        side_files=(*described, *(File(name, (content,)) for name, content in code.items())),
    )
    sizes = {name: len(content) for name, content in code.items()}
    return carry_out(decision, target, settings, partial(BundleReport, code=sizes, auto_map=config["auto_map"]))


def config_with_code(raw_config: Mapping[str, Any], config: Any, name: str) -> dict[str, Any]:
    """The content of config.json that makes Transformers load `remote_code(config)`.

    Args:
        raw_config: config.json as it stands.
        config: what it is read as.
    """
    if not isinstance(config, ConnectedConfig):
        raise CheckpointError(
            f"{name}: is a checkpoint of {quoted(raw_config.get('model_type'))}, which Transformers loads by itself. "
            "`resformer convert` gives it connections."
        )
    classes = auto_map(config)
    bundled = [
        classes[each].partition(".")[2]
        for each in ("AutoModelForCausalLM", "AutoModelForImageTextToText")
        if each in classes
    ]
    if (architectures := raw_config.get("architectures", bundled[:1])) not in [[each] for each in bundled]:
        raise CheckpointError(
            f"{name}: config.json has architectures={quoted(architectures)}; only {' or '.join(bundled)} can be "
            "bundled. Train the other heads from a bundle, with trust_remote_code=True: what that saves holds the code."
        )
    return {**raw_config, "auto_map": classes}
