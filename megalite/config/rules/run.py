"""Rules of the run and log sections."""

from collections.abc import Iterator
from pathlib import Path

from megalite.base.errors import Problem
from megalite.config.schema import Log, Run

MAX_NAME_BYTES = 255


def run_rules(run: Run) -> Iterator[Problem]:
    """Every broken rule of a run's name and folder."""
    if not run.dir.isprintable():
        yield Problem("run.dir", "must be a path of printable characters", "leave the others out", run.dir)
    if run.cluster is not None and not (run.cluster.strip() and run.cluster.isprintable()):
        rule = "must be the name of a cluster or the path of its file"
        yield Problem("run.cluster", rule, "name one, or use null", run.cluster)
    if _bytes(run.name) > MAX_NAME_BYTES:
        rule = f"must have at most {MAX_NAME_BYTES} bytes, as names of files do"
        yield Problem("run.name", rule, "use a shorter name", run.name)
    if any(_bytes(part) > MAX_NAME_BYTES for part in Path(run.dir).parts):
        rule = f"must have at most {MAX_NAME_BYTES} bytes between two slashes, as names of files do"
        yield Problem("run.dir", rule, "use shorter names", run.dir)
    if run.name in ("", ".", "..") or not run.name.isprintable() or set(run.name) & set("/\\"):
        yield Problem("run.name", "must be a plain folder name", "use run.dir for the folder it lies in", run.name)


def _bytes(name: str) -> int:
    return len(name.encode(errors="replace"))


def log_rules(log: Log) -> Iterator[Problem]:
    """Every broken rule of a project's name at Weights & Biases."""
    project = log.wandb
    if project is not None and not (project.strip() and project.isprintable() and len(project) <= 128):
        yield Problem("log.wandb", "must be 1 to 128 printable characters", "name a project, or use null", project)
    elif project is not None and set(project) & set("/\\#?%:"):
        yield Problem("log.wandb", "must be the name of a project, without / \\ # ? % :", "leave these out", project)
