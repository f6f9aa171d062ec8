"""A learning rate of their own for the connections, without weight decay."""

import warnings
from typing import Any

import torch
from torch import nn
from transformers import Trainer

from resformer.modeling.connections import KINDS


def is_connection(parameter_name: str) -> bool:
    """Whether the parameter belongs to an added connection: it lies under the module of one of `KINDS`."""
    return not {kind.name for kind in KINDS}.isdisjoint(parameter_name.split("."))


def connection_learning_rate(model: nn.Module, learning_rate: float) -> float | None:
    """The rate of connections in training from scratch, unless it is given; `None` if nothing of them learns.

    50 times that of everything else where they are coefficients alone, the best of 1, 10 and 50 (benchmarks/study.md,
    question a), and at most 0.2, the highest that was tried. With gates, queries or tables among them, which are
    matrices, it is that of everything else.
    """
    connections = [parameter for name, parameter in model.named_parameters() if is_connection(name)]
    if not connections:
        return None
    return min(50 * learning_rate, 0.2) if all(parameter.ndim == 1 for parameter in connections) else learning_rate


def set_connection_learning_rate(optimizer: torch.optim.Optimizer, model: nn.Module, learning_rate: float) -> None:
    """Moves the connections of `model` out of the optimizer's groups into one of their own, without weight decay."""
    connections = {id(parameter) for name, parameter in model.named_parameters() if is_connection(name)}
    moved = []
    for group in optimizer.param_groups:
        moved += [parameter for parameter in group["params"] if id(parameter) in connections]
        group["params"] = [parameter for parameter in group["params"] if id(parameter) not in connections]
    trained = any(parameter.requires_grad for parameter in model.parameters() if id(parameter) in connections)
    if moved:
        optimizer.add_param_group({"params": moved, "lr": learning_rate, "weight_decay": 0.0})
    if trained and (not moved or hasattr(optimizer, "fused_backward")):  # LOMO steps in the backward pass
        told = f"{type(optimizer).__name__} has one learning rate, at which the connections learn: not {learning_rate}."
        warnings.warn(told, stacklevel=2)


class MuonAndAdamW(torch.optim.Optimizer):
    """`torch.optim.Muon` for groups that say `muon`, `torch.optim.AdamW` for the others; the state is in one place.

    Muon's steps are as large as AdamW's (arXiv 2502.16982), so that the same rates suit both.
    """

    def __init__(self, groups: Any, **options: Any):
        nothing = [nn.Parameter(torch.empty(0, 0))]
        self.muon = torch.optim.Muon(nothing, adjust_lr_fn="match_rms_adamw")
        self.adamw = torch.optim.AdamW(nothing)
        super().__init__(groups, {**self.muon.defaults, **self.adamw.defaults, "muon": False, **options})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for part in (self.muon, self.adamw):
            part.state = self.state
            part.param_groups = [group for group in self.param_groups if group["muon"] == (part is self.muon)]
            part.step()

    def set_learning_rate(self, model: nn.Module, learning_rate: float) -> None:
        """Gives the matrices of the layers to Muon, those of connections left out."""
        of_layers = [(name, p) for name, p in model.named_parameters() if ".layers." in name and p.ndim == 2]
        matrices = {id(parameter) for name, parameter in of_layers if not is_connection(name)}
        for group in [*self.param_groups]:
            moved = [parameter for parameter in group["params"] if id(parameter) in matrices]
            if moved:
                group["params"] = [parameter for parameter in group["params"] if id(parameter) not in matrices]
                more = {"lr": learning_rate, "weight_decay": group["weight_decay"], "muon": True}
                self.add_param_group({"params": moved, **more})


class ConnectionTrainer(Trainer):
    """The stock `Trainer`, in which the connections have their own learning rate, whatever the optimizer.

    Args:
        connection_learning_rate: `None`: that of everything else.
        muon_learning_rate: of Muon for the matrices of the layers; `None`: no Muon.
    """

    def __init__(
        self,
        *args: Any,
        connection_learning_rate: float | None = None,
        muon_learning_rate: float | None = None,
        **kwargs: Any,
    ):
        super().__init__(*args, **kwargs)
        self.optimizer: torch.optim.Optimizer | None
        self.connection_learning_rate, self.muon_learning_rate = connection_learning_rate, muon_learning_rate
        if muon_learning_rate is not None:
            options = {"lr": self.args.learning_rate, "eps": self.args.adam_epsilon}
            options["betas"] = self.args.adam_beta1, self.args.adam_beta2
            self.optimizer_cls_and_kwargs = MuonAndAdamW, options

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            self.optimizer = super().create_optimizer(model)
            model = self.model if model is None else model
            if self.connection_learning_rate is not None:
                set_connection_learning_rate(self.optimizer, model, self.connection_learning_rate)
            if isinstance(self.optimizer, MuonAndAdamW) and self.muon_learning_rate is not None:
                self.optimizer.set_learning_rate(model, self.muon_learning_rate)
        return self.optimizer
