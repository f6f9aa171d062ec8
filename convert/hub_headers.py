"""Files of a Hub repository, read in place: their sizes, and the headers of safetensors by range requests."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from huggingface_hub import constants, get_session, hf_hub_url
from huggingface_hub.errors import HfHubHTTPError, HTTPError  # type: ignore[attr-defined]  # httpx's or httpx2's
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status  # type: ignore[attr-defined]

from resformer.errors import CheckpointError, one_line
from resformer.hub import HubError, retried
from resformer.safetensors_format import Shard, Tensor, check_shard, read_shard
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

        def read() -> tuple[bytes, str]:
            content = bytearray()
            # Not by huggingface_hub's `http_stream_backoff`, nor by its `HfFileSystem`, which uses it: after a failed
            # connection they close the HTTP client that other threads are reading with, and take what a server sends.
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
