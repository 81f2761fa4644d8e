"""Asking nvidia-smi, and reading what it prints.

The formats are those of the driver's own `nvidia-smi --help-query-gpu`, `--help-query-remapped-rows` and
`--help-query-compute-apps`, and of listings in github.com/stas00/ml-engineering (compute/accelerator/nvidia/debug.md).
"""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Optional

MAX_ANSWER_LENGTH = 2**20  # characters of an answer
GPU = re.compile(r"GPU (\d+):")
LINK = re.compile(r"Link (\d+): (.+)")
SPEED = re.compile(r"([0-9]+(?:\.[0-9]+)?) GB/s")
COUNTER = re.compile(r"([A-Za-z ]+?)s?: (\d+)")
ERRORS = (  # counters that should be 0; corrected symbols and FEC histograms, of newer drivers, are not
    "Replay Error",
    "Recovery Error",
    "CRC Error",
    "CRC FLIT Error",
    "CRC Data Error",
    "Malformed packet Error",
    "Buffer overrun Error",
    "Rx Error",
    "Local link integrity Error",
    "Link recovery failed event",
)
MISSING_VALUES = ("N/A", "[N/A]", "Not Supported", "[Not Supported]", "")  # the GPU or the driver does not have it
ACTIVITY_WORDS = {"Active": True, "Not Active": False}
FLAG_WORDS = {"0": False, "1": True, "No": False, "Yes": True}

BASE_FIELDS = ("index", "uuid", "pci.bus_id", "driver_version", "memory.used", "temperature.gpu", "name")
GROUPS = {  # asked one by one: of a field that a driver does not know, only its group is lost
    "ecc": ("ecc.errors.uncorrected.volatile.total", "ecc.errors.corrected.volatile.total"),
    "sram": ("ecc.errors.uncorrected.aggregate.sram",),
    "pages": ("retired_pages.single_bit_ecc.count", "retired_pages.double_bit.count", "retired_pages.pending"),
}
SLOWDOWNS = ("hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown", "sw_thermal_slowdown")
PREFIXES = ("clocks_event_reasons", "clocks_throttle_reasons")  # drivers before 535 know only the second
REMAPPED_FIELDS = (
    "gpu_uuid",
    "remapped_rows.correctable",
    "remapped_rows.uncorrectable",
    "remapped_rows.pending",
    "remapped_rows.failure",
)
PROCESS_FIELDS = ("gpu_uuid", "pid", "used_memory", "process_name")


class SmiError(Exception):
    """nvidia-smi cannot be asked, or says nothing that can be understood. kind: missing, slow, failed or garbage."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class Broken(ValueError):
    """A value of a GPU that does not work, such as `[GPU requires reset]`."""


@dataclass
class Survey:
    """Report of nvidia-smi on the GPUs of this node."""

    seconds: float  # seconds that the first answer took
    gpus: list[dict[str, str]]  # a row of `BASE_FIELDS` and of `GROUPS` for each
    remapped: dict[str, dict[str, str]] = field(default_factory=dict)  # by uuid
    links: list[list[Optional[float]]] = field(default_factory=list)  # GB/s of every GPU's links; None: inactive
    link_errors: dict[str, int] = field(default_factory=dict)  # counts above 0, by name, as `GPU 0 link 3 Replay Error`
    processes: list[dict[str, str]] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)  # queries that failed, and why


def ask(arguments: Sequence[str], timeout: float) -> str:
    """Run nvidia-smi and return what it prints. Raises SmiError.

    A hanging driver may keep nvidia-smi in the kernel, where no signal ends it: it is left behind then.
    """
    try:
        process = subprocess.Popen(
            ["nvidia-smi", *arguments], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
    except OSError as error:
        raise SmiError("missing", f"nvidia-smi cannot be started: {error.strerror}") from None
    try:
        raw, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        with suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=1)
        raise SmiError("slow", f"nvidia-smi gave no answer in {timeout:g} s") from None
    text = raw[:MAX_ANSWER_LENGTH].decode(errors="replace")
    if process.returncode != 0:
        lines = text.strip().splitlines() or ["nothing"]
        raise SmiError("failed", f"nvidia-smi ended with {process.returncode}: {lines[-1]:.200}")
    return text


def table(text: str, columns: Sequence[str]) -> list[dict[str, str]]:
    """The rows of `--format=csv,noheader,nounits`; only the last column may have commas. Raises SmiError."""
    rows = []
    for line in text.splitlines():
        if not line.strip() or line.startswith("No running processes"):
            continue
        cells = [cell.strip() for cell in line.split(",", len(columns) - 1)]
        if len(cells) != len(columns):
            raise SmiError("garbage", f"nvidia-smi printed {line!r:.100} where {len(columns)} columns were asked")
        rows.append({column: cells[place] for place, column in enumerate(columns)})
    return rows


def count(cell: str) -> Optional[float]:
    """A number from 0 to 1e18; None if the GPU does not have it. Raises Broken for anything else."""
    if cell in MISSING_VALUES:
        return None
    try:
        value = float(cell)
    except ValueError:
        raise Broken(cell) from None
    if not 0 <= value < 1e18:
        raise Broken(cell)
    return value


def flag(cell: str) -> Optional[bool]:
    """Yes or no; as `count`."""
    if cell in MISSING_VALUES:
        return None
    found = {**ACTIVITY_WORDS, **FLAG_WORDS}.get(cell)
    if found is None:
        raise Broken(cell)
    return found


def links(text: str) -> list[list[Optional[float]]]:
    """Parse `nvidia-smi nvlink -s`: for every GPU, GB/s of each of its links; None for one that is not active."""
    found: list[list[Optional[float]]] = []
    for line in text.splitlines():
        if GPU.match(line.strip()):
            found.append([])
        link = LINK.fullmatch(line.strip())
        if link and found:
            speed = SPEED.fullmatch(link[2])
            found[-1].append(float(speed[1]) or None if speed else None)
    return found


def link_errors(text: str) -> dict[str, int]:
    """Parse the error counts that `nvidia-smi nvlink -e` prints, where they are not 0."""
    found, gpu = {}, "?"
    for line in text.splitlines():
        heading, link = GPU.match(line.strip()), LINK.fullmatch(line.strip())
        gpu = heading[1] if heading else gpu
        counter = COUNTER.fullmatch(link[2].strip()) if link else None
        if link and counter and counter[1] in ERRORS and int(counter[2]) > 0:
            found[f"GPU {gpu} link {link[1]} {counter[1]}"] = int(counter[2])
    return found


def survey(limit: float, most: float) -> Survey:
    """Ask for everything. limit: seconds for the first answer; most: for all, the others being asked together.

    Raises SmiError if there is no first answer.
    """
    start = time.monotonic()
    gpus = _query("--query-gpu", BASE_FIELDS, limit)
    found = Survey(time.monotonic() - start, gpus)
    timeout = max(1.0, most - found.seconds)
    with ThreadPoolExecutor(8) as pool:
        jobs = {name: pool.submit(_query, "--query-gpu", columns, timeout) for name, columns in GROUPS.items()}
        slowdown = pool.submit(_slowdowns, timeout)
        remapped = pool.submit(_query, "--query-remapped-rows", REMAPPED_FIELDS, timeout)
        processes = pool.submit(_query, "--query-compute-apps", PROCESS_FIELDS, timeout)
        status = pool.submit(ask, ["nvlink", "-s"], timeout)
        errors = pool.submit(ask, ["nvlink", "-e"], timeout)
    for name, job in {**jobs, "slowdown": slowdown}.items():
        try:
            rows = job.result()
            if len(rows) != len(gpus):
                raise SmiError("garbage", f"nvidia-smi told of {len(rows)} GPUs where there are {len(gpus)}")
        except SmiError as error:
            found.missing[name] = str(error)
        else:
            for place, row in enumerate(rows):
                gpus[place].update(row)
    for name, answer in (("remapped", remapped), ("processes", processes)):
        try:
            rows = answer.result()
        except SmiError as error:
            found.missing[name] = str(error)
        else:
            if name == "remapped":
                found.remapped = {row["gpu_uuid"]: row for row in rows}
            else:
                found.processes = rows
    try:
        found.links, found.link_errors = links(status.result()), link_errors(errors.result())
    except SmiError as error:
        found.missing["nvlink"] = str(error)
    return found


def _query(option: str, columns: Sequence[str], timeout: float) -> list[dict[str, str]]:
    return table(ask([f"{option}={','.join(columns)}", "--format=csv,noheader,nounits"], timeout), columns)


def _slowdowns(timeout: float) -> list[dict[str, str]]:
    """Reasons why clocks are held down, by the names of `SLOWDOWNS`."""
    for prefix in PREFIXES:
        columns = [f"{prefix}.{name}" for name in SLOWDOWNS]
        try:
            rows = _query("--query-gpu", columns, timeout)
        except SmiError as error:
            if error.kind != "failed" or prefix == PREFIXES[-1]:
                raise
        else:
            return [{name: row[f"{prefix}.{name}"] for name in SLOWDOWNS} for row in rows]
    raise AssertionError("the last prefix returns or raises")
