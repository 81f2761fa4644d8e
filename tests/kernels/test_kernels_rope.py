"""Rotary position embedding, in PyTorch and in kernels, against its formula."""

from collections.abc import Callable

import pytest
import torch
from exact import assert_turned, turn
from rotations import LAYOUTS, heads_of_any_shape
from rounding import DEVICE, DTYPES, far_apart, numbers_below, random
from torch import Tensor

from megalite_kernels import rope
from megalite_kernels.backend import Backend
from megalite_kernels.rope import Layout, bytes_moved, reference

LENGTH, BATCH, HEADS, WIDTH = 11, 2, 3, 16
BACKENDS = ["torch", "triton"]


def _angles(dtype: torch.dtype, length: int = LENGTH, width: int = WIDTH) -> tuple[Tensor, Tensor]:
    """In float32 at least, as the decoder passes them."""
    frequencies = 100.0 ** (-torch.arange(width // 2) / (width // 2))
    turns = torch.arange(length, dtype=torch.float64)[:, None, None, None] * frequencies
    wide = torch.promote_types(dtype, torch.float32)
    return turns.cos().to(DEVICE, wide), turns.sin().to(DEVICE, wide)


def _check(shape: tuple[int, ...], dtype: torch.dtype, layout: Layout, backend: Backend) -> None:
    cos, sin = _angles(dtype, shape[0], shape[-1])
    x = random(*shape, dtype=dtype, seed=0).requires_grad_()
    grad = random(*shape, dtype=dtype, seed=1)
    y = rope(x, cos, sin, layout=layout, backend=backend)
    y.backward(grad)
    assert_turned(y.detach(), x.detach(), cos, sin, layout)
    assert_turned(x.grad, grad, cos, -sin, layout)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(LENGTH, BATCH, HEADS, WIDTH), (1, 1, 1, 2), (3, 1, 32, 80), (70, 1, 1, 128)])
def test_forward_and_backward(shape: tuple[int, ...], dtype: torch.dtype, layout: Layout, backend: Backend) -> None:
    _check(shape, dtype, layout, backend)


@heads_of_any_shape
def test_any_shape(shape: tuple[int, ...], dtype: torch.dtype, layout: Layout) -> None:
    _check(shape, dtype, layout, "triton")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_reference(layout: Layout) -> None:
    cos, sin = _angles(torch.float64)
    x = random(LENGTH, BATCH, HEADS, WIDTH, dtype=torch.float64, seed=0)
    torch.testing.assert_close(reference(x, cos, sin, layout=layout), turn(x, cos, sin, layout), rtol=0, atol=1e-14)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_by_differences(layout: Layout, backend: Backend) -> None:
    cos, sin = _angles(torch.float64, 3, 4)
    x = random(3, 1, 2, 4, dtype=torch.float64, seed=0).requires_grad_()
    assert torch.autograd.gradcheck(rope, (x, cos, sin, 0, layout, backend))
    assert torch.autograd.gradgradcheck(rope, (x, cos, sin, 0, layout, backend))


def test_registered_op() -> None:
    cos, sin = _angles(torch.float32)
    x = random(LENGTH, BATCH, HEADS, WIDTH, dtype=torch.float32, seed=0).requires_grad_()
    positions = torch.arange(LENGTH, device=DEVICE)[:, None].expand(-1, BATCH)
    for at in (None, positions):
        torch.library.opcheck(torch.ops.megalite.rope.default, (x, cos, sin, at, 0, True, False))


@pytest.mark.parametrize("backend", BACKENDS)
def test_positions(backend: Backend) -> None:
    """From an offset on, or each token's own, of tables that are longer than the sequence."""
    cos, sin = _angles(torch.float64, 3 * LENGTH)
    x = random(LENGTH, BATCH, HEADS, WIDTH, dtype=torch.float64, seed=0).requires_grad_()
    grad = random(LENGTH, BATCH, HEADS, WIDTH, dtype=torch.float64, seed=1)
    at = numbers_below(3 * LENGTH, BATCH, LENGTH, seed=2).T
    for positions, rows in ((7, torch.arange(7, 7 + LENGTH, device=DEVICE)[:, None].expand(-1, BATCH)), (at, at)):
        y = rope(x, cos, sin, positions, backend=backend)
        torch.testing.assert_close(y, turn(x, cos[rows, 0], sin[rows, 0], "half"), rtol=0, atol=1e-14)
        (found,) = torch.autograd.grad(y, x, grad)
        torch.testing.assert_close(found, turn(grad, cos[rows, 0], -sin[rows, 0], "half"), rtol=0, atol=1e-14)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "cut", [lambda x: x[..., 2:], lambda x: x[..., ::2], lambda x: x.transpose(0, 1), lambda x: x[:, :, 1:]]
)
def test_strided(cut: Callable[[Tensor], Tensor], backend: Backend) -> None:
    x, dy = (cut(random(5, 4, 3, 12, dtype=torch.float64, seed=seed)).requires_grad_() for seed in (0, 1))
    cos, sin = (table[..., ::2] for table in _angles(torch.float64, len(x), 2 * x.shape[-1]))
    y = rope(x, cos, sin, backend=backend)
    torch.testing.assert_close(y, turn(x, cos, sin, "half"), rtol=0, atol=1e-14)
    (found,) = torch.autograd.grad(y, x, dy)
    torch.testing.assert_close(found, turn(dy, cos, -sin, "half"), rtol=0, atol=1e-14)


def test_tokens_farther_apart_than_int32_counts() -> None:
    near = random(3, 1, 2, 8, dtype=torch.bfloat16, seed=0)
    (far,) = far_apart(near)
    found, expected = (rope(x, *_angles(torch.bfloat16, 3, 8), backend="triton") for x in (far, near))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_tokens(backend: Backend) -> None:
    cos, sin = _angles(torch.float32)
    x = torch.empty(0, 2, 3, WIDTH, device=DEVICE, requires_grad=True)
    y = rope(x, cos, sin, 3, backend=backend)
    y.sum().backward()
    assert y.shape == x.shape


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"layout": "neox"}, "'neox' is no layout; choose half or interleaved"),
        ({"positions": 1}, "tokens 1 to 12 lie outside tables of 11 positions"),
        ({"positions": -1}, "tokens -1 to 10 lie outside"),
        ({"positions": torch.zeros(LENGTH, dtype=torch.int64)}, r"positions \[11\] for x .* must be \[s, b\]"),
        ({"sin": torch.zeros(LENGTH, 1, 1, WIDTH)}, r"must both be \[p, 1 or 2, 1, e/2\]"),
        ({"cos": torch.zeros(LENGTH, 3, 1, 8), "sin": torch.zeros(LENGTH, 3, 1, 8)}, "must both be"),
        (
            {
                "cos": torch.zeros(LENGTH, 2, 1, 8),
                "sin": torch.zeros(LENGTH, 2, 1, 8),
                "positions": torch.zeros(LENGTH, BATCH, dtype=torch.int64),
            },
            r"must both be \[p, 1, 1, e/2\]",
        ),
    ],
)
def test_arguments_that_do_not_match(change: dict[str, object], said: str) -> None:
    cos, sin = _angles(torch.float32)
    arguments = {"x": torch.zeros(LENGTH, BATCH, HEADS, WIDTH), "cos": cos, "sin": sin, **change}
    with pytest.raises(ValueError, match=said):
        rope(**arguments)  # type: ignore[arg-type]


def test_bytes_moved() -> None:
    """The floors that are published for 8192 tokens, 32 query and 8 key heads of 128 features in bfloat16."""
    both = [bytes_moved(8192, heads, 128, torch.bfloat16) for heads in (32, 8)]
    assert sum(forward for forward, _ in both) / 1e6 == pytest.approx(168, abs=1)
    assert sum(backward for _, backward in both) / 1e6 == pytest.approx(168, abs=1)


@pytest.mark.parametrize("backend", BACKENDS)
def test_input_is_left_alone_and_position_zero_is_not_turned(backend: Backend) -> None:
    cos, sin = _angles(torch.float32)
    x = random(LENGTH, BATCH, HEADS, WIDTH, dtype=torch.float32, seed=0)
    before = x.clone()
    y = rope(x, cos, sin, backend=backend)
    assert torch.equal(x, before)
    assert torch.equal(y[0], x[0])


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_sequence_may_have_positions_of_its_own(backend: Backend) -> None:
    cos, sin = _angles(torch.float64)
    x = random(LENGTH, BATCH, HEADS, WIDTH, dtype=torch.float64, seed=0)
    forwards = torch.arange(LENGTH, device=DEVICE)
    at = torch.stack((forwards, forwards.flip(0)), dim=1)  # s b
    y = rope(x, cos[at, 0], sin[at, 0], backend=backend)
    assert torch.equal(y[:, 0], rope(x, cos, sin, backend=backend)[:, 0])
    assert torch.equal(y[:, 1], rope(x.flip(0), cos, sin, backend=backend).flip(0)[:, 1])


@pytest.mark.parametrize("backend", BACKENDS)
def test_products_depend_on_the_distance_alone(backend: Backend) -> None:
    cos, sin = _angles(torch.float64)
    q, k = (random(1, 1, 1, WIDTH, dtype=torch.float64, seed=seed).expand(LENGTH, 1, 1, WIDTH) for seed in (0, 1))
    scores = torch.einsum("sbhe,tbhe->st", rope(q, cos, sin, backend=backend), rope(k, cos, sin, backend=backend))
    for distance in range(-LENGTH + 1, LENGTH):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=0, atol=1e-13)


def test_gradients_are_rows_for_matrix_products_however_those_given_lie() -> None:
    x = torch.randn(LENGTH, 2, 3, WIDTH, requires_grad=True)
    angles = torch.randn(LENGTH, 1, 1, WIDTH // 2)
    given = torch.randn(2, 3, LENGTH, WIDTH).permute(2, 0, 1, 3)
    (grad,) = torch.autograd.grad(rope(x, angles.cos(), angles.sin(), backend="torch"), x, given)
    assert not given.is_contiguous()
    assert grad.is_contiguous()
