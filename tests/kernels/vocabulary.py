"""Splitting a vocabulary over some of the test suite's ranks."""

from itertools import pairwise

import torch.distributed as dist
from ranks import SIZE


def group_of(size: int) -> dist.ProcessGroup | None:
    """The group of `size` neighbouring ranks that this one is in; those left over are in none."""
    starts = range(0, SIZE - size + 1, size)
    groups = {start: dist.new_group(list(range(start, start + size))) for start in starts}
    return groups.get(dist.get_rank() // size * size)


def collectives(group: dist.ProcessGroup) -> int:
    """How many the group has run; its backend counts them, whatever function they went through."""
    return group._get_sequence_number_for_group()


def shards(size: int, vocabulary: int, how: str) -> list[tuple[range, int]]:
    """Of each of `size` ranks, the classes it has and how many columns its logits have.

    even: as many everywhere. uneven: the first ranks have one class, the last all others. padded: one width for
    all, so that the last rank has few classes or none. both: uneven, and more columns on later ranks.
    """
    if how == "padded":
        width = -(-vocabulary // (size - 1)) if size > 2 else vocabulary - 3
        starts = [min(rank * width, vocabulary) for rank in range(size)] + [vocabulary]
    elif how == "even":
        width = vocabulary // size
        starts = [rank * width for rank in range(size + 1)]
    else:
        width = 0
        starts = [*range(size), vocabulary]
    parts = [range(*pair) for pair in pairwise(starts)]
    more = [rank * (how == "both") for rank in range(size)]
    return [(part, max(len(part), width) + extra) for part, extra in zip(parts, more, strict=True)]
