"""RMSNorm against its formula."""

import pytest
import torch
from rounding import DTYPES, assert_rounded, random
from torch import Tensor

from megalite_kernels import rms_norm

ROWS, WIDTH = (5, 7), 96


def _exact(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    x, weight = x.double(), weight.double()
    return x, weight, ((x * x).sum(-1, keepdim=True) / x.shape[-1] + eps) ** -0.5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("eps", [1e-6, 0.5])
def test_forward(dtype: torch.dtype, eps: float) -> None:
    x, weight = random(*ROWS, WIDTH, dtype=dtype, seed=0), random(WIDTH, dtype=dtype, seed=1)
    y = rms_norm(x, weight, eps)
    wide, scale, inverse = _exact(x, weight, eps)
    exact = wide * inverse * scale
    assert y.dtype == dtype
    assert_rounded(y, exact, exact.abs(), outer=3, inner=WIDTH + 8)


@pytest.mark.parametrize("dtype", DTYPES)
def test_backward(dtype: torch.dtype) -> None:
    x, weight = random(*ROWS, WIDTH, dtype=dtype, seed=0), random(WIDTH, dtype=dtype, seed=1)
    grad = random(*ROWS, WIDTH, dtype=dtype, seed=2)
    rms_norm(x.requires_grad_(), weight.requires_grad_(), 1e-6).backward(grad)

    wide, scale, inverse = _exact(x.detach(), weight.detach(), 1e-6)
    direct, along = grad.double() * scale * inverse, grad.double() * scale * wide
    back = wide * inverse**3 / WIDTH
    exact = direct - back * along.sum(-1, keepdim=True)
    magnitude = direct.abs() + back.abs() * along.abs().sum(-1, keepdim=True)
    assert_rounded(x.grad, exact, magnitude, outer=6, inner=2 * WIDTH + 16)
    terms = (grad.double() * wide * inverse).flatten(0, -2)
    assert_rounded(weight.grad, terms.sum(0), terms.abs().sum(0), outer=4, inner=WIDTH + len(terms) + 8)


def test_gradients_by_differences() -> None:
    x, weight = random(3, 8, dtype=torch.float64, seed=0), random(8, dtype=torch.float64, seed=1)
    assert torch.autograd.gradcheck(rms_norm, (x.requires_grad_(), weight.requires_grad_(), 1e-3))


def test_rows_of_zeros_stay_zero() -> None:
    x = torch.zeros(2, 8, requires_grad=True)
    y = rms_norm(x, torch.ones(8), 1e-5)
    y.sum().backward()
    assert torch.equal(y, torch.zeros(2, 8))
    assert x.grad is not None
    assert x.grad.isfinite().all()
