"""The classes of families with connections, made when they are asked for.

For each family there is a configuration class, and a class for each of its models. The Auto classes know them by the
family's model type with `resformer_` before it. Llama's are `ResFormerConfig` and the classes of modeling_resformer.py.
"""

import functools
import sys
from importlib import import_module
from types import ModuleType
from typing import Any

import transformers
from huggingface_hub.dataclasses import strict
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationMixin,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.models.auto import configuration_auto, modeling_auto, tokenization_auto
from transformers.models.auto.auto_factory import _LazyAutoMapping

from resformer.configuration import ResFormerConfig
from resformer.configuration.connected_config import ConnectedConfig
from resformer.configuration.connection_fields import told_in_one_line
from resformer.modeling.connected import GENERIC_HEADS, ConnectedModel, WholeStepLoss

#: Before the model type of a family whose decoder has connections.
PREFIX = "resformer_"


@functools.cache
def config_class(family: type[PreTrainedConfig]) -> Any:
    """The configuration of a family with fields for connections; the Auto classes then know it and its models.

    Those of a bundle are named by its `auto_map`. Registered, they would be taken for all checkpoints of the family.
    """
    if family is LlamaConfig:
        return ResFormerConfig
    name, model_type = f"ResFormer{family.__name__}", PREFIX + family.model_type
    members = {"model_type": model_type, "__module__": __name__, "__doc__": family.__doc__}
    if hasattr(family, "kv_sharing_modes"):  # shares keys and values by itself, and in no other way
        members["kv_sharing_modes"] = family.kv_sharing_modes
    made: Any = told_in_one_line(strict(type(name, (ConnectedConfig, family), members)))
    if __name__ == "resformer.modeling.families":
        _register(family, made)
    _convert_weights_alike(family.model_type, model_type)
    return made


def _register(family: type[PreTrainedConfig], made: Any) -> None:
    AutoConfig.register(made.model_type, made, exist_ok=True)
    # Processors of images and sounds are imported where there are any.
    others = ("processing_auto", "image_processing_auto", "feature_extraction_auto") if family.sub_configs else ()
    for module in (tokenization_auto, *(import_module(f"transformers.models.auto.{name}") for name in others)):
        _as_the_family(module, family, made)
        for table in _own_tables(module):  # some are asked by the model's type
            if isinstance(table, dict) and family.model_type in table:
                table.setdefault(made.model_type, table[family.model_type])
            elif isinstance(table, (set, list)) and family.model_type in table and made.model_type not in table:
                getattr(table, "add", getattr(table, "append", None))(made.model_type)
    _as_the_family(modeling_auto, family, made)


def language_model_class(config: PreTrainedConfig) -> Any:
    """The Auto class of a language model: AutoModelForCausalLM makes of some that see images only the text model."""
    causal = AutoModelForCausalLM._model_mapping.get(type(config), None)
    seeing = AutoModelForImageTextToText._model_mapping.get(type(config), None)
    return AutoModelForCausalLM if seeing in (None, causal) else AutoModelForImageTextToText


@functools.cache
def model_class(family: type[PreTrainedModel], config: type[PreTrainedConfig]) -> Any:
    """The class of a family's model with connections; `config` is its configuration's."""
    if config is ResFormerConfig:
        from resformer.modeling import modeling_resformer  # which names its classes as this function does

        return getattr(modeling_resformer, f"ResFormer{family.__name__.removeprefix('Llama')}")
    name = f"ResFormer{family.__name__}"
    members = {"config_class": config, "__module__": __name__, "__doc__": family.__doc__}
    heads = (WholeStepLoss,) if issubclass(family, GENERIC_HEADS) else ()
    # Of a bundle's class that has it by inheritance alone, Transformers makes another, which pickle does not find.
    generates = (GenerationMixin,) if issubclass(family, GenerationMixin) else ()
    return known_to_transformers(type(name, (*heads, ConnectedModel, family, *generates), members), family)


def known_to_transformers(made: Any, family: type[PreTrainedModel]) -> Any:
    """Makes a model's class known where Transformers looks names up: a decorator's work for those that are written."""
    _convert_weights_alike(family.__name__, made.__name__)
    for table in _own_tables(modeling_auto):  # where the stock `Trainer` asks whether labels are the next tokens
        if isinstance(table, dict) and family.__name__ in table.values():
            table.setdefault(made.config_class.model_type, made.__name__)
    return named_in_transformers(made)


def named_in_transformers(made: Any) -> Any:
    """Puts the class into `transformers`, where TRL, vLLM and `transformers serve` look for what config.json's
    `architectures` names. Importing its processors runs that module a second time, so that both copies get it."""
    for module in (transformers, sys.modules["transformers"], sys.modules[__name__]):  # the last for pickle
        setattr(module, made.__name__, made)
    return made


def _own_tables(module: ModuleType) -> list[Any]:
    """The tables of an Auto module, without those that it imports: Transformers imports modules by their names."""
    imported = {id(value) for value in vars(configuration_auto).values()}
    tables = [value for value in vars(module).values() if isinstance(value, (dict, set, list))]
    return [each for each in tables if id(each) not in imported and not isinstance(each, _LazyAutoMapping)]


def _as_the_family(module: ModuleType, family: type[PreTrainedConfig], made: type[PreTrainedConfig]) -> None:
    """Gives a configuration what the mappings of a module have for its family."""
    for mapping in list(vars(module).values()):
        if isinstance(mapping, _LazyAutoMapping) and family in mapping and made not in mapping._extra_content:
            try:
                found: Any = mapping[family]
            except ImportError:  # a processor whose packages are not installed
                continue
            is_model = isinstance(found, type) and issubclass(found, PreTrainedModel)
            if is_model:
                is_of_text = found.config_class is family.sub_configs.get("text_config", made)
                known: Any = config_class(found.config_class) if is_of_text else made
                found = model_class(found, known)
            mapping.register(made, found, exist_ok=True)


def _convert_weights_alike(family: str, made: str) -> None:
    """Weights on disk have the family's form, such as a tensor for each expert."""
    if (mapping := get_checkpoint_conversion_mapping(family)) is not None:
        register_checkpoint_conversion_mapping(made, mapping, overwrite=True)


def __getattr__(name: str) -> Any:
    """The classes that were made, by their names: pickle asks for them."""
    family = getattr(transformers, name.removeprefix("ResFormer"), None) if name.startswith("ResFormer") else None
    if family is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if issubclass(family, PreTrainedConfig):
        return config_class(family)
    return model_class(family, config_class(family.config_class))
