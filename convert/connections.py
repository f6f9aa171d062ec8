"""The parameters that connections add: at their start, and as a checkpoint holds them.

The rest of a model stays on the meta device, whatever its size.
"""

import torch
from transformers import AutoModelForCausalLM

from resformer.configuration import METHODS, ResFormerConfig
from resformer.convert.errors import CheckpointError
from resformer.convert.families import CONNECTION_FIELDS, without_connections
from resformer.convert.safetensors_format import Tensor
from resformer.convert.source import Source, to_tensor, to_torch
from resformer.modeling import ResFormerForCausalLM
from resformer.modeling.mixing import MixingRows
from resformer.modeling.value_residual import GateProjection

__all__ = ["expected_shapes", "initial_connections", "method_of", "model_on_meta", "read_connections"]


def model_on_meta(config: ResFormerConfig, dtype: torch.dtype = torch.float32) -> ResFormerForCausalLM:
    """The model, without memory for it.

    Raises:
        CheckpointError: the configuration has sizes that no tensor can have.
    """
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, dtype=dtype)
    except (RuntimeError, ValueError, ArithmeticError) as error:
        raise CheckpointError(f"The configuration makes no model: {error}") from error


def expected_shapes(config: ResFormerConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor that a checkpoint holds, both ends of a tie among them."""
    if config.value_residual != "none" or config.dwa or config.value_sources or config.key_sources:
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


def initial_connections(model: ResFormerForCausalLM) -> list[Tensor]:
    """The added parameters at their start, sorted by name. Only these of `model` get memory."""
    for module in _modules(model).values():
        module.to_empty(device="cpu").reset_parameters()
    return [to_tensor(name, parameter) for name, parameter in sorted(_parameters(model).items())]


def read_connections(source: Source) -> tuple[ResFormerForCausalLM, list[str]]:
    """(the model, of which only the added parameters are read; their names)."""
    model = model_on_meta(source.config)
    for module in _modules(model).values():
        module.to_empty(device="cpu")
    parameters = _parameters(model)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(to_torch(source.checkpoint.tensors[name]))
    return model, sorted(parameters)


def method_of(config: ResFormerConfig) -> str | None:
    """The named method that `config` has the connections of; `None` if no name is given to them."""
    found = {name: getattr(config, name) for name in CONNECTION_FIELDS}
    for name, method in METHODS.items():
        fields = method(config.num_hidden_layers)
        named = ResFormerConfig(num_hidden_layers=config.num_hidden_layers, **fields)
        start = {"value_residual_init"} if "value_residual_init" not in fields else set()
        if all(getattr(named, field) == value for field, value in found.items() if field not in start):
            return name
    return None


def _modules(model: ResFormerForCausalLM) -> dict[str, MixingRows | GateProjection]:
    return {name: module for name, module in model.named_modules() if isinstance(module, (MixingRows, GateProjection))}


def _parameters(model: ResFormerForCausalLM) -> dict[str, torch.nn.Parameter]:
    return {
        f"{prefix}.{name}": parameter
        for prefix, module in _modules(model).items()
        for name, parameter in module.named_parameters()
    }
