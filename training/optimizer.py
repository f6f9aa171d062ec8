"""Groups of parameters: rates of their own for connections, no decay of what is no matrix, Muon for matrices."""

import functools
import math
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.conv import _ConvNd
from transformers import PreTrainedModel, Trainer

from resformer.errors import CheckpointError
from resformer.modeling.connection import overrides
from resformer.modeling.connections import KINDS
from resformer.safetensors_format import read_shard

#: What the parameters of connections are. Each kind has a rate.
COEFFICIENTS, GATES, TABLES = CONNECTIONS = ("coefficients", "gates", "tables")
#: The token embedding, which can have a rate, too.
EMBEDDINGS = "embeddings"

#: Modules that torch puts around others.
_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")

#: Names of parameters, or of their modules, that are not decayed and get no Muon, whatever their shape.
_NO_MATRIX = re.compile(r"(norm|sink|lambda|a_log)[^.]*(\.[^.]+)?$")


def is_connection(parameter_name: str) -> bool:
    """Whether the parameter belongs to an added connection: it lies under the module of one of `KINDS`.

    A user's class may have the name of a module deep within some family (`experts`): its own follow a layer's number,
    but for the decoder's.
    """
    parts = [part for part in parameter_name.split(".") if part not in _WRAPPERS]
    of_layers = {part for number, part in pairwise(parts) if number.isdecimal()}
    anywhere = [kind for kind in KINDS if kind.fields_of or overrides(kind, "of_decoder")]
    return any(kind.name in (parts if kind in anywhere else of_layers) for kind in KINDS)


def connections_by_kind(model: nn.Module) -> dict[str, list[nn.Parameter]]:
    """`CONNECTIONS` -> parameters: tables are embeddings, gates have matrices or the name; others weigh states."""
    kinds: dict[str, list[nn.Parameter]] = {kind: [] for kind in CONNECTIONS}
    for name, parameter in model.named_parameters():
        if is_connection(name):
            owner = model.get_submodule(name.rpartition(".")[0])
            is_gate = parameter.ndim > 1 or re.search(r"gate|quer", name.rpartition("layers.")[2])
            kinds[TABLES if isinstance(owner, nn.Embedding) else GATES if is_gate else COEFFICIENTS].append(parameter)
    return kinds


def scratch_rates(
    learning_rate: float, method: str | None, connection_learning_rate: float | None = None
) -> dict[str, float]:
    """The rates of `CONNECTIONS` in training from scratch.

    Coefficients: 50 times that of everything else, the best of 1, 10 and 50 for two methods (benchmarks/study.md,
    question a), and at most 0.2, the highest that was tried; or what is given. Gates: as everything else. Tables too,
    but for nanochat's, whose source has 19 times that of its matrices.
    """
    coefficients = connection_learning_rate or min(50 * learning_rate, 0.2)
    tables = learning_rate * (19 if method == "nanochat" else 1)
    return {COEFFICIENTS: coefficients, GATES: learning_rate, TABLES: tables}


def _move(optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter], **options: Any) -> bool:
    """Moves parameters out of the optimizer's groups into one of their own; `False` if it has none of them."""
    chosen, moved = {id(parameter) for parameter in parameters}, list[nn.Parameter]()
    for group in optimizer.param_groups:
        moved += [parameter for parameter in group["params"] if id(parameter) in chosen]
        group["params"] = [parameter for parameter in group["params"] if id(parameter) not in chosen]
    if moved:
        optimizer.add_param_group({"params": moved, **options})
    return bool(moved)


def set_connection_rates(optimizer: torch.optim.Optimizer, model: nn.Module, rates: Mapping[str, float]) -> None:
    """Moves what has one of `rates` out of the optimizer's groups into groups of its own, without weight decay."""
    by_kind = connections_by_kind(model)
    if EMBEDDINGS in rates:
        by_kind[EMBEDDINGS] = [cast(PreTrainedModel, model).get_input_embeddings().weight]
    for kind, parameters in by_kind.items():
        if kind not in rates:
            continue
        moved = _move(optimizer, parameters, lr=rates[kind], weight_decay=0.0)
        trained = any(parameter.requires_grad for parameter in parameters)
        if trained and (not moved or hasattr(optimizer, "fused_backward")):  # LOMO steps in the backward pass
            name, rate = type(optimizer).__name__, rates[kind]
            warnings.warn(f"{name} has one learning rate, at which the {kind} learn: not {rate}.", stacklevel=2)


def is_decayed(name: str, parameter: nn.Parameter) -> bool:
    """Matrices are: no vectors, norms, sinks or lambdas, nor connections."""
    alone = parameter.ndim < 2 or _NO_MATRIX.search(name.lower()) or is_connection(name)
    return not alone and not getattr(parameter, "_no_weight_decay", False)


def muon_matrices(model: PreTrainedModel) -> tuple[dict[str, nn.Parameter], dict[str, nn.Parameter]]:
    """The matrices of the layers, wherever these are, and all others but the model's ends and connections.

    Of three dimensions, the first is taken for that of experts.
    """
    both = model.get_input_embeddings(), model.get_output_embeddings()
    ends = {id(each.weight) for each in both if each is not None}
    taken, left = dict[str, nn.Parameter](), dict[str, nn.Parameter]()
    for name, parameter in model.named_parameters():
        if id(parameter) in ends or not is_decayed(name, parameter):
            continue
        in_layer = any(part.isdecimal() for part in name.split("."))
        is_matrix = parameter.ndim in (2, 3) and min(parameter.shape[-2:]) > 1
        is_matrix = is_matrix and not isinstance(model.get_submodule(name.rpartition(".")[0]), (nn.Embedding, _ConvNd))
        (taken if in_layer and is_matrix else left)[name] = parameter
    return taken, left


def check_muon(model: PreTrainedModel) -> str:
    """A note on the share of the matrices that Muon takes; raises ValueError if it takes none."""
    taken, left = muon_matrices(model)
    count, others = (sum(parameter.numel() for parameter in each.values()) for each in (taken, left))
    if not count:
        raise ValueError(f"optim is muon, and {type(model).__name__} has no matrix in its layers; leave --optim out.")
    names = ", ".join(sorted({re.sub(r"\.\d+\.", ".*.", name) for name in left})[:5])
    note = f"muon: {count / (count + others):.1%} of the matrices but embeddings and head"
    return f"{note}; AdamW: {names}" if left else note


class MuonAndAdamW(torch.optim.Optimizer):
    """`torch.optim.Muon` for groups that say `muon`, `torch.optim.AdamW` for the others; the state is in one place.

    Muon's steps are as large as AdamW's (arXiv 2502.16982), so that the same rates suit both. Of a parameter of three
    dimensions, each expert's matrix is orthogonalised by itself.
    """

    def __init__(self, groups: Any, **options: Any):
        nothing = [nn.Parameter(torch.empty(0, 0))]
        self.muon = torch.optim.Muon(nothing, adjust_lr_fn="match_rms_adamw")
        self.adamw = torch.optim.AdamW(nothing)
        super().__init__(groups, {**self.muon.defaults, **self.adamw.defaults, "muon": False, **options})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.adamw.state = self.state
        self.adamw.param_groups = [group for group in self.param_groups if not group["muon"]]
        self.adamw.step()
        groups = [group for group in self.param_groups if group["muon"]]
        self.muon.state = dict(self.state)  # type: ignore[assignment]
        self.muon.param_groups = [{**group, "params": [*self._matrices(group["params"])]} for group in groups]
        self.muon.step()

    def _matrices(self, parameters: Any) -> Iterator[torch.Tensor]:
        """Each matrix, with its gradient, and its momentum as a view of that of its parameter."""
        for parameter in parameters:
            if parameter.grad is None:
                continue
            if "momentum_buffer" not in self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter.grad)
            momentum = self.state[parameter]["momentum_buffer"]
            if parameter.ndim == 2:
                self.muon.state[parameter] = self.state[parameter]
                yield parameter
                continue
            for index, matrix in enumerate(parameter.detach()):
                matrix.grad = parameter.grad[index]
                self.muon.state[matrix] = {"momentum_buffer": momentum[index]}
                yield matrix


class ConnectionTrainer(Trainer):
    """The stock `Trainer`, in which the connections have their own learning rates, whatever the optimizer.

    Matrices alone are decayed. Weights that have another name in a checkpoint's files, such as those of most experts,
    are loaded too; the stock `Trainer` leaves them as they were.

    Args:
        connection_learning_rate: of all connections, or by `CONNECTIONS` and `EMBEDDINGS`; `None`, and of what is not
            named: that of everything else.
        muon_learning_rate: of Muon for the matrices of the layers; `None`: no Muon.

    Raises:
        ValueError: a rate is below 0, not finite or of another name, or `optimizers` has an optimizer, which has its
            own rates.
    """

    def __init__(
        self,
        *args: Any,
        connection_learning_rate: float | Mapping[str, float] | None = None,
        muon_learning_rate: float | None = None,
        **kwargs: Any,
    ):
        super().__init__(*args, **kwargs)
        self.optimizer: torch.optim.Optimizer | None
        rates = connection_learning_rate
        for name, given in (("connection_learning_rate", rates), ("muon_learning_rate", muon_learning_rate)):
            each = given.values() if isinstance(given, Mapping) else [] if given is None else [given]
            if not all(isinstance(rate, (int, float)) and 0 <= rate < math.inf for rate in each):
                raise ValueError(f"{name} is {given}; expected 0 or more.")
            if given is not None and self.optimizer is not None:
                raise ValueError(f"{name} is {given}, and `optimizers` has an optimizer of its own; leave one out.")
        kinds = *CONNECTIONS, EMBEDDINGS
        if isinstance(rates, Mapping) and (unknown := sorted(rates.keys() - {*kinds})):
            raise ValueError(f"connection_learning_rate has {', '.join(unknown)}; expected {', '.join(kinds)}.")
        if rates is not None and not isinstance(rates, Mapping):
            if not any(is_connection(name) for name, _ in self.model.named_parameters()):
                warnings.warn(f"connection_learning_rate is {rates}, and no connection has parameters.", stacklevel=2)
            rates = dict.fromkeys(CONNECTIONS, rates)
        self.rates = rates
        self.muon_learning_rate = muon_learning_rate
        if muon_learning_rate is not None:
            options = {"lr": self.args.learning_rate, "eps": self.args.adam_epsilon}
            options["betas"] = self.args.adam_beta1, self.args.adam_beta2
            self.optimizer_cls_and_kwargs = MuonAndAdamW, options

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        return [name for name, parameter in model.named_parameters() if is_decayed(name, parameter)]

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            self.optimizer = super().create_optimizer(model)
            model = self.model if model is None else model
            if self.rates is not None:
                set_connection_rates(self.optimizer, model, self.rates)
            if isinstance(self.optimizer, MuonAndAdamW) and self.muon_learning_rate is not None:
                matrices, _ = muon_matrices(self.accelerator.unwrap_model(model))
                options = {"lr": self.muon_learning_rate, "weight_decay": self.args.weight_decay, "muon": True}
                _move(self.optimizer, matrices.values(), **options)
        return self.optimizer

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        model = self.model if model is None else model
        if self._names_differ(resume_from_checkpoint, model):
            load_weights(cast(PreTrainedModel, model), resume_from_checkpoint)
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        if self._names_differ(self.state.best_model_checkpoint, self.model):
            load_weights(cast(PreTrainedModel, self.model), self.state.best_model_checkpoint)
        else:
            super()._load_best_model()

    def _names_differ(self, folder: Any, model: Any) -> bool:
        """Whether the files lack a name of the model's; `False` for adapters, and where processes hold parts."""
        parallel = any(isinstance(parameter, DTensor) for parameter in model.parameters())
        if not isinstance(model, PreTrainedModel) or parallel or self.is_fsdp_enabled or self.is_deepspeed_enabled:
            return False
        found = {name for path in Path(folder).glob("model*.safetensors") for name in read_shard(path).names}
        asked = model.state_dict().keys() - getattr(model, "all_tied_weights_keys", {}).keys()
        return bool(found) and not asked <= found


def load_weights(model: PreTrainedModel, folder: str | Path) -> None:
    """Sets the weights of a model to those of a checkpoint of its class, whatever its files name them.

    Raises:
        CheckpointError: it lacks some, or has others.
    """
    weights = (p.dtype for name, p in model.named_parameters() if p.is_floating_point() and not is_connection(name))
    dtype = functools.reduce(torch.promote_types, weights)
    saved, info = type(model).from_pretrained(folder, config=model.config, dtype=dtype, output_loading_info=True)
    if wrong := {key: sorted(info[key])[:3] for key in ("missing_keys", "unexpected_keys") if info[key]}:
        raise CheckpointError(
            f"{folder}: is no checkpoint of this {type(model).__name__}: {wrong}. Begin again, or take another."
        )
    model.load_state_dict(saved.state_dict())
