"""AdamW over many tensors against its formula in float64 and against PyTorch's."""

import sys
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from exact import assert_updated
from hypothesis import given, settings
from hypothesis import strategies as st
from rounding import DEVICE, UNITS, assert_rounded, random
from tables import table_of_the_end
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megalite_kernels.adamw import FusedAdamW, adamw, bytes_moved, fastest_adamw, fused_adamw
from megalite_kernels.tensor_table import CHUNK

LR, BETAS, EPS, DECAY, CLIP = 3e-3, (0.9, 0.99), 1e-8, 0.1, 0.3
HYPER: dict[str, Any] = {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": DECAY}
SIZES = [5, 0, 64, 1, CHUNK, 2 * CHUNK + 16, CHUNK + 3]
BACKENDS = ["torch", "triton"]


def number(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(value, dtype=dtype, device=DEVICE)


class Tensors:
    """What an update takes, in the middle of a training."""

    def __init__(self, sizes: list[int], weight: torch.dtype, grad: torch.dtype, copy: torch.dtype | None) -> None:
        state = torch.promote_types(weight, torch.float32)
        self.weights = [random(size, dtype=weight, seed=size) for size in sizes]
        self.grads = [random(size, dtype=grad, seed=size + 1) for size in sizes]
        self.firsts = [random(size, dtype=state, seed=size + 2, scale=0.1) for size in sizes]
        self.seconds = [random(size, dtype=state, seed=size + 3, scale=0.1).square() for size in sizes]
        self.steps = [number(4.0 + i) for i in range(len(sizes))]
        self.copies = [] if copy is None else [torch.zeros(size, dtype=copy, device=DEVICE) for size in sizes]

    def changing(self) -> list[Tensor]:
        return [*self.weights, *self.firsts, *self.seconds, *self.steps, *self.copies]

    def update(self, **options: Any) -> None:
        lists = self.weights, self.grads, self.firsts, self.seconds, self.steps
        adamw(*lists, copies=self.copies, **HYPER, **options)


def check(sizes: list[int], weight: torch.dtype, grad: torch.dtype, copy: torch.dtype | None, **options: Any) -> None:
    tensors, before = Tensors(sizes, weight, grad, copy), Tensors(sizes, weight, grad, copy)
    tensors.update(clip=number(CLIP, torch.float64), **options)
    for i, size in enumerate(sizes):
        old = [some[i] for some in (before.weights, before.grads, before.firsts, before.seconds)]
        step = 5 + i
        assert tensors.steps[i] == step
        assert torch.equal(tensors.grads[i], before.grads[i])
        if not size:
            continue
        new = tensors.weights[i], tensors.firsts[i], tensors.seconds[i]
        assert_updated(new, *old, step, **HYPER, clip=CLIP if weight == torch.float64 else torch.tensor(CLIP).item())
        if copy:
            rounded = tensors.weights[i].to(copy)
            assert_rounded(tensors.copies[i], rounded.double(), rounded.double().abs(), outer=4, inner=0)


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
    tensors.update(found_inf=number(bad)[None], backend=backend)
    for tensor, old in zip(tensors.changing(), before, strict=True):
        assert torch.equal(tensor, old)


@pytest.mark.parametrize("backend", BACKENDS)
def test_found_inf_of_zero_updates(backend: str) -> None:
    check([5, 64], torch.float32, torch.float32, None, found_inf=number(0.0), backend=backend)


def test_first_update_after_a_skipped_one_is_update_number_one() -> None:
    tensors = Tensors([64], torch.float32, torch.float32, None)
    tensors.steps[0].zero_()
    tensors.update(found_inf=number(1.0), backend="triton")
    assert tensors.steps[0] == 0
    tensors.update(found_inf=number(0.0), backend="triton")
    assert tensors.steps[0] == 1
    assert tensors.weights[0].isfinite().all()


def test_tensors_that_begin_anywhere() -> None:
    """Addresses that are no multiples of 16 bytes, beside ones that are."""
    tensors, expected = (Tensors([64, 32], torch.float32, torch.float32, None) for _ in range(2))
    storage = torch.zeros(70, device=DEVICE)
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
    weight, first, second = (torch.zeros(16, device=DEVICE) for _ in range(3))
    options: dict[str, Any] = {"lr": 1.0, "betas": (0.9, 0.9999), "eps": 0.0, "weight_decay": 0.0, "backend": "triton"}
    adamw([weight], [torch.full_like(weight, 0.5)], [first], [second], [number(0.0)], **options)
    torch.testing.assert_close(weight, torch.full_like(weight, -1.0), rtol=16 * UNITS[torch.float32], atol=0)


def test_gradients_may_be_strided_and_weights_may_not() -> None:
    tensors, expected = (Tensors([64], torch.float32, torch.float32, None) for _ in range(2))
    tensors.grads[0] = tensors.grads[0].repeat_interleave(2)[::2]
    tensors.update(backend="triton")
    expected.update(backend="triton")
    assert torch.equal(tensors.weights[0], expected.weights[0])
    tensors.weights[0] = tensors.weights[0].repeat_interleave(2)[::2]
    with pytest.raises(ValueError, match=r"shape \(64,\) is not contiguous"):
        tensors.update(backend="triton")


def test_elements_beyond_32_bits_of_offset(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table that says that the tensor begins 2³¹ elements earlier, for the program of its last elements."""
    tensors, expected = (Tensors([64], torch.float32, torch.bfloat16, None) for _ in range(2))
    expected.update(backend="triton")
    monkeypatch.setattr(sys.modules["megalite_kernels.tensor_table"], "tensor_table", table_of_the_end)
    tensors.update(backend="triton")
    for tensor, other in zip(tensors.changing(), expected.changing(), strict=True):
        assert torch.equal(tensor, other)


def test_no_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is launched, and nothing fails."""
    kernel = MagicMock()
    monkeypatch.setattr(sys.modules["megalite_kernels.adamw"], "_adamw_kernel", kernel)
    adamw([], [], [], [], [], **HYPER, backend="triton")
    assert kernel.mock_calls == []


def test_custom_op() -> None:
    tensors = Tensors([5, 64], torch.float32, torch.float32, torch.bfloat16)
    lists = tensors.weights, tensors.grads, tensors.firsts, tensors.seconds, tensors.copies
    scalars = torch.full((2, 3), 0.5, device=DEVICE), number(0.5), None, *BETAS, EPS
    torch.library.opcheck(torch.ops.megalite.adamw.default, (*lists, *scalars))


@pytest.mark.parametrize("backend", [*BACKENDS, "fused"])
def test_optimizer_is_that_of_torch(backend: str) -> None:
    """Over several steps, and its state can be handed over in the middle."""
    ours = [random(4, 6, dtype=torch.float64, seed=0), random(7, dtype=torch.float64, seed=1)]
    theirs = [weight.clone().requires_grad_() for weight in ours]
    ours = [weight.requires_grad_() for weight in ours]
    options: dict[str, Any] = {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": DECAY}

    update = fused_adamw if backend == "fused" else partial(adamw, backend=backend)
    optimizers = FusedAdamW(ours, **options, update=update), torch.optim.AdamW(theirs, **options, fused=True)
    for step in range(6):
        for i, pair in enumerate(zip(ours, theirs, strict=True)):
            for weight in pair:
                weight.grad = random(*weight.shape, dtype=torch.float64, seed=10 * step + i)
        for optimizer in optimizers:
            optimizer.step()
        if step == 2:
            optimizers[0].load_state_dict(deepcopy(optimizers[1].state_dict()))
    for weight, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(weight, other, rtol=0, atol=0 if backend == "fused" else 1e-14)


@pytest.mark.parametrize("update", [adamw, fused_adamw])
def test_optimizer_skips_and_clips(update: Callable[..., None]) -> None:
    weight = torch.ones(4, device=DEVICE, requires_grad=True)
    optimizer = FusedAdamW([weight], lr=LR, update=update)
    weight.grad = torch.full_like(weight, 2.0)
    optimizer.found_inf = number(1.0)
    optimizer.step()
    assert weight.eq(1).all()
    optimizer.found_inf, optimizer.clip = number(0.0), number(0.25)
    optimizer.step()
    torch.testing.assert_close(optimizer.state[weight]["exp_avg"], torch.full_like(weight, 0.05))


class Called(TorchDispatchMode):
    """The operators that are called meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(str(operator))
        return operator(*args, **(kwargs or {}))


@pytest.mark.parametrize("update", [adamw, fused_adamw])
def test_the_host_reads_no_number_of_the_device(update: Callable[..., None]) -> None:
    """It would wait for all that the device has still to do."""
    weight = torch.ones(4, device=DEVICE, requires_grad=True)
    optimizer = FusedAdamW([weight], lr=LR, update=update)
    weight.grad = torch.full_like(weight, 2.0)
    optimizer.found_inf, optimizer.clip = number(0.0), number(0.25)
    with Called() as called:
        optimizer.step()
    assert any("_foreach_add_" in name or "_fused_adamw_" in name for name in called.names)
    assert "aten._local_scalar_dense.default" not in called.names


@pytest.mark.parametrize(("runs", "expected"), [(True, "kernel"), (False, "PyTorch")])
def test_the_fastest_is_the_kernel_where_triton_runs(
    runs: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, called = sys.modules["megalite_kernels.adamw"], []
    monkeypatch.setattr(module, "use_triton", lambda *_: runs)
    monkeypatch.setattr(module, "adamw", lambda *_, **__: called.append("kernel"))
    monkeypatch.setattr(module, "fused_adamw", lambda *_, **__: called.append("PyTorch"))
    fastest_adamw([torch.zeros(1)], [], [], [], [], **HYPER)
    fastest_adamw([], [], [], [], [], **HYPER)
    assert called == [expected]


def test_steps_join_their_parameters() -> None:
    """torch.optim.AdamW keeps them on the host."""
    weight = torch.nn.Parameter(torch.zeros(4, device="meta"))
    weight.grad = torch.zeros_like(weight)
    optimizer = FusedAdamW([weight], update=lambda *_, **__: None)
    optimizer.step()
    optimizer.state[weight]["step"] = torch.tensor(3.0)
    optimizer.step()
    assert optimizer.state[weight]["step"].device == weight.device


def test_bytes_of_a_parameter() -> None:
    assert bytes_moved(10**9) == (28 * 10**9, 0)
    assert bytes_moved(1, torch.bfloat16, torch.bfloat16) == (28, 0)
