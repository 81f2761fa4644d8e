"""Tokens spread over the rows of experts, and collected from them, in PyTorch and in kernels."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rounding import DEVICE, DTYPES, assert_rounded, far_apart, numbers_below, random
from torch import Tensor

from megalite_kernels import collect_rows, spread_rows
from megalite_kernels.backend import USES_INTERPRETER, Backend
from megalite_kernels.routed_rows import bytes_moved

BACKENDS = ["torch", "triton"]
EXPERTS = {  # by name, of tokens and choices
    "any": lambda tokens, choices: numbers_below(7, tokens, choices, seed=0),
    "all one": lambda tokens, choices: torch.full((tokens, choices), 3, device=DEVICE),
    "some empty": lambda tokens, choices: 4 * numbers_below(3, tokens, choices, seed=1) + 1,
}


def places_of(experts: Tensor) -> Tensor:
    """The places of rows that are in the order of `experts`, and of tokens where the expert is the same."""
    return experts.flatten().argsort(stable=True).argsort().view_as(experts)


def spread_exactly(x: Tensor, places: Tensor) -> Tensor:
    """One row after another."""
    rows = x.new_full((places.numel(), x.shape[-1]), torch.nan)
    for token, of_token in zip(x.flatten(0, -2), places.flatten(0, -2).tolist(), strict=True):
        for place in of_token:
            rows[place] = token
    return rows


def assert_collected(found: Tensor, rows: Tensor, places: Tensor) -> None:
    terms = rows.double()[places]
    outer = 2 if USES_INTERPRETER else 1  # Triton's interpreter does not round to bfloat16, it cuts off
    assert found.dtype == rows.dtype
    assert_rounded(found, terms.sum(-2), terms.abs().sum(-2), outer, inner=places.shape[-1])


def _check(places: Tensor, width: int, dtype: torch.dtype, backend: Backend) -> None:
    """Both, and that each is the other's gradient."""
    x = random(*places.shape[:-1], width, dtype=dtype, seed=0).requires_grad_()
    rows = random(places.numel(), width, dtype=dtype, seed=1).requires_grad_()
    spread, collected = spread_rows(x, places, backend), collect_rows(rows, places, backend)
    assert torch.equal(spread, spread_exactly(x.detach(), places))
    assert_collected(collected.detach(), rows.detach(), places)
    spread.backward(rows.detach())
    collected.backward(x.detach())
    assert x.grad is not None
    assert torch.equal(x.grad, collected)
    assert rows.grad is not None
    assert torch.equal(rows.grad, spread)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("experts", EXPERTS)
@pytest.mark.parametrize(
    ("tokens", "choices", "width"), [(5, 2, 32), (1, 1, 1), (3, 5, 4099), (41, 3, 48), (2, 8, 768)]
)
def test_spread_and_collect(
    tokens: int, choices: int, width: int, experts: str, dtype: torch.dtype, backend: Backend
) -> None:
    _check(places_of(EXPERTS[experts](tokens, choices)), width, dtype, backend)


@settings(max_examples=20)
@given(
    tokens=st.lists(st.integers(1, 12), min_size=1, max_size=3),
    choices=st.integers(1, 4),
    width=st.integers(1, 40),
    dtype=st.sampled_from(DTYPES),
)
def test_any_shape(tokens: list[int], choices: int, width: int, dtype: torch.dtype) -> None:
    _check(places_of(numbers_below(5, *tokens, choices, seed=0)), width, dtype, "triton")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_are_added_up_in_the_order_of_choices(dtype: torch.dtype) -> None:
    rows, places = random(90, 7, dtype=dtype, seed=0), places_of(EXPERTS["any"](10, 9))
    expected = torch.zeros(10, 7, dtype=dtype, device=DEVICE)
    for place in places.unbind(1):
        expected += rows[place]
    for backend in BACKENDS:
        assert torch.equal(collect_rows(rows, places, backend), expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_sums_in_16_bits_are_rounded_once(backend: Backend) -> None:
    """Of 1 and eight times a quarter of the last bit of that, in bfloat16."""
    rows = torch.full((9, 1), 2.0**-9, dtype=torch.bfloat16, device=DEVICE)
    rows[0] = 1
    assert collect_rows(rows, torch.arange(9, device=DEVICE)[None], backend).item() == 1 + 2**-6


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_by_differences(backend: Backend) -> None:
    places = places_of(EXPERTS["any"](3, 2))
    for function, count in ((spread_rows, 3), (collect_rows, 6)):
        given = random(count, 4, dtype=torch.float64, seed=0).requires_grad_()
        assert torch.autograd.gradcheck(function, (given, places, backend))


def test_registered_ops() -> None:
    places, ops = places_of(EXPERTS["any"](4, 3)).view(2, 2, 3), torch.ops.megalite
    x, rows = (random(*shape, 5, dtype=torch.bfloat16, seed=0).requires_grad_() for shape in ((2, 2), (12,)))
    torch.library.opcheck(ops.spread_rows.default, (x, places, 12))
    torch.library.opcheck(ops.collect_rows.default, (rows, places))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("count", "choices"), [(7, 3), (15, 3), (4, 1)])
def test_choices_without_rows(count: int, choices: int, dtype: torch.dtype, backend: Backend) -> None:
    """Of 5 tokens; rows that no choice has are NaN, and reach nothing."""
    taken = numbers_below(2, 5 * choices, seed=2).bool()
    taken &= taken.cumsum(0) <= count
    places = torch.where(taken, taken.cumsum(0) - 1, count).view(5, choices)
    x, number = random(5, 48, dtype=dtype, seed=0).requires_grad_(), int(taken.sum())
    rows = torch.full((count, 48), torch.nan, dtype=dtype, device=DEVICE)
    rows[:number] = random(number, 48, dtype=dtype, seed=1)
    spread, collected = (
        spread_rows(x, places, backend, count),
        collect_rows(rows.requires_grad_(), places, backend, True),
    )
    assert spread.shape == (count, 48)
    assert torch.equal(spread[:number], x.detach().repeat_interleave(choices, 0)[taken])
    padded = torch.cat([rows.detach()[:number], rows.new_zeros(1, 48)])
    assert_collected(collected.detach(), padded, places.clamp(max=number))
    spread.backward(rows.detach())
    collected.backward(x.detach())
    assert x.grad is not None
    assert torch.equal(x.grad, collected)
    assert rows.grad is not None
    assert torch.equal(rows.grad[:number], spread[:number])


@pytest.mark.parametrize(
    "cut", [lambda x: x[..., :5], lambda x: x[..., ::2], lambda x: x.T, lambda x: x[:1].expand(8, 8)]
)
def test_strided(cut: Callable[[Tensor], Tensor]) -> None:
    x = cut(random(8, 8, dtype=torch.float32, seed=0))
    places = places_of(EXPERTS["any"](3, 8)).T
    assert torch.equal(spread_rows(x, places, "triton"), spread_exactly(x, places))
    assert_collected(collect_rows(x, places_of(EXPERTS["any"](4, 2)), "triton"), x, places_of(EXPERTS["any"](4, 2)))


def test_rows_farther_apart_than_int32_counts() -> None:
    near, places = random(3, 8, dtype=torch.bfloat16, seed=0), torch.tensor([[1], [2], [0]], device=DEVICE)
    (far,) = far_apart(near)
    for function in (spread_rows, collect_rows):
        assert torch.equal(function(far, places, "triton"), function(near, places, "triton"))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("tokens", "width"), [(0, 8), (3, 0)])
def test_no_elements(tokens: int, width: int, backend: Backend) -> None:
    places = numbers_below(1, tokens, 2, seed=0)
    for function, count, made in ((spread_rows, tokens, 2 * tokens), (collect_rows, 2 * tokens, tokens)):
        given = torch.empty(count, width, device=DEVICE, requires_grad=True)
        found = function(given, places, backend)
        found.sum().backward()
        assert found.shape == (made, width)
        assert given.grad is not None
        assert given.grad.shape == given.shape


def test_inputs_that_do_not_match() -> None:
    places = torch.zeros(3, 2, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"x \[2, 8\] and places \[3, 2\] must have the same tokens"):
        spread_rows(torch.ones(2, 8), places)
    with pytest.raises(ValueError, match=r"rows \[5, 8\] must be as many as places \[3, 2\]"):
        collect_rows(torch.ones(5, 8), places)


def test_bytes_moved() -> None:
    """Those of 8192 tokens, their copies at 2 experts, and 2 places each."""
    moved = 3 * 8192 * 4096 * 2 + 2 * 8192 * 8
    assert bytes_moved(8192, 2, 4096, torch.bfloat16) == (moved, moved)
