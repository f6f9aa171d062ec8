"""Reverts: a retrofit that has learned nothing goes back to its family, every tensor byte for byte."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig

from resformer.configuration import ResFormerConfig
from resformer.convert.connections import expected_shapes, read_connections
from resformer.convert.conversion import Options, Report, carry_out, published_name
from resformer.convert.deciding import Decision, check_tensors, config_text
from resformer.convert.families import family_config
from resformer.convert.source import OpenedSource, Source, open_source
from resformer.errors import CheckpointError
from resformer.files import check_target
from resformer.modeling import ResFormerForCausalLM
from resformer.modeling.connection import Connection
from resformer.modeling.wiring import KINDS
from resformer.record import read_record

__all__ = ["RevertReport", "deviation", "revert"]

#: Names the source of a revert. `--force` replaces no checkpoint without it.
_REVERTED = "resformer_revert.json"


@dataclass(frozen=True, kw_only=True)
class RevertReport(Report):
    """The result of a revert, or the forecast of a dry run."""

    family: str
    removed: list[str]  # the added parameters


def revert(
    source: str | Path, output: str | Path, *, force: bool = False, revision: str | None = None, **options: Any
) -> RevertReport:
    """Writes the ResFormer checkpoint `source` as a plain one of the family that it came from.

    Only where that changes nothing: the mixing matrices are the identity and no projection was dropped. Every tensor is
    the source's, byte for byte, and the logits are compared as for a retrofit. The card and the conversion record stay
    behind: they describe the retrofit. `resformer_revert.json` names the source.

    Args:
        source: a folder or a Hub id.
        output: a new or empty folder.
        force, revision: as for `retrofit`.
        options: `dry_run`, `link`, `verify`, `durable`, `max_shard_size`, `progress`, as for `retrofit`.

    Raises:
        CheckpointError: it is no ResFormer checkpoint, or its connections have an effect; the message says how large.
        OutputError, VerificationError: as for `retrofit`.
    """
    settings = Options(force=force, **options)
    target = Path(output).expanduser()
    check_target(target, source, mark=_REVERTED, force=force)
    opened = open_source(source, revision, resformer=True)
    config = opened.config
    if not isinstance(config, ResFormerConfig):
        raise CheckpointError(f"{opened.name}: is a checkpoint of {config.model_type!r} already.")
    for kind in KINDS:
        # Without parameters it cannot have learned to have no effect. The parameters of the others are read below.
        if kind.module is None and (reasons := kind.losses(config)):
            raise CheckpointError(f"{opened.name}: cannot be reverted: {reasons[0]}. Convert the original again.")
    family = family_config(config, _recorded_family(opened))
    decision = _decide(opened.fetch(), config, family)
    report = carry_out(
        decision,
        target,
        settings,
        finish=lambda done, weight_files: {
            _REVERTED: json.dumps({"source": published_name(done), "revision": done.revision}, indent=2) + "\n"
        },
    )
    return RevertReport(**vars(report), family=family.model_type, removed=list(decision.dropped))


def _decide(source: OpenedSource, config: ResFormerConfig, family: PreTrainedConfig) -> Decision:
    """The source without its connections, which must have no effect.

    Args:
        family: the configuration without connections.
    """
    family.tie_word_embeddings, warnings = check_tensors(source, expected_shapes(config))
    model, added = read_connections(config, source.checkpoint.tensors)
    distance, where = deviation(model)
    if distance:
        raise CheckpointError(
            f"{source.name}: cannot be reverted, its connections have an effect: {where} is {distance:.3g} from plain "
            "Llama."
        )
    return Decision(
        source=source,
        config=config_text(family, MODEL_FOR_CAUSAL_LM_MAPPING[type(family)].__name__, source.dtype),
        dtype=source.dtype,
        dropped=added,
        warnings=tuple(warnings),
    )


def deviation(model: ResFormerForCausalLM) -> tuple[float, str]:
    """(largest distance of an added weight from having no effect, which weight); 0 if none has an effect.

    Args:
        model: its added parameters are read, nothing else.
    """
    distances = [
        (math.inf if math.isnan(distance) else distance, name + place)
        for name, module in model.named_modules()
        if isinstance(module, Connection)
        for distance, place in module.deviations()
    ]
    return max(distances, key=lambda each: each[0], default=(0.0, ""))


def _recorded_family(source: Source) -> str | None:
    family = (read_record(source.folder) or {}).get("family")
    return family if isinstance(family, str) else None
