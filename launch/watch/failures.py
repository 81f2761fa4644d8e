"""Frequency of a run's failures, from its events."""

from __future__ import annotations

from collections.abc import Sequence

from ..base.events import Event
from ..base.verdict import RETRIED_CAUSES

MAX_ATTEMPT_SECONDS = 10 * 366 * 86_400.0  # seconds that are believed of an attempt


def interruptions(events: Sequence[Event], now: float) -> tuple[int, float]:
    """Number of failed attempts, and hours that ranks have run in all. now: the end of an attempt that goes on."""
    failures, seconds = 0, 0.0
    began: float | None = None
    ranks = 0
    for event in events:
        if event["event"] == "attempt":
            began, ranks = event["time"], _whole(event.get("ranks"))
        elif event["event"] == "attempt_ended" and began is not None:
            seconds += ranks * _between(began, event["time"])
            began = None
            failures += event.get("cause") in RETRIED_CAUSES
    if began is not None:
        seconds += ranks * _between(began, now)
    return failures, seconds / 3600


def _between(began: float, ended: float) -> float:
    return ended - began if 0 < ended - began < MAX_ATTEMPT_SECONDS else 0.0  # NaN is neither


def _whole(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**24 else 1
