"""`connect`: connections in a model of any family that Transformers has, which stays what it is."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from resformer.configuration.connected_config import ConnectedConfig
from resformer.configuration.connection_fields import ConnectionFields, reason
from resformer.configuration.methods import CONNECTION_FIELDS, METHODS, connections_of, fields_within_kinds
from resformer.errors import CheckpointError, did_you_mean, one_line
from resformer.modeling.acting import ConnectedLayer, Switch, change_class
from resformer.modeling.any_decoder import Decoder, check_own, text_config
from resformer.modeling.connected import ConnectedModel, added_modules, become_connected, not_reentrant
from resformer.modeling.connection import (
    KINDS,
    Added,
    Connection,
    kinds_in,
    own_fields,
    set_initial_values,
    with_every_field,
)
from resformer.modeling.families import config_class
from resformer.modeling.installing import remove_connections
from resformer.modeling.matrices import depth_mixing_matrix, value_mixing_matrix
from resformer.modeling.measured import MEASURED
from resformer.modeling.saved_connections import (
    checksums,
    configuration_digest,
    load_coefficients,
    read_coefficients,
    saved_settings,
)
from resformer.names import CONFIG, CONNECTIONS

__all__ = [
    "connect",
    "connected_config",
    "depth_mixing_matrix",
    "disconnect",
    "disconnected",
    "value_mixing_matrix",
]

logger = logging.get_logger(__name__)

#: A name or a class, several, or connection fields.
Methods = str | type[Connection] | Sequence[str | type[Connection]] | Mapping[Any, Any] | None


def connect(
    model: PreTrainedModel,
    method: Methods = None,
    *,
    lossy: bool = False,
    revision: str | None = None,
    **fields: Any,
) -> PreTrainedModel:
    """Adds connections to a model in place, and returns it.

    Coefficients start at values with which no logit changes, bit for bit. `save_pretrained` then writes a folder
    that `AutoModelForCausalLM.from_pretrained` loads after `import resformer`. A model that has connections keeps them.
    Where logits do change, the configuration loses the model's name: trainers that load a reference model, or a
    tokenizer, by it need them as arguments, or the model saved and loaded.

    Args:
        model: of any family whose decoder has the places that the connections act at; the whole model, for what is
            around a part is saved and loaded without its connections. An adapter comes afterwards.
        method: one of `METHODS` or a class of connections, or several; connection fields; or the folder or Hub id of
            what `save_connections` has written. Default: `"resformer"`, or `fields` alone.
        lossy: allow what changes the model at the start, such as shared keys and values, and connections that were
            saved for another model.
        revision: of a Hub id.
        fields: connection fields of `ConnectionFields`, on top of the method's. `NAME_FIELD` is a field of the class of
            connections `NAME`.

    Raises:
        CheckpointError: the folder or Hub id has no connections, or others than its configuration says.
        ValueError: the method, a field or the model do not fit; the message says why. The model is left as it was.

    ```python
    >>> model = AutoModelForCausalLM.from_pretrained("google/gemma-3-1b-it")
    >>> resformer.connect(model, ["resformer", "denseformer"])
    ```"""
    if isinstance(model, str):
        raise ValueError(
            f"`connect` takes a model, not its name: load it with AutoModelForCausalLM.from_pretrained({model!r})."
        )
    if isinstance(model, PreTrainedConfig):
        raise ValueError(
            f"{type(model).__name__} is a configuration, no model: `resformer.connected_config` gives it connections."
        )
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"{type(model).__name__} is no model of Transformers: connect the model before it is wrapped.")
    method = by_name(method)
    if isinstance(method, str) and method and method not in METHODS and (Path(method).is_dir() or "/" in method):
        folder = _folder(method, revision)
        saved, base = saved_settings(folder, method)
        if base.get("digest") != configuration_digest(model.config) and not lossy:
            raise ValueError(
                f"{method} has connections for {base.get('name') or 'a model without a name'}, whose configuration is "
                f"not this model's ({model.config._name_or_path or model.config.model_type}). Allow it with lossy=True."
            )
        chosen = chosen_fields(model.config, saved, fields)
        return _without_name(_connect(model, chosen, saved=folder / CONNECTIONS))
    chosen = chosen_fields(model.config, method, fields)
    named = method if isinstance(method, str) else ", ".join(method or chosen)
    return _connect(model, chosen, None if lossy else f"{named} does not start as {model.config.model_type}")


def by_name(method: Methods) -> str | list[str] | dict[str, Any] | None:
    """The same, with the names of classes in their place."""
    if method is None or isinstance(method, str):
        return method
    if isinstance(method, Mapping):
        return {_name_of(each): value for each, value in method.items()}
    return [_name_of(each) for each in method] if isinstance(method, (list, tuple)) else _name_of(method)


def _name_of(method: Any) -> str:
    if isinstance(method, str):
        return method
    if not (isinstance(method, type) and issubclass(method, Connection)):
        raise ValueError(f"`method` has {method!r}: expected names of `METHODS`, classes of connections, or fields.")
    if method not in KINDS:
        raise ValueError(f"{method.__qualname__} has no `name` of its own, or a later class has the same.")
    return method.name


def _folder(method: str, revision: str | None) -> Path:
    """Of what `save_connections` has written."""
    folder = Path(method)
    if not folder.is_dir():
        try:
            folder = Path(snapshot_download(method, revision=revision, allow_patterns=[CONFIG, CONNECTIONS]))
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{method}: is no local folder, and the Hub did not give it: {one_line(error)}"
            ) from error
    return folder


def chosen_fields(config: PreTrainedConfig, method: Methods, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The connection fields of methods, with `fields` on top."""
    chosen: dict[str, Any] = {}
    method = by_name(method)
    if isinstance(method, Mapping):
        fields = {**method, **fields}
    else:
        default = ["resformer"] if method is None and not fields else []
        names = [method] if isinstance(method, str) else method or default
        for name in names:
            of_method = fields_within_kinds(name, text_config(config))
            sources = [value for field, value in of_method.items() if field.endswith("_sources")]
            if sources and all(each == [*range(len(each))] for each in sources):
                raise ValueError(f"{name}: no two of its layers have attention of one kind, and none shares.")
            for field, value in of_method.items():
                if field == "connections":
                    value = {**chosen.get(field, {}), **value}
                elif chosen.get(field, value) != value:
                    raise ValueError(f"{', '.join(names)}: they differ in `{field}`: {chosen[field]!r}, {value!r}.")
                chosen[field] = value
    for name, value in fields.items():
        if name in CONNECTION_FIELDS:
            chosen[name] = value
        elif (kind := _kind_of_field(name)) is not None:
            own = dict(chosen.get("connections") or {})
            field = name.removeprefix(f"{kind.name}_")
            chosen["connections"] = {**own, kind.name: {**own.get(kind.name, {}), field: value}}
        elif name in METHODS and isinstance(value, Mapping):  # {"damped": {"init": 0.5}}
            chosen["connections"] = {**(chosen.get("connections") or {}), name: dict(value)}
        else:
            raise ValueError(f"`{name}` is no connection field.{did_you_mean(name, connection_field_names())}")
    return chosen


def connection_field_names() -> list[str]:
    """The fields of connections, and `NAME_FIELD` of classes that are no part of this package."""
    return [*CONNECTION_FIELDS, *(f"{kind.name}_{each}" for kind in KINDS for each in _own(kind))]


def _own(kind: type[Connection]) -> dict[str, Any]:
    return {} if kind.fields_of else own_fields(kind)


def _kind_of_field(name: str) -> type[Connection] | None:
    return next((kind for kind in KINDS if any(name == f"{kind.name}_{each}" for each in _own(kind))), None)


def with_further(config: Any, fields: Mapping[str, Any], *, plain: bool) -> dict[str, Any]:
    """The connection fields that a configuration sets, with `fields` of connections that it does not have.

    `plain`: these start as the plain family, where `fields` says nothing else.

    Raises:
        ValueError: `fields` has another value for a connection that is there.
    """
    check_own(SimpleNamespace(connections=fields.get("connections")))
    had = connections_of(config) if isinstance(config, ConnectionFields) else {}
    chosen, own = dict(fields), had.get("connections", {})
    for kind in KINDS:
        if not had or not kind.is_in(config):
            continue
        if kind.fields_of:
            asked = {name: chosen.pop(name) for name in kind.fields if name in chosen}
        else:
            settings = (fields.get("connections") or {}).get(kind.name) or {}
            asked = {f"{kind.name}_{name}": value for name, value in settings.items()}
        there = kind.field_values(config)
        for name, value in asked.items():
            if value != there[name]:
                raise ValueError(
                    f"`{name}` is {there[name]!r} already, and {value!r} is asked for: connections that are there "
                    "stay. Ask for others alone, or take these out first (`resformer.disconnect`, `resformer revert`)."
                )
    if own:
        chosen["connections"] = {**(chosen.get("connections") or {}), **own}
    chosen = {**had, **chosen}
    for kind in KINDS if plain else ():
        if not had or not kind.is_in(config):
            chosen = kind.plain_start(chosen) | chosen if kind.fields_of else chosen | kind.plain_start(chosen)
    return chosen | ({"connections": with_every_field(asked)} if (asked := chosen.get("connections")) else {})


def _connect(
    model: Any, fields: Mapping[str, Any], unless_exact: str | None = None, *, saved: Path | None = None
) -> PreTrainedModel:
    """Adds connections, with the coefficients of a file, or starting plainly.

    `unless_exact`: what to say, and refuse, if they do not start plainly.
    """
    check_whole(model)
    if any(hasattr(each, "adapter_layer_names") for each in model.modules()):  # an adapter is saved without these
        raise ValueError(f"{type(model).__name__}: PEFT has wrapped it: merge or unload the adapter first.")
    before = connections_of(model.config) if isinstance(model, ConnectedModel) else {}
    fields = with_further(model.config, fields, plain=saved is None)
    family = family_of(model.config)
    config = _with_fields(copy.deepcopy(model.config), fields)
    decoder = Decoder(model)
    view = decoder.view(config)
    if family.model_type not in MEASURED:
        logger.warning(
            f"Connections in decoders of model type {family.model_type!r} were not measured, as those of the table in "
            "docs/any-decoder.md: compare logits before and after, and tokens with and without a cache."
        )
    added = [kind for kind in kinds_in(view) if not before or not kind.is_in(model.config)]
    reasons = dict.fromkeys(reason for kind in added for reason in kind.inexact_because(view))
    if reasons and unless_exact:
        raise ValueError(f"{unless_exact}: {'; '.join(reasons)}. Allow it with lossy=True.")
    unknown = [each.name for each in added if not each.states_start()]
    if unknown and unless_exact:
        logger.warning(
            f"{unknown[0]} states no `plain`, the fields with which it has no effect: the model may have changed."
        )
    made: dict[str, Any] = {}
    with torch.device("meta"):  # a class or a file that fails does so before the model is changed
        for each in added:
            if (of_decoder := each.made_of_decoder(view)) is not None:
                made[each.name] = of_decoder
            for n in each.layers(view) if each.has_modules else ():
                module = made[f"{decoder.name.rpartition('.')[2]}.{n}.{each.name}"] = each.made(view.of_layer(n), n)
                set_initial_values(module)
    tensors = {} if saved is None else read_coefficients(saved, made, model)
    base = {} if before else _base_of(model)
    functions = ((each, getattr(each, "_gradient_checkpointing_func", None)) for each in model.modules())
    for module, function in [(each, not_reentrant(function)) for each, function in functions if function is not None]:
        module._gradient_checkpointing_func = function
    if before:
        _connect_again(model, fields, decoder)
    else:
        if isinstance(model, ConnectedModel):  # it has the fields of connections alone
            _become_plain(model)
        shared, own = model.config, _with_fields(copy.copy(model.config), fields)
        for module in model.modules():  # another model may have been made from the same configuration
            vars(module).update({name: own for name, value in vars(module).items() if value is shared})
        model.config.base_model = base
        become_connected(model, type(model.config))
        model.add_connections(decoder)
    load_coefficients(model, tensors)
    return _without_name(model) if reasons else model


def _without_name(model: Any) -> PreTrainedModel:
    """TRL loads what has the model's name as the reference of DPO, KTO and GRPO, and PEFT what an adapter's base has
    been named: it would be the plain one."""
    model._plain_name = getattr(model, "_plain_name", "") or model.name_or_path
    model.config._name_or_path = model.name_or_path = ""
    return cast(PreTrainedModel, model)


def _base_of(model: Any) -> dict[str, Any]:
    """Which weights the connections are for."""
    base = dict(getattr(model.config, "base_model", None) or {})
    if (name := model.config._name_or_path) and not base:
        commit = getattr(model.config, "_commit_hash", None)  # of a folder, its last part tells of no machine
        base = {"name": name if commit else Path(name).absolute().name, "revision": commit}
    return base | {"checksums": checksums(model)}


def _connect_again(model: Any, fields: Mapping[str, Any], decoder: Decoder) -> None:
    """Gives a model further connections; those that it has keep their coefficients."""
    places = [*decoder.layers, decoder.module]
    had = [{name: each for name, each in place._modules.items() if isinstance(each, Added)} for place in places]
    for connected in [each for each in model.modules() if isinstance(each, ConnectedModel)]:
        connected.forget_connections()
    remove_connections(decoder)
    for config in {id(each): each for each in (getattr(m, "config", None) for m in model.modules()) if each}.values():
        if hasattr(config, "value_residual"):
            _with_fields(config, fields)
    # Of a model that sees images, the text model's configuration says nothing of connections.
    knows = (each for each in [*model.modules()][::-1] if isinstance(each, ConnectedModel))
    owner = next(each for each in knows if hasattr(each.config, "value_residual"))
    owner.add_connections(Decoder(owner, decoder.places))
    for place, modules in zip(places, had, strict=True):
        for name, module in modules.items():
            place._modules[name].load_state_dict(module.state_dict(keep_vars=True), assign=True)


def connection_modules(model: torch.nn.Module) -> list[str]:
    """Names of the modules with the parameters of a model's connections, such as PEFT's `modules_to_save` takes."""
    with_parameters = (name for name, each in added_modules(model).items() if any(True for _ in each.parameters()))
    names = {part for name in with_parameters for part in name.split(".")}
    return [kind.name for kind in KINDS if kind.name in names]


def disconnect(model: PreTrainedModel, *, lossy: bool = False) -> PreTrainedModel:
    """Takes the connections of a model away, in place, and returns it: it is of its family's class again.

    Args:
        lossy: allow it where connections have an effect, which is lost.

    Raises:
        ValueError: the model has no connections, or they have an effect, or its layers share keys or values, whose
            own projections it does not have.
    """
    check_whole(model)
    _check_connected(model)
    decoder, config = Decoder(model), model.config
    shares = [name for name in ("value_sources", "key_sources") if getattr(config, name)]
    if shares:
        raise ValueError(
            f"`{shares[0]}` is set: layers that read another's keys or values have no projections of their own. Load "
            "the model without connections anew."
        )
    if not lossy and (effects := effects_of(model, decoder)):
        raise ValueError(f"Connections have learned: {effects[0]}. Lose that with lossy=True.")
    remove_connections(decoder)
    return _become_plain(model)


def check_whole(model: torch.nn.Module) -> None:
    """Refuses a model of Transformers of which a part alone was connected."""
    for name, part in model.named_modules() if isinstance(model, PreTrainedModel) else ():
        if isinstance(part, ConnectedModel):
            if not name:
                return
            raise ValueError(
                f"{type(model).__name__} has connections in its `{name}` alone, which was connected by itself: "
                "`resformer.disconnect` that part, and connect the whole model."
            )


def _check_connected(model: PreTrainedModel) -> None:
    if not any(isinstance(each, ConnectedLayer) for each in model.modules()):
        raise ValueError(f"{type(model).__name__} has no connections.")


def _become_plain(model: PreTrainedModel) -> PreTrainedModel:
    """Gives a model without connections, in place, its family's class and configuration."""
    config: Any = model.config
    family = family_of(config)
    model.name_or_path = model.name_or_path or vars(model).pop("_plain_name", "")
    config._name_or_path = config._name_or_path or model.name_or_path
    for each in [config, *(getattr(module, "config", None) for module in model.modules())]:
        if type(each) is not family and isinstance(each, type(config)):
            each.__class__ = family
            for name in (*CONNECTION_FIELDS, "base_model", "model_type"):
                vars(each).pop(name, None)
    for module in [each for each in model.modules() if isinstance(each, ConnectedModel)]:
        module.forget_connections()
        change_class(module, module.family_class())
    config.architectures = config.architectures and [type(model).__name__]
    return model


def effects_of(model: Any, decoder: Decoder) -> list[str]:
    """How the connections of a model make it differ from the plain one; empty if they do not."""
    view = decoder.view(model.config)
    fixed = [effect for kind in kinds_in(view) for effect in kind.fixed_effects(view)]
    learned = [
        f"{name}{place} is {distance:.2g} from no effect"
        for name, module in added_modules(model).items()
        for distance, place in module.deviations()
        if distance != 0
    ]
    return fixed + learned


@contextmanager
def disconnected(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """The model without its connections, for a moment: what a `with` block computes.

    Raises:
        ValueError: the model has no connections, or its layers share keys or values.
    """
    _check_connected(model)
    if getattr(model.config, "value_sources", None) or getattr(model.config, "key_sources", None):
        raise ValueError("Layers that read another's keys or values have no projections of their own.")
    # Layers that were copied by themselves have their own.
    holders = (each for module in model.modules() for each in (module, vars(module).get("passes")))
    switches = {each for holder in holders if isinstance(each := getattr(holder, "switch", None), Switch)}
    before = {each: each.is_off for each in switches}
    for switch in switches:
        switch.is_off = True
    try:
        yield model
    finally:
        for switch, was_off in before.items():
            switch.is_off = was_off


def connected_config(config: PreTrainedConfig, method: Methods = None, **fields: Any) -> PreTrainedConfig:
    """A configuration of the same family with connections that start as the papers say, for training from scratch.

    ```python
    >>> config = connected_config(AutoConfig.from_pretrained("Qwen/Qwen3-30B-A3B"), "denseformer")
    >>> model = AutoModelForCausalLM.from_config(config)
    ```"""
    if not isinstance(config, PreTrainedConfig):
        raise ValueError(f"`connected_config` takes a configuration of Transformers, not a {type(config).__name__}.")
    chosen = with_further(config, chosen_fields(config, method, fields), plain=False)
    return _with_fields(copy.deepcopy(config), chosen)


def family_of(config: PreTrainedConfig) -> Any:
    """The class of a family's own configuration."""
    return next(
        each
        for each in type(config).__mro__
        if issubclass(each, PreTrainedConfig) and not issubclass(each, ConnectedConfig)
    )


def _with_fields(config: PreTrainedConfig, fields: Mapping[str, Any]) -> PreTrainedConfig:
    """The configuration itself, as its family's with connections."""
    config.__class__ = config_class(family_of(config))
    try:
        for name, value in fields.items():
            setattr(config, name, value)
    except StrictDataclassError as error:
        raise ValueError(reason(error)) from None
    return config
