"""The Hub: files of its repositories, one way to try again, and errors in one line."""

import glob
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from huggingface_hub import HfApi, constants, get_cached_repo_tree, snapshot_download
from huggingface_hub.errors import (  # type: ignore[attr-defined]
    CachedRepoTreeNotFoundError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,  # httpx's or httpx2's
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RevisionResolutionError,
)
from huggingface_hub.hf_api import RepoFile

from resformer.errors import CheckpointError, ResFormerError, one_line
from resformer.version import __version__

#: Seconds between the attempts of a step.
_PAUSES = (1, 2, 4)

Result = TypeVar("Result")


class HubError(ResFormerError):
    """The Hub refuses, or cannot be reached; the message names the repository and the way out."""


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


def retried(step: Callable[[], Result]) -> Result:
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
            f"{one_line(name)}: is no local folder, and the Hub did not give it: {one_line(error)}"
        ) from error


def listing(repo_id: str, revision: str | None) -> tuple[str, dict[str, RepoFile]]:
    """(the commit, name -> size and hashes of its files), from the cache if it has the list of this commit.

    An older huggingface_hub has left no list in the cache: without the Hub no names then.
    """
    commit = retried(lambda: hub_api().resolve_revision(repo_id, revision=revision)).resolved
    with suppress(CachedRepoTreeNotFoundError):
        return commit, {file.path: file for file in get_cached_repo_tree(repo_id, revision=commit)}
    with suppress(OfflineModeIsEnabled):
        return commit, retried(lambda: files_of(hub_api(), repo_id, commit))
    return commit, {}


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


def files_of(api: HfApi, repo_id: str, revision: str) -> dict[str, RepoFile]:
    """Name -> size and hashes of every file."""
    tree = api.list_repo_tree(repo_id, recursive=True, revision=revision)
    return {file.path: file for file in tree if isinstance(file, RepoFile)}
