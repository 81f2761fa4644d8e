"""Which implementation is chosen, and what is said where it cannot be had."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import requires

import pytest
import torch
from packaging.requirements import Requirement
from rounding import DEVICE, random
from torch import Tensor

from megalite_kernels import (
    add_rms_norm,
    collect_rows,
    qk_norm_rope,
    rms_norm,
    rope,
    spread_rows,
    swiglu,
    weighted_swiglu,
)
from megalite_kernels.backend import USES_INTERPRETER, Backend, as_rows, on_device, power_of_2, use_triton

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_these_tests_run_kernels() -> None:
    """Compiled on a GPU, otherwise in the interpreter."""
    assert (DEVICE.type == "cuda") != USES_INTERPRETER


@pytest.mark.skipif(not USES_INTERPRETER, reason="needs TRITON_INTERPRET=1")
def test_interpreted_kernels_run_only_when_asked_for() -> None:
    assert use_triton("triton", CPU)
    assert not use_triton("auto", CUDA)
    assert not use_triton("auto", CPU)
    assert not use_triton("torch", CUDA)


def test_unknown_backend() -> None:
    with pytest.raises(ValueError, match="'cuda' is no backend; choose auto, triton or torch"):
        rms_norm(torch.ones(1, 4), torch.ones(4), 1e-5, backend="cuda")  # type: ignore[arg-type]


def _run(program: str, interpret: str = "0") -> str:
    environment = {**os.environ, "TRITON_INTERPRET": interpret}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True, env=environment
    )
    return done.stdout


def test_compiled_kernels_want_cuda() -> None:
    found = _run("""
import torch
from megalite_kernels import rms_norm
from megalite_kernels.backend import use_triton
print(use_triton("auto", torch.device("cuda")), use_triton("auto", torch.device("cpu")))
x = torch.ones(2, 4)
print(torch.equal(rms_norm(x, torch.ones(4), 0.0), x))
try:
    rms_norm(x, torch.ones(4), 1e-5, backend="triton")
except ValueError as error:
    print(error)
""").splitlines()
    assert found[:2] == ["True False", "True"]
    assert "tensors are on cpu; move them to cuda, choose auto, or set TRITON_INTERPRET=1" in found[2]


def test_package_without_triton() -> None:
    """It imports, runs every operation in PyTorch, and says what to install where Triton is asked for."""
    found = _run("""
import sys
sys.modules["triton"] = None
import torch
from megalite_kernels import *
from megalite_kernels.backend import use_triton
print(use_triton("auto", torch.device("cuda")))
x, weight = torch.ones(2, 4, requires_grad=True), torch.ones(4, requires_grad=True)
heads, angles, targets = torch.ones(2, 1, 1, 4), torch.ones(2, 1, 1, 2), torch.zeros(2, dtype=torch.int64)
print(torch.equal(rms_norm(x, weight, 0.0), x))
results = [
    *add_rms_norm(x, x, weight, 0.0), swiglu(x, x), rope(heads, angles, angles),
    qk_norm_rope(heads, weight, angles, angles, 0.0), cross_entropy(x * 1, targets),
    linear_cross_entropy(x, x, targets), collect_rows(weighted_swiglu(x, x, torch.ones(2)), targets.view(1, 2)),
    spread_rows(x, torch.tensor([[1], [0]])),
]
sum(result.sum() for result in results).backward()
FusedAdamW([x, weight]).step()
print(grad_norm([x.grad, weight.grad]).item() > 0)
try:
    rms_norm(x, weight, 1e-5, backend="triton")
except ValueError as error:
    print(error)
""").splitlines()
    assert found[:3] == ["False", "True", "True"]
    required = next(each for each in requires("megalite") or () if each.startswith("triton")).partition(";")[0]
    told = found[3].partition("not installed; on Linux: pip install ")[2].partition(", or")[0]
    assert Requirement(told.strip("'")) == Requirement(required)


def test_rows_are_views_where_they_can_be() -> None:
    x = torch.arange(24.0).reshape(2, 3, 4)
    assert as_rows(x).data_ptr() == x.data_ptr()
    cut = x[..., 1:3]
    assert as_rows(cut).stride() == (4, 1)
    assert as_rows(cut).data_ptr() == cut.data_ptr()
    for copied in (x.transpose(0, 1), x[..., ::2], x.transpose(1, 2)):
        assert torch.equal(as_rows(copied), copied.reshape(-1, copied.shape[-1]))
        assert as_rows(copied).stride(-1) == 1
    assert as_rows(x[:, :0]).shape == (0, 4)


def test_kernels_are_launched_where_tensors_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton by itself launches on the current device; what is given first may be lists of tensors."""
    x, now = torch.ones(1), [torch.ones(1)]

    @contextmanager
    def device_of(tensor: Tensor) -> Iterator[None]:
        now.append(tensor)
        yield
        now.pop()

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    assert on_device(lambda first, factor=1: (now[-1] is first, factor))(x, factor=2) == (True, 2)
    assert on_device(lambda first: now[-1] is x)([[x, torch.ones(1)], [torch.ones(1)]])
    assert now[-1] is not x


def test_power_of_2() -> None:
    assert [power_of_2(n) for n in (0, 1, 2, 3, 4, 5, 1024, 1025)] == [1, 1, 2, 4, 4, 8, 1024, 2048]


def _layer(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, backend: Backend) -> Tensor:
    """Every operation of a decoder's layer."""
    y = qk_norm_rope(x, weight, cos, sin, 1e-5, 1, "interleaved", backend)
    normal, total = add_rms_norm(x, rope(y, cos, sin, 1, backend=backend), weight, 1e-5, backend)
    y = rms_norm(swiglu(rms_norm(normal, weight, 1e-5, backend), total, backend), weight, 1e-5, backend)
    places = torch.arange(y[..., 0].numel() * 2, device=y.device).flip(0).view(*y.shape[:-1], 2)
    rows = spread_rows(y, places, backend)
    return collect_rows(weighted_swiglu(rows, rows, rows.mean(1).sigmoid(), backend), places, backend)


def test_compiled_as_one_graph() -> None:
    """With custom ops the compiler sees no break, and the same results come out."""
    cos, sin = (random(4, 1, 1, 4, dtype=torch.float64, seed=seed) for seed in (2, 3))
    inputs = [random(3, 1, 2, 8, dtype=torch.float64, seed=0), random(8, dtype=torch.float64, seed=1)]
    inputs = [x.requires_grad_() for x in inputs]
    expected = _layer(*inputs, cos, sin, "torch")
    found = torch.compile(_layer, fullgraph=True, backend="aot_eager")(*inputs, cos, sin, "triton")
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    gradients = (torch.autograd.grad(y.square().sum(), inputs) for y in (found, expected))
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-10)
