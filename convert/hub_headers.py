"""Files of a Hub repository, read in place: their sizes, and the headers of safetensors by range requests."""

import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from huggingface_hub import constants, hf_hub_url
from huggingface_hub.errors import HfHubHTTPError, HTTPError  # type: ignore[attr-defined]  # httpx's or httpx2's
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_stream_backoff  # type: ignore[attr-defined]

from resformer.convert.safetensors_format import Shard, Tensor, check_shard, read_shard
from resformer.errors import CheckpointError, one_line
from resformer.untrusted import MOST_BYTES

#: Bytes of the first request of a file: the whole header of most shards of an 8B or 70B model (73 and 24 tensors).
_FIRST = 16 * 1024


@dataclass(frozen=True)
class HubFiles:
    """The files of a repository at one commit."""

    repo_id: str
    revision: str  # the commit
    sizes: Mapping[str, int]  # name -> bytes

    def read_shard(self, path: Path) -> Shard:
        """Reads and checks a header, as `safetensors_format.read_shard` does; `path` is where the file would be here.

        `HfApi.parse_safetensors_file_metadata` checks no offsets, no sizes, and reads all that a server sends.
        """
        name, size = path.name, self.sizes[path.name]
        first = self.read(name, 0, min(size, _FIRST))

        def read(start: int, length: int) -> bytes:
            length = min(length, size - start)
            return first[start : start + length] if start + length <= len(first) else self.read(name, start, length)

        return check_shard(Path(self.repo_id, name), path, size, read)

    def read_shards(self, paths: Iterable[Path]) -> Iterator[Shard]:
        """The headers, in this order, some at a time; those of files that are on this disk from there."""
        with ThreadPoolExecutor(8) as pool:
            yield from pool.map(lambda path: read_shard(path) if path.exists() else self.read_shard(path), paths)

    def with_bytes(self, shards: Collection[Shard], names: Collection[str]) -> tuple[Shard, ...]:
        """The shards with the tensors of these names in memory, which `MOST_BYTES` bounds."""
        size = sum(tensor.nbytes for shard in shards for tensor in shard.tensors if tensor.name in names)
        if size > MOST_BYTES:
            raise CheckpointError(f"{self.repo_id}: coefficients of {size:,} bytes; at most {MOST_BYTES:,} are read.")

        def fetched(tensor: Tensor) -> Tensor:
            if tensor.name not in names or tensor.on_this_disk or isinstance(tensor.data, memoryview):
                return tensor
            path, start = tensor.data
            return replace(tensor, data=memoryview(self.read(path.name, start, tensor.nbytes)))

        with ThreadPoolExecutor(8) as pool:
            return tuple(replace(shard, tensors=tuple(pool.map(fetched, shard.tensors))) for shard in shards)

    def read(self, name: str, start: int, length: int) -> bytes:
        """Some bytes of a file. Only the Hub gets the token: the HTTP client drops it where another host answers."""
        if not length:
            return b""
        url = hf_hub_url(self.repo_id, name, revision=self.revision)
        wanted = f"bytes {start}-{start + length - 1}"
        headers = {**build_hf_headers(), "range": wanted.replace(" ", "="), "accept-encoding": "identity"}
        timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
        for pause in (1, 2, 4, None):
            content = bytearray()
            try:
                # Failed connections are tried again here: `http_stream_backoff` would close the HTTP client, which cuts
                # off what other threads are reading.
                with http_stream_backoff(
                    "GET", url, max_retries=3, retry_on_exceptions=(), headers=headers, timeout=timeout
                ) as response:
                    hf_raise_for_status(response)
                    sent = response.headers.get("content-range", "no range")
                    for piece in response.iter_bytes():
                        content += piece
                        if len(content) > length:
                            break
                break
            except HfHubHTTPError:
                raise
            except HTTPError as error:  # of the connection, to the Hub or to the storage that it names
                if pause is None:
                    where = error.request.url.host
                    raise CheckpointError(
                        f"{self.repo_id}: {name} cannot be read from {where}: {one_line(error)}."
                    ) from error
                time.sleep(pause)
        if len(content) != length or sent.rpartition("/")[0] != wanted:
            raise CheckpointError(
                f"{self.repo_id}: asked for {length:,} bytes of {name} ({wanted}), the server sent "
                f"{len(content):,} ({one_line(sent)}). Run the command again; if it stays, download the repository and "
                "use its folder."
            )
        return bytes(content)
