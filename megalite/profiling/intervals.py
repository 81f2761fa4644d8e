"""Sets of moments, as sorted intervals that neither touch nor overlap, in whole nanoseconds, so that sums are exact."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator

Interval = tuple[int, int]  # first moment, and the first one after it
Intervals = tuple[Interval, ...]


def union(pieces: Iterable[Interval]) -> Intervals:
    """The moments that lie in any of the pieces, which may overlap and come in any order."""
    found: list[Interval] = []
    for start, end in sorted(pieces):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        elif start < end:
            found.append((start, end))
    return tuple(found)


def common(first: Intervals, second: Intervals) -> Intervals:
    """The moments that lie in both sets."""

    def overlaps() -> Iterator[Interval]:
        a = b = 0
        while a < len(first) and b < len(second):
            start, end = max(first[a][0], second[b][0]), min(first[a][1], second[b][1])
            if start < end:
                yield start, end
            if first[a][1] < second[b][1]:
                a += 1
            else:
                b += 1

    return tuple(overlaps())


def without(first: Intervals, second: Intervals) -> Intervals:
    """The moments of `first` that do not lie in `second`."""
    if not first:
        return ()
    ends = [first[0][0], *(moment for piece in second for moment in piece), first[-1][1]]
    gaps = tuple((start, end) for start, end in zip(ends[::2], ends[1::2], strict=True) if start < end)
    return common(first, gaps)


def length(moments: Intervals) -> int:
    """The nanoseconds that the moments last together."""
    return sum(end - start for start, end in moments)


def contains(moments: Intervals, moment: int) -> bool:
    """Flag: the moment is one of the set."""
    at = bisect_right(moments, moment, key=lambda piece: piece[0])
    return at > 0 and moment < moments[at - 1][1]
