"""Reverts: a retrofit that has learned nothing goes back to its family, every tensor byte for byte."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from resformer.configuration import ResFormerConfig
from resformer.convert.connections import expected_shapes, read_connections
from resformer.convert.conversion import (
    Conversion,
    Outcome,
    Verify,
    carry_out,
    check_tensors,
    check_verify,
    foretell,
    result_config,
)
from resformer.convert.families import family_config
from resformer.convert.planning import Plan, plan_shards
from resformer.convert.source import Source, open_source
from resformer.convert.verification import LogitsComparison
from resformer.convert.writing import Transfer
from resformer.errors import CheckpointError
from resformer.files import check_target
from resformer.modeling import ResFormerForCausalLM
from resformer.modeling.value_residual import GateProjection, ValueGate
from resformer.record import read_record

__all__ = ["RevertReport", "deviation", "revert"]


@dataclass(frozen=True)
class RevertReport:
    """What a revert did, or would do (`verified` is then `""` and `verification` `None`)."""

    source: str
    revision: str | None
    output: str
    family: str
    kept: int  # tensors
    removed: list[str]  # the added parameters
    carried_files: int
    written_files: int
    transfer: Transfer
    verified: str
    verification: LogitsComparison | None = None
    left_behind: list[str] = field(default_factory=list)  # files, and keys of config.json, that do not go along
    warnings: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return asdict(self)


def revert(
    source: str | Path,
    output: str | Path,
    *,
    force: bool = False,
    dry_run: bool = False,
    revision: str | None = None,
    link: bool = False,
    verify: Verify = "auto",
    durable: bool = False,
    progress: bool = True,
) -> RevertReport:
    """Writes the ResFormer checkpoint `source` as a plain one of the family that it came from.

    Only where that changes nothing: the mixing matrices are the identity and no projection was dropped. Every tensor is
    the source's, byte for byte, and the logits are compared as for a retrofit. The card and the conversion record stay
    behind: they describe the retrofit.

    Args:
        source: a folder or a Hub id.
        output: a new or empty folder.
        force, dry_run, revision, link, verify, durable, progress: as for `retrofit`.

    Raises:
        CheckpointError: the checkpoint is none of ours, or its connections have an effect; the message says how large.
        OutputError, VerificationError: as for `retrofit`.
    """
    check_verify(verify)
    target = Path(output).expanduser()
    check_target(target, source, mark="config.json", force=force)
    opened = open_source(source, revision, resformer=True)
    if not isinstance(opened.config, ResFormerConfig):
        raise CheckpointError(f"{opened.name}: is a checkpoint of {opened.config.model_type!r} already.")
    _check_sharing(opened)
    theirs = family_config(opened.config, _recorded_family(opened))
    opened = opened.fetch()
    tied, notes = check_tensors(opened, expected_shapes(opened.config))
    model, added = read_connections(opened.config, opened.checkpoint.tensors)
    far, where = deviation(model)
    if far:
        raise CheckpointError(
            f"{opened.name}: cannot be reverted, its connections have an effect: {where} is {far:.3g} from plain Llama."
        )
    theirs.tie_word_embeddings = tied
    dtype = opened.dtype
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING[type(theirs)].__name__
    plan = Plan(
        plan_shards(opened.checkpoint.shards, dropped=added),
        opened.checkpoint.side_files,
        result_config(theirs, architecture, dtype),
    )
    conversion = Conversion(
        opened,
        plan,
        target,
        dtype,
        exact=True,
        link=link,
        force=force,
        verify=verify,
        durable=durable,
        progress=progress,
    )
    outcome = foretell(conversion) if dry_run else carry_out(conversion, _nothing_more)
    return RevertReport(
        source=opened.name,
        revision=opened.revision,
        output=str(target),
        family=theirs.model_type,
        kept=len(plan.tensors),
        removed=added,
        carried_files=len(plan.carried),
        written_files=len(plan.written),
        **outcome.told,
        left_behind=[*opened.checkpoint.left_behind, *(f"config.json: {key}" for key in opened.dropped_config)],
        warnings=[*opened.checkpoint.notes, *notes, *outcome.warnings],
    )


def deviation(model: ResFormerForCausalLM) -> tuple[float, str]:
    """(how far the connections are from having no effect, where that is); 0 if they have none.

    Args:
        model: its added parameters are read, nothing else.
    """
    decoder, config = model.model, model.config
    found = [(abs(config.neutreno_lambda), "neutreno_lambda")]
    values = decoder.value_mixing_matrix()
    depth = decoder.depth_mixing_matrix()
    for name, matrix, plain in (
        ("value_mixing_matrix()", values, torch.eye(len(values))),
        ("depth_mixing_matrix()", depth, torch.eye(*depth.shape).roll(1, dims=1)),
    ):
        # A gate's entry is NaN: it is what the gate makes of each token, and the gates are looked at below.
        distance = (matrix - plain).abs()
        if config.value_residual == "gated" and matrix is values:
            distance[config.mixing_layers, 0] = 0.0
        distance = distance.nan_to_num(torch.inf)
        row, column = divmod(int(distance.argmax()), matrix.shape[1])
        found.append((float(distance[row, column]), f"{name}[{row}, {column}]"))
    for name, module in model.named_modules():
        if isinstance(module, ValueGate):
            found.append((abs(module.offset), f"the offset of {name}"))
        elif isinstance(module, GateProjection):
            found.append((float(module.weight.abs().max().nan_to_num(torch.inf)), f"{name}.weight"))
    return max(found)


def _check_sharing(source: Source) -> None:
    for name in ("value_sources", "key_sources"):
        readers = [layer for layer, read in enumerate(getattr(source.config, name) or ()) if layer != read]
        if readers:
            raise CheckpointError(
                f"{source.name}: cannot be reverted: `{name}` has dropped the projections of {len(readers)} of "
                f"{source.config.num_hidden_layers} layers. Convert the original again."
            )


def _recorded_family(source: Source) -> str | None:
    family = (read_record(source.folder) or {}).get("family")
    return family if isinstance(family, str) else None


def _nothing_more(folder: Path, outcome: Outcome) -> dict[str, str]:
    return {}
