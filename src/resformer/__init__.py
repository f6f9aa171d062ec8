"""Cross-layer connections for Hugging Face Transformers: MUDDFormer, mHC, AttnRes, ResFormer, SVFormer, DenseFormer.

`import resformer` is all that `AutoModelForCausalLM.from_pretrained` and the other Auto classes need. It imports
neither torch nor Transformers: names are loaded when they are first used.
"""

from typing import TYPE_CHECKING

from resformer.lazy import on_demand
from resformer.registration import register_on_demand
from resformer.version import __version__

#: Module -> its public names.
_HOMES = {
    "resformer.configuration": "METHODS ResFormerConfig",
    "resformer.convert": "bundle inspect retrofit revert save_connections verify",
    "resformer.errors": "ResFormerError",
    "resformer.modeling": (
        "Connection GrowingCache ResFormerForCausalLM ResFormerForQuestionAnswering ResFormerForSequenceClassification "
        "ResFormerForTokenClassification ResFormerModel ResFormerPreTrainedModel"
    ),
    "resformer.modeling.connecting": (
        "connect connected_config connection_modules depth_mixing_matrix disconnect disconnected value_mixing_matrix"
    ),
    "resformer.pushing": "push",
    "resformer.training.optimizer": "ConnectionTrainer",
}

if TYPE_CHECKING:
    from resformer.configuration import *  # noqa: F403
    from resformer.convert import *  # noqa: F403
    from resformer.errors import *  # noqa: F403
    from resformer.modeling import *  # noqa: F403
    from resformer.modeling.connecting import *  # noqa: F403
    from resformer.pushing import *  # noqa: F403
    from resformer.training.optimizer import *  # noqa: F403

_SUBPACKAGES = ("analysis", "configuration", "convert", "model_cards", "modeling", "training")

__all__, __getattr__, __dir__ = on_demand(globals(), _HOMES, _SUBPACKAGES)
__all__ += ["__version__"]

register_on_demand()
