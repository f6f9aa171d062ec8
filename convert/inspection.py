"""Describes a checkpoint from its configuration, its headers and its added parameters; the model is not loaded."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from resformer.configuration import ResFormerConfig, cache_bytes_per_token, value_sources
from resformer.configuration.methods import connections_of, method_of, without_connections
from resformer.convert.connections import added_shapes, expected_shapes, head_of, read_connections
from resformer.convert.families import family_config, resformer_config
from resformer.convert.reading import HEAD
from resformer.convert.source import open_source
from resformer.errors import CheckpointError
from resformer.files import AsDict
from resformer.modeling.connection import mixing_matrix, plain_matrix


@dataclass(frozen=True)
class Inspection(AsDict):
    """The description of a checkpoint."""

    source: str
    revision: str | None
    model_type: str
    head: str | None  # the model's class, if it is no language model
    labels: int | None  # of that head
    family: str | None  # of the backbone; None if no family has it
    method: str | None  # the named method with these connections; None if they have no name
    fields: dict[str, Any]  # the connection fields that are not Llama's
    files: int
    bytes: int  # of all weight files
    parameters: int  # tied ones once
    added: dict[str, list[int]]  # parameter of a connection -> shape
    dtypes: dict[str, int]  # code of safetensors -> number of elements
    layers: int
    hidden_size: int
    attention_heads: int
    key_value_heads: int | None
    head_dim: int | None
    vocab_size: int
    tied: bool
    cache_bytes_per_token: int  # in the dtype of most weights
    cache_share: float  # of a model without sharing
    value_mixing_matrix: list[list[float]] | None  # (N, N); NaN where a gate decides. None if it is the identity
    depth_mixing_matrix: list[list[float]] | None  # (N, N + 1). None if it is plain Llama's
    warnings: list[str]


def inspect(source: str | Path, *, revision: str | None = None) -> Inspection:
    """Describes a checkpoint: ResFormer's, or one that can become one.

    Raises:
        CheckpointError: it cannot be read, or its tensors are not what its configuration asks for.
    """
    opened = open_source(source, revision, resformer=True, heads=True).fetch(headers_only=True)
    config = opened.config
    backbone = resformer_config(config)
    expected = expected_shapes(backbone)
    dtype = opened.dtype
    tensors = opened.checkpoint.tensors
    connections: dict[str, Any] = read_connections(backbone, tensors, tables=False)
    layers = backbone.num_hidden_layers
    values = mixing_matrix(layers, layers, connections.get("model.value_residual"))[value_sources(backbone)]
    depth = mixing_matrix(layers, layers + 1, connections.get("model.depth_average"))
    per_token = cache_bytes_per_token(backbone, dtype)
    plain = without_connections(backbone)
    return Inspection(
        source=opened.name,
        revision=opened.revision,
        model_type=config.model_type,
        head=head_of(config),
        labels=config.num_labels if head_of(config) else None,
        family=_family(backbone) if backbone is config else config.model_type,
        method=method_of(backbone),
        fields=connections_of(backbone),
        files=len(opened.checkpoint.shards),
        bytes=sum(shard.size for shard in opened.checkpoint.shards),
        parameters=sum(math.prod(shape) for name, shape in expected.items() if not (opened.tied and name == HEAD)),
        added={name: list(shape) for name, shape in sorted(added_shapes(backbone).items())},
        dtypes=dict(opened.checkpoint.dtypes),
        layers=layers,
        hidden_size=backbone.hidden_size,
        attention_heads=backbone.num_attention_heads,
        key_value_heads=backbone.num_key_value_heads,
        head_dim=backbone.head_dim,
        vocab_size=backbone.vocab_size,
        tied=opened.tied,
        cache_bytes_per_token=per_token,
        cache_share=per_token / cache_bytes_per_token(plain, dtype),
        value_mixing_matrix=_unless_plain(values),
        depth_mixing_matrix=_unless_plain(depth),
        warnings=list(opened.checkpoint.notes),
    )


def _family(config: ResFormerConfig) -> str | None:
    try:
        return family_config(config).model_type
    except CheckpointError:
        return None


def _unless_plain(matrix: torch.Tensor) -> list[list[float]] | None:
    return None if torch.equal(matrix, plain_matrix(*matrix.shape)) else matrix.tolist()
