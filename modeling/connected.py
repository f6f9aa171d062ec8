"""Layers with connections: what crosses from layer to layer, and where connections act in a layer.

Tensors cross layers by name, in arguments: a layer takes them and returns, in a dict, those that later layers read, so
that checkpointing, which runs layers again, and two passes at once read their own. `model.model.layers[7].reads` shows
what layer 7 reads.
"""

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from resformer.configuration import value_sources
from resformer.modeling.connection import (
    TOKENS,
    Added,
    Connection,
    Crossing,
    Reads,
    StartsAsStated,
    kinds_in,
    mixing_matrix,
)
from resformer.modeling.connections import KINDS


class Wiring:
    """The connections of a decoder, worked out once for all layers.

    Attributes:
        kinds: of each layer, the kinds of connections that it has.
        reads: of each layer, what it reads of earlier ones.
        returned: of each layer, the names of the tensors that later ones read.
    """

    def __init__(self, config: Any):
        self.config = config
        self.kinds: list[list[type[Connection]]] = [[] for _ in range(config.num_hidden_layers)]
        self.reads: list[Reads] = [{} for _ in self.kinds]
        self.returned: list[set[str]] = [set() for _ in self.kinds]
        for kind in kinds_in(config):
            for layer in kind.layers(config):
                self.kinds[layer].append(kind)
                self.reads[layer] |= kind.reads(config, layer)
        for reads in self.reads:
            for read in reads.values():
                for name, maker in read if isinstance(read, list) else [read]:
                    if maker >= 0:
                        self.returned[maker].add(name)

    def of_layer(self, layer: int) -> Any:
        """The configuration, with the shapes of a layer where layers have several."""
        return self.config.of_layer(layer) if hasattr(self.config, "of_layer") else self.config


class Places:
    """The named tensors of one layer in one forward pass, and the connections that act on them.

    Args:
        earlier: the tensors of earlier layers, by the names of `layer.reads`.
    """

    def __init__(self, layer: "ConnectedLayer", earlier: dict[str, Any] | None = None):
        self.layer = layer
        self.tensors: dict[str, Any] = {} if earlier is None else {**earlier}

    def __call__(self, place: str, tensor: torch.Tensor) -> torch.Tensor:
        """Returns what the connections make of the tensor of a place."""
        tensors, acting = self.tensors, self.layer.acting
        if place in tensors:
            added = tensors[place]  # some families flatten batch and tokens
            tensor = (tensor.reshape(added.shape) + added).view_as(tensor)
        if place in acting:
            for name in acting[place]:
                connection: Any = getattr(self.layer, name)
                tensor = connection(tensor, **{argument: tensors[argument] for argument in connection.takes})
        tensors[place] = tensor
        return tensor

    def returned(self) -> dict[str, torch.Tensor]:
        """What later layers read."""
        return {name: self.tensors[name] for name in self.layer.returned}


class ConnectedLayer(nn.Module):
    """Mixed into a decoder layer, whose `forward` takes `earlier` and returns, last, what later layers read."""

    layer_idx: int
    reads: Reads
    crossings: list[Crossing]  # all that it reads
    returned: tuple[str, ...]
    connections: tuple[str, ...]  # the names of its modules
    acting: dict[str, list[str]]  # place -> those that act there, in their order

    def add_connections(self, wiring: Wiring, layer_idx: int) -> None:
        """Gives the layer its modules."""
        self.layer_idx = layer_idx
        self.reads = wiring.reads[layer_idx]
        self.crossings = [each for read in self.reads.values() for each in (read if isinstance(read, list) else [read])]
        self.returned = tuple(sorted(wiring.returned[layer_idx]))
        kinds = [kind for kind in wiring.kinds[layer_idx] if kind.has_modules]
        self.connections = tuple(kind.name for kind in kinds)
        self.acting = {}
        for kind in kinds:
            self.add_module(kind.name, kind(wiring.of_layer(layer_idx), layer_idx))
            if kind.place is not None:
                self.acting.setdefault(kind.place, []).append(kind.name)

    def __call__(
        self, hidden_states: torch.Tensor, *args: Any, forward_pass: "ForwardPass | None" = None, **kwargs: Any
    ) -> Any:
        if forward_pass is None:
            forward_pass = ForwardPass([self])
        hidden_states, earlier = forward_pass.before(self, hidden_states)
        output, returned = super().__call__(hidden_states, *args, earlier=earlier, **kwargs)
        return forward_pass.after(self, output, returned)


class ForwardPass:
    """What crosses from layer to layer in one forward pass.

    Args:
        layers: all that run, in their order.
        decoder: has the modules of connections that are the whole decoder's.
        input_ids: of the current tokens, `(batch, tokens)`.
    """

    def __init__(
        self,
        layers: Iterable[Any],
        decoder: nn.Module | None = None,
        input_ids: torch.Tensor | None = None,
    ):
        self.tensors: dict[Crossing, Any] = {} if input_ids is None else {TOKENS: input_ids}
        self.last_reader = {crossing: layer.layer_idx for layer in layers for crossing in layer.crossings}
        self.between = []
        for kind in KINDS:
            modules = {layer.layer_idx: getattr(layer, kind.name) for layer in layers if kind.name in layer.connections}
            if modules:
                one: Any = next(iter(modules.values()))
                between = one.between(modules, getattr(decoder, kind.name, None))
                if between is not None:
                    self.between.append(between)

    def before(self, layer: ConnectedLayer, hidden_states: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
        """(what the layer reads, the tensors of earlier layers that it takes)"""
        tensors = self.tensors
        # Accelerate moves the arguments of a layer to its device, once for each layer; here once for each device.
        device = hidden_states.device
        if "_hf_hook" in layer.__dict__:
            device = getattr(layer._hf_hook, "execution_device", None) or device
        for crossing in layer.crossings:
            if crossing not in tensors:
                raise ValueError(
                    f"Layer {layer.layer_idx} reads the {crossing[0]} of layer {crossing[1]}, which has been removed, "
                    "comes later or has not run: a layer cannot be called alone."
                )
            if tensors[crossing].device != device:
                tensors[crossing] = tensors[crossing].to(device)
        earlier = {
            name: tuple([tensors[each] for each in read]) if isinstance(read, list) else tensors[read]
            for name, read in layer.reads.items()
        }
        for crossing in layer.crossings:
            if self.last_reader[crossing] == layer.layer_idx:
                tensors.pop(crossing, None)
        for between in self.between:
            hidden_states = between.before(layer.layer_idx, hidden_states, earlier)
        return hidden_states, earlier

    def after(
        self, layer: ConnectedLayer, hidden_states: torch.Tensor, returned: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        """Returns what is read in place of the layer's output."""
        for name, tensor in returned.items():
            self.tensors[name, layer.layer_idx] = tensor
        for between in self.between:
            hidden_states = between.after(layer.layer_idx, hidden_states)
        return hidden_states


def value_matrix(config: Any, modules: Mapping[int, Any], of_decoder: Any) -> torch.Tensor:
    """M, `(N, N)`, of the value residuals of layers."""
    layers = config.num_hidden_layers
    return mixing_matrix(layers, layers, modules, of_decoder)[value_sources(config)]


def depth_matrix(config: Any, modules: Mapping[int, Any]) -> torch.Tensor:
    """D, `(N, N + 1)`, of the depth averages of layers."""
    layers = config.num_hidden_layers
    return mixing_matrix(layers, layers + 1, modules)


def added_modules(model: nn.Module) -> dict[str, Added]:
    """Name -> the module of each connection, without the modules within it."""
    found: dict[str, Added] = {}
    for name, module in model.named_modules():
        if isinstance(module, Added) and not any(name.startswith(f"{outer}.") for outer in found):
            found[name] = module
    return found


def modules_of(layers: Iterable[Any], name: str) -> dict[int, Any]:
    """Number of a layer -> its module of that name, of those that have one."""
    return {n: getattr(layer, name) for n, layer in enumerate(layers) if name in getattr(layer, "connections", ())}


def not_reentrant(checkpointing: Callable[..., Any]) -> Callable[..., Any]:
    """The function of gradient checkpointing, which takes None for reentrant; PEFT leaves it at that."""
    if getattr(checkpointing, "keywords", {}).get("use_reentrant"):
        raise ValueError(
            "Reentrant gradient checkpointing loses the gradients of tensors that cross layers: leave "
            "`gradient_checkpointing_kwargs` out, or set {'use_reentrant': False} in it."
        )
    return functools.partial(checkpointing, use_reentrant=False)


class ConnectedModel(PreTrainedModel):
    """Mixed into a model whose layers have connections."""

    def _set_gradient_checkpointing(
        self, enable: bool = True, gradient_checkpointing_func: Callable[..., Any] = checkpoint, **kwargs: Any
    ) -> None:
        if enable:
            gradient_checkpointing_func = not_reentrant(gradient_checkpointing_func)
        super()._set_gradient_checkpointing(enable, gradient_checkpointing_func, **kwargs)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, StartsAsStated):
            module.reset_parameters()

    def _resize_token_embeddings(
        self, new_num_tokens: int | None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Module:
        for module in self.modules():
            for name in module.tables if isinstance(module, Added) else ():
                table: Any = module.get_submodule(name.rpartition(".")[0])
                rows = table.num_embeddings
                self._get_resized_embeddings(table, new_num_tokens, pad_to_multiple_of, mean_resizing)
                if not mean_resizing:
                    table.reset_parameters(rows)
        return super()._resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)

    def keep_full_precision(self) -> None:
        """Keeps coefficients in float32 in a model of lower precision, which would round away what they learn."""
        strict, linear = (set(getattr(self, f"_keep_in_fp32_modules{part}") or ()) for part in ("_strict", ""))
        for name, module in added_modules(self).items():
            kind = name.rpartition(".")[2]
            strict |= {f"{kind}.{each}" for each, _ in module.named_parameters() if each not in module.tables}
            # Quantisers, which would replace linear layers, look in the other one; torchao for the names of weights,
            # which a pattern from the beginning matches.
            projections = [f"{kind}.{each}" for each, child in module.named_modules() if isinstance(child, nn.Linear)]
            linear |= {f"{start}{each}" for each in projections for start in ("", ".*")}
        self._keep_in_fp32_modules_strict, self._keep_in_fp32_modules = strict, linear
