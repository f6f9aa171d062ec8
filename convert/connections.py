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

__all__ = ["added_shapes", "expected_shapes", "initial_connections", "read_connections"]


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
    return {name: tuple(parameter.shape) for name, parameter in _parameters(connection_modules(config)).items()}


def initial_connections(config: ResFormerConfig) -> dict[str, Tensor]:
    """The added parameters at their start."""
    modules = connection_modules(config)
    for module in modules.values():
        module.reset_parameters()
    return {name: to_tensor(name, parameter) for name, parameter in _parameters(modules).items()}


def read_connections(config: ResFormerConfig, tensors: Mapping[str, Tensor]) -> dict[str, Connection]:
    """Name in the model -> a module with the checkpoint's parameters, for each that holds added ones.

    Args:
        tensors: name -> tensor. `check_tensors` has checked that the added parameters are there, in their shapes.
    """
    modules = connection_modules(config)
    with torch.no_grad():
        for name, parameter in _parameters(modules).items():
            parameter.copy_(to_torch(tensors[name]))
    return modules


def _parameters(modules: Mapping[str, Connection]) -> dict[str, torch.nn.Parameter]:
    return {
        f"{prefix}.{name}": parameter
        for prefix, module in sorted(modules.items())
        for name, parameter in module.named_parameters()
    }
