"""Models that are not trained yet: sizes by name, configurations, random weights, and the budget of a training.

From 82m on the names are numbers of parameters with the paper's vocabulary of 50,277 tokens, and heads have 64
dimensions. The paper plots 320m but does not give its shape; ours has its other models' MLP of 3.5 widths.
"""

import copy
import inspect
import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from resformer.configuration import ResFormerConfig
from resformer.configuration.connection_fields import ConnectionFields
from resformer.configuration.methods import connections_of
from resformer.convert.connected_families import with_connections
from resformer.convert.connections import meta_model
from resformer.errors import did_you_mean
from resformer.files import check_target, replacing, writing
from resformer.modeling.any_decoder import Decoder, text_config
from resformer.modeling.connecting import chosen_fields, connected_config, connection_field_names
from resformer.modeling.families import language_model_class
from resformer.modeling.measured import MEASURED
from resformer.training.data import load_documents
from resformer.training.options import NewOptions, ScheduleOptions
from resformer.training.tokenizers import check_tokens, make_tokenizer, save_tokenizer, tokenizers_of
from resformer.untrusted import read_json

#: Fields of a ResFormerConfig, without those that all configurations have.
CONFIG_FIELDS = {field.name for field in fields(ResFormerConfig)} - {field.name for field in fields(PreTrainedConfig)}

_TOKENS_PER_PARAMETER = 20  # arXiv 2203.15556
_WIDE = 512  # from this width on matrices start with Llama's deviation of 0.02, as in the paper


@dataclass(frozen=True)
class Size:
    """The shape of a model, and what follows from the size where nothing else is said."""

    num_hidden_layers: int
    num_attention_heads: int
    hidden_size: int
    intermediate_size: int
    block: int = 2048  # tokens a sequence, and positions of the model
    tokenizer: str = "bpe:32768"  # as of `make_tokenizer`

    @property
    def shape(self) -> dict[str, int]:
        """The fields of a `ResFormerConfig`."""
        return {name: value for name, value in vars(self).items() if name in CONFIG_FIELDS}


SIZES: Mapping[str, Size] = {
    "tiny": Size(8, 8, 128, 448, 512, "bpe:4096"),
    "10m": Size(8, 8, 256, 896, 512, "bpe:4096"),
    "82m": Size(8, 8, 512, 1792),
    "180m": Size(12, 12, 768, 2688),
    "320m": Size(20, 14, 896, 3136),
    "468m": Size(24, 16, 1024, 3584),
}


def with_fields(text: str, known: Collection[str], what: str, allowed: Collection[str]) -> tuple[str, dict[str, Any]]:
    """`NAME:FIELD=VALUE...` as a known name and the fields; a value is JSON or a text, or several between commas."""
    name, *pairs = text.split(":")
    if name not in known:
        expected = f"one of {', '.join(known)}, with :FIELD=VALUE... or without"
        raise ValueError(f"{what} is {name!r}; expected {expected}.{did_you_mean(name, known)}")
    values: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or key not in allowed:
            hint = did_you_mean(key, allowed) if equals else ""
            raise ValueError(f"{what} {text}: {pair!r} is no FIELD=VALUE of the model.{hint}")
        try:
            values[key] = json.loads(f"[{value}]" if "," in value and value[0] != "[" else value)
        except json.JSONDecodeError:
            values[key] = value
    return name, values


def known_fields(backbone: str | None) -> set[str]:
    """The fields that a configuration takes: ours, or those of a backbone and of its connections."""
    if backbone is None:
        return CONFIG_FIELDS | {*connection_field_names()}
    family = type(_backbone(backbone))
    return {each.name for each in fields(family)} | {*family.attribute_map, *connection_field_names()}


def _backbone(name: str) -> PreTrainedConfig:
    """The configuration of a family, by its model type or in a config.json."""
    if name.endswith(".json"):
        values = {key: value for key, value in read_json(Path(name)).items() if key != "quantization_config"}
        name = str(values.pop("model_type", None))
    else:
        values = {}
    if name not in MEASURED:
        expected = "a config.json, or a model type of the table in docs/any-decoder.md"
        raise ValueError(f"backbone is {name!r}; expected {expected}.{did_you_mean(name, MEASURED)}")
    config = CONFIG_MAPPING[name].from_dict(values)
    if text_config(config) is not config:
        decoder = text_config(config).model_type
        raise ValueError(f"backbone is {name!r}, which is more than a decoder; take its decoder, {decoder!r}.")
    if reason := why_not_trained(config):
        raise ValueError(f"backbone is {name!r}: {reason}.")
    return config


def why_not_trained(config: PreTrainedConfig) -> str:
    """Why models of a type do not learn to predict the next token; empty if they do.

    Transformers' `loss_function` compares each token's logits with the next one. Other losses are those of XLNet and
    its kin, which predict the token itself, or several.
    """
    mapping = language_model_class(config)._model_mapping
    if type(config) not in mapping:
        return f"Transformers makes no language model of {config.model_type}"
    if "loss_function" not in inspect.unwrap(mapping[type(config)].forward).__code__.co_names:
        return f"the loss of {config.model_type} is not that of the next token"
    return ""


def _family_config(backbone: str, method: str, size: Size, shape: Mapping[str, Any]) -> Any:
    """The configuration of a family's decoder of this size; that of a config.json has a size of its own.

    Experts are 8, of half the width. A token takes 2, which is the work of a decoder without, or 1 if its family does.
    """
    config, given = _backbone(backbone), dict(shape)
    known = {each.name: str(each.type) for each in fields(config)} | dict.fromkeys(config.attribute_map, "")
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):  # the family's own are of another vocabulary
        if given.get(name) is None and "None" not in known.get(name, "None"):
            given[name] = given["eos_token_id"]
    if not backbone.endswith(".json"):
        renamed = {value: name for name, value in config.attribute_map.items()}
        own = {name: given.get(renamed.get(name, name), given.get(name, value)) for name, value in size.shape.items()}
        half, heads = own["intermediate_size"] // 2, own["num_attention_heads"]
        usual = {"num_key_value_heads": heads, "head_dim": own["hidden_size"] // heads}
        usual["num_experts_per_tok"] = min(2, getattr(config, "num_experts_per_tok", None) or 2)
        usual |= dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 8)
        usual |= {"moe_intermediate_size": half, **size.shape}
        given = {name: value for name, value in usual.items() if name in known} | given
        if "is_decoder" in known:
            given = {"is_decoder": True} | given
        weighed = "router_aux_loss_coef" in known or "aux_loss_coef" in known  # the latter is JetMoE's
        if weighed and "output_router_logits" in known:  # experts are balanced from scratch
            given = {"output_router_logits": True} | given
    connections = {name: given.pop(name) for name in connection_field_names() if name in given}
    values = config.to_diff_dict() if backbone.endswith(".json") else {}
    config = type(config).from_dict({**values, **given, "dtype": "float32"})
    connected = connected_config(config, method, **connections)
    if connections_of(connected):
        return connected
    Decoder(meta_model(config))  # raises if the size does not count its layers
    return config  # a baseline is plain


def scratch_config(
    method: str,
    size: str,
    tokenizer: PreTrainedTokenizerBase,
    block: int | None = None,
    backbone: str | None = None,
    **values: Any,
) -> Any:
    """The configuration of an untrained model.

    Matrices of narrow models start with a deviation of sqrt(2 / (5 hidden_size)), arXiv 1910.05895: with Llama's 0.02
    they stay at the loss of a unigram model for hundreds of steps.

    Args:
        size: one of `SIZES`.
        block: positions; default: the size's.
        backbone: the model type of another family, or its config.json, whose decoder gets the connections.
        values: fields that replace those of the size and the method.

    Raises:
        ValueError: the method, the size or a field is unknown, or the tokenizer has more tokens than `vocab_size`.
    """
    allowed = known_fields(backbone)
    for name in values.keys() - allowed:
        what = "a ResFormerConfig" if backbone is None else backbone
        raise ValueError(f"{name} is no field of {what}.{did_you_mean(name, allowed)}")
    name, own = with_fields(size, SIZES, "size", allowed)
    known = SIZES[name]
    shape = {
        "vocab_size": len(tokenizer),
        "max_position_embeddings": block or known.block,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": None,  # the row of a padding token does not learn
        **(known.shape if backbone is None else {}),
        **own,
        **values,
    }
    if shape["vocab_size"] < len(tokenizer):
        raise ValueError(f"vocab_size is {shape['vocab_size']:,}, but the tokenizer has {len(tokenizer):,} tokens.")
    if backbone is None or not backbone.endswith(".json"):
        if not isinstance(width := shape.get("hidden_size", known.hidden_size), int):
            raise ValueError(f"hidden_size is {width!r}; expected a whole number.")
        deviation = 0.02 if width >= _WIDE else round(math.sqrt(2 / (5 * width)), 3)
        shape = {"initializer_range": deviation, **shape}
    if backbone is None:
        connections = {name: shape.pop(name) for name in connection_field_names() if name in shape}
        return ResFormerConfig(**shape, **chosen_fields(ResFormerConfig(**shape), method, connections))
    return _family_config(backbone, method, known, shape)


def budget(parameters: int, flops_per_token: float, tokens: int | None = None) -> tuple[int, int, float]:
    """(training tokens, tokens a step, learning rate) of a training from scratch.

    20 tokens a parameter; the batch and the rate are DeepSeek LLM's fit to the operations of the training, C:
    0.292 C^0.3271 tokens and 0.3118 C^-0.125 (arXiv 2401.02954, section 3.1).

    Args:
        parameters, flops_per_token: of the plain decoder, those that a token passes.
    """
    tokens = _TOKENS_PER_PARAMETER * parameters if tokens is None else tokens
    operations = flops_per_token * tokens
    return tokens, round(0.292 * operations**0.3271), 0.3118 * operations**-0.125


def schedule_arguments(options: ScheduleOptions, steps: int) -> dict[str, Any]:
    """The fields of `TrainingArguments` for AdamW (0.9, 0.95), a schedule, evaluations and checkpoints.

    A cosine falls to a tenth of the rate, "wsd" to 0 in the last steps (arXiv 2405.18392).
    """
    interval, warmup = math.ceil(steps / options.evaluations), options.warmup
    if warmup > steps:
        raise ValueError(f"warmup is {warmup:g} steps, and the run has {steps:,}: its rate would not be reached.")
    scheduler, kwargs = {
        "cosine": ("cosine_with_min_lr", {"min_lr_rate": 0.1}),
        "constant": ("constant_with_warmup", {}),
        "wsd": ("warmup_stable_decay", {"num_decay_steps": math.ceil(options.decay * steps), "decay_type": "linear"}),
    }[options.schedule]
    return {
        "lr_scheduler_type": scheduler,
        "lr_scheduler_kwargs": kwargs,
        "warmup_steps": 0 if warmup * steps < 1 else math.ceil(warmup * steps if warmup < 1 else warmup),
        "weight_decay": options.weight_decay,
        "adam_beta2": 0.95,
        "max_grad_norm": 1.0,
        "eval_steps": interval,
        "save_steps": interval,
    }


def new_checkpoint(options: NewOptions, *, weights: bool = True, dry_run: bool = False) -> Any:
    """Writes config.json, the tokenizer and, with `weights`, random weights in float32; all or nothing."""
    output = Path(options.output)
    inputs = options.sources + ([] if options.tokenizer is None else [options.tokenizer])
    check_target(output, *inputs, made_by="new", force=options.force)
    config, tokenizer = untrained(options, 0.0)
    if not dry_run:
        write_untrained(options, config, tokenizer, weights=weights)
    return config


def untrained(options: NewOptions, held_out: float) -> tuple[Any, PreTrainedTokenizerBase]:
    """The configuration and the tokenizer of a new checkpoint: by default that of the data, if they are tokens."""
    sources, tokenised = options.sources, tokenizers_of(options.sources)
    size, _ = with_fields(options.size, SIZES, "size", known_fields(options.backbone))
    name = options.tokenizer or str(tokenised[0] if tokenised else SIZES[size].tokenizer)
    documents = load_documents(sources if name.startswith("bpe:") else (), **options.reading, streaming=True)
    tokenizer = make_tokenizer(name, documents, held_out)
    check_tokens([*sources, *vars(options).get("held_out_data", ())], tokenizer)
    config = scratch_config(options.method, options.size, tokenizer, options.block, options.backbone, **options.fields)
    tokenizer.model_max_length = config.max_position_embeddings
    return config, tokenizer


def write_untrained(
    options: NewOptions, config: Any, tokenizer: PreTrainedTokenizerBase, *, weights: bool = True
) -> None:
    """Writes what `untrained` has made."""
    output = Path(options.output)
    with replacing(output, made_by="new", force=options.force) as folder, writing(output):
        if weights:
            untrained_model(config, options.seed).save_pretrained(folder)
        else:
            made = language_model_class(config)._model_mapping[type(config)]
            config.architectures, config.dtype = [made.__name__], torch.float32
            config.save_pretrained(folder)
        save_tokenizer(tokenizer, folder)


def untrained_model(config: Any, seed: int) -> PreTrainedModel:
    """A model with random weights, its connections at their from-scratch start.

    Tensors that the plain decoder also has start equal for all methods, and whatever the number of key/value heads: a
    narrower tensor takes the leading part of that with as many as there are heads.
    """
    torch.manual_seed(seed)
    plain = with_connections(config) if isinstance(config, ConnectionFields) else copy.deepcopy(config)
    decoder = plain.get_text_config()
    if isinstance(getattr(decoder, "num_key_value_heads", None), int):
        decoder.num_key_value_heads = decoder.num_attention_heads
    weights = language_model_class(plain).from_config(plain).state_dict()
    model: PreTrainedModel = language_model_class(config).from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            source = weights.get(name)
            if source is not None and all(n <= m for n, m in zip(parameter.shape, source.shape, strict=True)):
                parameter.copy_(source[tuple(map(slice, parameter.shape))])
    return model
