"""Reads the headers and side files of a folder, or Hub repository, of safetensors. No tensor is loaded, no code run.

What it accepts is what Transformers would load, and a folder of shards that has lost its index.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from resformer.convert.hub_headers import HubFiles
from resformer.convert.safetensors_format import FLOATING, MOST_TENSORS, Shard, Tensor, read_shard, same_bytes
from resformer.errors import CheckpointError, first_names, one_line, quoted
from resformer.files import LISTING
from resformer.untrusted import MIB, MOST_BYTES, TEMPLATE_FOLDERS, bare_name, read_json, regular_file

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

#: Files that every conversion copies: the tokenizer, its chat templates, the licence. Never code or a pickle.
SIDE_FILES = re.compile(
    r"tokenizer\.json|tokenizer_config\.json|special_tokens_map\.json|added_tokens\.json|vocab\.json|vocab\.txt"
    r"|merges\.txt|[\w.-]*\.model|[\w.-]*\.tiktoken|tekken\.json|chat_template\.(jinja|json)|generation_config\.json"
    r"|(chat_templates|additional_chat_templates)/[\w.-]+\.jinja"
    r"|(?i:(LICEN[SC]E|NOTICE|COPYING|USE[_-]POLICY|ACCEPTABLE_USE)[\w-]*(\.(txt|md|rst|pdf))?)"
)
_TOKENIZERS = re.compile(r"tokenizer\.json|vocab\.(json|txt)|[\w.-]*\.(model|tiktoken)|tekken\.json")
#: Side files that hold settings, and so may name code ...
SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json", "chat_template.json")
#: ... under these keys.
_CODE_KEYS = ("auto_map", "custom_generate", "custom_pipelines")
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
#: Rotary buffers of old Llama checkpoints; Transformers ignores them and computes them from config.json.
_OLD_BUFFER = re.compile(r"model\.(layers\.[0-9]+\.self_attn\.)?rotary_emb\.inv_freq")
#: An index may name. A 405B Llama has 191 files.
_MOST_SHARDS = 1000


@dataclass(frozen=True)
class SideFile:
    """A file that goes along: as it is, or with `content` in its place."""

    name: str  # relative, with forward slashes
    path: Path
    size: int
    content: bytes | None = None


@dataclass(frozen=True)
class Checkpoint:
    """The weights and other files of a checkpoint's folder."""

    folder: Path
    shards: tuple[Shard, ...]
    side_files: tuple[SideFile, ...] = ()
    left_behind: tuple[str, ...] = ()  # names of files that do not go along
    notes: tuple[str, ...] = ()  # what a person should know

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """Every tensor by name."""
        return {tensor.name: tensor for shard in self.shards for tensor in shard.tensors}

    @cached_property
    def dtypes(self) -> Counter[str]:
        """Code of safetensors -> number of elements."""
        counts = Counter[str]()
        for tensor in self.tensors.values():
            counts[tensor.dtype] += tensor.elements
        return counts

    @property
    def has_tokenizer(self) -> bool:
        return any(_TOKENIZERS.fullmatch(file.name) for file in self.side_files)

    @property
    def indexed(self) -> bool:
        """Whether Transformers finds the weights as they are: one file under the standard name, or an index."""
        found = (self.folder / SINGLE).is_file() or (self.folder / INDEX).is_file()
        return found and all(shard.path is not None for shard in self.shards)


def read_checkpoint(folder: Path, hub: HubFiles | None = None, unpickled: Shard | None = None) -> Checkpoint:
    """Reads every header, and lists the files that go along (`SIDE_FILES`) and those that do not.

    Args:
        hub: where headers are read that are not in `folder`, a snapshot of it.
        unpickled: tensors in memory, in the place of safetensors.
    """
    shards, notes = _shards(folder, hub) if unpickled is None else ([unpickled], [])
    read = {"config.json", INDEX, LISTING, *(shard.name for shard in shards)}
    side_files, left_behind = [], []
    inside = [folder / name for name in TEMPLATE_FOLDERS if not (folder / name).is_symlink()]
    here = [*({*folder.iterdir()} - {*inside}), *(path for each in inside for path in each.glob("*"))]
    for path in sorted(here if hub is None else (folder / name for name in hub.sizes)):
        name = path.relative_to(folder).as_posix()
        if not SIDE_FILES.fullmatch(name):
            if name not in read:
                left_behind.append(f"{name}/" if path.is_dir() and not path.is_symlink() else name)
            continue
        try:
            file = side_file(folder, name, hub)
        except CheckpointError as error:
            notes.append(f"{error} It does not go along.")
            left_behind.append(name)
            continue
        if name in SETTINGS and path.exists():
            values = read_json(path)
            if removed := [key for key in _CODE_KEYS if key in values]:
                notes += [f"{path}: {key} names code and was taken out." for key in removed]
                kept = {key: value for key, value in values.items() if key not in removed}
                content = (json.dumps(kept, indent=2) + "\n").encode()
                file = replace(file, size=len(content), content=content)
        side_files.append(file)
    return Checkpoint(folder, tuple(shards), tuple(side_files), tuple(left_behind), tuple(notes))


def _shards(folder: Path, hub: HubFiles | None) -> tuple[list[Shard], list[str]]:
    index = folder / INDEX
    names = {path.name for path in folder.iterdir()} if hub is None else hub.sizes.keys()
    if SINGLE in names:
        notes = [f"{index}: is ignored, by Transformers too: {SINGLE} stands beside it."] if INDEX in names else []
        return _read_all([folder / SINGLE], hub), notes
    if INDEX in names:
        return _indexed_shards(folder, index, hub), []
    return _unindexed_shards(folder)


def read_index(index: Path) -> dict[str, str]:
    """Tensor -> the file beside the index that holds it."""
    weight_map = read_json(index, 4 * MIB).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: has no weight_map from tensor names to files.")
    names = {bare_name(name, ".safetensors", str(index)) for name in weight_map.values()}
    if len(names) > _MOST_SHARDS:
        raise CheckpointError(f"{index}: names {len(names):,} files; at most {_MOST_SHARDS:,} are read.")
    return weight_map


def _indexed_shards(folder: Path, index: Path, hub: HubFiles | None) -> list[Shard]:
    weight_map = read_index(index)
    names = sorted(set(weight_map.values()))
    absent = {name for name in names if not (folder / name).exists() and (hub is None or name not in hub.sizes)}
    if absent:
        raise CheckpointError(f"{folder}: the index names files that are missing: {first_names(absent)}.")
    shards = _read_all([folder / name for name in names], hub)
    for name, shard in zip(names, shards, strict=True):
        stored = {tensor.name for tensor in shard.tensors}
        expected = {tensor for tensor, file in weight_map.items() if file == name}
        for what, tensors in (
            ("lacks tensors that the index puts", expected - stored),
            ("holds tensors that the index does not put", stored - expected),
        ):
            if tensors:
                raise CheckpointError(f"{folder / name}: {what} there: {first_names(tensors)}.")
    return shards


def _unindexed_shards(folder: Path) -> tuple[list[Shard], list[str]]:
    """Shards that have lost their index: all of one `model-00001-of-00003` series."""
    names = sorted(path.name for path in folder.iterdir())
    files = [name for name in names if name.endswith(".safetensors")]
    if not files:
        raise CheckpointError(f"{folder}: has no *.safetensors file.{hint(names)}")
    pattern = re.compile(r"([\w-][\w.-]*)-\d{5}-of-(\d{5})\.safetensors")
    numbered = [match for name in files if (match := pattern.fullmatch(name))]
    first = numbered[0] if numbered else None
    count = min(int(first[2]), _MOST_SHARDS) if first else 0
    series = [f"{first[1]}-{number:05}-of-{first[2]}.safetensors" for number in range(1, count + 1)] if first else []
    if not numbered or [match[0] for match in numbered] != series:
        missing = f", and not {first_names(absent)}" if (absent := set(series) - set(files)) else ""
        raise CheckpointError(
            f"{folder}: expected {SINGLE}, or {INDEX}, or one whole series model-00001-of-0000N.safetensors; found "
            f"{first_names(files)}{missing}."
        )
    shards = _read_all([folder / name for name in series])
    return shards, [f"{folder}: has no {INDEX}; the headers of its {count} shards were read instead."]


def hint(names: Iterable[str]) -> str:
    """What to do about a folder or repository of these files that has no config.json, or no safetensors."""
    names = sorted(names)
    if ggufs := [name for name in names if name.endswith(".gguf")]:
        return f" It holds {first_names(ggufs)}: name that file."
    if "adapter_config.json" in names:
        return " It is a PEFT adapter: merge it into its model and save that (`merge_and_unload`)."
    if pickles := [name for name in names if name.startswith("pytorch_model") and name.endswith(".bin")]:
        return (
            f" {one_line(pickles[0])} would have to be unpickled: `resformer convert` does it, restricted to tensors, "
            "with --allow-pickle (allow_pickle=True)."
        )
    if "params.json" in names:
        return " It has Meta's own format: use the repository's Transformers files."
    return ""


def _read_all(paths: list[Path], hub: HubFiles | None = None) -> list[Shard]:
    shards, seen = [], dict[str, Path]()
    headers = map(read_shard, paths) if hub is None else hub.read_shards(paths)
    for path, shard in zip(paths, headers, strict=True):
        for tensor in shard.tensors:
            if tensor.name in seen:
                raise CheckpointError(f"{path}: tensor {quoted(tensor.name)} is in {seen[tensor.name].name} too.")
            seen[tensor.name] = path
        if len(seen) > MOST_TENSORS:
            raise CheckpointError(f"{path.parent}: holds more than {MOST_TENSORS:,} tensors, the most that are read.")
        shards.append(shard)
    return shards


def check_tensors(
    checkpoint: Checkpoint, expected: Mapping[str, tuple[int, ...]], *, tied: bool
) -> tuple[bool, list[str]]:
    """Compares the tensors with the shapes that the configuration asks for, both ends of a tie among them.

    Returns whether the head is tied to the embeddings (what the file holds decides, as in Transformers), and notes.
    """
    folder, tensors = checkpoint.folder, checkpoint.tensors
    notes, required = [], dict(expected)
    if tied and HEAD not in tensors:
        required.pop(HEAD, None)
    elif tied and EMBEDDING not in tensors:
        required.pop(EMBEDDING)
    elif tied and not tensors[HEAD].on_this_disk:
        notes.append(
            f"{folder}: config.json ties lm_head.weight to the embeddings, and the shards hold both; they were not "
            "compared. Where they differ, Transformers loads them untied, the source and the result alike."
        )
    elif tied and not same_bytes(tensors[HEAD], tensors[EMBEDDING]):
        tied = False
        notes.append(
            f"{folder}: config.json ties lm_head.weight to the embeddings, but the two differ; the result has "
            "tie_word_embeddings=False, which is how Transformers loads the source."
        )
    elif not tied and HEAD in required and HEAD not in tensors:
        raise CheckpointError(
            f"{folder}: missing keys: config.json has tie_word_embeddings=False and no shard has lm_head.weight: it "
            "would be random. If the head is the embedding matrix, set tie_word_embeddings to true."
        )
    if missing := required.keys() - tensors.keys():
        raise CheckpointError(f"{folder}: missing keys: config.json asks for {first_names(missing)}.")
    for name, tensor in tensors.items():
        if _OLD_BUFFER.fullmatch(name) and tensor.dtype in FLOATING:
            continue
        if name not in required:
            raise CheckpointError(f"{tensor.place}: unexpected: config.json has no place for it.")
        if tensor.shape != required[name]:
            raise CheckpointError(
                f"{tensor.place}: has shape {list(tensor.shape)}, config.json asks for {list(required[name])}."
            )
        if tensor.dtype not in FLOATING:
            raise CheckpointError(
                f"{tensor.place}: has dtype {tensor.dtype}, expected one of {', '.join(FLOATING)}: quantised "
                "checkpoints have to be dequantised first."
            )
    return tied, notes


def side_file(folder: Path, name: str, hub: HubFiles | None = None) -> SideFile:
    """A file of the folder, or still on the Hub."""
    path = folder / name
    if hub is not None and not path.exists():
        size = hub.sizes[name]
    else:
        path = regular_file(path, folder)
        size = path.stat().st_size
    if size > MOST_BYTES:
        raise CheckpointError(f"{folder / name}: has {size:,} bytes; at most {MOST_BYTES:,} are copied.")
    return SideFile(name, path, size)
