"""Connections alone: their coefficients, and whether a model is the one that they are for."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

from resformer.configuration.methods import CONNECTION_FIELDS
from resformer.errors import CheckpointError, had_two_meanings
from resformer.modeling.any_decoder import text_config
from resformer.modeling.connected import added_modules
from resformer.modeling.families import PREFIX
from resformer.modeling.matrices import decoder_of
from resformer.names import CONFIG, CONNECTIONS
from resformer.untrusted import read_json

#: What a configuration says that is not of the model itself.
_NOT_OF_THE_MODEL = set(
    "_name_or_path base_model transformers_version architectures dtype use_cache model_type quantization_config "
    "bos_token_id eos_token_id pad_token_id".split()  # the stock `Trainer` sets a tokenizer's
).union(CONNECTION_FIELDS)
#: Numbers of each weight that are compared.
_SAMPLE = 1000
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def saved_settings(folder: Path, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """(the connection fields in a folder of `save_connections`, what its config.json says of the model they are for).

    Raises:
        CheckpointError: the folder is none.
    """
    if not (folder / CONNECTIONS).exists():
        raise CheckpointError(
            f"{name}: has no {CONNECTIONS}, so it is not what `resformer.save_connections` writes. Load a whole "
            f"model with AutoModelForCausalLM.from_pretrained({name!r})."
        )
    config = read_json(folder / CONFIG)
    fields = {field: config[field] for field in config if field in CONNECTION_FIELDS or had_two_meanings(field)}
    return fields, config.get("base_model") or {}


def coefficients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The parameters of connections, and buffers that are saved, by their names in the decoder."""
    owner = decoder_of(model)[0]
    found: dict[str, torch.Tensor] = {}
    for name, module in added_modules(owner).items():
        place, _, adapter = name.partition(".modules_to_save.")  # PEFT's trained copies are beside the original
        place = place.removesuffix(".original_module")
        wrapper: Any = owner.get_submodule(place)
        used = [] if getattr(wrapper, "disable_adapters", False) else getattr(wrapper, "active_adapters", [])
        if adapter and adapter not in used:
            continue
        for each, value in module.state_dict(keep_vars=True).items():
            if ".base_layer." in f".{each}":
                raise ValueError(f"{name} has an adapter: take `merge_and_unload()` of the model.")
            cleaned = f"{place}.{each}".replace("._orig_mod.", ".")  # of a compiled layer
            found[cleaned.replace("._checkpoint_wrapped_module.", ".")] = value
    return found


def read_coefficients(file: Path, modules: Mapping[str, torch.nn.Module], model: Any) -> dict[str, torch.Tensor]:
    """The coefficients in a file, which are those of the modules, named as in the decoder of the model."""
    tensors, there = load_file(file), coefficients(model)
    asked = {f"{name}.{each}": value for name, made in modules.items() for each, value in made.state_dict().items()}
    for name in asked.keys() | tensors.keys():
        found, expected = (list(each[name].shape) if name in each else None for each in (tensors, asked))
        if found != expected:
            told = "has one already: `resformer.disconnect` it first" if name in there else f"asks for {expected}"
            raise CheckpointError(f"{file}: tensor {name!r} has shape {found}, the model {told}.")
    return tensors


@torch.no_grad()
def load_coefficients(model: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Gives the connections of a model the coefficients that were read."""
    own = coefficients(model) if tensors else {}
    for name, value in tensors.items():
        own[name].copy_(value)


def configuration_digest(config: Any) -> str:
    """Of what a configuration says of the model, without its connections."""
    family = "llama" if config.model_type == "resformer" else config.model_type.removeprefix(PREFIX)
    said = [family, _of_the_model(config.to_diff_dict())]
    return hashlib.sha256(json.dumps(said, sort_keys=True, default=str).encode()).hexdigest()


def _of_the_model(said: Any) -> Any:
    if not isinstance(said, dict):
        return said
    return {name: _of_the_model(value) for name, value in said.items() if name not in _NOT_OF_THE_MODEL}


@torch.no_grad()
def checksums(model: Any) -> dict[str, str]:
    """Of `_SAMPLE` numbers of each weight, and one of each token's row, in each dtype that they may be cast to.

    Connections and adapters are left out. Empty if some weights are not in memory.
    """
    found = {dtype: hashlib.sha256() for dtype in _DTYPES}
    vocabulary = text_config(model.config).vocab_size
    for _, parameter in _weights(model):
        if parameter.is_meta:
            return {}
        flat = parameter.detach().reshape(-1)
        sample = flat[:: max(1, flat.numel() // _SAMPLE)][:_SAMPLE]
        if parameter.ndim == 2 and len(parameter) == vocabulary:  # a few new tokens are trained
            sample = torch.cat([sample, flat[:: parameter.shape[1]]])
        sample = sample.contiguous().cpu().double()
        for dtype, digest in found.items():
            digest.update(sample.to(dtype).view(torch.uint8).numpy().tobytes())
    return {str(dtype).removeprefix("torch."): digest.hexdigest()[:16] for dtype, digest in found.items()}


def _weights(model: torch.nn.Module) -> list[tuple[str, Any]]:
    added = {id(each) for module in added_modules(model).values() for each in module.parameters()}
    weights = [
        (name.replace(".base_layer.", ".").replace("base_model.model.", "").replace("_orig_mod.", ""), each)
        for name, each in model.named_parameters()
        if id(each) not in added
        and each.is_floating_point()
        and type(each.data) in (torch.Tensor, DTensor)  # torchao's whole numbers say that they are floating
        and not any(part in name for part in ("lora_", ".adapter"))
    ]
    return sorted(weights, key=lambda each: each[0])


def _adapter_has_effect(model: Any) -> bool:
    """Whether one of PEFT's adapters is on and more than copies of modules; a LoRA has none while its B is zero."""
    for layer in model.modules():
        names = {*getattr(layer, "adapter_layer_names", ())} - {"modules_to_save", "lora_A", "lora_embedding_A"}
        if names and not getattr(layer, "disable_adapters", True):
            for name, parameter in layer.named_parameters():
                if name.split(".")[0] in names and name.split(".")[1] in layer.active_adapters and parameter.any():
                    return True
    return False


def weights_have_changed(model: Any) -> bool | None:
    """Whether weights beside the connections are others than at `connect`; `None` if that is not known."""
    if _adapter_has_effect(model):
        return True
    expected = (getattr(model.config, "base_model", None) or {}).get("checksums") or {}
    found = checksums(model) if expected else {}
    if not found:
        return None
    dtypes = {str(each.dtype).removeprefix("torch.") for _, each in _weights(model)}
    # Weights that were cast are what the first ones are in that dtype. In several dtypes, some may not have been.
    return all(found[name] != expected.get(name) for name in (dtypes if len(dtypes) == 1 else expected))
