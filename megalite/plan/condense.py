"""The parts of a pipeline stage as a walk needs them: of many layers that repeat, only those at the ends are apart."""

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import groupby

from megalite.plan.activations import Activations, Part
from megalite.plan.recompute import Mode

ENDS = 2  # repetitions at either end of many, that a walk looks at one by one


def parts_of(sizes: Activations, modes: Mapping[int, Sequence[Mode]], stages: int) -> dict[int, list[Part]]:
    """By stage: its parts, first to last; layers that are repeated often are taken as one.

    modes: of the layers of the stages that are asked for. stages: how many the pipeline has.
    """
    layer = cache(sizes.layer)  # one for all stages, with all that it remembers

    @cache
    def repeated(mode: Mode, times: int) -> Part:
        return layer(mode).repeated(times) if times > 1 else layer(mode)

    def parts(stage: int) -> list[Part]:
        layers = [repeated(mode, times) for mode, times in condensed(modes[stage])]
        last = [sizes.head()] if stage == stages - 1 else []
        if stage == 0:
            return [sizes.embedding(with_head=stages == 1), *layers, *last]
        return [*([sizes.tied_copy()] if last and sizes.config.model.tie_embeddings else []), *layers, *last]

    return {stage: parts(stage) for stage in modes}


def condensed(modes: Sequence[Mode]) -> list[tuple[Mode, int]]:
    """The layers of a stage, in order, as a walk needs them: the mode, and how many like it are taken as one.

    Modes repeat, every layer or every few. In the midst of repetitions what is held changes by the same amount with
    each, so it is most at the first or the last of them: only two at either end are looked at.
    """
    period, count = _period(modes), len(modes)
    repetitions = count // period if period else 0
    if repetitions > 2 * ENDS:
        unit, middle = list(modes[:period]), repetitions - 2 * ENDS
        ends = [(mode, 1) for mode in unit * ENDS]
        rest = [(mode, 1) for mode in modes[repetitions * period :]]
        found = [*ends, *((mode, middle) for mode in unit), *ends, *rest]
    else:
        found = [(mode, 1) for mode in modes]
    return [entry for key, run in groupby(found) for entry in _condensed_run(*key, len(list(run)))]


def _condensed_run(mode: Mode, times: int, count: int) -> list[tuple[Mode, int]]:
    if times > 1:
        return [(mode, times * count)]
    ends = [(mode, 1)] * ENDS
    return [*ends, (mode, count - 2 * ENDS), *ends] if count > 2 * ENDS else [(mode, 1)] * count


def _period(modes: Sequence[Mode]) -> int:
    """After how many they repeat themselves."""
    border, borders = 0, [0]  # Knuth, Morris and Pratt's table
    for mode in modes[1:]:
        while border and mode != modes[border]:
            border = borders[border - 1]
        border += mode == modes[border]
        borders.append(border)
    return len(modes) - borders[-1]
