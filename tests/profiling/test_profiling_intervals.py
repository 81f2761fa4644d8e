"""Sets of moments behave as sets of whole numbers do."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from megalite.profiling.intervals import Interval, Intervals, common, contains, length, union, without

pieces = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12)).map(lambda pair: (pair[0], sum(pair))), max_size=12)


def moments(intervals: list[Interval] | Intervals) -> set[int]:
    return {moment for start, end in intervals for moment in range(start, end)}


@given(pieces)
def test_a_union_has_each_moment_once_in_order_and_without_seams(some: list[Interval]) -> None:
    found = union(some)
    assert moments(found) == moments(some)
    assert length(found) == len(moments(some))
    assert all(start < end for start, end in found)
    assert all(before[1] < after[0] for before, after in pairwise(found))


@given(pieces, pieces)
def test_what_two_sets_share_and_what_only_one_has(some: list[Interval], others: list[Interval]) -> None:
    first, second = union(some), union(others)
    both, rest = common(first, second), without(first, second)
    assert moments(both) == moments(first) & moments(second)
    assert moments(rest) == moments(first) - moments(second)
    assert length(both) + length(rest) == length(first)


@given(pieces)
def test_moments_of_a_set_are_found(some: list[Interval]) -> None:
    assert {moment for moment in range(-1, 60) if contains(union(some), moment)} == moments(some)
