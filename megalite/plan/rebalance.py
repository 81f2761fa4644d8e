"""Another split of the layers over the pipeline's stages, where that lowers the memory of the fullest rank."""

from collections.abc import Sequence
from dataclasses import replace

from megalite.config.schema import Config
from megalite.plan.memory import Memory, rank_memory
from megalite.plan.pipeline import table_of
from megalite.plan.split import split_of

MOVES = 4  # most layers moved, per pipeline rank
ACTIONS = 20_000  # of a schedule's ranks together; walking along more for every move would take seconds


def flatter_split(config: Config, memories: Sequence[Memory]) -> tuple[list[int], int] | None:
    """Layers per stage with a lower peak than the configured split, and that peak in bytes; None where there is none.

    memories: of every pipeline rank with the configured split. Layers move one by one from the fullest rank to the
    emptiest while the fuller of the two gets emptier. Every stage but the last keeps one.
    """
    table = table_of(config)
    split, before = list(split_of(config)), max(memory.total for memory in memories)
    if sum(map(len, table.programs)) > ACTIONS:
        return None
    peaks = [memory.total for memory in memories]
    for _ in range(MOVES * table.ranks):
        fullest, emptiest = peaks.index(max(peaks)), peaks.index(min(peaks))
        giving = [stage for stage in table.stages_of(fullest) if split[stage] > (stage < table.stages - 1)]
        if not giving or fullest == emptiest:
            break
        moved = list(split)
        moved[max(giving, key=lambda stage: split[stage])] -= 1
        moved[min(table.stages_of(emptiest), key=lambda stage: split[stage])] += 1
        pipeline = replace(config.parallel.pipeline, split=moved)
        other = replace(config, parallel=replace(config.parallel, pipeline=pipeline))
        changed = {rank: rank_memory(other, rank).total for rank in (fullest, emptiest)}
        if max(changed.values()) >= peaks[fullest]:
            break
        split = moved
        for rank, peak in changed.items():
            peaks[rank] = peak
    return (split, max(peaks)) if max(peaks) < before else None
