"""Writes what was decided into a Hub repository: weight files that stay as they are are copied by the Hub."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # httpx's or httpx2's
from huggingface_hub.hf_api import ModelInfo, RepoFile
from huggingface_hub.utils.sha import git_hash

from resformer.convert.deciding import Decision
from resformer.convert.hub_headers import HubFiles
from resformer.convert.planning import Plan, PlannedShard, make_plan
from resformer.convert.reading import INDEX
from resformer.convert.reading_back import check_headers
from resformer.convert.safetensors_format import first_bytes, header_bytes
from resformer.convert.source import asking_hub
from resformer.convert.to_folder import Finish, Options, R, generation_warnings, make_report, weight_files
from resformer.convert.writing import Transfer
from resformer.errors import CheckpointError, VerificationError, first_names, one_line
from resformer.hub import Copied, CopyError, HubError, Push, Pushed, digest, hub_api, repository_files
from resformer.model_cards import carried_metadata

#: A file's content: in memory, or copied by the Hub.
_Content = bytes | Copied


def publish(decision: Decision, options: Options, report_of: Callable[..., R], finish: Finish[R]) -> R:
    """Makes the result on the Hub: one commit with copies of the source's files and with what is new."""
    source, repo_id = decision.source, str(options.push_to)
    if source.repo_id is None or source.revision is None or any(not s.name for s in source.checkpoint.shards):
        raise CheckpointError(
            f"{source.name}: only safetensors on the Hub that are not dequantised can be copied there. Convert to a "
            f"folder, then: resformer push FOLDER {repo_id}."
        )
    if repo_id == source.repo_id:
        raise CheckpointError(f"{repo_id}: is the source; push to another repository.")
    api = hub_api()
    with asking_hub(source.name):
        info = api.model_info(source.repo_id, revision=source.revision)
        files = repository_files(api, source.repo_id, source.revision)
    terms = _terms(decision, info, options)
    plan = make_plan(decision, options.shard_bytes)
    try:
        contents = _contents(decision, plan, files, options)
        report = make_report(decision, repo_id, plan, _transfer(contents), report_of)
        warnings = [*report.warnings, *generation_warnings(source.checkpoint)]
        report = replace(report, terms=terms, warnings=warnings, verified="" if options.dry_run else "copies")
        if options.dry_run:
            return report
        added = [tensor for shard in plan.written for tensor in shard.tensors]
        written = {s.name: hashlib.sha256(contents[s.name]).hexdigest() for s in plan.written}  # type: ignore[arg-type]
        known = {name: file.lfs.sha256 for name, file in files.items() if file.lfs is not None}
        described = finish(report, weight_files(plan, first_bytes(added), written, known))
        contents |= {name: text.encode() for name, text in described.items()}
        pushed = Push(
            repo_id=repo_id,
            contents=contents,
            message=f"Retrofit of {source.repo_id} at {source.revision[:7]}",
            superseded=lambda name: name != ".gitattributes",
            source=source.name,
            private=options.private,
            gated=terms.get("gated"),  # type: ignore[arg-type]
            replace=options.force,
        ).run()
    except CopyError as error:
        size = sum(shard.size for shard in source.checkpoint.shards)
        raise CopyError(
            f"{source.repo_id}: cannot be copied to {repo_id} on the Hub: {error}. Nothing was committed. Convert to a "
            f"folder, which downloads {size:,} bytes, then: resformer push FOLDER {repo_id}."
        ) from error
    _check(pushed, contents, plan)
    return replace(report, transfer=_transfer(contents), commit=pushed.commit, url=pushed.url)


def _terms(decision: Decision, info: ModelInfo, options: Options) -> dict[str, str]:
    """Licence and gating of the source, which the result takes over."""
    source = decision.source
    stated = carried_metadata(source.folder / "README.md")
    licence = stated.get("license")
    reasons = []
    if info.gated:
        reasons.append(f"it is gated ({info.gated})")
    if info.private and not options.private:
        reasons.append("it is private, and the copy would be public without --private")
    if licence is None:
        reasons.append("its card states no license")
    elif licence in ("other", "unknown") or "-nd" in licence:
        reasons.append(f"its license is {stated.get('license_name', licence)}")
    if reasons and not options.accept_license:
        raise CheckpointError(
            f"{source.repo_id}: may not be yours to publish again: {'; '.join(reasons)}. If you have accepted its "
            "license and it allows a copy, say so with --accept-license (accept_license=True). The copy gets the same "
            "license and gating.",
            "--accept-license",
        )
    terms = {"license": stated.get("license_name", licence), "gated": info.gated or None}
    return {name: value for name, value in terms.items() if value is not None}


def _contents(decision: Decision, plan: Plan, files: Mapping[str, RepoFile], options: Options) -> dict[str, _Content]:
    """The files of the result, but for those that describe it."""
    if options.verify == "logits":
        raise CopyError("comparing logits takes the weights")
    repo_id, revision = str(decision.source.repo_id), str(decision.source.revision)
    contents: dict[str, _Content] = {}
    for shard in plan.shards:
        contents[shard.name] = Copied(repo_id, revision, files[shard.origin]) if shard.origin else _in_memory(shard)
    for file in plan.side_files:
        contents[file.name] = Copied(repo_id, revision, files[file.name]) if file.content is None else file.content
    for name, text in ((INDEX, plan.index), ("config.json", plan.config)):
        if text is not None:
            contents[name] = text.encode()
    copies = [content.file for content in contents.values() if isinstance(content, Copied)]
    # huggingface_hub 2.4 asks the Hub to duplicate a file by its Xet hash and its SHA-256, and refuses without either.
    if unknown := {file.path for file in copies if file.lfs is not None and file.xet_hash is None}:
        raise CopyError(f"the Hub copies what it stores with Xet, and these files it does not: {first_names(unknown)}")
    return contents


def _in_memory(shard: PlannedShard) -> bytes:
    """The file's bytes, if no tensor of the source is in it."""
    content = header_bytes(shard.tensors)
    for origin, tensor in zip(shard.origins, shard.tensors, strict=True):
        if not isinstance(origin.data, memoryview) or tensor.dtype != origin.dtype:
            raise CopyError(f"{shard.name} has to be written anew from the source's weights")
        content += bytes(origin.data)
    return content


def _transfer(contents: Mapping[str, _Content]) -> Transfer:
    """Files that are not stored by LFS go through this machine: `create_commit` downloads them and sends them again."""
    transfer = Transfer()
    for content in contents.values():
        if not isinstance(content, Copied):
            transfer.uploaded += len(content)
        elif content.file.lfs is not None:
            transfer.copied_by_hub += content.file.size
        else:
            transfer.downloaded += content.file.size
            transfer.uploaded += content.file.size
    return transfer


def _check(pushed: Pushed, contents: Mapping[str, _Content], plan: Plan) -> None:
    """Reads the commit back: hashes of all files, as the Hub states them, and headers of the weights."""
    where = f"{pushed.repo_id} at {pushed.commit}"
    try:
        stored = repository_files(hub_api(), pushed.repo_id, pushed.commit)
        wrong = [name for name, content in contents.items() if not _is_stored(content, stored.get(name))]
        if not wrong:
            hub = HubFiles(pushed.repo_id, pushed.commit, {name: file.size for name, file in stored.items()})
            folder = Path(where)
            shards = hub.read_shards(folder / shard.name for shard in plan.shards)
            tensors = {tensor.name: tensor for shard in shards for tensor in shard.tensors}
            check_headers(folder, tensors, plan.tensors)
    except VerificationError:
        raise
    except (HTTPError, CheckpointError) as error:
        raise HubError(
            f"{where}: was committed, but cannot be read back: {one_line(error)} Look at it: resformer inspect "
            f"{pushed.repo_id}."
        ) from error
    if wrong:
        raise VerificationError(
            f"{where}: these files are not what was sent: {first_names(wrong)}. Delete the repository, or revert the "
            "commit."
        )


def _is_stored(content: _Content, file: RepoFile | None) -> bool:
    if file is None:
        return False
    if isinstance(content, Copied):
        return digest(file) == digest(content.file)
    return digest(file) == (git_hash(content) if file.lfs is None else hashlib.sha256(content).hexdigest())
