"""Rotary position embedding against its formula."""

import pytest
import torch
from rounding import DTYPES, assert_rounded, random
from torch import Tensor

from megalite_kernels import rope

LENGTH, BATCH, HEADS, WIDTH = 11, 2, 3, 16


def _angles(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """In float32 at least, as the decoder passes them."""
    turns = torch.arange(LENGTH, dtype=torch.float64)[:, None, None, None] * 100.0 ** (
        -torch.arange(WIDTH // 2) / (WIDTH // 2)
    )
    wide = torch.promote_types(dtype, torch.float32)
    return turns.cos().to(wide), turns.sin().to(wide)


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Every pair (i, i + e/2) as a complex number, multiplied by its phase."""
    half = x.shape[-1] // 2
    turned = torch.complex(x[..., :half].double(), x[..., half:].double())
    turned = turned * torch.complex(cos.double(), sin.double())
    return torch.cat((turned.real, turned.imag), -1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_forward_and_backward(dtype: torch.dtype) -> None:
    cos, sin = _angles(dtype)
    x = random(LENGTH, BATCH, HEADS, WIDTH, dtype=dtype, seed=0).requires_grad_()
    grad = random(LENGTH, BATCH, HEADS, WIDTH, dtype=dtype, seed=1)
    y = rope(x, cos, sin)
    y.backward(grad)
    assert y.dtype == dtype
    for found, value, turned in ((y, x.detach(), _turn(x.detach(), cos, sin)), (x.grad, grad, _turn(grad, cos, -sin))):
        half = WIDTH // 2
        magnitude = value[..., :half].double().abs() + value[..., half:].double().abs()
        assert_rounded(found.detach(), turned, magnitude.repeat(1, 1, 1, 2), outer=3, inner=4)


def test_gradients_by_differences() -> None:
    cos, sin = _angles(torch.float64)
    x = random(LENGTH, 1, 2, WIDTH, dtype=torch.float64, seed=0).requires_grad_()
    assert torch.autograd.gradcheck(rope, (x, cos, sin))


def test_input_is_left_alone_and_position_zero_is_not_turned() -> None:
    cos, sin = _angles(torch.float32)
    x = random(LENGTH, BATCH, HEADS, WIDTH, dtype=torch.float32, seed=0)
    before = x.clone()
    y = rope(x, cos, sin)
    assert torch.equal(x, before)
    assert torch.equal(y[0], x[0])


def test_every_sequence_may_have_positions_of_its_own() -> None:
    cos, sin = _angles(torch.float64)
    x = random(LENGTH, BATCH, HEADS, WIDTH, dtype=torch.float64, seed=0)
    at = torch.stack((torch.arange(LENGTH), torch.arange(LENGTH).flip(0)), dim=1)  # s b
    y = rope(x, cos[at, 0], sin[at, 0])
    assert torch.equal(y[:, 0], rope(x, cos, sin)[:, 0])
    assert torch.equal(y[:, 1], rope(x.flip(0), cos, sin).flip(0)[:, 1])


def test_products_depend_on_the_distance_alone() -> None:
    cos, sin = _angles(torch.float64)
    q, k = (random(1, 1, 1, WIDTH, dtype=torch.float64, seed=seed).expand(LENGTH, 1, 1, WIDTH) for seed in (0, 1))
    scores = torch.einsum("sbhe,tbhe->st", rope(q, cos, sin), rope(k, cos, sin))
    for distance in range(-LENGTH + 1, LENGTH):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=0, atol=1e-13)
