"""Opens a checkpoint in a local folder or on the Hub: first its configuration, then its weights.

Errors in the configuration are reported before the weights are downloaded. No code of the source is run.
"""

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from resformer.convert.connected_families import connection_config, read_config, unused_weights
from resformer.convert.connections import added_shapes
from resformer.convert.judging import Built, build
from resformer.convert.reading import ADAPTER, Checkpoint, gguf_way, hint, read_checkpoint, weight_files
from resformer.errors import CheckpointError, first_names, one_line
from resformer.hub import Snapshot
from resformer.loading import without_weights
from resformer.model_cards.heads import head_of
from resformer.names import CARD, CONFIG, CONNECTIONS, DESCRIPTIONS, INDEX, RECORD, SETTINGS, SIDE_FILES, SINGLE
from resformer.safetensors_format import FLOATING, Shard, read_shard
from resformer.untrusted import LARGEST_JSON, MIB, MOST_BYTES, check_folder, read_json

_MOST_FILES = 1000


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where a checkpoint is, and its configuration. Its weights have not been fetched."""

    name: str  # as the user gave it
    folder: Path
    config: PreTrainedConfig
    raw_config: Mapping[str, Any]  # config.json, as it stands
    hub: Snapshot | None = None  # if it is there
    alone: bool = False  # it is what `save_connections` writes, without the other weights

    @property
    def revision(self) -> str | None:
        """The commit, if it is on the Hub."""
        return None if self.hub is None else self.hub.commit

    def fetch_alone(self) -> Shard:
        """The file of connections without other weights, whose tensors have the names of the decoder."""
        if self.hub is not None:
            self.hub.fetch([CONNECTIONS])
        return read_shard(self.folder / CONNECTIONS)

    def fetch(self, *, headers_only: bool = False) -> "OpenedSource":
        """Downloads the weights, if they are on the Hub, reads their headers, and has Transformers build the model.

        With `headers_only`, reads only the headers of weights on the Hub and the coefficients of connections: all other
        tensors are holes.
        """
        if self.alone:
            raise without_weights(self.name, self.config)
        folder, temporary, hub = self.folder, None, self.hub
        if hub is None:
            check_folder(folder)
        else:
            along = {
                name
                for name, file in hub.files.items()
                if SIDE_FILES.fullmatch(name) or (DESCRIPTIONS.fullmatch(name) and file.size <= MOST_BYTES)
            }
            if len(along) > _MOST_FILES:
                raise CheckpointError(
                    f"{self.name}: has {len(along):,} files beside its weights; at most {_MOST_FILES:,} are read."
                )
            hub.fetch([INDEX, *SETTINGS], LARGEST_JSON)
            hub.fetch(along, MOST_BYTES)
            check_folder(folder)
            weights = weight_files(folder, hub.files or [path.name for path in folder.iterdir()])
            absent = [name for name in weights if not (folder / name).exists()]
            if headers_only and absent:
                temporary = tempfile.TemporaryDirectory(prefix="resformer-")
                folder = Path(temporary.name)
                for path in (path for path in self.folder.rglob("*") if path.is_file()):
                    link = folder / path.relative_to(self.folder)
                    link.parent.mkdir(exist_ok=True)
                    link.symlink_to(path.resolve())
                hub.write_headers(absent, folder)
            else:
                hub.fetch(weights)
        checkpoint = read_checkpoint(self.folder, hub.files if hub else (), weights=folder)
        built = build(folder, self.name)
        strange = built.ignored - unused_weights(self.raw_config)
        notes = list(checkpoint.notes)
        if strange:
            notes.append(
                f"{self.name}: Transformers ignores {first_names(strange)}, for which its model has no place; such "
                "tensors stay in the files."
            )
        stored = {name: each.dtype for name, each in checkpoint.tensors.items()}
        if quantised := [name for name, dtype in stored.items() if dtype[0] == "F" and dtype not in FLOATING]:
            raise CheckpointError(
                f"{self.name}: {first_names(quantised)} are of {stored[min(quantised)]}: quantised "
                "checkpoints have to be dequantised first."
            )
        if hub is not None and temporary is not None:
            wanted = added_shapes(connection_config(self.config), tables=False)
            hub.write_tensors(checkpoint.shards, wanted.keys())
        return OpenedSource(
            **vars(self),
            checkpoint=replace(checkpoint, notes=tuple(notes)),
            built=built,
            to_load=folder,
            on_this_disk=temporary is None,
            temporary=temporary,
        )


@dataclass(frozen=True, kw_only=True)
class OpenedSource(Source):
    """A source whose headers have been read, and whose model Transformers has built."""

    checkpoint: Checkpoint
    built: Built
    to_load: Path  # the folder that Transformers loads: the source's own where the weights are on this disk
    on_this_disk: bool  # False: of the weights, only headers and coefficients are
    temporary: Any = None  # keeps `to_load` until this object goes


def open_source(source: str | Path, revision: str | None = None, *, heads: bool = False) -> Source:
    """Finds the checkpoint and reads its configuration; of a Hub repository nothing but small files is fetched.

    With `heads`, takes those of other heads than language models too.
    """
    name, path = str(source), Path(source).expanduser()
    here = os.path.exists(path)
    if name.endswith(".gguf") and (here or name.count("/") >= 2):
        parent = path.parent if here else "/".join(name.split("/")[:2])
        raise CheckpointError(f"{path}: {gguf_way(parent, path.name)}")
    if here and not path.is_dir():
        raise CheckpointError(f"{path}: expected a checkpoint folder or a Hub id.")
    if (path.is_absolute() or name.startswith(".")) and not os.path.lexists(path):
        raise CheckpointError(f"{one_line(name)}: there is no such folder.")
    if revision is not None and here:
        raise CheckpointError(f"{path}: --revision {revision} is for Hub ids, this is local.")
    hub = None if here else Snapshot.of(name, revision)
    folder = path if hub is None else hub.fetch([CONFIG, CARD, RECORD], LARGEST_JSON)
    names = {*(hub.files if hub else ())} or {each.name for each in (folder.iterdir() if folder.exists() else ())}
    if CONFIG not in names:
        way = hint(folder if here else name, names)
        raise CheckpointError(f"{folder}: has no config.json, so it is not a Transformers checkpoint.{way}")
    if ADAPTER in names:
        raise CheckpointError(
            f"{folder}: has an adapter beside the model ({ADAPTER}), which Transformers applies where PEFT is "
            "installed. Merge it and convert that (`merge_and_unload`), or remove the file if it is not meant."
        )
    raw = read_json(folder / CONFIG, MIB)
    config = read_config(folder, raw)
    if not heads:
        check_language_model(name, config)
    alone = CONNECTIONS in names and not {SINGLE, INDEX} & names
    return Source(name=name, folder=folder, config=config, raw_config=raw, hub=hub, alone=alone)


def check_language_model(name: str, config: PreTrainedConfig) -> None:
    """Raises CheckpointError for another head."""
    if head := head_of(config):
        told = f"{name}: is a {head}, and this command takes only language models"
        raise CheckpointError(f"{told}. `inspect`, `verify`, `push` and `card` take other heads.")
