"""The Hub: files of its repositories, one commit to one of them, one way to try again, and errors in one line."""

import glob
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    constants,
    get_cached_repo_tree,
    get_token,
    snapshot_download,
)
from huggingface_hub.errors import (  # type: ignore[attr-defined]
    CachedRepoTreeNotFoundError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,  # httpx's or httpx2's
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
    RevisionResolutionError,
)
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils.sha import git_hash

from resformer.errors import CheckpointError, ResFormerError, VerificationError, first_names, one_line
from resformer.version import __version__

#: Seconds between the attempts of a step.
_PAUSES = (1, 2, 4)

_Result = TypeVar("_Result")


class HubError(ResFormerError):
    """The Hub refuses, or cannot be reached; the message names the repository and the way out."""


@dataclass(frozen=True, kw_only=True)
class Push:
    """One push, in one commit; each of its steps can be repeated without harm."""

    repo_id: str
    contents: Mapping[str, Path | bytes]
    message: str
    superseded: Callable[[str], bool]  # whether a file of the branch that is not in `contents` is deleted
    source: str  # where the contents are from, for messages
    revision: str = constants.DEFAULT_REVISION
    private: bool = False
    tag: str | None = None
    create_pr: bool = False  # propose the commit to a repository that exists
    check: Callable[[], object] = lambda: None  # raises where contents changed; called when their hashes are known

    def run(self) -> dict[str, Any]:
        """Makes the repository if there is none, commits, and reads the hashes of all files back.

        Returns the `repo_id` with its owner, `commit` and `url` of the commit, and the names of `deleted` files.
        """
        if constants.HF_HUB_OFFLINE:
            raise HubError(f"{self.repo_id}: cannot be pushed to while HF_HUB_OFFLINE is set; unset it.")
        if get_token() is None:
            raise HubError(f"{self.repo_id}: no token. Run `hf auth login`, or set HF_TOKEN to a write token.")
        api = hub_api()
        repo_id = self._do(lambda: self._make_repository(api))
        # The commit may be made although its answer is lost: committing again changes nothing then.
        # A pull request may be made too, and would be made twice.
        commit, deleted, sent = self._do(lambda: self._commit(api, repo_id), again=not self.create_pr)
        self._read_back(api, repo_id, commit.oid, sent)
        if self.tag is not None:
            tag = self.tag
            self._do(lambda: api.create_tag(repo_id, tag=tag, revision=commit.oid, exist_ok=True))
        url = commit.pr_url if self.create_pr else commit.commit_url
        return {"repo_id": repo_id, "commit": commit.oid, "url": url, "deleted": deleted}

    def _make_repository(self, api: HfApi) -> str:
        if self.create_pr:
            return str(api.model_info(self.repo_id).id)
        repo_id = api.create_repo(self.repo_id, private=self.private or None, exist_ok=True).repo_id
        if self.private and not api.model_info(repo_id).private:
            raise HubError(f"{repo_id}: exists and is public. Make it private in its settings, or push elsewhere.")
        if self.tag is not None and any(tag.name == self.tag for tag in api.list_repo_refs(repo_id).tags):
            raise HubError(f"{repo_id}: has a tag {self.tag} already; choose another. Nothing was pushed.")
        return repo_id

    def _commit(self, api: HfApi, repo_id: str) -> tuple[Any, list[str], dict[str, str]]:
        """(the commit, deleted files, name -> SHA-256): `upload_folder` may spread a folder over several commits."""
        branch = self.revision
        if branch != constants.DEFAULT_REVISION and not branch.startswith("refs/") and not self.create_pr:
            api.create_branch(repo_id, branch=branch, exist_ok=True)
        parent = api.model_info(repo_id, revision=branch).sha
        before = _files(api, repo_id, branch)
        operations = [CommitOperationAdd(name, content) for name, content in self.contents.items()]
        sent = {each.path_in_repo: each.upload_info.sha256.hex() for each in operations}
        self.check()
        deleted = [name for name in before if name not in self.contents and self.superseded(name)]
        commit = api.create_commit(
            repo_id,
            [*(CommitOperationDelete(name, is_folder=False) for name in deleted), *operations],
            commit_message=self.message,
            revision=branch,
            parent_commit=parent,
            create_pr=self.create_pr,
        )
        return commit, deleted, sent

    def _read_back(self, api: HfApi, repo_id: str, commit: str, sent: Mapping[str, str]) -> None:
        try:
            stored = retried(lambda: _files(api, repo_id, commit))
        except HTTPError as error:
            raise HubError(
                f"{repo_id} at {commit}: was committed, but cannot be read back: {one_line(error)} Look at it: "
                f"resformer inspect {repo_id}."
            ) from error
        wrong = []
        for name, content in self.contents.items():
            known = sent[name], git_hash(content) if isinstance(content, bytes) else None  # by LFS, or by Git
            if name not in stored or _digest(stored[name]) not in known:
                wrong.append(name)
        if wrong:
            raise VerificationError(
                f"{repo_id} at {commit}: these files are not what was sent: {first_names(wrong)}. Delete the "
                "repository, or revert the commit."
            )

    def _do(self, step: Callable[[], _Result], *, again: bool = True) -> _Result:
        """Does a step as `retried` does, or once; errors are raised with a message of one line."""
        try:
            return retried(step) if again else step()
        except HTTPError as error:
            raise self._error(error) from error
        except RuntimeError as error:  # "Error while uploading ...", from an error that was tried again already
            raise self._error(error.__cause__ or error) from error
        except ValueError as error:  # the Hub rejects the card's metadata
            raise CheckpointError(f"{self.source}: {one_line(error)}") from error

    def _error(self, error: BaseException) -> HubError:
        repo_id = self.repo_id
        if isinstance(error, RevisionNotFoundError):
            return HubError(f"{repo_id}: has no branch {self.revision}.")
        again = "Run the command again later: nothing is uploaded or committed twice."
        if answer := passing(error):
            return HubError(f"{repo_id}: {answer}. {again}")
        if not isinstance(error, HfHubHTTPError):
            return HubError(f"{repo_id}: {one_line(error)}")
        answer, status = one_line(error.server_message or error), error.response.status_code
        if isinstance(error, RepositoryNotFoundError):
            return HubError(f"{repo_id}: there is no such repository, or this token may not see it ({answer}).")
        reason, way = {
            401: ("the Hub does not accept this token", "Run `hf auth login`, or set HF_TOKEN."),
            403: ("this token may not write there", "Use a write token of the owner's."),
            412: (
                f"somebody else committed to {self.revision} meanwhile",
                "Nothing was committed. Look at it, and run the command again.",
            ),
        }.get(status, (f"the Hub answered {status}", again))
        return HubError(f"{repo_id}: {reason} ({answer}). {way}")


def passing(error: BaseException | None) -> str | None:
    """What the Hub or the connection answered, if the same request may succeed later; `None` for other errors."""
    if isinstance(error, (LocalEntryNotFoundError, RevisionResolutionError)):  # nothing in the cache replaces an answer
        error = error.__cause__
    if isinstance(error, HfHubHTTPError):
        status = error.response.status_code
        may_pass = status in (408, 429) or status >= 500
        return f"the Hub answered {status} ({one_line(error.server_message or error)})" if may_pass else None
    reason = one_line(error) or type(error).__name__
    return f"{constants.ENDPOINT} cannot be reached ({reason})" if isinstance(error, HTTPError) else None


def retried(step: Callable[[], _Result]) -> _Result:
    """Does a step, which may be done twice, again after passing errors; the last one is raised."""
    for pause in _PAUSES:
        try:
            return step()
        except Exception as error:
            if passing(error) is None:
                raise
        time.sleep(pause)
    return step()


@contextmanager
def asking_hub(name: str) -> Iterator[None]:
    """Turns errors of the Hub and of the connection into a `HubError` if they may pass, else a `CheckpointError`."""
    try:
        yield
    except (HTTPError, HFValidationError, RevisionResolutionError, OSError) as error:
        if answer := passing(error):
            raise HubError(f"{one_line(name)}: {answer}. Run the command again later.") from error
        raise CheckpointError(
            f"{one_line(name)}: is neither a local folder nor a .gguf file, and the Hub did not give it: "
            f"{one_line(error)}"
        ) from error


def listing(repo_id: str, revision: str | None) -> tuple[str, dict[str, RepoFile]]:
    """(the commit, name -> size and hashes of its files), from the cache where the Hub cannot be asked.

    An older huggingface_hub has left no list in the cache: no names then.
    """
    commit = retried(lambda: hub_api().resolve_revision(repo_id, revision=revision)).resolved
    try:
        return commit, retried(lambda: _files(hub_api(), repo_id, commit))
    except (HTTPError, OfflineModeIsEnabled):
        try:
            return commit, {file.path: file for file in get_cached_repo_tree(repo_id, revision=commit)}
        except CachedRepoTreeNotFoundError:
            if constants.HF_HUB_OFFLINE:
                return commit, {}
        raise


def fetch(
    repo_id: str, commit: str, files: Mapping[str, RepoFile], names: Collection[str], largest: int | None = None
) -> Path:
    """Downloads those of the files that the repository has, and returns its folder in the cache.

    Raises `CheckpointError`, and downloads nothing, if one of them has more than `largest` bytes in the list `files`.
    """
    for name in files.keys() & names:
        if largest is not None and files[name].size > largest:
            raise CheckpointError(f"{repo_id}: {name} has {files[name].size:,} bytes; at most {largest:,} are read.")
    patterns = [glob.escape(name) for name in names]
    return Path(retried(lambda: snapshot_download(repo_id, revision=commit, allow_patterns=patterns)))


def hub_api() -> HfApi:
    """The client, with the token in `HF_TOKEN` or of `hf auth login`."""
    return HfApi(library_name="resformer", library_version=__version__)


def _files(api: HfApi, repo_id: str, revision: str) -> dict[str, RepoFile]:
    """Name -> size and hashes of every file."""
    tree = api.list_repo_tree(repo_id, recursive=True, revision=revision)
    return {file.path: file for file in tree if isinstance(file, RepoFile)}


def _digest(file: RepoFile) -> str:
    """The SHA-256 that LFS stores a file by, or Git's hash of it."""
    return file.lfs.sha256 if file.lfs is not None else file.blob_id
