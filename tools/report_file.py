"""Files of results that benchmarks write: the option that names one, and what each begins with."""

import argparse
import os
import platform
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any


def add_out(parser: argparse.ArgumentParser, default: str) -> None:
    """Add the option `--out`. default: a file's name in docs/benchmarks."""
    path = f"docs/benchmarks/{default}"
    parser.add_argument("--out", metavar="JSON", default=path, help="result to write (default: %(default)s)")


def header(command: str, packages: Sequence[str] = ("megalite", "torch")) -> dict[str, Any]:
    """The command that made a result, the machine, and the versions of Python and of `packages`."""
    return {
        "command": command,
        "machine": {"cpu": cpu_name(), "cores": os.cpu_count()},
        "versions": {"python": platform.python_version(), **{package: version(package) for package in packages}},
    }


def cpu_name() -> str:
    """The processor's name."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
