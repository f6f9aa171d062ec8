"""What a bug report says about a machine: versions, processor, accelerators, settings. Nothing that is secret."""

import json
import os
import platform
import re
from importlib import metadata
from typing import Any

__all__ = ["describe_environment"]

_PACKAGES = (
    "resformer torch transformers accelerate datasets safetensors huggingface_hub tokenizers peft trl lm-eval "
    "flash-attn triton"
).split()
_SETTINGS = re.compile(
    "(HF|HUGGINGFACE|HUGGING_FACE|TRANSFORMERS|TOKENIZERS|ACCELERATE|CUDA|HIP|NVIDIA|NCCL|OMP|MKL|PYTORCH|TORCH)_.+"
)
_SECRET_NAME = re.compile("TOKEN|KEY|SECRET|PASS|CREDENTIAL|AUTH")
_SWITCH = re.compile("[01]|true|false|yes|no|on|off", re.IGNORECASE)
_SECRET_VALUE = re.compile(
    r"(?<=://)[^/@\s]+(?=@)"  # user:password of a URL
    r"|\b(hf_|api_|sk-|ghp_|github_pat_|glpat-)[\w-]+"
    r"|\beyJ[\w-]+\.[\w-]+\.[\w-]*"  # a JSON web token
    r"|(?<=[?&;])[^=&\s]+=[^&\s]+"  # the query of a signed URL
)
_HOME = re.compile(r"(/home/|/Users/|[A-Za-z]:\\Users\\)[^/\\:;,\s]+")


def describe_environment() -> dict[str, Any]:
    """Returns what `resformer env` prints. A package that is missing is `None`, one that is broken says how.

    Only torch is imported, since nothing else tells of accelerators; versions come from installed metadata. Of the
    environment, the variables of this field are told, with what looks like a secret or a home folder masked.
    """
    return {
        "packages": {name: _version(name) for name in _PACKAGES},
        "editable": _is_editable(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": _cores(),
        "memory": _memory(),
        **_torch(),
        "variables": {
            name: _masked(name, value) for name, value in sorted(os.environ.items()) if _SETTINGS.fullmatch(name)
        },
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package) or "broken: no version in its metadata"
    except metadata.PackageNotFoundError:
        return None
    except Exception as error:  # a damaged installation is what this is to show
        return f"broken: {error!r}"


def _is_editable() -> bool | None:
    """Whether the package is read from a checkout; `None` if that cannot be told."""
    try:
        text = metadata.distribution("resformer").read_text("direct_url.json")
        return text is not None and bool(json.loads(text).get("dir_info", {}).get("editable"))
    except Exception:  # as above
        return None


def _cores() -> int | None:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def _memory() -> int | None:
    """Bytes of main memory."""
    try:
        import psutil

        return psutil.virtual_memory().total
    except Exception:  # as above
        return None


def _torch() -> dict[str, Any]:
    """What torch sees: the accelerators, and whether the processor has bfloat16 instructions."""
    found: dict[str, Any] = {"cuda": None, "accelerators": None, "bf16_on_cpu": None, "threads": None}
    try:
        import torch

        found["cuda"] = torch.version.cuda
        found["threads"] = torch.get_num_threads()
        capabilities = torch.cpu.get_capabilities()
        found["bf16_on_cpu"] = any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16"))
        found["accelerators"] = []
        if torch.cuda.is_available():
            for index in range(torch.cuda.device_count()):
                about = torch.cuda.get_device_properties(index)
                found["accelerators"].append(
                    {"name": about.name, "memory": about.total_memory, "bf16": torch.cuda.is_bf16_supported()}
                )
        elif (accelerator := torch.accelerator.current_accelerator(check_available=True)) is not None:
            found["accelerators"].append({"name": accelerator.type})
    except Exception as error:  # as above
        found["torch_error"] = _without_secrets(repr(error))
    return found


def _masked(name: str, value: str) -> str:
    if _SECRET_NAME.search(name.upper()) and not _SWITCH.fullmatch(value):
        return "***"
    return _without_secrets(value)


def _without_secrets(text: str) -> str:
    home = os.path.expanduser("~")
    if len(home) > 1:
        text = text.replace(home, "~")
    return _HOME.sub("~", _SECRET_VALUE.sub("***", text))
