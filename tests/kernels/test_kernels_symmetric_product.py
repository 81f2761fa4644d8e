"""Symmetric products: against float64, symmetric to the last bit, and the kernel only where it is wanted."""

import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rounding import DEVICE, assert_rounded, far_apart, random
from torch import Tensor

from megalite_kernels.symmetric_product import MIN_ROWS, TILE, reference, runs_in_kernel, symmetric_product

NARROW = [torch.float16, torch.bfloat16]
CUDA, CPU = torch.device("cuda"), torch.device("cpu")


def symmetric(batch: tuple[int, ...], rows: int, dtype: torch.dtype) -> Tensor:
    lower = random(*batch, rows, rows, dtype=dtype, seed=1).tril()
    return lower + lower.tril(-1).mT


def check(x: Tensor, added: Tensor | None, alpha: float = 1.0, beta: float = 1.0) -> None:
    found = symmetric_product(x, added, alpha, beta, backend="triton")
    assert torch.equal(found, found.mT)
    magnitude = reference(x.abs(), None if added is None else added.abs(), abs(alpha), abs(beta))
    expected = reference(x, added, alpha, beta)
    # The interpreter cuts bfloat16 off, which is twice a rounding.
    assert_rounded(found, expected, magnitude, outer=2, inner=x.shape[-1] + 4)
    plain = symmetric_product(x, added, alpha, beta, backend="torch")
    assert_rounded(plain, expected, magnitude, outer=4, inner=x.shape[-1] + 4)


@settings(max_examples=15, deadline=None)
@given(
    rows=st.integers(1, TILE + 40),
    depth=st.integers(1, 90),
    batch=st.sampled_from([(), (1,), (2, 1)]),
    dtype=st.sampled_from(NARROW),
    adds=st.booleans(),
    transposed=st.booleans(),
)
def test_sizes(rows: int, depth: int, batch: tuple[int, ...], dtype: torch.dtype, adds: bool, transposed: bool) -> None:
    x = (
        random(*batch, depth, rows, dtype=dtype, seed=0).mT
        if transposed
        else random(*batch, rows, depth, dtype=dtype, seed=0)
    )
    check(x, symmetric(batch, rows, dtype) if adds else None, 0.5, -1.75)


@pytest.mark.parametrize("rows", [TILE - 1, TILE, 3 * TILE + 3])
def test_tiles(rows: int) -> None:
    check(random(rows, 70, dtype=torch.float16, seed=0), symmetric((), rows, torch.float16))


def test_the_square_of_a_symmetric_matrix() -> None:
    gram = symmetric((), 150, torch.float16)
    found = symmetric_product(gram, gram, 2.0, -4.0, backend="triton")
    exact = 2 * gram.double() @ gram.double() - 4 * gram.double()
    assert_rounded(found, exact, 2 * gram.double().abs() @ gram.double().abs() + 4, outer=2, inner=160)


def test_every_tile_of_the_triangle_is_found() -> None:
    """The line of a tile comes from a root in float32, also far from the beginning."""
    number = torch.arange(3_000_000, dtype=torch.int32)
    line = ((torch.sqrt(8.0 * number + 1.0) - 1.0) / 2.0).to(torch.int32)
    line = torch.where(line * (line + 1) // 2 > number, line - 1, line)
    line = torch.where((line + 1) * (line + 2) // 2 <= number, line + 1, line)
    across = number - line * (line + 1) // 2
    assert (across >= 0).all()
    assert (across <= line).all()


def test_a_matrix_has_its_bits_in_any_batch() -> None:
    x = random(3, 140, 33, dtype=torch.bfloat16, seed=0)
    together = symmetric_product(x, backend="triton")
    for one, alone in zip(together, x, strict=True):
        assert torch.equal(one, symmetric_product(alone.contiguous(), backend="triton"))


def test_rows_beyond_32_bits_of_offset() -> None:
    x = random(4, 20, dtype=torch.float16, seed=0)
    (far,) = far_apart(x)
    assert torch.equal(symmetric_product(far, backend="triton"), symmetric_product(x, backend="triton"))


@pytest.mark.parametrize("shape", [(0, 5), (0, 3, 5), (4, 0)])
def test_nothing_to_multiply(shape: tuple[int, ...]) -> None:
    x = torch.zeros(shape, dtype=torch.float16, device=DEVICE)
    assert torch.equal(symmetric_product(x, backend="triton"), x @ x.mT)


def test_custom_op() -> None:
    x, gram = random(2, 7, 5, dtype=torch.float16, seed=0), symmetric((2,), 7, torch.float16)
    torch.library.opcheck(torch.ops.megalite.symmetric_product.default, (x, gram, 2.0, 0.5))


def test_the_kernel_runs_for_large_matrices_of_narrow_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not runs_in_kernel(MIN_ROWS, torch.bfloat16, CPU)
    module = sys.modules["megalite_kernels.symmetric_product"]
    monkeypatch.setattr(module, "use_triton", lambda backend, device: backend != "torch")
    assert runs_in_kernel(MIN_ROWS, torch.bfloat16, CUDA)
    assert not runs_in_kernel(MIN_ROWS - 1, torch.bfloat16, CUDA)
    assert not runs_in_kernel(MIN_ROWS, torch.float64, CUDA)
    assert not runs_in_kernel(MIN_ROWS, torch.bfloat16, CUDA, "torch")
    assert runs_in_kernel(1, torch.bfloat16, CUDA, "triton")
