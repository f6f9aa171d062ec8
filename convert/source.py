"""Opens a checkpoint in a local folder, a GGUF file or on the Hub: first its configuration, then its weights.

Errors in the configuration are reported before the weights are downloaded. No code of the source is run.
"""

import copy
import glob
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import get_cached_repo_tree, hf_hub_download, list_repo_files, snapshot_download
from huggingface_hub.errors import (  # type: ignore[attr-defined]
    CachedRepoTreeNotFoundError,
    HFValidationError,
    HTTPError,  # httpx's or httpx2's
)
from huggingface_hub.hf_api import RepoFile
from transformers import CONFIG_MAPPING, FineGrainedFP8Config, PreTrainedConfig, PreTrainedModel

from resformer.configuration import ResFormerConfig
from resformer.convert.connections import HEADS, added_shapes, expected_shapes, head_of
from resformer.convert.families import FAMILIES, resformer_config, supported
from resformer.convert.hub_headers import HubFiles
from resformer.convert.other_formats import (
    PICKLE_INDEX,
    check_quantisation,
    dequantise,
    fp8_weights,
    gguf_config,
    gguf_headers,
    load_model,
    pickle_names,
    read_pickles,
    with_dequantised,
)
from resformer.convert.reading import (
    INDEX,
    SETTINGS,
    SIDE_FILES,
    SINGLE,
    Checkpoint,
    check_tensors,
    hint,
    read_checkpoint,
    read_index,
)
from resformer.convert.safetensors_format import MOST_TENSORS, Shard
from resformer.convert.tensors import dominant_dtype, to_tensor, to_torch
from resformer.errors import CheckpointError, one_line, quoted
from resformer.files import EVAL_RESULTS
from resformer.record import RECORD
from resformer.untrusted import MIB, MOST_BYTES, read_json

#: What is fetched of a Hub repository with its configuration.
_CONFIG_FILES = ["config.json", "README.md", RECORD]
#: What is fetched of a Hub repository with its weights.
_SMALL_HUB_FILES = re.compile(
    "|".join(map(re.escape, (*_CONFIG_FILES, INDEX, PICKLE_INDEX, "metrics.json")))
    + rf"|{re.escape(EVAL_RESULTS)}/[^/]+\.yaml|{SIDE_FILES.pattern}"
)
_MOST_SMALL_FILES = 1000
#: Keys that every configuration may have and that say nothing about the architecture.
_METADATA_KEYS = set(
    "model_type architectures torch_dtype dtype transformers_version pretraining_tp id2label label2id "
    "is_encoder_decoder chunk_size_feed_forward output_hidden_states return_dict problem_type _from_model_config "
    "use_return_dict output_attentions".split()
)
#: Keys that are no dataclass fields but that Transformers reads for every family: older names, and `clip_qkv`, which it
#: refuses.
_LEGACY_KEYS = set(
    "head_dim rope_theta rope_scaling partial_rotary_factor original_max_position_embeddings clip_qkv "
    "use_sliding_window".split()
)
_SIZES = (
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
    "max_position_embeddings max_window_layers sliding_window"
).split()
#: q, o, gate, up and down projections and two norms are in every layer.
_TENSORS_OF_A_LAYER = 7
#: The most layers that are read: each has so many tensors, and at most `MOST_TENSORS` are read.
_MOST_LAYERS = MOST_TENSORS // _TENSORS_OF_A_LAYER


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
    gguf: Path | None = None  # the file, if it is a GGUF file

    @property
    def fp8(self) -> bool:
        """Whether weights are stored in fp8: other quantised ones are refused."""
        return self.raw_config.get("quantization_config") is not None

    @property
    def dequantised(self) -> bool:
        """Whether Transformers dequantises it: the result is compared with what that makes."""
        return self.gguf is not None or self.fp8

    def fetch(self, *, allow_pickle: bool = False, headers_only: bool = False) -> "OpenedSource":
        """Downloads the weights, if they are on the Hub, reads their headers, and compares them with the configuration.

        With `headers_only`, dequantises nothing, and reads only the headers of weights on the Hub and the coefficients
        of connections: no other tensor has bytes.
        """
        model, hub = None, None
        if self.gguf is not None:
            model, tensors = (None, gguf_headers(self.config)) if headers_only else dequantise(self.gguf, self.config)
            checkpoint = Checkpoint(self.folder, (Shard(None, self.gguf.stat().st_size, tuple(tensors)),))
        elif headers_only and (hub := _hub_files(self)) is not None:
            with asking_hub(self.name):
                checkpoint = read_checkpoint(self.folder, hub)
        else:
            pickled = _fetch_from_hub(self, allow_pickle=allow_pickle)
            checkpoint = read_checkpoint(self.folder, _hub_files(self), read_pickles(self.folder) if pickled else None)
        if self.fp8:
            checkpoint, model = _dequantised(self, checkpoint, headers_only=headers_only)
        config = resformer_config(self.config)
        _check_layers(checkpoint, config.num_hidden_layers)
        tied, notes = check_tensors(checkpoint, expected_shapes(config), tied=bool(self.config.tie_word_embeddings))
        if hub is not None:
            with asking_hub(self.name):
                shards = hub.with_bytes(checkpoint.shards, added_shapes(config, tables=False))
            checkpoint = replace(checkpoint, shards=shards)
        checkpoint = replace(checkpoint, notes=(*checkpoint.notes, *notes))
        return OpenedSource(**vars(self), checkpoint=checkpoint, tied=tied, model=model)


@dataclass(frozen=True, kw_only=True)
class OpenedSource(Source):
    """A source whose headers have been read and checked; its weights are on this disk, or still on the Hub."""

    checkpoint: Checkpoint
    tied: bool  # whether the head is the embeddings
    model: PreTrainedModel | None = None  # where it was dequantised

    @property
    def on_this_disk(self) -> bool:
        """Whether all weights are: they are still on the Hub otherwise."""
        return all(tensor.on_this_disk for tensor in self.checkpoint.tensors.values())

    @property
    def dtype(self) -> torch.dtype:
        """Of most weights; what is dequantised to, float32 for a GGUF file and bfloat16 for fp8."""
        return dominant_dtype(self.checkpoint)

    def load(self) -> PreTrainedModel:
        """The model in its own dtype, loaded by Transformers from the files that were checked, without their code."""
        if self.model is not None:
            return self.model
        arguments: dict[str, Any] = {"pretrained_model_name_or_path": str(self.folder), "use_safetensors": True}
        if not self.checkpoint.indexed:
            loaded = {name: to_torch(tensor) for name, tensor in self.checkpoint.tensors.items()}
            arguments = {"pretrained_model_name_or_path": None, "state_dict": loaded}
        return load_model(self.folder, self.config, dtype=self.dtype, **arguments)

    def sha256_on_hub(self) -> dict[str, str]:
        """File -> SHA-256, as the Hub states it: of the files that it stores by LFS, if the source is there."""
        return {file.path: file.lfs.sha256 for file in _cached_tree(self) if file.lfs is not None}


def open_source(
    source: str | Path, revision: str | None = None, *, resformer: bool = False, heads: bool = False
) -> Source:
    """Finds the checkpoint and reads its configuration; of a Hub repository nothing but small files is fetched.

    Args:
        source: a folder, a `.gguf` file, `owner/name` or `owner/name/file.gguf` on the Hub, which is fetched.
        resformer: take ResFormer checkpoints too, not only those that can become one.
        heads: of those, take models with other heads too.
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
        opened = _open_folder(name, path, resformer=resformer) if path.is_dir() else _open_gguf(name, path)
    else:
        with asking_hub(name):
            opened = _open_hub(name, revision, resformer=resformer)
    if not heads and (head := head_of(opened.config)):
        raise CheckpointError(
            f"{opened.name}: is a {head}, and this command takes only language models. `inspect`, `verify`, `push` and "
            "`card` take other heads."
        )
    return opened


def _open_gguf(name: str, path: Path, **hub: Any) -> Source:
    return Source(name=name, folder=path.parent, config=gguf_config(path), raw_config={}, gguf=path, **hub)


def _open_folder(name: str, folder: Path, *, resformer: bool, **hub: Any) -> Source:
    _check_config_file(folder, [path.name for path in folder.iterdir()])
    raw = read_json(folder / "config.json", MIB)
    config, dropped = _clean_config(folder / "config.json", raw, resformer=resformer)
    return Source(name=name, folder=folder, config=config, raw_config=raw, dropped_config=dropped, **hub)


def _open_hub(name: str, revision: str | None, *, resformer: bool) -> Source:
    if name.endswith(".gguf") and name.count("/") >= 2:
        owner, repo, file = name.split("/", 2)
        path = Path(hf_hub_download(f"{owner}/{repo}", file, revision=revision))
        commit = next((part.name for part in path.parents if part.parent.name == "snapshots"), revision)
        return _open_gguf(name, path, revision=commit, repo_id=f"{owner}/{repo}")
    folder = Path(snapshot_download(name, revision=revision, allow_patterns=_CONFIG_FILES))
    commit = folder.name  # a snapshot's folder is named by its commit
    if not (folder / "config.json").exists():
        _check_config_file(folder, list_repo_files(name, revision=commit))
    return _open_folder(name, folder, resformer=resformer, revision=commit, repo_id=name)


def _hub_files(source: Source) -> HubFiles | None:
    """The files of the repository, if it holds safetensors and is on the Hub; downloads the index and the settings."""
    tree = _cached_tree(source)
    if not {SINGLE, INDEX} & {file.path for file in tree}:
        return None
    with asking_hub(source.name):
        snapshot_download(str(source.repo_id), revision=source.revision, allow_patterns=[INDEX, *SETTINGS])
    return HubFiles(str(source.repo_id), str(source.revision), {file.path: file.size for file in tree})


def _cached_tree(source: Source) -> list[RepoFile]:
    """The files of the repository; none if it is no repository, or an older huggingface_hub filled the cache."""
    if source.repo_id is None or source.revision is None:
        return []
    with asking_hub(source.name):
        try:
            return list(get_cached_repo_tree(source.repo_id, revision=source.revision))
        except CachedRepoTreeNotFoundError:
            return []


def _fetch_from_hub(source: Source, *, allow_pickle: bool) -> bool:
    """Downloads the weight files that the index names, and no others; returns whether they are pickles."""
    folder = source.folder
    if source.repo_id is None:
        return allow_pickle and not any(folder.glob("*.safetensors"))

    def download(names: Iterable[str]) -> None:
        patterns = [glob.escape(name) for name in names]
        snapshot_download(str(source.repo_id), revision=source.revision, allow_patterns=patterns)

    with asking_hub(source.name):
        sizes = {file.path: file.size for file in _cached_tree(source) if _SMALL_HUB_FILES.fullmatch(file.path)}
        small = [name for name, size in sizes.items() if size <= MOST_BYTES]
        if len(small) > _MOST_SMALL_FILES:
            raise CheckpointError(
                f"{source.name}: has {len(small):,} files beside its weights; at most {_MOST_SMALL_FILES:,} are read."
            )
        download([*small, SINGLE])
        if (folder / SINGLE).exists():
            return False
        if (folder / INDEX).exists():
            download(set(read_index(folder / INDEX).values()))
            return False
        names = list_repo_files(source.repo_id, revision=source.revision)
        if not allow_pickle or not any(name.endswith(".bin") for name in names):
            raise CheckpointError(f"{source.name}: has neither {SINGLE} nor {INDEX}.{hint(names)}")
        download(pickle_names(folder))
        return True


@contextmanager
def asking_hub(name: str) -> Iterator[None]:
    """Turns errors of the Hub and of the connection into a `CheckpointError`."""
    try:
        yield
    except (HTTPError, HFValidationError, OSError) as error:
        raise CheckpointError(
            f"{one_line(name)}: is neither a local folder nor a .gguf file, and the Hub did not give it: "
            f"{one_line(error)}"
        ) from error


def _check_config_file(folder: Path, names: Collection[str]) -> None:
    if "config.json" not in names:
        raise CheckpointError(f"{folder}: has no config.json, so it is not a Transformers checkpoint.{hint(names)}")


def _clean_config(where: Path, raw: Mapping[str, Any], *, resformer: bool) -> tuple[PreTrainedConfig, tuple[str, ...]]:
    """(the configuration, the keys that were not read), from the keys that the family is known to have.

    Nothing else of an untrusted config.json reaches Transformers: some keys choose code to run (`auto_map`,
    `_attn_implementation`).
    """
    model_type = raw.get("model_type")
    if not (resformer and model_type == ResFormerConfig.model_type):
        try:
            supported(model_type)
        except CheckpointError as error:
            raise CheckpointError(f"{where}: {error}") from error
    if raw.get("quantization_config") is not None:
        check_quantisation(where, raw["quantization_config"])
    for key, usual in (("is_causal", True), ("transformers_weights", None)):
        if raw.get(key, usual) != usual:
            raise CheckpointError(
                f"{where}: {key} is {quoted(raw[key])}, with which Transformers loads another model than the causal "
                "one of the usual files; only that can be converted."
            )
    for key in _SIZES:
        value = raw.get(key)
        if value is not None and not (type(value) is int and 0 <= value < 2**31):
            raise CheckpointError(f"{where}: {key} is {quoted(value)}; expected a size.")
    layers = raw.get("num_hidden_layers")
    if layers is not None and not 0 < layers <= _MOST_LAYERS:  # lists of that length would be made
        raise CheckpointError(f"{where}: num_hidden_layers is {layers:,}; expected 1 to {_MOST_LAYERS:,}.")
    config_class = ResFormerConfig if model_type == ResFormerConfig.model_type else CONFIG_MAPPING[model_type]
    family_keys = {f.name for f in fields(config_class)} - {f.name for f in fields(PreTrainedConfig)}
    known = family_keys | _LEGACY_KEYS | set(config_class.attribute_map)
    known |= {"base_model"} if config_class is ResFormerConfig else set()  # its origin, for model cards
    try:
        config = config_class.from_dict({key: value for key, value in raw.items() if key in known})
    except Exception as error:  # any of the validators', or of arithmetic with what they let pass
        raise CheckpointError(
            f"{where}: cannot be read as a configuration of {model_type}: {one_line(error)}"
        ) from error
    if config_class is ResFormerConfig and (architectures := raw.get("architectures")) in [[name] for name in HEADS]:
        config.architectures = architectures
        if isinstance(labels := raw.get("id2label"), dict):  # without it: two, as in Transformers
            config.num_labels = len(labels)
    read = known - set(FAMILIES[model_type].training_only if model_type in FAMILIES else ())
    return config, tuple(sorted(raw.keys() - read - _METADATA_KEYS))


def _check_layers(checkpoint: Checkpoint, expected: int) -> None:
    """A configuration may claim any number of layers; a model is made only of as many as there are tensors for."""
    matches = [re.match(r"model\.layers\.(\d{1,6})\.", name) for name in checkpoint.tensors]
    stored = len({match[1] for match in matches if match})
    if stored == 0 and checkpoint.tensors:
        raise CheckpointError(
            f"{checkpoint.folder}: missing keys: no tensor is called model.layers.N...; one is called "
            f"{quoted(next(iter(checkpoint.tensors)))}. Save the model with its head (`...ForCausalLM`)."
        )
    if stored != expected or stored * _TENSORS_OF_A_LAYER > len(checkpoint.tensors):
        raise CheckpointError(
            f"{checkpoint.folder}: config.json has num_hidden_layers={expected}, the shards hold "
            f"{len(checkpoint.tensors):,} tensors of {stored:,} layers; a layer has {_TENSORS_OF_A_LAYER} or more."
        )


def _dequantised(
    source: Source, checkpoint: Checkpoint, *, headers_only: bool
) -> tuple[Checkpoint, PreTrainedModel | None]:
    """(the checkpoint with bfloat16 in the place of fp8, the model, as Transformers dequantises it)."""
    block = source.raw_config["quantization_config"].get("weight_block_size")
    weights = fp8_weights(checkpoint, block)
    if not weights:
        return checkpoint, None
    if headers_only:
        return with_dequantised(checkpoint, {n: replace(tensor, dtype="BF16") for n, tensor in weights.items()}), None
    if not checkpoint.indexed:
        raise CheckpointError(
            f"{source.folder}: Transformers cannot dequantise it: it finds no {SINGLE} and no {INDEX}. Give the "
            "checkpoint its index back."
        )
    config = copy.deepcopy(source.config)
    config.quantization_config = FineGrainedFP8Config(dequantize=True, weight_block_size=block).to_dict()
    arguments = {"pretrained_model_name_or_path": str(source.folder), "use_safetensors": True}
    model = load_model(source.folder, config, dtype=torch.bfloat16, **arguments)
    state = model.state_dict()
    return with_dequantised(checkpoint, {name: to_tensor(name, state[name]) for name in weights}), model
