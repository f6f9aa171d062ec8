"""The memory that this process has taken."""

import sys

import psutil
import torch


def peak_memory() -> int:
    """The most bytes in use at once so far: resident in this process, or allocated on the accelerator."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    if sys.platform == "win32":
        return psutil.Process().memory_info().peak_wset
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
