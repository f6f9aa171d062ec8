"""Checkpoints in, checkpoints out: retrofits of Llama-style checkpoints."""

from typing import TYPE_CHECKING, Any

from resformer.convert.errors import CheckpointError, VerificationError

if TYPE_CHECKING:
    from resformer.convert.retrofitting import RetrofitReport, retrofit

__all__ = ["CheckpointError", "RetrofitReport", "VerificationError", "retrofit"]


def __getattr__(name: str) -> Any:  # so that an error can be told from others without importing torch
    if name in ("RetrofitReport", "retrofit"):
        from importlib import import_module

        return getattr(import_module("resformer.convert.retrofitting"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
