"""The parameters that connections add: at their start, as a checkpoint holds them, and alone in a folder.

Such a folder has a few kilobytes, which `connect(model, folder)` adds to the model that they are for.
"""

import copy
import functools
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.initialization import no_init_weights
from transformers.utils import logging

from resformer.configuration.methods import CONNECTION_FIELDS, connections_of
from resformer.errors import CheckpointError, one_line
from resformer.files import writing
from resformer.model_cards import Alone, model_card
from resformer.model_cards.heads import auto_class
from resformer.modeling.connected import ConnectedModel, added_modules
from resformer.modeling.connecting import check_whole
from resformer.modeling.connection import Connection, set_initial_values
from resformer.modeling.connections import KINDS
from resformer.modeling.matrices import decoder_of
from resformer.modeling.saved_connections import coefficients, configuration_digest, weights_have_changed
from resformer.names import CARD, CONFIG, CONNECTIONS
from resformer.safetensors_format import Shard
from resformer.version import __version__

logger = logging.get_logger(__name__)


def meta_model(config: Any) -> PreTrainedModel:
    """A model of the configuration, without memory for its parameters.

    It is one for all configurations that differ in nothing that such a model has, and may be used elsewhere too.
    """
    left_out = ("base_model", "dtype", "transformers_version")
    try:
        known = {key: value for key, value in config.to_dict().items() if key not in left_out}
        return _meta_model(config.__class__, json.dumps(known, sort_keys=True, default=str))
    except Exception as error:  # torch's and Transformers' any, for values that no validator looks at
        raise CheckpointError(
            f"Transformers makes no model of it ({type(error).__name__}: {one_line(error)})."
        ) from error


@functools.lru_cache(maxsize=8)
def _meta_model(config_class: Any, settings: str) -> PreTrainedModel:
    config = config_class.from_dict(json.loads(settings))
    with no_init_weights(), torch.device("meta"):
        model: PreTrainedModel = auto_class(config)._model_mapping[type(config)](config)
    model.tie_weights()  # a head that is the embedding counts once
    return model


def stored_names(model: PreTrainedModel, names: Iterable[str]) -> dict[str, str]:
    """Name in the model -> in a checkpoint: some families, Gemma 3 for one, have others on the disk.

    What a family fuses when it is loaded, experts for one, has several names there, and is left out.
    """
    known = {}
    for name in names:
        stored = [*revert_weight_conversion(model, {name: torch.empty(0)})]
        if len(stored) == 1:
            known[name] = str(stored[0])
    return known


def added_shapes(config: Any, *, tables: bool = True, alone: bool = False) -> dict[str, tuple[int, ...]]:
    """Name in a checkpoint, or in a file of connections alone, -> shape of every added tensor.

    Tables of value embeddings, which are large and not needed for mixing matrices, are among them with `tables`.
    """
    model = meta_model(config)
    names, state = _names(model, tables=tables, alone=alone), model.state_dict()
    return {stored: tuple(state[name].shape) for stored, name in names.items()}


def added_kinds(config: Any, before: Any) -> list[type[Connection]]:
    """The kinds of connections that a model of `config` has beyond one of `before`, its source."""
    shapes = added_shapes(config)
    for name, shape in added_shapes(before).items():
        if shapes.get(name) != shape:
            raise CheckpointError(
                f"{name} of the source has shape {list(shape)}, and the result has no place for it: the connections "
                "that are added leave other layers to mix. Convert the original instead."
            )
    return [kind for kind in KINDS if kind.is_in(config) and not kind.is_in(before)]


def initial_connections(config: Any, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Name in a checkpoint -> the added tensor at its start; `dtype` is the model's, which tables have."""
    model = copy.deepcopy(meta_model(config))
    modules = added_modules(model)
    for outer in modules.values():
        for name in outer.tables:
            outer.get_submodule(name.rpartition(".")[0]).to(dtype)
        outer.to_empty(device="cpu")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # tables may start with random numbers: two runs write the same
        for outer in modules.values():
            set_initial_values(outer)
    state = model.state_dict()
    return {stored: state[name] for stored, name in _names(model).items()}


def read_connections(
    config: Any, shards: Iterable[Shard], *, tables: bool = True, alone: bool = False
) -> PreTrainedModel:
    """`meta_model` with the checkpoint's tensors of connections, whose shapes were checked.

    Without `tables`, these stay on the meta device. `alone`: the file has no others, and its shapes are checked here.
    """
    model = copy.deepcopy(meta_model(config))
    places, state = _names(model, tables=tables, alone=alone), model.state_dict()
    known = _names(model, alone=True) if alone else {}
    for tensor in (each for shard in shards if alone for each in shard.tensors):
        expected = [*state[known[tensor.name]].shape] if tensor.name in known else None
        if [*tensor.shape] != expected:
            raise CheckpointError(f"tensor {tensor.name!r} has shape {[*tensor.shape]}, the model asks for {expected}.")
    found: dict[str, torch.Tensor] = {}
    for shard in shards:
        if wanted := shard.names & places.keys():
            with safe_open(shard.path, "pt") as file:
                found |= {name: file.get_tensor(name) for name in wanted}
    if missing := places.keys() - found.keys():
        raise CheckpointError(f"missing keys: {', '.join(sorted(missing)[:5])}.")
    read = {name: found[stored].to(state[name].dtype) for stored, name in places.items()}
    model.load_state_dict(read, strict=False, assign=True)
    return model


def _names(model: PreTrainedModel, *, tables: bool = True, alone: bool = False) -> dict[str, str]:
    """Name in a checkpoint, or with `alone` in the decoder that has the layers -> in the model, of added tensors."""
    names = [
        f"{prefix}.{name}"
        for prefix, module in sorted(added_modules(model).items())
        for name in module.state_dict()
        if tables or name not in module.tables
    ]
    if alone:
        decoder = decoder_of(model)[0]
        start = next((f"{name}." for name, module in model.named_modules() if module is decoder), "")
        return {name.removeprefix(start): name for name in names}
    stored = stored_names(model, names)
    return {stored[name]: name for name in names}


def save_connections(model: torch.nn.Module, folder: str | Path, *, lossy: bool = False) -> None:
    """Writes what `connect` has added to a model: a few kilobytes, which `connect(model, folder)` adds again.

    They are the coefficients, the configuration, which names the model that they are for, and a card. Other weights are
    not saved.

    Args:
        lossy: allow it for a model whose other weights have changed since `connect`, by training, merging or an
            adapter; the card then says that they are missing.

    Raises:
        ValueError: the model has no connections, or its other weights have changed.
    """
    check_whole(model)
    tensors = coefficients(model)
    if not connections_of(model.config):
        raise ValueError(f"{type(model).__name__} has no connections to save: add them with `connect`.")
    changed = weights_have_changed(model)
    if changed and not lossy:
        raise ValueError(
            "Beside the connections, weights have changed since `connect`, by training, merging or an adapter, and "
            "would be missing: save the whole model with `save_pretrained`, or leave them out with lossy=True."
        )
    if changed is None:
        logger.warning("Whether weights beside the connections have changed since `connect` is not known.")
    connected: Any = next(each for each in model.modules() if isinstance(each, ConnectedModel))
    config = copy.copy(connected.config)
    config.architectures, config.dtype = [type(connected).__name__], connected.dtype
    if not (config.base_model or {}).get("name"):
        logger.warning(
            "The model that the connections are for has no name, and the folder cannot tell which it is: save it, and "
            "load it again, before `connect`."
        )
    write_connections(tensors, config, folder, changed=changed)


def write_connections(
    tensors: Mapping[str, torch.Tensor],
    config: Any,
    folder: str | Path,
    *,
    changed: bool | None,
    report: Mapping[str, Any] | None = None,
    source_card: Mapping[str, Any] | None = None,
) -> None:
    """Writes the folder of `save_connections`; the names of the coefficients are those in the decoder.

    `changed`: whether other weights are others than those of the model that `config` names; `None`: not known.
    """
    folder = Path(folder)
    left_out = {"quantization_config", "unused_weights", *CONNECTION_FIELDS}  # the first two are of other weights
    said = json.loads(config.to_json_string())
    settings = {name: value for name, value in said.items() if name not in left_out} | connections_of(config)
    base = {name: value for name, value in (getattr(config, "base_model", None) or {}).items() if name != "checksums"}
    settings["base_model"] = base | {"digest": configuration_digest(config), "changed": changed}
    whole = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    numbers = sum(value.numel() for value in whole.values())
    card = model_card(
        {**(report or {}), "source": base.get("name"), "revision": base.get("revision")},
        folder.name,
        config=config,
        source_card=source_card,
        alone=Alone(numbers, changed),
    )
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=".", dir=folder) as partial:  # an earlier result stays until this one is whole
            save_file(whole, Path(partial, CONNECTIONS), metadata={"format": "pt", "resformer": __version__})
            Path(partial, CONFIG).write_bytes(f"{json.dumps(settings, indent=2, sort_keys=True)}\n".encode())
            Path(partial, CARD).write_bytes(str(card).encode())
            for name in (CONNECTIONS, CONFIG, CARD):
                os.replace(Path(partial, name), folder / name)
