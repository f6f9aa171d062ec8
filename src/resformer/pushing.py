"""Pushes a checkpoint folder to the Hub: all checks first, then one commit."""

import json
import shlex
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, constants, get_token
from huggingface_hub.errors import (  # type: ignore[attr-defined]
    HfHubHTTPError,
    HTTPError,  # httpx's or httpx2's
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]
from huggingface_hub.utils.sha import git_hash

from resformer.configuration.connected_config import ConnectedConfig
from resformer.configuration.methods import method_of
from resformer.convert.bundling import config_with_code, remote_code
from resformer.convert.connected_families import connection_config, view
from resformer.convert.source import open_source
from resformer.errors import CheckpointError, VerificationError, first_names, one_line
from resformer.files import AsDict
from resformer.hub import HubError as HubError
from resformer.hub import Result, files_of, hub_api, passing, retried
from resformer.model_cards import card_metadata
from resformer.names import CARD, CONFIG, CONNECTIONS, DESCRIPTIONS, INDEX, LISTING, LOADED_INSTEAD, SIDE_FILES, SINGLE
from resformer.safetensors_format import read_shard
from resformer.untrusted import MOST_BYTES, names_in, read_bounded, read_json, regular_file

_METADATA = "`---`, `library_name: transformers`, `---`"


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


@dataclass(frozen=True, kw_only=True)
class Push:
    """One push, in one commit; each of its steps can be repeated without harm."""

    report: PushReport  # of what goes where
    contents: Mapping[str, Path | bytes]
    message: str
    private: bool
    create_pr: bool
    check: Callable[[], object]  # raises where contents changed; called when their hashes are known

    def run(self) -> dict[str, Any]:
        """Makes the repository if there is none, commits, and reads the hashes of all files back.

        Returns the `repo_id` with its owner, `commit` and `url` of the commit, and the names of `deleted` files.
        """
        api, asked = hub_api(), self.report
        if constants.HF_HUB_OFFLINE:
            raise HubError(f"{asked.repo_id}: cannot be pushed to while HF_HUB_OFFLINE is set; unset it.")
        if get_token() is None:
            raise HubError(f"{asked.repo_id}: no token. Run `hf auth login`, or set HF_TOKEN to a write token.")
        repo_id = self._do(lambda: self._make_repository(api))
        # The commit may be made although its answer is lost: committing again changes nothing then.
        # A pull request may be made too, and would be made twice.
        commit, deleted, sent = self._do(lambda: self._commit(api, repo_id), again=not self.create_pr)
        self._read_back(api, repo_id, commit.oid, sent)
        if (tag := asked.tag) is not None:
            self._do(lambda: api.create_tag(repo_id, tag=tag, revision=commit.oid, exist_ok=True))
        url = commit.pr_url if self.create_pr else commit.commit_url
        return {"repo_id": repo_id, "commit": commit.oid, "url": url, "deleted": deleted}

    def _make_repository(self, api: HfApi) -> str:
        asked, tag = self.report.repo_id, self.report.tag
        if self.create_pr:
            return str(api.model_info(asked).id)
        repo_id = api.create_repo(asked, private=self.private or None, exist_ok=True).repo_id
        if self.private and not api.model_info(repo_id).private:
            raise HubError(f"{repo_id}: exists and is public. Make it private in its settings, or push elsewhere.")
        if tag is not None and any(each.name == tag for each in api.list_repo_refs(repo_id).tags):
            raise HubError(f"{repo_id}: has a tag {tag} already; choose another. Nothing was pushed.")
        return repo_id

    def _commit(self, api: HfApi, repo_id: str) -> tuple[Any, list[str], dict[str, str]]:
        """(the commit, deleted files, name -> SHA-256): `upload_folder` may spread a folder over several commits."""
        branch = self.report.revision
        if branch != constants.DEFAULT_REVISION and not branch.startswith("refs/") and not self.create_pr:
            api.create_branch(repo_id, branch=branch, exist_ok=True)
        parent = api.model_info(repo_id, revision=branch).sha
        before = files_of(api, repo_id, branch)
        operations = [CommitOperationAdd(name, content) for name, content in self.contents.items()]
        sent = {each.path_in_repo: each.upload_info.sha256.hex() for each in operations}
        self.check()
        deleted = [name for name in before if name not in self.contents and LOADED_INSTEAD.fullmatch(name)]
        commit = api.create_commit(
            repo_id,
            [*(CommitOperationDelete(name, is_folder=False) for name in deleted), *operations],
            commit_message=self.message,
            revision=branch,
            parent_commit=parent,
            create_pr=self.create_pr,
        )
        return commit, deleted, sent

    def _read_back(self, api: HfApi, repo_id: str, commit: str, sent: Mapping[str, str]) -> None:
        try:
            stored = retried(lambda: files_of(api, repo_id, commit))
        except HTTPError as error:
            raise HubError(
                f"{repo_id} at {commit}: was committed, but cannot be read back: {one_line(error)} Look at it: "
                f"resformer inspect {repo_id}."
            ) from error
        wrong = []
        for name, content in self.contents.items():
            file, by_git = stored.get(name), git_hash(content) if isinstance(content, bytes) else None
            if file is None or (file.blob_id != by_git if file.lfs is None else file.lfs.sha256 != sent[name]):
                wrong.append(name)
        if wrong:
            raise VerificationError(
                f"{repo_id} at {commit}: these files are not what was sent: {first_names(wrong)}. Delete the "
                "repository, or revert the commit."
            )

    def _do(self, step: Callable[[], Result], *, again: bool = True) -> Result:
        """Does a step as `retried` does, or once; errors are raised with a message of one line."""
        try:
            return retried(step) if again else step()
        except HTTPError as error:
            raise self._error(error) from error
        except RuntimeError as error:  # "Error while uploading ...", from an error that was tried again already
            raise self._error(error.__cause__ or error) from error
        except ValueError as error:  # the Hub rejects the card's metadata
            raise CheckpointError(f"{self.report.checkpoint}: {one_line(error)}") from error

    def _error(self, error: BaseException) -> HubError:
        repo_id, branch = self.report.repo_id, self.report.revision
        if isinstance(error, RevisionNotFoundError):
            return HubError(f"{repo_id}: has no branch {branch}.")
        again = "Run the command again later: nothing is uploaded or committed twice."
        if answer := passing(error):
            return HubError(f"{repo_id}: {answer}. {again}")
        if not isinstance(error, HfHubHTTPError):
            return HubError(f"{repo_id}: {one_line(error)}")
        answer, status = one_line(error.server_message or error), error.response.status_code
        if isinstance(error, RepositoryNotFoundError):
            return HubError(f"{repo_id}: there is no such repository, or this token may not see it ({answer}).")
        reason, way = {
            401: ("the Hub does not accept this token", "Run `hf auth login`, or set HF_TOKEN."),
            403: ("this token may not write there", "Use a write token of the owner's."),
            412: (
                f"somebody else committed to {branch} meanwhile",
                "Nothing was committed. Look at it, and run the command again.",
            ),
        }.get(status, (f"the Hub answered {status}", again))
        return HubError(f"{repo_id}: {reason} ({answer}). {way}")


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
    before, notes, connected = _states(folder, names), tuple[str, ...](), True
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
        connected = isinstance(opened.config, ConnectedConfig)
        has_code = connected and (bundle or "auto_map" in config)
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
    warnings = [*notes, *_check_card(folder, contents.get(CARD), repo_id, bundle=bundle, connected=connected)]

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
        report=report,
        contents=contents,
        message=message or f"Upload {kind}",
        private=private,
        create_pr=create_pr,
        check=check_unchanged,
    )
    return replace(report, **done.run())


def _states(folder: Path, names: Iterable[str]) -> dict[str, object]:
    """What changes when a file is written: size, time and place on the disk."""
    states: dict[str, object] = dict.fromkeys(names)
    for name in states:
        with suppress(OSError):  # it is gone
            status = (folder / name).stat()
            states[name] = status.st_size, status.st_mtime_ns, status.st_ino
    return states


def _check_card(folder: Path, card: Path | bytes | None, repo_id: str, *, bundle: bool, connected: bool) -> list[str]:
    """Warnings about the model card."""
    path, named = folder / CARD, shlex.quote(str(folder))
    if not isinstance(card, bytes):
        write = f"resformer card {named} --repository {repo_id}"
        way_out = f"One, with its metadata: {write}" if connected else "Write one that begins with " + _METADATA
        raise CheckpointError(f"{path}: there is no model card. {way_out}.")
    try:
        text = card.decode("utf-8")
        metadata = card_metadata(text)
    except ValueError as error:
        raise CheckpointError(f"{path}: its metadata cannot be read: {one_line(error)}") from error
    if not metadata:
        raise CheckpointError(f"{path}: has no metadata; begin it with {_METADATA}.")
    warnings, option = [], f"--repository {repo_id}"
    if repo_id not in text:
        warnings.append(
            f"README.md does not name {repo_id}: its code may load something else. One that does: resformer card "
            f"{named} {option}."
        )
    if bundle and "trust_remote_code=True" not in text:
        warnings.append(
            "README.md loads the checkpoint without trust_remote_code=True, which readers of a bundle need. One that "
            f"does: resformer bundle {named} BUNDLE; resformer card BUNDLE {option}."
        )
    return warnings
