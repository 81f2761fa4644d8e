"""Query-key norm with rotary position embedding, in PyTorch and in kernels, against their formulas."""

from collections.abc import Callable

import pytest
import torch
from exact import assert_norm_turned, assert_norm_turned_gradients
from rotations import LAYOUTS, heads_of_any_shape
from rounding import DEVICE, DTYPES, far_apart, numbers_below, random
from torch import Tensor

from megalite_kernels import qk_norm_rope, rms_norm, rope
from megalite_kernels.backend import Backend
from megalite_kernels.qk_norm_rope import bytes_moved, reference
from megalite_kernels.rope import Layout

BACKENDS = ["torch", "triton"]
SHAPES = [(11, 2, 3, 16), (1, 1, 1, 2), (3, 1, 9, 80), (70, 1, 1, 128), (30, 2, 8, 64)]
EPS = 1e-3


def _angles(length: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    turns = random(length, 1, 1, width // 2, dtype=torch.float64, seed=9, scale=3.0)
    wide = torch.promote_types(dtype, torch.float32)
    return turns.cos().to(wide), turns.sin().to(wide)


def _check(shape: tuple[int, ...], dtype: torch.dtype, layout: Layout, backend: Backend) -> None:
    width = shape[-1]
    cos, sin = _angles(shape[0], width, dtype)
    x, dy = random(*shape, dtype=dtype, seed=0).requires_grad_(), random(*shape, dtype=dtype, seed=1)
    weight = random(width, dtype=dtype, seed=2).requires_grad_()
    y = qk_norm_rope(x, weight, cos, sin, EPS, layout=layout, backend=backend)
    y.backward(dy)
    given = x.detach(), weight.detach(), cos, sin, EPS, layout
    assert_norm_turned(y.detach(), *given)
    assert_norm_turned_gradients(x.grad, weight.grad, *given, dy)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_forward_and_backward(shape: tuple[int, ...], dtype: torch.dtype, layout: Layout, backend: Backend) -> None:
    _check(shape, dtype, layout, backend)


@heads_of_any_shape
def test_any_shape(shape: tuple[int, ...], dtype: torch.dtype, layout: Layout) -> None:
    _check(shape, dtype, layout, "triton")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_positions(backend: Backend, layout: Layout) -> None:
    """The same as one after the other, from an offset on or at each token's own position."""
    cos, sin = _angles(30, 16, torch.float64)
    x, dy = (random(11, 2, 3, 16, dtype=torch.float64, seed=seed) for seed in (0, 1))
    weight = random(16, dtype=torch.float64, seed=2).requires_grad_()
    inputs = x.requires_grad_(), weight
    for positions in (7, numbers_below(30, 2, 11, seed=3).T):
        expected = rope(rms_norm(*inputs, EPS, "torch"), cos, sin, positions, layout, "torch")
        found = qk_norm_rope(*inputs, cos, sin, EPS, positions, layout, backend)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)
        torch.testing.assert_close(reference(*inputs, cos, sin, EPS, positions, layout), expected, rtol=0, atol=1e-13)
        gradients = (torch.autograd.grad(y, inputs, dy) for y in (found, expected))
        torch.testing.assert_close(*gradients, rtol=0, atol=1e-13)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_by_differences(layout: Layout) -> None:
    cos, sin = _angles(2, 4, torch.float64)
    x = random(2, 1, 1, 4, dtype=torch.float64, seed=0).requires_grad_()
    weight = random(4, dtype=torch.float64, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(qk_norm_rope, (x, weight, cos, sin, EPS, 0, layout, "triton"))


def test_registered_op() -> None:
    cos, sin = _angles(5, 8, torch.float32)
    x = random(5, 2, 3, 8, dtype=torch.float32, seed=0).requires_grad_()
    weight = random(8, dtype=torch.float32, seed=1).requires_grad_()
    positions = torch.arange(5, device=DEVICE)[:, None].expand(-1, 2)
    forward, backward = torch.ops.megalite.qk_norm_rope.default, torch.ops.megalite.qk_norm_rope_backward.default
    for at in (None, positions):
        torch.library.opcheck(forward, (x, weight, cos, sin, EPS, at, 0, True))
    x, weight = x.detach(), weight.detach()
    torch.library.opcheck(backward, (x, weight, cos, sin, EPS, positions, 0, True, x))


@pytest.mark.parametrize("cut", [lambda x: x[..., 2:], lambda x: x[..., ::2], lambda x: x.transpose(0, 1)])
def test_strided(cut: Callable[[Tensor], Tensor]) -> None:
    x, dy = (cut(random(5, 4, 3, 12, dtype=torch.float64, seed=seed)).requires_grad_() for seed in (0, 1))
    cos, sin = _angles(len(x), x.shape[-1], torch.float64)
    weight = random(2 * x.shape[-1], dtype=torch.float64, seed=2)[::2].requires_grad_()
    found, expected = (qk_norm_rope(x, weight, cos, sin, EPS, backend=backend) for backend in ("triton", "torch"))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)
    gradients = (torch.autograd.grad(y, (x, weight), dy) for y in (found, expected))
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-13)


def test_tokens_farther_apart_than_int32_counts() -> None:
    near, dy = (random(3, 1, 2, 8, dtype=torch.bfloat16, seed=seed) for seed in (0, 1))
    (far,) = far_apart(near)
    weight = random(8, dtype=torch.bfloat16, seed=2)
    how = weight, *_angles(3, 8, torch.bfloat16), EPS, None, 0, False
    ops = torch.ops.megalite
    assert torch.equal(ops.qk_norm_rope(far, *how), ops.qk_norm_rope(near, *how))
    assert all(map(torch.equal, *(ops.qk_norm_rope_backward(x, *how, dy) for x in (far, near))))


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_tokens(backend: Backend) -> None:
    cos, sin = _angles(4, 8, torch.float32)
    x, weight = (torch.ones(shape, device=DEVICE, requires_grad=True) for shape in ((0, 2, 3, 8), (8,)))
    y = qk_norm_rope(x, weight, cos, sin, EPS, 3, backend=backend)
    y.sum().backward()
    assert y.shape == x.shape
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.zeros_like(weight))


@pytest.mark.filterwarnings("ignore:divide by zero")
def test_heads_of_zeros_do_not_disturb_others_without_eps() -> None:
    """Rows that a block has too many are zeros as well, whose mean square has no inverse."""
    cos, sin = _angles(2, 8, torch.float64)
    x = random(2, 1, 3, 8, dtype=torch.float64, seed=0).requires_grad_()
    weight = random(8, dtype=torch.float64, seed=1).requires_grad_()
    qk_norm_rope(x, weight, cos, sin, 0.0, backend="triton").sum().backward()
    assert x.grad is not None
    assert weight.grad is not None
    assert x.grad.isfinite().all()
    assert weight.grad.isfinite().all()


def test_arguments_that_do_not_match() -> None:
    cos, sin = _angles(5, 8, torch.float32)
    with pytest.raises(ValueError, match="tokens 3 to 8 lie outside tables of 5 positions"):
        qk_norm_rope(torch.ones(5, 1, 1, 8), torch.ones(8), cos, sin, EPS, 3)


def test_bytes_moved() -> None:
    forward, backward = bytes_moved(8192, 64, 128, torch.bfloat16)
    assert (forward, backward) == (2 * 8192 * 64 * 128 * 2, 3 * 8192 * 64 * 128 * 2)
