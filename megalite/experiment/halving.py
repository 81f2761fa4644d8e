"""Successive halving (Jamieson and Talwalkar 2016, arXiv 1502.07943): many settings for few steps, few for many."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import ceil

from megalite.experiment.build import Builder, Point
from megalite.experiment.cell import Cell
from megalite.experiment.schema import Halving

ENDLESS_SCHEDULES = ("constant", "inverse_sqrt")  # schedules whose rate does not depend on train.steps


def rounds(
    halving: Halving, points: Sequence[Point], builder: Builder, losses: Callable[[Cell], float | None]
) -> tuple[list[Cell | None], int]:
    """The runs of the rounds that are known, and how many more later rounds will have.

    A round is known once all runs of the one before have ended, of which one in `factor` goes on: those with the lowest
    loss. A run without a loss has diverged or failed, and does not go on. Where the learning rate does not depend on
    train.steps, a run goes on from the end of the round before; else it begins anew.
    """
    found: list[Cell | None] = []
    entrants: list[tuple[Point, Cell | None]] = [(point, None) for point in points]
    left = len(points)
    for number, steps in enumerate(halving.steps):
        made = [(point, _of_round(builder, point, before, steps, number)) for point, before in entrants]
        cells = [(point, cell) for point, cell in made if cell is not None]
        found += [cell for _, cell in cells]
        known = {cell.id: losses(cell) for _, cell in cells}
        if number + 1 == len(halving.steps):
            return found, 0
        count = ceil(len(cells) / halving.factor)
        if any(loss is None for loss in known.values()):
            left = count
            later = 0
            for _ in halving.steps[number + 1 :]:
                later, left = later + left, ceil(left / halving.factor)
            return found, later
        ended = [(known[cell.id], at, point, cell) for at, (point, cell) in enumerate(cells)]
        ranked = sorted(((loss, at, point, cell) for loss, at, point, cell in ended if loss is not None), key=_rank)
        entrants = [(point, cell) for loss, _, point, cell in ranked[:count] if loss < float("inf")]
    return found, 0


def _rank(entry: tuple[float, int, Point, Cell]) -> tuple[float, int]:
    return entry[0], entry[1]


def _of_round(builder: Builder, point: Point, before: Cell | None, steps: int, number: int) -> Cell | None:
    words = {**point.words, "r": number}
    settings = {**point.settings, "train.steps": steps}
    places = {**point.places, "train.steps": "halving.steps"}
    cell = builder.cell(replace(point, settings=settings, words=words, places=places))
    if cell is None:
        return None
    cell = replace(cell, round=number)
    if before is not None and cell.config.schedule.name in ENDLESS_SCHEDULES:
        return replace(cell, parent=before.id, start=before.steps)
    return cell
