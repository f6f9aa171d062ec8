"""What Transformers makes of a folder by default: neither a dtype nor an implementation of attention is asked for.

It is the judge of every conversion: source and result are loaded in this way and compared.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from resformer.configuration.methods import CONNECTION_FIELDS
from resformer.convert.reading import CODE_KEYS
from resformer.errors import CheckpointError, VerificationError, first_names, one_line, plain, quoted
from resformer.loading import names_kernels, without_a_word, without_kernels
from resformer.model_cards.heads import auto_class

#: What a configuration says of itself, not of the model.
_OF_THE_FILE = {*CONNECTION_FIELDS, "base_model", "model_type", "architectures", "transformers_version", "dtype"}
#: In config.json of a linked result: tensors that its files hold and its model has no use for.
UNUSED = "unused_weights"


def without_code(values: Any) -> Any:
    """The same, without keys that name code in it and in the objects that it holds; kernels are code on the Hub."""
    if not isinstance(values, dict):
        return values
    named = [key for key in values if re.fullmatch(r"_?\w+_implementation(_\w+)?", str(key))]
    left_out = {*CODE_KEYS, "trust_remote_code", *(key for key in named if "/" in str(values[key]))}
    return {key: without_code(value) for key, value in values.items() if key not in left_out}


@dataclass(frozen=True)
class Built:
    """A model as Transformers builds it of a folder, without memory for its weights."""

    config: PreTrainedConfig
    dtype: torch.dtype  # in which Transformers loads it by default
    tensors: dict[str, tuple[tuple[int, ...], torch.dtype]]  # name in the model -> shape and dtype
    tied: frozenset[str]  # names in the model of tensors that are others again
    generation: dict[str, Any]  # settings, if it generates
    ignored: frozenset[str]  # tensors of the files that the model has no place for
    memory: int  # bytes of weights and buffers
    parameters: int  # tied ones once

    def facts(self) -> dict[str, Any]:
        """What it is made of, but for its connections, in forms that JSON has."""
        said = without_code(self.config.to_dict())
        facts = {key: value for key, value in said.items() if key not in {*_OF_THE_FILE, UNUSED} and key[0] != "_"}
        facts |= {f"generation: {key}": value for key, value in self.generation.items()}
        facts["dtype"] = str(self.dtype).removeprefix("torch.")
        return {key: json.loads(json.dumps(value, default=str)) for key, value in facts.items()}


def load(folder: Path, name: object, **options: Any) -> tuple[PreTrainedModel, dict[str, Any]]:
    """What Transformers loads by default, in evaluation mode, and what it says of it.

    No code runs: neither that of `auto_map`, nor kernels, in whose place its own implementations are taken. The folder
    has been checked by `untrusted.check_folder`; messages have `name`, and `from_pretrained` the options.
    """
    own = {"local_files_only": True, "trust_remote_code": False}
    try:
        with without_a_word():
            config = AutoConfig.from_pretrained(str(folder), **own)
            if names_kernels(config):
                options["config"] = without_kernels(config)
            options |= {"output_loading_info": True, **own}
            model, loading = auto_class(config).from_pretrained(str(folder), **options)
    except ImportError:
        raise  # a missing package, which the message names
    except Exception as error:  # Transformers and safetensors raise nearly anything for a bad file
        raise CheckpointError(
            f"{plain(name)}: cannot be loaded by Transformers: {type(error).__name__}: "
            f"{one_line(str(error).replace(str(folder), plain(name)))}"
        ) from error
    if problem := loading_problem(loading):
        raise CheckpointError(f"{plain(name)}: {problem}")
    return model.eval(), loading


def loading_problem(loading: Mapping[str, Any]) -> str:
    """What a model that was loaded lacks, or has in another form; empty if nothing."""
    if missing := sorted(map(str, loading.get("missing_keys") or ())):
        longer = (str(key) for key in loading.get("unexpected_keys") or () if str(key).endswith(missing[0]))
        prefix = next(longer, "").removesuffix(missing[0])
        way = (
            f" They bear the prefix {quoted(prefix)}, as of torch.compile, DDP or PEFT: save the model that is inside, "
            "or rename them."
        )
        return f"missing keys: config.json asks for {first_names(missing)}.{way if prefix else ''}"
    for name, stored, expected in sorted(loading.get("mismatched_keys") or ()):
        return f"mismatched keys: {quoted(name)} has shape {[*stored]}, config.json asks for {[*expected]}."
    return "".join(f"{one_line(each)}." for each in loading.get("error_msgs") or ())


def build(folder: Path, name: object) -> Built:
    """The model of a folder, on the meta device: of each weight Transformers touches the first page, no more."""
    model, loading = load(folder, name, device_map={"": "meta"}, ignore_mismatched_sizes=True)
    tensors = {key: (tuple(tensor.shape), tensor.dtype) for key, tensor in model.state_dict().items()}
    settings = model.generation_config.to_dict() if model.can_generate() else {}
    tied = model.all_tied_weights_keys if getattr(model.config, "tie_word_embeddings", False) else {}
    # Where a file holds both ends, only weights that are read are tied.
    twice = [each for name, each in model.named_parameters() if each is not model.get_parameter(tied.get(name, name))]
    unused = frozenset(map(str, getattr(model.config, UNUSED, None) or ()))  # which our models ignore
    return Built(
        config=model.config,
        dtype=model.dtype,
        tensors=tensors,
        tied=frozenset(tied),
        generation={key: value for key, value in settings.items() if key != "transformers_version" and key[0] != "_"},
        ignored=frozenset(map(str, loading.get("unexpected_keys") or ())) | unused,
        parameters=model.num_parameters() - sum(each.numel() for each in twice),
        memory=model.get_memory_footprint(),
    )


def check_same(source: Built, result: Built, name: str, dropped: frozenset[str], added: frozenset[str]) -> None:
    """Raises `VerificationError` unless both are the same model but for these tensors, by their names in the models."""
    for key, (first, second) in differences(source.facts(), result.facts()).items():
        raise VerificationError(
            f"{name}: Transformers reads {key} as {quoted(first)} in the source and as {quoted(second)} in the result. "
            "Nothing was written; this is a defect of resformer, please report it."
        )
    expected = {key: form for key, form in source.tensors.items() if key not in dropped}
    stored = {key: form for key, form in result.tensors.items() if key not in added}
    if differing := differences(expected, stored):
        raise VerificationError(f"{name}: the result's model differs from the source's in {first_names(differing)}.")


def differences(one: Mapping[Any, Any], other: Mapping[Any, Any]) -> dict[Any, tuple[Any, Any]]:
    """The entries that differ, with both values."""
    return {key: (one.get(key), other.get(key)) for key in {**one, **other} if one.get(key) != other.get(key)}
