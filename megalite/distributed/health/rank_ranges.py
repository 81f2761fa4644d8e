"""Texts that name many ranks in few words."""

from collections.abc import Sequence

MAX_RANGES = 6  # ranges of ranks in a text


def ranks_text(ranks: Sequence[int]) -> str:
    """Sorted ranks as `rank 3`, or `8 ranks (0-6, 9)`, shortened."""
    ranges: list[list[int]] = []
    for rank in ranks:
        if ranges and rank == ranges[-1][1] + 1:
            ranges[-1][1] = rank
        else:
            ranges.append([rank, rank])
    words = [str(first) if first == last else f"{first}-{last}" for first, last in ranges]
    if len(words) > MAX_RANGES:
        words = [*words[:MAX_RANGES], "…"]
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"{len(ranks)} ranks ({', '.join(words)})"
