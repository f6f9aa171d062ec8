"""Sizes by name: the shape of a model, and the budget of its training from scratch.

From 82m on the names are numbers of parameters with the paper's vocabulary of 50,277 tokens, and heads have 64
dimensions. The paper plots 320m but does not give its shape; ours has its other models' MLP of 3.5 widths.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from resformer.configuration import ResFormerConfig
from resformer.errors import did_you_mean

#: Fields of a ResFormerConfig, without those that all configurations have.
CONFIG_FIELDS = {field.name for field in fields(ResFormerConfig)} - {field.name for field in fields(PreTrainedConfig)}

_TOKENS_PER_PARAMETER = 20  # arXiv 2203.15556
_WIDE = 512  # from this width on matrices start with Llama's deviation of 0.02, as in the paper
_HIGHEST_RATE = 2e-3  # the best of four for 2 million parameters (docs/results.md), where the fit says 4e-3


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


def known_size(name: str) -> Size:
    """One of `SIZES`; raises ValueError if there is none of this name."""
    if name not in SIZES:
        raise ValueError(f"size is {name!r}; expected one of {', '.join(SIZES)}.")
    return SIZES[name]


def scratch_config(
    method: str, size: str, tokenizer: PreTrainedTokenizerBase, block: int | None = None, **values: Any
) -> ResFormerConfig:
    """The configuration of an untrained model.

    Matrices of narrow models start with a deviation of sqrt(2 / (5 hidden_size)), arXiv 1910.05895: with Llama's 0.02
    they stay at the loss of a unigram model for hundreds of steps.

    Args:
        size: one of `SIZES`.
        block: positions; default: the size's.
        values: fields that replace those of the size and the method.

    Raises:
        ValueError: the method, the size or a field is unknown, or the tokenizer has more tokens than `vocab_size`.
    """
    for name in values.keys() - CONFIG_FIELDS:
        raise ValueError(f"{name} is no field of a ResFormerConfig.{did_you_mean(name, CONFIG_FIELDS)}")
    known = known_size(size)
    shape = {
        "vocab_size": len(tokenizer),
        "max_position_embeddings": block or known.block,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        **known.shape,
        **values,
    }
    if shape["vocab_size"] < len(tokenizer):
        raise ValueError(f"vocab_size is {shape['vocab_size']:,}, but the tokenizer has {len(tokenizer):,} tokens.")
    width = shape["hidden_size"]
    deviation = 0.02 if width >= _WIDE else round(math.sqrt(2 / (5 * width)), 3)
    return ResFormerConfig.for_method(method, **{"initializer_range": deviation, **shape})


def budget(parameters: int, flops_per_token: float, tokens: int | None = None) -> tuple[int, int, float]:
    """(training tokens, tokens a step, learning rate) of a training from scratch.

    20 tokens a parameter; the batch and the rate are DeepSeek LLM's fit to the operations of the training, C:
    0.292 C^0.3271 tokens and 0.3118 C^-0.125 (arXiv 2401.02954, section 3.1), the rate at most 2e-3. At this budget the
    batch is smaller and the rate higher than in the ResFormer paper: 2 million tokens and 6e-4, of 20 billion tokens.

    Args:
        flops_per_token: of forward and backward pass.
        tokens: the training tokens, if they are given.
    """
    tokens = _TOKENS_PER_PARAMETER * parameters if tokens is None else tokens
    operations = flops_per_token * tokens
    return tokens, round(0.292 * operations**0.3271), min(0.3118 * operations**-0.125, _HIGHEST_RATE)


def schedule_arguments(name: str, steps: int, warmup: float, decay: float = 0.2) -> dict[str, Any]:
    """The fields of `TrainingArguments` for AdamW (0.9, 0.95) and a schedule that ends at a tenth of the learning rate.

    Args:
        name: "cosine"; "constant", whose models can be trained further as if they had never stopped; or "wsd", constant
            and then falling linearly in the share `decay` of the steps (arXiv 2405.18392).
        warmup: share of the steps.
    """
    scheduler, options = {
        "cosine": ("cosine_with_min_lr", {"min_lr_rate": 0.1}),
        "constant": ("constant_with_warmup", {}),
        "wsd": (
            "warmup_stable_decay",
            {"num_decay_steps": math.ceil(decay * steps), "decay_type": "linear", "min_lr_ratio": 0.1},
        ),
    }[name]
    return {
        "lr_scheduler_type": scheduler,
        "lr_scheduler_kwargs": options,
        "warmup_steps": math.ceil(warmup * steps),
        "adam_beta2": 0.95,
        "max_grad_norm": 1.0,
    }
