"""Measures the resident memory of a process that trains, saves and loads: `python resident_memory.py FOLDER PLACEMENT`.

Prints JSON: the most bytes that it took beyond those of the same program with a tiny model, and the bytes that the
prediction has on the device and on the host.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

from toy_jobs import MODEL, advance, config_of, make, one_rank, restorer, save

from megalite.config.layout import Layout
from megalite.config.model_schema import Model
from megalite.config.schema import Config
from megalite.plan.memory.peak import rank_memory

LARGE = Model(6, 512, 8, 8, None, 2048, 8192, 32)  # 33 million weights


def config(model: Model, placement: str) -> Config:
    found = config_of(Layout(), model)
    return replace(
        found,
        train=replace(found.train, precision="fp32"),
        optim=replace(found.optim, placement=placement),
        run=replace(found.run, device="cpu"),
    )


def work(settings: Config, folder: Path) -> None:
    job = make(settings)
    advance(job, 0, 2)
    path = save(job, folder, 2)
    restorer(job).all(path)
    advance(job, 2, 3)


def resident(key: str) -> int:
    """VmRSS or VmHWM of this process, in bytes."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


def main(folder: Path, placement: str) -> None:
    with one_rank():
        work(config(MODEL, placement), folder / "tiny")
        before = resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
        settings = config(LARGE, placement)
        work(settings, folder / "large")
    predicted = rank_memory(settings, 0)
    on_host = sum(predicted.of("host memory").values())
    print(json.dumps({"taken": resident("VmHWM") - before, "device": predicted.total, "host": on_host}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
