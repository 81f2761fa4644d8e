"""Statistics and differences of tensors: exact in float64, whatever the type, for any number of pieces."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megalite_tools.checkpoint import values
from megalite_tools.checkpoint.values import Difference, Statistics, difference, statistics

TYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int32, torch.int64, torch.uint8, torch.bool]
FLOATS = st.floats(width=32) | st.sampled_from([0.0, -0.0, math.nan, math.inf, -math.inf])
LISTS = st.lists(FLOATS, max_size=12)


@pytest.fixture(autouse=True, scope="module")
def small_pieces() -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(values, "PIECE", 3)
        yield


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_every_type_and_shape(dtype: torch.dtype) -> None:
    tensor = torch.tensor([[3, 0, 4], [0, 0, 0], [12, 0, 0]]).to(dtype)
    expected = (math.sqrt(3), 1.0) if dtype is torch.bool else (13.0, 12.0)
    assert statistics(tensor) == Statistics(pytest.approx(expected[0]), expected[1], 0, 0)
    for empty in (torch.empty(0, dtype=dtype), torch.empty(2, 0, dtype=dtype)):
        assert statistics(empty) == Statistics(0.0, 0.0, 0, 0)
        assert difference(empty, empty.clone()) == Difference(0.0, 0.0, True)
    assert statistics(tensor[0, 0]).largest == (1 if dtype is torch.bool else 3)
    assert difference(tensor[0, 0], tensor[0, 1]) == Difference(1.0 if dtype is torch.bool else 3.0, 1.0, False)


@given(LISTS)
def test_statistics(numbers: list[float]) -> None:
    found = statistics(torch.tensor(numbers, dtype=torch.float32))
    finite = [abs(number) for number in numbers if math.isfinite(number)]
    assert found.norm == pytest.approx(math.hypot(*finite))
    assert found.largest == max(finite, default=0.0)
    assert found.nan == sum(map(math.isnan, numbers))
    assert found.infinite == sum(map(math.isinf, numbers))
    assert found.finite == (len(finite) == len(numbers))


@given(LISTS, st.data())
def test_differences(numbers: list[float], data: st.DataObject) -> None:
    others = data.draw(st.lists(st.sampled_from([*numbers, 1.0]), min_size=len(numbers), max_size=len(numbers)))
    one, other = (torch.tensor(items, dtype=torch.float32) for items in (numbers, others))
    pairs = list(zip(one.tolist(), other.tolist(), strict=True))
    gaps = [0.0 if a == b or (a != a and b != b) else abs(a - b) for a, b in pairs]
    largest = max((math.inf if math.isnan(gap) else gap for gap in gaps), default=0.0)
    found = difference(one, other)
    assert found.largest == largest
    assert found.bitwise == (one.numpy().tobytes() == other.numpy().tobytes())
    scale = max((abs(x) for pair in pairs for x in pair if math.isfinite(x)), default=0.0)
    assert found.relative == pytest.approx(largest / scale if scale else largest)
    assert difference(other, one) == found


def test_types_are_compared_by_value_but_are_never_the_same_bits() -> None:
    one = torch.tensor([1.0, 2.0, 0.5, 8.0])
    assert difference(one, one.double()) == Difference(0.0, 0.0, False)
    assert difference(one, one.to(torch.bfloat16) + 1) == Difference(1.0, 1 / 9, False)
    assert difference(torch.zeros(2), torch.zeros(2, dtype=torch.int32)) == Difference(0.0, 0.0, False)
