"""Configurations of sources and results: read from a config.json, with other connections, and written again.

A family is what Transformers has a class for. A result is the family's own model with connections, as `connect` makes
it: nothing of its configuration is translated.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig, PreTrainedModel

from resformer.configuration import cache_bytes_per_token
from resformer.configuration.connection_fields import ConnectionFields
from resformer.configuration.methods import CONNECTION_FIELDS, connections_of
from resformer.convert.connections import meta_model
from resformer.convert.judging import UNUSED, without_code
from resformer.convert.reading import plain_way
from resformer.errors import CheckpointError, one_line, quoted
from resformer.loading import names_kernels, without_a_word, without_kernels
from resformer.modeling.any_decoder import Decoder, text_config
from resformer.modeling.connecting import connected_config, family_of
from resformer.modeling.families import language_model_class
from resformer.modeling.measured import MEASURED

_LOAD = "AutoModelForCausalLM.from_pretrained(SOURCE, {})"
#: `quant_method` -> how Transformers dequantises it.
_DEQUANTISED = {
    "bitsandbytes": _LOAD.format('device_map="auto"') + ".dequantize()",
    "compressed-tensors": _LOAD.format("quantization_config=CompressedTensorsConfig(dequantize=True)"),
    "fp8": _LOAD.format("quantization_config=FineGrainedFP8Config(dequantize=True)"),
    "mxfp4": _LOAD.format("quantization_config=Mxfp4Config(dequantize=True)"),
}
#: Keys that do not go along beside those of code: what the result states itself.
_LEFT_OUT = ("torch_dtype", "base_model", UNUSED, *CONNECTION_FIELDS)
#: Names of whole numbers -> the most that is plausible; the first that matches counts. Each layer is a module, and each
#: label and position may become an entry of a list or a row of a table, before weights are looked at.
_MOST = {
    r".*theta.*": 2**63,
    r"(?!.*size).*layer.*": 1000,
    r".*labels": 100_000,
    r"(?!.*size).*expert.*": 20_000,
    r".*": 2**25,
}
#: Bytes of a table of positions, or a mask, in the families that make some, and of all of them.
_MOST_IN_TABLES = 2**28, 2**31


def read_config(folder: Path, raw: Mapping[str, Any]) -> PreTrainedConfig:
    """What `AutoConfig` makes of a folder whose config.json is `raw`.

    Whatever the family, it is refused here what is quantised, names other files, or asks for sizes that no model has.
    """
    where = folder / "config.json"
    config_class = _config_class(where, raw.get("model_type"))
    if (quantisation := raw.get("quantization_config")) is not None:
        # bitsandbytes' older configurations do not name it.
        method = quantisation.get("quant_method", "bitsandbytes") if isinstance(quantisation, dict) else None
        way = plain_way(_DEQUANTISED[method]) if method in _DEQUANTISED else "Convert the model that it was made from."
        raise CheckpointError(
            f"{where}: the checkpoint is quantised ({quoted(quantisation)}), and only plain weights are read. {way} "
            "If no tensor is quantised, take quantization_config from config.json."
        )
    for key in ("configuration_files", "transformers_weights"):
        if raw.get(key) is not None:
            raise CheckpointError(f"{where}: {key} names other files: put the right one in its place.")
    _check_sizes(where, raw, config_class)
    try:
        with without_a_word():
            config = AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        layers = text_config(config).num_hidden_layers
    except Exception as error:  # any of the validators', or of arithmetic with what they let pass
        raise CheckpointError(f"{where}: Transformers makes no model of it ({one_line(error)}).") from error
    if config.dtype is not None and not (isinstance(config.dtype, torch.dtype) and config.dtype.is_floating_point):
        raise CheckpointError(f"{where}: dtype is {quoted(str(config.dtype))}; expected one of weights, as float32.")
    if not isinstance(layers, int) or not 0 < layers <= 1000:
        raise CheckpointError(f"{where}: num_hidden_layers is {quoted(layers)}; expected 1 to 1,000.")
    config = without_kernels(config) if names_kernels(config) else config
    try:
        view(config)
        model = meta_model(with_connections(connection_config(config)))
    except CheckpointError as error:
        raise CheckpointError(f"{where}: {error}") from error
    sizes = _in_tables(model)
    for size, most in zip((max(sizes, default=0), sum(sizes)), _MOST_IN_TABLES, strict=True):
        if size > most:
            raise CheckpointError(
                f"{where}: makes tables of {size:,} bytes, expected at most {most:,}: max_position_embeddings, "
                "image_size, or another size is too large."
            )
    return config


def _in_tables(model: PreTrainedModel) -> list[int]:
    """Bytes of each table and mask, of positions for one, which are filled in memory before weights are looked at."""
    filled = [] if hasattr(text_config(model.config), "rope_parameters") else model.modules()
    tables = [each.weight for each in filled if isinstance(each, torch.nn.Embedding)]
    tokens: Any = model.get_input_embeddings()
    return [each.nbytes for each in (*tables, *model.buffers()) if each is not tokens.weight]


def _config_class(where: Path, model_type: object) -> type[PreTrainedConfig]:
    """The class of the configuration, if checkpoints of this type have connections or can get them."""
    name = model_type if isinstance(model_type, str) else ""
    if name in CONFIG_MAPPING and (issubclass(CONFIG_MAPPING[name], ConnectionFields) or name in MEASURED):
        config_class: type[PreTrainedConfig] = CONFIG_MAPPING[name]
        return config_class
    if name in CONFIG_MAPPING:
        reason = (
            "connections in its decoder are not known to work: not tried, or failed. `resformer.connect` tries them in "
            "the loaded model"
        )
    else:
        reason = (
            "Transformers has no model of it, and code of a checkpoint is not run. Take its files in Transformers' "
            "form, if there are (often named NAME-hf)"
        )
    raise CheckpointError(
        f"{where}: Checkpoints of model_type {quoted(model_type)} cannot be converted: {reason}. docs/any-decoder.md "
        "has the table of those that can."
    )


def _check_sizes(where: Path, values: Mapping[str, Any], config_class: Any) -> None:
    """Refuses whole numbers that no model has, of the keys that a configuration of this class reads; `None`: all."""
    inner, names = getattr(config_class, "sub_configs", {}), getattr(config_class, "attribute_map", {})
    for key, value in values.items():
        name = names.get(key, key)
        if isinstance(value, dict):
            model_type = value.get("model_type")
            known = isinstance(model_type, str) and model_type in CONFIG_MAPPING
            _check_sizes(where, value, CONFIG_MAPPING[model_type] if key in inner and known else None)
        elif type(value) is int and (config_class is None or hasattr(config_class, name) or name == "num_labels"):
            most = next(most for pattern, most in _MOST.items() if re.fullmatch(pattern, name))
            if abs(value) > most:
                raise CheckpointError(f"{where}: {key} is {value:,}; expected at most {most:,}.")


def family_name(config: PreTrainedConfig) -> str:
    return str(family_of(config).model_type)


def family_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The configuration of the family, without fields for connections."""
    known = {name: value for name, value in config.to_dict().items() if name not in (*CONNECTION_FIELDS, "base_model")}
    plain: PreTrainedConfig = family_of(config).from_dict({**known, "model_type": family_name(config)})
    return plain


def connection_config(config: PreTrainedConfig) -> Any:
    """`config` itself if it has fields for connections, else that of the same model with such fields, not set."""
    if isinstance(config, ConnectionFields):
        return config
    return with_connections(connected_config(without_kernels(config), "transformer"))


def with_connections(config: Any, fields: Mapping[str, Any] | None = None) -> Any:
    """The same model with these connections and no others."""
    known = {name: value for name, value in config.to_dict().items() if name not in CONNECTION_FIELDS}
    return type(config).from_dict({**known, **(fields or {})})


def view(config: Any) -> Any:
    """What connections read of a configuration of any family; a `CheckpointError` says why they cannot."""
    try:
        config = connection_config(config)
        decoder = Decoder(meta_model(with_connections(config)))
        decoder.model_type = family_name(config)
        return decoder.view(config)
    except ValueError as error:
        raise CheckpointError(one_line(error)) from error


def cache_size(config: Any, dtype: torch.dtype | str) -> tuple[int | None, int | None]:
    """Bytes of a token in a cache: of this model, and of one without sharing; `None` where a cache is not of rows."""
    shape = view(config)
    latents = any(each.values and each.values.module == "kv_b_proj" for each in shape.places)
    if latents or {*shape.value_groups} - {None} != {0}:
        return None, None
    return cache_bytes_per_token(shape, dtype), cache_bytes_per_token(view(with_connections(config)), dtype)


def unused_weights(raw: Mapping[str, Any]) -> frozenset[str]:
    """The tensors that a config.json says that its files hold and its model has no use for."""
    names = raw.get(UNUSED)
    return frozenset(name for name in names if isinstance(name, str)) if isinstance(names, list) else frozenset()


def config_text(raw: Mapping[str, Any], config: Any, dtype: torch.dtype, unused: frozenset[str] = frozenset()) -> str:
    """The text of config.json: the source's, `raw`, with what makes it `config`.

    It states the dtype, and the tensors that the files hold and the model has no use for: nothing is left to guess.
    """
    content = {name: value for name, value in without_code(raw).items() if name not in _LEFT_OUT}
    content |= {
        "model_type": config.model_type,
        "architectures": [language_model_class(config)._model_mapping[type(config)].__name__],
        "dtype": str(dtype).removeprefix("torch."),
    }
    if isinstance(config, ConnectionFields):
        content |= connections_of(config)
        if (base := getattr(config, "base_model", None)) is not None:
            content["base_model"] = base
        unused |= unused_weights(raw)
    if unused:
        content[UNUSED] = sorted(unused)
    return json.dumps(content, indent=2, sort_keys=True) + "\n"
