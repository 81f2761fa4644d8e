"""The parts of a pipeline stage for `memory.walk`: where many layers repeat, those in the middle count as one part."""

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import groupby
from typing import TypeVar

from megalite.config.layers import LayerKind
from megalite.plan.activations import Activations
from megalite.plan.recompute_modes import Mode
from megalite.plan.units import Unit

T = TypeVar("T")
Recomputed = tuple[LayerKind, Mode]  # a layer, and how it recomputes
ENDS = 2  # repetitions at each end that a walk visits one by one; those between count as one


def parts_of(
    sizes: Activations, layers: Mapping[int, Sequence[Recomputed]], stages: int, condense: bool = True
) -> dict[int, list[Unit]]:
    """By stage: the parts of the stage, first to last. Layers that repeat often are taken as one part.

    layers: by stage, the layers of the stages to return. stages: how many stages the pipeline has. condense: False to
    take all layers one by one.
    """
    one = cache(sizes.layer)  # one Unit for equal layers of all stages, so its cached properties are computed once

    @cache
    def repeated(layer: Recomputed, times: int) -> Unit:
        return one(*layer).repeated(times) if times > 1 else one(*layer)

    def parts(stage: int) -> list[Unit]:
        model, is_last = sizes.config.model, stage == stages - 1
        entries = condensed(layers[stage]) if condense else [(layer, 1) for layer in layers[stage]]
        found = [repeated(layer, times) for layer, times in entries]
        if is_last and model.mtp is not None:
            found.insert(sum(not kind.mtp for (kind, _), _ in entries), sizes.further())
        if is_last:
            found.append(sizes.head())
        if stage == 0:
            return [sizes.embedding(with_head=is_last), *found]
        return [sizes.copied_embedding(), *found] if is_last and model.shares_embedding else found

    return {stage: parts(stage) for stage in layers}


def condensed(layers: Sequence[T]) -> list[tuple[T, int]]:
    """The layers of a stage in order, each with the number of layers like it that are taken as one.

    Layers repeat one by one or in groups. In the middle, every repetition changes the bytes held by the same amount. So
    memory peaks at the first or the last repetition, and a walk visits only two at each end one by one.
    """
    period, count = _period(layers), len(layers)
    repetitions = count // period if period else 0
    if repetitions > 2 * ENDS:
        unit, middle = list(layers[:period]), repetitions - 2 * ENDS
        ends = [(layer, 1) for layer in unit * ENDS]
        rest = [(layer, 1) for layer in layers[repetitions * period :]]
        found = [*ends, *((layer, middle) for layer in unit), *ends, *rest]
    else:
        found = [(layer, 1) for layer in layers]
    return [entry for key, run in groupby(found) for entry in _condensed_run(*key, len(list(run)))]


def _condensed_run(layer: T, times: int, count: int) -> list[tuple[T, int]]:
    if times > 1:
        return [(layer, times * count)]
    ends = [(layer, 1)] * ENDS
    return [*ends, (layer, count - 2 * ENDS), *ends] if count > 2 * ENDS else [(layer, 1)] * count


def _period(layers: Sequence[T]) -> int:
    """Number of layers after which the sequence repeats itself."""
    border, borders = 0, [0]  # Knuth, Morris and Pratt's table
    for layer in layers[1:]:
        while border and layer != layers[border]:
            border = borders[border - 1]
        border += layer == layers[border]
        borders.append(border)
    return len(layers) - borders[-1]
