"""Checkpoints in, checkpoints out: connections are added to a checkpoint of any family, and taken out again.

Nothing is translated: a result is the source's files and one file of connections. A checkpoint goes through four rooms:

open    source: a folder or the Hub; first the configuration, then the weights' headers
        (connected_families, reading)
decide  retrofitting, reverting, bundling: from the source and the options to one `to_folder.Decision`
        (connections: the added parameters, which it also writes without the other weights)
write   carrying: files copied, linked, or written without some tensors
judge   judging: what Transformers makes of source and result by default; logits; tokens

to_folder runs the last two. comparing and inspection read, and write nothing.
"""

from resformer.convert.bundling import BundleReport, bundle
from resformer.convert.comparing import Comparison, verify
from resformer.convert.connections import save_connections
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
    "save_connections",
    "verify",
]
