"""Checkpoints in, checkpoints out: retrofits of Llama-style checkpoints, and back.

A checkpoint goes through five steps, in this order:

read    source: a folder, a GGUF file or the Hub; first the configuration, then the weights' headers
        (reading, safetensors_format, hub_files, gguf_format, pickle_format, quantisation, loading)
decide  retrofitting, reverting, bundling: from the source and the options to one `deciding.Decision`
        (families: configurations of other families; connections: the added parameters)
plan    planning: which files are carried whole, which are written anew
write   writing (casting: a change of dtype)
verify  reading_back: the result's bytes; logits: what it computes

conversion runs the last three for a folder, publishing for a Hub repository. comparing and inspection read, and write
nothing.
"""

from typing import TYPE_CHECKING, Any

from resformer.errors import CheckpointError, OutputError, VerificationError

#: Module -> its names, which are loaded when they are used: the errors above need no torch.
_HOMES = {
    "bundling": "BundleReport bundle",
    "comparing": "Comparison verify",
    "inspection": "Inspection inspect",
    "retrofitting": "RetrofitReport retrofit",
    "reverting": "RevertReport revert",
}

if TYPE_CHECKING:
    from resformer.convert.bundling import *  # noqa: F403
    from resformer.convert.comparing import *  # noqa: F403
    from resformer.convert.inspection import *  # noqa: F403
    from resformer.convert.retrofitting import *  # noqa: F403
    from resformer.convert.reverting import *  # noqa: F403

__all__ = ["CheckpointError", "OutputError", "VerificationError"]
__all__ += [name for names in _HOMES.values() for name in names.split()]


def __getattr__(name: str) -> Any:
    from importlib import import_module

    for home, names in _HOMES.items():
        if name in names.split():
            return getattr(import_module(f"{__name__}.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
