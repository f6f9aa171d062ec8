"""Runs Python commands in forks of a process that has imported everything: 0.1 s each, where an interpreter takes 5 s.

Tests use `resformer`, `run` and `Run`, and `python` where it has to be a new interpreter. The server is a process
without threads: a fork of pytest's could inherit a lock that is never released. A request is a line of JSON on its
stdin, an answer a line on its stdout:

    {"run": arguments, "cwd", "env", "stdout", "stderr": files}    a process id
    {"wait": id}    its exit code, negative for a signal
"""

import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

#: One for each environment that imports may have read: Transformers and huggingface_hub keep what they read there.
_servers: "dict[frozenset[tuple[str, str]], subprocess.Popen[str]]" = {}


def resformer(
    *arguments: object, cwd: Path | None = None, launcher: Sequence[str] = (), **variables: str
) -> subprocess.CompletedProcess[str]:
    """`resformer ARGUMENTS`, or `python -m LAUNCHER -m resformer ARGUMENTS`, with these environment variables added."""
    words = [*launcher, "-m", "resformer"] if launcher else ["resformer"]
    return run("-m", *words, *arguments, cwd=cwd, env={**os.environ, **variables})


def run(
    *arguments: object, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """`python ARGUMENTS`, which are `-m MODULE ...` or `-c CODE ...`, with its output as text."""
    words, env = [str(argument) for argument in arguments], dict(env or os.environ)
    if not hasattr(os, "fork"):
        command = [sys.executable, *words]
        return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    with tempfile.TemporaryDirectory() as folder:
        files = Path(folder, "stdout"), Path(folder, "stderr")
        code = Run(*words, log=files[0], errors=files[1], cwd=cwd, env=env).wait()
        return subprocess.CompletedProcess(words, code, *(file.read_text(encoding="utf-8") for file in files))


def python(*arguments: object, cwd: Path | None = None, **variables: str) -> str:
    """What `python ARGUMENTS` prints in a new interpreter, with these environment variables; it must end well."""
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **variables}
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=1800, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


class Run:
    """`python ARGUMENTS` in a process that goes on; its words on stderr are in `errors`, or in `log` too."""

    def __init__(
        self,
        *arguments: object,
        log: Path,
        errors: Path | None = None,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
    ):
        # pyarrow's allocator would have a thread of its own.
        alone = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}
        env = {**alone, **(env or os.environ)}
        read = ("HF_", "TRANSFORMERS_")
        key = frozenset(item for item in env.items() if item[0].startswith(read) and item[0] != "HF_TOKEN")
        if key not in _servers:
            _servers[key] = subprocess.Popen(
                [sys.executable, __file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                # As the commands do off a terminal, before anything imports tqdm, which reads it then.
                env={**env, "JE_ARROW_MALLOC_CONF": "background_thread:false", "TQDM_DISABLE": "1"},
            )
        self.server = _servers[key]
        self.pid = self._ask(
            run=[str(argument) for argument in arguments],
            cwd=str(cwd or Path.cwd()),
            env=env,
            stdout=str(log),
            stderr=str(errors or log),
        )

    def wait(self) -> int:
        return self._ask(wait=self.pid)

    def _ask(self, **request: Any) -> int:
        print(json.dumps(request), file=self.server.stdin, flush=True)
        return int(json.loads(self.server.stdout.readline()))


def stop() -> None:
    for server in _servers.values():
        server.communicate()
    _servers.clear()


# The server.


def _fork(request: dict[str, Any]) -> int:
    """Returns the child's id."""
    child = os.fork()
    if child != 0:
        return child
    code = 130
    try:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for stream, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(request[name], os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_APPEND), stream)
        sys.stdout, sys.stderr = (os.fdopen(stream, "w", encoding="utf-8") for stream in (1, 2))
        os.chdir(request["cwd"])
        os.environ.clear()
        os.environ.update(request["env"])
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        code = _execute(*request["run"])
    finally:
        os._exit(code)


def _execute(kind: str, what: str, *arguments: str) -> int:
    """The exit code of `python -m WHAT ARGUMENTS` or `python -c WHAT ARGUMENTS`."""
    sys.argv, sys.path[0] = [what if kind == "-m" else kind, *arguments], os.getcwd()
    try:
        if kind == "-m":
            runpy.run_module(what, run_name="__main__", alter_sys=True)
        else:
            exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
    except Exception:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def _answer(request: dict[str, Any]) -> int:
    return _fork(request) if "run" in request else os.waitstatus_to_exitcode(os.waitpid(request["wait"], 0)[1])


if __name__ == "__main__":
    import gc
    import importlib
    import pkgutil

    import datasets
    import torch
    import transformers.models.llama.modeling_llama
    import transformers.pipelines
    import transformers.trainer

    import resformer

    del datasets, transformers
    for module in pkgutil.walk_packages(resformer.__path__, "resformer."):
        if not module.name.endswith(("__main__", ".vllm")):  # vLLM imports the latter
            importlib.import_module(module.name)
    torch.set_num_threads(1)
    gc.freeze()  # what is imported stays: collecting it would take 0.3 s each time, and copy it to each fork
    threads = Path("/proc/self/task")
    assert not threads.exists() or len(list(threads.iterdir())) == 1, "a fork of a process with threads may hang"
    for line in sys.stdin:
        print(json.dumps(_answer(json.loads(line))), flush=True)
