"""Retrofits: a Llama-style or ResFormer checkpoint in, a ResFormer checkpoint with added connections out."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import __version__ as transformers_version

from resformer.configuration import ResFormerConfig
from resformer.configuration.methods import (
    CONNECTION_FIELDS,
    connections_of,
    method_fields,
    method_of,
)
from resformer.convert.connected_families import connection_config, view, with_connections
from resformer.convert.connections import added_shapes, expected_shapes, initial_connections, tied_names
from resformer.convert.deciding import Decision, added_kinds, config_text, inexact_because, recorded_family
from resformer.convert.reading import plain_way
from resformer.convert.source import OpenedSource, Source, open_source
from resformer.convert.tensors import CODES
from resformer.convert.to_folder import Options, Report, Verify, carry_out, folder_name, published_name
from resformer.errors import CheckpointError, did_you_mean
from resformer.files import check_target
from resformer.model_cards import base_model_of, carried_metadata, model_card
from resformer.modeling.connecting import chosen_fields
from resformer.modeling.connections import KINDS
from resformer.names import RECORD
from resformer.record import config_digest
from resformer.version import __version__

#: Fields of a report in which two runs may differ.
UNRECORDED = ("output", "warnings", "transfer", "memory", "left_behind")


@dataclass(frozen=True, kw_only=True)
class RetrofitReport(Report):
    """The result of a retrofit, or the forecast of a dry run."""

    family: str
    method: str | None  # None: the connections have no name
    fields: dict[str, Any]  # the connection fields, as they stand in the new config.json
    source_fields: dict[str, Any]  # those that the source had already; its coefficients stay
    inexact_because: list[str]  # why the connections do not start as the identity; empty if they do
    source_dtype: str  # of most weights of the source; its logits are computed in it
    dequantised: bool  # the source is a GGUF file
    dtype: str  # of most weights of the result
    parameters: int
    added: dict[str, int]  # parameter name -> number of elements
    dropped: list[str]  # tensors of the source that the method has no use for
    memory: int  # bytes that comparing the logits takes

    @property
    def exact(self) -> bool:
        """Whether it computes what its source, dequantised if need be, does bit for bit."""
        return not (self.inexact_because or self.rounding.changed) and self.dtype == self.source_dtype


def retrofit(
    source: str | Path,
    output: str | Path,
    method: str = "resformer",
    *,
    lossy: bool = False,
    force: bool = False,
    dry_run: bool = False,
    revision: str | None = None,
    dtype: str | torch.dtype = "auto",
    link: bool = False,
    verify: Verify = "auto",
    max_shard_size: int | str | None = None,
    progress: bool = True,
    **fields: Any,
) -> RetrofitReport:
    """Writes `source` with the connections of `method` to the folder `output`.

    Methods that can start as the identity do ((0, 1) for value residuals, one-hot depth averages), so that the result
    computes what its source does, bit for bit, unless `dtype` changes. Weight files that do not change are carried over
    whole; what is added goes into one small new file. Configuration, tokenizer, chat templates, generation
    configuration and licence go along. The result is verified before it is put in place: a run that fails or is
    interrupted leaves nothing.

    A ResFormer checkpoint gets further connections: those that it has, and their coefficients, stay as they are.

    Args:
        source: a folder with safetensors, a `.gguf` file (dequantised), or a Hub id.
        output: a new or empty folder.
        method: one of `resformer.configuration.METHODS`.
        lossy: allow a method, or fields, that change what the model computes.
        force: replace an earlier result of this command.
        dry_run: read, check, report, write nothing.
        revision: branch, tag or commit, for a Hub id.
        dtype: convert floating tensors to this; default: each keeps its own (float32 for GGUF). The logits are then
            measured against the source in its own dtype, and need not be identical.
        link: hard-link weight files that do not change. Instant, but editing one in place changes both.
        verify: `"headers"` reads names, dtypes and shapes back; `"hashes"` also every byte that was written;
            `"logits"` also loads both models, one after the other, and compares their logits on fixed prompts.
            `"auto"` is logits where the model fits into free memory, else hashes.
        max_shard_size: split weight files that are larger: bytes, or a text such as `"5GB"`.
        progress: show one bar, in bytes; where there is neither a terminal nor a notebook, a line every 10 seconds.
        fields: connection fields of `ResFormerConfig` that go on top of the method's, `dwa=True` for one.

    Raises:
        CheckpointError: the source cannot be converted, the method needs `lossy`, or `output` is in the way.
        HubError: the Hub refuses, or cannot be reached.
        OutputError: the disk is full or read-only. Nothing is left behind.
        VerificationError: the result does not hold or compute what the source does. No output folder is changed.
        ValueError: `method`, `fields`, `dtype`, `verify` or `max_shard_size` are wrong.
    """
    options = Options(
        force=force,
        dry_run=dry_run,
        link=link,
        verify=verify,
        max_shard_size=max_shard_size,
        progress=progress,
    )
    target_dtype = _dtype(dtype)
    if "allow_pickle" in fields:
        raise ValueError(f"`allow_pickle` is gone: only safetensors and GGUF files are read. {plain_way()}")
    for field in sorted(fields.keys() - set(CONNECTION_FIELDS)):
        known = ", ".join(CONNECTION_FIELDS)
        hint = did_you_mean(field, CONNECTION_FIELDS)
        raise ValueError(f"`{field}` is not a field that a retrofit sets: expected one of {known}.{hint}")
    method_fields(method, 1)  # an unknown method is refused before anything is read or fetched
    target = Path(output).expanduser()
    check_target(target, source, made_by="convert", force=force)  # before anything is read or fetched
    opened = open_source(source, revision)
    before = connection_config(opened.config)
    layers = view(before).num_hidden_layers
    connections = {**method_fields(method, layers), **fields}
    if not isinstance(before, ResFormerConfig):
        chosen_fields(before, method, fields, plain=True)  # refuses methods that share
    for kind in KINDS:
        if not kind.is_in(before):  # what is added starts as the identity
            connections = kind.plain_start(connections) | connections
    connections = {**connections_of(before), **connections}
    config = with_connections(before, connections)
    view(config)  # refuses connections that a family's decoder cannot have
    added = added_kinds(config, before)
    if connections_of(before) and not added:
        raise CheckpointError(f"{opened.name}: has these connections already: {connections_of(before)}.")
    if (reasons := inexact_because(config, added)) and not lossy:
        raise CheckpointError(
            f"The result would not compute what {opened.name} does: {'; '.join(reasons)}. Allow it with --lossy "
            "(lossy=True), or choose an exact method.",
            "--lossy",
        )
    fetched = opened.fetch(headers_only=dry_run)
    set_fields = {name: getattr(config, name) for name in CONNECTION_FIELDS if name in connections}
    name = method_of(view(config)) if fields or connections_of(before) else method
    return _write(fetched, config, target, options, reasons, target_dtype, method=name, fields=set_fields)


def _write(
    source: OpenedSource,
    config: Any,
    target: Path,
    options: Options,
    reasons: list[str],
    target_dtype: torch.dtype | None,
    **facts: Any,
) -> RetrofitReport:
    """Decides on the result, and plans, writes and verifies it, its card and its record.

    Args:
        target: the folder.
        reasons: why the result does not start as its source.
        facts: further fields of the report.
    """
    before = connection_config(source.config)
    # Beside a GGUF file, a README.md may be of something else.
    source_card = carried_metadata(source.folder / "README.md") if source.gguf is None else {}
    family = recorded_family(source) if before is source.config else source.config.model_type
    config.base_model = _base_model(source, source_card) | {"family": family}
    config.tie_word_embeddings = source.tied
    shapes, tied, tensors = expected_shapes(config), tied_names(config), source.checkpoint.tensors
    dtype = target_dtype or source.dtype
    added = [each for name, each in initial_connections(config, dtype).items() if name not in tensors]
    kept = {}
    if target_dtype is not None:  # coefficients keep their dtype: a conversion would round what they have learned
        kept = {name: tensors[name] for name in added_shapes(config, tables=False) if name in tensors}
    dropped = [name for name in expected_shapes(before) if name not in shapes]
    no_tokenizer = source.gguf is None and not source.checkpoint.tokenizer_files
    warning = f"{source.name} has no tokenizer that can be read: save one beside the result."
    decision = Decision(
        source=source,
        config=config_text(config, source, target_dtype),
        dtype=dtype,
        cast=None if target_dtype is None else CODES[target_dtype],
        dropped=[*dropped, *kept],
        added=(*added, *kept.values()),
        inexact_because=tuple(reasons),
        warnings=(warning,) * no_tokenizer,
    )
    report_of = partial(
        RetrofitReport,
        family=family,
        source_fields=connections_of(before),
        inexact_because=reasons,
        source_dtype=str(source.dtype).removeprefix("torch."),
        dequantised=source.dequantised,
        dtype=str(dtype).removeprefix("torch."),
        parameters=sum(math.prod(shape) for name, shape in shapes.items() if name not in tied),
        added={tensor.name: tensor.elements for tensor in added},
        dropped=dropped,
        memory=decision.memory,
        **facts,
    )

    def finish(report: RetrofitReport, digests: Mapping[str, str | None]) -> dict[str, str]:
        record = {key: value for key, value in report.as_dict().items() if key not in UNRECORDED} | {
            "source": published_name(source),
            "source_card": source_card,
            "config_sha256": config_digest(json.loads(decision.config)),
            "files": {name: {"sha256": digest} for name, digest in digests.items()},
            "versions": {"resformer": __version__, "torch": torch.__version__, "transformers": transformers_version},
        }
        card = model_card(record, folder_name(report.output), config=config, tokenizer=not no_tokenizer)
        return {RECORD: json.dumps(record, indent=2, sort_keys=True) + "\n", "README.md": str(card)}

    return carry_out(decision, target, options, report_of, finish)


def _base_model(source: Source, source_card: Mapping[str, Any]) -> dict[str, Any]:
    """What config.json says of the origin: a model that is trained and saved elsewhere keeps it, without a record.

    The nearest one on the Hub, if there is one: of a local source that names its own, that.
    """
    if source.revision is None and (named := base_model_of(source.config)):
        return named
    licence = {name: value for name, value in source_card.items() if name.startswith("license")}
    return {"name": published_name(source), "revision": source.revision, **licence}


def _dtype(dtype: str | torch.dtype) -> torch.dtype | None:
    if dtype == "auto":
        return None
    resolved = dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype, None)
    if resolved not in CODES:
        names = ", ".join(str(known).removeprefix("torch.") for known in CODES)
        raise ValueError(f"dtype={dtype!r}: expected auto, {names}.")
    return resolved
