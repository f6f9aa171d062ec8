"""Bundles: a ResFormer checkpoint with the code that loads it, for those who have Transformers and not this package."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from resformer.configuration import ResFormerConfig
from resformer.convert.connections import expected_shapes
from resformer.convert.conversion import (
    Conversion,
    Outcome,
    Verify,
    carry_out,
    check_tensors,
    check_verify,
    dominant_dtype,
    foretell,
)
from resformer.convert.errors import CheckpointError, shown
from resformer.convert.files import regular_file
from resformer.convert.flattening import flatten
from resformer.convert.planning import Plan, plan_shards
from resformer.convert.reading import SideFile
from resformer.convert.retrofitting import RECORD
from resformer.convert.source import open_source
from resformer.convert.verification import LogitsComparison
from resformer.convert.writing import Transfer, check_target
from resformer.version import __version__

__all__ = ["AUTO_MAP", "BundleReport", "bundle", "remote_code"]

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
#: Of the package alone: registration with the Auto classes, which find remote code by themselves.
_FOR_REGISTRATION = ("before_first_use", "ResFormerConfig.__new__")

_HEAD = '''\
# SPDX-License-Identifier: Apache-2.0
"""{subject} of resformer {version}, in one file that needs nothing but torch and Transformers.

Written by `resformer bundle` from the modules of the package, each under a comment with its name: changes belong there.
Transformers runs this file where `trust_remote_code=True` allows it. After `import resformer` the classes of the
installed package take its place.
"""'''
_TAIL = "# Makes Transformers save this code with every model of these classes.\n"


@dataclass(frozen=True)
class BundleReport:
    """What a bundling did, or would do (`verified` is then `""` and `verification` `None`)."""

    source: str
    revision: str | None
    output: str
    code: dict[str, int]  # file that was added -> its bytes
    auto_map: dict[str, str]  # in config.json
    tensors: int
    carried_files: int
    written_files: int
    transfer: Transfer
    verified: str
    verification: LogitsComparison | None = None
    left_behind: list[str] = field(default_factory=list)  # files, and keys of config.json, that do not go along
    warnings: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return asdict(self)


def bundle(
    source: str | Path,
    output: str | Path,
    *,
    force: bool = False,
    dry_run: bool = False,
    revision: str | None = None,
    link: bool = False,
    verify: Verify = "auto",
    durable: bool = False,
    progress: bool = True,
) -> BundleReport:
    """Writes the ResFormer checkpoint `source` with its code, so that it loads where this package is not installed.

    `AutoModelForCausalLM.from_pretrained(output, trust_remote_code=True)` then needs torch and Transformers alone, and
    so do the other Auto classes. Weights, tokenizer and model card go along byte for byte; config.json gets an
    `auto_map`. Where the package is imported its own classes are used, with or without `trust_remote_code`.

    Args:
        source: a folder or a Hub id; a bundle may be bundled again, with the code of this version.
        output: a new or empty folder.
        force, dry_run, revision, link, verify, durable, progress: as for `resformer.retrofit`.

    Raises:
        CheckpointError: the source is no causal language model of ours, or `output` is in the way.
        OutputError, VerificationError: as for `resformer.retrofit`.
    """
    check_verify(verify)
    target = Path(output).expanduser()
    check_target(target, None, force=force)
    opened = open_source(source, revision, ours=True)
    check_target(target, opened.folder, force=force)
    if not isinstance(opened.config, ResFormerConfig):
        raise CheckpointError(
            f"{opened.name}: is a checkpoint of {opened.config.model_type!r}, which Transformers loads by itself. "
            "`resformer convert` gives it connections."
        )
    checkpoint = opened.checkpoint
    if (found := checkpoint.config.get("architectures", [_CAUSAL_LM])) != [_CAUSAL_LM]:
        raise CheckpointError(
            f"{opened.name}: config.json has architectures={shown(found)}; only {_CAUSAL_LM} can be bundled. Train the "
            "other heads from a bundle, with trust_remote_code=True: what that saves holds the code."
        )
    tied, notes = check_tensors(opened, expected_shapes(opened.config))
    config = {key: value for key, value in checkpoint.config.items() if key not in opened.dropped_config}
    if opened.config.tie_word_embeddings and not tied:
        config["tie_word_embeddings"] = False
    code = remote_code()
    more = [_side_file(opened.folder, name) for name in ("README.md", RECORD) if (opened.folder / name).exists()]
    plan = Plan(
        plan_shards(checkpoint.shards),
        (*checkpoint.side_files, *more),
        json.dumps({**config, "auto_map": AUTO_MAP}, indent=2, sort_keys=True) + "\n",
    )
    conversion = Conversion(
        opened,
        plan,
        target,
        dominant_dtype(checkpoint),
        exact=True,
        link=link,
        force=force,
        verify=verify,
        durable=durable,
        progress=progress,
    )

    def finish(folder: Path, outcome: Outcome) -> dict[str, str]:
        return code

    outcome = foretell(conversion) if dry_run else carry_out(conversion, finish)
    unsaid = {*code, *(file.name for file in more)}
    dropped = [key for key in opened.dropped_config if key != "auto_map"]
    return BundleReport(
        source=opened.name,
        revision=opened.revision,
        output=str(target),
        code={name: len(text.encode()) for name, text in code.items()},
        auto_map=AUTO_MAP,
        tensors=len(plan.tensors),
        carried_files=len(plan.carried),
        written_files=len(plan.written),
        **outcome.told,
        left_behind=[
            *(name for name in checkpoint.left_behind if name not in unsaid),
            *(f"config.json: {key}" for key in dropped),
        ],
        warnings=[*checkpoint.notes, *notes, *outcome.warnings],
    )


def remote_code() -> dict[str, str]:
    """File name -> text of the code that goes along: always the same for one version of this package."""
    configuration = flatten(
        f"resformer.configuration.{_CONFIGURATION}",
        head=_HEAD.format(subject="The configuration", version=__version__),
        tail=_tail(_CONFIGURATION),
        without=_FOR_REGISTRATION,
    )
    modeling = flatten(
        f"resformer.modeling.{_MODELING}",
        head=_HEAD.format(subject="The models", version=__version__),
        tail=_tail(_MODELING),
        beside={"resformer.configuration": _CONFIGURATION},
    )
    return {f"{_CONFIGURATION}.py": configuration, f"{_MODELING}.py": modeling}


def _tail(module: str) -> str:
    classes = [(auto_class, *name.split(".")) for auto_class, name in AUTO_MAP.items()]
    return _TAIL + "".join(
        f'{name}.register_for_auto_class("{auto_class}")\n' for auto_class, home, name in classes if home == module
    )


def _side_file(folder: Path, name: str) -> SideFile:
    path = regular_file(folder / name)
    return SideFile(name, path, path.stat().st_size)
