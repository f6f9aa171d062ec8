"""Versions, processor, accelerators and settings of a machine for bug reports, without secrets."""

import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module, metadata
from pathlib import Path
from types import ModuleType
from typing import Any

from resformer.errors import one_line

_PACKAGES = (
    "resformer torch transformers accelerate datasets safetensors huggingface_hub tokenizers peft trl lm-eval "
    "flash-attn triton"
).split()
_SETTINGS = re.compile(
    "(HF|HUGGINGFACE|HUGGING_FACE|TRANSFORMERS|TOKENIZERS|ACCELERATE|CUDA|HIP|NVIDIA|NCCL|OMP|MKL|PYTORCH|TORCH)_.+"
)
#: Values that are shown. Any other may hold a secret, or a path that names a person.
_SHOWN = re.compile(r"[\d.,: -]*|true|false|yes|no|on|off", re.IGNORECASE)


def describe_environment() -> dict[str, Any]:
    """Returns what `resformer env` prints. A missing package is `None`, a broken one the error.

    Versions come from installed metadata; only torch and psutil are imported. Of the environment variables, those of
    Hugging Face, PyTorch and CUDA are included, with the value if it is a number or a switch.
    """
    devices = _or_error(_torch)
    return {
        "packages": {name: _or_error(metadata.version, name) for name in _PACKAGES},
        "commit": _or_error(_commit),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory": _or_error(lambda: import_module("psutil").virtual_memory().total),  # bytes
        **(devices if isinstance(devices, dict) else {"torch_error": devices}),
        "variables": {
            name: value if _SHOWN.fullmatch(value) else "***"
            for name, value in sorted(os.environ.items())
            if _SETTINGS.fullmatch(name)
        },
    }


def _or_error(describe: Callable[..., Any], *arguments: str) -> Any:
    try:
        return describe(*arguments)
    except metadata.PackageNotFoundError:
        return None
    except Exception as error:  # damaged installations are reported, not raised
        return f"broken: {error!r}".replace(os.path.expanduser("~"), "~")


def _commit() -> str | None:
    """The commit of the checkout that is installed, with `-dirty` if a tracked file differs from it."""
    origin = json.loads(metadata.distribution("resformer").read_text("direct_url.json") or "{}")
    if not origin.get("dir_info", {}).get("editable"):
        return None
    command = ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
    try:
        return subprocess.check_output(command, cwd=Path(__file__).parent, text=True, stderr=subprocess.DEVNULL).strip()
    except (OSError, subprocess.CalledProcessError):  # no Git, or not its checkout
        return None


def _torch() -> dict[str, Any]:
    """The accelerators that torch sees, and whether the processor has bfloat16 instructions."""
    import torch

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return {
        "cuda": torch.version.cuda,
        "threads": torch.get_num_threads(),
        "bf16_on_cpu": cpu_has_bf16(),
        "accelerators": [{"name": each.name, "memory": each.total_memory} for each in devices]
        or ([] if accelerator is None else [{"name": accelerator.type}]),
    }


def cpu_has_bf16() -> bool:
    """Whether the processor has bfloat16 matrix products."""
    import torch

    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16"))


def peak_memory() -> int:
    """The most bytes in use at once so far: resident in this process, or allocated on the accelerator."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    if sys.platform == "win32":
        return import_module("psutil").Process().memory_info().peak_wset
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def free_memory(system: Path = Path("/")) -> int:
    """Bytes that this process can still take: of the machine, or of a control group that it is in, if that is less."""
    import psutil

    free = int(psutil.virtual_memory().available)
    with suppress(OSError, IndexError):  # no control groups of version 2
        own = (system / "proc/self/cgroup").read_text().partition("0::")[2].splitlines()[0]
        mount = system / "sys/fs/cgroup"
        group = mount / own.lstrip("/")
        # A container sees its own group as the mount, and a path that is not below it.
        for folder in (group, *group.parents):
            with suppress(OSError, ValueError, KeyError):  # the root group has no such files, and no limit reads "max"
                if folder == mount or mount in folder.parents:
                    limit, used = (int((folder / f"memory.{name}").read_text()) for name in ("max", "current"))
                    statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                    free = min(free, limit - used + int(statistics["inactive_file"]))  # cached files make room
    return free


def usable_device(device: Any) -> Any:
    """The device, or the accelerator if there is one; raises ValueError where it cannot be used."""
    import torch

    if device is None:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        return "cpu" if accelerator is None else accelerator.type
    try:
        torch.empty(0, device=device)
    except (AssertionError, RuntimeError) as error:  # the harness would silently take another device
        raise ValueError(f"device={device!r} cannot be used: {one_line(error)}") from error
    return device


def require(package: str, extra: str) -> ModuleType:
    """Imports a package of an extra; an ImportError says how to install it."""
    try:
        return import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise ImportError(f"This needs {package}: {install_hint(extra)}") from None


def install_hint(extra: str) -> str:
    """How to install an extra. There is no release yet: on PyPI the name `resformer` is not this package's."""
    return f"in a checkout of resformer, pip install '.[{extra}]'"
