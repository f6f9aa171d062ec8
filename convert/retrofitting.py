"""Retrofits: a checkpoint of any family in, the same with added connections out."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import __version__ as transformers_version

from resformer.configuration.methods import CONNECTION_FIELDS, connections_of, method_fields, method_of
from resformer.convert.connected_families import (
    config_text,
    connection_config,
    family_config,
    family_name,
    view,
    with_connections,
)
from resformer.convert.connections import added_kinds, added_shapes, initial_connections, meta_model, stored_names
from resformer.convert.logits import memory_of
from resformer.convert.to_folder import Decision, Options, Report, Verify, carry_out, folder_name, published_name
from resformer.errors import CheckpointError, did_you_mean, first_names
from resformer.model_cards import base_model_of, carried_metadata, model_card
from resformer.modeling.connecting import chosen_fields, connected_config, connection_field_names, with_further
from resformer.names import RECORD
from resformer.record import config_digest
from resformer.version import __version__

#: Fields of a report in which two runs may differ.
UNRECORDED = ("output", "warnings", "transfer", "memory", "left_behind")
#: Options that are Transformers' own now -> its two lines.
_GONE = {
    "dtype": 'AutoModelForCausalLM.from_pretrained(OUTPUT, dtype="bfloat16").save_pretrained(FOLDER)',
    "max_shard_size": 'AutoModelForCausalLM.from_pretrained(OUTPUT).save_pretrained(FOLDER, max_shard_size="5GB")',
}


@dataclass(frozen=True, kw_only=True)
class RetrofitReport(Report):
    """The result of a retrofit, or the forecast of a dry run."""

    family: str
    method: str | None  # None: the connections have no name
    fields: dict[str, Any]  # the connection fields, as they stand in the new config.json
    source_fields: dict[str, Any]  # those that the source had already; its coefficients stay
    inexact_because: list[str]  # why the connections do not start as the identity; empty if they do
    dtype: str  # in which Transformers loads both by default
    parameters: int
    added: dict[str, int]  # parameter name -> number of elements
    dropped: list[str]  # tensors of the source that the method has no use for
    memory: int  # bytes that comparing the logits takes

    @property
    def exact(self) -> bool:
        """Whether it computes what its source does bit for bit."""
        return not self.inexact_because


def retrofit(
    source: str | Path,
    output: str | Path,
    method: str = "resformer",
    *,
    lossy: bool = False,
    force: bool = False,
    dry_run: bool = False,
    revision: str | None = None,
    link: bool = False,
    verify: Verify = "auto",
    progress: bool = True,
    **fields: Any,
) -> RetrofitReport:
    """Writes `source` with the connections of `method` to the folder `output`.

    Methods that can start as the identity do ((0, 1) for value residuals, one-hot depth averages), so that the result
    computes what its source does, bit for bit. Weight files are the source's, whole; what is added goes into one small
    new file. Configuration, tokenizer, chat templates, generation configuration and licence go along. Source and
    result are loaded by Transformers and compared before the result is put in place: a run that fails or is interrupted
    leaves nothing.

    A checkpoint with connections gets further ones: those that it has, and their coefficients, stay as they are.

    Args:
        source: a folder with safetensors, or a Hub id.
        output: a new or empty folder.
        method: one of `resformer.configuration.METHODS`; `"transformer"`, without fields, writes the plain family.
        lossy: allow a method, or fields, that change what the model computes.
        force: replace an earlier result of this command.
        dry_run: read, check, report, write nothing.
        revision: branch, tag or commit, for a Hub id.
        link: hard-link weight files instead of copying them. Instant, but editing one in place changes both, and of a
            Hub id they are the cache's. What a method has no use for then stays in the files.
        verify: `"headers"` compares what Transformers builds of both without weights; `"hashes"` also reads back every
            byte that was written; `"logits"` also loads both models, one after the other, and compares their logits on
            fixed prompts. `"auto"` is logits where the model fits into free memory, else hashes.
        progress: show one bar, in bytes; where there is neither a terminal nor a notebook, a line every 10 seconds.
        fields: connection fields that go on top of the method's, `dwa=True` for one.

    Raises:
        CheckpointError: the source cannot be converted, the method needs `lossy`, or `output` is in the way.
        HubError: the Hub refuses, or cannot be reached.
        OutputError: the disk is full or read-only. Nothing is left behind.
        VerificationError: the result does not hold or compute what the source does. No output folder is changed.
        ValueError: `method`, `fields` or `verify` are wrong.
    """
    options = Options(force=force, dry_run=dry_run, link=link, verify=verify, progress=progress)
    known = connection_field_names()
    for field in sorted(fields.keys() - {*known}):
        if field in _GONE:
            raise ValueError(
                f"`{field}` is not of a conversion, whose weights are the source's. Afterwards: import resformer; "
                f"{_GONE[field]}; AutoTokenizer.from_pretrained(OUTPUT).save_pretrained(FOLDER)."
            )
        hint = did_you_mean(field, known)
        raise ValueError(f"`{field}` is not a field that a retrofit sets: expected one of {', '.join(known)}.{hint}")
    method_fields(method, 1)  # an unknown method is refused before anything is read or fetched
    target, opened = options.start(source, output, revision)
    before = connection_config(opened.config)
    had = connections_of(before)
    connected_config(family_config(before), method, **fields)  # refuses what no family can have
    connections = with_further(before, chosen_fields(before, method, fields), plain=True)
    config = with_connections(before, connections)
    shape = view(config)  # refuses connections that a family's decoder cannot have
    added = added_kinds(config, before)
    if had and not added:
        raise CheckpointError(f"{opened.name}: has these connections already: {had}. Choose others with --method.")
    reasons = [*dict.fromkeys(reason for kind in added for reason in kind.inexact_because(shape))]
    if reasons and not lossy:
        raise CheckpointError(
            f"The result would not compute what {opened.name} does: {'; '.join(reasons)}. Allow it with --lossy "
            "(lossy=True), or choose an exact method.",
            "--lossy",
        )
    fetched = opened.fetch(headers_only=dry_run)
    # Beside a checkpoint, README.md is its card.
    source_card = carried_metadata(fetched.folder / "README.md")
    # A model that is trained and saved elsewhere keeps it, without a record. The nearest on the Hub, if there is one.
    base = base_model_of(fetched.config) if fetched.revision is None else {}
    licence = {name: value for name, value in source_card.items() if name.startswith("license")}
    named = {"name": published_name(fetched), "revision": fetched.revision, **licence}
    config.base_model = (base or named) | {"family": family_name(before)}
    dtype = fetched.built.dtype
    expected = {key: tuple(tensor.shape) for key, tensor in meta_model(config).state_dict().items()}
    dropped = _dropped(fetched.built.tensors.keys() - expected.keys(), before, fetched.checkpoint.tensors)
    existing = added_shapes(before)
    parameters = {key: each for key, each in initial_connections(config, dtype).items() if key not in existing}
    if taken := parameters.keys() & fetched.checkpoint.tensors.keys():
        raise CheckpointError(f"{fetched.name}: holds {first_names(taken)} already, which are names of connections.")
    written = config if connections_of(config) else family_config(config)
    decision = Decision(
        source=fetched,
        config=config_text(fetched.raw_config, written, dtype, frozenset(dropped) if link else frozenset()),
        dropped=dropped,
        unused=True,
        added=parameters,
        added_names=frozenset(expected.keys() - fetched.built.tensors.keys()),
        inexact_because=tuple(reasons),
    )
    report_of = partial(
        RetrofitReport,
        family=family_name(before),
        method=method_of(shape) if fields or had else method,
        fields={name: getattr(config, name) for name in CONNECTION_FIELDS if name in connections},
        source_fields=had,
        inexact_because=reasons,
        dtype=str(dtype).removeprefix("torch."),
        parameters=sum(math.prod(shape) for key, shape in expected.items() if key not in fetched.built.tied),
        added={key: each.numel() for key, each in parameters.items()},
        dropped=sorted(dropped),
        memory=memory_of(decision.model_bytes),
    )

    def finish(report: RetrofitReport, digests: Mapping[str, str | None]) -> dict[str, str]:
        record = {key: value for key, value in report.as_dict().items() if key not in UNRECORDED} | {
            "source": published_name(fetched),
            "source_card": source_card,
            "config_sha256": config_digest(json.loads(decision.config)),
            "files": {file: {"sha256": digest} for file, digest in digests.items()},
            "versions": {"resformer": __version__, "torch": torch.__version__, "transformers": transformers_version},
        }
        tokenizer = bool(fetched.checkpoint.tokenizer_files)
        card = model_card(record, folder_name(report.output), config=config, tokenizer=tokenizer)
        return {RECORD: json.dumps(record, indent=2, sort_keys=True) + "\n", "README.md": str(card)}

    return carry_out(decision, target, options, report_of, finish)


def _dropped(names: set[str], before: Any, tensors: Mapping[str, object]) -> dict[str, str]:
    """Tensors that the result's model has no use for: name in the source's files -> in its model."""
    stored = stored_names(meta_model(before), names) | {name: name for name in names & tensors.keys()}
    if unknown := {name for name in names if stored.get(name) not in tensors}:
        raise CheckpointError(
            f"The method has no use for {first_names(unknown)}, which the source's files hold together with others: "
            "they cannot be taken out. Choose another method."
        )
    return {stored[name]: name for name in names}
