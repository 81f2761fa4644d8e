"""Rules of the run section."""

from collections.abc import Iterator

from megalite.config.errors import Problem
from megalite.config.schema import Run


def run_rules(run: Run) -> Iterator[Problem]:
    """Every broken rule of a run's name."""
    if run.name in ("", ".", "..") or not run.name.isprintable() or set(run.name) & set("/\\"):
        yield Problem("run.name", "must be a plain folder name", "use run.dir for the folder it lies in", run.name)
