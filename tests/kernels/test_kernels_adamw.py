"""AdamW over many tensors against its formula in float64 and against PyTorch's."""

import importlib
from copy import deepcopy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rounding import UNITS, assert_rounded, random
from torch import Tensor

from megalite_kernels.adamw import FusedAdamW, adamw, bytes_moved, reference
from megalite_kernels.tensor_table import CHUNK

LR, BETAS, EPS, DECAY, CLIP = 3e-3, (0.9, 0.99), 1e-8, 0.1, 0.3
HYPER: dict[str, Any] = {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": DECAY}
SIZES = [5, 0, 64, 1, CHUNK, 2 * CHUNK + 16, CHUNK + 3]
BACKENDS = ["torch", "triton"]


class Tensors:
    """What an update takes, in the middle of a training."""

    def __init__(self, sizes: list[int], weight: torch.dtype, grad: torch.dtype, copy: torch.dtype | None) -> None:
        state = torch.promote_types(weight, torch.float32)
        self.weights = [random(size, dtype=weight, seed=size) for size in sizes]
        self.grads = [random(size, dtype=grad, seed=size + 1) for size in sizes]
        self.firsts = [random(size, dtype=state, seed=size + 2, scale=0.1) for size in sizes]
        self.seconds = [random(size, dtype=state, seed=size + 3, scale=0.1).square() for size in sizes]
        self.steps = [torch.tensor(4.0 + number) for number in range(len(sizes))]
        self.copies = [] if copy is None else [torch.zeros(size, dtype=copy) for size in sizes]

    def changing(self) -> list[Tensor]:
        return [*self.weights, *self.firsts, *self.seconds, *self.steps, *self.copies]

    def update(self, **options: Any) -> None:
        lists = self.weights, self.grads, self.firsts, self.seconds, self.steps
        adamw(*lists, copies=self.copies, **HYPER, **options)


def check(sizes: list[int], weight: torch.dtype, grad: torch.dtype, copy: torch.dtype | None, **options: Any) -> None:
    tensors, before = Tensors(sizes, weight, grad, copy), Tensors(sizes, weight, grad, copy)
    tensors.update(clip=torch.tensor(CLIP, dtype=torch.float64), **options)
    for number, size in enumerate(sizes):
        old = [some[number] for some in (before.weights, before.grads, before.firsts, before.seconds)]
        step = 5 + number
        assert tensors.steps[number] == step
        assert torch.equal(tensors.grads[number], before.grads[number])
        if not size:
            continue
        clip = CLIP if weight == torch.float64 else torch.tensor(CLIP).item()
        w, m, v = reference(old[0], old[1].double(), old[2], old[3], step, *HYPER.values(), clip=clip)
        g = old[1].double().abs() * CLIP
        of_m = BETAS[0] * old[2].double().abs() + (1 - BETAS[0]) * g
        assert_rounded(tensors.firsts[number], m, of_m, outer=2, inner=4)
        assert_rounded(tensors.seconds[number], v, v, outer=2, inner=8)
        rates = LR / (1 - BETAS[0] ** step) * (1 - BETAS[1] ** step) ** 0.5
        magnitude = old[0].double().abs() + rates * of_m / (v.sqrt() + EPS)
        assert_rounded(tensors.weights[number], w, magnitude, outer=1 if weight != torch.bfloat16 else 2, inner=16)
        if copy:
            rounded = tensors.weights[number].to(copy)
            assert_rounded(tensors.copies[number], rounded.double(), rounded.double().abs(), outer=4, inner=0)


@pytest.mark.parametrize(
    ("weight", "grad", "copy"),
    [
        (torch.float32, torch.float32, None),
        (torch.float32, torch.float32, torch.bfloat16),
        (torch.float32, torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.bfloat16, None),
        (torch.float64, torch.float64, torch.float32),
    ],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_update(backend: str, weight: torch.dtype, grad: torch.dtype, copy: torch.dtype | None) -> None:
    check(SIZES, weight, grad, copy, backend=backend)


@settings(max_examples=20)
@given(sizes=st.lists(st.integers(0, 200), min_size=1, max_size=20))
def test_sizes(sizes: list[int]) -> None:
    check(sizes, torch.float32, torch.float32, torch.bfloat16, backend="triton")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bad", [1.0, torch.inf, torch.nan])
def test_nothing_changes_where_gradients_are_not_finite(backend: str, bad: float) -> None:
    tensors = Tensors([5, 64, CHUNK + 1], torch.float32, torch.float32, torch.bfloat16)
    before = [tensor.clone() for tensor in tensors.changing()]
    tensors.grads[0][2] = torch.nan
    tensors.update(found_inf=torch.full((1,), bad), backend=backend)
    for tensor, old in zip(tensors.changing(), before, strict=True):
        assert torch.equal(tensor, old)


@pytest.mark.parametrize("backend", BACKENDS)
def test_found_inf_of_zero_updates(backend: str) -> None:
    check([5, 64], torch.float32, torch.float32, None, found_inf=torch.zeros(()), backend=backend)


def test_first_update_after_a_skipped_one_is_update_number_one() -> None:
    tensors = Tensors([64], torch.float32, torch.float32, None)
    tensors.steps[0].zero_()
    tensors.update(found_inf=torch.ones(1), backend="triton")
    assert tensors.steps[0] == 0
    tensors.update(found_inf=torch.zeros(1), backend="triton")
    assert tensors.steps[0] == 1
    assert tensors.weights[0].isfinite().all()


def test_tensors_that_begin_anywhere() -> None:
    """Addresses that are no multiples of 16 bytes, beside ones that are."""
    tensors, expected = (Tensors([64, 32], torch.float32, torch.float32, None) for _ in range(2))
    storage = torch.zeros(70)
    storage[1:65] = tensors.weights[0]
    tensors.weights[0] = storage[1:65]
    tensors.update(backend="triton")
    expected.update(backend="triton")
    for tensor, other in zip(tensors.changing(), expected.changing(), strict=True):
        assert torch.equal(tensor, other)
    assert storage[0] == 0
    assert storage[65:].eq(0).all()


def test_the_corrections_keep_their_digits() -> None:
    """1 − 0.9999 in float32 has three digits less than a float32."""
    weight, grad = torch.zeros(16), torch.full((16,), 0.5)
    options: dict[str, Any] = {"lr": 1.0, "betas": (0.9, 0.9999), "eps": 0.0, "weight_decay": 0.0, "backend": "triton"}
    adamw([weight], [grad], [torch.zeros(16)], [torch.zeros(16)], [torch.zeros(())], **options)
    torch.testing.assert_close(weight, torch.full((16,), -1.0), rtol=8 * UNITS[torch.float32], atol=0)


def test_gradients_may_be_strided_and_weights_may_not() -> None:
    tensors, expected = (Tensors([64], torch.float32, torch.float32, None) for _ in range(2))
    tensors.grads[0] = tensors.grads[0].repeat_interleave(2)[::2]
    tensors.update(backend="triton")
    expected.update(backend="triton")
    assert torch.equal(tensors.weights[0], expected.weights[0])
    tensors.weights[0] = tensors.weights[0].repeat_interleave(2)[::2]
    with pytest.raises(ValueError, match=r"shape \(64,\) is not contiguous"):
        tensors.update(backend="triton")


def test_no_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is launched, and nothing fails."""
    module, launched = importlib.import_module("megalite_kernels.adamw"), []
    monkeypatch.setattr(module, "_adamw_kernel", launched)
    adamw([], [], [], [], [], **HYPER, backend="triton")
    assert launched == []


def test_custom_op() -> None:
    tensors = Tensors([5, 64], torch.float32, torch.float32, torch.bfloat16)
    lists = tensors.weights, tensors.grads, tensors.firsts, tensors.seconds, tensors.copies
    scalars = torch.full((2, 3), 0.5), torch.tensor(0.5), None, *BETAS, EPS
    torch.library.opcheck(torch.ops.megalite.adamw.default, (*lists, *scalars))


@pytest.mark.parametrize("backend", BACKENDS)
def test_optimizer_is_that_of_torch(backend: str) -> None:
    """Over several steps, and its state can be handed over in the middle."""
    ours = [random(4, 6, dtype=torch.float64, seed=0), random(7, dtype=torch.float64, seed=1)]
    theirs = [weight.clone().requires_grad_() for weight in ours]
    ours = [weight.requires_grad_() for weight in ours]
    options: dict[str, Any] = {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": DECAY}

    def update(*lists: Any, **given: Any) -> None:
        adamw(*lists, **given, backend=backend)

    optimizers = FusedAdamW(ours, **options, update=update), torch.optim.AdamW(theirs, **options, fused=True)
    for step in range(6):
        for number, pair in enumerate(zip(ours, theirs, strict=True)):
            for weight in pair:
                weight.grad = random(*weight.shape, dtype=torch.float64, seed=10 * step + number)
        for optimizer in optimizers:
            optimizer.step()
        if step == 2:
            optimizers[0].load_state_dict(deepcopy(optimizers[1].state_dict()))
    for weight, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(weight, other, rtol=0, atol=1e-14)


def test_optimizer_skips_and_clips() -> None:
    weight = torch.ones(4, requires_grad=True)
    optimizer = FusedAdamW([weight], lr=LR)
    weight.grad = torch.full((4,), 2.0)
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    assert torch.equal(weight, torch.ones(4))
    optimizer.found_inf, optimizer.clip = torch.zeros(()), torch.tensor(0.25)
    optimizer.step()
    torch.testing.assert_close(optimizer.state[weight]["exp_avg"], torch.full((4,), 0.05))


def test_bytes_of_a_parameter() -> None:
    assert bytes_moved(10**9) == (28 * 10**9, 0)
    assert bytes_moved(1, torch.bfloat16, torch.bfloat16) == (28, 0)
