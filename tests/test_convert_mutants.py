"""Differential fuzzing: a source is refused by name, or its retrofit does what Transformers makes of the source.

Both are loaded by default. A mutant is a small checkpoint of a family, as published, with changed keys in its files;
names and values are from Transformers' own tables. One that fails is reduced to the changes that it needs: it belongs
into `FOUND`.
"""

import ast
import copy
import functools
import importlib
import inspect
import json
import math
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from checkpoints import FAMILIES, save_checkpoint
from conftest import others_slow
from default_load import look_at_what_works, publish
from transformers import CONFIG_MAPPING, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.activations import ACT2CLS
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING
from transformers.generation.configuration_utils import ALL_CACHE_IMPLEMENTATIONS
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, RopeParameters
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES
from transformers.utils import logging

from resformer import ResFormerError, retrofit
from resformer.modeling.versions import CACHE

Edits = dict[str, Any]  # "file/key/key below" -> its new value; `...`: it is taken away
Mutant = tuple[str, Edits, bool]  # family, edits, and whether they are old spellings: then it must be converted

LAYERS = 4
OTHERS = ("gemma3_text", "qwen3_moe", "phi3", "gpt_oss", "olmo2")
CONFIG, TOKENIZER, GENERATION = "config.json", "tokenizer_config.json", "generation_config.json"
INDEX = "model.safetensors.index.json"
FILES = {CONFIG: 6, GENERATION: 2, TOKENIZER: 2, INDEX: 1}  # and how often each is changed
#: The modules of Transformers that read these files, or a configuration, for every family.
MODULES = (
    "cache_utils masking_utils modeling_rope_utils configuration_utils modeling_utils modeling_layers "
    "integrations.sdpa_attention generation.utils tokenization_utils_base tokenization_utils_tokenizers "
    "models.auto.auto_factory models.auto.configuration_auto models.auto.tokenization_auto"
).split()
KINDS, ROPES = list(DYNAMIC_LAYER_TYPE_MAPPING)[:4], list(ROPE_INIT_FUNCTIONS)
#: Key -> values that Transformers knows.
TABLES: dict[str, list[Any]] = {
    "dtype": (DTYPES := ["float16", "bfloat16", "float64", "torch.float32", "auto"]),
    "torch_dtype": DTYPES,
    "rope_type": ROPES,
    "hidden_act": list(ACT2CLS),
    "model_type": list(CONFIG_MAPPING),
    "tokenizer_class": sorted(filter(None, TOKENIZER_MAPPING_NAMES.values())),
    "cache_implementation": list(ALL_CACHE_IMPLEMENTATIONS),
}
ODD: list[Any] = [None, None, True, False, 0, 1, 4, 9, -1, 0.5, 3.0, math.inf, "", "4", "true", "x", [], [0], {}]
ODD += [[1, 0, 1, 0], {"4": 4}, [None], {"__float__": "Infinity"}, ["sliding_attention"] * LAYERS]

LLAMA_3 = {"type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
#: The first of its kind that failed, each.
FOUND: list[Mutant] = [
    ("qwen2", {}, True),  # Transformers' table of model types has a tokenizer for it
    ("mistral", {f"{CONFIG}/layer_types": ["full_attention", "sliding_attention"] * 2}, False),  # a Ministral
    ("llama", {f"{CONFIG}/sliding_window": 8}, False),  # of its cache alone
    ("qwen2", {f"{CONFIG}/layer_types": KINDS[1:2] * 4, f"{CONFIG}/use_sliding_window": False}, False),
    ("ministral", {f"{CONFIG}/layer_types": ["full_attention"] * 4, f"{CONFIG}/sliding_window": None}, False),
    ("cwm", {GENERATION: ..., f"{CONFIG}/temperature": 0.7}, True),
    ("llama-3", {f"{CONFIG}/rope_parameters/high_freq_factor": "4"}, False),
    ("cwm", {f"{CONFIG}/partial_rotary_factor": {"__float__": "Infinity"}}, False),
    ("seed_oss", {f"{CONFIG}/dtype": "bfloat16"}, False),
    ("smollm3", {f"{CONFIG}/dtype": -1}, False),
    ("iquestcoder", {f"{CONFIG}/dtype": {"4": 4}}, False),
    ("llama", {f"{CONFIG}/per_layer_config": 3.0}, False),
    ("cwm", {f"{GENERATION}/watermarking_config": 0}, False),
    ("llama", {f"{INDEX}/metadata": ...}, False),
    ("llama", {f"{INDEX}/weight_map/lm_head.weight": None}, False),
    ("qwen3", {f"{CONFIG}/original_max_position_embeddings": 16, f"{CONFIG}/rope_scaling": LLAMA_3}, True),
]
IDS = torch.randint(1, 300, (2, 14), generator=torch.Generator().manual_seed(0))


@functools.cache
def names() -> dict[str, list[list[str]]]:
    """File -> lists of keys that Transformers may read of it: in its code, and in all families' configurations."""
    read: dict[str, set[str]] = {"config": set(), "kwargs": set()}
    for module in MODULES:
        for node in ast.walk(ast.parse(inspect.getsource(importlib.import_module(f"transformers.{module}")))):
            match node:
                case (
                    ast.Attribute(holder, name)
                    | ast.Call(ast.Name("getattr" | "hasattr"), [holder, ast.Constant(str(name)), *_])
                    | ast.Call(ast.Attribute(holder, "get" | "pop"), [ast.Constant(str(name)), *_])
                ):
                    for end, keys in read.items():
                        keys.update([name] if ast.unparse(holder).endswith(end) else [])
    config = read["config"] | {"tokenizer_class"} | PreTrainedConfig.__dataclass_fields__.keys()
    generation = sorted(GenerationConfig().to_dict())
    lists = [[sorted(config), generation, list(defaults())], [generation], [sorted(read["kwargs"])], [["metadata"]]]
    return dict(zip(FILES, lists, strict=True))


@functools.cache
def defaults() -> dict[str, list[Any]]:
    """Field of any family's configuration -> its defaults."""
    found: dict[str, list[Any]] = {}
    for config_class in CONFIG_MAPPING.values():
        for name, field in getattr(config_class, "__dataclass_fields__", {}).items():
            known = found.setdefault(name, [])
            known += [field.default] if isinstance(field.default, bool | int | float | str) else []
    return found


@functools.cache
def original(folder: Path, family: str) -> dict[str, Any]:
    """The contents of the JSON files of an unchanged checkpoint, which is saved in `folder / family`."""
    fields: dict[str, Any] = {"vocab_size": 300} if family in OTHERS else {"num_hidden_layers": LAYERS}
    if types := FAMILIES.get(family, {}).get("layer_types"):
        fields["layer_types"] = types[:LAYERS]
    save_checkpoint(folder / family, family, shards=True, **fields)
    publish(folder / family)
    (folder / family / "additional_chat_templates" / "tool use.jinja").unlink()
    (folder / family / "additional_chat_templates").rmdir()
    return {file: json.loads((folder / family / file).read_text()) for file in FILES}


def paths(content: Any, path: str) -> Iterator[str]:
    for key in content if isinstance(content, dict) else ():
        yield from (f"{path}/{key}", *paths(content[key], f"{path}/{key}"))


def rope(random: Random, config: dict[str, Any]) -> dict[str, Any]:
    """Parameters of a rotary embedding of any type."""
    half = (config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]) // 2
    values: dict[str, Any] = {name: random.choice([1.0, 2.0, 4.0]) for name in RopeParameters.__annotations__}
    values |= {"rope_theta": 5000.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "beta_fast": 32.0, "beta_slow": 1}
    values |= {f"{which}_factor": [random.choice([1.0, 1.5, 3.0]) for _ in range(half)] for which in ("short", "long")}
    values |= {"rope_type": random.choice(ROPES), "original_max_position_embeddings": 16, "partial_rotary_factor": 1.0}
    values |= {"truncate": False, "mrope_section": [half]}
    seldom = "attention_factor mscale mscale_all_dim truncate partial_rotary_factor mrope_section".split()
    return {name: value for name, value in values.items() if name not in seldom or random.random() < 0.2}


def respelled(random: Random, contents: dict[str, Any]) -> Edits:
    """Old spellings and places."""
    config, generation = contents[CONFIG], contents[GENERATION]
    scaling = rope(random, config) if random.random() < 0.7 else dict(config["rope_parameters"])
    edits: Edits = {f"{CONFIG}/rope_parameters": ..., f"{CONFIG}/rope_scaling": scaling}
    for name in ("rope_theta", "original_max_position_embeddings", "partial_rotary_factor"):
        if name in scaling and random.random() < 0.7:
            edits[f"{CONFIG}/{name}"] = scaling.pop(name)
    if random.random() < 0.5 and "rope_type" in scaling:
        scaling["type"] = scaling.pop("rope_type")
    moves = [
        (f"{CONFIG}/auto_map", {f"{CONFIG}/torch_dtype": random.choice(["float32", "bfloat16"])}),
        (f"{TOKENIZER}/tokenizer_class", {f"{CONFIG}/tokenizer_class": contents[TOKENIZER]["tokenizer_class"]}),
        (GENERATION, {f"{CONFIG}/{name}": value for name, value in generation.items()}),
    ]
    for old, name in CONFIG_MAPPING[config["model_type"]].attribute_map.items():
        moves += [(f"{CONFIG}/{name}", {f"{CONFIG}/{old}": config[name]})] if name in config else []
    for path, new in moves:
        edits |= {path: ..., **new} if random.random() < 0.4 else {}
    return edits


def mutant(seed: int, folder: Path) -> Mutant:
    random = Random(seed)
    contents = original(folder, family := random.choice([*FAMILIES, *OTHERS]))
    if random.random() < 0.15:
        return family, respelled(random, contents), True
    edits: Edits = {}
    for _ in range(random.choice([1, 1, 1, 2, 3])):
        (file,) = random.choices(list(FILES), list(FILES.values()))
        present = list(paths(contents[file], file))
        path = random.choice(random.choice([present, [f"{file}/{name}" for name in random.choice(names()[file])]]))
        name = path.rpartition("/")[2]
        value = random.choice(random.choice([TABLES.get(name) or defaults().get(name) or ODD, ODD]))
        if name in ("rope_scaling", "rope_parameters") and random.random() < 0.7:
            each = rope(random, contents[CONFIG])
            value = random.choice([each, each, dict.fromkeys(KINDS[:2], each)])
        elif name == "layer_types" and random.random() < 0.7:
            value = random.choices(KINDS, k=LAYERS)
        elif path in present and random.random() < 0.2:
            value = ...
        edits[random.choices([path, file], [60, 1])[0]] = value
    return family, edits, False


def save(folder: Path, family: str, edits: Edits) -> None:
    """Saves a mutant as `folder / "source"`."""
    contents = copy.deepcopy(original(folder, family))
    for path, value in edits.items():
        place, (*above, key) = contents, path.split("/")
        for name in above:
            place[name] = place[name] if isinstance(place.get(name), dict) else {}
            place = place[name]
        place[key] = value
        if value is ...:
            del place[key]
    shutil.rmtree(folder / "source", ignore_errors=True)
    (folder / "source").mkdir()
    for file in (folder / family).iterdir():
        if file.name not in FILES:
            os.link(file, folder / "source" / file.name)
    for name, content in contents.items():
        (folder / "source" / name).write_text(json.dumps(content))


def decoded(model: PreTrainedModel) -> list[Any]:
    """Logits past the windows of 8, and of 4 and 9 in `ODD`."""
    cache, parts, mask = None, [], torch.ones_like(IDS)
    mask[0, :3] = 0
    for start, stop in ((0, 7), (7, 12), (12, 13), (13, 14)):
        inputs = {"input_ids": IDS[:, start:stop], "attention_mask": mask[:, :stop], CACHE: cache}
        output = model(**inputs, use_cache=True, return_dict=True)
        cache, parts = output[CACHE], [*parts, output.logits.double() + 0.0]
    return torch.cat(parts, 1).tolist()


def fault(folder: Path, family: str, edits: Edits, respelling: bool) -> str:
    """How a mutant breaks the promise; empty if it does not."""
    save(folder, family, edits)
    shutil.rmtree(folder / "result", ignore_errors=True)
    refused = ""
    try:
        report = retrofit(
            folder / "source", folder / "result", "denseformer", link=True, verify="headers", progress=False
        )
    except ResFormerError as error:
        refused = str(error).replace(str(folder), "")
    except BaseException as error:  # tokenizers' Rust panics are no `Exception`
        return f"raised {error!r}"
    try:
        expected = look_at_what_works(folder / "source", decoded=decoded)
        actual = {} if refused else look_at_what_works(folder / "result", decoded=decoded)
    except Exception as error:
        return "" if refused else f"converted, but Transformers does not load it: {error!r}"
    if refused:  # what no conversion takes, though Transformers may: it has to be named
        keys = {key for path in edits for key in path.split("/")[1:] or [path]}
        random = re.search("(missing|mismatched) keys: ", refused)  # with which Transformers loads random numbers
        if isinstance(expected["logits"], str) or random or any(key in refused for key in keys):
            return ""
        return f"refused, but Transformers reads it: {refused}"
    if isinstance(expected["tokens"], str) and any("tokenizer" in warning for warning in report.warnings):
        del expected["tokens"]  # it is told
    for name, value in expected.items():
        if (one := repr(value)) != (other := repr(actual[name])):
            start = next((n for n, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), 40) - 40
            start = max(0, start)
            return f"{name}: {one[start : start + 200]} in the source, {other[start : start + 200]} in the result"
    return ""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """For the checkpoints that are changed, and the mutant at hand; Transformers says nothing of them."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    yield tmp_path_factory.mktemp("mutants")
    logging.enable_progress_bar()
    logging.set_verbosity(verbosity)


def _id(which: int | Mutant) -> str:
    return str(which) if isinstance(which, int) else "-".join((which[0], *which[1]))


@pytest.mark.parametrize("which", others_slow([*FOUND, *range(150)], [*FOUND, *range(30)]), ids=_id)
def test_a_source_is_refused_by_name_or_is_what_transformers_makes_of_it(which: int | Mutant, folder: Path) -> None:
    family, edits, respelling = mutant(which, folder) if isinstance(which, int) else which
    if not (broken := fault(folder, family, edits, respelling)):
        return
    for path in list(edits):
        fewer = {name: value for name, value in edits.items() if name != path}
        if found := fault(folder, family, fewer, respelling):
            edits, broken = fewer, found
    pytest.fail(f"{(family, edits, respelling)!r}: {broken}")
