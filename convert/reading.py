"""Reads the headers and side files of a folder, or Hub repository, of safetensors. No tensor is loaded, no code run.

What it accepts is what Transformers would load.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from resformer.convert.hub_headers import HubFiles
from resformer.errors import CheckpointError, first_names, quoted
from resformer.names import CONFIG, INDEX, LISTING, SETTINGS, SIDE_FILES, SINGLE, TOKENIZERS
from resformer.safetensors_format import FLOATING, MOST_TENSORS, Shard, Tensor, read_shard, same_bytes
from resformer.untrusted import MIB, MOST_BYTES, bare_name, names_in, read_json, regular_file

ADAPTER = "adapter_config.json"
#: Transformers loads files of such names in place of all others.
_DISTRIBUTED = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors")
#: Settings may name code under these keys.
CODE_KEYS = ("auto_map", "custom_generate", "custom_pipelines")
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
    def tokenizer_files(self) -> list[str]:
        return [file.name for file in self.side_files if TOKENIZERS.fullmatch(file.name)]


def read_checkpoint(folder: Path, hub: HubFiles | None = None) -> Checkpoint:
    """Reads every header, and lists the files that go along (`SIDE_FILES`) and those that do not.

    Args:
        hub: where headers are read that are not in `folder`, a snapshot of it.
    """
    shards, notes = _shards(folder, hub)
    read = {CONFIG, INDEX, LISTING, *(shard.name for shard in shards)}
    side_files, left_behind = [], []
    for name in names_in(folder) if hub is None else sorted(hub.sizes):
        if not SIDE_FILES.fullmatch(name):
            left_behind += [] if name in read else [name]
            continue
        path = folder / name
        try:
            file = side_file(folder, name, hub)
        except CheckpointError as error:
            notes.append(f"{error} It does not go along.")
            left_behind.append(name)
            continue
        if name in SETTINGS and path.exists():
            values = read_json(path)
            if removed := [key for key in CODE_KEYS if key in values]:
                notes += [f"{path}: {key} names code and was taken out." for key in removed]
                kept = {key: value for key, value in values.items() if key not in removed}
                content = (json.dumps(kept, indent=2) + "\n").encode()
                file = replace(file, size=len(content), content=content)
        side_files.append(file)
    if ADAPTER in left_behind:
        notes.append(
            f"{folder}: the adapter beside the model ({ADAPTER}) does not go along; where PEFT is installed, "
            "Transformers applies it to the source. If it is meant, merge it and convert that (`merge_and_unload`)."
        )
    return Checkpoint(folder, tuple(shards), tuple(side_files), tuple(left_behind), tuple(notes))


def _shards(folder: Path, hub: HubFiles | None) -> tuple[list[Shard], list[str]]:
    index = folder / INDEX
    names = {path.name for path in folder.iterdir()} if hub is None else hub.sizes.keys()
    if distributed := [name for name in names if _DISTRIBUTED.fullmatch(name)]:
        raise CheckpointError(
            f"{folder}: Transformers loads {first_names(distributed)} in place of other weights, a distributed "
            f"checkpoint. Take them away if they are not meant. {plain_way()}"
        )
    if SINGLE in names:
        notes = [f"{index}: is ignored, by Transformers too: {SINGLE} stands beside it."] if INDEX in names else []
        return _read_all([folder / SINGLE], hub), notes
    if INDEX in names:
        return _indexed_shards(folder, index, hub), []
    raise no_weights(folder, names)


def read_index(index: Path) -> dict[str, str]:
    """Tensor -> the file beside the index that holds it."""
    content = read_json(index, 4 * MIB)
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: has no weight_map from tensor names to files.")
    if not isinstance(content.get("metadata"), dict):
        raise CheckpointError(f'{index}: has no metadata, and Transformers does not load it: add "metadata": {{}}.')
    names = {
        bare_name(name, ".safetensors", f"{index}: weight_map of {quoted(tensor)}")
        for tensor, name in weight_map.items()
    }
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


def plain_way(model: str = "AutoModelForCausalLM.from_pretrained(SOURCE)", state: str = "") -> str:
    """The two lines of Transformers that save a checkpoint as plain safetensors."""
    return (
        f'Save it again with Transformers and convert that: {model}.save_pretrained("plain"{state}); '
        'AutoTokenizer.from_pretrained(SOURCE).save_pretrained("plain").'
    )


def no_weights(where: object, names: Iterable[str]) -> CheckpointError:
    """That a folder or repository of these files has no weights where Transformers looks for them."""
    way = hint(names)
    if not way and any(name.endswith(".safetensors") for name in names):
        model = "AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(SOURCE))"
        state = ', state_dict={k: v for f in Path(SOURCE).glob("*.safetensors") for k, v in load_file(f).items()}'
        way = f" Transformers does not find its *.safetensors either. Get the index back, or: {plain_way(model, state)}"
    return CheckpointError(f"{where}: has neither {SINGLE} nor {INDEX}.{way}")


def hint(names: Iterable[str]) -> str:
    """What to do about a folder or repository of these files that lacks config.json or weights."""
    names = sorted(names)
    if ggufs := [name for name in names if name.endswith(".gguf")]:
        return f" It holds {first_names(ggufs)}: name that file."
    if ADAPTER in names:
        return " It is a PEFT adapter: merge it into its model and save that (`merge_and_unload`)."
    if any(name.endswith(".bin") for name in names):
        return f" Pickles (*.bin) are not read. {plain_way()}"
    if "params.json" in names:
        return " It has Meta's own format: use the repository's Transformers files."
    return ""


def _read_all(paths: list[Path], hub: HubFiles | None) -> list[Shard]:
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


def renamed(checkpoint: Checkpoint, model_type: str) -> Checkpoint:
    """The checkpoint with the names that Transformers gives tensors of this type while it loads them.

    Files in which a name changes are written anew; no byte of a tensor changes.
    """
    rules = get_checkpoint_conversion_mapping(model_type) or ()

    def loaded_name(name: str) -> str:
        for rule in rules:
            name, _ = rule.rename_source_key(name)
        return name

    shards = []
    for shard in checkpoint.shards:
        tensors = tuple(replace(tensor, name=loaded_name(tensor.name)) for tensor in shard.tensors)
        shards.append(shard if tensors == shard.tensors else replace(shard, path=None, tensors=tensors))
    changed = replace(checkpoint, shards=tuple(shards))
    if len(changed.tensors) < len(checkpoint.tensors):
        raise CheckpointError(f"{checkpoint.folder}: tensors get the same name when Transformers loads them.")
    return changed


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
            raise CheckpointError(
                f"{tensor.place}: unexpected: config.json has no place for it. If it does not belong to the model: "
                f"{plain_way()}"
            )
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
