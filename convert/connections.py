"""The parameters that connections add: at their start, and as a checkpoint holds them."""

import copy
import functools
import json
from collections.abc import Mapping
from typing import Any

import torch
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.initialization import no_init_weights

from resformer.configuration import ResFormerConfig
from resformer.convert.tensors import to_tensor, to_torch
from resformer.errors import CheckpointError, one_line
from resformer.modeling import (
    ResFormerForQuestionAnswering,
    ResFormerForSequenceClassification,
    ResFormerForTokenClassification,
    ResFormerPreTrainedModel,
)
from resformer.modeling.connected import added_modules
from resformer.modeling.connection import Added, StartsAsStated
from resformer.safetensors_format import Tensor

#: Class in `architectures` of config.json -> a model with another head. Every other checkpoint is a language model.
HEADS: dict[str, type[ResFormerPreTrainedModel]] = {
    each.__name__: each
    for each in (ResFormerForQuestionAnswering, ResFormerForSequenceClassification, ResFormerForTokenClassification)
}


def head_of(config: PreTrainedConfig) -> str | None:
    """The class in `HEADS`; `None` for a language model."""
    if not isinstance(config, ResFormerConfig):
        return None
    names = config.architectures if isinstance(config.architectures, list) else []
    return next((name for name in names if isinstance(name, str) and name in HEADS), None)


def meta_model(config: Any) -> PreTrainedModel:
    """A model of the configuration, without memory for its parameters.

    It is one for all configurations that differ in nothing that such a model has, and may be used elsewhere too.
    """
    known = json.loads(config.to_json_string())
    left_out = ("base_model", "dtype", "transformers_version")
    try:
        return _meta_model(json.dumps({name: value for name, value in known.items() if name not in left_out}))
    except Exception as error:  # torch's and Transformers' any, for values that no validator looks at
        raise CheckpointError(f"config.json makes no model: {one_line(error)}") from error


@functools.lru_cache(maxsize=8)
def _meta_model(text: str) -> PreTrainedModel:
    known = json.loads(text)
    config = CONFIG_MAPPING[known["model_type"]].from_dict(known)
    model_class: Any = HEADS.get(head_of(config) or "") or MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    with no_init_weights(), torch.device("meta"):
        return model_class(config)


def tied_names(config: PreTrainedConfig) -> set[str]:
    """The tensors that are others again, where the configuration ties them."""
    return set(meta_model(config).all_tied_weights_keys) if config.tie_word_embeddings else set()


def connection_modules(config: Any) -> Mapping[str, Added]:
    """Name in a checkpoint -> the module, on the meta device, of each connection that has one."""
    return _connection_modules(meta_model(config))


@functools.lru_cache(maxsize=8)  # as many models are kept
def _connection_modules(model: PreTrainedModel) -> Mapping[str, Added]:
    return {_stored_name(model, name): module for name, module in added_modules(model).items()}


def _stored_name(model: PreTrainedModel, module: str) -> str:
    """Some families, Gemma 3 for one, have other names on the disk than in the model."""
    (name,) = revert_weight_conversion(model, {f"{module}.weight": torch.empty(0)})
    return str(name).removesuffix(".weight")


def expected_shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor that a checkpoint holds, both ends of a tie among them."""
    return {name: tuple(tensor.shape) for name, tensor in meta_model(config).state_dict().items()}


def added_shapes(config: Any, *, tables: bool = True) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every added parameter.

    Tables of value embeddings, which are large and not needed for mixing matrices, are among them with `tables`.
    """
    parameters = _parameters(connection_modules(config), tables=tables)
    return {name: tuple(parameter.shape) for name, parameter in parameters.items()}


def initial_connections(config: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    """The added parameters at their start; `dtype` is the model's, which tables have."""
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
    return {name: to_tensor(name, parameter) for name, parameter in _parameters(modules).items()}


def read_connections(config: Any, tensors: Mapping[str, Tensor], *, tables: bool = True) -> dict[str, Added]:
    """`connection_modules` with the checkpoint's parameters, which `check_tensors` has found in their shapes.

    Without `tables`, these stay on the meta device.
    """
    modules = copy.deepcopy(dict(connection_modules(config)))
    for prefix, module in modules.items():
        read = {
            name: to_torch(tensors[f"{prefix}.{name}"]).to(parameter.dtype)
            for name, parameter in module.named_parameters()
            if tables or name not in module.tables
        }
        module.load_state_dict(read, strict=False, assign=True)
    return modules


def _parameters(modules: Mapping[str, Added], *, tables: bool = True) -> dict[str, torch.nn.Parameter]:
    return {
        f"{prefix}.{name}": parameter
        for prefix, module in sorted(modules.items())
        for name, parameter in module.named_parameters()
        if tables or name not in module.tables
    }
