"""Optimizer groups: the added connections learn at a rate of their own, and are never decayed."""

from typing import Any

import torch
from torch import nn
from transformers import Trainer

__all__ = ["ConnectionTrainer", "is_connection", "parameter_groups"]


def is_connection(parameter_name: str) -> bool:
    """Whether the parameter belongs to an added connection: it lies under `value_residual` or `depth_average`."""
    return not {"value_residual", "depth_average"}.isdisjoint(parameter_name.split("."))


def parameter_groups(
    model: nn.Module, *, learning_rate: float, connection_learning_rate: float, weight_decay: float
) -> list[dict[str, Any]]:
    """Groups for `torch.optim`: decayed weights, norms and biases, and the connections, in this order; none is empty.

    The stock Trainer's own rule says what is decayed, and exempts the connections too.
    """
    decayed = set(Trainer.get_decay_parameter_names(None, model))
    groups: dict[str, list[nn.Parameter]] = {"decayed": [], "plain": [], "connections": []}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            kind = "connections" if is_connection(name) else "decayed" if name in decayed else "plain"
            groups[kind].append(parameter)
    settings = {
        "decayed": {"lr": learning_rate, "weight_decay": weight_decay},
        "plain": {"lr": learning_rate, "weight_decay": 0.0},
        "connections": {"lr": connection_learning_rate, "weight_decay": 0.0},
    }
    return [{"params": parameters, **settings[kind]} for kind, parameters in groups.items() if parameters]


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
            model = self.model if model is None else model
            rate, own = self.args.learning_rate, self.connection_learning_rate
            groups = parameter_groups(
                model,
                learning_rate=rate,
                connection_learning_rate=rate if own is None else own,
                weight_decay=self.args.weight_decay,
            )
            optimizer_class, settings = self.get_optimizer_cls_and_kwargs(self.args, model)
            self.optimizer = optimizer_class(groups, **settings)
        return self.optimizer
