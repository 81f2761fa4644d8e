"""Another split of the layers over the pipeline's stages, if that lowers the memory of the fullest rank."""

from collections.abc import Sequence
from dataclasses import replace

from megalite.base.errors import InputError
from megalite.config.schema import Config
from megalite.plan.automatic import Costing
from megalite.plan.memory.peak import Memory, actions_of_peaks, rank_memory
from megalite.plan.pipeline import placement
from megalite.plan.split import split_without_mtp

MAX_MOVES = 4  # most layers moved, per pipeline rank
MAX_ACTIONS = 20_000  # in the schedules to walk through; with more, every move would take seconds


def flatter_split(
    config: Config, memories: Sequence[Memory], costing: Costing | None = None
) -> tuple[list[int], int] | None:
    """Layers per stage with a lower peak than the configured split, and that peak in bytes; None if none is found.

    memories: of every pipeline rank with the configured split. costing: as for `resolve`. Layers move one by one from
    the fullest rank to the emptiest, as long as that lowers the higher peak of the two. Every stage but the last keeps
    at least one layer.
    """
    if actions_of_peaks(config) > MAX_ACTIONS:
        return None
    owners, split, before = placement(config), split_without_mtp(config), max(memory.total for memory in memories)
    last = len(split) - 1
    peaks = [memory.total for memory in memories]
    for _ in range(MAX_MOVES * len(memories)):
        fullest, emptiest = peaks.index(max(peaks)), peaks.index(min(peaks))
        giving = [stage for stage, rank in enumerate(owners) if rank == fullest and split[stage] > (stage < last)]
        taking = [stage for stage, rank in enumerate(owners) if rank == emptiest]
        if not giving or fullest == emptiest:
            break
        moved = list(split)
        moved[max(giving, key=lambda stage: split[stage])] -= 1
        moved[min(taking, key=lambda stage: split[stage])] += 1
        try:
            changed = {rank: _peak(config, moved, rank, costing) for rank in (fullest, emptiest)}
        except InputError:  # activations of this split do not keep to a limit
            break
        if max(changed.values()) >= peaks[fullest]:
            break
        split = moved
        for rank, peak in changed.items():
            peaks[rank] = peak
    if max(peaks) >= before:
        return None
    # Transfers are placed by the times of stages, so that other ranks may hold another number of them.
    peak = max(_peak(config, split, rank, costing) for rank in range(len(peaks)))
    return (split, peak) if peak < before else None


def _peak(config: Config, split: list[int], rank: int, costing: Costing | None) -> int:
    """The peak of a pipeline rank with another split, in bytes."""
    pipeline = replace(config.parallel.pipeline, split=split)
    return rank_memory(replace(config, parallel=replace(config.parallel, pipeline=pipeline)), rank, costing).total
