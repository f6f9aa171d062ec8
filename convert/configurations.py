"""What Transformers makes of a checkpoint's config.json, and which of its keys have no place in a `ResFormerConfig`.

`AutoConfig` reads the file, and no code of the checkpoint is run: neither `auto_map` nor a kernel that it names.
"""

import copy
import functools
import json
import re
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedConfig,
)
from transformers.initialization import no_init_weights
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from resformer.configuration import ResFormerConfig
from resformer.configuration.methods import without_connections
from resformer.convert.connected_families import connection_config
from resformer.convert.families import FAMILIES, expressed_names, supported
from resformer.convert.other_formats import ATTENTION, auto_config, check_plain
from resformer.convert.tensors import CODES
from resformer.errors import CheckpointError, one_line, quoted
from resformer.modeling.versions import CACHE
from resformer.names import CONFIG
from resformer.safetensors_format import MOST_TENSORS

#: Keys that change no number that a model computes, and are described by other means or not at all: names, labels, what
#: is returned. The dtype is compared, and the tokenizer's class goes along, elsewhere.
_SILENT = set(
    "model_type architectures transformers_version id2label label2id num_labels problem_type return_dict "
    "use_return_dict output_hidden_states output_attentions name_or_path _name_or_path dtype torch_dtype "
    "tokenizer_class _from_model_config".split()
)
#: Others, which are told: code, implementations, plans for several devices, memory in training.
_INERT = set(
    "auto_map trust_remote_code attn_implementation _attn_implementation _attn_implementation_autoset "
    "_attn_implementation_internal experts_implementation _experts_implementation _experts_implementation_internal "
    "use_kernels gradient_checkpointing sep_token_id base_model_tp_plan base_model_pp_plan base_model_ep_plan "
    "base_model_fsdp_plan".split()
)
#: Keys from which Transformers makes `rope_parameters`.
_ROPE = {"rope_theta", "rope_scaling", "partial_rotary_factor", "original_max_position_embeddings"}
#: Keys that Transformers reads if they are null too.
_NEUTRAL = {"is_causal": True}
#: Keys of other families' computations that other versions of Transformers, or engines, read for any decoder.
_ELSEWHERE = {"final_logit_softcapping", "attn_logit_softcapping", "num_kv_shared_layers", "clip_qkv"}
#: The modules of Transformers that every model runs through, beside those of its class and its base classes.
_MODULES = (
    "cache_utils masking_utils modeling_rope_utils modeling_layers core_model_loading configuration_utils "
    "fusion_mapping integrations.sdpa_attention integrations.flash_attention integrations.flex_attention utils.generic "
    "utils.output_capturing modeling_flash_attention_utils quantizers.auto"
).split()
#: Keys for implementations -> those that Transformers has. Others may be kernels, whose names have a slash.
_IMPLEMENTATIONS = {
    "attn_implementation": {"eager", *ALL_ATTENTION_FUNCTIONS},
    "experts_implementation": {"eager", *ALL_EXPERTS_FUNCTIONS},
}
_SIZES = (
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
    "max_position_embeddings max_window_layers sliding_window no_rope_layer_interval"
).split()
_WIDEST_HEAD = 2**16
#: For the key that an error of Transformers comes from.
_SECONDS_OF_SEARCH = 10
#: As many names are made, where config.json gives none.
_MOST_LABELS = 100_000
#: q, o, gate, up and down projections and two norms are in every layer.
TENSORS_OF_A_LAYER = 7
#: The most layers that are read: each has so many tensors, and at most `MOST_TENSORS` are read.
_MOST_LAYERS = MOST_TENSORS // TENSORS_OF_A_LAYER


def read_config(folder: Path, raw: Mapping[str, Any]) -> tuple[PreTrainedConfig, tuple[str, ...]]:
    """(what `AutoConfig` makes of the folder, the keys of its config.json that change nothing and go nowhere).

    Args:
        raw: the content of its config.json, which is checked first: sizes, for lists as long as a model is deep are
            made, and keys that name other files.
    """
    where, model_type = folder / "config.json", raw.get("model_type")
    if model_type != ResFormerConfig.model_type:
        try:
            supported(model_type)
        except CheckpointError as error:
            raise CheckpointError(f"{where}: {error}") from error
    check_plain(where, raw)
    _check_values(where, raw)
    try:
        config = _standardised(auto_config(folder))
    except Exception as error:  # any of the validators', or of arithmetic with what they let pass
        raise _refusal(where, raw, error, _made) from error
    if config.dtype is not None and not (isinstance(config.dtype, torch.dtype) and config.dtype in CODES):
        raise CheckpointError(f"{where}: dtype is {quoted(str(config.dtype))}; expected one of weights, as float32.")
    left_behind = _left_behind(where, raw, config)
    try:
        connection_config(config)
    except CheckpointError as error:
        raise CheckpointError(f"{where}: {error}") from error
    try:
        _run(config)
    except Exception as error:  # of any kind: values that no validator looks at
        raise _refusal(where, raw, error, lambda changed: _run(_made(changed))) from error
    return config, left_behind


def _standardised(config: PreTrainedConfig) -> PreTrainedConfig:
    """The configuration as a model that is built from it completes it."""
    config.standardize_rope_params()
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if width > _WIDEST_HEAD:  # its frequencies take memory
        raise ValueError(f"head_dim is {width:,}, of at most {_WIDEST_HEAD:,}")
    return config


def _made(raw: Mapping[str, Any]) -> PreTrainedConfig:
    """What `AutoConfig` makes of a config.json of this content."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / CONFIG).write_text(json.dumps(raw), encoding="utf-8")
        return _standardised(auto_config(Path(folder)))


def _check_values(where: Path, raw: Mapping[str, Any]) -> None:
    names: Mapping[str, str] = CONFIG_MAPPING[raw["model_type"]].attribute_map
    for key, value in raw.items():
        name = names.get(key, key)
        if name in _SIZES and value is not None and not (type(value) is int and 0 <= value < 2**31):
            raise CheckpointError(f"{where}: {key} is {quoted(value)}; expected a size.")
        known = _IMPLEMENTATIONS.get(name.removeprefix("_"))
        if known and value is not None and not (isinstance(value, str) and (value in known or "/" in value)):
            raise CheckpointError(f"{where}: {key} is {quoted(value)}, which Transformers does not know: take it out.")
        if name == "num_labels" and isinstance(value, int) and value > _MOST_LABELS:
            raise CheckpointError(f"{where}: {key} is {value:,}; expected at most {_MOST_LABELS:,}.")
        if name == "num_hidden_layers" and value is not None and not 0 < value <= _MOST_LAYERS:
            raise CheckpointError(f"{where}: {key} is {value:,}; expected 1 to {_MOST_LAYERS:,}.")


def _left_behind(where: Path, raw: Mapping[str, Any], config: PreTrainedConfig) -> tuple[str, ...]:
    """The keys that nothing reads. Refuses those that Transformers reads and the decoder has no place for."""
    fields, names = type(config).__dataclass_fields__, type(config).attribute_map
    expressed = expressed_names(config) | _ROPE | GenerationConfig()._get_default_generation_params().keys()
    training_only = FAMILIES[config.model_type].training_only if config.model_type in FAMILIES else ()
    told = []
    for key, value in raw.items():
        name = names.get(key, key)
        if name in expressed or name in _SILENT:
            continue
        neutral = _NEUTRAL.get(name, getattr(type(config), name, None))
        changed = value != neutral and (value is not None or name in _NEUTRAL)
        if changed and name not in _INERT.union(training_only) and name in _read_names(type(config)):  # type: ignore[arg-type]
            raise CheckpointError(
                f"{where}: {key} is {quoted(value)}, which Transformers reads, and the decoder has no place for it. If "
                "the model does not need it, take it out of config.json."
            )
        if name not in fields or name in training_only:
            told.append(key)
    return tuple(sorted(told))


@functools.cache
def _read_names(config_class: type[PreTrainedConfig]) -> frozenset[str]:
    """Every name that a model of this configuration may read of it: the code is searched, and names what it reads."""
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[config_class]
    modules = {each.__module__ for each in model_class.__mro__} | {f"transformers.{name}" for name in _MODULES}
    names = set(_ELSEWHERE)
    for module in sorted(modules):
        if module.startswith("transformers.") and (file := getattr(sys.modules.get(module), "__file__", None)):
            text = Path(file).read_text(encoding="utf-8")
            names.update(*re.findall(r"config\.(\w+)|[\"'](\w+)[\"']", text))
    return frozenset(names)


def _run(config: PreTrainedConfig) -> None:
    """Passes two tokens, and one with a cache, through a model without memory, of one layer of each kind."""
    config = without_connections(config) if isinstance(config, ResFormerConfig) else copy.deepcopy(config)
    lists = {name: values for name in ("layer_types", "no_rope_layers") if (values := getattr(config, name, None))}
    kinds = {tuple(values[layer] for values in lists.values()): layer for layer in range(config.num_hidden_layers)}
    for name, values in lists.items():
        setattr(config, name, [values[layer] for layer in kinds.values()])
    config.num_hidden_layers = len(kinds)
    with no_init_weights(), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION)
    rotary = type(model.base_model.rotary_emb)(config=config)  # on the CPU: some read their positions

    def turned(x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        positions = torch.zeros(position_ids.shape, dtype=torch.long)
        return tuple(each.to("meta") for each in rotary(torch.zeros(1, dtype=x.dtype), positions))

    model.base_model.rotary_emb.forward = turned
    ids = torch.zeros(1, 2, dtype=torch.long, device="meta")
    with torch.no_grad():
        output = model(input_ids=ids, use_cache=True)
        model(input_ids=ids[:, :1], use_cache=True, **{CACHE: output[CACHE]})


def _refusal(where: Path, raw: Mapping[str, Any], error: Exception, act: Callable[[Any], object]) -> CheckpointError:
    """An error of Transformers, with the key of config.json without which, or with which, `act` passes."""

    def passes(changed: Mapping[str, Any]) -> bool:
        try:
            act(changed)
        except Exception:  # again of any kind
            return False
        return True

    deadline = time.monotonic() + _SECONDS_OF_SEARCH
    reason = f"Transformers makes no model of it ({one_line(error)})."
    if passes(raw):
        return CheckpointError(f"{where}: {reason}")
    head_dim = (raw.get("hidden_size") or 0) // (raw.get("num_attention_heads") or 1)
    if raw.get("head_dim") is None and passes({**raw, "head_dim": head_dim}):
        return CheckpointError(f"{where}: has no head_dim: {reason} Set it: hidden_size / num_attention_heads?")
    found = []
    for key in sorted(raw.keys() - {"model_type"}, key=lambda name: (name not in str(error), [*raw].index(name))):
        if time.monotonic() > deadline:
            break
        without = {name: value for name, value in raw.items() if name != key}
        if passes(without) or (isinstance(raw[key], bool) and passes({**raw, key: not raw[key]})):
            found.append(f"{key} is {quoted(raw[key])}")
    way = " Correct it, or take it out." if found else ""
    return CheckpointError(f"{where}: {' or '.join(found) + ': ' if found else ''}{reason}{way}")
