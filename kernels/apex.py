"""NVIDIA apex's fused kernels behind the interfaces of `adamw` and `rms_norm`, if apex was compiled with them.

An installed package named apex is not enough: the one on PyPI is unrelated, and NVIDIA's can be installed without
kernels. So this module looks for the extension modules that hold the kernels, amp_C and fused_layer_norm_cuda.
"""

from collections.abc import Sequence
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

NORMS = "apex.normalization.fused_layer_norm"
MODULES = {"adamw": ("amp_C",), "rms_norm": ("fused_layer_norm_cuda", NORMS)}  # by operation
CHUNK = 65536  # elements that apex gives to one block of threads
INSTALL = (
    "git clone https://github.com/NVIDIA/apex && pip install -v --no-build-isolation "
    "--config-settings '--build-option=--cpp_ext' --config-settings '--build-option=--cuda_ext' ./apex"
)


def extension(name: str) -> ModuleType:
    """An extension module of NVIDIA apex. Raises ValueError, which tells how to install it, if it cannot be loaded."""
    try:
        return import_module(name)
    except ImportError as error:
        raise ValueError(
            f"apex is asked for, but its compiled module {name} cannot be loaded ({error}). The package "
            f"named apex on PyPI is unrelated; NVIDIA's is built, with a CUDA compiler, by: {INSTALL}"
        ) from error


def check(operation: str, device: torch.device) -> None:
    """Raises ValueError if apex cannot run `operation`, a key of MODULES, on `device`."""
    for name in MODULES[operation]:
        extension(name)
    if device.type != "cuda":
        raise ValueError(f"apex is asked for, but tensors are on {device.type}; move them to cuda, or choose auto")


@torch.no_grad()
def adamw(
    weights: Sequence[Tensor],
    grads: Sequence[Tensor],
    firsts: Sequence[Tensor],
    seconds: Sequence[Tensor],
    steps: Sequence[Tensor],
    *,
    copies: Sequence[Tensor] = (),
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    clip: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """Do what `megalite_kernels.adamw.adamw` does with apex's FusedAdam kernel; for `FusedAdamW(…, update=adamw)`.

    There are three differences: weights must be float32, all must have had the same number of updates, and float32
    gradients are overwritten by the clipped ones.
    """
    amp_c = extension("amp_C")
    for weight in weights:
        if weight.dtype != torch.float32:
            raise ValueError(f"adamw of apex: weights are {weight.dtype}, but must be float32; choose other kernels")
    if not weights:
        return
    device, counts = weights[0].device, list(steps)
    skips = torch.zeros(1, dtype=torch.int32, device=device)
    if found_inf is not None:
        skips = (found_inf != 0).to(torch.int32).reshape(1)
    torch._foreach_add_(counts, (1 - skips[0]).to(torch.float32), alpha=1)  # see adamw.py
    whole = [grad.to(torch.float32).contiguous() for grad in grads]
    # If the last tensor is empty, apex never launches the kernel for the tensors before it.
    rows = [row for row in zip(whole, weights, firsts, seconds, strict=True) if row[0].numel()]
    if rows:
        amp_c.multi_tensor_adam_capturable(
            CHUNK,
            skips,
            [list(column) for column in zip(*rows, strict=True)],
            torch.full((), lr, dtype=torch.float32, device=device),
            *betas,
            eps,
            counts[0].to(torch.int32),
            1,  # decoupled weight decay
            1,  # bias correction
            weight_decay,
            torch.ones((), device=device) if clip is None else clip.to(torch.float32),
        )
    for copy, weight in zip(copies, weights, strict=bool(copies)):
        copy.copy_(weight)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return what `megalite_kernels.rms_norm.rms_norm` returns, computed by the kernel of apex's FusedRMSNorm."""
    extension("fused_layer_norm_cuda")
    return extension(NORMS).fused_rms_norm_affine(x, weight.to(x.dtype), (x.shape[-1],), eps)
