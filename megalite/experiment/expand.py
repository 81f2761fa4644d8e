"""Expands an experiment into its runs: every combination of settings, each once."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from megalite.experiment.build import Builder, Point
from megalite.experiment.cell import Cell
from megalite.experiment.folder import ExperimentFolder
from megalite.experiment.halving import rounds
from megalite.experiment.read import Setup
from megalite.experiment.settings import MAX_RUNS, Settings
from megalite.experiment.systems import system_points
from megalite.experiment.trunk import share_trunks
from megalite_launch.base.texts import scaled

Losses = Callable[[Cell], float | None]  # loss of a run that is done; None: it is not


@dataclass(frozen=True)
class Expanded:
    """The runs of an experiment.

    settings: how many were asked for; runs that two of them describe are one. excluded: those that a condition left
    out. later: runs of rounds of successive halving that are not known yet.
    """

    setup: Setup
    cells: tuple[Cell, ...]
    settings: int
    excluded: int = 0
    later: int = 0

    @property
    def axes(self) -> tuple[str, ...]:
        """The swept keys, in the order of the file."""
        return tuple(dict.fromkeys(key for cell in self.cells for key in cell.axes))


def expand(setup: Setup, losses: Losses = lambda _: None) -> Expanded:
    """All runs, in the order of the file. Raises ExperimentError with everything that is wrong with any of them.

    losses: the result of a run, by which successive halving chooses.
    """
    builder = Builder(setup)
    points = list(_points(setup, builder))
    if len(points) > MAX_RUNS:
        told = f"makes {len(points):,} runs; at most {MAX_RUNS:,} are allowed"
        builder.wrong("the experiment", told, "give fewer values, rungs, budgets or seeds")
        points = []
    found: dict[str, Cell] = {}
    if setup.experiment.halving is not None:
        cells, later = rounds(setup.experiment.halving, points, builder, losses)
    else:
        cells, later = [builder.cell(point) for point in points], 0
    for cell in cells:
        if cell is not None:
            found.setdefault(cell.id, cell)
    trunk = setup.experiment.trunk
    whole = share_trunks(list(found.values()), builder) if trunk is not None else list(found.values())
    if not whole and not builder.problems:
        builder.wrong("exclude", f"leaves out all {builder.excluded} runs", "loosen a condition")
    builder.raise_problems()
    folder = ExperimentFolder(setup.folder)
    names = folder.names()  # the name of a run may have changed since: its id has not
    placed = (_placed(cell, str(folder.runs), names.get(cell.id, f"{cell.slug}-{cell.id}")) for cell in whole)
    return Expanded(setup, tuple(placed), len(points), builder.excluded, later)


def _placed(cell: Cell, runs: str, name: str) -> Cell:
    """The cell with the name and folder of its run."""
    config = replace(cell.config, run=replace(cell.config.run, name=name, dir=runs))
    plain = {**cell.plain, "run": {**cell.plain["run"], "name": name, "dir": runs}}
    return replace(cell, config=config, plain=plain, name=name)


def _points(setup: Setup, builder: Builder) -> Iterator[Point]:
    if setup.kind == "systems":
        yield from system_points(setup, builder)
        return
    experiment = setup.experiment
    seeds = experiment.experiment.seeds
    of, budgets = setup.budgets
    rungs: Sequence[tuple[str, Settings]] = list(setup.rungs.items()) or [("", {})]
    decay = None if experiment.trunk is None else experiment.trunk.decay
    for (rung, size), axes, budget, seed in product(rungs, setup.axes.points, budgets or (None,), seeds):
        gpus = size.get("gpus") or experiment.launch.gpus or own_ranks(setup.base)
        settings = {key: value for key, value in size.items() if key != "gpus"} | axes
        places = {key: f"rungs.{rung}.{key}" for key in size} | {key: f"axes: {key}" for key in axes}
        words: dict[str, Any] = {"": rung, **budget_word(of, budget), **axes}
        words |= {"seed": seed} if len(seeds) > 1 else {}
        yield Point(settings, axes, gpus, seed, rung, places, budget, of, decay, words)


def budget_word(of: str, budget: float | None) -> dict[str, str]:
    """A budget in the name of a run: `20x` tokens per parameter, `300kt` of tokens, `1.00EF` of FLOPs."""
    if budget is None:
        return {}
    unit = {"tokens_per_parameter": "x", "tokens": "t", "flops": "F"}[of]
    return {" ": scaled(budget, unit).replace(" ", "")}


def own_ranks(base: Mapping[str, Any]) -> int:
    """The ranks that the layout of a configuration takes; dp_shard: auto stands for 1."""
    parallel = base["parallel"]
    sizes = [parallel.get(axis, 1) for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp")]
    count = 1
    for size in sizes:
        count *= size if isinstance(size, int) and not isinstance(size, bool) and size > 0 else 1
    return count
