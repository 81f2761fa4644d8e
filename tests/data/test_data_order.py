import math
from collections import Counter
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from megalite.data.order import integer_weights, mixture, mixture_counts, order_key, permute

KEY = order_key(seed=0, source=0, epoch=0)
weights_of_sources = st.lists(st.integers(0, 10**6), min_size=1, max_size=9).filter(any)


@given(size=st.integers(1, 700), seed=st.integers(0, 2**64))
@example(size=1, seed=0)
@example(size=256, seed=0)
@example(size=257, seed=0)
def test_permute_is_a_bijection(size: int, seed: int) -> None:
    key = order_key(seed, 0, 0)
    assert sorted(permute(index, size, key) for index in range(size)) == list(range(size))


@given(size=st.integers(2**40, 2**48), data=st.data())
def test_permute_is_injective_and_in_range_for_large_sizes(size: int, data: st.DataObject) -> None:
    indices = data.draw(st.sets(st.integers(0, size - 1), min_size=2, max_size=5))
    found = {permute(index, size, KEY) for index in indices}
    assert len(found) == len(indices)
    assert all(0 <= position < size for position in found)


@pytest.mark.parametrize(("index", "size"), [(-1, 4), (4, 4), (0, 0), (0, 2**48 + 1)])
def test_permute_refuses_what_is_out_of_range(index: int, size: int) -> None:
    with pytest.raises(ValueError, match="of a permutation of"):
        permute(index, size, KEY)


def test_orders_never_change_between_versions() -> None:
    assert [permute(index, 10, KEY) for index in range(10)] == [3, 0, 9, 6, 2, 5, 4, 1, 7, 8]
    assert [permute(index, 10**12, KEY) for index in range(3)] == [562697406700, 457025144139, 326855459928]


def test_seed_source_and_epoch_each_change_the_order() -> None:
    keys = [order_key(0, 0, 0), order_key(1, 0, 0), order_key(0, 1, 0), order_key(0, 0, 1), order_key(0, 0, 10)]
    orders = {tuple(permute(index, 100, key) for index in range(100)) for key in keys}
    assert len(orders) == len(keys)


def test_order_looks_random() -> None:
    size = 5000
    order = [permute(index, size, KEY) for index in range(size)]
    displacement = sum(abs(position - index) for index, position in enumerate(order)) / size
    assert displacement == pytest.approx(size / 3, rel=0.03)
    neighbours = sum(abs(b - a) == 1 for a, b in pairwise(order))
    assert neighbours < 10  # 2 are expected
    rising = sum(b > a for a, b in pairwise(order))
    assert rising == pytest.approx(size / 2, rel=0.03)


@pytest.mark.parametrize("size", [5, 16, 100])
def test_every_position_is_equally_likely(size: int) -> None:
    """Chi-square of where one index lands under many keys; 0.9999 quantile by Wilson and Hilferty."""
    draws = 100 * size
    found = Counter(permute(1, size, order_key(seed, 0, 0)) for seed in range(draws))
    chi_square = sum((found[position] - 100) ** 2 / 100 for position in range(size))
    freedom = size - 1
    assert chi_square < freedom * (1 - 2 / (9 * freedom) + 3.719 * math.sqrt(2 / (9 * freedom))) ** 3


@given(weights=weights_of_sources)
def test_mixture_numbers_every_source_from_zero_without_gaps(weights: list[int]) -> None:
    counts = [0] * len(weights)
    for index in range(200):
        assert mixture_counts(index, weights) == counts
        source, nth = mixture(index, weights)
        assert nth == counts[source]
        counts[source] += 1


@given(weights=weights_of_sources, index=st.integers(0, 10**12))
@example(weights=[1] * 9, index=10**12)
@example(weights=[1000, 1, 1, 1, 1], index=10**12 + 7)
def test_mixture_is_exact_in_every_prefix(weights: list[int], index: int) -> None:
    before, after = mixture_counts(index, weights), mixture_counts(index + 1, weights)
    source, nth = mixture(index, weights)
    assert nth == before[source]
    assert [b - a for a, b in zip(before, after, strict=True)] == [int(j == source) for j in range(len(weights))]
    assert sum(before) == index
    above = sum(Fraction(1, j) for j in range(1, len(weights)))
    for count, weight in zip(before, weights, strict=True):
        assert -1 < count - Fraction(index * weight, sum(weights)) <= above


def test_mixture_of_equal_weights_takes_turns() -> None:
    assert [mixture(index, [1, 1, 1]) for index in range(6)] == [(2, 0), (1, 0), (0, 0), (2, 1), (1, 1), (0, 1)]


def test_sources_of_weight_zero_are_never_drawn() -> None:
    assert {mixture(index, [0, 3, 0, 1])[0] for index in range(50)} == {1, 3}


@pytest.mark.parametrize(
    ("weights", "expected"),
    [([0.1, 0.2, 0.7], (1, 2, 7)), ([1.0, 3], (1, 3)), ([2, 4], (1, 2)), ([1e-3, 1.0], (1, 1000)), ([0.5], (1,))],
)
def test_integer_weights(weights: list[float], expected: tuple[int, ...]) -> None:
    assert integer_weights(weights) == expected
