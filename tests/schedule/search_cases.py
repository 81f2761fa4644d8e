"""Random pipelines to search orders for: unequal stages, heads, transfers and memory limits."""

from dataclasses import dataclass
from random import Random

from megalite.schedule.generate import AUTO, placement_of
from megalite.schedule.problem import StageCosts
from megalite.schedule.search import least_memory


@dataclass(frozen=True)
class Case:
    """The arguments of `search`."""

    placement: tuple[int, ...]
    m: int
    stages: tuple[StageCosts, ...]
    limits: tuple[float, ...]
    transfer: float
    splits: bool

    @property
    def arguments(self) -> tuple[object, ...]:
        return self.placement, self.m, self.stages, self.limits, self.transfer, self.splits


def random_case(random: Random, ranks: int, micro_batches: int) -> Case:
    """A pipeline of up to these sizes. Memory is between what one micro-batch takes and more than any order needs."""
    p, v, m = random.randint(1, ranks), random.choice([1, 1, 2]), random.randint(1, micro_batches)
    stages = [_stage(random, last=stage == p * v - 1) for stage in range(p * v)]
    placement = placement_of(AUTO, p, v)
    least = max(least_memory(placement, stages))
    limits = [least * random.uniform(1, 2 * p) for _ in range(p)]
    transfer = random.choice([0.0, 0.05, 0.3])
    return Case(placement, m, tuple(stages), tuple(limits), transfer, splits=random.random() < 0.8)


def _stage(random: Random, last: bool) -> StageCosts:
    forward = random.uniform(0.6, 1.4) * (1.5 if last and random.random() < 0.5 else 1.0)
    back, weight = forward * random.uniform(0.7, 1.6), forward * random.uniform(0.4, 1.1)
    kept = random.uniform(0.5, 1.5)
    whole = (back + weight) * random.choice([1.0, 1.0, 0.9])
    return StageCosts(forward, whole, back, weight, kept, kept * random.uniform(0.2, 1.5))
