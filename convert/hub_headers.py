"""Headers of safetensors on the Hub, by range requests, as files of their real size that hold nothing else.

They take no space on the disk, and `safetensors` and Transformers read them as they read the files themselves. What was
read once stays in huggingface_hub's cache for assets.
"""

import os
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import cached_assets_path, constants, get_session, hf_hub_url
from huggingface_hub.errors import HfHubHTTPError, HTTPError  # type: ignore[attr-defined]  # httpx's or httpx2's
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status  # type: ignore[attr-defined]

from resformer.errors import CheckpointError, one_line
from resformer.hub import HubError, retried
from resformer.safetensors_format import Shard, header_length
from resformer.untrusted import MOST_BYTES

#: Bytes of the first request of a file: the whole header of most shards of an 8B or 70B model (73 and 24 tensors).
_FIRST = 16 * 1024


@dataclass(frozen=True)
class HubFiles:
    """The files of a repository at one commit."""

    repo_id: str
    revision: str  # the commit
    files: Mapping[str, RepoFile]  # name -> size and hashes

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

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(write, names))

    def write_tensors(self, shards: Collection[Shard], names: Collection[str]) -> None:
        """Fills the tensors of these names, which `MOST_BYTES` bounds, into files of `write_headers`."""
        tensors = [(shard, tensor) for shard in shards for tensor in shard.tensors if tensor.name in names]
        if (size := sum(tensor.nbytes for _, tensor in tensors)) > MOST_BYTES:
            raise CheckpointError(f"{self.repo_id}: coefficients of {size:,} bytes; at most {MOST_BYTES:,} are read.")
        with ThreadPoolExecutor(8) as pool:
            read = pool.map(lambda each: self._read(each[0].name, each[1].start, each[1].nbytes), tensors)
            for (shard, tensor), content in zip(tensors, read, strict=True):
                with shard.path.open("r+b") as file:
                    file.seek(tensor.start)
                    file.write(content)

    def _read(self, name: str, start: int, length: int) -> bytes:
        """Some bytes of a file, from the cache or the Hub."""
        cached = None
        with suppress(OSError, ValueError):  # it is not there, or cannot be: the cache is only for the next time
            folder = cached_assets_path("resformer", self.repo_id, self.revision, assets_dir=constants.HF_ASSETS_CACHE)
            cached = folder / f"{name}.{start}-{length}"
            if len(content := cached.read_bytes()) == length:
                return content
        content = self._asked(name, start, length) if length else b""
        with suppress(OSError):
            if cached is not None:
                cached.write_bytes(content)
        return content

    def _asked(self, name: str, start: int, length: int) -> bytes:
        """Of the Hub. It alone gets the token: the HTTP client drops it where another host answers."""
        url = hf_hub_url(self.repo_id, name, revision=self.revision)
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
        return content
