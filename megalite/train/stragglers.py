"""Finds ranks that are slower than their peers, though all of them take the same time for a step: the others wait.

Every rank's own work is timed by section, without waiting (`dist.clock`). Its median over a window of steps is compared
with that of the other ranks of the same pipeline stage, which do the same work.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch

from megalite.distributed.health.clock import SectionClock
from megalite.distributed.mesh import Mesh
from megalite.parallel.graphed import GRAPHS
from megalite_kernels.collectives import all_gather_single

SECTIONS = ("forward", "backward", "optimizer", "loader")
WINDOW_STEPS = 50  # steps whose median hides spikes; the windows that a verdict needs are over within minutes
WINDOWS = 3  # windows in a row in which a rank is slow before it is named: with fewer, other work on its node would do
MIN_RATIO = 1.10  # ratio to the median of its peers from which on a rank is slow: less is usual between healthy GPUs
MIN_DEVIATIONS = 6.0  # median absolute deviations of its peers by which it must exceed that as well
MIN_STEP_SHARE = 0.02  # share of its peers' whole step by which it must be slower
MIN_EXCESS = 1e-3  # seconds: toys on a busy laptop are not ill
MAX_RATIO = 1e3  # largest ratio that is told, as where peers take no time at all
MAX_SMALL_GROUP = 8  # peers; of fewer, a slow rank would move the median that it is compared with


@dataclass(frozen=True)
class Straggler:
    """A rank that is slow. ratio: to the median of its peers."""

    rank: int
    section: str
    ratio: float
    node: str = ""

    def __str__(self) -> str:
        much = (
            f"{self.ratio:.2f} times as long as its peers" if self.ratio < MAX_RATIO else "time, and its peers do not"
        )
        return f"rank {self.rank} on {self.node} is slow: its {self.section} takes {much}"


def slow(seconds: Mapping[int, Sequence[float]]) -> list[Straggler]:
    """The slow ranks of one window.

    seconds: by rank, those of `SECTIONS`, and after them of others that are in a step; all of ranks with the same work.
    """
    found = []
    whole = median(map(sum, seconds.values()))
    for index, section in enumerate(SECTIONS):
        values = {rank: sections[index] for rank, sections in seconds.items()}
        middle, deviation = _spread(list(values.values()))
        for rank, value in values.items():
            if len(values) <= MAX_SMALL_GROUP:
                middle, deviation = _spread([values[other] for other in values if other != rank])
            excess = value - middle
            least = max(MIN_DEVIATIONS * deviation, MIN_STEP_SHARE * whole, MIN_EXCESS)
            if value > MIN_RATIO * middle and excess > least:
                found.append(Straggler(rank, section, min(value / middle, MAX_RATIO) if middle > 0 else MAX_RATIO))
    return found


def _spread(values: Sequence[float]) -> tuple[float, float]:
    """The median, and the median absolute deviation from it; without values, a median that nothing exceeds."""
    middle = median(values) if values else float("inf")
    return middle, median(abs(value - middle) for value in values) if values else 0.0


class Rule:
    """Names a rank when it has been slow in `WINDOWS` windows in a row; again only after one in which it was not."""

    def __init__(self) -> None:
        self._in_a_row: dict[tuple[int, str], int] = {}

    def judge(self, stages: Sequence[Mapping[int, Sequence[float]]]) -> list[Straggler]:
        """The ranks to be named after a window. stages: of every pipeline rank, as for `slow`."""
        found = {(each.rank, each.section): each for stage in stages for each in slow(stage)}
        self._in_a_row = {key: self._in_a_row.get(key, 0) + 1 for key in found}
        return [each for key, each in found.items() if self._in_a_row[key] == WINDOWS]


class Stragglers:
    """Watches the ranks of a job. `stepped` is called after every step, on all of them. nodes: of every rank."""

    def __init__(self, mesh: Mesh, clock: SectionClock, nodes: Sequence[str]) -> None:
        self._mesh, self._clock, self._nodes, self._rule = mesh, clock, nodes, Rule()
        self._steps: list[dict[str, float]] = []

    def stepped(self, loader: float) -> list[Straggler]:
        """Note a step. Returns the ranks to be named, after a window; collective then.

        loader: seconds that the step has waited for its batch.
        """
        # Where steps of the clock come late, the loader's are of later steps: in a median that does not matter.
        self._steps.append({**self._clock.stepped(), "loader": loader})
        if len(self._steps) < WINDOW_STEPS:
            return []
        sections = (*SECTIONS, GRAPHS)  # nobody is slow in graphs, but they are most of a step
        mine = [median(step.get(section, 0.0) for step in self._steps) for section in sections]
        self._steps.clear()
        mesh, size = self._mesh, self._mesh.layout.world_size
        everyones = torch.empty(size * len(sections), dtype=torch.float32, device=mesh.device)
        all_gather_single(everyones, torch.tensor(mine, device=mesh.device), group=mesh.world)
        by_rank = everyones.view(size, -1).tolist()
        stages: list[dict[int, list[float]]] = [{} for _ in range(mesh.layout.pp)]
        for rank, seconds in enumerate(by_rank):
            stages[mesh.layout.coordinates(rank)["pp"]][rank] = seconds
        return [replace(each, node=self._nodes[each.rank]) for each in self._rule.judge(stages)]
