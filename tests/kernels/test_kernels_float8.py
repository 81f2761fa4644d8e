"""Casts to 8 bits, in PyTorch and in kernels, against all numbers that 8 bits can hold."""

from itertools import pairwise

import pytest
import torch
from rounding import DEVICE, random
from torch import Tensor

from megalite_kernels.backend import Backend
from megalite_kernels.float8 import ACTIVATION, GRADIENT, amax, cast, scale_for, transpose

BACKENDS: list[Backend] = ["torch", "triton"]
KINDS = {ACTIVATION: (4, 3, 7, 448.0), GRADIENT: (5, 2, 15, 57344.0)}  # bits of exponent, of mantissa, bias, largest
ONE = torch.ones(())


def numbers(kind: torch.dtype) -> list[float]:
    """The finite numbers from 0 on, in the order of their bits, by the definition of the format (arXiv 2209.05433)."""
    _, mantissa, bias, largest = KINDS[kind]
    found = []
    for bits in range(128):
        exponent, fraction = bits >> mantissa, (bits & ((1 << mantissa) - 1)) / (1 << mantissa)
        found.append((1 + fraction) * 2.0 ** (exponent - bias) if exponent else fraction * 2.0 ** (1 - bias))
    return found[: found.index(largest) + 1]


def bits_of(values: list[float], kind: torch.dtype, backend: Backend, dtype: torch.dtype = torch.float32) -> list[int]:
    x = torch.tensor([values], dtype=torch.float64).to(dtype).to(DEVICE)
    assert x.tolist() == [values] or any(value != value for value in values)
    (rows,) = cast(x, kind, ONE.to(DEVICE), backend=backend)
    return rows.view(torch.uint8)[0].tolist()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_every_number_keeps_its_bits_and_ties_go_to_the_even_one(
    kind: torch.dtype, dtype: torch.dtype, backend: Backend
) -> None:
    exact = numbers(kind)
    assert bits_of(exact, kind, backend, dtype) == list(range(len(exact)))
    assert bits_of([-value for value in exact], kind, backend, dtype) == [128 + bit for bit in range(len(exact))]
    middles = [(low + high) / 2 for low, high in pairwise(exact)]
    assert bits_of(middles, kind, backend, dtype) == [bit + bit % 2 for bit in range(len(middles))]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_nearest_number_is_taken(kind: torch.dtype, backend: Backend) -> None:
    exact = numbers(kind)
    near = [(low + high) / 2 * (1 + sign * 2**-18) for low, high in pairwise(exact) for sign in (-1, 1)]
    assert bits_of(near, kind, backend) == [bit + up for bit in range(len(exact) - 1) for up in (0, 1)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_too_large_becomes_the_largest_and_nan_stays(kind: torch.dtype, backend: Backend) -> None:
    last = len(numbers(kind)) - 1
    large = [2.0**16, 2.0**17, 2.0**127, torch.inf]
    assert bits_of(large, kind, backend) == [last] * 4
    assert bits_of([-value for value in large], kind, backend) == [128 + last] * 4
    assert {bit & 127 for bit in bits_of([torch.nan, -torch.nan], kind, backend)} == {127}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(1, 1), (16, 48), (130, 67), (257, 3)])
def test_kernels_are_the_reference_in_both_layouts(shape: tuple[int, int], kind: torch.dtype) -> None:
    x = random(*shape, dtype=torch.bfloat16, seed=0)
    scale = scale_for(amax(x), kind)
    (expected,) = cast(x, kind, scale, backend="torch")
    rows, columns = cast(x, kind, scale, scale, "triton")
    (alone,) = cast(x, kind, None, scale, "triton")
    assert same(rows, expected)
    assert same(columns, expected.t())
    assert same(alone, columns)
    assert same(transpose(rows, "triton"), columns)
    assert columns.is_contiguous()


def test_rows_may_be_parts_of_wider_ones() -> None:
    x = random(40, 96, dtype=torch.bfloat16, seed=0)[:, 32:64]
    (rows,) = cast(x, ACTIVATION, ONE.to(DEVICE), backend="triton")
    assert same(rows, cast(x, ACTIVATION, ONE.to(DEVICE), backend="torch")[0])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(1, 1), (130, 67), (257, 3)])
def test_rows_and_columns_may_have_scales_of_their_own(shape: tuple[int, int], kind: torch.dtype) -> None:
    x = random(*shape, dtype=torch.bfloat16, seed=0) * torch.arange(1, shape[0] + 1, device=DEVICE)[:, None] ** 3
    of_rows, of_columns = (scale_for(amax(x, dim), kind) for dim in (-1, 0))
    assert (of_rows.shape, of_columns.shape) == ((shape[0], 1), (1, shape[1]))
    rows, columns = cast(x, kind, of_rows, of_columns, "triton")
    assert same(rows, torch.cat([cast(row, kind, scale_for(amax(row), kind))[0] for row in x.split(1)]))
    turned = [cast(column, kind, scale_for(amax(column), kind))[0].t() for column in x.split(1, 1)]
    assert same(columns, torch.cat(turned))
    for scales, expected in (((of_rows, None), rows), ((None, of_columns), columns)):
        for backend in BACKENDS:
            assert same(cast(x, kind, *scales, backend)[0], expected)


def same(x: Tensor, y: Tensor) -> bool:
    return torch.equal(x.view(torch.uint8), y.contiguous().view(torch.uint8))


@pytest.mark.parametrize("kind", KINDS)
def test_a_scale_is_the_largest_power_of_2_that_fits(kind: torch.dtype) -> None:
    largest = KINDS[kind][3]
    sizes = torch.tensor([2.0**-20, 0.3, 1.0, 1.75, 1.7500001, 448.0, 448.00003, 3e38])
    scales = scale_for(sizes, kind)
    mantissas, _ = torch.frexp(scales)
    assert mantissas.unique().tolist() == [0.5]
    assert ((scales * sizes).double() <= largest).all()
    assert ((scales * sizes).double() * 2 > largest).all()
    tiny = scale_for(torch.zeros(()), kind)
    assert 0 < tiny < torch.inf
    assert 1 / tiny > 0


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_what_is_not_finite_comes_back_as_nan(bad: float) -> None:
    x = torch.tensor([[1.0, bad]])
    scale = scale_for(amax(x), ACTIVATION)
    (rows,) = cast(x, ACTIVATION, scale)
    assert (rows.float() / scale).isnan().any()


def test_amax() -> None:
    assert amax(torch.tensor([[1.0, -3.0]], dtype=torch.bfloat16)).item() == 3.0
    assert amax(torch.zeros(0, 4)).item() == 0.0
    assert amax(torch.tensor([torch.nan, 1.0])).isnan()
    x = torch.tensor([[1.0, -3.0], [torch.nan, 2.0]])
    assert torch.equal(amax(x, 0).isnan(), torch.tensor([[True, False]]))
    assert amax(x, -1)[0].item() == amax(x, 0)[0, 1].item() == 3.0
    assert torch.equal(amax(torch.zeros(0, 4), 0), torch.zeros(1, 4))


def test_registered_ops() -> None:
    """Their other checks compare numbers, which PyTorch cannot do in 8 bits."""
    x, checks = random(32, 48, dtype=torch.bfloat16, seed=0), ("test_autograd_registration", "test_faketensor")
    for op, inputs in (
        ("float8_cast", (x, ACTIVATION, ONE.to(DEVICE), ONE.to(DEVICE).clone())),
        ("float8_transpose", (x.to(ACTIVATION),)),
    ):
        torch.library.opcheck(getattr(torch.ops.megalite, op).default, inputs, test_utils=checks)
