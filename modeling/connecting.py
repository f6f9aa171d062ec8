"""`connect`: connections in a model of any family that Transformers has, which stays what it is.

For each family there is a configuration class, and a class for each of its models, made when they are asked for. The
Auto classes know them by the family's model type with `resformer_` before it.
"""

import copy
import functools
import hashlib
import json
import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import transformers
from huggingface_hub import snapshot_download
from huggingface_hub.dataclasses import strict
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.models.auto import modeling_auto, tokenization_auto
from transformers.models.auto.auto_factory import _LazyAutoMapping
from transformers.utils import logging, output_capturing

from resformer.configuration.connection_fields import ConnectionFields, reason, told_in_one_line
from resformer.configuration.methods import CONNECTION_FIELDS, METHODS, connections_of, method_fields
from resformer.errors import CheckpointError, did_you_mean, one_line
from resformer.modeling.any_decoder import Decoder, add_connections, text_config
from resformer.modeling.connected import ConnectedLayer, ConnectedModel, added_modules, modules_of, not_reentrant
from resformer.modeling.connection import KINDS, StartsAsStated, kinds_in, mixing_matrix
from resformer.modeling.measured import MEASURED
from resformer.untrusted import read_json
from resformer.version import __version__

__all__ = ["connect", "connected_config", "depth_mixing_matrix", "save_connections", "value_mixing_matrix"]

logger = logging.get_logger(__name__)

#: Before the model type of a family whose decoder has connections.
PREFIX = "resformer_"
#: The files of `save_connections`.
COEFFICIENTS, SETTINGS = "connections.safetensors", "connections.json"
#: What a configuration says that is not of the model itself.
_NOT_OF_THE_MODEL = set(
    "_name_or_path base_model transformers_version architectures dtype use_cache model_type quantization_config "
    "bos_token_id eos_token_id pad_token_id".split()  # the stock `Trainer` sets a tokenizer's
).union(CONNECTION_FIELDS)
_CARD = """\
---
library_name: resformer
base_model: {base}
---
# Connections for {base}

The coefficients of `{fields}`, and no weights of the model:

```python
import resformer
from transformers import {auto}

model = {auto}.from_pretrained("{base}"{revision})
resformer.connect(model, "{name}")
```
"""


class ConnectedFamilyConfig(ConnectionFields):
    """Mixed into the configuration of a family."""

    def __post_init__(self, **kwargs: Any) -> None:
        self.value_residual_init = [float(value) for value in self.value_residual_init]
        super().__post_init__(**kwargs)  # type: ignore[misc]


class ConnectedFamilyModel(ConnectedModel):
    """Mixed into a model of a family."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any):
        super().__init__(config, *args, **kwargs)
        if not any(isinstance(module, ConnectedLayer) for module in self.modules()):  # of a model within it
            self.add_connections(Decoder(self))

    def add_connections(self, decoder: Decoder) -> None:
        view = decoder.view(self.config)
        add_connections(self, decoder, view)
        plan: dict[str, str] = getattr(self, "_tp_plan", None) or {}
        self._tp_plan = plan | decoder.tp_plan(view, plan)
        self.keep_full_precision()

    @classmethod
    def is_custom_code(cls) -> bool:
        return False  # the family's own initialisation runs, of modules that have no parameters, too

    def initialize_weights(self) -> None:
        super().initialize_weights()
        for module in self.modules():  # models within this one, of the family, know nothing of connections
            if isinstance(module, StartsAsStated):
                module.reset_parameters()

    def _replicate_for_data_parallel(self) -> Any:
        raise NotImplementedError("nn.DataParallel runs the same layer in several threads: use one process a device.")


@functools.cache
def config_class(family: type[PreTrainedConfig]) -> Any:
    """The configuration of a family with fields for connections; the Auto classes then know it and its models."""
    name, model_type = f"ResFormer{family.__name__}", PREFIX + family.model_type
    members = {"model_type": model_type, "__module__": __name__, "__doc__": family.__doc__}
    made: Any = told_in_one_line(strict(type(name, (ConnectedFamilyConfig, family), members)))
    AutoConfig.register(model_type, made, exist_ok=True)
    # Processors of images and sounds are imported where there are any.
    others = ("processing_auto", "image_processing_auto", "feature_extraction_auto") if family.sub_configs else ()
    for module in (tokenization_auto, *(import_module(f"transformers.models.auto.{name}") for name in others)):
        _as_the_family(module, family, made)
        for table in vars(module).values():  # some are asked by the model's type
            if isinstance(table, dict) and not isinstance(table, _LazyAutoMapping) and family.model_type in table:
                table.setdefault(model_type, table[family.model_type])
            elif isinstance(table, (set, list)) and family.model_type in table and model_type not in table:
                getattr(table, "add", getattr(table, "append", None))(model_type)
    _as_the_family(modeling_auto, family, made)
    _convert_weights_alike(family.model_type, model_type)
    return made


@functools.cache
def model_class(family: type[PreTrainedModel], config: type[PreTrainedConfig]) -> Any:
    """The class of a family's model with connections; `config` is its configuration's."""
    name = f"ResFormer{family.__name__}"
    members = {"config_class": config, "__module__": __name__, "__doc__": family.__doc__}
    made = type(name, (ConnectedFamilyModel, family), members)
    _convert_weights_alike(family.__name__, name)
    for table in vars(modeling_auto).values():  # where the stock `Trainer` asks whether labels are the next tokens
        if isinstance(table, dict) and not isinstance(table, _LazyAutoMapping) and family.__name__ in table.values():
            table.setdefault(config.model_type, name)
    for module in (transformers, sys.modules["transformers"]):  # where the name in `architectures` is looked up
        setattr(module, name, made)
    return made


def _as_the_family(module: ModuleType, family: type[PreTrainedConfig], made: type[PreTrainedConfig]) -> None:
    """Gives a configuration what the mappings of a module have for its family."""
    for mapping in list(vars(module).values()):
        if isinstance(mapping, _LazyAutoMapping) and family in mapping and made not in mapping._extra_content:
            try:
                found = mapping[family]
            except ImportError:  # a processor whose packages are not installed
                continue
            is_model = isinstance(found, type) and issubclass(found, PreTrainedModel)
            mapping.register(made, model_class(found, made) if is_model else found, exist_ok=True)  # type: ignore[arg-type]


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


def connect(
    model: PreTrainedModel,
    method: str = "resformer",
    *,
    lossy: bool = False,
    revision: str | None = None,
    **fields: Any,
) -> PreTrainedModel:
    """Adds connections to a model in place, and returns it.

    Coefficients start at values with which no logit changes, bit for bit. `save_pretrained` then writes a folder
    that `AutoModelForCausalLM.from_pretrained` loads after `import resformer`.

    Args:
        model: of any family whose decoder has the places that the connections act at; an adapter comes afterwards.
        method: one of `METHODS`, but for those that share keys or values; or the folder or Hub id of what
            `save_connections` has written.
        lossy: allow what changes the model at the start, and connections that were saved for another.
        revision: of a Hub id.
        fields: connection fields of `ConnectionFields`, on top of the method's.

    Raises:
        ValueError: the method, a field or the model do not fit; the message says why. The model is left as it was.

    ```python
    >>> model = AutoModelForCausalLM.from_pretrained("google/gemma-3-1b-it")
    >>> resformer.connect(model, "resformer-denseformer")
    ```"""
    if isinstance(model, str):
        raise ValueError(
            f"`connect` takes a model, not its name: load it with AutoModelForCausalLM.from_pretrained({model!r})."
        )
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"{type(model).__name__} is no model of Transformers: connect the model before it is wrapped.")
    if isinstance(model, ConnectedModel):
        raise ValueError(
            f"{type(model).__name__} has connections, or fields for them, already. Connect the model without them, "
            "or add further ones to its checkpoint with `resformer convert`."
        )
    if method not in METHODS and (Path(method).is_dir() or "/" in method):
        folder = Path(method)
        if not folder.is_dir():
            try:
                folder = Path(snapshot_download(method, revision=revision, allow_patterns=[COEFFICIENTS, SETTINGS]))
            except (OSError, ValueError) as error:
                raise CheckpointError(
                    f"{method}: is no local folder, and the Hub did not give it: {one_line(error)}"
                ) from error
        if not (folder / SETTINGS).exists():
            raise CheckpointError(
                f"{method}: has no {SETTINGS}, so it is not what `resformer.save_connections` writes. Load a whole "
                f"model with AutoModelForCausalLM.from_pretrained({method!r})."
            )
        settings = read_json(folder / SETTINGS)
        if settings.get("digest") != _digest(model.config) and not lossy:
            raise ValueError(
                f"{method} has connections for {settings.get('base_model')}, whose configuration is not this model's "
                f"({model.config._name_or_path or model.config.model_type}). Allow it with lossy=True."
            )
        return _load(_connect(model, {**settings.get("fields", {}), **fields}), folder / COEFFICIENTS)
    chosen = chosen_fields(model.config, method, fields, plain=True)
    return _connect(model, chosen, None if lossy else f"{method} does not start as {model.config.model_type}")


def chosen_fields(config: PreTrainedConfig, method: str, fields: Mapping[str, Any], *, plain: bool) -> dict[str, Any]:
    """The connection fields of a method, with `fields` on top; those that start plainly, if asked for."""
    chosen = {**method_fields(method, text_config(config).num_hidden_layers), **fields}
    for name in chosen:
        if name not in CONNECTION_FIELDS:
            raise ValueError(f"`{name}` is no connection field.{did_you_mean(name, CONNECTION_FIELDS)}")
    if ours := [name for name in ("value_sources", "key_sources", "smear") if chosen.pop(name, None)]:
        raise ValueError(
            f"`{ours[0]}`: {'it' if ours[0] == 'smear' else 'sharing'} changes projections and caches, which only the "
            "decoder of this package can. "
            f"Convert a Llama-style checkpoint (`resformer convert`), or choose another method than {method}."
        )
    for kind in KINDS if plain else ():
        chosen = kind.plain_start(chosen) | chosen
    return chosen


def _connect(model: PreTrainedModel, fields: Mapping[str, Any], unless_exact: str | None = None) -> PreTrainedModel:
    """Adds connections; `unless_exact`: what to say, and refuse, if they do not start plainly."""
    config, family = _with_fields(copy.deepcopy(model.config), fields), type(model.config)
    decoder = Decoder(model)
    view = decoder.view(config)
    if family.model_type not in MEASURED:
        logger.warning(
            f"Connections in decoders of model type {family.model_type!r} were not measured, as those of the table in "
            "docs/methods.md: compare logits before and after, and tokens with and without a cache."
        )
    reasons = [reason for kind in kinds_in(view) for reason in kind.inexact_because(view)]
    if reasons and unless_exact:
        raise ValueError(f"{unless_exact}: {'; '.join(reasons)}. Allow it with lossy=True.")
    functions = ((each, getattr(each, "_gradient_checkpointing_func", None)) for each in model.modules())
    for module, function in [(each, not_reentrant(function)) for each, function in functions if function is not None]:
        module._gradient_checkpointing_func = function
    shared, own = model.config, _with_fields(copy.copy(model.config), fields)
    for module in model.modules():  # another model may have been made from the same configuration
        vars(module).update({name: own for name, value in vars(module).items() if value is shared})
    if (name := model.config._name_or_path) and not getattr(model.config, "base_model", None):
        commit = getattr(model.config, "_commit_hash", None)  # of a folder, its last part tells of no machine
        model.config.base_model = {"name": name if commit else Path(name).absolute().name, "revision": commit}
    connected: Any = model
    connected.__class__ = model_class(type(model), type(model.config))  # type: ignore[arg-type]
    dict.__setitem__(output_capturing._CAN_RECORD_REGISTRY, str(type(model)), connected._can_record_outputs)
    connected.add_connections(decoder)
    return connected


def connected_config(config: PreTrainedConfig, method: str = "resformer", **fields: Any) -> PreTrainedConfig:
    """A configuration of the same family with connections that start as the papers say, for training from scratch.

    ```python
    >>> config = connected_config(AutoConfig.from_pretrained("Qwen/Qwen3-30B-A3B"), "denseformer")
    >>> model = AutoModelForCausalLM.from_config(config)
    ```"""
    chosen = chosen_fields(config, method, fields, plain=False)
    return _with_fields(copy.deepcopy(config), chosen)


def _with_fields(config: PreTrainedConfig, fields: Mapping[str, Any]) -> PreTrainedConfig:
    """The configuration itself, as its family's with connections."""
    config.__class__ = config_class(type(config))  # type: ignore[arg-type]
    try:
        for name, value in fields.items():
            setattr(config, name, value)
    except StrictDataclassError as error:
        raise ValueError(reason(error)) from None
    return config


def save_connections(model: torch.nn.Module, folder: str | Path) -> None:
    """Writes what `connect` has added to a model: a few kilobytes, which `connect(model, folder)` adds again.

    They are the coefficients, the fields, the name, revision and configuration's digest of the model that they are for,
    and a card. Other weights are not saved, though they may have been trained.

    Raises:
        ValueError: the model has no connections.
    """
    folder = Path(folder)
    config: Any = model.config
    tensors = {name: value.detach().cpu().contiguous() for name, value in _coefficients(model).items()}
    if not (fields := connections_of(config)):
        raise ValueError(f"{type(model).__name__} has no connections to save: add them with `connect`.")
    origin = getattr(config, "base_model", None) or {}
    base, revision = origin.get("name", ""), origin.get("revision")
    settings = {"base_model": base, "revision": revision, "digest": _digest(config), "fields": fields}
    at_revision = "" if revision is None else f', revision="{revision}"'
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / COEFFICIENTS, metadata={"format": "pt", "resformer": __version__})
    (folder / SETTINGS).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    texts_alone = type(config) in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING
    auto = "AutoModelForCausalLM" if texts_alone else "AutoModelForImageTextToText"
    card = _CARD.format(base=base, fields=json.dumps(fields), revision=at_revision, name=folder.name, auto=auto)
    (folder / "README.md").write_text(card, encoding="utf-8")


def _coefficients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    owner = _connected(model)[0]
    found: dict[str, torch.Tensor] = {}
    for name, module in added_modules(owner).items():
        place, _, adapter = name.partition(".modules_to_save.")  # PEFT's trained copies are beside the original
        place = place.removesuffix(".original_module")
        wrapper: Any = owner.get_submodule(place)
        used = [] if getattr(wrapper, "disable_adapters", False) else getattr(wrapper, "active_adapters", [])
        if adapter and adapter not in used:
            continue
        for each, value in module.named_parameters():
            if ".base_layer." in f".{each}":
                raise ValueError(f"{name} has an adapter: take `merge_and_unload()` of the model.")
            found[f"{place}.{each}".replace("._orig_mod.", ".")] = value  # of a compiled layer
    return found


def _load(model: PreTrainedModel, file: Path) -> PreTrainedModel:
    """Gives the connections of a model the coefficients of a file."""
    tensors, parameters = load_file(file), _coefficients(model)
    for name in parameters.keys() | tensors.keys():
        found, expected = (list(each[name].shape) if name in each else None for each in (tensors, parameters))
        if found != expected:
            raise CheckpointError(f"{file}: tensor {name!r} has shape {found}, the model asks for {expected}.")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[name])
    return model


def _digest(config: Any) -> str:
    """Of what a configuration says of the model, without its connections."""
    said = [config.model_type.removeprefix(PREFIX), _of_the_model(config.to_diff_dict())]
    return hashlib.sha256(json.dumps(said, sort_keys=True, default=str).encode()).hexdigest()


def _of_the_model(said: Any) -> Any:
    if not isinstance(said, dict):
        return said
    return {name: _of_the_model(value) for name, value in said.items() if name not in _NOT_OF_THE_MODEL}


def value_mixing_matrix(model: torch.nn.Module) -> torch.Tensor:
    """M, `(N, N)`, of any model: layer n attends to V' = sum_m M[n, m] V_m of the raw values V_m.

    float32, detached, on the CPU; the identity without connections; NaN where the mix depends on the token.
    """
    owner, layers = _connected(model)
    of_decoder = getattr(owner, "value_residual", None)
    matrix = mixing_matrix(len(layers), len(layers), modules_of(layers, "value_residual"), of_decoder)
    return matrix[getattr(model.config, "value_sources", None) or list(range(len(layers)))]


def depth_mixing_matrix(model: torch.nn.Module) -> torch.Tensor:
    """D, `(N, N + 1)`, of any model: block n + 1, or the final norm, reads Y_n = sum_j D[n, j] X_j.

    X_0 are the embeddings, X_{j+1} the raw output of block j. float32, detached, on the CPU.
    """
    _, layers = _connected(model)
    return mixing_matrix(len(layers), len(layers) + 1, modules_of(layers, "depth_average"))


def _connected(model: Any) -> tuple[Any, Any]:
    """(what has the layers, the layers with connections); empty modules for those of a model without connections."""
    for module in model.modules():
        for child in module.children():
            if isinstance(child, torch.nn.ModuleList):
                layers = [getattr(layer, "_orig_mod", layer) for layer in child]  # some may be compiled
                if layers and isinstance(layers[0], ConnectedLayer):
                    return module, layers
    return torch.nn.Module(), [torch.nn.Module()] * text_config(model.config).num_hidden_layers
