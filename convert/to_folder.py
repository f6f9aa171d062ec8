"""Plans, writes and verifies what was decided, and puts it in place."""

import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, TypeVar, get_args

from transformers import GenerationConfig

from resformer.convert.deciding import Decision
from resformer.convert.logits import LogitsComparison, compare_logits, memory_for_logits, not_finite, window_of
from resformer.convert.other_formats import load_model
from resformer.convert.planning import Plan, make_plan
from resformer.convert.reading import Checkpoint, read_checkpoint
from resformer.convert.reading_back import check_bytes, check_headers
from resformer.convert.sameness import check_result
from resformer.convert.source import Source
from resformer.convert.tensors import Rounding
from resformer.convert.tokens import TokensComparison, carry_tokenizer
from resformer.convert.writing import Transfer, can_be_linked, check_space, transfer_of, write_plan
from resformer.environment import free_memory
from resformer.errors import CheckpointError, OutputError, VerificationError, first_names, one_line
from resformer.files import AsDict, replacing, write_text
from resformer.progress import progress_bar

Verify = Literal["auto", "headers", "hashes", "logits"]
#: Logits are compared beyond sliding windows up to this one: longer rows take long. `resformer verify` always does.
_LONGEST_WINDOW = 512


@dataclass(frozen=True, kw_only=True)
class Options:
    """How a conversion is carried out; `resformer.retrofit` says what each option does.

    Raises:
        ValueError: `verify` is no `Verify`, or `max_shard_size` no size.
    """

    made_by: str = "convert"  # the command
    force: bool = False
    dry_run: bool = False
    link: bool = False
    verify: Verify = "auto"
    max_shard_size: int | str | None = None
    progress: bool = True

    def __post_init__(self) -> None:
        check_verify(self.verify)
        _ = self.shard_bytes

    @property
    def shard_bytes(self) -> int | None:
        """`max_shard_size` in bytes: a number, or one with a unit, as `save_pretrained` takes it."""
        if self.max_shard_size is None:
            return None
        match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]B)?", str(self.max_shard_size).strip(), re.IGNORECASE)
        count = int(float(match[1]) * 1000 ** " KMGT".index((match[2] or " ")[0].upper())) if match else 0
        if count < 1:
            raise ValueError(f"max_shard_size={self.max_shard_size!r}: expected a size such as 5GB, or bytes.")
        return count


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
    tokenizer_classes: tuple[str | None, str | None] | None = None  # that both name, where they differ
    rounding: Rounding = field(default_factory=Rounding)  # by a change of dtype
    left_behind: list[str] = field(default_factory=list)  # files, and keys of config.json, that do not go along
    warnings: list[str] = field(default_factory=list)


def published_name(source: Source) -> str:
    """Its name in files that are shared: of a local path only the last part, which tells of no machine."""
    return source.name if source.revision is not None else folder_name(source.name)


def folder_name(path: str) -> str:
    """The last part of a path, also of `.` and `..`; links keep their names."""
    return os.path.basename(os.path.abspath(os.path.expanduser(path)))


R = TypeVar("R", bound=Report)
#: Given the report and the SHA-256 of each weight file, where it is known: name -> text of further files.
Finish = Callable[[R, Mapping[str, str | None]], Mapping[str, str]]


def check_verify(verify: str) -> None:
    """Raises `ValueError` for what is no `Verify`."""
    if verify not in get_args(Verify):
        raise ValueError(f"verify={verify!r}: expected one of {', '.join(get_args(Verify))}.")


def carry_out(decision: Decision, output: Path, options: Options, report_of: Callable[..., R], finish: Finish[R]) -> R:
    """Writes the result beside the output, verifies it, has `finish` describe it, and puts it in place."""
    plan = make_plan(decision, options.shard_bytes)
    forecast = transfer_of(plan, can_be_linked(plan, output) if options.link else ())
    report = make_report(decision, output, plan, forecast, report_of)
    verify, warnings = _choose(decision, options)
    if options.dry_run:
        shards = decision.source.checkpoint.shards
        forecast.downloaded = sum(each.size for each in shards if not all(t.on_this_disk for t in each.tensors))
        try:
            check_space(forecast.moved, output)
        except OutputError as error:
            warnings.append(f"As things are this would fail: {error}")
        return replace(report, warnings=[*report.warnings, *warnings])
    total = forecast.linked + forecast.moved * (1 if verify == "headers" else 2)  # to be moved, and read back
    with (
        replacing(output, made_by=options.made_by, force=options.force) as partial,
        progress_bar(total=total, unit="B", unit_scale=True, desc=output.name, show=options.progress) as bar,
    ):
        check_space(forecast.moved, partial)  # what a killed run left has been removed
        written = write_plan(plan, partial, link=options.link, progress=bar.update)
        stored = read_checkpoint(partial)
        check_headers(partial, stored.tensors, plan.tensors)
        digests = check_bytes(stored, plan, written.linked, bar.update) if verify != "headers" else {}
        logits = _compare(decision, output, partial, written.rounding) if verify == "logits" else None
        warnings += [*written.notes, *generation_warnings(stored)]
        if decision.source.gguf and decision.source.model is not None:
            decision.source.model.generation_config.save_pretrained(partial)
        tokenizer = carry_tokenizer(decision.source, partial)
        report = replace(
            report,
            transfer=transfer_of(plan, written.linked),
            verified=verify,
            logits=logits,
            tokens=tokenizer.tokens,
            tokenizer_classes=tokenizer.classes,
            rounding=written.rounding,
            warnings=[*report.warnings, *warnings, *tokenizer.warnings],
        )
        on_hub = decision.source.sha256_on_hub()
        known = {shard.name: digests.get(shard.name) or on_hub.get(shard.origin or "") for shard in plan.shards}
        # Whether "auto" compared the logits depends on the memory that was free, and no file is to tell that.
        implied = replace(report, verified="hashes", logits=None) if options.verify == "auto" else report
        for name, text in finish(implied, known).items():
            write_text(partial / name, text)
    return report


def make_report(
    decision: Decision, output: Path | str, plan: Plan, transfer: Transfer, report_of: Callable[..., R]
) -> R:
    """The report of what is to be done, after what needs no weights has been compared."""
    source = decision.source
    along = {file.name: file for file in plan.side_files}
    check_result(source.name, source.facts(), plan.config, along)
    left_behind = [name for name in source.checkpoint.left_behind if name not in along]
    return report_of(
        source=source.name,
        revision=source.revision,
        output=str(output),
        kept=sum(name in source.checkpoint.tensors for name in plan.tensors),
        carried_files=len(plan.carried),
        written_files=len(plan.written),
        transfer=transfer,
        left_behind=[*left_behind, *(f"config.json: {key}" for key in source.dropped_config)],
        warnings=[*source.checkpoint.notes, *decision.warnings],
    )


def _choose(decision: Decision, options: Options) -> tuple[str, list[str]]:
    """(the verification, warnings): `auto` is the logits where memory suffices."""
    if options.verify != "auto":
        return options.verify, []
    source, needed = decision.source, decision.memory
    if source.dequantised and source.model is None:  # a dry run; else the dequantised model is in memory already
        needed += memory_for_logits(source.checkpoint, source.dtype)
    free = free_memory()
    if needed <= free:
        return "logits", []
    return "hashes", [
        f"The logits were not compared: that takes {needed / 1e9:.1f} GB of memory, {free / 1e9:.1f} GB are free. "
        "Where there is more: resformer verify SOURCE OUTPUT."
    ]


def _compare(decision: Decision, output: Path, partial: Path, rounding: Rounding) -> LogitsComparison:
    """Compares the logits of the source and the result, each in the dtype of most of its weights."""
    source, dtype = decision.source, decision.dtype
    window = window_of(source.config)
    comparison = compare_logits(
        source.load,
        lambda: load_model(output, partial, dtype=dtype),
        row=64 if window > _LONGEST_WINDOW else max(64, window + 32),
        window=window,
    )
    if not comparison.finite:
        wrong = not_finite(source.checkpoint.tensors.values())
        raise CheckpointError(
            f"{source.folder}: the source's logits are not finite, so comparing them proves nothing: NaN or infinite "
            f"numbers are in {first_names(wrong) or 'none of its tensors: check config.json'}. "
            "Convert it anyway, its bytes unchanged, with --verify hashes (verify='hashes').",
            "--verify hashes",
        )
    if not (decision.inexact_because or dtype != source.dtype or comparison.identical):
        raise VerificationError(
            f"The conversion of {source.name} is not exact, the logits {comparison}. Nothing was written; this is a "
            "defect of resformer, please report it."
        )
    if not math.isfinite(comparison.max_difference):
        reason = "its fixed coefficients overflow"
        if dtype != source.dtype:
            old, new = (str(each).removeprefix("torch.") for each in (source.dtype, dtype))
            reason = f"converting from {old} to {new} made {rounding.overflowed:,} weights infinite"
        raise CheckpointError(
            f"{output}: the result's logits are not finite, the source's are: {reason}. Choose another, or convert it "
            "anyway with --verify hashes (verify='hashes').",
            "--verify hashes",
        )
    return comparison


def generation_warnings(checkpoint: Checkpoint) -> Iterator[str]:
    """Says so if generation_config.json has values that Transformers refuses to save again."""
    for file in checkpoint.side_files:
        if file.name == "generation_config.json":
            try:
                GenerationConfig.from_pretrained(checkpoint.folder, local_files_only=True).validate(strict=True)
            except Exception as error:  # its own validator's, or of a file that means something else
                reason = one_line(error)
                yield f"generation_config.json goes along as it is, but saving the model again will fail: {reason}"
