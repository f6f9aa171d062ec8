"""What Transformers loads for a command: it reads no file but the checkpoint's, and runs no code of its choice."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars
from transformers import AutoConfig, PreTrainedConfig
from transformers.utils import cached_file, logging

from resformer.errors import CheckpointError, one_line
from resformer.names import CONNECTIONS, INDEX, SINGLE, TOKENIZER_CONFIG
from resformer.untrusted import check_folder, check_settings


def check_source(name: str | Path, **hub: Any) -> None:
    """Refuses a folder or Hub id whose files have Transformers read others: see `check_folder` and `check_settings`."""
    if Path(name).is_dir():
        check_folder(name)
        return
    try:
        path = cached_file(str(name), TOKENIZER_CONFIG, _raise_exceptions_for_missing_entries=False, **hub)
    except (OSError, HFValidationError):  # loading it will say so
        return
    if path is not None:
        check_settings(Path(path))


def load_config(name: str | Path, **options: Any) -> PreTrainedConfig:
    """The configuration of a checked folder or Hub id. The attention that it asks for is left to Transformers."""
    check_source(name, **options)
    config = AutoConfig.from_pretrained(name, trust_remote_code=False, **options)
    if Path(name, CONNECTIONS).is_file() and not (Path(name, SINGLE).exists() or Path(name, INDEX).exists()):
        raise without_weights(name, config)
    return without_kernels(config)


def without_weights(name: str | Path, config: PreTrainedConfig) -> CheckpointError:
    """The error for a folder of `save_connections`, where a whole checkpoint is read."""
    base = (getattr(config, "base_model", None) or {}).get("name") or "MODEL"
    return CheckpointError(
        f"{name}: holds connections alone, without the weights of {one_line(base)}. Make a checkpoint of both: "
        f"resformer.connect(AutoModelForCausalLM.from_pretrained({base!r}), {str(name)!r}).save_pretrained(FOLDER)."
    )


def without_kernels(config: PreTrainedConfig) -> PreTrainedConfig:
    """The same, asking for no implementation of its own: a name such as `owner/name` is code on the Hub."""
    config._attn_implementation_internal = config._experts_implementation_internal = None
    for part in vars(config).values():
        if isinstance(part, PreTrainedConfig):
            without_kernels(part)
    return config


def names_kernels(config: PreTrainedConfig) -> bool:
    """Whether it asks for an implementation by a name such as `owner/name`, which is code on the Hub."""
    asked = (getattr(config, f"_{kind}_implementation_internal", None) for kind in ("attn", "experts"))
    parts = [part for part in vars(config).values() if isinstance(part, PreTrainedConfig)]
    return any("/" in str(name) for name in asked) or any(map(names_kernels, parts))


@contextmanager
def without_a_word() -> Iterator[None]:
    """Hides what Transformers says of what it loads, and its progress bars, which a file of output would have too."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    of_the_hub = not are_progress_bars_disabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()  # and those of huggingface_hub
            if not of_the_hub:
                disable_progress_bars()
