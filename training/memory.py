"""Memory that training takes: of a whole run as it happens, or of one step by the byte."""

import os
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

import psutil
import torch
from transformers import PreTrainedModel

__all__ = ["PeakMemory", "peak_allocation", "step_memory"]


class PeakMemory:
    """The largest memory in use within a `with` block, in bytes: resident, or on the accelerator if there is one."""

    def __init__(self, interval: float = 0.05):
        self.peak = 0
        self._interval = interval
        self._done = threading.Event()
        self._sampler = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> "PeakMemory":
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        else:
            self._sampler.start()
        return self

    def __exit__(
        self, exception_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if torch.cuda.is_available():
            self.peak = torch.cuda.max_memory_allocated()
        else:
            self._done.set()
            self._sampler.join()

    def _sample(self) -> None:
        process = psutil.Process()
        while True:
            self.peak = max(self.peak, process.memory_info().rss)
            if self._done.wait(self._interval):
                return


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
