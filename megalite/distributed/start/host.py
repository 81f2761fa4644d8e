"""Resources of this machine for ranks: memory, and whether there is a GPU. Imports no torch."""

import os
from contextlib import suppress
from pathlib import Path

from megalite.base.errors import InputError
from megalite_launch.base.texts import memory_text

LIMIT_FILES = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)  # version 2, and 1
DRIVERS = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")  # one is there where Linux has a GPU: of NVIDIA, under WSL, of AMD
RANK_BYTES = 40 << 20  # bytes that a process of the smallest model takes for itself, as measured, even if it is a fork


def host_memory() -> int:
    """Bytes of memory that processes on this machine can use: all that it has, or the limit of their control group."""
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for limit in LIMIT_FILES:
        with suppress(OSError, ValueError):  # "max" is no number
            found.append(int(limit.read_text()))
    return min(found)


def on_cpus(device: str) -> bool:
    """Return whether ranks on this machine will run on CPUs with this `run.device`. Finds out without torch."""
    return device == "cpu" or (device == "auto" and not any(map(os.path.exists, DRIVERS)))


def check_ranks(count: int) -> None:
    """Raises InputError if this machine has too little memory for so many processes, however small their model."""
    needed, memory = count * RANK_BYTES, host_memory()
    if needed > memory:
        raise InputError(
            f"{count:,} ranks need {memory_text(needed)}, at least {RANK_BYTES >> 20} MiB each, and this machine has "
            f"{memory_text(memory)} of memory; use smaller degrees in parallel.*"
        )
