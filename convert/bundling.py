"""Bundles: a ResFormer checkpoint with the code that loads it, for those who have Transformers and not this package."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

from resformer import configuration
from resformer.configuration import ResFormerConfig
from resformer.convert.deciding import Decision
from resformer.convert.reading import side_file
from resformer.convert.source import open_source
from resformer.convert.to_folder import Options, Report, carry_out
from resformer.errors import CheckpointError, quoted
from resformer.files import check_target
from resformer.modeling.families import PREFIX
from resformer.names import DESCRIPTIONS
from resformer.untrusted import names_in
from resformer.version import __version__

_CONFIGURATION, _MODELING = "configuration_resformer", "modeling_resformer"
_CAUSAL_LM = "ResFormerForCausalLM"
#: What stands in config.json: Auto class -> the class in the files that go along.
AUTO_MAP = {
    "AutoConfig": f"{_CONFIGURATION}.ResFormerConfig",
    "AutoModel": f"{_MODELING}.ResFormerModel",
    "AutoModelForCausalLM": f"{_MODELING}.{_CAUSAL_LM}",
    "AutoModelForQuestionAnswering": f"{_MODELING}.ResFormerForQuestionAnswering",
    "AutoModelForSequenceClassification": f"{_MODELING}.ResFormerForSequenceClassification",
    "AutoModelForTokenClassification": f"{_MODELING}.ResFormerForTokenClassification",
}
_IMPORT = re.compile(r"from resformer\.(configuration|modeling\.connections|modeling)\.(\w+) import")
_NAMES = re.compile(r"from resformer\.configuration import (.+)")
#: The first lines of each module in a bundle; the module as it is in the package follows.
_HEAD = """\
# SPDX-License-Identifier: Apache-2.0
# A module of resformer {version}, put here by `resformer bundle`: changes belong in the package.
"""
#: Makes Transformers save this code with every model of these classes.
_REGISTER = '\n{name}.register_for_auto_class("{auto_class}")\n'


@dataclass(frozen=True, kw_only=True)
class BundleReport(Report):
    """The result of a bundling, or the forecast of a dry run."""

    code: dict[str, int]  # file that was added -> its bytes
    auto_map: dict[str, str]  # in config.json


def bundle(
    source: str | Path, output: str | Path, *, force: bool = False, revision: str | None = None, **options: Any
) -> BundleReport:
    """Writes the ResFormer checkpoint `source` with its code, so that it loads where this package is not installed.

    `AutoModelForCausalLM.from_pretrained(output, trust_remote_code=True)` then needs only torch and Transformers, and
    so do the other Auto classes. Weights, tokenizer and model card go along byte for byte; config.json gets an
    `auto_map`. Where the package is imported its own classes are used, with or without `trust_remote_code`.

    Args:
        source: a folder or a Hub id; a bundle may be bundled again, with the code of this version.
        output: a new or empty folder.
        force, revision: as for `resformer.retrofit`.
        options: `dry_run`, `link`, `verify`, `progress`, as for `resformer.retrofit`.

    Raises:
        CheckpointError: the source is no causal language model of ours, or `output` is in the way.
        OutputError, VerificationError: as for `resformer.retrofit`.
    """
    settings = Options(made_by="bundle", force=force, **options)
    target = Path(output).expanduser()
    check_target(target, source, made_by=settings.made_by, force=force)
    opened = open_source(source, revision, heads=True)
    known = {key: value for key, value in opened.raw_config.items() if key not in opened.dropped_config}
    config = config_with_code({"model_type": opened.config.model_type, **known}, opened.name)
    code = remote_code()
    fetched = opened.fetch(headers_only=settings.dry_run)
    if fetched.config.tie_word_embeddings and not fetched.tied:
        config["tie_word_embeddings"] = False
    # What describes it goes along.
    names = [name for name in names_in(opened.folder) if DESCRIPTIONS.fullmatch(name)]
    report = carry_out(
        Decision(
            source=fetched,
            config=json.dumps(config, indent=2, sort_keys=True) + "\n",
            dtype=fetched.dtype,
            side_files=tuple(side_file(opened.folder, name) for name in names),
        ),
        target,
        settings,
        partial(BundleReport, code={name: len(text.encode()) for name, text in code.items()}, auto_map=AUTO_MAP),
        lambda report, digests: code,
    )
    # Code of an older version is replaced, not left behind; its auto_map too.
    left_behind = [name for name in report.left_behind if name not in {*code, "config.json: auto_map"}]
    return replace(report, left_behind=left_behind)


def config_with_code(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The content of config.json that makes Transformers load `remote_code()`."""
    if (model_type := config.get("model_type")) != ResFormerConfig.model_type:
        if isinstance(model_type, str) and model_type.startswith(PREFIX):
            raise CheckpointError(
                f"{name}: cannot be bundled: its decoder is that of {model_type.removeprefix(PREFIX)} in Transformers, "
                "which the package changes in place. Readers install resformer and import it. Or share the "
                "coefficients alone (resformer.save_connections)."
            )
        raise CheckpointError(
            f"{name}: is a checkpoint of {quoted(model_type)}, which Transformers loads by itself. `resformer convert` "
            "gives it connections."
        )
    if (architectures := config.get("architectures", [_CAUSAL_LM])) != [_CAUSAL_LM]:
        raise CheckpointError(
            f"{name}: config.json has architectures={quoted(architectures)}; only {_CAUSAL_LM} can be bundled. "
            "Train the other heads from a bundle, with trust_remote_code=True: what that saves holds the code."
        )
    return {**config, "auto_map": AUTO_MAP}


def remote_code() -> dict[str, str]:
    """File name -> text of the code that goes along: always the same for one version of this package.

    These are the package's modules, their imports of each other made relative: Transformers follows those.
    """
    code = {}
    modules = [("configuration", _CONFIGURATION), ("modeling", _MODELING)]
    for package, module in modules:
        home = files(f"resformer.{package}")
        if module == "connections":
            # The package imports whatever is in its folder; Transformers follows import statements alone.
            kinds = sorted(each.name for each in (home / module).iterdir() if each.name[0] != "_")
            kinds = [f"from resformer.modeling.connections.{kind[:-3]} import __doc__  # noqa: F401" for kind in kinds]
            text = "\n".join(["from resformer.modeling.connection import KINDS  # noqa: F401", *kinds, ""])
        else:
            text = (home / f"{module}.py").read_text(encoding="utf-8")
        text = _NAMES.sub(_from_their_homes, text)
        modules += [name for name in _IMPORT.findall(text) if name not in modules]
        code[f"{module}.py"] = _HEAD.format(version=__version__) + _IMPORT.sub(r"from .\2 import", text)
    for auto_class, reference in AUTO_MAP.items():
        file, name = reference.split(".")
        code[f"{file}.py"] += _REGISTER.format(name=name, auto_class=auto_class)
    return dict(sorted(code.items()))


def _from_their_homes(match: re.Match[str]) -> str:
    """An import from the package `resformer.configuration`, which a bundle lacks, from the modules of its names."""
    names = match[1].split(", ")
    return "\n".join(f"from {getattr(configuration, name).__module__} import {name}" for name in names)
