"""SwiGLU against its formula."""

import pytest
import torch
from rounding import DTYPES, assert_rounded, random

from megalite_kernels import swiglu

SHAPE = (5, 3, 32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_forward_and_backward(dtype: torch.dtype) -> None:
    gate, up, grad = (random(*SHAPE, dtype=dtype, seed=seed, scale=3.0) for seed in range(3))
    y = swiglu(gate.requires_grad_(), up.requires_grad_())
    y.backward(grad)

    g, u, dy = gate.detach().double(), up.detach().double(), grad.double()
    sigmoid = 1 / (1 + torch.exp(-g))
    silu = g * sigmoid
    assert y.dtype == dtype
    assert_rounded(y.detach(), silu * u, (silu * u).abs(), outer=2, inner=8)
    assert_rounded(up.grad, silu * dy, (silu * dy).abs(), outer=2, inner=8)
    slope, magnitude = sigmoid * (1 + g * (1 - sigmoid)), sigmoid * (1 + g.abs() * (1 - sigmoid))
    assert_rounded(gate.grad, dy * u * slope, (dy * u).abs() * magnitude, outer=2, inner=16)


def test_gradients_by_differences() -> None:
    gate, up = (random(2, 5, dtype=torch.float64, seed=seed).requires_grad_() for seed in range(2))
    assert torch.autograd.gradcheck(swiglu, (gate, up))


def test_inputs_and_incoming_gradient_are_left_alone() -> None:
    gate, up, grad = (random(4, 8, dtype=torch.float32, seed=seed) for seed in range(3))
    before = [x.clone() for x in (gate, up, grad)]
    swiglu(gate.requires_grad_(), up.requires_grad_()).backward(grad)
    for x, old in zip((gate, up, grad), before, strict=True):
        assert torch.equal(x.detach(), old)


def test_extreme_gates() -> None:
    gate = torch.tensor([-200.0, 200.0], requires_grad=True)
    y = swiglu(gate, torch.ones(2))
    y.sum().backward()
    assert y.tolist() == [0.0, 200.0]
    assert gate.grad is not None
    assert gate.grad.tolist() == [0.0, 1.0]
