"""Newton–Schulz: what it does to singular values, and that torch.optim.Muon does the same."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz

from megalite.optim.newton_schulz import COEFFICIENTS, EPS, newton_schulz, scale, working_dtype

SIZES = st.integers(1, 24)


def matrix(rows: int, columns: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows * 100 + columns)).to(dtype)


def by_svd(matrix: Tensor, steps: int = 5) -> Tensor:
    """The same odd polynomial, of singular values alone."""
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    a, b, c = COEFFICIENTS
    s = s / s.norm()
    for _ in range(steps):
        s = a * s + b * s**3 + c * s**5
    return u @ s.diag() @ v


@given(SIZES, SIZES, st.integers(1, 8))
def test_only_singular_values_change(rows: int, columns: int, steps: int) -> None:
    x = matrix(rows, columns)
    # Every step can make a rounding 3.4445 times as large.
    noise = 1e-14 * 3.5**steps
    torch.testing.assert_close(newton_schulz(x, steps), by_svd(x, steps), rtol=0, atol=noise)


@given(SIZES, SIZES)
def test_singular_values_come_near_to_one(rows: int, columns: int) -> None:
    """All that begin above 1/300 of the norm end within 0.5 to 1.3; below, they grow at most 485 times."""
    x = matrix(rows, columns)
    before = torch.linalg.svdvals(x) / x.norm()
    after = torch.linalg.svdvals(newton_schulz(x))
    assert after.max() < 1.3
    assert (after.min() > 0.5) or before.min() < 1 / 300
    u, _, v = torch.linalg.svd(x, full_matrices=False)
    if before.min() > 1 / 300:
        assert torch.linalg.matrix_norm(newton_schulz(x) - u @ v, 2) < 0.5


@given(SIZES, SIZES)
def test_in_bfloat16_it_is_bitwise_that_of_torch(rows: int, columns: int) -> None:
    x = matrix(rows, columns, torch.bfloat16)
    assert torch.equal(newton_schulz(x), _zeropower_via_newtonschulz(x, COEFFICIENTS, 5, EPS))


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (7, 7), (1, 5), (150, 130)])
def test_symmetric_products_in_kernels_are_as_near(shape: tuple[int, int]) -> None:
    """In the interpreter, which rounds float16, not bfloat16, as it should."""
    x = matrix(*shape, torch.float16)
    expected, found = by_svd(x.double(), 2), newton_schulz(x, 2, backend="triton")
    noise = 2e-3 * 3.5**2
    torch.testing.assert_close(newton_schulz(x, 2, backend="torch").double(), expected, rtol=0, atol=noise)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=noise)
    assert found.abs().max() > 10 * noise


@given(SIZES, SIZES, st.integers(0, 5))
def test_bits_do_not_depend_on_where_a_matrix_lies(rows: int, columns: int, offset: int) -> None:
    x = matrix(rows, columns)
    moved = torch.zeros(offset + x.numel(), dtype=x.dtype)[offset:].view(rows, columns).copy_(x)
    assert torch.equal(newton_schulz(x), newton_schulz(moved))


@pytest.mark.parametrize("shape", [(1, 1), (1, 5), (5, 1), (3, 3)])
def test_nothing_stays_nothing(shape: tuple[int, int]) -> None:
    assert not newton_schulz(torch.zeros(shape)).any()


def test_the_matrix_is_left_alone() -> None:
    x = matrix(5, 3)
    newton_schulz(x)
    assert torch.equal(x, matrix(5, 3))


@given(SIZES, SIZES)
def test_scales_are_those_of_torch(rows: int, columns: int) -> None:
    for ours, theirs in (("match_rms_adamw", "match_rms_adamw"), ("spectral", "original")):
        assert scale(ours, rows, columns) == _adjust_lr(1.0, theirs, torch.Size((rows, columns)))


def test_working_types() -> None:
    single, double = torch.zeros(1), torch.zeros(1, dtype=torch.float64)
    for device, narrow in (("cpu", torch.float32), ("cuda", torch.bfloat16)):
        assert working_dtype(double, torch.device(device)) == torch.float64
        assert working_dtype(single, torch.device(device)) == narrow
