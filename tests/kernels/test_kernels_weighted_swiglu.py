"""SwiGLU of rows with scores, in PyTorch and in kernels, against its formula."""

from collections.abc import Callable

import pytest
import torch
from exact import assert_weighted_swiglu
from hypothesis import given, settings
from hypothesis import strategies as st
from rounding import DEVICE, DTYPES, far_apart, random
from torch import Tensor

from megalite_kernels import weighted_swiglu
from megalite_kernels.backend import Backend, wide_dtype
from megalite_kernels.weighted_swiglu import bytes_moved, launch_backward, launch_forward, reference

BACKENDS = ["torch", "triton"]
TERM_ROUNDINGS = {"torch": 3, "triton": 0}  # of a row's terms, to its data type, before they are added up


def inputs(rows: int, width: int, dtype: torch.dtype, scale: float = 1.0) -> list[Tensor]:
    """Gate, up and scores, which require gradients, and the gradient of what is made of them."""
    *both, grad = (random(rows, width, dtype=dtype, seed=seed, scale=scale) for seed in range(3))
    scores = random(rows, dtype=wide_dtype(dtype), seed=3)
    return [x.requires_grad_() for x in (*both, scores)] + [grad]


def _check(rows: int, width: int, dtype: torch.dtype, backend: Backend, clamped: bool) -> None:
    *given, grad = inputs(rows, width, dtype, scale=6.0 if clamped else 3.0)
    y = weighted_swiglu(*given, backend, clamped)
    y.backward(grad)
    gradients, values = [x.grad for x in given], [x.detach() for x in given]
    assert_weighted_swiglu(y.detach(), *gradients, *values, grad, TERM_ROUNDINGS[backend], clamped)


@pytest.mark.parametrize("clamped", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 32), (1, 1), (3, 1000), (2, 4099), (2, 4096), (37, 250), (3, 768)])
def test_forward_and_backward(shape: tuple[int, int], dtype: torch.dtype, backend: Backend, clamped: bool) -> None:
    _check(*shape, dtype, backend, clamped)


@settings(max_examples=20)
@given(rows=st.integers(1, 50), width=st.integers(1, 50), dtype=st.sampled_from(DTYPES), clamped=st.booleans())
def test_any_shape(rows: int, width: int, dtype: torch.dtype, clamped: bool) -> None:
    _check(rows, width, dtype, "triton", clamped)


@pytest.mark.parametrize("clamped", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_by_differences(backend: Backend, clamped: bool) -> None:
    *given, _ = inputs(2, 5, torch.float64, scale=5.0 if clamped else 1.0)
    assert torch.autograd.gradcheck(weighted_swiglu, (*given, backend, clamped))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_clamped_form_has_gradients_up_to_its_ends_and_lets_nan_through(
    dtype: torch.dtype, backend: Backend
) -> None:
    beyond = 7 + 4 * torch.finfo(dtype).eps  # the next number
    ends = torch.tensor([[-beyond, -7.0, 0.5, 7.0, beyond, torch.inf]], dtype=dtype, device=DEVICE)
    gate, up = ends.clone().requires_grad_(), ends.clone().requires_grad_()
    scores = torch.ones(1, dtype=wide_dtype(dtype), device=DEVICE)
    weighted_swiglu(gate, torch.ones_like(gate), scores, backend, clamped=True).sum().backward()
    weighted_swiglu(torch.ones_like(up), up, scores, backend, clamped=True).sum().backward()
    assert gate.grad is not None
    assert up.grad is not None
    assert (gate.grad != 0).tolist() == [[True, True, True, True, False, False]]
    assert (up.grad != 0).tolist() == [[False, True, True, True, False, False]]
    one, nan = torch.ones_like(ends), torch.full_like(ends, torch.nan)
    for both in ((nan, one), (one, nan)):
        assert weighted_swiglu(*both, scores, backend, clamped=True).isnan().all()


@pytest.mark.parametrize("clamped", [False, True])
def test_registered_ops(clamped: bool) -> None:
    *given, grad = inputs(3, 40, torch.bfloat16)
    torch.library.opcheck(torch.ops.megalite.weighted_swiglu.default, (*given, clamped))
    detached = [x.detach() for x in given]
    torch.library.opcheck(torch.ops.megalite.weighted_swiglu_backward.default, (*detached, grad, clamped))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("clamped", [False, True])
def test_inputs_and_incoming_gradient_are_left_alone(dtype: torch.dtype, backend: Backend, clamped: bool) -> None:
    every = inputs(4, 8, dtype)
    before = [x.detach().clone() for x in every]
    weighted_swiglu(*every[:3], backend, clamped).backward(every[3])
    for x, old in zip(every, before, strict=True):
        assert torch.equal(x.detach(), old)


@pytest.mark.parametrize("clamped", [False, True])
@pytest.mark.parametrize("number", [0, 3, 37])
def test_rows_beyond_a_number_on_the_device_are_left_alone(number: int, clamped: bool) -> None:
    """They are NaN, and results are what they are without them; kernels do not write there."""
    *given, grad = inputs(37, 250, torch.float32)
    rows = torch.tensor([number], dtype=torch.int32, device=DEVICE)
    wanted = weighted_swiglu(*(x[:number] for x in given), "triton", clamped)
    wanted.backward(grad[:number])
    gradients = [x.grad[:number] for x in given]
    with torch.no_grad():
        for x in (*given, grad):
            x[number:] = torch.nan
    again = [x.detach().requires_grad_() for x in given]
    ones = [torch.ones_like(x) for x in given]
    y = weighted_swiglu(*again, "triton", clamped, rows)
    y.backward(grad)
    assert torch.equal(y[:number], wanted)
    assert all(torch.equal(x.grad[:number], wanted) for x, wanted in zip(again, gradients, strict=True))
    torch.use_deterministic_algorithms(True)  # so memory that nothing is written to is NaN
    try:
        beyond = launch_forward(*ones, clamped, rows), *launch_backward(*ones, ones[0], clamped, rows)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(each[number:].isnan().all() and not each[:number].isnan().any() for each in beyond)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_score_of_zero_leaves_a_gradient_of_the_score_alone(backend: Backend) -> None:
    gate, up, _, grad = inputs(2, 8, torch.float32)
    scores = torch.tensor([0.0, 1.0], device=DEVICE, requires_grad=True)
    weighted_swiglu(gate, up, scores, backend).backward(grad)
    for x in (gate, up):
        assert x.grad is not None
        assert not x.grad[0].any()
    assert scores.grad is not None
    assert scores.grad.all()


@pytest.mark.parametrize("cut", [lambda x: x[:, :5], lambda x: x[:, ::2], lambda x: x.T, lambda x: x[:1].expand(7, -1)])
@pytest.mark.parametrize("clamped", [False, True])
def test_strided(cut: Callable[[Tensor], Tensor], clamped: bool) -> None:
    gate, up, dy = (cut(random(7, 10, dtype=torch.float64, seed=seed, scale=5.0)) for seed in range(3))
    scores = random(3 * len(gate), dtype=torch.float64, seed=3)[::3]
    given = [x.requires_grad_() for x in (gate, up, scores)]
    y, expected = weighted_swiglu(*given, "triton", clamped), reference(*given, clamped)
    torch.testing.assert_close(y, expected, rtol=1e-13, atol=1e-13)
    found, exact = (torch.autograd.grad(each, given, dy) for each in (y, expected))
    torch.testing.assert_close(found, exact, rtol=1e-13, atol=1e-13)


def test_gradients_are_halves_of_one_tensor() -> None:
    *given, grad = inputs(6, 20, torch.float32)
    of_gate, of_up, _ = torch.autograd.grad(weighted_swiglu(*given, "triton"), given, grad)
    assert of_gate.untyped_storage()._cdata == of_up.untyped_storage()._cdata
    assert [(x.storage_offset(), x.stride()) for x in (of_gate, of_up)] == [(0, (40, 1)), (20, (40, 1))]


def test_rows_farther_apart_than_int32_counts() -> None:
    gate, up, scores, dy = (x.detach() for x in inputs(3, 8, torch.bfloat16))
    far = far_apart(gate, up, dy)
    assert torch.equal(weighted_swiglu(*far[:2], scores, "triton"), weighted_swiglu(gate, up, scores, "triton"))
    backward = torch.ops.megalite.weighted_swiglu_backward
    assert all(map(torch.equal, backward(*far[:2], scores, far[2], False), backward(gate, up, scores, dy, False)))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(0, 8), (3, 0)])
def test_no_elements(shape: tuple[int, int], backend: Backend) -> None:
    *given, grad = inputs(*shape, torch.float32)
    weighted_swiglu(*given, backend).backward(grad)
    for x in given:
        assert x.grad is not None
        assert torch.equal(x.grad, torch.zeros_like(x))


@pytest.mark.parametrize(
    ("shapes", "dtype"),
    [([(2, 4), (2, 5), (2,)], torch.float32), ([(2, 4), (2, 4), (4,)], torch.float32), ([(2, 4)] * 2 + [(2,)], None)],
)
def test_inputs_that_do_not_match(shapes: list[tuple[int, ...]], dtype: torch.dtype | None) -> None:
    gate, up, scores = (torch.ones(shape, device=DEVICE) for shape in shapes)
    with pytest.raises(ValueError, match=r"weighted_swiglu: gate \[2, 4\] torch.float32 and up \[2, [45]\] torch"):
        weighted_swiglu(gate, up, scores.to(dtype or torch.float64))


def test_bytes_moved() -> None:
    """Rows of 8192 tokens at 2 experts of 14336 features each, in bfloat16: twice what `swiglu` moves, and scores."""
    forward, backward = bytes_moved(2 * 8192, 14336, torch.bfloat16)
    assert (forward / 1e6, backward / 1e6) == (pytest.approx(1409, abs=1), pytest.approx(2349, abs=1))
