"""Command to start another process of this package, installed or not: in a checkout its folder has another name."""

from __future__ import annotations

import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
START_SCRIPT = """
import importlib.util, runpy, sys
folder, module = sys.argv[1:3]
where = importlib.util.spec_from_file_location(
    "megalite_launch", folder + "/__init__.py", submodule_search_locations=[folder])
package = sys.modules["megalite_launch"] = importlib.util.module_from_spec(where)
where.loader.exec_module(package)
sys.argv[1:] = sys.argv[3:]
runpy.run_module("megalite_launch." + module, run_name="__main__", alter_sys=True)
"""


def own_command(module: str, *arguments: str) -> list[str]:
    """The command that runs a module of this package, with the Python that runs this one."""
    return [sys.executable, "-c", START_SCRIPT, str(PACKAGE), module, *arguments]
