"""Cross-layer connections for Hugging Face Transformers: ResFormer, SVFormer, DenseFormer, NeuTRENO, CLA.

`import resformer` is all that `AutoModelForCausalLM.from_pretrained` and the other Auto classes need. It imports
neither torch nor Transformers: names are loaded when they are first used.
"""

from typing import TYPE_CHECKING, Any

from resformer.registration import register_on_demand
from resformer.version import __version__

if TYPE_CHECKING:
    from resformer.configuration import METHODS, ResFormerConfig
    from resformer.convert import bundle, inspect, retrofit, revert, verify
    from resformer.errors import ResFormerError
    from resformer.modeling import (
        GrowingCache,
        ResFormerForCausalLM,
        ResFormerForQuestionAnswering,
        ResFormerForSequenceClassification,
        ResFormerForTokenClassification,
        ResFormerModel,
        ResFormerPreTrainedModel,
    )
    from resformer.pushing import push
    from resformer.shrinking.shrink import shrink

_HOMES = {
    "GrowingCache": "resformer.modeling",
    "METHODS": "resformer.configuration",
    "ResFormerConfig": "resformer.configuration",
    "ResFormerError": "resformer.errors",
    "ResFormerForCausalLM": "resformer.modeling",
    "ResFormerForQuestionAnswering": "resformer.modeling",
    "ResFormerForSequenceClassification": "resformer.modeling",
    "ResFormerForTokenClassification": "resformer.modeling",
    "ResFormerModel": "resformer.modeling",
    "ResFormerPreTrainedModel": "resformer.modeling",
    "bundle": "resformer.convert",
    "inspect": "resformer.convert",
    "push": "resformer.pushing",
    "retrofit": "resformer.convert",
    "revert": "resformer.convert",
    "shrink": "resformer.shrinking.shrink",
    "verify": "resformer.convert",
}

_SUBPACKAGES = ("analysis", "configuration", "convert", "model_cards", "modeling", "shrinking", "training")

__all__ = [
    "METHODS",
    "GrowingCache",
    "ResFormerConfig",
    "ResFormerError",
    "ResFormerForCausalLM",
    "ResFormerForQuestionAnswering",
    "ResFormerForSequenceClassification",
    "ResFormerForTokenClassification",
    "ResFormerModel",
    "ResFormerPreTrainedModel",
    "__version__",
    "bundle",
    "inspect",
    "push",
    "retrofit",
    "revert",
    "shrink",
    "verify",
]

register_on_demand()


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name in _SUBPACKAGES:
        return import_module(f"{__name__}.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
