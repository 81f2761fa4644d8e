"""Split of a model's layers into pipeline stages."""

from collections.abc import Sequence
from itertools import accumulate

from megalite.config.layers import layer_kinds
from megalite.config.model_schema import Model
from megalite.config.schema import Config
from megalite.plan.model.size import by_stage, head_forward_flops, layer_forward_flops


def balance(model: Model, stages: int) -> list[int]:
    """Layers per stage such that the slowest of `stages` stages is as fast as possible.

    A stage costs the forward FLOPs of its layers, and the last stage also those of the head and of multi-token
    prediction, whose layers it has beside those that are counted here. The last stage may have these alone; every other
    stage has at least one layer. Needs `stages` <= `model.layers`. Equal stages are filled from the end, since memory
    is scarcer at the beginning: the first stage holds the embedding, which takes no time, and earlier stages keep more
    micro-batches for their backward passes.
    """
    if not 1 <= stages <= model.layers:
        raise ValueError(f"{model.layers} layers cannot be split into {stages} stages")
    if stages == 1:
        return [model.layers]
    every = layer_costs(model)
    costs, head = every[: model.layers], head_forward_flops(model) + sum(every[model.layers :])
    return _even(len(costs), costs[0], head, stages) if len(set(costs)) == 1 else _uneven(costs, head, stages)


def with_mtp(model: Model, split: Sequence[int]) -> list[int]:
    """Add the layers of multi-token prediction to the last stage of a `split` of the others."""
    return [*split[:-1], split[-1] + model.depth]


def _even(layers: int, layer: int, head: int, stages: int) -> list[int]:
    """`balance` of equal layers: each goes to the stage that is cheapest so far.

    So no split has a cheaper most expensive stage. Among splits that are equal in this, none has a cheaper second most
    expensive stage, and so on.
    """
    # The head costs as much as `worth` layers. When every other stage has `each`, the last has `worth` layers less.
    worth, others = -(-head // layer), stages - 1
    each = layers // others
    if each > worth:
        each = (layers + worth) // stages
    last = max(0, each - worth)
    left = layers - each * others - last
    if left and each >= worth:
        last, left = last + 1, left - 1
    return [*[each] * (others - left), *[each + 1] * left, last]


def _uneven(costs: Sequence[int], head: int, stages: int) -> list[int]:
    """`balance` of layers that differ: no stage costs more than the lowest possible limit.

    Stages are filled up to this limit, from the last stage to the first. The limit is found by bisection.
    """

    def within(limit: int) -> list[int] | None:
        """The split, if no stage costs more than `limit`."""
        split, left = [], len(costs)
        for stage in reversed(range(stages)):
            count, cost = 0, head if stage == stages - 1 else 0
            while left - count > stage and cost + costs[left - count - 1] <= limit:  # the stages before need one each
                count, cost = count + 1, cost + costs[left - count - 1]
            if cost > limit or (count == 0 and stage < stages - 1):
                return None
            split.append(count)
            left -= count
        return split[::-1] if left == 0 else None

    low, high, found = 0, head + sum(costs), list[int]()
    while low <= high:
        limit = (low + high) // 2
        split = within(limit)
        low, high, found = (limit + 1, high, found) if split is None else (low, limit - 1, split)
    return found


def layer_costs(model: Model) -> list[int]:
    """Forward FLOPs per token of every layer."""
    kinds = layer_kinds(model)
    of = {id(kind): layer_forward_flops(model, kind) for kind in {id(kind): kind for kind in kinds}.values()}
    return [of[id(kind)] for kind in kinds]  # kinds take longer to compare


def stage_costs(model: Model, split: Sequence[int]) -> list[int]:
    """Forward FLOPs per token of each stage: its layers, and on the last one the head."""
    costs = [sum(layers) for layers in by_stage(layer_costs(model), split)]
    costs[-1] += head_forward_flops(model)
    return costs


def split_of(config: Config) -> list[int]:
    """Layers per stage, with those of multi-token prediction."""
    return with_mtp(config.model, split_without_mtp(config))


def split_without_mtp(config: Config) -> list[int]:
    """Layers per stage, as `parallel.pipeline.split` lists them: the explicit split, or else the balanced one."""
    pipeline = config.parallel.pipeline
    if pipeline.split is not None:
        return list(pipeline.split)
    return balance(config.model, config.parallel.pp * pipeline.stages_per_rank)


def layers_of(split: Sequence[int]) -> list[range]:
    """The layers of each stage, counted from 0 through the whole model."""
    ends = list(accumulate(split))
    return [range(end - count, end) for end, count in zip(ends, split, strict=True)]
