"""Weights that are no plain safetensors: pickles, read as tensors; GGUF and fp8, dequantised by Transformers."""

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from resformer.convert.connections import expected_shapes
from resformer.convert.families import backbone_config
from resformer.convert.reading import Checkpoint
from resformer.convert.safetensors_format import Shard, Tensor
from resformer.convert.tensors import CODES, to_tensor
from resformer.environment import require
from resformer.errors import CheckpointError, first_names, one_line, plain, quoted
from resformer.untrusted import MIB, bare_name, read_json, regular_file

PICKLE_INDEX = "pytorch_model.bin.index.json"
_SCALE, _ACTIVATIONS = "_scale_inv", "activation_scale"
#: Where PEFT is installed, Transformers applies the adapter that it finds in this sub-folder: no folder is called so.
#: It would read a generation_config.json of any size.
_UNREAD = {"adapter_kwargs": {"subfolder": "\0"}, "generation_config": GenerationConfig()}
#: `quant_method` -> what else to convert, where it is not dequantised here.
_WAYS = {
    "bitsandbytes": 'dequantise it first: AutoModelForCausalLM.from_pretrained(SOURCE, device_map="auto").dequantize()'
    '.save_pretrained("dequantised").',
    "compressed-tensors": "dequantise it first: AutoModelForCausalLM.from_pretrained(SOURCE, quantization_config="
    'CompressedTensorsConfig(dequantize=True)).save_pretrained("dequantised").',
}


def load_model(where: object, config: PreTrainedConfig, **arguments: Any) -> PreTrainedModel:
    """The causal language model of `config`, in evaluation mode, with every weight from the checkpoint `where`."""
    try:
        # The class itself, because AutoModel looks for remote code and adapters.
        model, loading = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].from_pretrained(
            **arguments, config=config, local_files_only=True, output_loading_info=True, **_UNREAD
        )
    except ImportError:
        raise  # a missing package, which the message names
    except Exception as error:  # Transformers, safetensors and gguf raise nearly anything for a bad file
        raise CheckpointError(f"{plain(where)}: cannot be loaded: {one_line(error)}") from error
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        if problems := loading.get(kind):
            raise CheckpointError(f"{plain(where)}: {kind.replace('_', ' ')}: {first_names(set(map(str, problems)))}.")
    return model.eval()


def pickle_names(folder: Path) -> list[str]:
    """The weight files: `pytorch_model.bin`, or those that `pytorch_model.bin.index.json` names."""
    index = folder / PICKLE_INDEX
    if not index.exists():
        return ["pytorch_model.bin"]
    weight_map = read_json(index, 4 * MIB).get("weight_map")
    values = weight_map.values() if isinstance(weight_map, dict) else ()
    return sorted({bare_name(name, ".bin", str(index)) for name in map(str, values)})


def read_pickles(folder: Path) -> Shard:
    """The tensors of the weight files, in memory. The unpickler is restricted to tensors: it runs no code."""
    tensors: dict[str, Tensor] = {}
    for name in pickle_names(folder):
        path = regular_file(folder / name)
        try:
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:  # a pickle can fail in any way
            raise CheckpointError(
                f"{folder / name}: cannot be read with weights_only=True: {one_line(error)}"
            ) from error
        for key, value in state.items() if isinstance(state, dict) else ():
            if not isinstance(key, str) or key in tensors or not _is_stored_whole(value):
                raise CheckpointError(f"{folder / name}: {quoted(key)} is no plain floating tensor, or is there twice.")
            tensors[key] = to_tensor(key, value)
    if not tensors:
        raise CheckpointError(f"{folder}: its *.bin files hold no tensors.")
    return Shard(None, sum(tensor.nbytes for tensor in tensors.values()), tuple(tensors.values()))


def _is_stored_whole(value: object) -> bool:
    """Whether this is a floating tensor with every one of its numbers in the file: an expanded one would be a bomb."""
    return (
        isinstance(value, torch.Tensor)
        and value.dtype in CODES
        and value.layout is torch.strided
        and value.device.type == "cpu"
        and value.numel() * value.element_size() <= value.untyped_storage().nbytes()
    )


def gguf_config(path: Path) -> PreTrainedConfig:
    """The configuration that the file's metadata describe."""
    regular_file(path, path.resolve().parent)  # a link to it is followed: the user named it
    try:
        reader = require("gguf", "demo").GGUFReader(path)
        _check_gguf_layers(path, reader)
        config = AutoConfig.from_pretrained(str(path.parent), gguf_file=path.name, trust_remote_code=False)
        _check_gguf(path, reader, config)
    except (ImportError, CheckpointError):
        raise  # the ImportError names the package to install
    except Exception as error:  # Transformers and gguf raise nearly anything for a bad file
        raise CheckpointError(f"{path}: cannot be read as GGUF: {one_line(error)}") from error
    return config


def gguf_headers(config: PreTrainedConfig) -> list[Tensor]:
    """The tensors that `dequantise` will make, without their bytes."""
    return [
        Tensor(name, "F32", shape, memoryview(b""))
        for name, shape in expected_shapes(backbone_config(config)).items()
        if not (config.tie_word_embeddings and name == "lm_head.weight")
    ]


def dequantise(path: Path, config: PreTrainedConfig) -> tuple[PreTrainedModel, list[Tensor]]:
    """(the model in float32, its tensors in memory, tied ones once)."""
    model = load_model(
        path, config, pretrained_model_name_or_path=str(path.parent), gguf_file=path.name, dtype=torch.float32
    )
    tied = set(model.all_tied_weights_keys) if model.config.tie_word_embeddings else set()
    return model, [to_tensor(name, tensor) for name, tensor in model.state_dict().items() if name not in tied]


def save_gguf_extras(path: Path, model: PreTrainedModel, output: Path) -> list[str]:
    """Writes the generation configuration and the tokenizer that the file carries; returns warnings."""
    model.generation_config.save_pretrained(output)
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name, trust_remote_code=False)
    except Exception:  # Transformers raises nearly anything for a vocabulary that it does not know
        return [f"{path}: has no tokenizer that can be read: save one beside the result."]
    tokenizer.save_pretrained(output)
    return []


def _check_gguf_layers(path: Path, reader: Any) -> None:
    """Refuses a file that claims other layers than it holds, before Transformers makes lists of that length."""
    stored = {match[1] for match in (re.match(r"blk\.(\d+)\.", tensor.name) for tensor in reader.tensors) if match}
    for key, field in reader.fields.items():
        if key.endswith(".block_count") and (claimed := field.contents()) != len(stored):
            raise CheckpointError(
                f"{path}: its metadata claim {quoted(claimed)} layers, it holds tensors of {len(stored)}."
            )


def _check_gguf(path: Path, reader: Any, config: PreTrainedConfig) -> None:
    """Refuses a file that Transformers would read as another model, or that claims more numbers than it holds.

    A few bytes can claim a model of any size: its numbers must be in the file before memory is taken for them.
    """
    backbone = backbone_config(config)
    stored = {tensor.name: int(tensor.n_elements) for tensor in reader.tensors}
    way = "Convert the safetensors that it was made from."
    scaled = (".rope.scaling.factor", ".rope.scale_linear")
    if "rope_freqs.weight" in stored or any(key.endswith(scaled) for key in reader.fields):
        raise CheckpointError(
            f"{path}: scales its rotary embedding, which Transformers does not read from GGUF files. {way}"
        )
    shapes = expected_shapes(backbone)
    if "output.weight" not in stored:  # the head is the embeddings
        del shapes["lm_head.weight"]
    if (held := sum(stored.values())) != (needed := sum(map(math.prod, shapes.values()))):
        raise CheckpointError(
            f"{path}: holds {held:,} numbers, and Transformers reads a model of {needed:,} from its metadata, perhaps "
            f"without biases. {way}"
        )


def check_quantisation(where: Path, quantisation: object) -> None:
    """Refuses a `quantization_config` of a config.json that is dequantised neither by Transformers nor here."""
    # bitsandbytes' older configurations do not name it.
    method = quantisation.get("quant_method", "bitsandbytes") if isinstance(quantisation, dict) else None
    if method != "fp8":
        way = _WAYS.get(str(method), "convert the model that it was made from.")
        raise CheckpointError(f"{where}: the checkpoint is quantised ({quoted(quantisation)}); {way}")


def fp8_weights(checkpoint: Checkpoint, block: object) -> dict[str, Tensor]:
    """Name -> tensor in fp8, where `block` rows and columns share a scale, as `weight_block_size` in config.json says.

    Refuses what Transformers would dequantise with other scales than were meant.
    """
    if block is not None and not (isinstance(block, list) and all(type(edge) is int and edge > 0 for edge in block)):
        raise CheckpointError(f"{checkpoint.folder}: weight_block_size is {quoted(block)}; expected [rows, columns].")
    weights = {name: tensor for name, tensor in checkpoint.tensors.items() if tensor.dtype == "F8_E4M3"}
    for name, weight in weights.items():
        scales = checkpoint.tensors.get(f"{name}{_SCALE}")
        if scales is None:
            raise CheckpointError(f"{weight.place}: is quantised to fp8, and there is no {quoted(name + _SCALE)}.")
        grid = scales.shape if len(scales.shape) == 2 else (1, 1)
        if len(weight.shape) != 2 or not all(grid) or any(size % n for size, n in zip(weight.shape, grid, strict=True)):
            raise CheckpointError(
                f"{scales.place}: has shape {list(scales.shape)}, the weight {list(weight.shape)}: no whole blocks."
            )
        edges = zip(weight.shape, grid, block or (), strict=False)
        if any(count > 1 and size % edge and count == -(-size // edge) for size, count, edge in edges):
            raise CheckpointError(
                f"{scales.place}: the last block of the weight, {list(weight.shape)}, is smaller than "
                f"weight_block_size, {quoted(block)}. Convert the model that it was made from."
            )
    return weights


def with_dequantised(checkpoint: Checkpoint, dequantised: Mapping[str, Tensor]) -> Checkpoint:
    """The checkpoint with these tensors in the place of those of their names, and without their scales."""
    used = {f"{name}{_SCALE}" for name in dequantised}
    used |= {f"{name.removesuffix('weight')}{_ACTIVATIONS}" for name in dequantised}
    shards = []
    for shard in checkpoint.shards:
        kept = tuple(dequantised.get(tensor.name, tensor) for tensor in shard.tensors if tensor.name not in used)
        shards.append(shard if kept == shard.tensors else Shard(None, shard.size, kept))
    note = f"{checkpoint.folder}: {len(dequantised)} fp8 tensors are dequantised to bfloat16."
    return replace(checkpoint, shards=tuple(shards), notes=(*checkpoint.notes, note))
