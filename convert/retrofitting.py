"""Retrofits: a Llama-style checkpoint in, a ResFormer checkpoint with added connections out."""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers import __version__ as transformers_version

from resformer.configuration import ResFormerConfig
from resformer.configuration.methods import method_fields
from resformer.convert.errors import CheckpointError, VerificationError
from resformer.convert.families import backbone_fields
from resformer.convert.source import Source, open_source
from resformer.convert.verification import LogitsComparison, compare_logits
from resformer.model_cards import retrofit_card
from resformer.modeling import ResFormerForCausalLM
from resformer.version import __version__

__all__ = ["CONNECTION_FIELDS", "RetrofitReport", "losses", "retrofit"]

#: The configuration fields that a retrofit may set; all others are the source's.
CONNECTION_FIELDS = (
    "value_residual value_residual_init value_residual_layers neutreno_lambda value_sources key_sources dwa "
    "dwa_dilation dwa_period"
).split()
_LEARNED_MODES = ("learnable", "learnable_plus", "dense", "gated")


@dataclass(frozen=True)
class RetrofitReport:
    """What a retrofit did, or would do (`verification` is then `None`)."""

    source: str
    revision: str | None
    output: str
    family: str
    method: str
    fields: dict[str, Any]  # the connection fields, as they stand in the new config.json
    losses: list[str]  # why it does not compute what its source does; empty for an exact retrofit
    parameters: int
    added: dict[str, int]  # parameter name -> number of elements
    dropped: list[str]  # tensors of the source that the method has no use for
    verification: LogitsComparison | None = None
    warnings: list[str] = field(default_factory=list)

    @property
    def exact(self) -> bool:
        return not self.losses

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
    **fields: Any,
) -> RetrofitReport:
    """Writes `source` with the connections of `method` to the folder `output`.

    Methods that can start as the identity do ((0, 1) for value residuals, one-hot depth averages), so that the result
    computes what its source does, bit for bit; the saved checkpoint is reloaded and its logits compared before it is
    put in place. Configuration, weights, tokenizer, chat templates and generation configuration go along.

    Args:
        source: a folder with safetensors, a `.gguf` file (dequantised), or a Hub id.
        output: a new or empty folder.
        method: one of `resformer.configuration.METHODS`.
        lossy: allow a method, or fields, that change what the model computes.
        force: replace what `output` holds.
        dry_run: read the configuration, report, write nothing.
        revision: branch, tag or commit, for a Hub id.
        dtype: convert floating tensors to this; default: the source's own (float32 for GGUF).
        fields: connection fields of `ResFormerConfig` that go on top of the method's, `dwa=True` for one.

    Raises:
        CheckpointError: the source cannot be converted, the method needs `lossy`, or `output` is in the way.
        VerificationError: the result does not compute what the source does. Nothing is written.
        ValueError: `method` or `fields` are wrong.
    """
    opened = open_source(source, revision)
    target = Path(output).expanduser()
    _check_output(target, opened, force=force)
    source_config = opened.config()
    backbone = backbone_fields(source_config)
    connections = _connections(method, backbone["num_hidden_layers"], fields)
    try:
        config = ResFormerConfig(**backbone)
    except Exception as error:  # any of the validators'
        raise CheckpointError(f"{opened.folder}: the source's configuration is not valid: {error}") from error
    config = ResFormerConfig(**backbone, **connections)
    lost = losses(config)
    if lost and not lossy:
        raise CheckpointError(
            f"The result would not compute what {opened.name} does: {'; '.join(lost)}. Allow it with --lossy "
            "(lossy=True), or choose an exact method."
        )
    added, dropped, parameters = _parameter_changes(config, source_config)
    report = RetrofitReport(
        source=opened.name,
        revision=opened.revision,
        output=str(target),
        family=source_config.model_type,
        method=method,
        fields={name: getattr(config, name) for name in CONNECTION_FIELDS if name in connections},
        losses=lost,
        parameters=parameters,
        added=added,
        dropped=dropped,
    )
    if dry_run:
        return report

    original = _load(opened, dtype)
    model = _build(config, original, added, dropped)
    warnings = []
    with _replacing(target) as partial:
        model.save_pretrained(partial)
        del model
        if not opened.save_tokenizer(partial):
            warnings.append(f"{opened.name} has no tokenizer that can be read: save one beside the result.")
        reloaded = AutoModelForCausalLM.from_pretrained(partial, dtype=original.dtype)
        verification = compare_logits(original, reloaded)
        if not lost and not verification.identical:
            raise VerificationError(
                f"The retrofit of {opened.name} is not exact, the logits {verification}. Nothing was written; this is "
                "a defect of resformer, please report it."
            )
        report = RetrofitReport(
            **{**vars(report), "verification": verification, "warnings": warnings},
        )
        _write_provenance(partial, report)
    return report


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


def _connections(method: str, num_hidden_layers: int, fields: dict[str, Any]) -> dict[str, Any]:
    for name in fields:
        if name not in CONNECTION_FIELDS:
            raise ValueError(
                f"`{name}` is not a field that a retrofit sets: expected one of {', '.join(CONNECTION_FIELDS)}."
            )
    connections = {**method_fields(method, num_hidden_layers), **fields}
    if connections.get("value_residual") in _LEARNED_MODES:
        connections.setdefault("value_residual_init", [0.0, 1.0])
    return connections


def _parameter_changes(config: ResFormerConfig, source_config: Any) -> tuple[dict[str, int], list[str], int]:
    """(added parameters, dropped tensors, number of parameters), from models without memory."""
    with torch.device("meta"):
        ours = dict(ResFormerForCausalLM(config).named_parameters())
        theirs = dict(AutoModelForCausalLM.from_config(source_config).named_parameters())
    added = {name: parameter.numel() for name, parameter in ours.items() if name not in theirs}
    dropped = [name for name in theirs if name not in ours]
    return added, dropped, sum(parameter.numel() for parameter in ours.values())


def _load(source: Source, dtype: str | torch.dtype) -> PreTrainedModel:
    if source.gguf_file is not None and dtype == "auto":
        dtype = torch.float32
    try:
        model, loading = AutoModelForCausalLM.from_pretrained(**source.location, dtype=dtype, output_loading_info=True)
    except ImportError:
        raise
    except Exception as error:  # Transformers and safetensors raise nearly anything for a bad file
        raise CheckpointError(f"{source.folder}: cannot be loaded: {error}") from error
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        if problems := loading.get(kind):
            raise CheckpointError(f"{source.folder}: {kind.replace('_', ' ')}: {', '.join(map(str, sorted(problems)))}")
    return model.eval()


def _build(
    config: ResFormerConfig, original: PreTrainedModel, added: dict[str, int], dropped: list[str]
) -> ResFormerForCausalLM:
    model = AutoModelForCausalLM.from_config(config, dtype=original.dtype)
    keys = model.load_state_dict(original.state_dict(), strict=False)
    if sorted(keys.missing_keys) != sorted(added) or sorted(keys.unexpected_keys) != sorted(dropped):
        raise CheckpointError(
            f"The source's tensors do not fit the decoder: missing {keys.missing_keys}, left over "
            f"{keys.unexpected_keys}; expected to add {sorted(added)} and to drop {dropped}."
        )
    model.generation_config = original.generation_config
    return model


def _check_output(target: Path, source: Source, *, force: bool) -> None:
    here, there = target.resolve(), source.folder.resolve()
    if here == there or here in there.parents:
        raise CheckpointError(f"{target}: holds the source {source.name}; choose another output.")
    if there in here.parents and source.gguf_file is None:
        raise CheckpointError(f"{target}: lies in the source folder {source.folder}; choose another output.")
    if target.exists() and not target.is_dir():
        raise CheckpointError(f"{target}: is a file; choose another output.")
    if target.is_dir() and any(target.iterdir()) and not force:
        raise CheckpointError(
            f"{target}: is not empty; replace it with --force (force=True), or choose another output."
        )


@contextmanager
def _replacing(target: Path) -> Iterator[Path]:
    """A folder beside `target` that takes its place when the block ends well, and vanishes when it does not."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.partial-", dir=target.parent))
    try:
        yield partial
        umask = os.umask(0)
        os.umask(umask)
        partial.chmod(0o777 & ~umask)  # mkdtemp's and safetensors' modes are private
        for file in partial.rglob("*"):
            file.chmod((0o777 if file.is_dir() else 0o666) & ~umask)
        old = partial.with_name(f"{partial.name}.old")
        if target.exists():
            target.rename(old)
        partial.rename(target)
        shutil.rmtree(old, ignore_errors=True)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _write_provenance(folder: Path, report: RetrofitReport) -> None:
    """The model card, and a record that two runs write alike: no clock, no machine."""
    # A path says more about a machine than about a model: of a local source only the last part is told.
    source = report.source if report.revision is not None else Path(report.source).name
    told = {**report.as_dict(), "source": source}
    record = {
        **{key: value for key, value in told.items() if key not in ("output", "warnings")},
        "versions": {"resformer": __version__, "torch": torch.__version__, "transformers": transformers_version},
    }
    text = json.dumps(record, indent=2, sort_keys=True) + "\n"
    (folder / "resformer_conversion.json").write_text(text, encoding="utf-8")
    retrofit_card(told).save(folder / "README.md")
