"""Families that the decoder of this package does not express: their own decoder gets connections, as by `connect`.

A checkpoint keeps its tensors, whatever they are called on the disk. Whether they are those that a model asks for, its
own loading says, without memory for them.
"""

import copy
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from resformer.configuration import ResFormerConfig, cache_bytes_per_token
from resformer.configuration.connection_fields import ConnectionFields
from resformer.configuration.methods import CONNECTION_FIELDS, connections_of, without_connections
from resformer.convert.families import FAMILIES, backbone_config, family_config
from resformer.convert.other_formats import auto_config, check_plain
from resformer.convert.reading import Checkpoint
from resformer.convert.tensors import CODES
from resformer.errors import CheckpointError, first_names, one_line, quoted
from resformer.loading import without_a_word
from resformer.modeling.any_decoder import Decoder, text_config
from resformer.modeling.connecting import PREFIX, ConnectedFamilyConfig, connected_config
from resformer.modeling.measured import MEASURED
from resformer.safetensors_format import FLOATING

#: Of layers, and of experts in one of them: each is a module, and takes time to make.
_MOST_MODULES = 1000
#: Keys of config.json that are not of the model: code, and how it runs.
_NOT_READ = ("auto_map", "trust_remote_code", "attn_implementation", "_attn_implementation", "experts_implementation")


def is_of_a_family(model_type: object) -> bool:
    """Whether checkpoints of this type have, or can get, connections in the family's own decoder."""
    if not isinstance(model_type, str):
        return False
    family = model_type.removeprefix(PREFIX)
    known = family in MEASURED and family in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return known and (family != model_type or family not in FAMILIES)


def read_config(folder: Path, raw: Mapping[str, Any]) -> tuple[PreTrainedConfig, tuple[str, ...]]:
    """(what `AutoConfig` makes of the folder, the keys of its config.json, `raw`, that are not read)."""
    where = folder / "config.json"
    check_plain(where, raw)
    _check_sizes(where, raw)
    try:
        config = auto_config(folder)
        layers = text_config(config).num_hidden_layers
    except Exception as error:  # any of the validators', or of arithmetic with what they let pass
        raise CheckpointError(f"{where}: Transformers makes no model of it ({one_line(error)}).") from error
    if not 0 < layers <= _MOST_MODULES:
        raise CheckpointError(f"{where}: has {layers:,} layers; expected 1 to {_MOST_MODULES:,}.")
    if config.dtype is not None and config.dtype not in CODES:
        raise CheckpointError(f"{where}: dtype is {quoted(str(config.dtype))}; expected one of weights, as float32.")
    return config, tuple(sorted(raw.keys() & set(_NOT_READ)))


def _check_sizes(where: Path, values: Mapping[str, Any]) -> None:
    for key, value in values.items():
        if isinstance(value, dict):
            _check_sizes(where, value)
        most = _MOST_MODULES if ("layer" in key or "expert" in key) and "size" not in key else 2**31
        if isinstance(value, int) and value > most:
            raise CheckpointError(f"{where}: {key} is {value:,}; expected at most {most:,}.")


def connection_config(config: PreTrainedConfig) -> Any:
    """`config` itself if it has fields for connections, else that of the same model with such fields, not set."""
    if isinstance(config, ConnectionFields):
        return config
    if not is_of_a_family(config.model_type):
        return backbone_config(config)
    made = with_connections(connected_config(config, "transformer"))
    vars(made).pop("model_type", None)  # of the family, if the file states it
    return made


def is_connected(config: object) -> bool:
    """Whether it is a family's with fields for connections, not ours."""
    return isinstance(config, ConnectedFamilyConfig)


def in_one_family(*configs: PreTrainedConfig) -> list[Any]:
    """Their `connection_config`; where one of them is a family's, so is that of a Llama-style model."""
    made = [connection_config(config) for config in configs]
    if not any(map(is_connected, made)):
        return made
    families = [family_config(each) if isinstance(each, ResFormerConfig) else each for each in made]
    return [
        each if is_connected(each) else with_connections(connected_config(each, "transformer"), connections_of(one))
        for one, each in zip(made, families, strict=True)
    ]


def with_connections(config: Any, fields: Mapping[str, Any] = MappingProxyType({})) -> Any:
    """The same model with these connections and no others."""
    if isinstance(config, ResFormerConfig):
        return without_connections(config, **fields)
    config = copy.deepcopy(config)
    for name in CONNECTION_FIELDS:
        if hasattr(type(config), name):
            default = getattr(type(config), name)
            setattr(config, name, fields.get(name, list(default) if isinstance(default, tuple) else default))
    return config


def family_of(config: Any, preferred: str | None = None) -> PreTrainedConfig:
    """The configuration of the family, without fields for connections; of ours as `family_config`."""
    if isinstance(config, ResFormerConfig):
        return family_config(config, preferred)
    known = json.loads(config.to_json_string())
    model_type = known["model_type"].removeprefix(PREFIX)
    kept = {name: value for name, value in known.items() if name not in CONNECTION_FIELDS and name != "base_model"}
    return CONFIG_MAPPING[model_type].from_dict({**kept, "model_type": model_type})


def view(config: Any) -> Any:
    """What connections read of a configuration: of ours itself, of a family's under the names of ours.

    Raises:
        CheckpointError: the family's decoder cannot have them; the message is the reason alone.
    """
    return _view(config.to_json_string()) if is_connected(config) else config


@functools.lru_cache(maxsize=8)
def _view(text: str) -> Any:
    known = json.loads(text)
    config = CONFIG_MAPPING[known["model_type"]].from_dict(known)
    try:
        with torch.device("meta"):
            decoder = Decoder(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](with_connections(config)))
        decoder.model_type = decoder.model_type.removeprefix(PREFIX)
        return decoder.view(config)
    except Exception as error:  # of the family's code too
        raise CheckpointError(one_line(error)) from error


def cache_size(config: Any, dtype: torch.dtype | str) -> tuple[int | None, int | None]:
    """Bytes of a token in a cache: of this model, and of one without sharing; `None` where a cache is not of rows."""
    shape = view(config)
    if isinstance(config, ResFormerConfig):
        return tuple(cache_bytes_per_token(each, dtype) for each in (shape, with_connections(config)))  # type: ignore[return-value]
    if set(shape.value_groups) != {0} or any(each.values.module == "kv_b_proj" for each in shape.places):
        return None, None
    return (cache_bytes_per_token(shape, dtype),) * 2


def config_text(source: Mapping[str, Any], config: Any, dtype: torch.dtype | None) -> str:
    """The text of config.json: the source's, with what makes it `config`.

    Args:
        dtype: which it states; `None`: as the source.
    """
    left_out = {*_NOT_READ, *CONNECTION_FIELDS, "base_model"}
    content = {name: value for name, value in source.items() if name not in left_out}
    content |= {"model_type": config.model_type, "architectures": config.architectures, **connections_of(config)}
    if (base := getattr(config, "base_model", None)) is not None and isinstance(config, ConnectionFields):
        content["base_model"] = base
    if dtype is not None:
        content = {name: value for name, value in content.items() if name != "torch_dtype"}
        content["dtype"] = str(dtype).removeprefix("torch.")
    return json.dumps(content, indent=2, sort_keys=True) + "\n"


def facts(config: PreTrainedConfig) -> dict[str, Any]:
    """The fields of a family's configuration, those of connections left out."""
    left_out = {*CONNECTION_FIELDS, "base_model", "model_type", "architectures", "transformers_version", "dtype"}
    return {name: value for name, value in config.to_dict().items() if name not in left_out and name[0] != "_"}


def check_tensors(checkpoint: Checkpoint, config: Any) -> None:
    """Has the model load the tensors, of which only dtypes and shapes are read, and refuses what is not as it asks."""
    folder, tensors = checkpoint.folder, checkpoint.tensors
    layers = {next((part for part in name.split(".") if part.isdecimal()), None) for name in tensors} - {None}
    if len(layers) < (count := text_config(config).num_hidden_layers):
        raise CheckpointError(f"{folder}: config.json has {count:,} layers, the shards hold {len(layers):,}.")
    if strange := [name for name, tensor in tensors.items() if tensor.dtype not in FLOATING]:
        raise CheckpointError(
            f"{folder}: {first_names(strange)} are of other dtypes than {', '.join(FLOATING)}: quantised checkpoints "
            "have to be dequantised first."
        )
    state = {
        name: torch.empty(tensor.shape, dtype=getattr(torch, FLOATING[tensor.dtype]), device="meta")
        for name, tensor in tensors.items()
    }
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    options = {"device_map": {"": "meta"}, "output_loading_info": True, "ignore_mismatched_sizes": True}
    try:
        with without_a_word():
            _, loading = model_class.from_pretrained(None, config=copy.deepcopy(config), state_dict=state, **options)
    except Exception as error:  # of any kind, for values that no validator looks at
        raise CheckpointError(f"{folder}: config.json makes no model: {one_line(error)}") from error
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        if problems := loading.get(kind):
            names = {str(each[0] if isinstance(each, tuple) else each) for each in problems}
            raise CheckpointError(f"{folder}: {kind.replace('_', ' ')}: {first_names(names)}.")
