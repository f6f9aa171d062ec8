"""Opens a checkpoint in a local folder, a GGUF file or on the Hub: first its configuration, then its weights.

Errors in the configuration are reported before the weights are downloaded. No code of the source is run.
"""

import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.hf_api import RepoFile
from transformers import PreTrainedConfig, PreTrainedModel

from resformer.convert import connected_families
from resformer.convert.configurations import TENSORS_OF_A_LAYER, read_config
from resformer.convert.connected_families import connection_config, is_connected
from resformer.convert.connections import added_shapes, expected_shapes, head_of
from resformer.convert.hub_headers import HubFiles
from resformer.convert.other_formats import dequantise, gguf_config, gguf_headers, load_model
from resformer.convert.reading import Checkpoint, check_tensors, hint, no_weights, read_checkpoint, read_index, renamed
from resformer.convert.sameness import GENERATION, facts, generation_files, generation_settings
from resformer.errors import CheckpointError, first_names, one_line, quoted
from resformer.hub import asking_hub, fetch, listing, retried
from resformer.names import CONFIG, DESCRIPTIONS, INDEX, RECORD, SETTINGS, SIDE_FILES, SINGLE
from resformer.safetensors_format import FLOATING, Shard
from resformer.untrusted import MIB, MOST_BYTES, read_json

#: Bytes of a file on the Hub with settings or an index that are fetched.
_LARGEST_SETTINGS = 16 * MIB
_MOST_FILES = 1000


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where a checkpoint is, and its configuration. Its weights have not been fetched."""

    name: str  # as the user gave it
    folder: Path
    config: PreTrainedConfig
    raw_config: Mapping[str, Any]  # config.json, as it stands
    dropped_config: tuple[str, ...] = ()  # keys of its config.json that are not read
    revision: str | None = None  # the commit, if it is on the Hub
    repo_id: str | None = None  # if it is on the Hub
    hub_files: Mapping[str, RepoFile] = field(default_factory=dict)  # if it is on the Hub: name -> size and hashes
    gguf: Path | None = None  # the file, if it is a GGUF file

    @property
    def dequantised(self) -> bool:
        """Whether Transformers dequantises it: the result is compared with what that makes."""
        return self.gguf is not None

    def fetch(self, *, headers_only: bool = False) -> "OpenedSource":
        """Downloads the weights, if they are on the Hub, reads their headers, and compares them with the configuration.

        With `headers_only`, dequantises nothing, and reads only the headers of weights on the Hub and the coefficients
        of connections: no other tensor has bytes.
        """
        model, hub = None, None
        if self.gguf is not None:
            model, tensors = (None, gguf_headers(self.config)) if headers_only else dequantise(self.gguf)
            checkpoint = Checkpoint(self.folder, (Shard(None, self.gguf.stat().st_size, tuple(tensors)),))
        elif headers_only and (hub := _hub_files(self)) is not None:
            with asking_hub(self.name):
                checkpoint = read_checkpoint(self.folder, hub)
        else:
            _fetch_from_hub(self)
            checkpoint = read_checkpoint(self.folder, _hub_files(self))
        config = connection_config(self.config)
        if is_connected(config):
            connected_families.check_tensors(checkpoint, config)
            tied, notes = bool(self.config.tie_word_embeddings), list[str]()
        else:
            checkpoint = renamed(checkpoint, self.config.model_type)
            _check_layers(checkpoint, self.config.num_hidden_layers)
            tied, notes = check_tensors(checkpoint, expected_shapes(config), tied=bool(config.tie_word_embeddings))
        if hub is not None:
            with asking_hub(self.name):
                shards = hub.with_bytes(checkpoint.shards, added_shapes(config, tables=False))
            checkpoint = replace(checkpoint, shards=shards)
        generation, side_files = None, checkpoint.side_files
        stated = any(file.name == GENERATION for file in side_files)
        if self.gguf is None and (stated or not os.path.lexists(self.folder / GENERATION)):
            generation = generation_settings(self.folder, self.config)
            if not stated and generation is not None:
                side_files += generation_files(self.folder, self.config, generation)
        checkpoint = replace(checkpoint, side_files=side_files, notes=(*checkpoint.notes, *notes))
        return OpenedSource(**vars(self), checkpoint=checkpoint, tied=tied, generation=generation, model=model)


@dataclass(frozen=True, kw_only=True)
class OpenedSource(Source):
    """A source whose headers have been read and checked; its weights are on this disk, or still on the Hub."""

    checkpoint: Checkpoint
    tied: bool  # whether the head is the embeddings
    generation: dict[str, Any] | None = None  # settings, as Transformers takes them; None if they are not known
    model: PreTrainedModel | None = None  # where it was dequantised

    @property
    def on_this_disk(self) -> bool:
        """Whether all weights are: they are still on the Hub otherwise."""
        return all(tensor.on_this_disk for tensor in self.checkpoint.tensors.values())

    @property
    def dtype(self) -> torch.dtype:
        """Of most weights; float32 for a GGUF file, which is dequantised to it."""
        _, code = max((count, code) for code, count in self.checkpoint.dtypes.items() if code in FLOATING)
        return getattr(torch, FLOATING[code])

    @property
    def stated_dtype(self) -> torch.dtype:
        """In which Transformers loads it by default: as config.json states, else that of most weights."""
        return self.config.dtype or self.dtype

    def facts(self) -> dict[str, Any]:
        """What Transformers makes of it that needs no weights, as `sameness.facts`."""
        return facts(self.config, self.generation) | {"tie_word_embeddings": self.tied}

    def load(self) -> PreTrainedModel:
        """The model in the dtype of most weights, loaded by Transformers from its own files, without their code."""
        if self.model is not None:
            return self.model
        return load_model(self.folder, self.folder, dtype=self.dtype)

    def sha256_on_hub(self) -> dict[str, str]:
        """File -> SHA-256, as the Hub states it: of the files that it stores by LFS, if the source is there."""
        return {name: file.lfs.sha256 for name, file in self.hub_files.items() if file.lfs is not None}


def open_source(source: str | Path, revision: str | None = None, *, heads: bool = False) -> Source:
    """Finds the checkpoint and reads its configuration; of a Hub repository nothing but small files is fetched.

    Args:
        source: a folder, a `.gguf` file, `owner/name` or `owner/name/file.gguf` on the Hub, which is fetched.
        heads: of ResFormer checkpoints, take models with other heads too.
    """
    name, path = str(source), Path(source).expanduser()
    here = os.path.exists(path)
    if here and not path.is_dir() and path.suffix != ".gguf":
        raise CheckpointError(f"{path}: expected a checkpoint folder, a .gguf file or a Hub id.")
    if (path.is_absolute() or name.startswith(".")) and not os.path.lexists(path):
        raise CheckpointError(f"{one_line(name)}: there is no such file or folder.")
    if revision is not None and here:
        raise CheckpointError(f"{path}: --revision {revision} is for Hub ids, this is local.")
    if here:
        opened = _open_folder(name, path) if path.is_dir() else _open_gguf(name, path)
    else:
        with asking_hub(name):
            opened = _open_hub(name, revision)
    if not heads and (head := head_of(opened.config)):
        raise CheckpointError(
            f"{opened.name}: is a {head}, and this command takes only language models. `inspect`, `verify`, `push` and "
            "`card` take other heads."
        )
    return opened


def _open_gguf(name: str, path: Path, **hub: Any) -> Source:
    return Source(name=name, folder=path.parent, config=gguf_config(path), raw_config={}, gguf=path, **hub)


def _open_folder(name: str, folder: Path, **hub: Any) -> Source:
    names = [path.name for path in folder.iterdir()] if folder.exists() else []
    if CONFIG not in names:
        names = hub.get("hub_files") or names
        raise CheckpointError(f"{folder}: has no config.json, so it is not a Transformers checkpoint.{hint(names)}")
    raw = read_json(folder / "config.json", MIB)
    if connected_families.is_of_a_family(raw.get("model_type")):
        config, dropped = connected_families.read_config(folder, raw)
    else:
        config, dropped = read_config(folder, raw)
    return Source(name=name, folder=folder, config=config, raw_config=raw, dropped_config=dropped, **hub)


def _open_hub(name: str, revision: str | None) -> Source:
    if name.endswith(".gguf") and name.count("/") >= 2:
        owner, repo, file = name.split("/", 2)
        path = Path(retried(lambda: hf_hub_download(f"{owner}/{repo}", file, revision=revision)))
        commit = next((part.name for part in path.parents if part.parent.name == "snapshots"), revision)
        return _open_gguf(name, path, revision=commit, repo_id=f"{owner}/{repo}")
    commit, files = listing(name, revision)
    folder = fetch(name, commit, files, [CONFIG, "README.md", RECORD], _LARGEST_SETTINGS)
    return _open_folder(name, folder, revision=commit, repo_id=name, hub_files=files)


def _hub_files(source: Source) -> HubFiles | None:
    """The files of the repository, if it holds safetensors and is on the Hub; downloads the index and the settings."""
    files = source.hub_files
    if not {SINGLE, INDEX} & files.keys():
        return None
    repo_id, commit = str(source.repo_id), str(source.revision)
    with asking_hub(source.name):
        fetch(repo_id, commit, files, [INDEX, *SETTINGS], _LARGEST_SETTINGS)
    return HubFiles(repo_id, commit, {name: file.size for name, file in files.items()})


def _fetch_from_hub(source: Source) -> None:
    """Downloads the weight files that the index names, and no others, if the source is on the Hub."""
    folder, files = source.folder, source.hub_files
    if source.repo_id is None:
        return
    taken = [name for name in files if SIDE_FILES.fullmatch(name) or DESCRIPTIONS.fullmatch(name)]
    small = [name for name in (CONFIG, INDEX, *taken) if name in files and files[name].size <= MOST_BYTES]
    check_number(source, small)
    with asking_hub(source.name):
        download = partial(fetch, source.repo_id, str(source.revision), files)
        download([*small, SINGLE])
        if not (folder / SINGLE).exists():
            if not (folder / INDEX).exists():
                raise no_weights(source.name, files)
            download(set(read_index(folder / INDEX).values()))


def check_number(source: Source, files: Collection[object]) -> None:
    """Refuses a source with too many files beside its weights."""
    if len(files) > _MOST_FILES:
        raise CheckpointError(
            f"{source.name}: has {len(files):,} files beside its weights; at most {_MOST_FILES:,} are read."
        )


def _check_layers(checkpoint: Checkpoint, expected: int) -> None:
    """A configuration may claim any number of layers; a model is made only of as many as there are tensors for."""
    matches = [re.match(r"model\.layers\.(\d{1,6})\.", name) for name in checkpoint.tensors]
    stored = len({match[1] for match in matches if match})
    if stored == 0 and checkpoint.tensors:
        first = next(iter(checkpoint.tensors))
        prefixes = {match[1] for name in checkpoint.tensors if (match := re.match(r"(.+?)model\.layers\.\d", name))}
        way = "Save the model with its head (`...ForCausalLM`)."
        if prefixes:
            way = (
                f"They bear the prefix {first_names(prefixes)}, as of torch.compile, DDP or PEFT: save the model "
                "that is inside, or rename them."
            )
        raise CheckpointError(
            f"{checkpoint.folder}: missing keys: no tensor is called model.layers.N...; one is called {quoted(first)}. "
            f"{way}"
        )
    if stored != expected or stored * TENSORS_OF_A_LAYER > len(checkpoint.tensors):
        raise CheckpointError(
            f"{checkpoint.folder}: config.json has num_hidden_layers={expected}, the shards hold "
            f"{len(checkpoint.tensors):,} tensors of {stored:,} layers; a layer has {TENSORS_OF_A_LAYER} or more."
        )
