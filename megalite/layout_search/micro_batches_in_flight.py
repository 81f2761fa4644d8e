"""Activations that the first pipeline rank holds at once, by schedule, without building it. Imports no torch."""

from functools import lru_cache
from typing import NamedTuple

from megalite.schedule.generate import AUTO_SCHEDULE, V_SCHEDULES
from megalite.schedule.orders import first_rounds


class Flight(NamedTuple):
    """Micro-batches in flight on the first rank, over all its stages; in a V-shaped schedule, on its first stage only.

    most: while every stage has its weights. beside: while all stages also have gradients that are not reduced yet; None
    if that may never be.
    """

    most: int
    beside: int | None


@lru_cache(maxsize=1 << 14)
def flight(schedule: str, p: int, m: int, v: int) -> Flight:
    """A lower bound of what the first of p ranks with v stages each holds in a step of m micro-batches.

    Tests count it in the schedules. For a schedule from a file or a search, it is what no order can avoid.
    """
    some = m - 1 if m > 1 else None
    if schedule == "gpipe":
        return Flight(m, some)
    if schedule in ("1f1b", "zb_h1", "zb_h2"):
        most = 2 * p - 1 if schedule == "zb_h2" else p
        return Flight(min(m, most), None if some is None else min(some, most))
    if schedule in V_SCHEDULES:
        return Flight(min(m, 2 * p), min(m - 1, 2 * p) if m > p else None)
    if schedule == "interleaved_1f1b":
        ahead = 2 * (p - 1) + 1
        most = min(v * m, (v - 1) * first_rounds(p, m)[0] + ahead)
        return Flight(most, (v - 1) * p + ahead if m >= max(2 * p, 3) else None)
    return Flight(1 if schedule == AUTO_SCHEDULE else 0, None)


class Flights(NamedTuple):
    """By rank: micro-batches in flight, each counted as often as it is on a stage of the rank.

    beside: whether as many are there when all stages have gradients that are not reduced yet.
    """

    most: tuple[int, ...]
    beside: bool


@lru_cache(maxsize=1 << 12)
def flights(schedule: str, p: int, m: int, v: int) -> Flights:
    """A lower bound of what p ranks with v stages each hold under a named schedule."""
    after = range(p - 1, -1, -1)  # ranks after each
    if schedule == "interleaved_1f1b":
        ahead = (v - 1) * first_rounds(p, m)[0] + 1
        most = [min(v * m, ahead + 2 * ranks) for ranks in after]
    elif schedule in V_SCHEDULES:
        most = [2 * p if m >= 2 * p else min(m, p)] * p
    elif schedule == "gpipe":
        most = [m] * p
    else:
        twice = schedule == "zb_h2" and m >= 2 * p - 1
        most = [min(m, (1 + twice) * ranks + 1) for ranks in after]
    first = flight(schedule, p, m, v)
    return Flights(tuple(most), schedule != "gpipe" and m >= max(2 * p, 3) and first.beside == first.most)
