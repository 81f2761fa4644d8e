"""Casts to MXFP8, in PyTorch and in kernels, against the definitions of their formats."""

from fractions import Fraction

import pytest
import torch
from rounding import DEVICE, DTYPES, random
from test_kernels_float8 import BACKENDS, numbers, same
from torch import Tensor

from megalite_kernels.backend import Backend
from megalite_kernels.float8 import ACTIVATION
from megalite_kernels.mxfp8 import BLOCK, cast, factors, tiled, wide

SIZES = [(32, 32), (96, 160), (160, 288)]  # parts of a program's tile, and of several
EXACT = torch.tensor(numbers(ACTIVATION), dtype=torch.float64)


def spread(*shape: int, dtype: torch.dtype) -> Tensor:
    """Numbers of many exponents."""
    exponents = 6 * random(*shape, dtype=torch.float64, seed=1)
    return (random(*shape, dtype=torch.float64, seed=0) * exponents.exp()).to(dtype)


def scale_of(largest: float, backend: Backend, dtype: torch.dtype = torch.float32) -> int:
    """The byte of the scale of a block with that largest number; all its numbers have the same by columns."""
    x = torch.zeros(BLOCK, BLOCK, dtype=dtype, device=DEVICE)
    x[3, 5] = -largest
    _, of_rows, _, of_columns = cast(x, by_rows=True, by_columns=True, backend=backend)
    assert of_rows[3].item() == of_columns[5].item()
    assert of_rows.sum() == of_columns.sum() == of_rows[3].item()  # blocks of zeros have the least
    return int(of_rows[3].item())


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_scale_is_the_smallest_power_of_2_that_fits(backend: Backend) -> None:
    above = 448 * (1 + 2**-23)
    for largest in (1.0, 448.0, above, 1e-30, 3e38, 2.0**-118 * 448, 2.0**-118 * above):
        exponent, exact = scale_of(largest, backend) - 127, Fraction(torch.tensor(largest).item())
        assert exact <= 448 * Fraction(2) ** exponent
        assert exact > 448 * Fraction(2) ** (exponent - 1)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("largest", "code"),
    [(0.0, 0), (2.0**-149, 0), (2.0**-127 * 448, 0), (2.0**-126 * 448, 1), (torch.inf, 255), (torch.nan, 255)],
)
def test_scales_at_the_ends_of_their_range(largest: float, code: int, backend: Backend) -> None:
    assert scale_of(largest, backend) == code
    assert factors(torch.tensor([code], dtype=torch.uint8)).item() == pytest.approx(
        torch.nan if code == 255 else 2.0 ** (code - 127), rel=0, abs=0, nan_ok=True
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_are_the_nearest_that_a_block_can_hold(dtype: torch.dtype) -> None:
    x = spread(96, 64, dtype=dtype)
    rows, of_rows, columns, of_columns = cast(x, by_rows=True, by_columns=True)
    for exact, values, scales in ((x, rows, of_rows), (x.t(), columns, of_columns)):
        scale = factors(scales).double().repeat_interleave(BLOCK, -1)
        scaled = exact.double() / scale
        nearest = (EXACT[:, None, None] - scaled.abs().cpu()).abs().amin(0)
        assert torch.equal((values.double() - scaled).abs().cpu(), nearest)
        assert torch.equal(wide(values, scales).double(), values.double() * scale)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_a_block_with_what_is_not_finite_becomes_nan(bad: float, backend: Backend) -> None:
    x = torch.ones(64, 64, device=DEVICE)
    x[40, 5] = bad
    rows, of_rows, columns, of_columns = cast(x, by_rows=True, by_columns=True, backend=backend)
    for values, scales, row, block in ((rows, of_rows, 40, 0), (columns, of_columns, 5, 1)):
        found = wide(values, scales).isnan()
        assert found[row, block * BLOCK : (block + 1) * BLOCK].all()
        assert found.sum() == BLOCK


@pytest.mark.parametrize("in_tiles", [False, True])
@pytest.mark.parametrize("shape", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels_are_the_reference_in_both_layouts(dtype: torch.dtype, shape: tuple[int, int], in_tiles: bool) -> None:
    x = spread(*shape, dtype=dtype)
    expected = cast(x, None, True, True, in_tiles, "torch")
    found = cast(x, None, True, True, in_tiles, "triton")
    alone = [*cast(x, None, True, False, in_tiles, "triton"), *cast(x, None, False, True, in_tiles, "triton")]
    assert len(found) == len(expected) == len(alone) == 4
    for each, of_both, of_one in zip(expected, found, alone, strict=True):
        assert same(of_both, each)
        assert same(of_one, each)


def test_kernels_take_rows_that_are_parts_of_wider_ones_and_rows_that_are_no_blocks() -> None:
    x = spread(40, 96, dtype=torch.bfloat16)[:, 32:64]
    for found, expected in zip(*(cast(x, by_rows=True, backend=backend) for backend in BACKENDS), strict=True):
        assert same(found, expected)


@pytest.mark.parametrize("shape", SIZES)
def test_what_is_narrow_by_rows_is_cast_by_columns_as_what_it_stands_for(shape: tuple[int, int]) -> None:
    rows, of_rows = cast(spread(*shape, dtype=torch.bfloat16), by_rows=True)
    rows.view(torch.uint8)[:2] = torch.arange(2 * shape[1], device=DEVICE).view(2, -1) % 256  # all bits of e4m3
    of_rows[1] = 0
    expected = cast(wide(rows, of_rows), by_columns=True, backend="torch")
    for backend in BACKENDS:
        for found, each in zip(cast(rows, of_rows, by_columns=True, backend=backend), expected, strict=True):
            assert same(found, each)


def test_tiles_are_the_layout_of_the_documentation() -> None:
    """The offset of a scale, as cuBLAS documents it for the row `outer` of the matrix and the block `inner` of it."""
    rows, blocks = 200, 6
    scales = torch.arange(1, rows * blocks + 1, device=DEVICE).view(rows, blocks) % 251 + 1
    found, tiles = tiled(scales.to(torch.uint8)), 2  # in a row of tiles
    assert found.shape == (2 * tiles * 128 * 4,)
    known = torch.zeros_like(found, dtype=torch.bool)
    for outer in range(rows):
        for inner in range(blocks):
            of_tile = (outer // 128 * tiles + inner // 4) * 128 * 4
            offset = of_tile + (outer % 32) * 16 + (outer % 128 // 32) * 4 + inner % 4
            assert found[offset] == scales[outer, inner]
            known[offset] = True
    assert not found[~known].any()


def test_parts_of_blocks_are_refused() -> None:
    x = torch.zeros(48, 64)
    cast(x, by_rows=True)
    with pytest.raises(ValueError, match="48 × 64 has no whole blocks of 32"):
        cast(x, by_columns=True)
    with pytest.raises(ValueError, match="64 × 48 has no whole blocks of 32"):
        cast(x.t(), by_rows=True)


def test_registered_op() -> None:
    """Its other checks compare numbers, which PyTorch cannot do in 8 bits."""
    x, checks = random(32, 64, dtype=torch.bfloat16, seed=0), ("test_autograd_registration", "test_faketensor")
    for in_tiles in (False, True):
        torch.library.opcheck(torch.ops.megalite.mxfp8_cast.default, (x, None, True, True, in_tiles), test_utils=checks)
