"""Keeps all that is worth keeping in one folder, whole at every moment: few files, none of them large."""

import io
import platform
import tarfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from megalite.base.errors import InputError
from megalite.base.files import is_file, read_object, write_whole
from megalite_launch.base.texts import record_text
from megalite_launch.preflight.smi import SmiError, ask, table
from megalite_tools.bench.training import junit
from megalite_tools.bench.training.cases import Case
from megalite_tools.bench.training.report import page
from megalite_tools.bench.training.rows import Row
from megalite_tools.report_file import cpu_name

MAX_FILE_BYTES = 16 << 20  # bytes of a file
MAX_PACKING_RATIO = 4  # times as many bytes may a file have before it is packed
REPORTS = ".xml"  # JUnit reports are kept as one
GPU = ("index", "name", "driver_version", "memory.total", "power.limit", "clocks.max.sm", "pcie.link.gen.max")


class Keeper:
    """Writes rows.json, table.md, tests.xml and files.tar.gz of a work folder `out` into a folder `keep`.

    cases: those of the plan, whose files are kept. chosen: those that were asked for, which the table misses.
    """

    def __init__(
        self, out: Path, keep: Path | None, cases: Sequence[Case], chosen: Sequence[Case], command: str
    ) -> None:
        self._out, self._keep, self._cases, self._chosen = out, keep, cases, chosen
        self._packed: list[tuple[Path, int, int]] = []  # the files of the archive that is there
        self._began = datetime.now(UTC).isoformat(timespec="seconds")
        self._facts = {
            "command": command,
            "machine": {"cpu": cpu_name(), "system": platform.platform(), "python": platform.python_version()},
            "gpus": _gpus(),
        }

    def page(self, rows: Mapping[str, Row]) -> str:
        """The table of rows."""
        return page(rows, self._chosen, self._head())

    def keep(self, rows: Mapping[str, Row]) -> None:
        """Write what is known by now. Raises InputError where some of it cannot be written, after the rest is."""
        writes: list[Callable[[], object]] = [lambda: write_whole(self._out / "table.md", self.page(rows))]
        if self._keep is not None:
            folder, found = self._keep, [self._out / name for case in self._cases for name in case.keep]
            reports = [path for path in found if path.suffix == REPORTS and is_file(path)]
            files = [path for path in found if path.suffix != REPORTS]
            files += sorted((self._out / "traces").glob("*.gz"))
            writes = [
                lambda: write_whole(folder / "rows.json", record_text({**self._head(), "rows": [*rows.values()]})),
                lambda: write_whole(folder / "table.md", self.page(rows)),
                lambda: write_whole(folder / "tests.xml", junit.merged(reports)) if reports else None,
                lambda: self._archive(folder / "files.tar.gz", files),
                *writes,
            ]
        problems = []
        for write in writes:
            try:
                write()
            except (InputError, OSError, UnicodeError) as error:
                problems.append(str(error))
        if problems:
            raise InputError("; ".join(problems))

    def _head(self) -> dict[str, Any]:
        times = {"began": self._began, "until": datetime.now(UTC).isoformat(timespec="seconds")}
        return {**self._facts, **times, "best_gemm": best_gemm(self._out / "probe.json")}

    def _archive(self, path: Path, files: Sequence[Path]) -> None:
        """Pack files, unless they are those that are packed already."""
        known = [(each, each.stat().st_size, each.stat().st_mtime_ns) for each in files if is_file(each)]
        if known and known != self._packed:
            write_whole(path, packed([each for each, _, _ in known], MAX_FILE_BYTES))
            self._packed = known


def best_gemm(probe: Path) -> float | None:
    """FLOP/s of the fastest bf16 matrix product that a probe has measured; None where there is no probe."""
    try:
        figures = read_object(probe, MAX_FILE_BYTES)["gemm"].values()
        return max(
            1e12 * float(each["tflops"]) for each in figures if each.get("precision") == "bf16" and "tflops" in each
        )
    except (InputError, KeyError, TypeError, ValueError, AttributeError):
        return None


def packed(files: Sequence[Path], largest: int) -> bytes:
    """An archive of files, without those with which it would be larger than `largest` bytes."""
    taken: list[Path] = []
    whole = _tar(taken)
    for path in files:
        if path.stat().st_size <= MAX_PACKING_RATIO * largest and len(more := _tar([*taken, path])) <= largest:
            taken, whole = [*taken, path], more
    return whole


def _tar(files: Sequence[Path]) -> bytes:
    memory = io.BytesIO()
    with tarfile.open(fileobj=memory, mode="w:gz", compresslevel=5) as archive:
        for path in files:
            archive.add(path, path.name, recursive=False)
    return memory.getvalue()


def _gpus() -> list[dict[str, str]]:
    with suppress(SmiError):
        return table(ask([f"--query-gpu={','.join(GPU)}", "--format=csv,noheader,nounits"], 20), GPU)
    return []
