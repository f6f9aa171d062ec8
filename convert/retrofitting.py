"""Retrofits: a Llama-style checkpoint in, a ResFormer checkpoint with added connections out."""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import __version__ as transformers_version

from resformer.configuration import ResFormerConfig
from resformer.configuration.methods import CONNECTION_FIELDS, method_fields, without_connections
from resformer.convert.casting import Rounding
from resformer.convert.connections import expected_shapes, initial_connections, model_on_meta
from resformer.convert.conversion import (
    Conversion,
    Outcome,
    Verify,
    carry_out,
    check_tensors,
    check_verify,
    foretell,
    model_bytes,
    result_config,
)
from resformer.convert.families import backbone_config
from resformer.convert.gguf_format import save_gguf_extras
from resformer.convert.planning import Plan, plan_shards
from resformer.convert.source import open_source
from resformer.convert.tensors import CODES
from resformer.convert.verification import LogitsComparison
from resformer.convert.writing import Transfer
from resformer.errors import CheckpointError
from resformer.files import check_target
from resformer.model_cards import carried_metadata, retrofit_card
from resformer.record import RECORD
from resformer.untrusted import regular_file
from resformer.version import __version__

__all__ = ["RetrofitReport", "losses", "retrofit"]

_LEARNED_MODES = ("learnable", "learnable_plus", "dense", "gated")


@dataclass(frozen=True)
class RetrofitReport:
    """What a retrofit did, or would do (`verified` is then `""` and `verification` `None`)."""

    source: str
    revision: str | None
    output: str
    family: str
    method: str
    fields: dict[str, Any]  # the connection fields, as they stand in the new config.json
    losses: list[str]  # why the connections do not start as the identity; empty if they do
    source_dtype: str  # of most weights of the source; its logits are computed in it
    dequantised: bool  # the source is a GGUF file; what is compared is what Transformers makes of it, in float32
    dtype: str  # of most weights of the result
    rounded: int  # tensors that lost precision to a change of dtype
    parameters: int
    kept: int  # tensors of the source that the result has
    added: dict[str, int]  # parameter name -> number of elements
    dropped: list[str]  # tensors of the source that the method has no use for
    carried_files: int  # weight files that are the source's, byte for byte
    written_files: int  # weight files that are new
    transfer: Transfer  # bytes linked, cloned, copied and written
    memory: int  # bytes that comparing the logits takes: the larger model
    verified: str  # headers, hashes or logits
    verification: LogitsComparison | None = None
    rounding: Rounding = field(default_factory=Rounding)
    left_behind: list[str] = field(default_factory=list)  # files, and keys of config.json, that do not go along
    warnings: list[str] = field(default_factory=list)

    @property
    def exact(self) -> bool:
        """Whether it computes what its source does, bit for bit: no losses, and no change of dtype."""
        return not (self.losses or self.rounded) and self.dtype == self.source_dtype

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return {**asdict(self), "exact": self.exact}


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
    durable: bool = False,
    max_shard_size: int | None = None,
    allow_pickle: bool = False,
    progress: bool = True,
    **fields: Any,
) -> RetrofitReport:
    """Writes `source` with the connections of `method` to the folder `output`.

    Methods that can start as the identity do ((0, 1) for value residuals, one-hot depth averages), so that the result
    computes what its source does, bit for bit, unless `dtype` changes. Weight files that do not change are carried over
    whole; what is added goes into one small new file. Configuration, tokenizer, chat templates, generation
    configuration and licence go along. The result is verified before it is put in place: a run that fails or is
    interrupted leaves nothing.

    Args:
        source: a folder with safetensors, a `.gguf` file (dequantised), or a Hub id.
        output: a new or empty folder.
        method: one of `resformer.configuration.METHODS`.
        lossy: allow a method, or fields, that change what the model computes.
        force: replace what `output` holds.
        dry_run: read, check, report, write nothing.
        revision: branch, tag or commit, for a Hub id.
        dtype: convert floating tensors to this; default: each keeps its own (float32 for GGUF). The logits are then
            measured against the source in its own dtype, and need not be identical.
        link: hard-link weight files that do not change. Instant, but who edits one in place then edits both.
        verify: `"headers"` reads names, dtypes and shapes back; `"hashes"` also every byte that was written;
            `"logits"` also loads both models, one after the other, and compares their logits on fixed prompts.
            `"auto"` is logits where the model fits into free memory, else hashes.
        durable: wait until every byte is on the disk before the result is put in place, so that a power failure right
            after it finds all or nothing. Otherwise the system writes it within its usual half minute, as after `cp`.
        max_shard_size: split weight files that are larger, in bytes.
        allow_pickle: read `pytorch_model*.bin` where there are no safetensors, restricted to tensors.
        progress: show one bar, in bytes, on a terminal.
        fields: connection fields of `ResFormerConfig` that go on top of the method's, `dwa=True` for one.

    Raises:
        CheckpointError: the source cannot be converted, the method needs `lossy`, or `output` is in the way.
        OutputError: the disk is full or read-only. Nothing is left behind.
        VerificationError: the result does not hold or compute what the source does. Nothing is written.
        ValueError: `method`, `fields`, `dtype` or `verify` are wrong.
    """
    target_dtype = _dtype(dtype)
    check_verify(verify)
    _check_fields(fields)
    method_fields(method, 1)  # an unknown method is refused before anything is read or fetched
    target = Path(output).expanduser()
    check_target(target, source, mark=RECORD, force=force)  # before anything is read or fetched
    opened = open_source(source, revision)
    backbone = backbone_config(opened.config)
    connections = _connections(method, backbone.num_hidden_layers, fields)
    config = without_connections(backbone, **connections)
    lost = losses(config)
    if lost and not lossy:
        raise CheckpointError(
            f"The result would not compute what {opened.name} does: {'; '.join(lost)}. Allow it with --lossy "
            "(lossy=True), or choose an exact method.",
            "--lossy",
        )
    opened = opened.fetch(allow_pickle=allow_pickle, headers_only=dry_run)
    stored = opened.checkpoint.tensors
    weights_dtype = target_dtype or opened.dtype
    plain = expected_shapes(backbone)
    tied, notes = check_tensors(opened, plain)
    config.tie_word_embeddings = tied
    model = model_on_meta(config, weights_dtype)
    ours = model.state_dict().keys()
    dropped = [name for name in plain if name not in ours]
    added = initial_connections(model)
    plan = Plan(
        plan_shards(
            opened.checkpoint.shards,
            dropped=dropped,
            added=added,
            dtype=CODES[target_dtype] if target_dtype is not None else None,
            max_shard_size=max_shard_size,
        ),
        opened.checkpoint.side_files,
        result_config(config, "ResFormerForCausalLM", weights_dtype),
    )
    conversion = Conversion(
        opened,
        plan,
        target,
        weights_dtype,
        exact=not lost and weights_dtype == opened.dtype,
        link=link,
        force=force,
        verify=verify,
        durable=durable,
        progress=progress,
    )
    warnings = [*opened.checkpoint.notes, *notes]
    if opened.gguf is None and not opened.checkpoint.has_tokenizer:
        warnings.append(f"{opened.name} has no tokenizer that can be read: save one beside the result.")
    report = RetrofitReport(
        source=opened.name,
        revision=opened.revision,
        output=str(target),
        family=opened.config.model_type,
        method=method,
        fields={name: getattr(config, name) for name in CONNECTION_FIELDS if name in connections},
        losses=lost,
        source_dtype=str(opened.dtype).removeprefix("torch."),
        dequantised=opened.gguf is not None,
        dtype=str(weights_dtype).removeprefix("torch."),
        rounded=plan.rounded,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        kept=sum(name in stored for name in plan.tensors),
        added={tensor.name: tensor.elements for tensor in added},
        dropped=dropped,
        carried_files=len(plan.carried),
        written_files=len(plan.written),
        transfer=Transfer(),
        memory=max(model_bytes(opened.checkpoint, dtype) for dtype in (opened.dtype, weights_dtype)),
        verified="",
        left_behind=[*opened.checkpoint.left_behind, *(f"config.json: {key}" for key in opened.dropped_config)],
        warnings=warnings,
    )

    def told(outcome: Outcome) -> RetrofitReport:
        return replace(
            report, **outcome.told, rounding=outcome.rounding, warnings=[*report.warnings, *outcome.warnings]
        )

    def finish(folder: Path, outcome: Outcome) -> dict[str, str]:
        source_card: dict[str, Any] = {}
        if opened.gguf is None:  # beside a GGUF file, a README.md may be of something else
            with suppress(CheckpointError):  # there is none, or it is a link out of its folder
                source_card = carried_metadata(regular_file(opened.folder / "README.md"))
        elif opened.model is not None and not save_gguf_extras(opened.gguf, opened.model, folder):
            report.warnings.append(f"{opened.name} has no tokenizer that can be read: save one beside the result.")
        return _provenance(told(outcome), outcome.files, config, source_card)

    return told(foretell(conversion) if dry_run else carry_out(conversion, finish))


def losses(config: ResFormerConfig) -> list[str]:
    """Why a retrofit with this configuration does not start as its source; empty if it does."""
    found = []
    mode, init = config.value_residual, config.value_residual_init
    for name, sources in (("value_sources", config.value_sources), ("key_sources", config.key_sources)):
        readers = [layer for layer, source in enumerate(sources or ()) if layer != source]
        if readers:
            found.append(f"`{name}` drops the projections of {len(readers)} of {config.num_hidden_layers} layers")
    if config.neutreno_lambda:
        found.append(f"`neutreno_lambda`={config.neutreno_lambda} adds a fixed term to every layer but 0")
    if config.mixing_layers:
        if mode == "identity" or (mode == "constant" and init != [0.0, 1.0]):
            weights = [0.5, 0.5] if mode == "identity" else init
            found.append(f"`value_residual`={mode!r} mixes with fixed coefficients {weights}")
        elif init != [0.0, 1.0]:
            found.append(f"`value_residual_init`={init} starts away from (0, 1)")
    return found


def _dtype(dtype: str | torch.dtype) -> torch.dtype | None:
    if dtype == "auto":
        return None
    found = dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype, None)
    if found not in CODES:
        names = ", ".join(str(known).removeprefix("torch.") for known in CODES)
        raise ValueError(f"dtype={dtype!r}: expected auto, {names}.")
    return found


def _check_fields(fields: Mapping[str, Any]) -> None:
    for name in fields:
        if name not in CONNECTION_FIELDS:
            raise ValueError(
                f"`{name}` is not a field that a retrofit sets: expected one of {', '.join(CONNECTION_FIELDS)}."
            )


def _connections(method: str, num_hidden_layers: int, fields: dict[str, Any]) -> dict[str, Any]:
    connections = {**method_fields(method, num_hidden_layers), **fields}
    if connections.get("value_residual") in _LEARNED_MODES:
        connections.setdefault("value_residual_init", [0.0, 1.0])
    return connections


def _provenance(
    report: RetrofitReport, files: Mapping[str, Any], config: ResFormerConfig, source_card: Mapping[str, Any]
) -> dict[str, str]:
    """The model card, and a record that two runs write alike: no clock, no machine."""
    # Of a local path, which says more about a machine than about a model, only the last part is published.
    source = report.source if report.revision is not None else Path(report.source).expanduser().resolve().name
    values = {**report.as_dict(), "source": source, "output": Path(report.output).resolve().name}
    # Left out of the record: what differs between two runs that write the same bytes.
    left_out = ("output", "warnings", "transfer", "memory", "left_behind")
    record = {
        **{key: value for key, value in values.items() if key not in left_out},
        "source_card": source_card,
        "files": files,
        "versions": {"resformer": __version__, "torch": torch.__version__, "transformers": transformers_version},
    }
    return {
        RECORD: json.dumps(record, indent=2, sort_keys=True) + "\n",
        "README.md": str(retrofit_card(values, config=config, source_card=source_card)),
    }
