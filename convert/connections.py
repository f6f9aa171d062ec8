"""The parameters that connections add: at their start, and as a checkpoint holds them."""

import copy
import functools
import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from safetensors import safe_open
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.initialization import no_init_weights

from resformer.configuration.connection_fields import ConnectionFields
from resformer.convert.judging import auto_class
from resformer.errors import CheckpointError, one_line, quoted
from resformer.modeling.connected import added_modules
from resformer.modeling.connection import Added, Connection, StartsAsStated
from resformer.modeling.connections import KINDS
from resformer.modeling.matrices import decoder_of
from resformer.safetensors_format import Shard


def meta_model(config: Any) -> PreTrainedModel:
    """A model of the configuration, without memory for its parameters.

    It is one for all configurations that differ in nothing that such a model has, and may be used elsewhere too.
    """
    left_out = ("base_model", "dtype", "transformers_version")
    try:
        known = {key: value for key, value in config.to_dict().items() if key not in left_out}
        return _meta_model(config.__class__, json.dumps(known, sort_keys=True, default=str))
    except Exception as error:  # torch's and Transformers' any, for values that no validator looks at
        raise CheckpointError(
            f"Transformers makes no model of it ({type(error).__name__}: {one_line(error)})."
        ) from error


@functools.lru_cache(maxsize=8)
def _meta_model(config_class: Any, settings: str) -> PreTrainedModel:
    config = config_class.from_dict(json.loads(settings))
    with no_init_weights(), torch.device("meta"):
        model: PreTrainedModel = auto_class(config)._model_mapping[type(config)](config)
    model.tie_weights()  # a head that is the embedding counts once
    return model


def connection_modules(config: Any) -> Mapping[str, Added]:
    """Name in the model -> the module, on the meta device, of each connection that has one."""
    return added_modules(meta_model(config)) if isinstance(config, ConnectionFields) else {}


def stored_names(config: Any, names: Iterable[str]) -> dict[str, str]:
    """Name in the model -> in a checkpoint: some families, Gemma 3 for one, have others on the disk.

    What a family fuses when it is loaded, experts for one, has several names there, and is left out.
    """
    model, known = meta_model(config), {}
    for name in names:
        stored = [*revert_weight_conversion(model, {name: torch.empty(0)})]
        if len(stored) == 1:
            known[name] = str(stored[0])
    return known


def added_shapes(config: Any, *, tables: bool = True, alone: bool = False) -> dict[str, tuple[int, ...]]:
    """Name in a checkpoint, or in a file of connections alone, -> shape of every added parameter.

    Tables of value embeddings, which are large and not needed for mixing matrices, are among them with `tables`.
    """
    parameters = _parameters(config, connection_modules(config), tables=tables, alone=alone)
    return {name: tuple(parameter.shape) for name, parameter in parameters.items()}


def added_kinds(config: Any, before: Any) -> list[type[Connection]]:
    """The kinds of connections that a model of `config` has beyond one of `before`, its source."""
    added = []
    for kind in KINDS:
        for name in kind.fields:
            old, new = getattr(before, name, None), getattr(config, name, None)
            if old != new and kind.is_in(before):
                raise CheckpointError(
                    f"`{name}` is {quoted(old)} in the source and {quoted(new)} in the result: connections are added, "
                    "those of the source stay as they are. Name the fields to add, --method transformer --set dwa=true "
                    "for one."
                )
        if kind.is_in(config) and not kind.is_in(before):
            added.append(kind)
    shapes = added_shapes(config)
    for name, shape in added_shapes(before).items():
        if shapes.get(name) != shape:
            raise CheckpointError(
                f"{name} of the source has shape {list(shape)}, and the result has no place for it: the connections "
                "that are added leave other layers to mix. Convert the original instead."
            )
    return added


def initial_connections(config: Any, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Name in a checkpoint -> the added parameter at its start; `dtype` is the model's, which tables have."""
    modules = copy.deepcopy(dict(connection_modules(config)))
    for outer in modules.values():
        for name in outer.tables:
            outer.get_submodule(name.rpartition(".")[0]).to(dtype)
        outer.to_empty(device="cpu")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # tables may start with random numbers: two runs write the same
        for outer in modules.values():
            for module in outer.modules():
                if isinstance(module, StartsAsStated):
                    module.reset_parameters()
    return {name: parameter.detach() for name, parameter in _parameters(config, modules).items()}


def read_connections(
    config: Any, shards: Iterable[Shard], *, tables: bool = True, alone: bool = False
) -> dict[str, Added]:
    """`connection_modules` with the checkpoint's parameters, whose shapes were checked.

    Without `tables`, these stay on the meta device. `alone`: the file has no others, and its shapes are checked here.
    """
    modules = copy.deepcopy(dict(connection_modules(config)))
    places = _parameters(config, modules, tables=tables, alone=alone)
    for tensor in (each for shard in shards if alone for each in shard.tensors):
        expected = [*places[tensor.name].shape] if tensor.name in places else None
        if [*tensor.shape] != expected:
            raise CheckpointError(f"tensor {tensor.name!r} has shape {[*tensor.shape]}, the model asks for {expected}.")
    found: dict[str, torch.Tensor] = {}
    for shard in shards:
        if wanted := shard.names & places.keys():
            with safe_open(shard.path, "pt") as file:
                found |= {name: file.get_tensor(name) for name in wanted}
    if missing := places.keys() - found.keys():
        raise CheckpointError(f"missing keys: {', '.join(sorted(missing)[:5])}.")
    names = {id(parameter): name for name, parameter in places.items()}
    for module in modules.values():
        read = {
            name: found[names[id(each)]].to(each.dtype) for name, each in module.named_parameters() if id(each) in names
        }
        module.load_state_dict(read, strict=False, assign=True)
    return modules


def coefficients_of(config: Any, shards: Iterable[Shard]) -> dict[str, torch.Tensor]:
    """The parameters of connections in a checkpoint, by the names that a file of connections alone has."""
    return {
        name: each.detach() for name, each in _parameters(config, read_connections(config, shards), alone=True).items()
    }


def _parameters(
    config: Any, modules: Mapping[str, Added], *, tables: bool = True, alone: bool = False
) -> dict[str, torch.nn.Parameter]:
    """Name in a checkpoint, or with `alone` in the decoder that has the layers -> parameter."""
    parameters = {
        f"{prefix}.{name}": parameter
        for prefix, module in sorted(modules.items())
        for name, parameter in module.named_parameters()
        if tables or name not in module.tables
    }
    if alone and parameters:
        model = meta_model(config)
        decoder = decoder_of(model)[0]
        start = next(f"{name}." for name, module in model.named_modules() if module is decoder)
        return {name.removeprefix(start): parameter for name, parameter in parameters.items()}
    stored = stored_names(config, parameters) if parameters else {}
    return {stored[name]: parameter for name, parameter in parameters.items()}
