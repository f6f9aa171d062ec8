"""Pushes a checkpoint folder to the Hub: all checks first, then one commit."""

import json
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from huggingface_hub import constants
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from resformer.configuration.connected_config import ConnectedConfig
from resformer.configuration.methods import method_of
from resformer.convert.bundling import config_with_code
from resformer.convert.connected_families import connection_config, view
from resformer.convert.remote_code import remote_code
from resformer.convert.source import open_source
from resformer.errors import CheckpointError, first_names, one_line
from resformer.files import AsDict
from resformer.hub import HubError as HubError
from resformer.hub import Push
from resformer.model_cards import card_metadata
from resformer.names import CARD, CONFIG, CONNECTIONS, DESCRIPTIONS, INDEX, LISTING, LOADED_INSTEAD, SIDE_FILES, SINGLE
from resformer.safetensors_format import read_shard
from resformer.untrusted import MOST_BYTES, names_in, read_bounded, read_json, regular_file


@dataclass(frozen=True)
class PushReport(AsDict):
    """The result of a push, or the forecast of a dry run."""

    checkpoint: str
    repo_id: str
    revision: str  # the branch
    files: dict[str, int]  # name -> bytes
    left_behind: list[str]  # names in the folder that are no part of a checkpoint
    deleted: list[str] = field(default_factory=list)  # weights that the branch held before
    commit: str | None = None  # None: nothing was pushed
    url: str | None = None  # of the commit
    tag: str | None = None
    warnings: list[str] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        return sum(self.files.values())


def push(
    checkpoint: str | Path,
    repo_id: str,
    *,
    private: bool = False,
    revision: str | None = None,
    message: str | None = None,
    bundle: bool = False,
    tag: str | None = None,
    create_pr: bool = False,
    dry_run: bool = False,
) -> PushReport:
    """Puts a checkpoint folder on the Hub, in one commit; the token is `HF_TOKEN` or that of `hf auth login`.

    Weights and an `adapter_config.json` of an earlier push, which Transformers would load instead, are deleted in the
    same commit. Passing errors are tried again; after a failure, a second push uploads only what is missing.

    Args:
        checkpoint: a folder with `config.json`, safetensors and a model card, `README.md`; or one of
            `resformer.save_connections`.
        repo_id: `owner/name`, or `name` for one of your own; made if there is none.
        private: make it private; refused if it exists and is public.
        revision: the branch, made from `main` if there is none; default: `main`.
        message: of the commit.
        bundle: add the code that loads the checkpoint without this package, see `resformer.convert.bundle`; other
            Python files are left behind.
        tag: name the commit; refused if the name is taken.
        create_pr: propose the commit, as a pull request, to a repository that exists and may be of others.
        dry_run: check the folder and say what would go; the Hub is not asked.

    Raises:
        ValueError: `repo_id` is no name of the Hub, or there is nothing to bundle.
        CheckpointError: the folder is no checkpoint that loads, or its card is missing or invalid.
        HubError: the Hub refuses, or cannot be reached.
    """
    validate_repo_id(repo_id)
    if create_pr and (private or tag is not None or revision is not None):
        raise ValueError("A pull request is made to `main` of a repository: leave --private, --tag and --revision out.")
    folder = Path(checkpoint).expanduser()
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: expected a checkpoint folder.")
    names = [name for name in names_in(folder) if name != LISTING]
    before, notes = _states(folder, names), tuple[str, ...]()
    if CONNECTIONS in names and not {SINGLE, INDEX} & {*names}:  # of `save_connections`
        read_shard(regular_file(folder / CONNECTIONS, folder, within=True))
        config, code = read_json(folder / CONFIG), {}
        kind = f"connections for {(config.get('base_model') or {}).get('name')}"
        shards, taken = [CONNECTIONS], {CONNECTIONS, CONFIG}
        if bundle:
            raise ValueError("--bundle is for checkpoints: connections alone are added by the package, to their model.")
    else:
        opened = open_source(folder, heads=True).fetch(headers_only=True)
        config, notes = dict(opened.raw_config), opened.checkpoint.notes
        has_code = isinstance(opened.config, ConnectedConfig) and (bundle or "auto_map" in config)
        code = remote_code(opened.config) if has_code else {}
        kind = f"{method_of(view(connection_config(opened.config))) or opened.config.model_type} checkpoint"
        shards = [shard.name for shard in opened.checkpoint.shards]
        taken = {CONFIG, *shards, *([INDEX] if shards != [SINGLE] else []), *(code if "auto_map" in config else ())}
    contents: dict[str, Path | bytes] = {
        name: real if name in shards else read_bounded(real, MOST_BYTES)
        for name in names
        if name in taken or SIDE_FILES.fullmatch(name) or DESCRIPTIONS.fullmatch(name)
        for real in (regular_file(folder / name, folder, within=True),)
    }
    warnings = [*notes, *_check_card(folder, contents.get(CARD), repo_id, bundle=bundle)]

    def check_unchanged() -> None:
        after = _states(folder, names)
        if changed := {name for name in names if before[name] != after[name]}:
            raise CheckpointError(
                f"{folder}: {first_names(changed)} changed meanwhile; push it when nothing writes there."
            )

    check_unchanged()
    if bundle:
        code[CONFIG] = json.dumps(config_with_code(config, opened.config, str(folder)), indent=2, sort_keys=True) + "\n"
        contents |= {name: text.encode() for name, text in code.items()}
    elif "auto_map" in config and not code.keys() <= contents.keys():
        warnings.append("config.json names code (auto_map) that is not in the folder: push it with --bundle.")
    report = PushReport(
        checkpoint=str(folder),
        repo_id=repo_id,
        revision=revision or constants.DEFAULT_REVISION,
        files={
            name: len(content) if isinstance(content, bytes) else content.stat().st_size
            for name, content in sorted(contents.items())
        },
        left_behind=sorted({*names} - contents.keys()),
        tag=tag,
        warnings=warnings,
    )
    if dry_run:
        return report
    done = Push(
        repo_id=repo_id,
        contents=contents,
        message=message or f"Upload {kind}",
        superseded=lambda name: LOADED_INSTEAD.fullmatch(name) is not None,
        check=check_unchanged,
        source=str(folder),
        revision=report.revision,
        private=private,
        tag=tag,
        create_pr=create_pr,
    ).run()
    return replace(report, **done)


def _states(folder: Path, names: Iterable[str]) -> dict[str, object]:
    """What changes when a file is written: size, time and place on the disk."""
    states: dict[str, object] = dict.fromkeys(names)
    for name in states:
        with suppress(OSError):  # it is gone
            status = (folder / name).stat()
            states[name] = status.st_size, status.st_mtime_ns, status.st_ino
    return states


def _check_card(folder: Path, card: Path | bytes | None, repo_id: str, *, bundle: bool) -> list[str]:
    """Warnings about the model card."""
    path = folder / CARD
    if not isinstance(card, bytes):
        raise CheckpointError(f"{path}: there is no model card. Write one, with its metadata, before others get this.")
    try:
        text = card.decode("utf-8")
        metadata = card_metadata(text)
    except ValueError as error:
        raise CheckpointError(f"{path}: its metadata cannot be read: {one_line(error)}") from error
    if not metadata:
        raise CheckpointError(f"{path}: has no metadata; begin it with `---`, `library_name: transformers`, `---`.")
    warnings, option = [], f"--repository {repo_id}"
    if repo_id not in text:
        warnings.append(
            f"README.md does not name {repo_id}: its code may load something else. One that does: resformer card "
            f"{folder} {option}."
        )
    if bundle and "trust_remote_code=True" not in text:
        warnings.append(
            "README.md loads the checkpoint without trust_remote_code=True, which readers of a bundle need. One that "
            f"does: resformer bundle {folder} BUNDLE; resformer card BUNDLE {option}."
        )
    return warnings
