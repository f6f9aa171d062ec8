"""Models whose layers have connections."""

import copy
import functools
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.modeling_layers import GenericForSequenceClassification, GenericForTokenClassification
from transformers.utils import output_capturing

from resformer.configuration.connected_config import ConnectedConfig
from resformer.configuration.methods import CONNECTION_FIELDS
from resformer.modeling.acting import ConnectedLayer, change_class, keep_packed_sequences_apart
from resformer.modeling.any_decoder import Decoder, text_config
from resformer.modeling.connection import Added, StartsAsStated, set_initial_values, tensors_of, with_every_field
from resformer.modeling.growing_cache import GrowingCache
from resformer.modeling.in_vllm import prepare_for_vllm
from resformer.modeling.installing import add_connections
from resformer.modeling.matrices import depth_mixing_matrix, value_mixing_matrix
from resformer.modeling.versions import CACHE, record_rejected_tokens

_UNSET = object()


def added_modules(model: nn.Module) -> dict[str, Added]:
    """Name -> the module of each connection, without the modules within it."""
    found: dict[str, Added] = {}
    for name, module in model.named_modules():
        if isinstance(module, Added) and not any(name.startswith(f"{outer}.") for outer in found):
            found[name] = module
    return found


def not_reentrant(checkpointing: Callable[..., Any]) -> Callable[..., Any]:
    """The function of gradient checkpointing, which takes None for reentrant; PEFT leaves it at that."""
    if getattr(checkpointing, "keywords", {}).get("use_reentrant"):
        raise ValueError(
            "Reentrant gradient checkpointing loses the gradients of tensors that cross layers: leave "
            "`gradient_checkpointing_kwargs` out, or set {'use_reentrant': False} in it."
        )
    return functools.partial(checkpointing, use_reentrant=False)


@torch.no_grad()
def initialize(module: Any) -> None:
    """Sets the initial values of what was not loaded, however the module sets them."""
    every = tensors_of(module).values()
    loaded = [each for each in every if getattr(each, "_is_hf_initialized", False)]
    if every and len(loaded) == len(every):
        return
    kept = [each.clone() for each in loaded]
    set_initial_values(module)
    for each, value in zip(loaded, kept, strict=True):
        each.copy_(value)


def of_the_text(config: Any, text_class: Any) -> Any:
    """The configuration of the text model, with the connections that `config` has, if it is of more; else `config`."""
    is_of_more = isinstance(config, ConnectedConfig) and not isinstance(config, text_class)
    if not is_of_more:
        return config
    text = copy.deepcopy(config.get_text_config())
    text.__class__ = text_class
    for name in vars(config).keys() & {*CONNECTION_FIELDS, "base_model", "unused_weights"}:
        setattr(text, name, getattr(config, name))
    return text


class ConnectedModel(PreTrainedModel):
    """Mixed into a model of a family, which it leaves what it is but for the connections of its decoder."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any):
        super().__init__(config, *args, **kwargs)
        if not any(isinstance(module, ConnectedLayer) for module in self.modules()):  # of a model within it
            self.add_connections(Decoder(self))

    # Of a configuration of text and images, the Auto class makes some text models of the family too.

    @classmethod
    def from_pretrained(cls, *args: Any, config: Any = None, **kwargs: Any) -> Any:
        return super().from_pretrained(*args, config=of_the_text(config, cls.config_class), **kwargs)

    @classmethod
    def _from_config(cls, config: Any, **kwargs: Any) -> Any:
        return super()._from_config(of_the_text(config, cls.config_class), **kwargs)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        family: Any = cls.family_class().forward
        if family is nn.Module.forward:
            return

        @functools.wraps(family)  # its signature is read
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            keep_packed_sequences_apart(kwargs)
            passes = self.__dict__.get("passes")  # of the decoder, if this is it
            return family(self, *args, **kwargs) if passes is None else passes.run(family, self, *args, **kwargs)

        cls.forward = forward

    @classmethod
    def family_class(cls) -> type[PreTrainedModel]:
        """The class that it is without connections."""
        plain = (each for each in cls.__mro__ if issubclass(each, PreTrainedModel))
        return next(each for each in plain if each is PreTrainedModel or not issubclass(each, ConnectedModel))

    def add_connections(self, decoder: Decoder) -> None:
        names = ("_tp_plan", "_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
        self._before_connections = {name: vars(self).get(name, _UNSET) for name in names}
        if names := getattr(self.config, "unused_weights", None):  # in files that were linked, not copied
            ignored = getattr(self, "_keys_to_ignore_on_load_unexpected", None) or ()
            self._keys_to_ignore_on_load_unexpected = {*ignored, *(f"{re.escape(name)}$" for name in names)}
        view = decoder.view(self.config)
        if view.connections:
            self.config.connections = with_every_field(view.connections)
        if isinstance(decoder.module, PreTrainedModel) and not isinstance(decoder.module, ConnectedModel):
            become_connected(decoder.module, type(self.config))
        add_connections(self, decoder, view)
        plan: dict[str, str] = getattr(self, "_tp_plan", None) or {}
        own = decoder.tp_plan(view, plan)
        prepare_for_vllm(text_config(self.config), view, own)
        self._tp_plan = plan | own
        self.keep_full_precision()

    def value_mixing_matrix(self) -> torch.Tensor:
        """`resformer.value_mixing_matrix` of this model."""
        return value_mixing_matrix(self)

    def depth_mixing_matrix(self) -> torch.Tensor:
        """`resformer.depth_mixing_matrix` of this model."""
        return depth_mixing_matrix(self)

    def forget_connections(self) -> None:
        """Undoes what `add_connections` has set of this module."""
        own = self.__dict__
        for name, value in own.pop("_before_connections", {}).items():
            own.pop(name, None)
            if value is not _UNSET:
                setattr(self, name, value)

    @classmethod
    def is_custom_code(cls) -> bool:
        return False  # the family's own initialisation runs, of modules that have no parameters, too

    # Transformers reads in the file of a class which implementations it may choose, and this is not the family's.

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        return cls.family_class()._can_set_attn_implementation()

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return cls.family_class()._can_set_experts_implementation()

    def initialize_weights(self) -> None:
        super().initialize_weights()
        for module in self.modules():  # models within this one, of the family, know nothing of connections
            if isinstance(module, StartsAsStated):
                initialize(module)

    def _replicate_for_data_parallel(self) -> Any:
        raise NotImplementedError("nn.DataParallel is not supported: use one process a device.")

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        config: Any = self.config
        cache, shares = model_kwargs.get(CACHE), config.key_sources is not None or config.value_sources is not None
        if shares and generation_config.cache_implementation == "quantized":
            # Transformers refuses layers that store nothing. Here they are never updated.
            storing = copy.copy(config.get_text_config(decoder=True))
            storing.key_sources = None
            generation_config.cache_config = {"config": storing, **(generation_config.cache_config or {})}
        is_chosen_by_caller = cache is not None or generation_config.cache_implementation is not None
        super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)
        if not is_chosen_by_caller and type(model_kwargs.get(CACHE)) is DynamicCache:
            model_kwargs[CACHE] = cache = GrowingCache(config)
            if generation_config.is_assistant:  # rejected tokens are cropped
                record_rejected_tokens(cache)

    def _get_static_cache_init_shape(self) -> Any:
        # Early allocation would give full-size memory to layers that share keys or values.
        config: Any = self.config
        if config.key_sources is not None or config.value_sources is not None:
            return None
        return super()._get_static_cache_init_shape()

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
            initialize(module)

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


_loss_of_task = PreTrainedModel.loss_function.fget  # by this name: torch.compile refuses super() of a property


def become_connected(model: Any, config: type) -> None:
    """Gives a model the class that its family's has with connections."""
    from resformer.modeling.families import model_class  # whose classes are subclasses of the one above

    family: Any = type(model)
    change_class(model, model_class(family, config))
    dict.__setitem__(output_capturing._CAN_RECORD_REGISTRY, str(type(model)), model._can_record_outputs)


#: Heads of Transformers that leave `num_items_in_batch` out.
GENERIC_HEADS = (GenericForSequenceClassification, GenericForTokenClassification)


class WholeStepLoss:
    """Of a step of several passes, the Trainer adds up the losses of all: each is divided by the labels of the step.

    The generic heads leave `num_items_in_batch` out, and the gradient would be as many times too large.
    """

    _items: torch.Tensor | int | None = None

    @PreTrainedModel.loss_function.getter  # the setter stays: a user may give a loss of their own
    def loss_function(self) -> Callable[..., torch.Tensor]:
        mean, items = _loss_of_task(self), self._items

        def loss(*given: Any, **named: Any) -> torch.Tensor:
            labels = named["labels"] if "labels" in named else given[1]
            value: torch.Tensor = mean(*given, **named)
            return value if items is None else value * labels.ne(-100).sum() / items

        return loss

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        forward = cls.forward  # type: ignore[attr-defined]

        @functools.wraps(forward)  # the Trainer reads the names of the arguments
        def counted(self: Any, *given: Any, num_items_in_batch: Any = None, **named: Any) -> Any:
            self._items = num_items_in_batch
            return forward(self, *given, **named)

        cls.forward = counted  # type: ignore[attr-defined]
