"""Where tests of kernels make their tensors, and error bounds for floating-point tests."""

import torch
from torch import Tensor

from megalite_kernels.backend import USES_INTERPRETER

DEVICE = torch.device("cuda" if torch.cuda.is_available() and not USES_INTERPRETER else "cpu")
UNITS = {dtype: torch.finfo(dtype).eps / 2 for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)}
DTYPES = [torch.bfloat16, torch.float32, torch.float64]
APART = 2**30


def assert_rounded(found: Tensor, exact: Tensor, magnitude: Tensor, outer: int, inner: int | Tensor) -> None:
    """Every element is as near the exact one as its roundings allow (Higham 2002, §3.1).

    exact: float64, from the same inputs. magnitude: sum of the absolute values of the terms it is made of. outer:
    how often a term is rounded to `found`'s data type on its way; inner: to float32 or wider, at least, which is
    what sums are kept in, so it grows with their length. What rounds an exponent x rounds the exponential |x| times.
    Numbers below the smallest normal one are as far apart as those above it.
    """
    wide = torch.promote_types(found.dtype, torch.float32)
    subnormal = outer * UNITS[found.dtype] * torch.finfo(found.dtype).smallest_normal
    bound = magnitude.double() * (outer * UNITS[found.dtype] + inner * UNITS[wide]) + subnormal
    excess = ((found.double() - exact).abs() - bound).max().item()
    assert found.shape == exact.shape
    assert excess <= 0, f"outside the bound by {excess:.1e}"


def random(*shape: int, dtype: torch.dtype, seed: int, scale: float = 1.0) -> Tensor:
    """Normal values, the same on every device, and in every data type up to rounding."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (scale * values).to(dtype).to(DEVICE)


def numbers_below(end: int, *shape: int, seed: int) -> Tensor:
    """Whole ones from 0 on, the same on every device."""
    return torch.randint(end, shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def far_apart(*tensors: Tensor) -> list[Tensor]:
    """Copies of tensors of one shape, whose rows begin 2³⁰ elements apart: the third beyond what int32 counts.

    All of them share the memory between rows, which is reserved and, on a CPU, never touched.
    """
    size = tensors[0][0].numel()
    memory = tensors[0].new_empty((len(tensors[0]) - 1) * APART + len(tensors) * size)
    views = [memory.as_strided(x.shape, (APART, *x[0].stride()), number * size) for number, x in enumerate(tensors)]
    return [view.copy_(x) for view, x in zip(views, tensors, strict=True)]
