"""Runs `resformer` commands in forks of itself, so that a signal meets the work of a process and not its start-up.

A process of its own, which has imported everything and started no thread: a fork of pytest's could inherit a lock that
nobody will ever release. A request is a line of JSON on stdin, an answer a line on stdout:

    {"run": arguments, "log": file, "largest_file": bytes or null}    the process's id
    {"wait": id}                                                      its exit code, negative for a signal
    {"finished": id}                                                  whether it has ended
"""

import json
import os
import resource
import signal
import sys
from typing import Any


def run(arguments: list[str], log: str, largest_file: int | None) -> int:
    """Forks; returns the child's id."""
    child = os.fork()
    if child != 0:
        return child
    code = 130
    try:
        output = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        for stream in (1, 2):
            os.dup2(output, stream)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
        if largest_file is not None:  # in the place of a full disk
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, resource.RLIM_INFINITY))
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.default_int_handler)
        code = command(arguments)
    finally:
        os._exit(code)


def command(arguments: list[str]) -> int:
    """The exit code of `resformer ARGUMENTS`; 99 for an exception that is not told as an error."""
    sys.argv = ["resformer", *arguments]
    try:
        resformer.cli.main()
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else 0 if done.code is None else 1
    except Exception as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 99
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def answer(request: dict[str, Any]) -> int | bool:
    if "run" in request:
        return run(request["run"], request["log"], request["largest_file"])
    if "wait" in request:
        return os.waitstatus_to_exitcode(os.waitpid(request["wait"], 0)[1])
    return os.waitid(os.P_PID, request["finished"], os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


if __name__ == "__main__":
    import torch

    import resformer.cli
    import resformer.convert.retrofitting
    import resformer.convert.reverting

    torch.set_num_threads(1)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)
