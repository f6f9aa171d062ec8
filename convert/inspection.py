"""Describes a checkpoint from its configuration, its headers and its added parameters; the model is not loaded."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from resformer.configuration.methods import connections_of, method_of
from resformer.convert.connected_families import cache_size, connection_config, family_name, view
from resformer.convert.connections import added_shapes, read_connections
from resformer.convert.source import open_source
from resformer.files import AsDict
from resformer.model_cards import base_model_of
from resformer.model_cards.heads import head_of
from resformer.modeling.connected import added_modules
from resformer.modeling.connection import plain_matrix
from resformer.modeling.matrices import depth_mixing_matrix, value_mixing_matrix


@dataclass(frozen=True)
class Needs:
    """The model whose weights connections alone need."""

    base: str | None  # None: not known
    revision: str | None
    changed: bool | None  # whether they were trained with others; None: not known


@dataclass(frozen=True)
class Inspection(AsDict):
    """The description of a checkpoint."""

    source: str
    revision: str | None
    model_type: str
    head: str | None  # the model's class, if it is no language model
    labels: int | None  # of that head
    family: str  # the model type without connections
    method: str | None  # the named method with these connections; None if they have no name
    fields: dict[str, Any]  # the connection fields that are not Llama's
    files: int
    bytes: int  # of all weight files
    parameters: int  # tied ones once
    needs: Needs | None  # of connections alone: the model that they are for; None: the weights are here
    added: dict[str, list[int]]  # parameter of a connection -> shape
    dtypes: dict[str, int]  # code of safetensors -> number of elements
    layers: int
    hidden_size: int
    attention_heads: int
    key_value_heads: int | None
    head_dim: int | None
    vocab_size: int
    tied: bool | None  # None: that are other weights
    cache_bytes_per_token: int | None  # in the dtype of the model; None: not known, where caches are no rows
    cache_share: float | None  # of a model without sharing
    value_mixing_matrix: list[list[float]] | None  # (N, N); NaN where a gate decides. None if it is the identity
    depth_mixing_matrix: list[list[float]] | None  # (N, N + 1). None if it is plain Llama's
    learned: dict[str, float]  # kind of connection -> how far a parameter is from no effect, at most; without tables
    warnings: list[str]


def inspect(source: str | Path, *, revision: str | None = None) -> Inspection:
    """Describes a checkpoint with connections, or one that can get them, or the folder of `save_connections`.

    Raises:
        CheckpointError: it cannot be read, or its tensors are not what its configuration asks for.
    """
    opened = open_source(source, revision, heads=True)
    config = opened.config
    backbone = connection_config(config)
    shape = view(backbone)
    if opened.alone:
        base: dict[str, Any] = base_model_of(config)
        changed = getattr(config, "base_model", {}).get("changed")
        whole, needs = None, Needs(base.get("name"), base.get("revision"), changed)
        shards, dtype = [opened.fetch_alone()], config.dtype or torch.float32
    else:
        whole, needs = opened.fetch(headers_only=True), None  # keeps the folder of what was fetched
        shards, dtype = [*whole.checkpoint.shards], whole.built.dtype
    dtypes = Counter[str]()
    for tensor in (tensor for shard in shards for tensor in shard.tensors):
        dtypes[tensor.dtype] += tensor.elements
    model = read_connections(backbone, shards, tables=False, alone=opened.alone)
    learned: dict[str, float] = {}
    for name, module in added_modules(model).items():
        if not module.tables:
            kind = name.rpartition(".")[2]
            learned[kind] = max([learned.get(kind, 0.0), *(distance for distance, _ in module.deviations())])
    per_token, full = cache_size(backbone, dtype)
    return Inspection(
        source=opened.name,
        revision=opened.revision,
        model_type=config.model_type,
        head=head_of(config),
        labels=config.num_labels if head_of(config) else None,
        family=family_name(config),
        method=method_of(shape),
        fields=connections_of(backbone),
        files=len(shards),
        bytes=sum(shard.size for shard in shards),
        added={name: list(shape) for name, shape in sorted(added_shapes(backbone, alone=opened.alone).items())},
        layers=shape.num_hidden_layers,
        hidden_size=shape.hidden_size,
        attention_heads=shape.num_attention_heads,
        key_value_heads=shape.num_key_value_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocab_size,
        cache_bytes_per_token=per_token,
        cache_share=per_token and full and per_token / full,
        value_mixing_matrix=_unless_plain(value_mixing_matrix(model)),
        depth_mixing_matrix=_unless_plain(depth_mixing_matrix(model)),
        learned=learned,
        dtypes=dict(dtypes),
        needs=needs,
        parameters=whole.built.parameters if whole else dtypes.total(),
        tied=bool(whole.built.tied) if whole else None,
        warnings=[*whole.checkpoint.notes] if whole else [],
    )


def _unless_plain(matrix: torch.Tensor) -> list[list[float]] | None:
    return None if torch.equal(matrix, plain_matrix(*matrix.shape)) else matrix.tolist()
