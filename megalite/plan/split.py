"""Which layers live on which pipeline stage."""

from collections.abc import Sequence
from itertools import accumulate

from megalite.config.schema import Config, Model
from megalite.plan.size import head_forward_flops, layer_forward_flops


def balance(model: Model, pp: int) -> list[int]:
    """Layers per stage such that the slowest of `pp` stages is as fast as can be.

    A stage costs the forward FLOPs of its layers, the last one also those of the head, and may be left with
    the head alone; every other stage has a layer. Needs `pp` <= `model.layers`.

    Layers go one by one to the stage that is cheapest so far. Since all layers cost the same this is exact:
    no split has a cheaper most expensive stage, nor, with that equal, a cheaper second one, and so on.
    Equal stages are filled from the end: the first stage holds the embedding, which takes memory but no time,
    and the earlier a stage, the more micro-batches it keeps for its backward passes.
    """
    if not 1 <= pp <= model.layers:
        raise ValueError(f"{model.layers} layers cannot be split into {pp} stages")
    layer, head = layer_forward_flops(model), head_forward_flops(model)
    split = [int(stage < pp - 1) for stage in range(pp)]
    for _ in range(model.layers - sum(split)):
        costs = [count * layer + head * (stage == pp - 1) for stage, count in enumerate(split)]
        split[min(range(pp), key=lambda stage: (costs[stage], -stage))] += 1
    return split


def split_of(config: Config) -> list[int]:
    """Layers per stage: the explicit split, or else the balanced one."""
    explicit = config.parallel.pipeline.split
    return balance(config.model, config.parallel.pp) if explicit is None else list(explicit)


def layers_of(split: Sequence[int]) -> list[range]:
    """The layers of each stage, counted from 0 through the whole model."""
    ends = list(accumulate(split))
    return [range(end - count, end) for end, count in zip(ends, split, strict=True)]
