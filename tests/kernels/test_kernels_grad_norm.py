"""The norm of all gradients, on one rank and on several."""

import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import SIZE, Ranks
from rounding import DEVICE, DTYPES, UNITS, random
from tables import table_of_the_end
from torch import Tensor
from vocabulary import collectives, group_of

from megalite_kernels.grad_norm import bytes_moved, clip_coefficient, grad_norm, reference
from megalite_kernels.tensor_table import CHUNK

BACKENDS = ["torch", "triton"]


def gradients(sizes: list[int], dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    return [random(size, dtype=dtype, seed=seed + number) for number, size in enumerate(sizes)]


def check(grads: list[Tensor], backend: Any) -> None:
    found, expected = grad_norm(grads, backend=backend), reference(grads)
    wide = torch.promote_types(grads[0].dtype, torch.float32)
    assert found.dtype == wide
    assert found.shape == ()
    longest = min(max(grad.numel() for grad in grads), CHUNK)
    assert abs(found.double() - expected) <= expected * UNITS[wide] * (longest / 2 + 4)  # a root halves errors


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_norm(backend: str, dtype: torch.dtype) -> None:
    check(gradients([5, 0, 64, 1, 2 * CHUNK + 16, CHUNK - 1], dtype), backend)


@settings(max_examples=20)
@given(
    sizes=st.lists(st.integers(0, 300), min_size=1, max_size=20),
    dtype=st.sampled_from(DTYPES),
    backend=st.sampled_from(BACKENDS),
)
def test_sizes(sizes: list[int], dtype: torch.dtype, backend: str) -> None:
    check(gradients(sizes, dtype), backend)


def test_many_tensors() -> None:
    """Every program finds its own."""
    grads = [torch.tensor([2.0**-number], dtype=torch.float64, device=DEVICE) for number in range(300)]
    grads[::7] = [grad.repeat(CHUNK + 1) for grad in grads[::7]]
    for end in (2, 3, 300):
        torch.testing.assert_close(
            grad_norm(grads[-end:], backend="triton"), reference(grads[-end:]), rtol=1e-14, atol=0
        )


def test_elements_beyond_32_bits_of_offset(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table that says that the tensor begins 2³¹ elements earlier, for the program of its last elements."""
    grads = gradients([64], torch.bfloat16)
    expected = grad_norm(grads, backend="triton")
    monkeypatch.setattr(sys.modules["megalite_kernels.tensor_table"], "tensor_table", table_of_the_end)
    assert torch.equal(grad_norm(grads, backend="triton"), expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_only_what_is_counted(backend: Any) -> None:
    grads = gradients([7, 9, 11], torch.float64)
    found = grad_norm(grads, [True, False, True], backend=backend)
    torch.testing.assert_close(found, reference([grads[0], grads[2]]), rtol=1e-14, atol=0)
    assert grad_norm(grads, [False] * 3, backend=backend) == 0


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("backend", BACKENDS)
def test_bad_gradients_show(backend: Any, bad: float) -> None:
    grads = gradients([7, 900], torch.float32)
    grads[1][450] = bad
    assert not grad_norm(grads, backend=backend).isfinite()


def test_mixed_data_types_and_strides() -> None:
    grads = [*gradients([50], torch.bfloat16), *gradients([60, 100], torch.float32, seed=5)]
    grads[2] = grads[2].reshape(10, 10).T
    torch.testing.assert_close(grad_norm(grads, backend="triton").double(), reference(grads), rtol=1e-6, atol=0)


def test_no_gradients() -> None:
    with pytest.raises(ValueError, match="at least one"):
        grad_norm([])


def test_clipping() -> None:
    grads = gradients([100, 50], torch.float64)
    norm = grad_norm(grads)
    clipped = [grad * clip_coefficient(norm, 0.5) for grad in grads]
    assert reference(clipped).item() == pytest.approx(0.5, rel=1e-6)
    assert clip_coefficient(norm, 2 * norm.item()) == 1


def test_custom_op() -> None:
    torch.library.opcheck(torch.ops.megalite.square_sum.default, (gradients([5, 64], torch.float32),))


def norms(size: int, backend: Any) -> tuple[Tensor, int] | None:
    """Of a tensor split over `size` ranks, in parts of several sizes, and one that they all have."""
    group = group_of(size)
    if group is None:
        return None
    parts = gradients([40], torch.float64)[0].tensor_split([3, 20, 20][: size - 1])
    replicated = gradients([30], torch.float64, seed=7)[0]
    rank, before = group.rank(), collectives(group)
    found = grad_norm([parts[rank], replicated], [True, rank == 0], [group], backend)
    return found, collectives(group) - before


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_norm_over_ranks(size: int, backend: str, ranks: Ranks) -> None:
    """What is replicated counts once, and all ranks find the same in one collective."""
    expected = reference([*gradients([40], torch.float64), *gradients([30], torch.float64, seed=7)])
    found = ranks.run(norms, size, backend)[: SIZE // size * size]
    for norm, count in found:
        torch.testing.assert_close(norm, expected, rtol=1e-14, atol=0)
        assert torch.equal(norm, found[0][0])
        assert count == 1


def test_bytes() -> None:
    assert bytes_moved(1000, torch.bfloat16) == (2000, 0)
