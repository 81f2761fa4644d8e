"""SwiGLU of rows with scores, against its formula."""

import pytest
import torch
from rounding import DEVICE, DTYPES, random

from megalite_kernels import weighted_swiglu
from megalite_kernels.backend import Backend, wide_dtype
from megalite_kernels.weighted_swiglu import reference

BACKENDS = ["auto", "torch", "triton"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (5, 32), (3, 1000), (0, 8)])
def test_forward_and_backward(shape: tuple[int, int], dtype: torch.dtype, backend: Backend) -> None:
    """Every operation of PyTorch's may round once."""
    gate, up, grad = (random(*shape, dtype=dtype, seed=seed, scale=3.0) for seed in range(3))
    scores = random(shape[0], dtype=wide_dtype(dtype), seed=3)
    inputs = [x.requires_grad_() for x in (gate, up, scores)]
    y = weighted_swiglu(*inputs, backend)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    expected = reference(*exact)
    numbers, wanted = ([made, *torch.autograd.grad(made, of, grad)] for made, of in ((y, inputs), (expected, exact)))
    for number, correct, like in zip(numbers, wanted, [gate, *inputs], strict=True):
        assert number.dtype == like.dtype
        scale = correct.abs().max() if correct.numel() else 0.0
        assert torch.all((number.double() - correct).abs() <= 4 * torch.finfo(dtype).eps * scale)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_by_differences(backend: Backend) -> None:
    gate, up = (random(3, 5, dtype=torch.float64, seed=seed).requires_grad_() for seed in range(2))
    scores = random(3, dtype=torch.float64, seed=2).requires_grad_()
    assert torch.autograd.gradcheck(weighted_swiglu, (gate, up, scores, backend))


@pytest.mark.parametrize("dtype", DTYPES)
def test_inputs_and_incoming_gradient_are_left_alone(dtype: torch.dtype) -> None:
    gate, up, grad = (random(4, 8, dtype=dtype, seed=seed) for seed in range(3))
    scores = random(4, dtype=wide_dtype(dtype), seed=3)
    before = [x.clone() for x in (gate, up, scores, grad)]
    y = weighted_swiglu(*(x.requires_grad_() for x in (gate, up, scores)))
    y.backward(grad)
    for x, old in zip((gate, up, scores, grad), before, strict=True):
        assert torch.equal(x.detach(), old)


def test_a_score_of_zero_leaves_a_gradient_of_the_score_alone() -> None:
    gate, up = (random(2, 8, dtype=torch.float32, seed=seed).requires_grad_() for seed in range(2))
    scores = torch.tensor([0.0, 1.0], device=DEVICE, requires_grad=True)
    weighted_swiglu(gate, up, scores).sum().backward()
    assert not gate.grad[0].any()
    assert not up.grad[0].any()
    assert scores.grad.all()
