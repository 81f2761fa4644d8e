"""Random pipelines to search orders for: unequal stages, heads, transfers and memory limits."""

from dataclasses import dataclass
from random import Random

from megalite.schedule.generate import AUTO_SCHEDULE, build, placement_of
from megalite.schedule.problem import StageCosts
from megalite.schedule.search import FoundOrder, least_memory, memory_of, search


@dataclass(frozen=True)
class SearchCase:
    """Arguments of `schedule.search`."""

    placement: tuple[int, ...]
    m: int
    stages: tuple[StageCosts, ...]
    limits: tuple[float, ...]
    transfer: float
    splits: bool

    def search(self) -> FoundOrder:
        """The order that is found."""
        return search(self.placement, self.m, self.stages, self.limits, self.transfer, self.splits)


def random_case(random: Random, ranks: int, micro_batches: int) -> SearchCase:
    """A pipeline of up to these sizes. A rank has 0.7 to 2.5 times what 1f1b or zbv take of the fullest."""
    p, v, m = random.randint(1, ranks), random.choice([1, 1, 2]), random.randint(1, micro_batches)
    stages = [_stage(random, last=stage == p * v - 1) for stage in range(p * v)]
    placement = placement_of(AUTO_SCHEDULE, p, v)
    named = build("1f1b" if v == 1 else "zbv", p, m)
    fullest = max(memory_of(named.orders, placement, m, stages))
    limit = max(fullest * random.uniform(0.7, 2.5), *least_memory(placement, stages))
    transfer = random.choice([0.0, 0.05, 0.3])
    return SearchCase(placement, m, tuple(stages), (limit,) * p, transfer, splits=random.random() < 0.8)


def _stage(random: Random, last: bool) -> StageCosts:
    forward = random.uniform(0.6, 1.4) * (1.5 if last and random.random() < 0.5 else 1.0)
    back, weight = forward * random.uniform(0.7, 1.6), forward * random.uniform(0.4, 1.1)
    kept = random.uniform(0.5, 1.5)
    whole = (back + weight) * random.choice([1.0, 1.0, 0.9])
    return StageCosts(forward, whole, back, weight, kept, kept * random.uniform(0.2, 1.5))
