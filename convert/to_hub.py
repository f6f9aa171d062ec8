"""Writes what was decided into a Hub repository: weight files that stay as they are are copied by the Hub."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from huggingface_hub.hf_api import ModelInfo

from resformer.convert.deciding import Decision
from resformer.convert.hub_headers import HubFiles
from resformer.convert.planning import Plan, PlannedShard, make_plan
from resformer.convert.reading_back import check_headers
from resformer.convert.to_folder import Finish, Options, R, generation_warnings, make_report
from resformer.convert.tokens import CarriedTokenizer, carry_tokenizer, copy_file, fetch_side_files
from resformer.convert.writing import Transfer
from resformer.errors import CheckpointError, first_names
from resformer.hub import (
    Copied,
    CopyError,
    Push,
    Pushed,
    asking_hub,
    hub_api,
    reading_back,
    retried,
)
from resformer.model_cards import carried_metadata
from resformer.names import INDEX
from resformer.safetensors_format import header_bytes
from resformer.untrusted import MOST_BYTES, read_bounded

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
        info = retried(lambda: api.model_info(str(source.repo_id), revision=source.revision))
    terms = _terms(decision, info, options)
    plan = make_plan(decision, options.shard_bytes)
    try:
        contents = _contents(decision, plan, options)
        report = make_report(decision, repo_id, plan, _transfer(contents), report_of)
        warnings = [*report.warnings, *generation_warnings(source.checkpoint)]
        report = replace(report, terms=terms, warnings=warnings, verified="" if options.dry_run else "copies")
        if options.dry_run:
            return report
        fetched = fetch_side_files(source)
        tokenizer = _carry_tokenizer(decision, plan, contents)
        report = replace(
            report,
            tokens=tokenizer.tokens,
            tokenizer_classes=tokenizer.classes,
            warnings=[*report.warnings, *tokenizer.warnings],
        )
        written = {s.name: hashlib.sha256(contents[s.name]).hexdigest() for s in plan.written}  # type: ignore[arg-type]
        known = source.sha256_on_hub()
        described = finish(report, {s.name: written.get(s.name) or known.get(s.origin or "") for s in plan.shards})
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
    _check_headers(pushed, plan)
    transfer = _transfer(contents)
    transfer.downloaded += fetched
    return replace(report, transfer=transfer, commit=pushed.commit, url=pushed.url)


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


def _contents(decision: Decision, plan: Plan, options: Options) -> dict[str, _Content]:
    """The files of the result, but for those that describe it."""
    if options.verify == "logits":
        raise CopyError("comparing logits takes the weights")
    repo_id, revision, files = str(decision.source.repo_id), str(decision.source.revision), decision.source.hub_files
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


def _carry_tokenizer(decision: Decision, plan: Plan, contents: dict[str, _Content]) -> CarriedTokenizer:
    """Has the side files in `contents` give the source's tokenizer."""
    with TemporaryDirectory(prefix="resformer-") as name:
        folder = Path(name)
        for file in plan.side_files:
            content = file.content
            if content is None:
                content = read_bounded(file.path, MOST_BYTES, decision.source.folder)
            copy_file(content, folder / file.name)
        copy_file(plan.config.encode(), folder / "config.json")
        before = _bytes_below(folder)
        carried = carry_tokenizer(decision.source, folder)
        after = _bytes_below(folder)
    for name in before.keys() - after.keys():
        del contents[name]
    for name, content in after.items():
        copied = contents.get(name)
        # What the Hub does not store by LFS is sent again anyway.
        if content != before.get(name) or (isinstance(copied, Copied) and copied.file.lfs is None):
            contents[name] = content
    return carried


def _bytes_below(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


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


def _check_headers(pushed: Pushed, plan: Plan) -> None:
    """Reads the headers of the weights in the commit."""
    with reading_back(pushed.repo_id, pushed.commit):
        hub = HubFiles(pushed.repo_id, pushed.commit, {name: file.size for name, file in pushed.stored.items()})
        folder = Path(f"{pushed.repo_id} at {pushed.commit}")
        shards = list(hub.read_shards(folder / shard.name for shard in plan.shards))
    check_headers(folder, {tensor.name: tensor for shard in shards for tensor in shard.tensors}, plan.tensors)
