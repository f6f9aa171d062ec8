"""GGUF files, which Transformers dequantises; and what to do about quantised checkpoints, which are refused."""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.integrations import GGUF_CONFIG_MAPPING

from resformer.convert.connections import expected_shapes
from resformer.convert.families import backbone_config
from resformer.convert.reading import plain_way
from resformer.convert.tensors import to_tensor
from resformer.environment import require
from resformer.errors import CheckpointError, first_names, one_line, plain, quoted
from resformer.loading import without_kernels
from resformer.safetensors_format import Tensor
from resformer.untrusted import regular_file

#: Where PEFT is installed, Transformers applies the adapter that it finds in this sub-folder: no folder is called so.
#: It would read a generation_config.json of any size.
_UNREAD = {"adapter_kwargs": {"subfolder": "\0"}, "generation_config": GenerationConfig()}
#: Sources and results are built and run with this implementation of attention, whatever config.json names.
ATTENTION = "sdpa"
#: Keys of a GGUF file's metadata that its tensors' shapes repeat, or that describe how it was made.
_OF_SHAPES = ("attention.key_length", "attention.value_length", "tensor_data_layout")
#: Fields that Transformers fills in as GGUF's specification does, or that follow from shapes, or change no number.
_OPTIONAL = (None, "max_position_embeddings", "vocab_size", "rope_theta", "head_dim")
_LOAD = "AutoModelForCausalLM.from_pretrained(SOURCE, {})"
#: `quant_method` -> how Transformers dequantises it.
_DEQUANTISED = {
    "bitsandbytes": _LOAD.format('device_map="auto"') + ".dequantize()",
    "compressed-tensors": _LOAD.format("quantization_config=CompressedTensorsConfig(dequantize=True)"),
    "fp8": _LOAD.format("quantization_config=FineGrainedFP8Config(dequantize=True)"),
}


def auto_config(folder: Path, **arguments: Any) -> PreTrainedConfig:
    """What `AutoConfig` makes of the folder, or with `gguf_file` of a file in it, but for `ATTENTION`."""
    options = {"local_files_only": True, "trust_remote_code": False, "output_attentions": False, **arguments}
    config = without_kernels(AutoConfig.from_pretrained(str(folder), **options))
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    config._attn_implementation = ATTENTION if getattr(model_class, "_supports_sdpa", True) else "eager"
    return config


def load_model(where: object, folder: Path, *, dtype: torch.dtype, **arguments: Any) -> PreTrainedModel:
    """What `AutoModelForCausalLM` makes of the checkpoint `where`, in evaluation mode.

    Its configuration is read anew, so that nothing that this package reads of it has a part in the reference.
    """
    try:
        model, loading = AutoModelForCausalLM.from_pretrained(
            str(folder),
            config=auto_config(folder, **arguments),
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
            **_UNREAD,
            **arguments,
        )
    except ImportError:
        raise  # a missing package, which the message names
    except Exception as error:  # Transformers, safetensors and gguf raise nearly anything for a bad file
        raise CheckpointError(f"{plain(where)}: cannot be loaded: {one_line(error)}") from error
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        if problems := loading.get(kind):
            raise CheckpointError(f"{plain(where)}: {kind.replace('_', ' ')}: {first_names(set(map(str, problems)))}.")
    return model.eval()


def gguf_config(path: Path) -> PreTrainedConfig:
    """The configuration that the file's metadata describe."""
    regular_file(path, path.resolve().parent)  # a link to it is followed: the user named it
    try:
        reader = require("gguf", "demo").GGUFReader(path)
        _check_gguf_layers(path, reader)
        config = auto_config(path.parent, gguf_file=path.name)
        _check_gguf(path, reader, config)
    except ImportError:
        raise  # it names the package to install
    except CheckpointError as error:
        raise error if str(path) in str(error) else CheckpointError(f"{path}: {error}") from error
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


def dequantise(path: Path) -> tuple[PreTrainedModel, list[Tensor]]:
    """(the model in float32, its tensors in memory, tied ones once)."""
    model = load_model(path, path.parent, gguf_file=path.name, dtype=torch.float32)
    tied = set(model.all_tied_weights_keys) if model.config.tie_word_embeddings else set()
    return model, [to_tensor(name, tensor) for name, tensor in model.state_dict().items() if name not in tied]


def _check_gguf_layers(path: Path, reader: Any) -> None:
    """Refuses a file that claims other layers than it holds, before Transformers makes lists of that length."""
    if (parts := reader.fields.get("split.count")) is not None and (count := parts.contents()) != 1:
        raise CheckpointError(f"{path}: is one of {quoted(count)} parts: merge them (`llama-gguf-split --merge`).")
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
    prefix = f"{reader.fields['general.architecture'].contents()}."
    stated = {key.removeprefix(prefix): field for key, field in reader.fields.items() if key.startswith(prefix)}
    read = GGUF_CONFIG_MAPPING[config.model_type]
    for key, field in stated.items():
        if key not in (*read, *_OF_SHAPES) and (value := field.contents()) not in (0, "none"):
            raise CheckpointError(
                f"{path}: {prefix}{key} is {quoted(value)}, and Transformers does not read it from GGUF files. {way}"
            )
        if key == "rope.dimension_count" and (turned := field.contents()) != backbone.head_dim:
            raise CheckpointError(
                f"{path}: {prefix}{key} is {quoted(turned)} of {backbone.head_dim} channels, and Transformers reads an "
                f"embedding of whole heads. {way}"
            )
    for key, name in read.items():
        if key not in stated and name not in _OPTIONAL:
            raise CheckpointError(
                f"{path}: has no {prefix}{key}, without which Transformers reads another model from it. {way}"
            )
    if "rope_freqs.weight" in stored:
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


def check_plain(where: Path, raw: Mapping[str, Any]) -> None:
    """Refuses a config.json, `raw`, of quantised weights, with the lines that make them plain, or that names others."""
    if (quantisation := raw.get("quantization_config")) is not None:
        # bitsandbytes' older configurations do not name it.
        method = quantisation.get("quant_method", "bitsandbytes") if isinstance(quantisation, dict) else None
        way = plain_way(_DEQUANTISED[method]) if method in _DEQUANTISED else "Convert the model that it was made from."
        raise CheckpointError(
            f"{where}: the checkpoint is quantised ({quoted(quantisation)}), and only plain weights are read. {way} "
            "If no tensor is quantised, take quantization_config from config.json."
        )
    if "configuration_files" in raw:
        raise CheckpointError(f"{where}: configuration_files names other files: put the right one in its place.")
