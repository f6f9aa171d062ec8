"""Where a checkpoint comes from: a local folder, a GGUF file, or the Hub. None of its code is run."""

import math
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import hf_hub_download, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
)

from resformer.configuration import ResFormerConfig
from resformer.convert.connections import expected_shapes
from resformer.convert.families import backbone_config, supported
from resformer.convert.reading import Checkpoint, read_checkpoint, read_side_files
from resformer.convert.safetensors_format import Shard, Tensor
from resformer.convert.tensors import CODES, dominant_dtype, to_tensor, to_torch
from resformer.errors import CheckpointError, brief, listed, shown
from resformer.untrusted import MIB, bare_name, read_json, regular_file

__all__ = ["Source", "open_source"]

#: What is fetched before the weights are: enough to refuse a checkpoint that cannot be converted.
_SMALL_HUB_FILES = "*.json *.jinja *.model *.txt *.tiktoken *LICENSE* *LICENCE* *NOTICE* *USE_POLICY* README.md".split()
#: Where PEFT is installed, Transformers applies the adapter that it finds beside a model: it is to look where none is.
_NO_ADAPTER = {"subfolder": "\0"}
#: Keys that every configuration may have and that say nothing about the architecture.
_METADATA_KEYS = set(
    "model_type architectures torch_dtype dtype transformers_version pretraining_tp id2label label2id "
    "is_encoder_decoder chunk_size_feed_forward output_hidden_states return_dict problem_type _from_model_config "
    "use_return_dict output_attentions".split()
)
#: Keys of older configurations that Transformers still reads, whatever the family.
_LEGACY_KEYS = set("head_dim rope_theta rope_scaling partial_rotary_factor original_max_position_embeddings".split())
_SIZES = (
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
    "max_position_embeddings max_window_layers sliding_window"
).split()
#: q, o, gate, up and down projections and two norms are in every layer.
_TENSORS_OF_A_LAYER = 7


@dataclass(frozen=True)
class Source:
    """A checkpoint, and what it is called."""

    name: str  # as the user gave it
    checkpoint: Checkpoint
    config: PreTrainedConfig
    revision: str | None = None  # the commit, if it came from the Hub
    model: PreTrainedModel | None = None  # of a source that has to be loaded to be read: GGUF
    file: Path | None = None  # if it is a single file
    dropped_config: tuple[str, ...] = ()  # keys of its config.json that are not read

    @property
    def folder(self) -> Path:
        return self.checkpoint.folder

    @property
    def dtype(self) -> torch.dtype:
        """Of most weights; float32 for a GGUF file, which is dequantised to that."""
        return dominant_dtype(self.checkpoint)

    def load(self) -> PreTrainedModel:
        """The model in its own dtype, loaded by Transformers from the files that were checked; none of its code is run.

        Raises:
            CheckpointError: Transformers does not load it, or not all of it.
        """
        if self.model is not None:
            return self.model
        arguments: dict[str, Any] = {"pretrained_model_name_or_path": str(self.folder), "use_safetensors": True}
        if not self.checkpoint.indexed:
            loaded = {name: to_torch(tensor) for name, tensor in self.checkpoint.tensors.items()}
            arguments = {"pretrained_model_name_or_path": None, "state_dict": loaded}
        try:
            # The class itself, where AutoModel would look for files.
            model, loading = MODEL_FOR_CAUSAL_LM_MAPPING[type(self.config)].from_pretrained(
                **arguments,
                config=self.config,
                dtype=self.dtype,
                local_files_only=True,
                output_loading_info=True,
                adapter_kwargs=_NO_ADAPTER,
            )
        except ImportError:
            raise
        except Exception as error:  # Transformers and safetensors raise nearly anything for a bad file
            raise CheckpointError(f"{self.folder}: cannot be loaded: {brief(error)}") from error
        _check_loading(str(self.folder), loading)
        return model.eval()

    def save_gguf_extras(self, output: Path) -> bool:
        """Writes what else a GGUF file carries; returns whether there was a tokenizer that Transformers can read."""
        if self.file is None or self.model is None:
            return True
        self.model.generation_config.save_pretrained(output)
        try:
            tokenizer = AutoTokenizer.from_pretrained(str(self.file.parent), gguf_file=self.file.name)
        except Exception:  # whatever Transformers makes of a vocabulary that it does not know
            return False
        tokenizer.save_pretrained(output)
        return True


def open_source(
    source: str | Path,
    revision: str | None = None,
    *,
    allow_pickle: bool = False,
    ours: bool = False,
) -> Source:
    """Finds the checkpoint: a folder, a `.gguf` file, `owner/name` or `owner/name/file.gguf` on the Hub.

    Args:
        allow_pickle: read `pytorch_model*.bin` where there are no safetensors, restricted to tensors.
        ours: take ResFormer checkpoints too, not only those that can become one.

    Raises:
        CheckpointError: it is none of these, cannot be read, or is of a family that cannot be converted.
    """
    name = str(source)
    path = Path(source).expanduser()
    if os.path.exists(path) and not path.is_dir() and path.suffix != ".gguf":
        raise CheckpointError(f"{path}: expected a checkpoint folder, a .gguf file or a Hub id.")
    if os.path.isfile(path):
        return _open_gguf(name, path, None)
    if not os.path.isdir(path):
        return _open_hub(name, revision, allow_pickle=allow_pickle, ours=ours)
    if revision is not None:
        raise CheckpointError(f"{path}: --revision {revision} is for Hub ids, this is a local folder.")
    return _open_folder(name, path, None, allow_pickle=allow_pickle, ours=ours)


def _open_folder(name: str, folder: Path, revision: str | None, *, allow_pickle: bool, ours: bool) -> Source:
    if not (folder / "config.json").exists():
        raise CheckpointError(f"{folder}: has no config.json, so it is not a Transformers checkpoint.{_hint(folder)}")
    if allow_pickle and not any(folder.glob("*.safetensors")):
        checkpoint = _read_pickles(folder)
    else:
        checkpoint = read_checkpoint(folder)
    config, dropped = _clean_config(checkpoint, ours=ours)
    return Source(name, checkpoint, config, revision, dropped_config=dropped)


def _hint(folder: Path) -> str:
    if ggufs := sorted(file.name for file in folder.glob("*.gguf")):
        return f" It holds {listed(ggufs)}: name that file."
    if (folder / "adapter_config.json").exists():
        return " It is a PEFT adapter: merge it into its model and save that (`merge_and_unload`)."
    if (folder / "params.json").exists():
        return " It has Meta's own format: use the repository's Transformers files."
    return ""


def _clean_config(checkpoint: Checkpoint, *, ours: bool) -> tuple[PreTrainedConfig, tuple[str, ...]]:
    """(the configuration, the keys that were not read), from the keys that the family is known to have.

    Nothing else of a stranger's config.json reaches Transformers: some keys choose code to run (`auto_map`,
    `_attn_implementation`).

    Raises:
        CheckpointError: the family is not supported, the weights are quantised, or a value makes no sense.
    """
    raw, where = checkpoint.config, checkpoint.folder / "config.json"
    model_type = _family(where, raw, ours=ours)
    if raw.get("quantization_config") is not None:
        method = shown(raw["quantization_config"])
        raise CheckpointError(f"{where}: the checkpoint is quantised ({method}); dequantise it first.")
    for key in _SIZES:
        value = raw.get(key)
        if value is not None and not (type(value) is int and 0 <= value < 2**31):
            raise CheckpointError(f"{where}: {key} is {shown(value)}; expected a size.")
    config_class = ResFormerConfig if model_type == ResFormerConfig.model_type else CONFIG_MAPPING[model_type]
    own = {f.name for f in fields(config_class)} - {f.name for f in fields(PreTrainedConfig)}
    known = own | _LEGACY_KEYS | set(config_class.attribute_map)
    layers = raw.get("num_hidden_layers", config_class.num_hidden_layers)
    _check_layers(checkpoint, layers)
    try:
        config = config_class.from_dict({key: value for key, value in raw.items() if key in known})
    except Exception as error:  # any of the validators', or of arithmetic with what they let pass
        raise CheckpointError(f"{where}: cannot be read as a configuration of {model_type}: {brief(error)}") from error
    return config, tuple(sorted(raw.keys() - known - _METADATA_KEYS))


def _check_layers(checkpoint: Checkpoint, expected: object) -> None:
    """A configuration may claim any number of layers; only as many as there are tensors for are ever made."""
    matches = [re.match(r"model\.layers\.(\d{1,6})\.", name) for name in checkpoint.tensors]
    found = len({match[1] for match in matches if match})
    if found == 0 and checkpoint.tensors:
        raise CheckpointError(
            f"{checkpoint.folder}: missing keys: no tensor is called model.layers.N..., but for one "
            f"{shown(next(iter(checkpoint.tensors)))}. Save the model with its head (`...ForCausalLM`)."
        )
    if found * _TENSORS_OF_A_LAYER > len(checkpoint.tensors):
        raise CheckpointError(
            f"{checkpoint.folder}: missing keys: its shards hold {len(checkpoint.tensors)} tensors for {found} layers."
        )
    if found != expected:
        raise CheckpointError(
            f"{checkpoint.folder}: config.json has num_hidden_layers={shown(expected)}, the shards hold {found} layers."
        )


def _tensors_of(model: PreTrainedModel) -> list[Tensor]:
    """The parameters and buffers that a checkpoint of `model` holds, in memory; tied ones once."""
    tied = set(model.all_tied_weights_keys) if model.config.tie_word_embeddings else set()
    return [to_tensor(name, tensor) for name, tensor in model.state_dict().items() if name not in tied]


def _in_memory(folder: Path, config: dict[str, Any], tensors: Iterable[Tensor], **rest: Any) -> Checkpoint:
    made = tuple(tensors)
    return Checkpoint(folder, config, (Shard(None, sum(tensor.nbytes for tensor in made), made),), **rest)


def _open_gguf(name: str, path: Path, revision: str | None) -> Source:
    location = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    try:
        config = AutoConfig.from_pretrained(**location)
        _check_gguf(path, backbone_config(config))
        model, loading = AutoModelForCausalLM.from_pretrained(**location, dtype=torch.float32, output_loading_info=True)
    except (ImportError, CheckpointError):
        raise  # a missing `gguf` says itself what to install
    except Exception as error:  # Transformers and gguf raise nearly anything for a bad file
        raise CheckpointError(f"{path}: cannot be read as GGUF: {brief(error)}") from error
    _check_loading(str(path), loading)
    model.eval()
    return Source(name, _in_memory(path.parent, {}, _tensors_of(model)), config, revision, model, path)


def _check_gguf(path: Path, config: ResFormerConfig) -> None:
    """A few bytes can claim a model of any size: its numbers must be in the file before memory is taken for them."""
    from gguf import GGUFReader

    stored = {tensor.name: int(tensor.n_elements) for tensor in GGUFReader(path).tensors}
    layers = {match[1] for match in (re.match(r"blk\.(\d+)\.", name) for name in stored) if match}
    if len(layers) != config.num_hidden_layers:
        raise CheckpointError(
            f"{path}: its metadata tell of {config.num_hidden_layers} layers, it holds tensors of {len(layers)}."
        )
    needed = {name: math.prod(shape) for name, shape in expected_shapes(config).items()}
    if "output.weight" not in stored:  # the head is the embeddings
        needed.pop("lm_head.weight")
    if sum(stored.values()) < sum(needed.values()):
        raise CheckpointError(
            f"{path}: holds {sum(stored.values()):,} numbers, its metadata tell of a model of {sum(needed.values()):,}."
        )


def _check_loading(where: str, loading: dict[str, Any]) -> None:
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        if problems := loading.get(kind):
            raise CheckpointError(f"{where}: {kind.replace('_', ' ')}: {listed(set(map(str, problems)))}.")


def _read_pickles(folder: Path) -> Checkpoint:
    """`pytorch_model.bin` or its shards, restricted to tensors: nothing of theirs is run."""
    index = folder / "pytorch_model.bin.index.json"
    names = ["pytorch_model.bin"]
    if index.exists():
        weight_map = read_json(index, 4 * MIB).get("weight_map")
        values = weight_map.values() if isinstance(weight_map, dict) else ()
        names = sorted({bare_name(name, ".bin", str(index)) for name in map(str, values)})
    tensors: dict[str, Tensor] = {}
    for name in names:
        path = regular_file(folder / name)
        try:
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:  # a pickle can fail in any way
            raise CheckpointError(f"{folder / name}: cannot be read with weights_only=True: {brief(error)}") from error
        for key, value in state.items() if isinstance(state, dict) else ():
            if not isinstance(key, str) or key in tensors or not _is_stored_whole(value):
                raise CheckpointError(f"{folder / name}: {shown(key)} is no plain floating tensor, or is there twice.")
            tensors[key] = to_tensor(key, value)
    if not tensors:
        raise CheckpointError(f"{folder}: its *.bin files hold no tensors.")
    side_files, left_behind, notes = read_side_files(folder)
    config = read_json(folder / "config.json", MIB)
    return _in_memory(
        folder,
        config,
        tensors.values(),
        side_files=tuple(side_files),
        left_behind=tuple(name for name in left_behind if name != "config.json"),
        notes=tuple(notes),
    )


def _is_stored_whole(value: object) -> bool:
    """Whether this is a floating tensor with every one of its numbers in the file: an expanded one would be a bomb."""
    return (
        isinstance(value, torch.Tensor)
        and value.dtype in CODES
        and value.layout is torch.strided
        and value.device.type == "cpu"
        and value.numel() * value.element_size() <= value.untyped_storage().nbytes()
    )


def _open_hub(name: str, revision: str | None, *, allow_pickle: bool, ours: bool) -> Source:
    repo_id, gguf_file = name, None
    if name.endswith(".gguf") and name.count("/") >= 2:
        owner, repo, gguf_file = name.split("/", 2)
        repo_id = f"{owner}/{repo}"
    try:
        if gguf_file is not None:
            path = Path(hf_hub_download(repo_id, gguf_file, revision=revision))
            commit = next((part.name for part in path.parents if part.parent.name == "snapshots"), revision)
            return _open_gguf(name, path, commit)
        folder = Path(snapshot_download(repo_id, revision=revision, allow_patterns=_SMALL_HUB_FILES))
        commit = folder.name  # a snapshot's folder is named by its commit
        if (folder / "config.json").exists():  # before 100 GB are fetched for nothing
            _family(folder / "config.json", read_json(folder / "config.json", MIB), ours=ours)
        weights = ["model.safetensors", "model.safetensors.index.json"]
        if (folder / "model.safetensors.index.json").exists():
            weights.append("model-*-of-*.safetensors")
        snapshot_download(repo_id, revision=commit, allow_patterns=weights)
        if allow_pickle and not any(folder.glob("*.safetensors")):
            snapshot_download(repo_id, revision=commit, allow_patterns=["pytorch_model*.bin"])
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise CheckpointError(
            f"{brief(name)}: is neither a local folder nor a .gguf file, and the Hub did not give it: {brief(error)}"
        ) from error
    return _open_folder(name, folder, commit, allow_pickle=allow_pickle, ours=ours)


def _family(where: Path, config: dict[str, Any], *, ours: bool) -> str:
    if ours and config.get("model_type") == ResFormerConfig.model_type:
        return ResFormerConfig.model_type
    try:
        return supported(config.get("model_type"))
    except CheckpointError as error:
        raise CheckpointError(f"{where}: {error}") from error
