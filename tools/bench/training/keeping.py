"""Keeps all that is worth keeping in one folder, whole at every moment: few files, none of them large."""

import io
import platform
import tarfile
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from megalite.config.errors import InputError
from megalite.config.files import read_object, write_object, write_whole
from megalite_launch.preflight.smi import SmiError, ask, table
from megalite_tools.bench.machine import cpu_name
from megalite_tools.bench.training import junit
from megalite_tools.bench.training.cases import Case
from megalite_tools.bench.training.report import page
from megalite_tools.bench.training.rows import Rows

LARGEST = 16 << 20  # bytes of a file
REPORTS = ".xml"  # JUnit reports are kept as one
GPU = ("index", "name", "driver_version", "memory.total", "power.limit", "clocks.max.sm", "pcie.link.gen.max")


class Keeper:
    """Writes rows.json, table.md, tests.xml and files.tar.gz of a work folder `out` into a folder `keep`."""

    def __init__(self, out: Path, keep: Path | None, cases: Sequence[Case], command: str) -> None:
        self._out, self._keep, self._cases = out, keep, cases
        self.head = {
            "command": command,
            "began": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": {"cpu": cpu_name(), "system": platform.platform(), "python": platform.python_version()},
            "gpus": _gpus(),
        }

    def keep(self) -> None:
        """Write what is known by now. Raises InputError where that cannot be written."""
        rows = Rows(self._out / "rows").read()
        self.head["best_gemm"] = best_gemm(self._out / "probe.json")
        self.head["until"] = datetime.now(UTC).isoformat(timespec="seconds")
        text = page(rows, self._cases, self.head)
        write_whole(self._out / "table.md", text)
        if self._keep is None:
            return
        write_object(self._keep / "rows.json", {**self.head, "rows": [*rows.values()]})
        write_whole(self._keep / "table.md", text)
        files = [self._out / name for case in self._cases for name in case.keep if (self._out / name).is_file()]
        if reports := [path for path in files if path.suffix == REPORTS]:
            write_whole(self._keep / "tests.xml", junit.merged(reports))
        others = [path for path in files if path.suffix != REPORTS]
        if others := [*others, *sorted((self._out / "traces").glob("*.gz"))]:
            write_whole(self._keep / "files.tar.gz", packed(others, LARGEST))


def best_gemm(probe: Path) -> float | None:
    """FLOP/s of the fastest bf16 matrix product that a probe has measured; None where there is no probe."""
    try:
        figures = read_object(probe, LARGEST).get("gemm", {}).values()
    except InputError:
        return None
    return max(
        (1e12 * each["tflops"] for each in figures if each.get("precision") == "bf16" and "tflops" in each),
        default=None,
    )


def packed(files: Sequence[Path], largest: int) -> bytes:
    """An archive of files, without those at the end that would make it larger than `largest` bytes."""
    for count in range(len(files), -1, -1):
        memory = io.BytesIO()
        with tarfile.open(fileobj=memory, mode="w:gz") as archive:
            for path in files[:count]:
                with suppress(OSError):
                    archive.add(path, path.name, recursive=False)
        if memory.tell() <= largest:
            return memory.getvalue()
    raise InputError(f"an archive of no files has more than {largest} bytes")


def _gpus() -> list[dict[str, str]]:
    with suppress(SmiError):
        return table(ask([f"--query-gpu={','.join(GPU)}", "--format=csv,noheader,nounits"], 20), GPU)
    return []
