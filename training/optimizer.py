"""A learning rate of their own for the connections, without weight decay."""

import warnings
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainerCallback

from resformer.modeling.modeling_resformer import KINDS


def is_connection(parameter_name: str) -> bool:
    """Whether the parameter belongs to an added connection: it lies under the module of one of `KINDS`."""
    return not {kind.module for kind in KINDS}.isdisjoint(parameter_name.split("."))


def set_connection_learning_rate(optimizer: torch.optim.Optimizer, model: nn.Module, learning_rate: float) -> None:
    """Moves the connections of `model` out of the optimizer's groups into one of their own, without weight decay."""
    connections = {id(parameter) for name, parameter in model.named_parameters() if is_connection(name)}
    moved = []
    for group in optimizer.param_groups:
        moved += [parameter for parameter in group["params"] if id(parameter) in connections]
        group["params"] = [parameter for parameter in group["params"] if id(parameter) not in connections]
    if moved:
        optimizer.add_param_group({"params": moved, "lr": learning_rate, "weight_decay": 0.0})
    elif any(parameter.requires_grad for parameter in model.parameters() if id(parameter) in connections):
        warnings.warn(
            f"{type(optimizer).__name__} does not hold the connections in its groups: they learn at its learning rate, "
            f"not at {learning_rate}.",
            stacklevel=2,
        )


class ConnectionTrainer(Trainer):
    """The stock `Trainer`, in which the connections have their own learning rate, whatever the optimizer.

    Args:
        connection_learning_rate: `None`: that of everything else.
    """

    def __init__(self, *args: Any, connection_learning_rate: float | None = None, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.optimizer: torch.optim.Optimizer | None
        self.connection_learning_rate = connection_learning_rate

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            self.optimizer = super().create_optimizer(model)
            if self.connection_learning_rate is not None:
                set_connection_learning_rate(
                    self.optimizer, self.model if model is None else model, self.connection_learning_rate
                )
        return self.optimizer


class FullPrecisionConnections(TrainerCallback):
    """Undoes the rounding of connections to bfloat16 by TRL's trainers, where a 4-bit or 8-bit model has an adapter.

    A coefficient near 1 moves by less in a step than bfloat16 can represent, and would never change.
    """

    def on_init_end(self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **kwargs: Any) -> None:
        for name, wrapper in model.named_modules() if model is not None else ():
            parts = dict(wrapper.named_children())
            if not is_connection(name) or parts.keys() != {"original_module", "modules_to_save"}:  # of PEFT
                continue
            for trained in parts["modules_to_save"].children():
                for parameter, original in zip(
                    trained.parameters(), parts["original_module"].parameters(), strict=True
                ):
                    unchanged = parameter == original.to(parameter.dtype)
                    parameter.data = torch.where(unchanged, original, parameter.to(original.dtype)).detach()
