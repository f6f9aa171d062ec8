"""The parameters that connections add: at their start, and as a checkpoint holds them.

The rest of a model stays on the meta device, whatever its size.
"""

from collections.abc import Mapping

import torch
from transformers import AutoModelForCausalLM

from resformer.configuration import ResFormerConfig
from resformer.configuration.methods import connections_of, without_connections
from resformer.convert.safetensors_format import Tensor
from resformer.convert.tensors import to_tensor, to_torch
from resformer.errors import CheckpointError, brief
from resformer.modeling import ResFormerForCausalLM
from resformer.modeling.connection import Connection

__all__ = ["added_shapes", "expected_shapes", "initial_connections", "model_on_meta", "read_connections"]


def model_on_meta(config: ResFormerConfig, dtype: torch.dtype = torch.float32) -> ResFormerForCausalLM:
    """The model, without memory for it.

    Raises:
        CheckpointError: the configuration has values that no model can have.
    """
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, dtype=dtype)
    except Exception as error:  # torch's and Transformers' any, for values that no validator looks at
        raise CheckpointError(f"The source's config.json makes no model: {brief(error)}") from error


def expected_shapes(config: ResFormerConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor that a checkpoint holds, both ends of a tie among them."""
    if connections_of(config):
        return {name: tuple(tensor.shape) for name, tensor in model_on_meta(config).state_dict().items()}
    # Without connections all layers are alike: one is enough.
    one = without_connections(
        config,
        num_hidden_layers=1,
        layer_types=config.layer_types and config.layer_types[:1],
        no_rope_layers=config.no_rope_layers and config.no_rope_layers[:1],
    )
    shapes = {}
    for name, tensor in model_on_meta(one).state_dict().items():
        for layer in range(config.num_hidden_layers if name.startswith("model.layers.0.") else 1):
            shapes[name.replace("model.layers.0.", f"model.layers.{layer}.")] = tuple(tensor.shape)
    return shapes


def added_shapes(config: ResFormerConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every added parameter."""
    return {name: tuple(parameter.shape) for name, parameter in _parameters(model_on_meta(config)).items()}


def initial_connections(model: ResFormerForCausalLM) -> list[Tensor]:
    """The added parameters at their start, sorted by name. Only these of `model` get memory."""
    for module in _modules(model).values():
        module.to_empty(device="cpu").reset_parameters()
    return [to_tensor(name, parameter) for name, parameter in sorted(_parameters(model).items())]


def read_connections(config: ResFormerConfig, tensors: Mapping[str, Tensor]) -> tuple[ResFormerForCausalLM, list[str]]:
    """(the model, of which only the added parameters are read; their names).

    Args:
        tensors: name -> tensor. `check_tensors` has checked that the added parameters are there, in their shapes.
    """
    model = model_on_meta(config)
    for module in _modules(model).values():
        module.to_empty(device="cpu")
    parameters = _parameters(model)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(to_torch(tensors[name]))
    return model, sorted(parameters)


def _modules(model: ResFormerForCausalLM) -> dict[str, Connection]:
    return {name: module for name, module in model.named_modules() if isinstance(module, Connection)}


def _parameters(model: ResFormerForCausalLM) -> dict[str, torch.nn.Parameter]:
    return {
        f"{prefix}.{name}": parameter
        for prefix, module in _modules(model).items()
        for name, parameter in module.named_parameters()
    }
