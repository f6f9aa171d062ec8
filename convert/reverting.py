"""Reverts: connections that have learned nothing are taken out again, every other tensor byte for byte."""

import json
import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from resformer.configuration.connection_fields import ConnectionFields
from resformer.configuration.methods import CONNECTION_FIELDS, connections_of
from resformer.convert.carrying import File
from resformer.convert.connected_families import config_text, family_config, view, with_connections
from resformer.convert.connections import added_kinds, meta_model, read_connections, stored_names
from resformer.convert.source import OpenedSource
from resformer.convert.to_folder import Decision, Options, Report, carry_out, published_name
from resformer.errors import CheckpointError, one_line, quoted
from resformer.model_cards import base_model_of
from resformer.modeling.connected import added_modules
from resformer.modeling.connection import KINDS
from resformer.names import RECORD
from resformer.record import read_record

#: Names the source of a revert.
_REVERTED = "resformer_revert.json"


@dataclass(frozen=True, kw_only=True)
class RevertReport(Report):
    """The result of a revert, or the forecast of a dry run."""

    family: str  # the model type: a family's, or that with connections if some remain
    removed: list[str]  # the added parameters
    remaining: dict[str, Any]  # connection fields of the result; {} if it is plain


def revert(
    source: str | Path,
    output: str | Path,
    *,
    all: bool = False,
    force: bool = False,
    revision: str | None = None,
    **options: Any,
) -> RevertReport:
    """Writes the checkpoint `source` without the connections that were added.

    Only where that changes nothing: the mixing matrices of what is taken out are the identity and no projection was
    dropped. Every other tensor is the source's, byte for byte, and the logits are compared as for a retrofit. The card
    and the conversion record stay behind: they describe the retrofit. `resformer_revert.json` names the source.

    Args:
        source: a folder or a Hub id.
        output: a new or empty folder.
        all: take out all connections. Otherwise those stay that the source of the last conversion had, as its record
            says; without a record all are taken out.
        force, revision: as for `retrofit`.
        options: `dry_run`, `link`, `verify`, `progress`, as for `retrofit`.

    Raises:
        CheckpointError: it has no connections, or its connections have an effect; the message says how large.
        OutputError, VerificationError: as for `retrofit`.
    """
    settings = Options(made_by="revert", force=force, **options)
    target, opened = settings.start(source, output, revision)
    config = opened.config
    if not isinstance(config, ConnectionFields):
        raise CheckpointError(f"{opened.name}: is a checkpoint of {config.model_type!r} already.")
    recorded = {} if all else (read_record(opened.folder) or {}).get("source_fields")
    recorded = recorded if isinstance(recorded, dict) else {}
    try:
        before = with_connections(config, {name: recorded[name] for name in CONNECTION_FIELDS if name in recorded})
    except Exception as error:  # any of the validators'
        raise CheckpointError(f"{opened.folder / RECORD}: source_fields are not valid: {one_line(error)}") from error
    for kind in (each for each in KINDS if each.is_in(before)):
        now = kind.field_values(config) if kind.fields_of or kind.is_in(config) else {}
        for name, value in kind.field_values(before).items():
            if value != now.get(name):
                raise CheckpointError(
                    f"{opened.folder / RECORD}: says that the source had `{name}`={quoted(value)}, and config.json has "
                    f"{quoted(now.get(name))}. Take all connections out with --all (all=True)."
                )
    for kind in added_kinds(config, before):
        # What is learned may have no effect: it is read below.
        if reasons := kind.chosen(config).fixed_effects(view(config)):
            raise CheckpointError(f"{opened.name}: cannot be reverted: {reasons[0]}. Convert the original again.")
    if connections_of(before):
        reverted = before
        reverted.base_model = getattr(config, "base_model", None)  # as `retrofit` has left it
    else:
        reverted = family_config(config)
    decision = _decide(opened.fetch(headers_only=True), config, before, reverted)
    # The coefficients allow it: now download the weights.
    if not settings.dry_run and not decision.source.on_this_disk:
        decision = _decide(opened.fetch(), config, before, reverted)
    report_of = partial(
        RevertReport, family=reverted.model_type, removed=sorted(decision.dropped), remaining=connections_of(before)
    )
    return carry_out(decision, target, settings, report_of)


def _decide(source: OpenedSource, config: Any, before: Any, reverted: PreTrainedConfig) -> Decision:
    """The source without the connections that it has beyond those of `before`, which must have no effect."""
    warnings, kept = [], added_modules(meta_model(before))
    modules = added_modules(read_connections(config, source.checkpoint.shards, tables=source.on_this_disk))
    unread = set() if source.on_this_disk else {name for name, module in modules.items() if module.tables}
    if unread:
        warnings.append(f"{source.name}: its tables of values were not read; if they have learned, it is not reverted.")
    distances = [
        (math.inf if math.isnan(distance) else distance, name + place)
        for name, module in modules.items()
        if name not in {*kept, *unread}
        for distance, place in module.deviations()
    ]
    distance, where = max(distances, key=lambda each: each[0], default=(0.0, ""))
    if distance:
        named = (read_record(source.folder) or {}).get("source") or base_model_of(source.config).get("name")
        origin = quoted(named) if named else "the model without connections"
        raise CheckpointError(
            f"{source.name}: cannot be reverted, its connections have an effect: {where} is {distance:.3g} from the "
            f"plain model. What they have learned cannot be undone: start again from {origin}."
        )
    expected = meta_model(reverted).state_dict().keys()
    stored = stored_names(meta_model(config), source.built.tensors.keys() - expected)
    note = {"source": published_name(source), "revision": source.revision}
    return Decision(
        source=source,
        config=config_text(source.raw_config, reverted, source.built.dtype),
        dropped={stored[name]: name for name in stored},
        side_files=(File(_REVERTED, (f"{json.dumps(note, indent=2)}\n".encode(),)),),
        warnings=tuple(warnings),
    )
