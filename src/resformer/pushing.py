"""Pushes a checkpoint folder to the Hub: all checks first, then one commit."""

import json
import os
import re
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from pathlib import Path

from huggingface_hub import ModelCard, constants
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from resformer.convert import inspect
from resformer.convert.bundling import config_with_code, remote_code
from resformer.errors import CheckpointError, one_line
from resformer.files import EVAL_RESULTS, LISTING, AsDict
from resformer.hub import HubError as HubError
from resformer.hub import Push
from resformer.untrusted import MIB, read_bounded, read_json, regular_file

#: Names of files and folders that training, editors and version control leave in a checkpoint's folder.
_LEFT_BEHIND = (
    ".* __pycache__ checkpoint-* global_step* runs wandb "
    "*.tmp *.lock *.pyc *.log events.out.tfevents.* trainer_state.json zero_to_fp32.py latest "
    "adapter_config.json adapter_model* "  # Transformers would load the adapter's base model instead
    "*.bin *.pt *.pth *.ckpt *.pkl *.pickle *.distcp"  # pickles: optimiser states, arguments, weights that run code
).split()
#: What Transformers would load beside, or instead of, the weights that are pushed.
_WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json|adapter_config\.json")


@dataclass(frozen=True)
class PushReport(AsDict):
    """The result of a push, or the forecast of a dry run."""

    checkpoint: str
    repo_id: str
    revision: str  # the branch; of a pull request, its own
    files: dict[str, int]  # name -> bytes
    left_behind: list[str]  # names in the folder that do not belong to the checkpoint
    deleted: list[str] = field(default_factory=list)  # weights that the branch held before
    commit: str | None = None  # None: nothing was pushed
    url: str | None = None  # of the commit, or of the pull request
    tag: str | None = None
    warnings: list[str] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        return sum(self.files.values())


def push(
    checkpoint: str | Path,
    repo_id: str,
    *,
    private: bool = False,
    revision: str | None = None,
    message: str | None = None,
    create_pr: bool = False,
    bundle: bool = False,
    tag: str | None = None,
    dry_run: bool = False,
) -> PushReport:
    """Puts a checkpoint folder on the Hub, in one commit; the token is `HF_TOKEN` or that of `hf auth login`.

    Weights and an `adapter_config.json` of an earlier push, which Transformers would load instead, are deleted in the
    same commit; so are evaluation results, where weights change. Passing errors are tried again; after a failure, a
    second push uploads only what is missing.

    Args:
        checkpoint: a folder with `config.json`, safetensors and a model card, `README.md`.
        repo_id: `owner/name`, or `name` for one of your own; made if there is none.
        private: make it private; refused if it exists and is public.
        revision: the branch, made from `main` if there is none; default: `main`.
        message: of the commit.
        create_pr: open a pull request instead of changing `main`.
        bundle: add the code that loads the checkpoint without this package, see `resformer.convert.bundle`; other
            Python files are left behind.
        tag: name the commit; refused if the name is taken.
        dry_run: check the folder and say what would go; the Hub is not asked.

    Raises:
        ValueError: the arguments contradict each other, or are no names of the Hub.
        CheckpointError: the folder is no checkpoint that loads, or its card is missing or invalid.
        HubError: the Hub refuses, or cannot be reached.
    """
    if create_pr and (revision is not None or tag is not None):
        raise ValueError("A pull request goes to main and is no release: give neither a revision nor a tag.")
    validate_repo_id(repo_id)
    folder = Path(checkpoint).expanduser()
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: expected a checkpoint folder.")
    inspection = inspect(folder)
    contents, left_behind = _select(folder)
    warnings = [*inspection.warnings, *_check_card(folder, repo_id, bundle=bundle)]
    config = read_json(folder / "config.json")
    if bundle:
        code = remote_code()
        left_behind = sorted([*left_behind, *(name for name in contents if name.endswith(".py") and name not in code)])
        code["config.json"] = json.dumps(config_with_code(config, str(folder)), indent=2, sort_keys=True) + "\n"
        contents |= {name: text.encode() for name, text in code.items()}
        contents = {name: contents[name] for name in sorted(contents) if name not in left_behind}
    elif "auto_map" in config and "modeling_resformer.py" not in contents:
        warnings.append("config.json names code (auto_map) that is not in the folder: push it with --bundle.")
    report = PushReport(
        checkpoint=str(folder),
        repo_id=repo_id,
        revision=revision or constants.DEFAULT_REVISION,
        files={name: _size(content) for name, content in contents.items()},
        left_behind=left_behind,
        tag=tag,
        warnings=warnings,
    )
    if dry_run:
        return report
    pushed = Push(
        repo_id=repo_id,
        contents=contents,
        message=message or f"Upload {inspection.method or inspection.model_type} checkpoint",
        superseded=lambda name: _WEIGHTS.fullmatch(name) is not None,
        source=str(folder),
        revision=report.revision,
        private=private,
        create_pr=create_pr,
        tag=tag,
    ).run()
    return replace(report, **vars(pushed))


def _select(folder: Path) -> tuple[dict[str, Path | bytes], list[str]]:
    """The checkpoint's files, by their names on the Hub, and the names in its folder that are left behind."""
    contents: dict[str, Path | bytes] = {}
    left_behind = []
    for parent, folders, files in os.walk(folder):
        inner = Path(parent).relative_to(folder)
        for name in sorted({*folders, *files} - {LISTING}):
            path = (inner / name).as_posix()
            linked_folder = name in folders and (folder / path).is_symlink()
            debris = name != EVAL_RESULTS and any(fnmatch(name, pattern) for pattern in _LEFT_BEHIND)
            if linked_folder or debris:
                left_behind.append(f"{path}/" if name in folders else path)
            elif name in files:
                contents[path] = regular_file(folder / path, folder, within=True)
        folders[:] = [name for name in folders if f"{(inner / name).as_posix()}/" not in left_behind]
    return dict(sorted(contents.items())), sorted(left_behind)


def _size(content: Path | bytes) -> int:
    return len(content) if isinstance(content, bytes) else content.stat().st_size


def _check_card(folder: Path, repo_id: str, *, bundle: bool) -> list[str]:
    """Warnings about the model card."""
    path = folder / "README.md"
    if not path.exists():
        raise CheckpointError(f"{path}: there is no model card. Write one, with its metadata, before others get this.")
    content = read_bounded(path, MIB)
    try:
        text = content.decode("utf-8")
        metadata = ModelCard(text).data.to_dict()
    except Exception as error:  # YAML parsers raise nearly anything
        raise CheckpointError(f"{path}: its metadata cannot be read: {one_line(error)}") from error
    if not metadata:
        raise CheckpointError(f"{path}: has no metadata; begin it with `---`, `library_name: transformers`, `---`.")
    warnings, option = [], f"--repository {repo_id}"
    if repo_id not in text:
        way = f"One that does: resformer card {folder} {option}."
        warnings.append(f"README.md does not name {repo_id}: its code may load something else. {way}")
    if bundle and "trust_remote_code=True" not in text:
        warnings.append(
            "README.md loads the checkpoint without trust_remote_code=True, which readers of a bundle need. One that "
            f"does: resformer bundle {folder} BUNDLE; resformer card BUNDLE {option}."
        )
    return warnings
