"""Writes what was decided, has Transformers judge it, and puts it in place.

`retrofit`, `revert` and `bundle` differ in how they decide.
"""

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, TypeVar, get_args

import torch
from safetensors.torch import save
from transformers import GenerationConfig

from resformer.convert.carrying import (
    File,
    Transfer,
    carried,
    check_bytes,
    check_space,
    write_files,
    write_settings,
)
from resformer.convert.judging import build, check_same, without_code
from resformer.convert.logits import LogitsComparison, compare_logits, not_compared, not_finite, too_large, window_of
from resformer.convert.source import OpenedSource, Source, open_source
from resformer.convert.tokens import TokensComparison, compare_folders
from resformer.errors import OutputError, VerificationError, first_names, one_line
from resformer.files import AsDict, check_target, replacing, write_text
from resformer.names import standard_names
from resformer.progress import progress_bar
from resformer.safetensors_format import FLOATING, Tensor

Verify = Literal["auto", "headers", "hashes", "logits"]
#: Logits are compared beyond sliding windows up to this one: longer rows take long. `resformer verify` always does.
_LONGEST_WINDOW = 512


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The result, as it follows from the source and what the user asked for. Nothing is planned or written yet."""

    source: OpenedSource
    config: str  # the text of its config.json
    #: Name in the source's files -> in its model: tensors that the result lacks.
    dropped: Mapping[str, str] = field(default_factory=dict)
    unused: bool = False  # whether they may stay in linked files, as config.json then says
    added: Mapping[str, torch.Tensor] = field(default_factory=dict)  # by their names in a checkpoint
    added_names: frozenset[str] = frozenset()  # in its model
    side_files: tuple[File, ...] = ()  # beside those that the source's checkpoint has
    inexact_because: tuple[str, ...] = ()  # why it does not compute what the source does; empty if it does
    warnings: tuple[str, ...] = ()

    @property
    def model_bytes(self) -> int:
        """Of the larger model, which is compared."""
        return self.source.built.memory + sum(tensor.nbytes for tensor in self.added.values())


@dataclass(frozen=True, kw_only=True)
class Options:
    """How a conversion is carried out; `resformer.retrofit` says what each option does."""

    made_by: str = "convert"  # the command
    force: bool = False
    dry_run: bool = False
    link: bool = False
    verify: Verify = "auto"
    progress: bool = True

    def __post_init__(self) -> None:
        check_verify(self.verify)

    def start(self, source: str | Path, output: str | Path, revision: str | None, **heads: bool) -> tuple[Path, Source]:
        """(the output, which may be written; the source, of which nothing is read or fetched before)."""
        target = Path(output).expanduser()
        check_target(target, source, made_by=self.made_by, force=self.force)
        return target, open_source(source, revision, **heads)


@dataclass(frozen=True, kw_only=True)
class Report(AsDict):
    """The result of a conversion; of a dry run its forecast, with `verified` `""` and `logits` `None`."""

    source: str
    revision: str | None
    output: str
    kept: int  # tensors of the source that the result has
    carried_files: int  # weight files that are the source's, byte for byte
    written_files: int  # weight files that are new
    transfer: Transfer  # bytes linked, cloned, copied and written
    verified: str = ""  # headers, hashes or logits
    logits: LogitsComparison | None = None
    tokens: TokensComparison | None = None  # None: the source has no tokenizer that can be loaded
    left_behind: list[str] = field(default_factory=list)  # files, and keys of config.json, that do not go along
    warnings: list[str] = field(default_factory=list)


def published_name(source: Source) -> str:
    """Its name in files that are shared: of a local path only the last part, which tells of no machine."""
    return source.name if source.revision is not None else folder_name(source.name)


def folder_name(path: str) -> str:
    """The last part of a path, also of `.` and `..`; links keep their names."""
    return os.path.basename(os.path.abspath(os.path.expanduser(path)))


R = TypeVar("R", bound=Report)


def check_verify(verify: str) -> None:
    """Raises `ValueError` for what is no `Verify`."""
    if verify not in get_args(Verify):
        raise ValueError(f"verify={verify!r}: expected one of {', '.join(get_args(Verify))}.")


def carry_out(
    decision: Decision,
    output: Path,
    options: Options,
    report_of: Callable[..., R],
    finish: Callable[[R, Mapping[str, str | None]], Mapping[str, str]] = lambda report, digests: {},
) -> R:
    """Writes the result beside the output, verifies it, and puts it in place.

    `finish` gives further files, name -> text, of the report and the SHA-256 of each weight file where it is known.
    """
    source = decision.source
    weights = _weights(decision, link=options.link)
    along = {file.name: file for file in (*source.checkpoint.side_files, *decision.side_files)}
    side_files = along.values()
    carried_files = [file for file in weights if file.origin is not None]
    whole = sum(file.size for file in carried_files)
    transfer = Transfer(
        linked=whole if options.link else 0,
        copied=sum(file.size for file in side_files) + (0 if options.link else whole),
        written=sum(file.size for file in weights) - whole,
    )
    names = {tensor.name for file in weights for tensor in file.tensors}
    code = source.raw_config.keys() - without_code(source.raw_config).keys() - json.loads(decision.config).keys()
    left_behind = [name for name in source.checkpoint.left_behind if name not in along]
    report = report_of(
        source=source.name,
        revision=source.revision,
        output=str(output),
        kept=len(names & source.checkpoint.tensors.keys()),
        carried_files=len(carried_files),
        written_files=len(weights) - len(carried_files),
        transfer=transfer,
        left_behind=[*left_behind, *(f"config.json: {key}" for key in sorted(code))],
    )
    verify, warnings = options.verify, [*source.checkpoint.notes, *decision.warnings]
    if verify == "auto":
        verify = "logits"
        if reason := too_large(decision.model_bytes):
            verify, where = "hashes", "Where there is more: resformer verify SOURCE OUTPUT."
            warnings.append(f"The logits were not compared: {reason}. {where}")
    if options.dry_run:
        absent = (shard.size for shard in source.checkpoint.shards if not (source.folder / shard.name).exists())
        transfer.downloaded = 0 if source.on_this_disk else sum(absent)
        try:
            check_space(transfer.moved, output)
        except OutputError as error:
            warnings.append(f"As things are this would fail: {error}")
        return replace(report, warnings=warnings)
    total = transfer.linked + transfer.moved * (1 if verify == "headers" else 2)  # to be moved, and read back
    with (
        replacing(output, made_by=options.made_by, force=options.force) as partial,
        progress_bar(total=total, unit="B", unit_scale=True, desc=output.name, show=options.progress) as bar,
    ):
        check_space(transfer.moved, partial)  # what a killed run left has been removed
        write_files([*weights, *side_files], partial, link=options.link, progress=bar.update)
        write_settings(partial, decision.config, weights)
        digests = {}
        if verify != "headers":
            to_read = [file for file in (*weights, *side_files) if not (options.link and file.origin)]
            digests = check_bytes(to_read, partial, bar.update)
        result = build(partial, output)
        check_same(source.built, result, source.name, frozenset(decision.dropped.values()), decision.added_names)
        logits = _compare(decision, output, partial) if verify == "logits" else None
        tokens, notes = compare_folders(source, partial)
        warnings += [*generation_warnings(partial), *notes]
        report = replace(report, verified=verify, logits=logits, tokens=tokens, warnings=warnings)
        files = {} if source.hub is None else source.hub.files
        on_hub = {name: file.lfs.sha256 for name, file in files.items() if file.lfs is not None}
        known = {file.name: digests.get(file.name) or on_hub.get(file.origin or "") for file in weights}
        # Whether "auto" compared the logits depends on the memory that was free, and no file is to tell that.
        implied = replace(report, verified="hashes", logits=None) if options.verify == "auto" else report
        for name, text in finish(implied, known).items():
            write_text(partial / name, text)
    return report


def _weights(decision: Decision, *, link: bool) -> list[File]:
    """The weight files: the source's, those that lose tensors written anew, and one of what is added.

    With `link`, tensors that the result has no use for may stay in files that are linked whole.
    """
    shards = decision.source.checkpoint.shards
    gone = {} if link and decision.unused else decision.dropped
    kept = [shard for shard in shards if not shard.names <= gone.keys() or not shard.tensors]
    names = standard_names(len(kept) + bool(decision.added))
    files = [carried(shard, gone.keys(), name) for shard, name in zip(kept, names, strict=False)]
    if decision.added:
        codes = {name: code for code, name in FLOATING.items()}
        tensors = [
            Tensor(name, codes[str(each.dtype).removeprefix("torch.")], tuple(each.shape), 0, each.nbytes)
            for name, each in decision.added.items()
        ]
        added = save({name: each.contiguous() for name, each in decision.added.items()}, {"format": "pt"})
        files.append(File(names[-1], (added,), tuple(tensors)))
    return files


def _compare(decision: Decision, output: Path, partial: Path) -> LogitsComparison:
    """Compares the logits of the source and the result, each as Transformers loads it by default."""
    source = decision.source
    comparison = compare_logits(
        (source.name, source.to_load),
        (str(output), partial),
        window=window_of(source.config),
        longest=_LONGEST_WINDOW,
    )
    if not comparison.finite:
        wrong = not_finite(source.checkpoint.shards)
        raise not_compared(
            f"{source.folder}: the source's logits are not finite, so comparing them proves nothing: NaN or infinite "
            f"numbers are in {first_names(wrong) or 'none of its tensors: check config.json'}."
        )
    if not (decision.inexact_because or comparison.identical):
        own = ", ".join(json.loads(decision.config).get("connections") or {})
        why = f"the `plain` of {own} is not plain" if own else "this is a defect of resformer, please report it"
        raise VerificationError(
            f"The conversion of {source.name} is not exact, the logits {comparison}. Nothing was written; {why}."
        )
    if not math.isfinite(comparison.max_difference):
        raise not_compared(
            f"{output}: the result's logits are not finite, the source's are: its fixed coefficients overflow. Choose "
            "others."
        )
    return comparison


def generation_warnings(folder: Path) -> Iterator[str]:
    """Says so if generation_config.json has values that Transformers refuses to save with others."""
    if (folder / "generation_config.json").exists():
        try:
            GenerationConfig.from_pretrained(folder, local_files_only=True).validate(strict=True)
        except Exception as error:  # its own validator's, or of a file that means something else
            told = "generation_config.json goes along as it is; Transformers does not save it with a change"
            yield f"{told}: {one_line(error)}"
