"""RMSNorm, alone and of a sum, in PyTorch and in kernels, against its formula."""

from collections.abc import Callable

import pytest
import torch
from exact import assert_norm, assert_norm_gradients
from hypothesis import given, settings
from hypothesis import strategies as st
from rounding import DEVICE, DTYPES, assert_rounded, far_apart, random
from torch import Tensor

from megalite_kernels import add_rms_norm, rms_norm
from megalite_kernels.add_rms_norm import bytes_moved as bytes_moved_with_add
from megalite_kernels.backend import Backend
from megalite_kernels.rms_norm import backward_block, bytes_moved, forward_block, launch_backward, reference

BACKENDS = ["torch", "triton"]
# Several rows a program, programs without rows of their own, one row, a row in tiles of which the last is cut.
SHAPES = [(5, 7, 96), (1, 1), (129, 64), (1, 5000), (2, 12001), (2, 16384)]


def _check(shape: tuple[int, ...], dtype: torch.dtype, eps: float, backend: Backend) -> None:
    x, dy = (random(*shape, dtype=dtype, seed=seed).requires_grad_(seed == 0) for seed in (0, 2))
    weight = random(shape[-1], dtype=dtype, seed=1).requires_grad_()
    y = rms_norm(x, weight, eps, backend)
    y.backward(dy)
    assert_norm(y.detach(), x.detach(), weight.detach(), eps)
    assert_norm_gradients(x.grad, weight.grad, x.detach(), weight.detach(), eps, dy)


def _check_with_add(shape: tuple[int, ...], dtype: torch.dtype, eps: float, backend: Backend) -> None:
    x, y, dnormal, dtotal = (random(*shape, dtype=dtype, seed=seed) for seed in (0, 1, 2, 3))
    weight = random(shape[-1], dtype=dtype, seed=4).requires_grad_()
    normal, total = add_rms_norm(x.requires_grad_(), y.requires_grad_(), weight, eps, backend)
    torch.autograd.backward((normal, total), (dnormal, dtotal))
    exact = x.detach().double() + y.detach().double()
    assert_rounded(total.detach(), exact, exact.abs(), outer=2, inner=1)
    rounded = total.detach(), weight.detach(), eps
    assert_norm(normal.detach(), *rounded)
    for dx in (x.grad, y.grad):
        assert_norm_gradients(dx, weight.grad, *rounded, dnormal, dtotal.double())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype, backend: Backend) -> None:
    _check(shape, dtype, 1e-6, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_eps(backend: Backend) -> None:
    _check((3, 8), torch.float64, 0.5, backend)


@settings(max_examples=20)
@given(rows=st.integers(1, 40), width=st.integers(1, 300), dtype=st.sampled_from(DTYPES))
def test_any_shape(rows: int, width: int, dtype: torch.dtype) -> None:
    _check((rows, width), dtype, 1e-3, "triton")
    _check_with_add((rows, width), dtype, 1e-3, "triton")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_add_rms_norm(shape: tuple[int, ...], dtype: torch.dtype, backend: Backend) -> None:
    _check_with_add(shape, dtype, 1e-6, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_either_result_of_add_rms_norm_alone(backend: Backend) -> None:
    x, y, grad = (random(3, 8, dtype=torch.float64, seed=seed) for seed in range(3))
    weight = random(8, dtype=torch.float64, seed=3).requires_grad_()
    normal, total = add_rms_norm(x.requires_grad_(), y.requires_grad_(), weight, 1e-6, backend)
    (of_total,) = torch.autograd.grad(total, x, grad, retain_graph=True)
    assert torch.equal(of_total, grad)
    found = torch.autograd.grad(normal, (x, y, weight), grad)
    expected = torch.autograd.grad(reference(x + y, weight, 1e-6), (x, y, weight), grad)
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)


def test_add_rms_norm_wants_two_of_a_kind() -> None:
    with pytest.raises(ValueError, match=r"x \[2, 4\] torch.float32 and y \[4\] torch.float32 must be of one shape"):
        add_rms_norm(torch.ones(2, 4), torch.ones(4), torch.ones(4), 1e-5)


@pytest.mark.parametrize("cut", [lambda x: x[..., ::2], lambda x: x[::3, :, 2:9], lambda x: x.transpose(0, 2)])
def test_strided(cut: Callable[[Tensor], Tensor]) -> None:
    x, dy = (cut(random(9, 6, 12, dtype=torch.float64, seed=seed)) for seed in (0, 1))
    weight = random(2 * x.shape[-1], dtype=torch.float64, seed=2)[::2].requires_grad_()
    inputs = x.requires_grad_(), weight
    y = rms_norm(*inputs, 1e-5, "triton")
    torch.testing.assert_close(y, reference(*inputs, 1e-5), rtol=1e-13, atol=1e-13)
    found = torch.autograd.grad(y, inputs, dy)
    torch.testing.assert_close(found, torch.autograd.grad(reference(*inputs, 1e-5), inputs, dy), rtol=1e-13, atol=1e-13)


def test_strided_sum() -> None:
    """Both terms in rows of their own distances, and incoming gradients that are strided too."""
    x, y, dnormal, dtotal = (random(5, width, dtype=torch.float64, seed=width) for width in (24, 30, 12, 8))
    weight = random(6, dtype=torch.float64, seed=4).requires_grad_()
    inputs = x[:, 3:9].requires_grad_(), y[:, 6:12].requires_grad_(), weight
    grads = dnormal[:, ::2], dtotal[:, 2:]
    found, expected = (add_rms_norm(*inputs, 1e-5, backend) for backend in ("triton", "torch"))
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)
    gradients = (torch.autograd.grad(results, inputs, grads) for results in (found, expected))
    torch.testing.assert_close(*gradients, rtol=1e-13, atol=1e-13)


def test_rows_farther_apart_than_int32_counts() -> None:
    near = [random(3, 64, dtype=torch.bfloat16, seed=seed) for seed in (0, 1)]
    x, y = far_apart(*near)
    weight = random(64, dtype=torch.bfloat16, seed=2)
    assert torch.equal(rms_norm(x, weight, 1e-5, "triton"), rms_norm(near[0], weight, 1e-5, "triton"))
    found, expected = (add_rms_norm(*inputs, weight, 1e-5, "triton") for inputs in ((x, y), near))
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_rows(backend: Backend) -> None:
    x, weight = random(3, 0, 8, dtype=torch.float32, seed=0), random(8, dtype=torch.float32, seed=1)
    inputs = x.requires_grad_(), weight.requires_grad_()
    for y in (rms_norm(*inputs, 1e-5, backend), *add_rms_norm(x, *inputs, 1e-5, backend)):
        dx, dweight = torch.autograd.grad(y.sum(), inputs, allow_unused=True, materialize_grads=True)
        assert y.shape == dx.shape == (3, 0, 8)
        assert torch.equal(dweight, torch.zeros_like(weight))


@pytest.mark.parametrize("backend", BACKENDS)
def test_weight_of_another_type(backend: Backend) -> None:
    x, weight = random(4, 32, dtype=torch.bfloat16, seed=0), random(32, dtype=torch.float32, seed=1).requires_grad_()
    y = rms_norm(x, weight, 1e-5, backend)
    y.sum().backward()
    assert weight.grad is not None
    assert (y.dtype, weight.grad.dtype) == (torch.bfloat16, torch.float32)
    assert_norm(y.detach(), x, weight.detach(), 1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_by_differences(backend: Backend) -> None:
    x, y, weight = (random(3, 5, dtype=torch.float64, seed=seed).requires_grad_() for seed in range(3))
    weight = weight[0].detach().requires_grad_()
    assert torch.autograd.gradcheck(rms_norm, (x, weight, 1e-3, backend))
    assert torch.autograd.gradcheck(add_rms_norm, (x, y, weight, 1e-3, backend))


def test_registered_ops() -> None:
    x, y, weight = (random(3, 8, dtype=torch.float32, seed=seed).requires_grad_() for seed in range(3))
    weight = weight[0].detach().requires_grad_()
    ops = torch.ops.megalite
    torch.library.opcheck(ops.rms_norm.default, (x, weight, 1e-3))
    torch.library.opcheck(ops.add_rms_norm.default, (x, y, weight, 1e-3))
    x, y, weight, inverse = (tensor.detach() for tensor in (x, y, weight, x.square().mean(1).rsqrt()))
    torch.library.opcheck(ops.rms_norm_backward.default, (x, weight, inverse, y))
    torch.library.opcheck(ops.add_rms_norm_backward.default, (x, weight, inverse, y, y))


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_of_zeros_stay_zero(backend: Backend) -> None:
    x = torch.zeros(2, 8, device=DEVICE, requires_grad=True)
    y = rms_norm(x, torch.ones(8, device=DEVICE), 1e-5, backend)
    y.sum().backward()
    assert torch.equal(y, torch.zeros_like(y))
    assert x.grad is not None
    assert x.grad.isfinite().all()


@given(width=st.integers(1, 100_000), itemsize=st.sampled_from([2, 4, 8]))
def test_blocks_cover_the_row_in_few_registers(width: int, itemsize: int) -> None:
    for block, elements in (
        (forward_block(width), 16384),
        (backward_block(width, itemsize, itemsize, 163 << 10), 32768 // itemsize),
    ):
        row = block["TILE"] * block["TILES"] * block.get("PARTS", 1)
        assert row >= width
        assert 4 <= block["num_warps"] <= 16
        assert block["ROWS"] * block["TILE"] <= 32 * 32 * block["num_warps"]
        if block["TILES"] > 1:
            assert row - width < block["TILE"] * block["TILES"]
            assert block["ROWS"] == 1
            assert "PARTS" not in block or block["TILE"] * block["TILES"] <= max(elements, 4096)


@pytest.mark.parametrize(("width", "shared", "stages"), [(8192, 163, 3), (8192, 99, 1), (4096, 99, 3), (16384, 227, 1)])
def test_blocks_are_read_ahead_where_shared_memory_holds_them(width: int, shared: int, stages: int) -> None:
    assert backward_block(width, 2, 2, shared << 10)["STAGES"] == stages


@pytest.mark.parametrize("width", [64, 12000])
def test_backward_is_the_same_bits_for_any_grouping_of_rows(width: int) -> None:
    """A row's gradient does not depend on which program makes it."""
    x, dy = (random(9, width, dtype=torch.float32, seed=seed) for seed in (0, 1))
    weight, inverse = random(width, dtype=torch.float32, seed=2), x.double().square().mean(1).rsqrt().float()
    together, _ = launch_backward(x, weight, inverse, dy, None)
    for row in range(8):
        at = slice(row, row + 2)  # two: a kernel for a single row is another
        alone, _ = launch_backward(x[at], weight, inverse[at], dy[at], None)
        assert torch.equal(alone, together[at])


def test_bytes_moved() -> None:
    """The floors that are published for 8192 tokens of width 4096 in bfloat16."""
    forward, backward = bytes_moved(8192, 4096, torch.bfloat16)
    assert (forward / 1e6, backward / 1e6) == (pytest.approx(134, abs=1), pytest.approx(201, abs=1))
    forward, backward = bytes_moved_with_add(8192, 4096, torch.bfloat16)
    assert (forward / 1e6, backward / 1e6) == (pytest.approx(268, abs=1), pytest.approx(268, abs=1))
