"""Rules of the run, log and profile sections."""

from collections.abc import Iterator
from pathlib import Path

from megalite.base.errors import Problem
from megalite.config.exposition import exposed_at
from megalite.config.schema import Log, Profile, Run

MAX_NAME_BYTES = 255


def run_rules(run: Run) -> Iterator[Problem]:
    """Every broken rule of a run's name, folder and cluster."""
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
    """Every broken rule of the names of tracked projects, and of where metrics are offered."""
    for key, project in (("log.wandb", log.wandb), ("log.mlflow", log.mlflow)):
        if project is not None and not (project.strip() and project.isprintable() and len(project) <= 128):
            yield Problem(key, "must be 1 to 128 printable characters", "name a project, or use null", project)
        elif key == "log.wandb" and project is not None and set(project) & set("/\\#?%:"):
            yield Problem(key, "must be the name of a project, without / \\ # ? % :", "leave these out", project)
    if log.prometheus is not None:
        try:
            exposed_at(log.prometheus)
        except ValueError as error:
            yield Problem("log.prometheus", str(error), "as in 9400, or null", log.prometheus)


def profile_rules(profile: Profile, steps: int, ranks: int) -> Iterator[Problem]:
    """Every broken rule of which steps of a run, and which of its ranks, are profiled. ranks: the number of them."""
    last = profile.start + profile.steps - 1
    if profile.start and last > steps:
        rule = f"with profile.steps = {profile.steps} ends at step {last}, after train.steps = {steps}"
        yield Problem("profile.start", rule, "begin earlier, or use 0, which profiles none", profile.start)
    if profile.ranks == []:
        yield Problem("profile.ranks", "must name a rank", "use all, or profile.start=0, which profiles none", [])
    for index, rank in enumerate(profile.ranks if isinstance(profile.ranks, list) else ()):
        if not 0 <= rank < ranks and ranks > 0:  # a layout without ranks has a message of its own
            rule = f"must be a rank of the job: from 0 to {ranks - 1}"
            yield Problem(f"profile.ranks[{index}]", rule, "leave it out, or use all", rank)
