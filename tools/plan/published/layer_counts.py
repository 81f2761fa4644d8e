"""Counts of the layers that every rank of a pipeline has. Imports no torch."""

from functools import lru_cache
from itertools import pairwise

from megalite_tools.plan.published.profiles import Profile
from megalite_tools.plan.published.work import Work

TOLERANCE = 1e-9  # by which sums of parameters may differ from whole layers


def stage_layers(work: Work, program: Profile) -> list[int]:
    """Layers of every pipeline rank, first to last; their sum is that of the model.

    Programs that weigh their stages count the output layer by its parameters, and close a stage with the block that
    takes it beyond its share. Programs that balance parameters count those of both ends. Others divide evenly; where
    that leaves a rest, but would not if the embedding and the head were layers, the first and the last stage have one
    layer less (Llama 3, arXiv 2407.21783, §3.3.2; BLOOM), the last one more for each that predicts a further token.
    """
    if program.weighs_stages:
        return _weighed(work)
    if program.balances and work.pp > 1:
        return _balanced(work)
    more = 2 + work.predicting
    if work.layers % work.pp and (work.layers + more) % work.pp == 0 and work.layers > work.pp:
        each = (work.layers + more) // work.pp
        return [each - 1, *[each] * (work.pp - 2), each + 1 - more]
    least, rest = divmod(work.layers, work.pp)
    return [least + (rank < rest) for rank in range(work.pp)]


def _balanced(work: Work) -> list[int]:
    """Ranks are filled one after another, up to the least that lets the last one have the rest.

    Sizes are in parameters of a layer; the embedding and the output layer have `end` of them.
    """
    return list(_filled(work.layers, work.pp, work.vocab * work.width / work.layer_parameters))


@lru_cache(maxsize=1 << 10)
def _filled(layers: int, pp: int, end: float) -> tuple[int, ...]:
    for most in sorted({whole + more for whole in range(layers + 1) for more in (0, end)}):
        inner, outer = int(most + TOLERANCE), int(most - end + TOLERANCE)
        if most >= end and 2 * outer + (pp - 2) * inner >= layers:
            break
    found = []
    for room in (outer, *[inner] * (pp - 2), outer):
        found.append(min(room, layers))
        layers -= found[-1]
    return tuple(found)


def _weighed(work: Work) -> list[int]:
    head = work.vocab * work.width / work.layer_parameters
    share = (work.layers + head) / work.pp
    ends = [min(work.layers, int(share * (rank + 1)) + 1) for rank in range(work.pp - 1)]
    return [end - begin for begin, end in pairwise([0, *ends, work.layers])]
