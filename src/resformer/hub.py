"""One commit to a Hub repository: the token, the repository, retries, and errors in one line."""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from huggingface_hub import CommitOperationAdd, CommitOperationCopy, CommitOperationDelete, HfApi, constants, get_token
from huggingface_hub.errors import (  # type: ignore[attr-defined]
    FileDuplicationError,
    HfHubHTTPError,
    HTTPError,  # httpx's or httpx2's
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import RepoFile

from resformer.errors import CheckpointError, ResFormerError, first_names, one_line
from resformer.files import EVAL_RESULTS
from resformer.version import __version__

_ATTEMPTS = 4  # of each step, after pauses of 1, 2 and 4 seconds
_TRANSIENT = {408, 429, 500, 502, 503, 504}
#: Files of a repository that holds no model yet.
_EMPTY = {".gitattributes", "README.md"}

_Result = TypeVar("_Result")


class HubError(ResFormerError):
    """The Hub refuses, or cannot be reached; the message names the repository and the way out."""


class CopyError(HubError):
    """The Hub does not copy a file from another repository."""


@dataclass(frozen=True)
class Copied:
    """A file that the Hub copies from another repository, without a download if it is stored by LFS."""

    repo_id: str
    revision: str  # the commit
    file: RepoFile


#: A file's content: on this disk, in memory, or copied by the Hub.
Content = Path | bytes | Copied


@dataclass(frozen=True)
class Pushed:
    """The result of a push."""

    repo_id: str
    revision: str  # the branch; of a pull request, its own
    commit: str
    url: str  # of the commit, or of the pull request
    deleted: list[str]


@dataclass(frozen=True, kw_only=True)
class Push:
    """One push, in one commit; each of its steps can be repeated without harm."""

    repo_id: str
    contents: Mapping[str, Content]
    message: str
    superseded: Callable[[str], bool]  # whether a file of the branch that is not in `contents` is deleted
    source: str  # where the contents are from, for messages
    revision: str = constants.DEFAULT_REVISION
    private: bool = False
    gated: Literal["auto", "manual"] | None = None
    create_pr: bool = False
    tag: str | None = None
    replace: bool = True  # False: refuse a branch that holds a model

    def run(self) -> Pushed:
        """Makes the repository if there is none, and commits."""
        if constants.HF_HUB_OFFLINE:
            raise HubError(f"{self.repo_id}: cannot be pushed to while HF_HUB_OFFLINE is set; unset it.")
        if get_token() is None:
            raise HubError(f"{self.repo_id}: no token. Run `hf auth login`, or set HF_TOKEN to a write token.")
        api = hub_api()
        repo_id = self._retried(lambda: self._make_repository(api))
        # The commit may be made although its answer is lost. Committing to a branch again changes nothing then, but
        # would open a second pull request.
        attempts = 1 if self.create_pr else _ATTEMPTS
        commit, deleted = self._retried(lambda: self._commit(api, repo_id), attempts=attempts)
        if self.tag is not None:
            tag = self.tag
            self._retried(lambda: api.create_tag(repo_id, tag=tag, revision=commit.oid, exist_ok=True))
        return Pushed(
            repo_id,
            revision=commit.pr_revision or self.revision,
            commit=commit.oid,
            url=commit.pr_url or commit.commit_url,
            deleted=deleted,
        )

    def _make_repository(self, api: HfApi) -> str:
        repo_id = api.create_repo(self.repo_id, private=self.private or None, exist_ok=True).repo_id
        if self.private and not api.model_info(repo_id).private:
            raise HubError(f"{repo_id}: exists and is public. Make it private in its settings, or push elsewhere.")
        if self.tag is not None and any(tag.name == self.tag for tag in api.list_repo_refs(repo_id).tags):
            raise HubError(f"{repo_id}: has a tag {self.tag} already; choose another. Nothing was pushed.")
        if not self.replace and (present := repository_files(api, repo_id, self.revision).keys() - _EMPTY):
            raise HubError(
                f"{repo_id}: holds {first_names(present)} already. Replace its files with --force (force=True); its "
                "history keeps them."
            )
        if self.gated is not None:  # before there is anything to download
            api.update_repo_settings(repo_id, gated=self.gated)
        return repo_id

    def _commit(self, api: HfApi, repo_id: str) -> tuple[Any, list[str]]:
        """One `create_commit`: `upload_folder` may spread a folder over several commits."""
        branch = self.revision
        if branch != constants.DEFAULT_REVISION and not branch.startswith("refs/"):
            api.create_branch(repo_id, branch=branch, exist_ok=True)
        parent = api.model_info(repo_id, revision=branch).sha
        before = repository_files(api, repo_id, branch)
        operations = list(self._operations(before))
        sent = {
            each.path_in_repo: each.upload_info.sha256.hex()
            for each in operations
            if isinstance(each, CommitOperationAdd)
        }
        weights = {name: file.lfs.sha256 for name, file in before.items() if name.endswith(".safetensors") and file.lfs}
        results = f"{EVAL_RESULTS}/" if not weights.items() <= sent.items() else "\0"  # they are of the weights
        deleted = [
            name for name in before if name not in self.contents and (self.superseded(name) or name.startswith(results))
        ]
        commit = api.create_commit(
            repo_id,
            [*(CommitOperationDelete(name, is_folder=False) for name in deleted), *operations],
            commit_message=self.message,
            revision=branch,
            create_pr=self.create_pr,
            parent_commit=None if self.create_pr else parent,
        )
        return commit, deleted

    def _operations(self, before: Mapping[str, RepoFile]) -> Iterable[CommitOperationAdd | CommitOperationCopy]:
        for name, content in self.contents.items():
            if not isinstance(content, Copied):
                yield CommitOperationAdd(name, content)
            elif name not in before or digest(before[name]) != digest(content.file):
                # `create_commit` has the Hub duplicate LFS files into the repository (POST
                # /api/models/SOURCE/lfs-files/duplicate), then commits their SHA-256; huggingface_hub #4203.
                yield CommitOperationCopy(
                    content.file.path,
                    name,
                    src_revision=content.revision,
                    src_repo_id=content.repo_id,
                    src_repo_type="model",
                )

    def _retried(self, step: Callable[[], _Result], attempts: int = _ATTEMPTS) -> _Result:
        """Does a step, again after passing errors; other errors are raised with a message of one line."""
        for pause in [*(2**attempt for attempt in range(attempts - 1)), None]:
            try:
                return step()
            except HTTPError as error:
                passing = not isinstance(error, HfHubHTTPError) or error.response.status_code in _TRANSIENT
                if pause is None or not passing:
                    raise self._error(error) from error
                time.sleep(pause)
            except FileDuplicationError as error:
                raise CopyError(f"the Hub does not copy its files: {one_line(error)}") from error
            except RuntimeError as error:  # "Error while uploading ...", from an error that was tried again already
                raise self._error(error.__cause__ or error) from error
            except ValueError as error:  # the Hub rejects the card's metadata
                raise CheckpointError(f"{self.source}: {one_line(error)}") from error
        raise AssertionError("the last attempt returns or raises")

    def _error(self, error: BaseException) -> HubError:
        repo_id = self.repo_id
        again = "Run the command again later: nothing is uploaded or committed twice."
        if self.create_pr:
            again = "The pull request may have been opened: look before you run the command again."
        if isinstance(error, RevisionNotFoundError):
            return HubError(f"{repo_id}: has no branch {self.revision}.")
        if isinstance(error, HfHubHTTPError):
            answer = one_line(error.server_message or error)
            status = error.response.status_code
            if error.response.url.path.endswith("/lfs-files/duplicate"):
                return CopyError(f"the Hub does not copy its files: it answered {status} ({answer})")
            if isinstance(error, RepositoryNotFoundError):
                return HubError(f"{repo_id}: there is no such repository, or this token may not see it ({answer}).")
            raced = f"somebody else committed to {self.revision} meanwhile"
            reason, way = {
                401: ("the Hub does not accept this token", "Run `hf auth login`, or set HF_TOKEN."),
                403: ("this token may not write there", "Use a write token of the owner's."),
                412: (raced, "Nothing was committed. Look at it, and run the command again."),
            }.get(status, (f"the Hub answered {status}", again))
            return HubError(f"{repo_id}: {reason} ({answer}). {way}")
        if isinstance(error, HTTPError):
            reason = one_line(error) or type(error).__name__
            return HubError(f"{repo_id}: {constants.ENDPOINT} cannot be reached ({reason}). {again}")
        return HubError(f"{repo_id}: {one_line(error)}")


def hub_api() -> HfApi:
    """The client, with the token in `HF_TOKEN` or of `hf auth login`."""
    return HfApi(library_name="resformer", library_version=__version__)


def repository_files(api: HfApi, repo_id: str, revision: str) -> dict[str, RepoFile]:
    """Name -> size and hashes of every file."""
    tree = api.list_repo_tree(repo_id, recursive=True, revision=revision)
    return {file.path: file for file in tree if isinstance(file, RepoFile)}


def digest(file: RepoFile) -> str:
    """The SHA-256 that LFS stores a file by, or Git's hash of it."""
    return file.lfs.sha256 if file.lfs is not None else file.blob_id
