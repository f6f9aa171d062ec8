"""Checkpoints in, checkpoints out: retrofits of Llama-style checkpoints, and back.

source      finds a checkpoint: a folder, a GGUF file, the Hub
reading     the reader: a folder to a table of its tensors, nothing believed
families    the table of families that the decoder expresses exactly
planning    the plan: which files go along whole, which are written anew
writing     the writer: carries a plan out, all or nothing
verification    the verifier: reads the result back and compares bytes and logits
conversion  the four of them in order; retrofitting, reverting, bundling, verifying and inspection say what is done
"""

from typing import TYPE_CHECKING, Any

from resformer.errors import CheckpointError, OutputError, VerificationError

if TYPE_CHECKING:
    from resformer.convert.bundling import BundleReport, bundle
    from resformer.convert.inspection import Inspection, inspect
    from resformer.convert.retrofitting import RetrofitReport, retrofit
    from resformer.convert.reverting import RevertReport, revert
    from resformer.convert.verifying import Comparison, verify

_HOMES = {
    "BundleReport": "bundling",
    "Comparison": "verifying",
    "Inspection": "inspection",
    "RetrofitReport": "retrofitting",
    "RevertReport": "reverting",
    "bundle": "bundling",
    "inspect": "inspection",
    "retrofit": "retrofitting",
    "revert": "reverting",
    "verify": "verifying",
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
