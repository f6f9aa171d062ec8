"""The parameters that connections add: at their start, and as a checkpoint holds them."""

import copy
import functools
import json
from collections.abc import Mapping

import torch
from transformers import PreTrainedConfig

from resformer.configuration import ResFormerConfig
from resformer.convert.safetensors_format import Tensor
from resformer.convert.tensors import to_tensor, to_torch
from resformer.errors import CheckpointError, one_line
from resformer.modeling import (
    ResFormerForCausalLM,
    ResFormerForQuestionAnswering,
    ResFormerForSequenceClassification,
    ResFormerForTokenClassification,
    ResFormerPreTrainedModel,
)
from resformer.modeling.connection import Connection

#: Class in `architectures` of config.json -> a model with another head. Every other checkpoint is a language model.
HEADS: dict[str, type[ResFormerPreTrainedModel]] = {
    each.__name__: each
    for each in (ResFormerForQuestionAnswering, ResFormerForSequenceClassification, ResFormerForTokenClassification)
}


def head_of(config: PreTrainedConfig) -> str | None:
    """The class in `HEADS`; `None` for a language model."""
    return next((name for name in config.architectures or () if name in HEADS), None)


@functools.lru_cache(maxsize=4)
def _meta_model(text: str) -> ResFormerPreTrainedModel:
    config = ResFormerConfig.from_dict(json.loads(text))
    with torch.device("meta"):
        return HEADS.get(head_of(config) or "", ResFormerForCausalLM)(config)


def connection_modules(config: ResFormerConfig, *, tables: bool = True) -> dict[str, Connection]:
    """Name in the model -> the module, on the meta device, for each that holds added parameters.

    Value-embedding tables, which are large and not needed for mixing matrices, are among them with `tables`.
    """
    modules = _meta_model(config.to_json_string()).named_modules()
    return {name: each for name, each in modules if isinstance(each, Connection) and (tables or not each.is_table)}


def expected_shapes(config: ResFormerConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor that a checkpoint holds, both ends of a tie among them."""
    try:
        tensors = _meta_model(config.to_json_string()).state_dict()
        return {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    except Exception as error:  # torch's and Transformers' any, for values that no validator looks at
        raise CheckpointError(f"config.json makes no model: {one_line(error)}") from error


def added_shapes(config: ResFormerConfig, *, tables: bool = True) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every added parameter."""
    parameters = _parameters(connection_modules(config, tables=tables))
    return {name: tuple(parameter.shape) for name, parameter in parameters.items()}


def initial_connections(config: ResFormerConfig, dtype: torch.dtype) -> dict[str, Tensor]:
    """The added parameters at their start; `dtype` is the model's, which tables have."""
    modules = {name: _on_cpu(module, dtype) for name, module in connection_modules(config).items()}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # tables may start with random numbers: two runs write the same
        for module in modules.values():
            module.reset_parameters()
    return {name: to_tensor(name, parameter) for name, parameter in _parameters(modules).items()}


def read_connections(
    config: ResFormerConfig, tensors: Mapping[str, Tensor], *, tables: bool = True
) -> dict[str, Connection]:
    """`connection_modules` with the checkpoint's parameters, which `check_tensors` has found in their shapes."""
    modules = {name: _on_cpu(module) for name, module in connection_modules(config, tables=tables).items()}
    with torch.no_grad():
        for name, parameter in _parameters(modules).items():
            parameter.copy_(to_torch(tensors[name]))
    return modules


def _on_cpu(module: Connection, table_dtype: torch.dtype | None = None) -> Connection:
    """A copy without values, on the CPU."""
    return copy.deepcopy(module).to(table_dtype if module.is_table else None).to_empty(device="cpu")


def _parameters(modules: Mapping[str, Connection]) -> dict[str, torch.nn.Parameter]:
    return {
        f"{prefix}.{name}": parameter
        for prefix, module in sorted(modules.items())
        for name, parameter in module.named_parameters()
    }
