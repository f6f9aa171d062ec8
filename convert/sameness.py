"""What needs no weights, compared: what Transformers makes of the configurations of a source and of its result.

Both are read from their files and built by Transformers' own classes, without memory for parameters.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import DynamicCache, GenerationConfig, PreTrainedConfig
from transformers.generation.configuration_utils import METADATA_FIELDS

from resformer.configuration import ResFormerConfig
from resformer.configuration.methods import without_connections
from resformer.convert import connected_families
from resformer.convert.connected_families import is_of_a_family
from resformer.convert.connections import head_of, meta_model
from resformer.convert.other_formats import auto_config
from resformer.convert.reading import CODE_KEYS, SideFile
from resformer.errors import CheckpointError, VerificationError, one_line, quoted
from resformer.untrusted import MOST_BYTES, read_bounded, read_json

GENERATION = "generation_config.json"


@dataclass(frozen=True)
class Difference:
    """Something that two configurations make differently."""

    name: str
    source: Any
    result: Any

    def __str__(self) -> str:
        return f"{self.name} ({quoted(self.source)} in the source, {quoted(self.result)} in the result)"


def facts(config: PreTrainedConfig, generation: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Name -> what a model of the configuration has, its connections left out.

    Args:
        generation: its settings of generation, if they are known.
    """
    if is_of_a_family(config.model_type):
        return {"configuration": connected_families.facts(config), "generation": generation}
    if isinstance(config, ResFormerConfig):
        config = without_connections(config)
    decoder = meta_model(config).base_model
    cache = DynamicCache(config=config)
    length = 2 * config.max_position_embeddings
    return {
        "tensors": {name: tuple(tensor.shape) for name, tensor in decoder.state_dict().items()},
        "rotary frequencies": _frequencies(decoder, config, 2),
        f"rotary frequencies at {length:,} tokens": _frequencies(decoder, config, length),
        "layers with a rotary embedding": [bool(getattr(each.self_attn, "use_rope", True)) for each in decoder.layers],
        "layers of a cache": [(_class_name(layer), getattr(layer, "sliding_window", None)) for layer in cache.layers],
        "attention": [(each.self_attn.scaling, each.self_attn.attention_dropout) for each in decoder.layers],
        "activation": [repr(each.mlp.act_fn) for each in decoder.layers],
        "epsilon of norms": {
            name: module.variance_epsilon
            for name, module in decoder.named_modules()
            if hasattr(module, "variance_epsilon")
        },
        "tie_word_embeddings": config.tie_word_embeddings,
        "special tokens": {name: getattr(config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
        "generation": generation,
    }


def _class_name(module: object) -> str:
    """The class of Transformers that it is of: the package's own extend those."""
    return next(each.__name__ for each in type(module).__mro__ if each.__module__.startswith("transformers."))


def _frequencies(decoder: Any, config: PreTrainedConfig, length: int) -> tuple[list[float], float]:
    """(frequencies, scaling) of the rotary embedding for a text of so many tokens, computed on the CPU."""
    rotary = type(decoder.rotary_emb)(config=config)
    rotary(torch.zeros(1), torch.tensor([[length - 1]]))
    return rotary.inv_freq.tolist(), rotary.attention_scaling


def generation_settings(folder: Path, config: PreTrainedConfig) -> dict[str, Any] | None:
    """The settings of generation that a model has which Transformers loads from `folder`; `None` if it writes no text.

    They come from generation_config.json, or where there is none from config.json.
    """
    if head_of(config):
        return None
    model = meta_model(config)
    before = model.generation_config
    try:
        # As `from_pretrained` calls it.
        model.adjust_generation_fn(None, True, None, str(folder), None, False, None, True, None, None, "", False)
        return _settings(model.generation_config)
    except Exception as error:  # its validator's, or of a file that holds something else
        where = folder / GENERATION if (folder / GENERATION).exists() else folder / "config.json"
        raise CheckpointError(
            f"{where}: {_culprit(where)}Transformers reads no settings of generation from it ({one_line(error)}). "
            "Correct it."
        ) from error
    finally:
        model.generation_config = before


def _culprit(where: Path) -> str:
    """The key without which the settings in a file can be read, for a message; empty if there is no such key."""
    content = read_json(where)
    for key, value in content.items():
        try:
            GenerationConfig.from_dict({name: other for name, other in content.items() if name != key})
        except Exception:  # as before: then it is not this key, or not this one alone
            continue
        return f"{key} is {quoted(value)}: "
    return ""


def generation_files(folder: Path, config: PreTrainedConfig, settings: Mapping[str, Any]) -> tuple[SideFile, ...]:
    """The settings of config.json as a generation_config.json, if a model's configuration does not imply them."""
    if _settings(GenerationConfig.from_model_config(json.loads(config.to_json_string()))) == settings:
        return ()
    content = (json.dumps(settings, indent=2, sort_keys=True) + "\n").encode()
    return (SideFile(GENERATION, folder / "config.json", len(content), content),)


def _settings(generation: GenerationConfig) -> dict[str, Any]:
    left_out = {*METADATA_FIELDS, *CODE_KEYS}
    return {name: value for name, value in generation.to_dict().items() if name not in left_out and value is not None}


def differences(source: Mapping[str, Any], result: Mapping[str, Any]) -> list[Difference]:
    """The facts in which two models differ, those aside that are not known of one."""
    found = []
    for name in source.keys() & result.keys():
        one, other = source[name], result[name]
        if isinstance(one, dict) and isinstance(other, dict):
            found += [
                Difference(f"{name}: {key}", one.get(key), other.get(key))
                for key in one.keys() | other.keys()
                if _differ(one.get(key), other.get(key))
            ]
        elif None not in (one, other) and _differ(one, other):
            found.append(Difference(name, one, other))
    return sorted(found, key=lambda each: each.name)


def _differ(one: object, other: object) -> bool:
    return one != other and repr(one) != repr(other)  # NaN, which a negative `rope_theta` gives for one, is like NaN


def check_result(name: str, source: Mapping[str, Any], config: str, side_files: Mapping[str, SideFile]) -> None:
    """Raises `VerificationError` if what Transformers makes of the result's small files is not what the source has.

    Args:
        source: the source's facts.
        config: the text of the result's config.json.
        side_files: of the result, by name.
    """
    with TemporaryDirectory(prefix="resformer-") as folder:
        (Path(folder) / "config.json").write_text(config, encoding="utf-8")
        if file := side_files.get(GENERATION):
            content = read_bounded(file.path, MOST_BYTES) if file.content is None else file.content
            (Path(folder) / GENERATION).write_bytes(content)
        made = auto_config(Path(folder))
        found = differences(source, facts(made, generation_settings(Path(folder), made)))
    if found:
        raise VerificationError(
            f"The result would not compute what {name} does: {'; '.join(map(str, found))}. Nothing was written; this "
            "is a defect of resformer, please report it."
        )
