"""Groups of the probe that need no model: what the device is, copies in its memory, copies to and from the host."""

from functools import partial
from typing import Any

import torch

from megalite_kernels.benchmarks.machine import version
from megalite_kernels.benchmarks.timing import Call, copied_sizes, copies
from megalite_launch.preflight.smi import MISSING_VALUES, SmiError, ask, table
from megalite_tools.bench.training.probe_figures import Figures, timed
from megalite_tools.report_file import cpu_name

SMI_SECONDS = 10.0
FACTS = ("memory.total", "driver_version", "power.limit", "clocks.max.sm", "clocks.max.memory")  # MiB, watts, MHz
TINY_COPY = 1 << 16  # bytes
HOST_COPY = 1 << 28  # bytes


def device_name(device: torch.device) -> str:
    """The name that the driver gives a GPU, or the processor's name."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()


def ask_smi(device: torch.device, columns: tuple[str, ...]) -> dict[str, str | None]:
    """Answers of nvidia-smi about one GPU; None where it gives none."""
    unknown: dict[str, str | None] = dict.fromkeys(columns)
    if device.type != "cuda":
        return unknown
    query = [f"--query-gpu={','.join(('uuid', *columns))}", "--format=csv,noheader,nounits"]
    try:
        rows = table(ask(query, SMI_SECONDS), ("uuid", *columns))
    except SmiError:
        return unknown
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    row = next((row for row in rows if uuid in row["uuid"]), rows[0] if len(rows) == 1 else unknown)
    return {column: None if row[column] in MISSING_VALUES else row[column] for column in columns}


def number(answer: str | None) -> float | None:
    """An answer of nvidia-smi as a number; None where it is none, such as `[GPU requires reset]`."""
    try:
        return None if answer is None else float(answer)
    except ValueError:
        return None


def describe(figures: Figures) -> None:
    """Record facts about the device, which are no figures: power limit in watts, clocks in MHz."""
    where = figures.device
    facts: dict[str, Any] = {"kind": where.type, "name": device_name(where), "threads": torch.get_num_threads()}
    if where.type == "cuda":
        properties = torch.cuda.get_device_properties(where)
        facts["capability"] = f"{properties.major}.{properties.minor}"
        facts["multiprocessors"] = properties.multi_processor_count
        facts["allocatable_bytes"] = properties.total_memory
        facts["cache_bytes"] = properties.L2_cache_size
    said = ask_smi(where, FACTS)
    memory = number(said["memory.total"])
    facts |= {"memory_bytes": memory and int(memory * 2**20), "power_limit": number(said["power.limit"])}
    facts |= {"max_mhz": number(said["clocks.max.sm"]), "max_memory_mhz": number(said["clocks.max.memory"])}
    facts["driver"] = said["driver_version"]
    facts |= {"torch": torch.__version__, "triton": version("triton"), "cuda": torch.version.cuda}
    facts["cudnn"] = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    figures.found.update(facts)


def copy(figures: Figures) -> None:
    """Time copies and an elementwise kernel in the device's memory: bytes read and written per second."""
    free = figures.clock.free()
    sizes = [TINY_COPY] if figures.tiny or free is None else copied_sizes(free)
    for name, (moved, call) in copies(figures.device, sizes).items():
        figures.measure(name, partial(_rate, figures, moved, call))


def host(figures: Figures) -> None:
    """Time copies between the device and pinned memory of the host: bytes per second."""
    size, device = TINY_COPY if figures.tiny else HOST_COPY, figures.device
    outside = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    inside = torch.empty(size, dtype=torch.uint8, device=device)
    to_device = Call(lambda _: inside.copy_(outside, non_blocking=True))
    to_host = Call(lambda _: outside.copy_(inside, non_blocking=True))
    figures.measure("to device", partial(_rate, figures, size, to_device))
    figures.measure("to host", partial(_rate, figures, size, to_host))


def _rate(figures: Figures, moved: int, call: Call) -> dict[str, float]:
    times = figures.clock.times(call)
    return timed(times, bytes_per_s=moved / times.median)
