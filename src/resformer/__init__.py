"""Cross-layer connections for Hugging Face Transformers: ResFormer, SVFormer, DenseFormer, NeuTRENO, CLA.

`import resformer` is all that `AutoModelForCausalLM.from_pretrained` and the other Auto classes need. It imports
neither torch nor Transformers: names are loaded when they are first used.
"""

from typing import TYPE_CHECKING, Any

from resformer.registration import register_on_demand
from resformer.version import __version__

#: Module -> its public names.
_HOMES = {
    "resformer.configuration": "METHODS ResFormerConfig",
    "resformer.convert": "bundle inspect retrofit revert verify",
    "resformer.errors": "ResFormerError",
    "resformer.modeling": (
        "GrowingCache ResFormerForCausalLM ResFormerForQuestionAnswering ResFormerForSequenceClassification "
        "ResFormerForTokenClassification ResFormerModel ResFormerPreTrainedModel"
    ),
    "resformer.pushing": "push",
    "resformer.shrinking.shrink": "shrink",
}

if TYPE_CHECKING:
    from resformer.configuration import *  # noqa: F403
    from resformer.convert import *  # noqa: F403
    from resformer.errors import *  # noqa: F403
    from resformer.modeling import *  # noqa: F403
    from resformer.pushing import *  # noqa: F403
    from resformer.shrinking.shrink import *  # noqa: F403

_SUBPACKAGES = ("analysis", "configuration", "convert", "model_cards", "modeling", "shrinking", "training")

__all__ = ["__version__"]
__all__ += [name for names in _HOMES.values() for name in names.split()]

register_on_demand()


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name in _SUBPACKAGES:
        return import_module(f"{__name__}.{name}")
    for home, names in _HOMES.items():
        if name in names.split():
            value = globals()[name] = getattr(import_module(home), name)
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
