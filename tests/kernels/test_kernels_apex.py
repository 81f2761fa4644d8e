"""The adapters to NVIDIA apex: without it, and with modules in its place that note how they are called.

Nothing here can show what apex's own kernels compute; the places of the arguments are those of its C++ source.
"""

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from megalite_kernels import FusedAdamW, adamw, add_rms_norm, apex, rms_norm

HYPER: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}


def test_a_package_named_apex_is_not_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "apex", ModuleType("apex"))
    monkeypatch.setitem(sys.modules, "amp_C", None)
    monkeypatch.setitem(sys.modules, "fused_layer_norm_cuda", None)
    weight = torch.ones(4, requires_grad=True)
    weight.grad = torch.ones(4)
    with pytest.raises(ValueError, match=r"amp_C cannot be loaded .*pip install .*--cuda_ext"):
        FusedAdamW([weight], update=apex.adamw).step()
    with pytest.raises(ValueError, match=r"fused_layer_norm_cuda cannot be loaded .*PyPI is unrelated"):
        apex.rms_norm(torch.ones(2, 4), torch.ones(4), 1e-5)


def multi_tensor_adam_capturable(
    chunk: int, noop: Tensor, lists: list[list[Tensor]], lr: Tensor, beta1: float, beta2: float, eps: float,
    step: Tensor, mode: int, bias_correction: int, weight_decay: float, inv_scale: Tensor,
) -> None:  # fmt: skip
    """What apex's function of that name does, as its source has it."""
    assert noop.dtype == step.dtype == torch.int32
    assert lr.dtype == inv_scale.dtype == torch.float32
    assert (mode, bias_correction) == (1, 1)
    assert all(tensor.numel() and tensor.dtype == torch.float32 for tensors in lists for tensor in tensors)
    if noop == 1:
        return
    for g, p, m, v in zip(*lists, strict=True):
        g *= inv_scale
        m.copy_(beta1 * m + (1 - beta1) * g)
        v.copy_(beta2 * v + (1 - beta2) * g * g)
        direction = m / (1 - beta1 ** step.item()) / ((v / (1 - beta2 ** step.item())).sqrt() + eps)
        p -= lr * (direction + weight_decay * p)


@pytest.fixture
def amp_c(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("amp_C")
    module.multi_tensor_adam_capturable = multi_tensor_adam_capturable  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "amp_C", module)


@pytest.mark.parametrize("skip", [0.0, 1.0])
@pytest.mark.parametrize("grad", [torch.float32, torch.bfloat16])
def test_adamw_takes_what_ours_takes(amp_c: None, grad: torch.dtype, skip: float) -> None:
    results = []
    for update in (apex.adamw, adamw):
        generator = torch.Generator().manual_seed(0)
        weights, grads, firsts, seconds = ([torch.randn(n, generator=generator) for n in (5, 64, 0)] for _ in range(4))
        seconds = [second.square() for second in seconds]
        steps, copies = [torch.tensor(3.0) for _ in weights], [weight.to(torch.bfloat16) for weight in weights]
        lists = weights, [g.to(grad) for g in grads], firsts, seconds, steps
        update(*lists, copies=copies, **HYPER, clip=torch.tensor(0.5), found_inf=torch.tensor([skip]))
        results.append([*weights, *firsts, *seconds, *steps, *copies])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert results[0][-4] == 4 - skip


def test_adamw_refuses_what_apex_would_misread(amp_c: None) -> None:
    tensor = torch.ones(4, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"weights are torch\.bfloat16, but must be float32"):
        apex.adamw([tensor], [tensor], [tensor], [tensor], [torch.zeros(())], **HYPER)
    apex.adamw([], [], [], [], [], **HYPER)


def test_rms_norm_takes_what_ours_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    def fused_rms_norm_affine(x: Tensor, weight: Tensor, normalized_shape: tuple[int, ...], eps: float) -> Tensor:
        assert weight.dtype == x.dtype
        return torch.nn.functional.rms_norm(x, normalized_shape, weight, eps)

    norms = ModuleType("apex.normalization.fused_layer_norm")
    norms.fused_rms_norm_affine = fused_rms_norm_affine  # type: ignore[attr-defined]
    names = "fused_layer_norm_cuda", "apex", "apex.normalization"
    for name in names:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, norms.__name__, norms)
    x, weight = torch.randn(3, 8), torch.randn(8, dtype=torch.float64)
    expected = x / (x.square().mean(-1, keepdim=True) + 0.1).sqrt() * weight
    torch.testing.assert_close(apex.rms_norm(x, weight, 0.1), expected.to(x.dtype))
    torch.testing.assert_close(rms_norm(x, weight, 0.1, backend="apex"), expected.to(x.dtype))
    normal, total = add_rms_norm(x / 2, x / 2, weight, 0.1, backend="apex")
    torch.testing.assert_close((normal, total), (expected.to(x.dtype), x))
