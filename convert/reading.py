"""Reads the headers and side files of a folder of safetensors. No tensor is loaded, no code run."""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from resformer.convert.carrying import File, Range
from resformer.errors import CheckpointError, first_names, quoted
from resformer.names import CONFIG, INDEX, LISTING, SETTINGS, SIDE_FILES, SINGLE, TOKENIZERS
from resformer.safetensors_format import MOST_TENSORS, Shard, Tensor, read_shard
from resformer.untrusted import MOST_BYTES, names_in, parse_json, read_bounded, read_json, regular_file

ADAPTER = "adapter_config.json"
#: Transformers loads files of such names in place of all others.
_DISTRIBUTED = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors")
#: Settings may name code under these keys.
CODE_KEYS = ("auto_map", "custom_generate", "custom_pipelines")
#: An index may name. A 405B Llama has 191 files.
_MOST_SHARDS = 1000


@dataclass(frozen=True)
class Checkpoint:
    """The weights and other files of a checkpoint."""

    shards: tuple[Shard, ...]  # in the order in which Transformers loads them
    side_files: tuple[File, ...] = ()  # that go along
    left_behind: tuple[str, ...] = ()  # names of files that do not go along
    notes: tuple[str, ...] = ()  # what a person should know

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """Every tensor by name."""
        return {tensor.name: tensor for shard in self.shards for tensor in shard.tensors}

    @property
    def tokenizer_files(self) -> list[str]:
        return [file.name for file in self.side_files if TOKENIZERS.fullmatch(file.name)]


def read_checkpoint(folder: Path, names: Iterable[str] = (), *, weights: Path | None = None) -> Checkpoint:
    """Reads every header, and lists the files that go along (`SIDE_FILES`) and those that do not.

    `names` are all, if `folder` has only some of a repository's. Another folder may have the `weights`.
    """
    weights, notes = weights or folder, list[str]()
    present = {path.name for path in weights.iterdir()}
    if {SINGLE, INDEX} <= present:
        notes.append(f"{weights / INDEX}: is ignored, by Transformers too: {SINGLE} stands beside it.")
    shards, seen = [], dict[str, Path]()
    for path in (weights / name for name in weight_files(weights, present)):
        shard = read_shard(path)
        for tensor in shard.tensors:
            if (other := seen.setdefault(tensor.name, path)) != path:
                raise CheckpointError(f"{path}: tensor {quoted(tensor.name)} is in {other.name} too.")
        if len(seen) > MOST_TENSORS:
            raise CheckpointError(
                f"{weights}: holds more than {MOST_TENSORS:,} tensors, the most that are read. Connections are added "
                "to a loaded model by `resformer.connect`."
            )
        shards.append(shard)
    read = {CONFIG, INDEX, LISTING, *(shard.name for shard in shards)}
    side_files, left_behind = [], []
    for name in sorted(names or names_in(folder)):
        if not SIDE_FILES.fullmatch(name):
            left_behind += [] if name in read else [name]
            continue
        try:
            side_files.append(_plain_settings(side_file(folder, name), folder / name, notes))
        except CheckpointError as error:
            if name != "generation_config.json":  # Transformers ignores one that it cannot read
                raise
            notes.append(f"{error} It does not go along.")
            left_behind.append(name)
    return Checkpoint(tuple(shards), tuple(side_files), tuple(left_behind), tuple(notes))


def _plain_settings(file: File, path: Path, notes: list[str]) -> File:
    """The file, without the keys that name code."""
    values = parse_json(read_bounded(path, file.size), str(path)) if file.name in SETTINGS else {}
    removed = [key for key in CODE_KEYS if key in values]
    if not removed:
        return file
    notes += [f"{path}: {key} names code and was taken out." for key in removed]
    kept = {key: value for key, value in values.items() if key not in removed}
    return File(file.name, ((json.dumps(kept, indent=2) + "\n").encode(),))


def side_file(folder: Path, name: str) -> File:
    path = regular_file(folder / name, folder)
    size = path.stat().st_size
    if size > MOST_BYTES:
        raise CheckpointError(f"{folder / name}: has {size:,} bytes; at most {MOST_BYTES:,} are copied.")
    return File(name, (Range(path, 0, size),))


def weight_files(folder: Path, names: Iterable[str]) -> list[str]:
    """The weight files that Transformers loads of a folder or repository of these files, in its order."""
    names = set(names)
    if distributed := [name for name in names if _DISTRIBUTED.fullmatch(name)]:
        raise CheckpointError(
            f"{folder}: Transformers loads {first_names(distributed)} in place of other weights, a distributed "
            f"checkpoint. Take them away if they are not meant. {plain_way()}"
        )
    if SINGLE in names:
        return [SINGLE]
    index = folder / INDEX
    if INDEX not in names:
        way = hint(folder, names)
        if not way and any(name.endswith(".safetensors") for name in names):
            model = "AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(SOURCE))"
            state = ', state_dict={k: v for f in Path(SOURCE).glob("*.safetensors") for k, v in load_file(f).items()}'
            saved = plain_way(model, state)
            way = f" Transformers does not find its *.safetensors either. Get the index back, or: {saved}"
        raise CheckpointError(f"{folder}: has neither {SINGLE} nor {INDEX}.{way}")
    content = read_json(index)
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: has no weight_map from tensor names to files.")
    if not isinstance(content.get("metadata"), dict):
        raise CheckpointError(f'{index}: has no metadata, and Transformers does not load it: add "metadata": {{}}.')
    files = {*weight_map.values()}  # `check_folder` has looked at these names
    if len(files) > _MOST_SHARDS:
        raise CheckpointError(f"{index}: names {len(files):,} files; at most {_MOST_SHARDS:,} are read.")
    if absent := files - names:
        raise CheckpointError(f"{folder}: the index names files that are missing: {first_names(absent)}.")
    return sorted(files)


def plain_way(model: str = "AutoModelForCausalLM.from_pretrained(SOURCE)", state: str = "") -> str:
    """The two lines of Transformers that save a checkpoint as plain safetensors."""
    return (
        f'Save it again with Transformers and convert that: {model}.save_pretrained("plain"{state}); '
        'AutoTokenizer.from_pretrained(SOURCE).save_pretrained("plain"). '
        "Of a model that sees images: AutoModelForImageTextToText and AutoProcessor."
    )


def gguf_way(folder: object, name: str) -> str:
    """The two lines of Transformers that make a checkpoint of a GGUF file."""
    given = f"{str(folder)!r}, gguf_file={name!r}"
    plain = f"{given}, quantization_config=GgufConfig(dequantize=True)"
    return (
        "GGUF files are read by Transformers (with `gguf` installed): "
        f'AutoModelForCausalLM.from_pretrained({plain}).save_pretrained("plain"); '
        f'AutoTokenizer.from_pretrained({given}).save_pretrained("plain"). Then convert that.'
    )


def hint(where: object, names: Iterable[str]) -> str:
    """What to do about a folder or repository of these files that lacks config.json or weights."""
    names = sorted(names)
    if ggufs := [name for name in names if name.endswith(".gguf")]:
        return f" {gguf_way(where, ggufs[0])}"
    if ADAPTER in names:
        return " It is a PEFT adapter: merge it into its model and save that (`merge_and_unload`)."
    if any(name.endswith(".bin") for name in names):
        return f" Pickles (*.bin) are not read. {plain_way()}"
    if "params.json" in names:
        return " It has Meta's own format: use the repository's Transformers files."
    return ""
