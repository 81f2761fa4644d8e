"""The parts of a pipeline stage as a walk needs them: of many layers that repeat, only those at the ends are apart."""

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import groupby
from typing import TypeVar

from megalite.config.layers import LayerKind
from megalite.plan.activations import Activations
from megalite.plan.parts import Part
from megalite.plan.recompute_modes import Mode

T = TypeVar("T")
Recomputed = tuple[LayerKind, Mode]  # a layer, and what it recomputes
ENDS = 2  # repetitions at either end of many, that a walk looks at one by one


def parts_of(sizes: Activations, layers: Mapping[int, Sequence[Recomputed]], stages: int) -> dict[int, list[Part]]:
    """By stage: its parts, first to last; layers that are repeated often are taken as one.

    layers: of the stages that are asked for. stages: how many the pipeline has.
    """
    one = cache(sizes.layer)  # of all stages alike, with all that it remembers

    @cache
    def repeated(layer: Recomputed, times: int) -> Part:
        return one(*layer).repeated(times) if times > 1 else one(*layer)

    def parts(stage: int) -> list[Part]:
        found = [repeated(layer, times) for layer, times in condensed(layers[stage])]
        last = [sizes.head()] if stage == stages - 1 else []
        if stage == 0:
            return [sizes.embedding(with_head=stages == 1), *found, *last]
        return [*([sizes.tied_copy()] if last and sizes.config.model.tie_embeddings else []), *found, *last]

    return {stage: parts(stage) for stage in layers}


def condensed(layers: Sequence[T]) -> list[tuple[T, int]]:
    """The layers of a stage, in order, as a walk needs them: what each is, and how many like it are taken as one.

    They repeat, every layer or every few. In the midst of repetitions what is held changes by the same amount with
    each, so it is most at the first or the last of them: only two at either end are looked at.
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
    """After how many they repeat themselves."""
    border, borders = 0, [0]  # Knuth, Morris and Pratt's table
    for layer in layers[1:]:
        while border and layer != layers[border]:
            border = borders[border - 1]
        border += layer == layers[border]
        borders.append(border)
    return len(layers) - borders[-1]
