"""The Hub: files of its repositories, one way to try again, and errors in one line."""

import glob
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from huggingface_hub import (
    HfApi,
    cached_assets_path,
    constants,
    get_cached_repo_tree,
    get_session,
    hf_hub_url,
    snapshot_download,
)
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
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status  # type: ignore[attr-defined]

from resformer.errors import CheckpointError, ResFormerError, one_line
from resformer.safetensors_format import Shard, header_length
from resformer.untrusted import MOST_BYTES
from resformer.version import __version__

#: Seconds between the attempts of a step.
_PAUSES = (1, 2, 4)
#: Bytes of the first request of a file: the whole header of most shards of an 8B or 70B model (73 and 24 tensors).
_FIRST = 16 * 1024

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


def hub_api() -> HfApi:
    """The client, with the token in `HF_TOKEN` or of `hf auth login`."""
    return HfApi(library_name="resformer", library_version=__version__)


def files_of(api: HfApi, repo_id: str, revision: str) -> dict[str, RepoFile]:
    """Name -> size and hashes of every file."""
    tree = api.list_repo_tree(repo_id, recursive=True, revision=revision)
    return {file.path: file for file in tree if isinstance(file, RepoFile)}


@contextmanager
def _asking(name: str) -> Iterator[None]:
    """Turns errors of the Hub and of the connection into a `HubError` if they may pass, else a `CheckpointError`."""
    try:
        yield
    except (HTTPError, HFValidationError, RevisionResolutionError, OSError) as error:
        if answer := passing(error):
            raise HubError(f"{one_line(name)}: {answer}. Run the command again later.") from error
        raise CheckpointError(
            f"{one_line(name)}: is no local folder, and the Hub did not give it: {one_line(error)}"
        ) from error


@dataclass(frozen=True)
class Snapshot:
    """A repository at one commit, whose files are fetched whole or in part.

    Headers of safetensors are written as files of the real size that hold nothing else: they take no space on the disk,
    and `safetensors` and Transformers read them as they read the files themselves.
    """

    repo_id: str
    commit: str
    files: Mapping[str, RepoFile]  # name -> size and hashes

    @classmethod
    def of(cls, repo_id: str, revision: str | None) -> "Snapshot":
        """With the list of files of the cache, if it has that of this commit.

        An older huggingface_hub has left no list in the cache: without the Hub no names then.
        """
        with _asking(repo_id):
            commit = retried(lambda: hub_api().resolve_revision(repo_id, revision=revision)).resolved
            with suppress(CachedRepoTreeNotFoundError):
                return cls(
                    repo_id, commit, {file.path: file for file in get_cached_repo_tree(repo_id, revision=commit)}
                )
            with suppress(OfflineModeIsEnabled):
                return cls(repo_id, commit, retried(lambda: files_of(hub_api(), repo_id, commit)))
            return cls(repo_id, commit, {})

    def fetch(self, names: Collection[str], largest: int | None = None) -> Path:
        """Downloads those of the files that the repository has, and returns its folder in the cache.

        Raises `CheckpointError`, and downloads nothing, if one of them has more than `largest` bytes in the list.
        """
        for name in self.files.keys() & names:
            if largest is not None and (size := self.files[name].size) > largest:
                raise CheckpointError(f"{self.repo_id}: {name} has {size:,} bytes; at most {largest:,} are read.")
        patterns = [glob.escape(name) for name in names]
        with _asking(self.repo_id):
            return Path(retried(lambda: snapshot_download(self.repo_id, revision=self.commit, allow_patterns=patterns)))

    def write_headers(self, names: Collection[str], folder: Path) -> None:
        """Writes a file for each of these names: its header, and a hole up to its size."""

        def write(name: str) -> None:
            size = self.files[name].size
            content = self._read(name, 0, min(size, _FIRST))
            length = header_length(content[:40], size, Path(self.repo_id, name))
            if (missing := 8 + length - len(content)) > 0:
                content += self._read(name, len(content), missing)
            (folder / name).write_bytes(content[: 8 + length])
            os.truncate(folder / name, size)

        with _asking(self.repo_id), ThreadPoolExecutor(8) as pool:
            list(pool.map(write, names))

    def write_tensors(self, shards: Collection[Shard], names: Collection[str]) -> None:
        """Fills the tensors of these names, which `MOST_BYTES` bounds, into files of `write_headers`."""
        tensors = [(shard, tensor) for shard in shards for tensor in shard.tensors if tensor.name in names]
        if (size := sum(tensor.nbytes for _, tensor in tensors)) > MOST_BYTES:
            raise CheckpointError(f"{self.repo_id}: coefficients of {size:,} bytes; at most {MOST_BYTES:,} are read.")
        with _asking(self.repo_id), ThreadPoolExecutor(8) as pool:
            read = pool.map(lambda each: self._read(each[0].name, each[1].start, each[1].nbytes), tensors)
            for (shard, tensor), content in zip(tensors, read, strict=True):
                with shard.path.open("r+b") as file:
                    file.seek(tensor.start)
                    file.write(content)

    def _read(self, name: str, start: int, length: int) -> bytes:
        """Some bytes of a file, from huggingface_hub's cache for assets or the Hub.

        The Hub alone gets the token: the HTTP client drops it where another host answers.
        """
        cached = None
        with suppress(OSError, ValueError):  # it is not there, or cannot be: the cache is only for the next time
            folder = cached_assets_path("resformer", self.repo_id, self.commit, assets_dir=constants.HF_ASSETS_CACHE)
            cached = folder / f"{name}.{start}-{length}"
            if len(content := cached.read_bytes()) == length:
                return content
        if not length:
            return b""
        url = hf_hub_url(self.repo_id, name, revision=self.commit)
        wanted = f"bytes {start}-{start + length - 1}"
        headers = {**build_hf_headers(), "range": wanted.replace(" ", "="), "accept-encoding": "identity"}

        def read() -> tuple[bytes, str]:
            content = bytearray()
            # Not by `HfApi.parse_safetensors_file_metadata` nor by `HfFileSystem`: after a failed connection they close
            # the HTTP client that other threads are reading with, and take whatever a server sends.
            with get_session().stream(
                "GET", url, headers=headers, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT
            ) as response:
                hf_raise_for_status(response)
                for piece in response.iter_bytes():
                    content += piece
                    if len(content) > length:
                        break
                return bytes(content), response.headers.get("content-range", "no range")

        try:
            content, sent = retried(read)
        except HfHubHTTPError:
            raise
        except HTTPError as error:  # of the connection, to the Hub or to the storage that it names
            where = error.request.url.host
            raise HubError(f"{self.repo_id}: {name} cannot be read from {where}: {one_line(error)}.") from error
        if len(content) != length or sent.rpartition("/")[0] != wanted:
            raise CheckpointError(
                f"{self.repo_id}: asked for {length:,} bytes of {name} ({wanted}), the server sent "
                f"{len(content):,} ({one_line(sent)}). Run the command again; if it stays, download the repository and "
                "use its folder."
            )
        with suppress(OSError):
            if cached is not None:
                cached.write_bytes(content)
        return content
