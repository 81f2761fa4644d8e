"""Which layers live on which pipeline stage."""

from collections.abc import Sequence
from itertools import accumulate

from megalite.config.schema import Config, Model
from megalite.plan.size import head_forward_flops, layer_forward_flops


def balance(model: Model, stages: int) -> list[int]:
    """Layers per stage such that the slowest of `stages` stages is as fast as can be.

    A stage costs the forward FLOPs of its layers, the last one also those of the head, and may be left with
    the head alone; every other stage has a layer. Needs `stages` <= `model.layers`.

    Layers go one by one to the stage that is cheapest so far. Since all layers cost the same this is exact:
    no split has a cheaper most expensive stage, nor, with that equal, a cheaper second one, and so on.
    Equal stages are filled from the end: the first stage holds the embedding, which takes memory but no time,
    and the earlier a stage, the more micro-batches it keeps for its backward passes.
    """
    if not 1 <= stages <= model.layers:
        raise ValueError(f"{model.layers} layers cannot be split into {stages} stages")
    if stages == 1:
        return [model.layers]
    # The head costs as much as so many layers. When every other stage has `each`, the last has as many less the head.
    head, others = -(-head_forward_flops(model) // layer_forward_flops(model)), stages - 1
    each = model.layers // others
    if each > head:
        each = (model.layers + head) // stages
    last = max(0, each - head)
    left = model.layers - each * others - last
    if left and each >= head:
        last, left = last + 1, left - 1
    return [*[each] * (others - left), *[each + 1] * left, last]


def stage_costs(model: Model, split: Sequence[int]) -> list[int]:
    """Forward FLOPs per token of each stage: its layers, and on the last one the head."""
    layer = layer_forward_flops(model)
    costs = [count * layer for count in split]
    costs[-1] += head_forward_flops(model)
    return costs


def split_of(config: Config) -> list[int]:
    """Layers per stage: the explicit split, or else the balanced one."""
    pipeline = config.parallel.pipeline
    if pipeline.split is not None:
        return list(pipeline.split)
    return balance(config.model, config.parallel.pp * pipeline.stages_per_rank)


def layers_of(split: Sequence[int]) -> list[range]:
    """The layers of each stage, counted from 0 through the whole model."""
    ends = list(accumulate(split))
    return [range(end - count, end) for end, count in zip(ends, split, strict=True)]
