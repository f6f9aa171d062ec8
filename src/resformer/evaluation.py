"""lm-evaluation-harness on ResFormer checkpoints: `evaluate` in Python, `resformer eval` on the command line.

`python -m resformer.evaluation` is `lm_eval` with resformer imported: the harness has no option that imports a package.
"""

import json
import os
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

from resformer.environment import require, usable_device
from resformer.errors import CheckpointError, did_you_mean, one_line
from resformer.files import replace_text
from resformer.loading import check_source, load_config
from resformer.untrusted import read_json
from resformer.version import __version__

_DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")


def evaluate(
    checkpoint: str,
    tasks: Sequence[str],
    *,
    revision: str | None = None,
    include_path: str | Path | None = None,
    num_fewshot: int | None = None,
    limit: int | None = None,
    batch_size: int | str | None = None,
    device: str | None = None,
    dtype: str = "auto",
    backend: str = "hf",
) -> dict[str, Any] | None:
    """Runs tasks of lm-evaluation-harness on a ResFormer checkpoint, or on any causal model of Transformers.

    Only safetensors are read, and no code of the checkpoint is run. Tasks may contain Python code, which the harness
    runs.

    Args:
        tasks: names of tasks, groups or tags, patterns such as `"mmlu_*"`, or task files.
        include_path: a folder with further task files.
        num_fewshot: examples before each question; default: the task's.
        limit: the largest number of documents of each task.
        batch_size: sequences at a time, or `"auto"`: as many of the longest length as fit into an accelerator's
            memory; default: 1, and 256 with vLLM, which makes batches by itself.
        dtype: of the weights; `"auto"`: the dtype in `config.json`.
        backend: `"hf"` (Transformers) or `"vllm"`, which chooses its device itself.

    Returns:
        The harness's results, with versions added. With several processes, `None` in all but the first.

    Raises:
        CheckpointError: the model or its tokenizer cannot be loaded.
        ImportError: lm-evaluation-harness, or vLLM where it is asked for, is not installed.
        ValueError: a task is unknown, or an argument is invalid.
    """
    lm_eval = _harness()
    if dtype not in _DTYPES:
        raise ValueError(f"dtype={dtype!r}: expected one of {', '.join(_DTYPES)}.")
    if backend not in ("hf", "vllm"):
        raise ValueError(f"backend={backend!r}: expected hf or vllm.")
    if backend == "hf":
        device = usable_device(device)
    elif device is not None:
        raise ValueError(f"device={device!r}: vLLM chooses its device itself; leave it out.")
    if backend == "vllm" and batch_size in (None, "auto"):
        batch_size = 256  # vLLM makes batches by itself; with "auto" it needs a progress bar, which may be disabled
    if batch_size is None:
        batch_size = 1
    arguments = {
        "pretrained": checkpoint,
        "dtype": dtype,
        "revision": "main" if revision is None else revision,
        **({"use_safetensors": True} if backend == "hf" else {"load_format": "safetensors"}),
    }
    with redirect_stdout(sys.stderr):  # the harness prints batch sizes
        manager, task_names = _find_tasks(tasks, include_path, arguments)
        model = _load(arguments, backend, batch_size=batch_size, device=device)
        results = lm_eval.simple_evaluate(
            model,
            arguments,
            tasks=task_names,
            task_manager=manager,
            num_fewshot=num_fewshot,
            limit=limit,
            batch_size=batch_size,
            device=device,
            log_samples=False,
        )
    if results is None:
        return None
    results["config"]["model"] = backend  # the harness's name for models loaded as `_load` does
    results["model_source"], results["model_name"] = backend, checkpoint
    if backend == "vllm":
        results["vllm_version"] = sys.modules["vllm"].__version__
    results["resformer_version"] = __version__
    results.update({f"{package}_version": version(package) for package in ("torch", "datasets")})
    return results


def check_output(path: Path, *, force: bool) -> None:
    """Refuses an output file that cannot be written. An evaluation may take hours, so call this first."""
    if not path.parent.is_dir():
        raise CheckpointError(f"{path}: there is no folder {path.parent}; create it first.")
    if path.is_dir():
        raise CheckpointError(f"{path}: is a folder; name a file in it.")
    if path.exists() and "results" not in read_json(path):
        raise CheckpointError(f"{path}: exists already, and holds no results; choose another output.")
    if path.exists() and not force:
        raise CheckpointError(f"{path}: exists already; replace it with --force, or choose another output.", "--force")


def write_results(results: dict[str, Any], path: Path) -> None:
    """Writes the results as JSON, all or nothing."""
    replace_text(path, results_json(results) + "\n")


def results_json(results: dict[str, Any]) -> str:
    """The results in the form of the harness's files."""
    from lm_eval.utils import handle_non_serializable

    return json.dumps(results, indent=2, default=handle_non_serializable)


def main() -> None:
    """`lm_eval` with the command line's arguments."""
    _harness()
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


def _harness() -> ModuleType:
    # The harness's bootstrap would fork this process: locks that other threads hold stay locked in the child.
    os.environ.setdefault("DISABLE_MULTIPROC", "1")
    return require("lm_eval", "eval")


def _find_tasks(
    names: Sequence[str], include_path: str | Path | None, arguments: dict[str, Any]
) -> tuple[Any, list[str]]:
    from lm_eval.tasks import TaskManager

    if include_path is not None and not Path(include_path).is_dir():
        raise ValueError(f"include_path: {include_path} is not a folder.")
    # The harness has more than 10,000 tasks, whose files take seconds to read.
    manager = TaskManager(include_path=include_path, include_defaults=False, metadata=arguments)
    if not {name for name in names if not Path(name).is_file()} <= set(manager.all_subtasks):
        manager = TaskManager(include_path=include_path, metadata=arguments)
    matched: list[str] = []
    for name in names:
        matching = [name] if Path(name).is_file() else manager.match_tasks([name])
        if not matching:
            hint = did_you_mean(name, manager.all_tasks) or " `lm_eval ls tasks` lists them."
            raise ValueError(f"Unknown task {name!r}.{hint}")
        matched += matching
    return manager, matched


def _load(arguments: dict[str, Any], backend: str, **options: Any) -> Any:
    checkpoint = arguments["pretrained"]
    hub = {"revision": arguments["revision"]} if "revision" in arguments else {}
    if backend == "hf":
        from lm_eval.models.huggingface import HFLM

        model_class: Any = partial(HFLM, backend="causal", config=load_config(checkpoint, **hub))
    else:
        check_source(checkpoint, **hub)
        os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # stdout is for results
        try:
            from lm_eval.models.vllm_causallms import VLLM
        except ModuleNotFoundError as error:
            if error.name != "vllm":
                raise
            raise ImportError("--backend vllm needs vLLM, which this environment does not have.") from None
        model_class = VLLM
        del options["device"]
    if os.path.isdir(checkpoint):  # the harness would look a relative path up on the Hub
        checkpoint = os.path.abspath(checkpoint)
    try:
        return model_class(**{**arguments, "pretrained": checkpoint}, **options)
    except ImportError:
        raise
    except Exception as error:  # Transformers and safetensors raise many types of exceptions for a bad file
        raise CheckpointError(f"{arguments['pretrained']}: cannot be loaded: {one_line(error)}") from error


if __name__ == "__main__":
    main()
