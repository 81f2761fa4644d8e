"""Reads an experiment file and the run configuration it starts from, and checks what can be told before expanding."""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from megalite.base.errors import InputError, Problem, listing
from megalite.base.files import is_folder
from megalite.config.convert import typed_section
from megalite.config.load import located, merged
from megalite.config.presets import preset_or_file
from megalite.config.yaml import read_mapping
from megalite.cost.cluster import load_cluster
from megalite.experiment.expression import Expression, ExpressionError
from megalite.experiment.fitting import fit_rules
from megalite.experiment.schema import Experiment
from megalite.experiment.settings import Axes, Settings, flattened, read_axes

FILE, BASE = "experiment.yaml", "base.yaml"  # in the folder of an experiment
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
RUNG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,39}")
BUDGETS = ("tokens_per_parameter", "tokens", "flops")
LADDER = ("rungs", *BUDGETS, "trunk")
SYSTEMS = ("gpus", "scaling", "layouts", "measure")
MAX_BUDGET = 1e30


class ExperimentError(InputError):
    """All that is wrong with an experiment file, in one message."""

    def __init__(self, path: Path, problems: list[Problem]) -> None:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        super().__init__("\n  ".join([f"{path}: {count} in the experiment", *map(str, problems)]))
        self.problems = tuple(problems)


@dataclass(frozen=True)
class Setup:
    """An experiment that has been read.

    path: of its file. folder: of its runs and results. base: the run configuration that all runs start from, as plain
    dictionaries; references are not filled in, so that they follow what runs change.
    """

    path: Path
    folder: Path
    experiment: Experiment
    base: Mapping[str, Any]
    changes: Settings
    axes: Axes
    rungs: Mapping[str, Settings]
    derive: Mapping[str, Expression]
    exclude: tuple[Expression, ...]

    @property
    def kind(self) -> str:
        return self.experiment.experiment.kind

    @property
    def budgets(self) -> tuple[str, tuple[float, ...]]:
        """The key in which a ladder's budgets are given, and the budgets; both empty if there are none."""
        for name in BUDGETS:
            if (values := getattr(self.experiment, name)) is not None:
                return name, tuple(values)
        return "", ()

    def resolved(self) -> str:
        """The experiment with all defaults written out, as YAML that `read_experiment` reads back."""
        plain = asdict(self.experiment)
        plain["experiment"]["base"] = BASE
        return yaml.safe_dump(plain, sort_keys=False, allow_unicode=True)


def read_experiment(path: Path) -> Setup:
    """The experiment in a file, in the folder that an earlier call has made, or of that name. Raises InputError."""
    folder = path if is_folder(path) else None
    path = path / FILE if folder else preset_or_file(str(path), ("experiment",))
    experiment, problems = typed_section(read_mapping(path), Experiment)
    if problems:
        raise ExperimentError(path, problems)
    about = experiment.experiment
    for key, rule in (
        ("name", "names the folder of the experiment"),
        ("base", "is the run configuration to start from"),
    ):
        if getattr(about, key) == "???":
            problems.append(Problem(f"experiment.{key}", f"has no value; it {rule}", "give it one"))
    if about.name != "???" and not NAME.fullmatch(about.name):
        rule = "must be a folder name of letters, digits, '.', '_' and '-', which begins with a letter or digit"
        problems.append(Problem("experiment.name", rule, value=about.name))
    if not about.dir.isprintable():
        rule = "must be a path of printable characters"
        problems.append(Problem("experiment.dir", rule, "leave the others out", about.dir))
    seeds = about.seeds
    if not seeds or len(set(seeds)) < len(seeds):
        problems.append(Problem("experiment.seeds", "must be a list of different numbers", value=seeds))
    problems += _of_kind(experiment)
    changes = flattened(experiment.set, "set", problems)
    axes = read_axes(experiment.grid, experiment.zip, experiment.random, problems)
    rungs = _rungs(experiment, problems)
    derive = _derive(experiment, problems)
    exclude = tuple(
        filter(None, (_parsed(text, f"exclude[{at}]", problems) for at, text in enumerate(experiment.exclude)))
    )
    _launch(experiment, problems)
    problems += fit_rules(experiment.fit, experiment.parameters)
    if problems:
        raise ExperimentError(path, problems)
    files = [about.base] if isinstance(about.base, str) else about.base
    base = merged([str(located(each, path.parent)) for each in files])
    checkpoint = base["checkpoint"]
    if isinstance(checkpoint, dict) and (checkpoint["resume"] != "auto" or checkpoint["at"]):
        raise InputError(
            f"{path}: experiment.base: sets checkpoint.resume or checkpoint.at; runs begin anew, leave it out"
        )
    if folder is None:
        folder = Path(about.dir) / about.name
    return Setup(path, folder, experiment, base, changes, axes, rungs, derive, exclude)


def _of_kind(experiment: Experiment) -> list[Problem]:
    """Keys that the kind of an experiment needs or does not read."""
    kind, problems, default = experiment.experiment.kind, list[Problem](), Experiment()
    unread = {
        "sweep": (*LADDER, *SYSTEMS),
        "ladder": ("halving", *SYSTEMS),
        "systems": ("halving", "derive", "fit", "holdout", *LADDER),
    }
    for key in unread[kind]:
        if getattr(experiment, key) != getattr(default, key):
            rule = f"is not read by an experiment of the kind {kind}"
            problems.append(Problem(key, rule, "leave it out, or change experiment.kind"))
    if kind == "ladder":
        given = [name for name in BUDGETS if getattr(experiment, name) is not None]
        if not experiment.rungs:
            problems.append(Problem("rungs", "are needed by a ladder", "name sizes, as in 60m: {model: {width: 512}}"))
        if len(given) != 1:
            rule = f"exactly one of {listing(BUDGETS)} says how long to train, but there are {len(given)}"
            problems.append(Problem(listing(given, "and") or BUDGETS[0], rule, "keep one"))
        for name in given:
            values = getattr(experiment, name)
            if not values or len(set(values)) < len(values) or not all(0 < value <= MAX_BUDGET for value in values):
                problems.append(Problem(name, "must be a list of different numbers above 0", value=values))
        if experiment.trunk is not None and not 0 < experiment.trunk.decay < 1:
            rule = "must be a share of the steps: above 0 and below 1"
            problems.append(Problem("trunk.decay", rule, value=experiment.trunk.decay))
    if kind == "systems":
        if not experiment.gpus or len(set(experiment.gpus)) < len(experiment.gpus) or min(experiment.gpus) < 1:
            rule = "must be a list of different numbers of ranks"
            problems.append(Problem("gpus", rule, "as in [8, 16, 32, 64]", experiment.gpus))
        if experiment.launch.gpus is not None:
            problems.append(
                Problem("launch.gpus", "is not read by systems", "give the list gpus", experiment.launch.gpus)
            )
        if experiment.layouts == []:
            problems.append(Problem("layouts", "is empty", "leave it out for the layout of the base", []))
        measure = experiment.measure
        if measure is not None and (measure.warmup < 0 or measure.steps < 1 or measure.repeats < 1):
            problems.append(Problem("measure", "needs warmup ≥ 0, steps ≥ 1 and repeats ≥ 1", value=asdict(measure)))
        if measure is not None and experiment.experiment.seeds != [0]:
            rule = "is not read by systems, whose repeats are numbered"
            problems.append(Problem("experiment.seeds", rule, "give measure.repeats"))
    if experiment.halving is not None:
        steps, factor = experiment.halving.steps, experiment.halving.factor
        if len(steps) < 2 or steps != sorted(set(steps)) or steps[0] < 1:
            rule = "must be two or more ascending numbers: train.steps of each round"
            problems.append(Problem("halving.steps", rule, "as in [100, 300, 900]", steps))
        if factor < 2:
            problems.append(Problem("halving.factor", "must be at least 2: one of so many goes on", value=factor))
    if unknown := [name for name in experiment.holdout.rungs if name not in experiment.rungs]:
        problems.append(
            Problem("holdout.rungs", f"names {unknown[0]!r}, which is no rung", listing(list(experiment.rungs)))
        )
    return problems


def _rungs(experiment: Experiment, problems: list[Problem]) -> dict[str, Settings]:
    """The settings of each rung; `gpus` is none of a run's keys, and says on how many ranks it runs."""
    found: dict[str, Settings] = {}
    for name, value in experiment.rungs.items():
        where = f"rungs.{name}"
        if not RUNG.fullmatch(name):
            problems.append(Problem(where, "must be named by letters, digits, '.', '_' and '-'; 40 at most"))
        if not isinstance(value, dict):
            problems.append(Problem(where, "must be a section", "as in {model: {width: 512}}", value))
            continue
        gpus = value.get("gpus", 1)
        if type(gpus) is not int or gpus < 1:
            problems.append(Problem(f"{where}.gpus", "must be a number of ranks", value=gpus))
        rest = {key: inner for key, inner in value.items() if key != "gpus"}
        found[name] = flattened(rest, where, problems) | ({"gpus": gpus} if "gpus" in value else {})
    return found


def _derive(experiment: Experiment, problems: list[Problem]) -> dict[str, Expression]:
    found: dict[str, Expression] = {}
    for key, value in flattened(experiment.derive, "derive", problems).items():
        parsed = _parsed(value, f"derive.{key}", problems)
        if parsed is not None:
            found[key] = parsed
    return found


def _parsed(value: Any, where: str, problems: list[Problem]) -> Expression | None:
    text = str(value) if isinstance(value, int | float) else value
    if not isinstance(text, str):
        problems.append(Problem(where, "must be an expression, as a text", value=value))
        return None
    try:
        return Expression.parse(text)
    except ExpressionError as error:
        problems.append(Problem(where, str(error), value=text))
        return None


def _launch(experiment: Experiment, problems: list[Problem]) -> None:
    launch = experiment.launch
    positive = ("parallel", "gpus", "max_gpu_hours", "flops_per_second", "minutes", "attempts", "cores")
    for name in (*positive, "gpus_per_node", "cpus_per_task"):
        value = getattr(launch, name)
        if value is not None and not 0 < value <= MAX_BUDGET:
            problems.append(Problem(f"launch.{name}", "must be above 0", value=value))
    if not 0 <= launch.startup <= 1e6:
        problems.append(Problem("launch.startup", "must be seconds, at least 0", value=launch.startup))
    default = type(launch)()
    unread = {
        "local": ("gpus_per_node", "cpus_only", "cpus_per_task", "sbatch", "srun"),
        "slurm": ("cores", "devices"),
    }
    for name in unread[launch.kind]:
        if getattr(launch, name) != getattr(default, name):
            rule = f"is not read with launch.kind = {launch.kind}"
            problems.append(Problem(f"launch.{name}", rule, "leave it out"))
    for name, value in launch.sbatch.items():
        if isinstance(value, dict | list) or value is None:
            problems.append(Problem(f"launch.sbatch.{name}", "must be one value, as sbatch takes it", value=value))
    if launch.cluster is not None:
        load_cluster(launch.cluster, "launch.cluster = ")
