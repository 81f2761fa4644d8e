"""Texts that name many ranks in few words."""

from collections.abc import Sequence

from megalite.base.errors import number_ranges

MAX_RANGES = 6  # ranges of ranks in a text


def ranks_text(ranks: Sequence[int]) -> str:
    """Sorted ranks as `rank 3`, or `8 ranks (0-6, 9)`, shortened."""
    ranges = number_ranges(ranks).split(", ")
    shown = ", ".join([*ranges[:MAX_RANGES], "…"] if len(ranges) > MAX_RANGES else ranges)
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"{len(ranks)} ranks ({shown})"
