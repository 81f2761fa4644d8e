"""A stand-in for nvidia-smi that prints what it is told, in the shapes that the real one prints.

The shapes are those of github.com/stas00/ml-engineering (compute/accelerator/nvidia/debug.md) and of listings of
nvidia-smi in public repositories.
"""

import os
from pathlib import Path

import pytest

SCRIPT = """#!/bin/sh
case "$*" in
  *--query-gpu=index,*) part=base ;;
  *ecc.errors.uncorrected.volatile*) part=ecc ;;
  *aggregate.sram*) part=sram ;;
  *retired_pages*) part=pages ;;
  *clocks_event_reasons*) part=slowdown ;;
  *clocks_throttle_reasons*) part=throttle ;;
  *--query-remapped-rows*) part=remapped ;;
  *--query-compute-apps*) part=processes ;;
  "nvlink -s") part=links ;;
  "nvlink -e") part=errors ;;
  *) echo "ERROR: Option $* is not recognized."; exit 6 ;;
esac
cd "{folder}" && cat $part
[ ! -e $part.hang ] || exec sleep 60
[ ! -e $part.code ] || exit $(cat $part.code)
"""
COLUMNS = {  # of what each GPU has a row
    "base": ("index", "uuid", "bus", "driver", "memory", "temperature", "name"),
    "ecc": ("uncorrected", "corrected"),
    "sram": ("uncorrected",),
    "pages": ("single", "double", "pending"),
    "slowdown": ("hw", "thermal", "brake", "software"),
    "remapped": ("uuid", "correctable", "uncorrectable", "pending", "failure"),
}
H100 = "NVIDIA H100 80GB HBM3"


class FakeSmi:
    """A node of healthy GPUs, to be made sick."""

    def __init__(self, folder: Path, gpus: int = 2, name: str = H100, links: int = 18, speed: float = 26.562) -> None:
        self.folder = folder
        self._links = [[f"{speed:g} GB/s"] * links for _ in range(gpus)]
        self._counters = {
            (gpu, link): dict.fromkeys(("Replay", "Recovery", "CRC"), 0) for gpu in range(gpus) for link in range(links)
        }
        uuids = [f"GPU-5261e3df-82f6-67b4-9953-4e63527e0e{gpu:02x}" for gpu in range(gpus)]
        self._rows: dict[str, list[list[str]]] = {
            "base": [
                [str(gpu), uuids[gpu], f"00000000:{0x1B + gpu:02X}:00.0", "550.54.15", "4", str(30 + gpu), name]
                for gpu in range(gpus)
            ],
            "ecc": [["0", "3"] for _ in range(gpus)],
            "sram": [["0"] for _ in range(gpus)],
            "pages": [["[N/A]", "[N/A]", "[N/A]"] for _ in range(gpus)],
            "slowdown": [["Not Active"] * 4 for _ in range(gpus)],
            "remapped": [[uuid, "0", "0", "0", "0"] for uuid in uuids],
        }
        self.uuids = uuids
        self.set("processes", "")
        self.set("throttle", "")
        for part in self._rows:
            self._write_rows(part)
        self._write_links()
        script = folder / "nvidia-smi"
        script.write_text(SCRIPT.format(folder=folder))
        script.chmod(0o755)

    def on_path(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PATH", f"{self.folder}{os.pathsep}{os.environ['PATH']}")

    def set(self, part: str, text: str) -> None:
        """Let a part of the questions be answered by this text."""
        (self.folder / part).write_text(text)

    def cell(self, part: str, gpu: int, column: str, value: str) -> None:
        """Change what is said of one GPU."""
        self._rows[part][gpu][COLUMNS[part].index(column)] = value
        self._write_rows(part)

    def link(self, gpu: int, link: int, status: str) -> None:
        self._links[gpu][link] = status
        self._write_links()

    def counter(self, gpu: int, link: int, name: str, value: int) -> None:
        self._counters[gpu, link][name] = value
        self._write_links()

    def hang(self, part: str) -> None:
        (self.folder / f"{part}.hang").touch()

    def fail(self, part: str, text: str, code: int) -> None:
        self.set(part, text)
        (self.folder / f"{part}.code").write_text(str(code))

    def lose(self, gpu: int) -> None:
        """As if a GPU had fallen off the bus."""
        for part, rows in self._rows.items():
            del rows[gpu]
            self._write_rows(part)

    def _write_rows(self, part: str) -> None:
        self.set(part, "".join(", ".join(row) + "\n" for row in self._rows[part]))

    def _write_links(self) -> None:
        status, errors = [], []
        for gpu, links in enumerate(self._links):
            heading = f"GPU {gpu}: {self._rows['base'][0][-1]} (UUID: {self.uuids[gpu]})\n"
            status += [heading, *(f"\t Link {place}: {text}\n" for place, text in enumerate(links))]
            errors.append(heading)
            for place in range(len(links)):
                counters = self._counters[gpu, place].items()
                errors += [f"\t Link {place}: {name} Errors: {value}\n" for name, value in counters]
        self.set("links", "".join(status))
        self.set("errors", "".join(errors))
