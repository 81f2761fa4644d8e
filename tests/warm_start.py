"""Programs as forks of a process that has imported PyTorch, as that import takes six seconds of a core.

For tests of what a program does. Those of how it starts, and of what it imports when, use `cold` or `subprocess`.
"""

import atexit
import gc
import os
import runpy
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import get_context, process
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any

import torch

FORKS = get_context("forkserver")
FORKS.set_forkserver_preload(["megalite.train.worker", "megalite.commands.train"])
STREAMS = 3  # stdin, stdout and stderr


class Popen(subprocess.Popen[str]):
    """`subprocess.Popen([sys.executable, *command], text=True)` for `-m module`, `-c code` and the path of a script.

    In /proc, command line and environment are those of its parent.
    """

    def __init__(self, command: Sequence[str], **options: Any) -> None:
        super().__init__(command, text=True, **options)

    def _execute_child(self, command: Sequence[str], *rest: Any) -> None:
        (folder, environment), pipes = rest[4:6], rest[9 : 9 + 2 * STREAMS]
        theirs = (pipes[0], pipes[3], pipes[5])  # each is -1 where the parent's own is to be had
        streams = [Connection(os.dup(number if pipe < 0 else pipe)) for number, pipe in enumerate(theirs)]
        environment = dict(os.environ) if environment is None else dict(environment)
        arguments = (list(command), folder, environment, streams)
        self._fork = FORKS.Process(target=_run, args=arguments, daemon=True)  # killed when the tests end
        self._fork.start()
        for stream in streams:
            stream.close()
        assert self._fork.pid is not None
        self.pid, self._child_created = self._fork.pid, True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        if self.returncode is None and self._child_created:
            self.returncode = self._fork.exitcode
        return self.returncode

    def _wait(self, timeout: float | None) -> int:
        self._fork.join(timeout)
        if self._internal_poll() is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return self.returncode


def cold(command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
    """The same as `Popen`, but in a Python that starts and imports for itself."""
    return subprocess.Popen([sys.executable, *command], text=True, **options)


def run(
    command: Sequence[str], timeout: float, start: Callable[..., subprocess.Popen[str]] = Popen, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, without input. Kills it after `timeout` seconds."""
    pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
    with start(command, stdin=nothing, stdout=pipe, stderr=pipe, **options) as program:
        try:
            out, error = program.communicate(timeout=timeout)
        except BaseException:
            program.kill()
            raise
    return subprocess.CompletedProcess(command, program.returncode, out, error)


def _run(command: list[str], folder: Any, environment: Mapping[str, str], streams: Sequence[Connection]) -> None:
    """Run the command in this fork as a process of its own would."""
    gc.freeze()  # as `megalite train` does
    for number, stream in enumerate(streams):
        os.dup2(stream.fileno(), number)
        stream.close()
    sys.stdin = sys.__stdin__ = os.fdopen(0, closefd=False)  # type: ignore[misc]
    sys.stdout = sys.__stdout__ = os.fdopen(1, "w", closefd=False)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = os.fdopen(2, "w", 1, errors="backslashreplace", closefd=False)  # type: ignore[misc]
    process.current_process()._config["daemon"] = False  # it may have children
    if folder is not None:
        os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", os.cpu_count() or 1)))
    way, *arguments = command
    paths = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:0] = ["" if way == "-c" else os.getcwd(), *paths]
    sys.orig_argv = [sys.executable, *command]
    warnings._processoptions(filter(None, environment.get("PYTHONWARNINGS", "").split(",")))
    try:
        if way == "-m":
            sys.argv = arguments
            sys.modules.pop(sys.argv[0], None)  # runpy warns of a module that is there
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        elif way == "-c":
            sys.argv = [way, *arguments[1:]]
            main = sys.modules["__main__"] = ModuleType("__main__")
            exec(arguments[0], vars(main))  # noqa: S102
        else:
            sys.argv = command
            runpy.run_path(way, run_name="__main__")
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
