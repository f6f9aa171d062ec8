"""Names and shapes of a model's tensors, from a model of one layer: 80 layers take 0.4 s, even on the meta device."""

import torch

from resformer.configuration import ResFormerConfig, key_sources, value_sources
from resformer.configuration.methods import without_connections
from resformer.modeling.modeling_resformer import ResFormerForCausalLM
from resformer.modeling.wiring import connection_modules

__all__ = ["parameter_shapes"]


def parameter_shapes(config: ResFormerConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor in the state dict of `ResFormerForCausalLM`, both ends of a tie among them."""
    one = without_connections(
        config,
        num_hidden_layers=1,
        layer_types=config.layer_types and config.layer_types[:1],
        no_rope_layers=config.no_rope_layers and config.no_rope_layers[:1],
    )
    shapes = {}
    with torch.device("meta"):
        for name, tensor in ResFormerForCausalLM(one).state_dict().items():
            _, in_layer, rest = name.partition("model.layers.0.")
            for layer in range(config.num_hidden_layers) if in_layer else [0]:
                reads_keys = key_sources(config)[layer] != layer and rest.startswith("self_attn.k_")
                reads_values = value_sources(config)[layer] != layer and rest.startswith("self_attn.v_")
                if not (reads_keys or reads_values):
                    shapes[name.replace("model.layers.0.", f"model.layers.{layer}.")] = tuple(tensor.shape)
        for prefix, module in connection_modules(config).items():
            shapes |= {f"{prefix}.{name}": tuple(tensor.shape) for name, tensor in module.named_parameters()}
    return shapes
