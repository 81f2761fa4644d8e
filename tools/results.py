"""What the benchmarks have in common: the machine they name and the files they leave."""

import os
import platform
from contextlib import suppress
from pathlib import Path

from megalite.config.errors import InputError


def cpu_name() -> str:
    """The processor's name."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def write_whole(path: Path, text: str) -> None:
    """Write a whole file or none. Raises InputError where it cannot be."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise InputError(f"{path}: cannot be written: {error.strerror}") from error
