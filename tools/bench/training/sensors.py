"""Power, clock and temperature of a GPU while something runs, read from nvidia-smi. Imports no torch."""

import statistics
import subprocess
import threading
from collections.abc import Sequence
from typing import Any

PERIOD = 200  # milliseconds
FIELDS = ("power.draw", "clocks.sm", "temperature.gpu")
MAX_LINE_LENGTH = 256  # characters of a line


class Sensors:
    """Reads the sensors of GPU `number` in a thread, within a `with`; `readings` has what was found."""

    def __init__(self, number: int | None) -> None:
        self._number = number  # None: there is no GPU
        self._lines: list[str] = []
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> "Sensors":
        if self._number is not None:
            query = [f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits", "-lms", str(PERIOD)]
            try:
                self._process = subprocess.Popen(
                    ["nvidia-smi", *query, "-i", str(self._number)],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                )
            except OSError:
                return self
            threading.Thread(target=self._read, args=(self._process,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        while line := process.stdout.readline(MAX_LINE_LENGTH):
            self._lines.append(line)

    @property
    def readings(self) -> dict[str, Any]:
        """The part of a row that sensors give; empty where they gave nothing."""
        return readings(self._lines)


def readings(lines: Sequence[str]) -> dict[str, Any]:
    """Median and largest power in watts, median clock in MHz, highest temperature in °C, of nvidia-smi's lines."""
    rows = []
    for line in lines:
        try:
            values = [float(cell) for cell in line.split(",")]
        except ValueError:  # `[N/A]`, or a line that was cut off
            continue
        if len(values) == len(FIELDS):
            rows.append(values)
    if not rows:
        return {}
    watts, clocks, degrees = zip(*rows, strict=True)
    return {
        "power_w": {"median": statistics.median(watts), "max": max(watts)},
        "sm_mhz": statistics.median(clocks),
        "temp_c": max(degrees),
    }
