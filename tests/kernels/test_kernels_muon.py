"""Muon's passes over many tensors against their formulas in float64, and how many bytes they move."""

import sys
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rounding import DEVICE, assert_rounded, random
from tables import table_of_the_end
from torch import Tensor

from megalite_kernels.muon import bytes_moved, muon_momentum, muon_update, reference_momentum, reference_update
from megalite_kernels.tensor_table import CHUNK

RATE, DECAY, CLIP = 0.02, 0.997, 0.25
SIZES = [5, 0, 64, 1, CHUNK, 2 * CHUNK + 16, CHUNK + 3]
BACKENDS = ["torch", "triton"]
WIDE, NARROW, EXACT = torch.float32, torch.bfloat16, torch.float64


def number(value: float) -> Tensor:
    return torch.tensor(value, device=DEVICE)


class Tensors:
    """What both passes take."""

    def __init__(
        self, sizes: list[int], weight: torch.dtype, grad: torch.dtype, working: torch.dtype, copy: torch.dtype | None
    ) -> None:
        self.weights = [random(size, dtype=weight, seed=size) for size in sizes]
        self.grads = [random(size, dtype=grad, seed=size + 1) for size in sizes]
        self.averages = [random(size, dtype=weight, seed=size + 2, scale=0.1) for size in sizes]
        self.updates = [random(size, dtype=working, seed=size + 3) for size in sizes]
        self.directions = [torch.zeros_like(update) for update in self.updates]
        self.copies = [] if copy is None else [torch.zeros(size, dtype=copy, device=DEVICE) for size in sizes]
        self.rates = [RATE * (1 + i) for i in range(len(sizes))]
        self.decays = [DECAY - i / 1000 for i in range(len(sizes))]

    def changing(self) -> list[Tensor]:
        return [*self.weights, *self.averages, *self.copies]

    def step(self, momentum: float = 0.95, nesterov: bool = True, clip: Tensor | None = None, **options: Any) -> None:
        lists = self.grads, self.averages, self.directions
        muon_momentum(*lists, momentum=momentum, nesterov=nesterov, clip=clip, **options)
        muon_update(self.weights, self.updates, self.rates, self.decays, copies=self.copies, **options)


def check(sizes: list[int], dtypes: Any, backend: str, momentum: float = 0.95, nesterov: bool = True) -> None:
    tensors, before = Tensors(sizes, *dtypes), Tensors(sizes, *dtypes)
    tensors.step(momentum, nesterov, number(CLIP), backend=backend, found_inf=number(0.0))
    for i, size in enumerate(sizes):
        assert torch.equal(tensors.grads[i], before.grads[i])
        if not size:
            continue
        grad, average = before.grads[i], before.averages[i]
        magnitude = grad.double().abs() + average.double().abs()
        found = tensors.averages[i], tensors.directions[i]
        for one, exact in zip(found, reference_momentum(grad, average, momentum, nesterov, CLIP), strict=True):
            assert_rounded(one, exact, magnitude, outer=4, inner=8)
        weight, update = before.weights[i], before.updates[i]
        rate, decay = tensors.rates[i], tensors.decays[i]
        magnitude = weight.double().abs() + rate * update.double().abs()
        new = tensors.weights[i]
        assert_rounded(new, reference_update(weight, update, rate, decay), magnitude, outer=4, inner=4)
        if tensors.copies:
            assert_rounded(tensors.copies[i], new.double(), new.double().abs(), outer=4, inner=0)


@pytest.mark.parametrize(
    "dtypes",
    [
        (WIDE, WIDE, NARROW, None),
        (WIDE, NARROW, NARROW, NARROW),
        (WIDE, WIDE, WIDE, NARROW),
        (NARROW, NARROW, NARROW, None),
        (EXACT, EXACT, EXACT, WIDE),
    ],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_step(backend: str, dtypes: Any) -> None:
    check(SIZES, dtypes, backend)


@settings(max_examples=20)
@given(
    sizes=st.lists(st.integers(0, 200), min_size=1, max_size=20),
    momentum=st.floats(0, 0.99),
    nesterov=st.booleans(),
    backend=st.sampled_from(BACKENDS),
)
def test_sizes_and_settings(sizes: list[int], momentum: float, nesterov: bool, backend: str) -> None:
    check(sizes, (WIDE, WIDE, NARROW, NARROW), backend, momentum, nesterov)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bad", [1.0, torch.inf, torch.nan])
def test_nothing_changes_where_gradients_are_not_finite(backend: str, bad: float) -> None:
    tensors = Tensors([5, 64, CHUNK + 1], WIDE, WIDE, NARROW, NARROW)
    before = [tensor.clone() for tensor in tensors.changing()]
    tensors.grads[0][2] = torch.nan
    tensors.updates[1].fill_(torch.nan)
    tensors.step(found_inf=number(bad)[None], backend=backend)
    for tensor, old in zip(tensors.changing(), before, strict=True):
        assert torch.equal(tensor, old)


@pytest.mark.parametrize("backend", BACKENDS)
def test_averages_are_the_same_without_directions(backend: str) -> None:
    tensors, expected = (Tensors([64, 5], WIDE, WIDE, NARROW, None) for _ in range(2))
    muon_momentum(tensors.grads, tensors.averages, momentum=0.95, nesterov=True, backend=backend)
    expected.step(backend=backend)
    assert all(map(torch.equal, tensors.averages, expected.averages))
    assert not any(direction.any() for direction in tensors.directions)


def test_bits_do_not_depend_on_where_a_tensor_lies_or_what_is_beside_it() -> None:
    """Beginning at no multiple of 16 bytes, among others, or alone."""
    tensors, expected = (Tensors([64, 32, 5], WIDE, WIDE, NARROW, NARROW) for _ in range(2))
    for some in (tensors.weights, tensors.averages, tensors.directions, tensors.copies):
        storage = torch.zeros(70, dtype=some[0].dtype, device=DEVICE)
        storage[1:65] = some[0]
        some[0] = storage[1:65]
    tensors.step(backend="triton")
    for i in range(3):
        one = Tensors([], WIDE, WIDE, NARROW, None)
        for name in ("weights", "grads", "averages", "updates", "directions", "copies", "rates", "decays"):
            setattr(one, name, getattr(expected, name)[i : i + 1])
        one.step(backend="triton")
    for tensor, other in zip(tensors.changing(), expected.changing(), strict=True):
        assert torch.equal(tensor, other)
    assert all(map(torch.equal, tensors.directions, expected.directions))
    assert (tensors.weights[0]._base[0], tensors.weights[0]._base[65:].any()) == (0, False)


def test_gradients_may_be_strided_and_weights_may_not() -> None:
    tensors, expected = (Tensors([64], WIDE, WIDE, NARROW, None) for _ in range(2))
    for some in (tensors.grads, tensors.updates):
        some[0] = some[0].repeat_interleave(2)[::2]
    for each in (tensors, expected):
        each.step(backend="triton")
    assert all(map(torch.equal, tensors.changing(), expected.changing()))
    tensors.weights[0] = tensors.weights[0].repeat_interleave(2)[::2]
    with pytest.raises(ValueError, match=r"muon_update: a tensor of shape \(64,\) is not contiguous"):
        tensors.step(backend="triton")
    tensors.averages[0] = tensors.averages[0].repeat_interleave(2)[::2]
    with pytest.raises(ValueError, match=r"muon_momentum: a tensor of shape \(64,\) is not contiguous"):
        tensors.step(backend="triton")


def test_elements_beyond_32_bits_of_offset(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table that says that the tensor begins 2³¹ elements earlier, for the program of its last elements."""
    tensors, expected = (Tensors([64], WIDE, NARROW, NARROW, NARROW) for _ in range(2))
    expected.step(backend="triton")
    monkeypatch.setattr(sys.modules["megalite_kernels.tensor_table"], "tensor_table", table_of_the_end)
    tensors.step(backend="triton")
    assert all(map(torch.equal, tensors.changing(), expected.changing()))


def test_no_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is launched, and nothing fails."""
    kernels = MagicMock()
    for name in ("_momentum_kernel", "_update_kernel"):
        monkeypatch.setattr(sys.modules["megalite_kernels.muon"], name, kernels)
    muon_momentum([], [], momentum=0.95, nesterov=True, backend="triton")
    muon_update([], [], [], [], backend="triton")
    assert kernels.mock_calls == []


def test_custom_ops() -> None:
    tensors = Tensors([5, 64], WIDE, WIDE, NARROW, NARROW)
    lists = tensors.grads, tensors.averages, tensors.directions
    torch.library.opcheck(torch.ops.megalite.muon_momentum.default, (*lists, number(0.5), None, 0.95, True))
    rest = tensors.weights, tensors.updates, tensors.copies, tensors.rates, tensors.decays, number(0.0)
    torch.library.opcheck(torch.ops.megalite.muon_update.default, rest)


def test_bytes_of_a_parameter() -> None:
    assert bytes_moved(10**9) == (24 * 10**9, 0)
    assert bytes_moved(1, copy=torch.bfloat16) == (26, 0)
