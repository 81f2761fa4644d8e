"""`megalite train` that also notes when it gets where as it starts: `python timed_train.py train CONFIG KEY=VALUE ...`.

Every process appends lines of JSON to the file that the environment names: when what was done.
"""

import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

NOTES = "RESTART_NOTES"  # environment: the file for notes
WORKER = "megalite.train.worker"
# What a rank does before its first step, in this order: the function of the worker after which it is done.
DONE_AFTER = {"met": "meet", "checked": "check_and_keep", "built": "build", "loaded": "begin"}


def note(what: str, moment: float | None = None) -> None:
    rank = os.environ.get("RANK", os.environ.get("SLURM_PROCID"))
    line = {"what": what, "time": moment or time.time(), "rank": rank, "process": os.getpid()}
    with Path(os.environ[NOTES]).open("a") as file:
        file.write(json.dumps(line) + "\n")


def born() -> float:
    """When this process was started."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    since = float(Path("/proc/uptime").read_text().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - since


def noting(function: Callable[..., Any], what: str) -> Callable[..., Any]:
    def noted(*arguments: Any, **named: Any) -> Any:
        result = function(*arguments, **named)
        note(what)
        return result

    return noted


def main() -> int:
    note("started", born())
    imports = importlib.import_module("megalite.base.late_import")
    import_for_good, seen = imports.import_for_good, set[str]()

    def noted(name: str) -> ModuleType:
        module: ModuleType = import_for_good(name)
        if name == WORKER and name not in seen:
            seen.add(name)
            note("imported")
            for what, function in DONE_AFTER.items():
                setattr(module, function, noting(getattr(module, function), what))
        return module

    imports.import_for_good = noted
    code: int = importlib.import_module("megalite.commands.main").main()
    return code


if __name__ == "__main__":
    sys.exit(main())
