"""Memory that training takes: of a whole run as it happens, or of one step by the byte."""

import os
import sys
from collections.abc import Callable
from typing import Any

import psutil
import torch
from transformers import PreTrainedModel

__all__ = ["peak_allocation", "peak_memory", "step_memory"]


def peak_memory() -> int:
    """The most bytes in use at once so far: resident in this process, or allocated on the accelerator."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    if sys.platform == "win32":
        return psutil.Process().memory_info().peak_wset
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def step_memory(model: PreTrainedModel, inputs: dict[str, Any], *, bf16: bool) -> int:
    """Bytes that training takes at once: parameters, AdamW's two moments, and the most that a pass allocates.

    A pass is forward and backward; its gradients are counted and discarded. On a CPU every allocation is recorded, so
    neither the allocator nor what ran before matters; on a GPU its allocator counts.
    """
    held = sum(parameter.nbytes for parameter in model.parameters())
    moments = 2 * sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
    device = model.device.type

    def forward_and_backward() -> None:
        with torch.autocast(device, torch.bfloat16, enabled=bf16):
            loss = model(**inputs, use_cache=False).loss
        loss.backward()
        model.zero_grad()

    return held + moments + peak_allocation(forward_and_backward, device)


def peak_allocation(step: Callable[[], object], device: str) -> int:
    """The most bytes that `step` has allocated at once, beyond those before it."""
    if device == "cuda":
        step()  # allocates what is kept for all later steps
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        return torch.cuda.max_memory_allocated() - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler writes to stderr without it
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak
