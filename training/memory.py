"""Memory that training takes: of a whole run as it happens, of one step by the byte, or predicted."""

import os
import sys
import weakref
from collections.abc import Callable
from typing import Any

import psutil
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import PreTrainedModel

from resformer.training.distillation import distillation_loss

__all__ = ["peak_allocation", "peak_memory", "predicted_memory", "step_memory"]


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


def predicted_memory(
    build: Callable[[], PreTrainedModel],
    *,
    batch: int,
    block: int,
    bf16: bool = False,
    passes: int = 1,
    moment_bytes: float | None = None,
    build_teacher: Callable[[], PreTrainedModel] | None = None,
    device: str = "cpu",
) -> dict[str, int]:
    """Bytes that training takes, from a pass over tensors that have a size and a lifetime, but no data.

    Args:
        build: makes the model, for example by `AutoModelForCausalLM.from_config`, and freezes what is not trained.
        batch, block: sequences of a pass, and tokens of a sequence.
        bf16: autocast.
        passes: a step sums their gradients; from the second on all gradients are there beforehand.
        moment_bytes: of the optimizer, for each trained number; default: AdamW's two moments in the weights' dtype.
        build_teacher: makes the teacher of a distillation from logits.

    Returns:
        `weights` (the teacher's among them), `gradients`, `optimizer`, `activations` that the backward pass needs, and
        `peak`, which is not their sum: activations are freed while gradients appear, and the backward pass has
        temporary tensors.
    """
    with FakeTensorMode(allow_non_fake_inputs=True), torch.device(device):
        model = build().train()
        teacher = None if build_teacher is None else build_teacher().eval()
        ids = torch.zeros(batch, block, dtype=torch.long)
        inputs = {"input_ids": ids, "position_ids": torch.arange(block).expand(batch, -1), "use_cache": False}
        allocations, activations = _Allocations(), 0
        with allocations:
            for _ in range(min(passes, 2)):
                before = allocations.live
                with torch.autocast(device, torch.bfloat16, enabled=bf16):
                    outputs = model(**inputs, labels=ids)
                    loss = outputs.loss
                    if teacher is not None:
                        with torch.no_grad():
                            teacher_logits = teacher(**inputs).logits
                        loss = distillation_loss(outputs.logits, teacher_logits, ids, weight=0.5)
                activations = allocations.live - before
                loss.backward()
        held = [*model.parameters(), *model.buffers(), *(teacher.parameters() if teacher is not None else ())]
        weights = sum(tensor.nbytes for tensor in held)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        gradients = sum(parameter.nbytes for parameter in trained)
        optimizer = 2 * gradients
        if moment_bytes is not None:
            optimizer = round(moment_bytes * sum(parameter.numel() for parameter in trained))
    return {
        "weights": weights,
        "gradients": gradients,
        "optimizer": optimizer,
        "activations": activations,
        "peak": weights + optimizer + allocations.peak,
    }


class _Allocations(TorchDispatchMode):
    """Bytes of the storages that operations allocate, while they live."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: dict[int, weakref.ref] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {
            id(tensor.untyped_storage()) for tensor in tree_iter((args, kwargs)) if isinstance(tensor, torch.Tensor)
        }
        result = function(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if id(storage) not in given and id(storage) not in self._known:
                    self._add(storage)
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = id(storage), storage.nbytes()

        def freed(_: object) -> None:
            del self._known[key]
            self.live -= size

        self._known[key] = weakref.ref(storage, freed)
        self.live += size
        self.peak = max(self.peak, self.live)
