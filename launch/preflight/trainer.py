"""Programs of the environment that will train: it has PyTorch, which this package must do without."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .findings import refuse_constant

MAX_OUTPUT_LENGTH = 2**20  # characters of what a program prints


class TrainerError(Exception):
    """A program failed, said nothing that can be understood, or took too long."""


@dataclass(frozen=True)
class Trainer:
    """The environment that will train."""

    python: tuple[str, ...]  # the words of a command that runs Python, such as `apptainer exec IMAGE python`

    def ask(self, module: str, arguments: Sequence[str], timeout: float, given: str = "") -> Any:
        """The JSON that a program prints on its last line. Raises TrainerError."""
        return self.crew(module, [arguments], timeout, given)[0]

    def crew(self, module: str, arguments: Sequence[Sequence[str]], timeout: float, given: str = "") -> list[Any]:
        """Run several programs at once and return the JSON of each, as `ask` does. The first to fail ends all."""
        with tempfile.TemporaryDirectory(prefix="megalite-preflight-") as folder:
            running: list[subprocess.Popen[bytes]] = []
            outputs: list[tuple[Path, Path]] = []
            source = Path(folder) / "given"
            source.write_text(given)
            try:
                for place, words in enumerate(arguments):
                    paths = (Path(folder) / f"{place}.out", Path(folder) / f"{place}.err")
                    with paths[0].open("wb") as out, paths[1].open("wb") as err, source.open("rb") as stdin:
                        running.append(
                            subprocess.Popen(
                                [*self.python, "-m", module, *words],
                                stdin=stdin,
                                stdout=out,
                                stderr=err,
                                start_new_session=True,
                            )
                        )
                    outputs.append(paths)
                self._wait(running, outputs, timeout)
            except OSError as error:
                raise TrainerError(f"{self.python[0]} cannot be started: {error.strerror}") from None
            finally:
                _end(running)
            return [_last_line(out) for out, _ in outputs]

    @staticmethod
    def _wait(running: list[subprocess.Popen[bytes]], outputs: list[tuple[Path, Path]], timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while True:
            codes = [process.poll() for process in running]
            for place, code in enumerate(codes):
                if code:
                    lines = outputs[place][1].read_text(errors="replace").strip().splitlines() or ["nothing"]
                    raise TrainerError(f"ended with {code}: {lines[-1]:.300}")
            if None not in codes:
                return
            if time.monotonic() >= deadline:
                raise TrainerError(f"not done after {timeout:.0f} s")
            time.sleep(0.02)


def _end(running: list[subprocess.Popen[bytes]]) -> None:
    """Kill what is left of programs, and all that they have started. One that the kernel holds is left behind."""
    for process in running:
        if process.poll() is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
    for process in running:
        with suppress(subprocess.TimeoutExpired):
            process.wait(2)


def _last_line(path: Path) -> Any:
    lines = path.read_text(errors="replace")[-MAX_OUTPUT_LENGTH:].strip().splitlines() or [""]
    try:
        return json.loads(lines[-1], parse_constant=refuse_constant)
    except ValueError:
        raise TrainerError(f"printed {lines[-1]!r:.100} where JSON should be") from None
