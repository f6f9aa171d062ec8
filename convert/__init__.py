"""Checkpoints in, checkpoints out: retrofits of Llama-style checkpoints, and back.

A checkpoint goes through five rooms, in this order:

open    source: a folder, a GGUF file or the Hub; first the configuration, then the weights' headers
        (configurations, reading, safetensors_format, hub_headers, other_formats)
decide  retrofitting, reverting, bundling: from the source and the options to one `deciding.Decision`
        (families: configurations of other families; connections: the added parameters)
plan    planning: which files are carried whole, which are written anew
write   writing (tensors: a change of dtype)
verify  sameness: what Transformers builds, without weights; reading_back: bytes; tokens: what the tokenizer reads;
        logits: what is computed

to_folder runs the last three. comparing and inspection read, and write nothing.
"""

from resformer.convert.bundling import BundleReport, bundle
from resformer.convert.comparing import Comparison, verify
from resformer.convert.inspection import Inspection, inspect
from resformer.convert.retrofitting import RetrofitReport, retrofit
from resformer.convert.reverting import RevertReport, revert
from resformer.errors import CheckpointError, OutputError, VerificationError

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
