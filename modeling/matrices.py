"""Which earlier values and states each layer of a model reads: two matrices, of any model."""

from typing import Any

import torch

from resformer.modeling.any_decoder import text_config
from resformer.modeling.connection import mixing_matrix


def value_mixing_matrix(model: torch.nn.Module) -> torch.Tensor:
    """M, `(N, N)`, of any model: layer n attends to V' = sum_m M[n, m] V_m of the raw values V_m.

    float32, detached, on the CPU; the identity without connections; NaN where the mix depends on the token. The row of
    a layer that shares values is its source's.
    """
    owner, layers = decoder_of(model)
    of_decoder = getattr(owner, "value_residual", None)
    matrix = mixing_matrix(len(layers), len(layers), modules_of(layers, "value_residual"), of_decoder)
    config: Any = model.config
    return matrix[getattr(config, "value_sources", None) or list(range(len(layers)))]


def depth_mixing_matrix(model: torch.nn.Module) -> torch.Tensor:
    """D, `(N, N + 1)`, of any model: block n + 1, or the final norm, reads Y_n = sum_j D[n, j] X_j.

    X_0 are the embeddings, X_{j+1} the raw output of block j. float32, detached, on the CPU.
    """
    _, layers = decoder_of(model)
    return mixing_matrix(len(layers), len(layers) + 1, modules_of(layers, "depth_average"))


def decoder_of(model: Any) -> tuple[Any, list[Any]]:
    """(what has the layers, the layers with connections); empty modules for those of a model without connections."""
    if not isinstance(model, torch.nn.Module):
        raise ValueError(f"A {type(model).__name__} is no model: give the model that has the connections.")
    for module in model.modules():
        for child in module.children():
            if isinstance(child, torch.nn.ModuleList):  # whose layers may be wrapped or compiled
                found = [next((each for each in layer.modules() if hasattr(each, "known")), None) for layer in child]
                if found and all(each is not None for each in found):
                    return module, found
    return torch.nn.Module(), [torch.nn.Module()] * text_config(model.config).num_hidden_layers


def modules_of(layers: list[Any], name: str) -> dict[int, Any]:
    """Number of a layer -> its module of that name, of those that have one."""
    return {n: getattr(layer, name) for n, layer in enumerate(layers) if name in getattr(layer, "connections", ())}
