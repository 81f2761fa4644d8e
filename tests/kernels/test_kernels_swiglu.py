"""SwiGLU and GEGLU, in PyTorch and in kernels, against its formula."""

from collections.abc import Callable

import pytest
import torch
from exact import assert_swiglu
from hypothesis import given, settings
from hypothesis import strategies as st
from rounding import DEVICE, DTYPES, far_apart, random
from torch import Tensor

from megalite_kernels import swiglu, swiglu_of_halves
from megalite_kernels.backend import Backend
from megalite_kernels.swiglu import Activation, bytes_moved, reference

BACKENDS = ["torch", "triton"]
ACTIVATIONS = ["silu", "gelu"]


def _check(shape: tuple[int, ...], dtype: torch.dtype, backend: Backend, activation: Activation) -> None:
    gate, up, grad = (random(*shape, dtype=dtype, seed=seed, scale=3.0) for seed in range(3))
    y = swiglu(gate.requires_grad_(), up.requires_grad_(), backend, activation)
    y.backward(grad)
    assert_swiglu(y.detach(), gate.grad, up.grad, gate.detach(), up.detach(), grad, activation)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 3, 32), (1, 1), (3, 1000), (2, 4099)])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_forward_and_backward(
    activation: Activation, shape: tuple[int, ...], dtype: torch.dtype, backend: Backend
) -> None:
    _check(shape, dtype, backend, activation)


@settings(max_examples=12)
@given(
    shape=st.lists(st.integers(1, 40), min_size=1, max_size=2),
    dtype=st.sampled_from(DTYPES),
    activation=st.sampled_from(ACTIVATIONS),
)
def test_any_shape(shape: list[int], dtype: torch.dtype, activation: Activation) -> None:
    _check(tuple(shape), dtype, "triton", activation)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_halves_of_one_tensor_are_gated_as_apart(activation: Activation, backend: Backend) -> None:
    """To the last bit."""
    both, grad = (
        random(3, 2, 80, dtype=torch.float32, seed=0, scale=3.0).requires_grad_(),
        random(3, 2, 40, dtype=torch.float32, seed=1),
    )
    halves = [half.detach().requires_grad_() for half in both.chunk(2, dim=-1)]
    y, expected = swiglu_of_halves(both, backend, activation), swiglu(*halves, backend, activation)
    assert torch.equal(y, expected)
    (found,), grads = (torch.autograd.grad(*given, grad) for given in ((y, [both]), (expected, halves)))
    assert torch.equal(found, torch.cat(grads, dim=-1))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_by_differences(activation: Activation, backend: Backend) -> None:
    gate, up = (random(2, 5, dtype=torch.float64, seed=seed).requires_grad_() for seed in range(2))
    assert torch.autograd.gradcheck(swiglu, (gate, up, backend, activation))


def test_gelu_is_that_of_pytorch() -> None:
    gate, up = (random(2, 5, dtype=torch.float64, seed=seed, scale=3.0) for seed in range(2))
    expected = torch.nn.functional.gelu(gate, approximate="tanh") * up
    torch.testing.assert_close(swiglu(gate, up, "triton", "gelu"), expected, rtol=1e-13, atol=1e-13)


def test_registered_ops() -> None:
    gate, up = (random(3, 40, dtype=torch.float32, seed=seed).requires_grad_() for seed in range(2))
    torch.library.opcheck(torch.ops.megalite.swiglu.default, (gate, up, True))
    torch.library.opcheck(
        torch.ops.megalite.swiglu_of_halves.default, (torch.cat((gate, up), -1).detach().requires_grad_(), True)
    )
    torch.library.opcheck(torch.ops.megalite.swiglu_backward.default, (gate.detach(), up.detach(), up.detach(), True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_inputs_and_incoming_gradient_are_left_alone(backend: Backend) -> None:
    gate, up, grad = (random(4, 8, dtype=torch.float32, seed=seed) for seed in range(3))
    before = [x.clone() for x in (gate, up, grad)]
    swiglu(gate.requires_grad_(), up.requires_grad_(), backend).backward(grad)
    for x, old in zip((gate, up, grad), before, strict=True):
        assert torch.equal(x.detach(), old)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_extreme_gates(activation: Activation, backend: Backend) -> None:
    gate = torch.tensor([-200.0, 200.0], device=DEVICE, requires_grad=True)
    y = swiglu(gate, torch.ones(2, device=DEVICE), backend, activation)
    y.sum().backward()
    assert y.tolist() == [0.0, 200.0]
    assert gate.grad is not None
    assert gate.grad.tolist() == [0.0, 1.0]


@pytest.mark.parametrize("cut", [lambda x: x[..., :5], lambda x: x[..., ::2], lambda x: x.transpose(0, 1)])
def test_strided(cut: Callable[[Tensor], Tensor]) -> None:
    gate, up, dy = (cut(random(7, 4, 10, dtype=torch.float64, seed=seed)).requires_grad_() for seed in range(3))
    y = swiglu(gate, up, "triton")
    torch.testing.assert_close(y, reference(gate, up), rtol=1e-13, atol=1e-13)
    expected = torch.autograd.grad(reference(gate, up), (gate, up), dy)
    torch.testing.assert_close(torch.autograd.grad(y, (gate, up), dy), expected, rtol=1e-13, atol=1e-13)


def test_halves_of_one_tensor_are_read_where_they_are() -> None:
    both = random(6, 20, dtype=torch.float32, seed=0)
    gate, up = both.chunk(2, dim=1)
    torch.testing.assert_close(swiglu(gate, up, "triton"), reference(gate, up))


def test_rows_farther_apart_than_int32_counts() -> None:
    near = [random(3, 8, dtype=torch.bfloat16, seed=seed) for seed in range(3)]
    far = far_apart(*near)
    assert torch.equal(swiglu(*far[:2], "triton"), swiglu(*near[:2], "triton"))
    backward = torch.ops.megalite.swiglu_backward
    assert torch.equal(backward(*far, False), backward(*near, False))


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_elements(backend: Backend) -> None:
    for shape in ((0, 8), (3, 0)):
        gate = torch.empty(shape, device=DEVICE, requires_grad=True)
        swiglu(gate, torch.empty(shape, device=DEVICE), backend).sum().backward()
        assert gate.grad is not None
        assert gate.grad.shape == shape


def test_inputs_that_do_not_match() -> None:
    with pytest.raises(ValueError, match=r"gate \[2, 4\] torch.float32 and up \[4\] torch.float32 must be of one"):
        swiglu(torch.ones(2, 4), torch.ones(4))


@pytest.mark.parametrize("backend", BACKENDS)
def test_tensors_without_halves(backend: Backend) -> None:
    with pytest.raises(ValueError, match=r"\[2, 5\] has no halves; its last size must be even"):
        swiglu_of_halves(torch.ones(2, 5, device=DEVICE), backend)


def test_bytes_moved() -> None:
    """The floors that are published for 8192 tokens of 14336 features in bfloat16."""
    forward, backward = bytes_moved(8192, 14336, torch.bfloat16)
    assert (forward / 1e6, backward / 1e6) == (pytest.approx(705, abs=1), pytest.approx(1174, abs=1))
