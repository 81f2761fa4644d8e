"""A forked process that is handled as one of `subprocess.Popen` is."""

import os
import signal
import subprocess
from collections.abc import Callable
from multiprocessing import get_context


class Forked:
    """Runs `main` in a fork of this process, and has what the launcher needs of `subprocess.Popen`."""

    def __init__(self, main: Callable[[], None]) -> None:
        self._process = get_context("fork").Process(target=main)
        self._process.start()

    @property
    def returncode(self) -> int | None:
        """The exit code, minus the signal's number where one has ended the process; None: it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code. Raises subprocess.TimeoutExpired after `timeout` seconds."""
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0.0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:  # else the id may be another process's by now
            assert self._process.pid is not None
            os.kill(self._process.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)
