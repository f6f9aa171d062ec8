"""The parameters that connections add: at their start, and as a checkpoint holds them.

No model is built for them.
"""

from collections.abc import Mapping

import torch

from resformer.configuration import ResFormerConfig
from resformer.convert.safetensors_format import Tensor
from resformer.convert.tensors import to_tensor, to_torch
from resformer.errors import CheckpointError, brief
from resformer.modeling.connection import Connection
from resformer.modeling.shapes import parameter_shapes
from resformer.modeling.wiring import connection_modules

__all__ = ["added_shapes", "coefficient_shapes", "expected_shapes", "initial_connections", "read_connections"]


def expected_shapes(config: ResFormerConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor that a checkpoint holds, both ends of a tie among them.

    Raises:
        CheckpointError: the configuration has values that no model can have.
    """
    try:
        return parameter_shapes(config)
    except Exception as error:  # torch's and Transformers' any, for values that no validator looks at
        raise CheckpointError(f"config.json makes no model: {brief(error)}") from error


def added_shapes(config: ResFormerConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every added parameter."""
    with torch.device("meta"):
        return _shapes(connection_modules(config))


def coefficient_shapes(config: ResFormerConfig) -> dict[str, tuple[int, ...]]:
    """`added_shapes` without value-embedding tables, which are large and not needed for mixing matrices."""
    with torch.device("meta"):
        return _shapes({name: module for name, module in connection_modules(config).items() if not module.is_table})


def initial_connections(config: ResFormerConfig, dtype: torch.dtype) -> dict[str, Tensor]:
    """The added parameters at their start; `dtype` is the model's, which tables have."""
    modules = connection_modules(config)
    for module in modules.values():
        module.to(dtype if module.is_table else None).reset_parameters()
    return {name: to_tensor(name, parameter) for name, parameter in _parameters(modules).items()}


def read_connections(
    config: ResFormerConfig, tensors: Mapping[str, Tensor], *, tables: bool = True
) -> dict[str, Connection]:
    """Name in the model -> a module with the checkpoint's parameters, for each that holds added ones.

    Args:
        tensors: name -> tensor. `check_tensors` has checked that the added parameters are there, in their shapes.
        tables: also tables.
    """
    modules = {name: module for name, module in connection_modules(config).items() if tables or not module.is_table}
    with torch.no_grad():
        for name, parameter in _parameters(modules).items():
            parameter.copy_(to_torch(tensors[name]))
    return modules


def _shapes(modules: Mapping[str, Connection]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in _parameters(modules).items()}


def _parameters(modules: Mapping[str, Connection]) -> dict[str, torch.nn.Parameter]:
    return {
        f"{prefix}.{name}": parameter
        for prefix, module in sorted(modules.items())
        for name, parameter in module.named_parameters()
    }
