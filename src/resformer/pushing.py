"""A checkpoint folder to the Hub: checked first, then one commit, whole or not at all."""

import os
import re
import tempfile
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
from resformer.errors import CheckpointError, ResFormerError, brief
from resformer.untrusted import MIB, read_bounded, regular_file
from resformer.version import __version__

__all__ = ["HubError", "PushReport", "push_checkpoint"]

#: What training, editors and version control leave in a checkpoint's folder; of a path's parts, any that matches.
_LEFT_BEHIND = (
    ".* __pycache__ checkpoint-* global_step* runs wandb "
    "*.tmp *.lock *.pyc *.log events.out.tfevents.* trainer_state.json zero_to_fp32.py latest "
    "*.bin *.pt *.pth *.ckpt *.pkl *.pickle *.distcp"  # pickles: optimiser states, arguments, weights that run code
).split()
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
    """What a push did, or would do."""

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


def push_checkpoint(
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

    Weights of an earlier push that Transformers would load instead of these are deleted in the same commit. What fails
    in passing is tried again; after a failure, a second push goes on where the first one stopped.

    Args:
        checkpoint: a folder with `config.json`, safetensors and a model card, `README.md`.
        repo_id: `owner/name`, or `name` for one of your own; made if there is none.
        private: make it private; refused if it exists and is public.
        revision: the branch, made from `main` if there is none; default: `main`.
        message: of the commit.
        create_pr: open a pull request instead of changing `main`.
        bundle: add the code that loads the checkpoint without this package, see `resformer.convert.bundle`.
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
    if bundle:
        # Beside the checkpoint, where hard links reach it.
        with tempfile.TemporaryDirectory(prefix=".resformer-push-", dir=folder.resolve().parent) as work:
            from resformer.convert import bundle as write_bundle

            flat = Path(work) / folder.resolve().name
            write_bundle(folder, flat, link=True)
            report = push_checkpoint(
                flat,
                repo_id,
                private=private,
                revision=revision,
                message=message,
                create_pr=create_pr,
                tag=tag,
                dry_run=dry_run,
            )
            return replace(report, checkpoint=str(folder))

    paths, left_behind = _sorted_out(folder)
    warnings = [*inspection.warnings, *_check_card(folder, repo_id)]
    report = PushReport(
        checkpoint=str(folder),
        repo_id=repo_id,
        revision=revision or constants.DEFAULT_REVISION,
        files={name: path.stat().st_size for name, path in paths.items()},
        left_behind=left_behind,
        tag=tag,
        warnings=warnings,
    )
    if dry_run:
        return report
    api = HfApi(library_name="resformer", library_version=__version__)
    message = message or f"Upload {inspection.method or inspection.model_type} checkpoint"
    return _Push(api, report, paths, private=private, message=message, create_pr=create_pr).run()


@dataclass(frozen=True)
class _Push:
    """One push; each of its steps can be done again without harm."""

    api: HfApi
    report: PushReport
    paths: dict[str, Path]
    private: bool
    message: str
    create_pr: bool

    def run(self) -> PushReport:
        if constants.HF_HUB_OFFLINE:
            raise HubError(f"{self.report.repo_id}: cannot be pushed to while HF_HUB_OFFLINE is set; unset it.")
        if get_token() is None:
            raise HubError(f"{self.report.repo_id}: no token. Run `hf auth login`, or set HF_TOKEN to a write token.")
        repo_id = self._persist(self._make_repository)
        report = replace(self.report, repo_id=repo_id)
        if report.tag is not None:
            self._persist(lambda: self._check_tag(repo_id))
        # The answer to a commit may be lost after it was made. A branch shows that when it is asked again; another
        # pull request would be another one.
        commit, deleted = self._persist(lambda: self._commit(repo_id), attempts=1 if self.create_pr else _ATTEMPTS)
        if report.tag is not None:
            tag = report.tag
            self._persist(lambda: self.api.create_tag(repo_id, tag=tag, revision=commit.oid, exist_ok=True))
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
        """`create_commit`, as `upload_folder` may spread a folder over several commits."""
        branch = self.report.revision
        if branch != constants.DEFAULT_REVISION and not branch.startswith("refs/"):
            self.api.create_branch(repo_id, branch=branch, exist_ok=True)
        before = self.api.list_repo_files(repo_id, revision=branch)
        deleted = [name for name in before if _WEIGHTS.fullmatch(name) and name not in self.paths]
        operations = [CommitOperationDelete(name, is_folder=False) for name in deleted]
        additions = [CommitOperationAdd(name, path) for name, path in self.paths.items()]
        commit = self.api.create_commit(
            repo_id,
            [*operations, *additions],
            commit_message=self.message,
            revision=branch,
            create_pr=self.create_pr,
        )
        return commit, deleted

    def _persist(self, step: Callable[[], _Result], attempts: int = _ATTEMPTS) -> _Result:
        """Does a step; what fails in passing is tried again, other failures are told in one line."""
        for pause in [*(2**attempt for attempt in range(attempts - 1)), None]:
            try:
                return step()
            except _HTTPError as error:
                if pause is None or not _is_transient(error):
                    raise HubError(self._told(error)) from error
                time.sleep(pause)
            except RuntimeError as error:  # "Error while uploading ...", from an error that was tried again already
                raise HubError(self._told(error.__cause__ or error)) from error
            except ValueError as error:  # the Hub does not like the card's metadata
                raise CheckpointError(f"{self.report.checkpoint}: {brief(error)}") from error
        raise AssertionError("the last attempt returns or raises")

    def _told(self, error: BaseException) -> str:
        repo_id = self.report.repo_id
        if isinstance(error, RevisionNotFoundError):
            return f"{repo_id}: has no branch {self.report.revision}."
        if isinstance(error, HfHubHTTPError):
            said = brief(error.server_message or error)
            status = error.response.status_code
            if status == 401 and not isinstance(error, RepositoryNotFoundError):
                return f"{repo_id}: the Hub does not accept this token ({said}). Run `hf auth login`, or set HF_TOKEN."
            if status == 403:
                return f"{repo_id}: this token may not write there ({said}). Use a write token of the owner's."
            if isinstance(error, RepositoryNotFoundError):
                return f"{repo_id}: there is no such repository, or this token may not see it ({said})."
            return f"{repo_id}: the Hub answered {status} ({said}). Run the command again later."
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


def _sorted_out(folder: Path) -> tuple[dict[str, Path], list[str]]:
    """The files that belong to the checkpoint, by their names on the Hub, and what else lies in its folder.

    Raises:
        CheckpointError: a link leads out of the folder: what it leads to was never meant to be shared.
    """
    paths: dict[str, Path] = {}
    left_behind = []
    for where, folders, files in os.walk(folder):
        inner = Path(where).relative_to(folder)
        for name in sorted([*folders, *files]):
            shared = (inner / name).as_posix()
            linked_folder = name in folders and (folder / shared).is_symlink()
            if linked_folder or any(fnmatch(name, pattern) for pattern in _LEFT_BEHIND):
                left_behind.append(f"{shared}/" if name in folders else shared)
            elif name in files:
                paths[shared] = regular_file(folder / shared, within=True)
        folders[:] = [name for name in folders if f"{(inner / name).as_posix()}/" not in left_behind]
    return dict(sorted(paths.items())), sorted(left_behind)


def _check_card(folder: Path, repo_id: str) -> list[str]:
    """Warnings about a model card that is there and whose metadata can be read.

    Raises:
        CheckpointError: it is not.
    """
    path = folder / "README.md"
    if not path.exists():
        raise CheckpointError(f"{path}: there is no model card. Write one, with its metadata, before others get this.")
    try:
        text = read_bounded(path, MIB).decode("utf-8")
        metadata = ModelCard(text).data.to_dict()
    except CheckpointError:
        raise
    except Exception as error:  # whatever a YAML parser makes of it
        raise CheckpointError(f"{path}: its metadata cannot be read: {brief(error)}") from error
    if not metadata:
        raise CheckpointError(f"{path}: has no metadata; begin it with `---`, `library_name: transformers`, `---`.")
    return [] if repo_id in text else [f"README.md does not name {repo_id}: its code may load something else."]
