"""Pushes a checkpoint folder to the Hub: all checks first, then one commit."""

import json
import os
import re
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, TypeVar

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, ModelCard, constants, get_token
from huggingface_hub.errors import (
    HfHubHTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from resformer.convert import inspect
from resformer.convert.bundling import config_with_code, remote_code
from resformer.errors import CheckpointError, ResFormerError, brief
from resformer.untrusted import MIB, read_bounded, read_json, regular_file
from resformer.version import __version__

__all__ = ["HubError", "PushReport", "push"]

#: Names of files and folders that training, editors and version control leave in a checkpoint's folder.
_LEFT_BEHIND = (
    ".* __pycache__ checkpoint-* global_step* runs wandb "
    "*.tmp *.lock *.pyc *.log events.out.tfevents.* trainer_state.json zero_to_fp32.py latest "
    "*.bin *.pt *.pth *.ckpt *.pkl *.pickle *.distcp"  # pickles: optimiser states, arguments, weights that run code
).split()
#: The folder of benchmark results that the Hub shows; `resformer card --eval` writes it.
_RESULTS = ".eval_results"
#: Weights that Transformers would load beside, or instead of, those that are pushed.
_WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json")
_ATTEMPTS = 4  # of each step, after pauses of 1, 2 and 4 seconds
_TRANSIENT = {408, 429, 500, 502, 503, 504}
#: The base of all errors of the HTTP client, of httpx or httpx2, whichever huggingface_hub uses.
_HTTPError: type[Exception] = HfHubHTTPError.__bases__[0]

_Result = TypeVar("_Result")


class HubError(ResFormerError):
    """The Hub refuses, or cannot be reached; the message names the repository and the way out."""


@dataclass(frozen=True)
class PushReport:
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

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "bytes": self.bytes}


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

    Weights of an earlier push that Transformers would load instead of these are deleted in the same commit. Passing
    errors are tried again; after a failure, a second push uploads only what is missing.

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
    if bundle:
        config = config_with_code(read_json(folder / "config.json"), str(folder))
        code = remote_code()
        foreign_code = [name for name in contents if name.endswith(".py") and name not in code]
        left_behind = sorted([*left_behind, *foreign_code])
        added = {"config.json": json.dumps(config, indent=2, sort_keys=True) + "\n", **code}
        contents |= {name: text.encode() for name, text in added.items()}
        contents = {name: contents[name] for name in sorted(contents) if name not in foreign_code}
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
    api = HfApi(library_name="resformer", library_version=__version__)
    message = message or f"Upload {inspection.method or inspection.model_type} checkpoint"
    return _Push(api, report, contents, private=private, message=message, create_pr=create_pr).run()


@dataclass(frozen=True)
class _Push:
    """One push; each of its steps can be repeated without harm."""

    api: HfApi
    report: PushReport
    contents: dict[str, Path | bytes]
    private: bool
    message: str
    create_pr: bool

    def run(self) -> PushReport:
        if constants.HF_HUB_OFFLINE:
            raise HubError(f"{self.report.repo_id}: cannot be pushed to while HF_HUB_OFFLINE is set; unset it.")
        if get_token() is None:
            raise HubError(f"{self.report.repo_id}: no token. Run `hf auth login`, or set HF_TOKEN to a write token.")
        repo_id = self._retried(self._make_repository)
        report = replace(self.report, repo_id=repo_id)
        if report.tag is not None:
            self._retried(lambda: self._check_tag(repo_id))
        # The commit may be made although its answer is lost. Committing to a branch again changes nothing then, but
        # would open a second pull request.
        commit, deleted = self._retried(lambda: self._commit(repo_id), attempts=1 if self.create_pr else _ATTEMPTS)
        if report.tag is not None:
            tag = report.tag
            self._retried(lambda: self.api.create_tag(repo_id, tag=tag, revision=commit.oid, exist_ok=True))
        return replace(
            report,
            revision=commit.pr_revision or report.revision,
            deleted=deleted,
            commit=commit.oid,
            url=commit.pr_url or commit.commit_url,
        )

    def _make_repository(self) -> str:
        repo_id = self.api.create_repo(self.report.repo_id, private=self.private or None, exist_ok=True).repo_id
        if self.private and not self.api.model_info(repo_id).private:
            raise HubError(f"{repo_id}: exists and is public. Make it private in its settings, or push elsewhere.")
        return repo_id

    def _check_tag(self, repo_id: str) -> None:
        if any(tag.name == self.report.tag for tag in self.api.list_repo_refs(repo_id).tags):
            raise HubError(f"{repo_id}: has a tag {self.report.tag} already; choose another. Nothing was pushed.")

    def _commit(self, repo_id: str) -> tuple[Any, list[str]]:
        """One `create_commit`: `upload_folder` may spread a folder over several commits."""
        branch = self.report.revision
        if branch != constants.DEFAULT_REVISION and not branch.startswith("refs/"):
            self.api.create_branch(repo_id, branch=branch, exist_ok=True)
        before = self.api.list_repo_files(repo_id, revision=branch)
        deleted = [name for name in before if _WEIGHTS.fullmatch(name) and name not in self.contents]
        operations = [CommitOperationDelete(name, is_folder=False) for name in deleted]
        additions = [CommitOperationAdd(name, content) for name, content in self.contents.items()]
        commit = self.api.create_commit(
            repo_id,
            [*operations, *additions],
            commit_message=self.message,
            revision=branch,
            create_pr=self.create_pr,
        )
        return commit, deleted

    def _retried(self, step: Callable[[], _Result], attempts: int = _ATTEMPTS) -> _Result:
        """Does a step, again after passing errors; other errors are raised with a message of one line."""
        for pause in [*(2**attempt for attempt in range(attempts - 1)), None]:
            try:
                return step()
            except _HTTPError as error:
                if pause is None or not _is_transient(error):
                    raise HubError(self._message(error)) from error
                time.sleep(pause)
            except RuntimeError as error:  # "Error while uploading ...", from an error that was tried again already
                raise HubError(self._message(error.__cause__ or error)) from error
            except ValueError as error:  # the Hub rejects the card's metadata
                raise CheckpointError(f"{self.report.checkpoint}: {brief(error)}") from error
        raise AssertionError("the last attempt returns or raises")

    def _message(self, error: BaseException) -> str:
        repo_id = self.report.repo_id
        if isinstance(error, RevisionNotFoundError):
            return f"{repo_id}: has no branch {self.report.revision}."
        if isinstance(error, HfHubHTTPError):
            answer = brief(error.server_message or error)
            status = error.response.status_code
            if status == 401 and not isinstance(error, RepositoryNotFoundError):
                return (
                    f"{repo_id}: the Hub does not accept this token ({answer}). Run `hf auth login`, or set HF_TOKEN."
                )
            if status == 403:
                return f"{repo_id}: this token may not write there ({answer}). Use a write token of the owner's."
            if isinstance(error, RepositoryNotFoundError):
                return f"{repo_id}: there is no such repository, or this token may not see it ({answer})."
            return f"{repo_id}: the Hub answered {status} ({answer}). Run the command again later."
        if isinstance(error, _HTTPError):
            return (
                f"{repo_id}: {self.api.endpoint} cannot be reached ({brief(error) or type(error).__name__}). Run the "
                "command again: nothing is uploaded or committed twice."
            )
        return f"{repo_id}: {brief(error)}"


def _is_transient(error: BaseException) -> bool:
    if isinstance(error, HfHubHTTPError):
        return error.response.status_code in _TRANSIENT
    return isinstance(error, _HTTPError)


def _select(folder: Path) -> tuple[dict[str, Path | bytes], list[str]]:
    """The checkpoint's files, by their names on the Hub, and the names in its folder that are left behind.

    Raises:
        CheckpointError: a link leads out of the folder: its target may be private.
    """
    contents: dict[str, Path | bytes] = {}
    left_behind = []
    for parent, folders, files in os.walk(folder):
        inner = Path(parent).relative_to(folder)
        for name in sorted([*folders, *files]):
            path = (inner / name).as_posix()
            linked_folder = name in folders and (folder / path).is_symlink()
            debris = name != _RESULTS and any(fnmatch(name, pattern) for pattern in _LEFT_BEHIND)
            if linked_folder or debris:
                left_behind.append(f"{path}/" if name in folders else path)
            elif name in files:
                contents[path] = regular_file(folder / path, within=True)
        folders[:] = [name for name in folders if f"{(inner / name).as_posix()}/" not in left_behind]
    return dict(sorted(contents.items())), sorted(left_behind)


def _size(content: Path | bytes) -> int:
    return len(content) if isinstance(content, bytes) else content.stat().st_size


def _check_card(folder: Path, repo_id: str, *, bundle: bool) -> list[str]:
    """Warnings about the model card.

    Raises:
        CheckpointError: there is none, or its metadata cannot be read.
    """
    path = folder / "README.md"
    if not path.exists():
        raise CheckpointError(f"{path}: there is no model card. Write one, with its metadata, before others get this.")
    try:
        text = read_bounded(path, MIB).decode("utf-8")
        metadata = ModelCard(text).data.to_dict()
    except CheckpointError:
        raise
    except Exception as error:  # YAML parsers raise nearly anything
        raise CheckpointError(f"{path}: its metadata cannot be read: {brief(error)}") from error
    if not metadata:
        raise CheckpointError(f"{path}: has no metadata; begin it with `---`, `library_name: transformers`, `---`.")
    warnings = []
    if repo_id not in text:
        warnings.append(
            f"README.md does not name {repo_id}: its code may load something else. A card that does: resformer card "
            f"{folder} --repository {repo_id}."
        )
    if bundle and "trust_remote_code=True" not in text:
        warnings.append(
            "README.md loads the checkpoint without trust_remote_code=True, which readers of a bundle need."
        )
    return warnings
