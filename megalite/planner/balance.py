"""How many layers every rank of a pipeline has. Imports no torch."""

from itertools import pairwise

from megalite.planner.programs import Program
from megalite.planner.work import Work


def stage_layers(work: Work, program: Program) -> list[int]:
    """Layers of every pipeline rank, first to last; their sum is that of the model.

    Programs that weigh their stages count the output layer by its parameters, and close a stage with the block that
    takes it beyond its share. Others divide evenly; where that leaves a rest, but would not if the embedding and the
    head were layers, the first and the last stage have one layer less (Llama 3, arXiv 2407.21783, §3.3.2; BLOOM).
    """
    if program.weighs_stages:
        return _weighed(work)
    if work.layers % work.pp and (work.layers + 2) % work.pp == 0 and work.layers > work.pp:
        each = (work.layers + 2) // work.pp
        return [each - 1, *[each] * (work.pp - 2), each - 1]
    least, rest = divmod(work.layers, work.pp)
    return [least + (rank < rest) for rank in range(work.pp)]


def _weighed(work: Work) -> list[int]:
    head = work.vocab * work.width / work.layer_parameters
    share = (work.layers + head) / work.pp
    ends = [min(work.layers, int(share * (rank + 1)) + 1) for rank in range(work.pp - 1)]
    return [end - begin for begin, end in pairwise([0, *ends, work.layers])]
