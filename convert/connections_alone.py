"""Connections alone in a folder: a few kilobytes that `connect(model, folder)` adds to the model that they are for."""

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers.utils import logging

from resformer.configuration.methods import CONNECTION_FIELDS, connections_of
from resformer.files import write_text
from resformer.model_cards import Alone, model_card
from resformer.modeling.connected import ConnectedModel
from resformer.modeling.saved_connections import coefficients, configuration_digest, weights_have_changed
from resformer.names import CARD, CONFIG, CONNECTIONS
from resformer.version import __version__

logger = logging.get_logger(__name__)


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
    """Writes the folder of `save_connections`.

    Args:
        tensors: the coefficients, by their names in the decoder.
        config: of the model.
        changed: whether its other weights are others than those of the model that is named; `None`: not known.
        report, source_card: of `model_card`.
    """
    folder = Path(folder)
    left_out = {"quantization_config", "unused_weights", *CONNECTION_FIELDS}  # the first two are of other weights
    said = json.loads(config.to_json_string())
    settings = {name: value for name, value in said.items() if name not in left_out} | connections_of(config)
    base = {name: value for name, value in (getattr(config, "base_model", None) or {}).items() if name != "checksums"}
    settings["base_model"] = base | {"digest": configuration_digest(config), "changed": changed}
    folder.mkdir(parents=True, exist_ok=True)
    whole = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    save_file(whole, folder / CONNECTIONS, metadata={"format": "pt", "resformer": __version__})
    write_text(folder / CONFIG, json.dumps(settings, indent=2, sort_keys=True) + "\n")
    numbers = sum(value.numel() for value in whole.values())
    card = model_card(
        {**(report or {}), "source": base.get("name"), "revision": base.get("revision")},
        folder.name,
        config=config,
        source_card=source_card,
        alone=Alone(numbers, changed),
    )
    write_text(folder / CARD, str(card))
