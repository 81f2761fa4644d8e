"""A forked process with the interface of `subprocess.Popen`."""

import os
import subprocess
from collections.abc import Callable
from multiprocessing import get_context


class Forked:
    """Runs `main` in a fork of this process, with those methods of `subprocess.Popen` that the launcher needs.

    The process ends when `main` does; handlers that were registered with `atexit` may not run.
    """

    def __init__(self, main: Callable[[], None]) -> None:
        self._process = get_context("fork").Process(target=main)
        self._process.start()

    def poll(self) -> int | None:
        """The exit code; where a signal has ended the process, minus its number; None while the process runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit code. Raises subprocess.TimeoutExpired after `timeout` seconds, or if it has been taken."""
        self._process.join(timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:  # else the id may be another process's by now
            assert self._process.pid is not None
            os.kill(self._process.pid, number)

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()
