"""Positions that a sliding window reaches: pairs of queries and keys, and the halos that ranks of a ring exchange."""

from collections.abc import Iterable
from itertools import product


def attended_pairs(length: int, window: int | None = None) -> int:
    """Number of pairs of a query and a key that the query attends to, in a sequence of one document."""
    full = length if window is None else min(window, length)
    return full * (full + 1) // 2 + (length - full) * full


def halo(cp: int, rank: int, length: int, window: int) -> tuple[int, int]:
    """Numbers of positions whose keys and values a rank sends to others, and receives from others, under a window.

    The rank holds chunks `rank` and 2·cp − 1 − `rank` of 2·cp. The rows of a chunk attend to window − 1
    positions before the chunk. A rank receives a position once, even if both of its chunks attend to it.
    """
    chunk, last = length // (2 * cp), 2 * cp - 1

    def reach(chunks: int) -> int:
        """Number of positions of `chunks` chunks in the window of the chunk that follows them."""
        return min(window - 1, chunks * chunk)

    # The rank's first chunk is sent to first chunks after it, and to last chunks whose ranks do not have it yet.
    first = reach(cp - 1 - rank) + reach(last - rank) - reach(last - 2 * rank)
    return first + reach(rank), reach(rank) + reach(2 * (cp - 1 - rank))


def halo_messages(cp: int, rank: int, length: int, window: int) -> tuple[list[int], list[int]]:
    """Numbers of positions whose keys and values are in each message that a rank sends, and in each that it receives.

    A rank sends at most one message to each other rank; see `halo` for the sums.
    """
    chunk = length // (2 * cp)
    held = [
        (range(i * chunk, (i + 1) * chunk), range((2 * cp - 1 - i) * chunk, (2 * cp - i) * chunk)) for i in range(cp)
    ]
    wanted = [
        (
            range(max(0, first.start - window + 1), first.start),
            range(max(first.stop, last.start - window + 1), last.start),
        )
        for first, last in held
    ]
    gives = [_common(theirs, held[rank]) for theirs in wanted]
    takes = [_common(wanted[rank], theirs) for theirs in held]
    return [positions for positions in gives if positions], [positions for positions in takes if positions]


def _common(wanted: Iterable[range], held: Iterable[range]) -> int:
    """Number of positions in both."""
    return sum(max(0, min(x.stop, y.stop) - max(x.start, y.start)) for x, y in product(wanted, held))


def busiest(cp: int, length: int, window: int | None) -> int:
    """The rank that sends and receives most; 0 without a window, since all ranks then send alike."""
    if window is None or window >= length:
        return 0
    return max(range(cp), key=lambda rank: sum(halo(cp, rank, length, window)))
