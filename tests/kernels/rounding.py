"""Error bounds for floating-point tests."""

import torch
from torch import Tensor

UNITS = {dtype: torch.finfo(dtype).eps / 2 for dtype in (torch.bfloat16, torch.float32, torch.float64)}
DTYPES = [torch.bfloat16, torch.float32, torch.float64]


def assert_rounded(found: Tensor, exact: Tensor, magnitude: Tensor, outer: int, inner: int) -> None:
    """Every element is as near the exact one as its roundings allow (Higham 2002, §3.1).

    exact: float64, from the same inputs. magnitude: sum of the absolute values of the terms it is made of. outer:
    how often a term is rounded to `found`'s data type on its way; inner: to float32 or wider, at least, which is
    what sums are kept in, so it grows with their length.
    """
    wide = torch.promote_types(found.dtype, torch.float32)
    bound = magnitude.double() * (outer * UNITS[found.dtype] + inner * UNITS[wide])
    excess = ((found.double() - exact).abs() - bound).max().item()
    assert found.shape == exact.shape
    assert excess <= 0, f"outside the bound by {excess:.1e}"


def random(*shape: int, dtype: torch.dtype, seed: int, scale: float = 1.0) -> Tensor:
    """Normal values, the same in every data type up to rounding."""
    return (scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)).to(dtype)
