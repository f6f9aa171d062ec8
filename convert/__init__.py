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

if TYPE_CHECKING:
    from resformer.convert.bundling import BundleReport, bundle
    from resformer.convert.comparing import Comparison, verify
    from resformer.convert.inspection import Inspection, inspect
    from resformer.convert.retrofitting import RetrofitReport, retrofit
    from resformer.convert.reverting import RevertReport, revert

_HOMES = {
    "BundleReport": "bundling",
    "Comparison": "comparing",
    "Inspection": "inspection",
    "RetrofitReport": "retrofitting",
    "RevertReport": "reverting",
    "bundle": "bundling",
    "inspect": "inspection",
    "retrofit": "retrofitting",
    "revert": "reverting",
    "verify": "comparing",
}

__all__ = [
    "BundleReport",
    "CheckpointError",
    "Comparison",
    "Inspection",
    "OutputError",
    "RetrofitReport",
    "RevertReport",
    "VerificationError",
    "bundle",
    "inspect",
    "retrofit",
    "revert",
    "verify",
]


def __getattr__(name: str) -> Any:  # so that an error can be told from others without importing torch
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(f"resformer.convert.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
