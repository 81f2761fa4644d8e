"""Which positions a sliding window reaches: pairs of queries and keys, and what ranks of a ring give each other."""


def attended_pairs(length: int, window: int | None = None) -> int:
    """How many pairs of a query and a key that it attends to a sequence has, as one document."""
    full = length if window is None else min(window, length)
    return full * (full + 1) // 2 + (length - full) * full


def halo(cp: int, rank: int, length: int, window: int) -> tuple[int, int]:
    """Positions whose keys and values a rank gives to others, and takes from them, under a window.

    Of 2·cp chunks the rank holds numbers `rank` and 2·cp − 1 − `rank`. The rows of a chunk attend to window − 1
    positions before it. A rank takes a position once, even where both of its chunks attend to it.
    """
    chunk, last = length // (2 * cp), 2 * cp - 1

    def reach(chunks: int) -> int:
        """How many positions of so many chunks are in the window of the chunk that follows."""
        return min(window - 1, chunks * chunk)

    # Its first chunk gives to the first chunks behind it, and to those last chunks whose ranks have not got it so far.
    first = reach(cp - 1 - rank) + reach(last - rank) - reach(last - 2 * rank)
    return first + reach(rank), reach(rank) + reach(2 * (cp - 1 - rank))


def busiest(cp: int, length: int, window: int | None) -> int:
    """The rank that gives and takes most; without a window all do alike."""
    if window is None:
        return 0
    return max(range(cp), key=lambda rank: sum(halo(cp, rank, length, window)))
