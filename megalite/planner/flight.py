"""Activations that the first pipeline rank holds at once, by schedule, without building it. Imports no torch."""

from functools import lru_cache
from typing import NamedTuple

from megalite.schedule.generate import AUTO, V_SHAPED
from megalite.schedule.orders import first_rounds


class Flight(NamedTuple):
    """Micro-batches in flight on stages of the first rank: of all its stages, or of a V the first stage alone.

    most: while every stage has its weights. beside: while all stages also have gradients that are not reduced yet; None
    if that may never be.
    """

    most: int
    beside: int | None


@lru_cache(maxsize=1 << 14)
def flight(schedule: str, p: int, m: int, v: int) -> Flight:
    """A lower bound of what the first of p ranks with v stages each holds in a step of m micro-batches.

    Tests count it in the schedules. Of a schedule from a file or a search only what no order can avoid is told.
    """
    some = m - 1 if m > 1 else None
    if schedule == "gpipe":
        return Flight(m, some)
    if schedule in ("1f1b", "zb_h1", "zb_h2"):
        most = 2 * p - 1 if schedule == "zb_h2" else p
        return Flight(min(m, most), None if some is None else min(some, most))
    if schedule in V_SHAPED:
        return Flight(min(m, 2 * p), min(m - 1, 2 * p) if m > p else None)
    if schedule == "interleaved_1f1b":
        ahead = 2 * (p - 1) + 1
        most = min(v * m, (v - 1) * first_rounds(p, m)[0] + ahead)
        return Flight(most, (v - 1) * p + ahead if m >= max(2 * p, 3) else None)
    return Flight(1 if schedule == AUTO else 0, None)
