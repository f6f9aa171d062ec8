"""GGUF files: the configuration and the headers from the file, the weights dequantised by Transformers."""

import math
import re
from pathlib import Path

import torch
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedModel

from resformer.convert.connections import expected_shapes
from resformer.convert.families import backbone_config
from resformer.convert.loading import load_model
from resformer.convert.safetensors_format import Tensor
from resformer.convert.tensors import to_tensor
from resformer.errors import CheckpointError, one_line


def gguf_config(path: Path) -> PreTrainedConfig:
    """The configuration that the file's metadata describe."""
    try:
        config = AutoConfig.from_pretrained(str(path.parent), gguf_file=path.name, trust_remote_code=False)
        _check(path, config)
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


def save_gguf_extras(path: Path, model: PreTrainedModel, output: Path) -> bool:
    """Writes what else the file carries; returns whether there was a tokenizer that Transformers can read."""
    model.generation_config.save_pretrained(output)
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name, trust_remote_code=False)
    except Exception:  # Transformers raises nearly anything for a vocabulary that it does not know
        return False
    tokenizer.save_pretrained(output)
    return True


def _check(path: Path, config: PreTrainedConfig) -> None:
    """Refuses a file that Transformers would read as another model, or that claims more numbers than it holds.

    A few bytes can claim a model of any size: its numbers must be in the file before memory is taken for them.
    """
    from gguf import GGUFReader

    backbone, reader = backbone_config(config), GGUFReader(path)
    stored = {tensor.name: int(tensor.n_elements) for tensor in reader.tensors}
    scaled = (".rope.scaling.factor", ".rope.scale_linear")
    if "rope_freqs.weight" in stored or any(key.endswith(scaled) for key in reader.fields):
        raise CheckpointError(
            f"{path}: scales its rotary embedding, which Transformers does not read from GGUF files. Convert the "
            "safetensors that it was made from."
        )
    layers = {match[1] for match in (re.match(r"blk\.(\d+)\.", name) for name in stored) if match}
    if len(layers) != backbone.num_hidden_layers:
        raise CheckpointError(
            f"{path}: its metadata claim {backbone.num_hidden_layers} layers, it holds tensors of {len(layers)}."
        )
    needed = {name: math.prod(shape) for name, shape in expected_shapes(backbone).items()}
    if "output.weight" not in stored:  # the head is the embeddings
        needed.pop("lm_head.weight")
    if sum(stored.values()) != sum(needed.values()):
        raise CheckpointError(
            f"{path}: holds {sum(stored.values()):,} numbers, and Transformers reads a model of "
            f"{sum(needed.values()):,} from its metadata, perhaps without biases. Convert the safetensors that it "
            "was made from."
        )
