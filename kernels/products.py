"""Matrix products, of which those in float32 on a CPU are oneDNN's where PyTorch's own choice is slow.

On x86 processors PyTorch multiplies float32 by Intel's MKL, which uses 512-bit instructions on Intel's processors
alone. On AMD's that have them, oneDNN takes half the time; PyTorch contains it as well, but calls it for other data
types. One of its calls takes some 10 µs more, so MKL keeps small products.
"""

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

LEAST_MULTIPLICATIONS = 1 << 21  # in a product by oneDNN: with fewer, MKL takes less time
HAS_ONEDNN = hasattr(torch.ops.mkldnn, "_linear_pointwise")
BLOCK = 512  # rows or columns of a result that are made at a time: what is copied is then still in cache


def _prefers_onednn(processors: Path = Path("/proc/cpuinfo")) -> bool:
    """Return whether oneDNN multiplies float32 faster on this CPU: one of AMD's that has AVX-512."""
    if not (HAS_ONEDNN and torch.backends.mkl.is_available()):
        return False
    listed = processors.read_text() if processors.exists() else ""
    return "AuthenticAMD" in listed and torch.backends.cpu.get_cpu_capability().startswith("AVX512")


PREFERS_ONEDNN = _prefers_onednn()


def suits(a: Tensor, b: Tensor, columns: int) -> bool:
    """Return whether oneDNN is to multiply a with b, for a result of so many columns; not where it is switched off."""
    if not (a.is_cpu and a.dtype is b.dtype is torch.float32 and a.ndim > 1):
        return False
    if a.numel() * columns < LEAST_MULTIPLICATIONS or isinstance(a, FakeTensor):
        return False
    fits = a.shape[-1] * columns == b.numel()  # else PyTorch's message says which sizes do not
    return fits and bool(torch.backends.mkldnn.enabled)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, factor: float = 1.0) -> Tensor:
    """factor · x Wᵀ + bias, for x `[…, in]`, weight `[out, in]` and bias `[out]`. Autograd can differentiate it."""
    if PREFERS_ONEDNN and suits(x, weight, weight.shape[0]):
        make = _op if torch.compiler.is_compiling() or torch.is_grad_enabled() else _onednn
        if factor == 1:
            return make(x, weight, bias)
        made = make(x, weight, None).mul_(factor)
        return made if bias is None else made.add_(bias)
    if factor == 1:
        return F.linear(x, weight, bias)
    rows, beta = x.flatten(0, -2), 0 if bias is None else 1
    added = x.new_zeros(()) if bias is None else bias
    return torch.addmm(added, rows, weight.t(), beta=beta, alpha=factor).unflatten(0, x.shape[:-1])


def matmul(a: Tensor, b: Tensor, factor: float = 1.0) -> Tensor:
    """factor · a b, for a `[…, n]` and a matrix b `[n, m]`."""
    if factor != 1 or (PREFERS_ONEDNN and suits(a, b, b.shape[1])):
        return linear(a, b.t(), factor=factor)
    return a @ b


def addmm(total: Tensor, a: Tensor, b: Tensor, beta: float, alpha: float = 1.0) -> Tensor:
    """beta·total + alpha·a·b, for matrices of one data type, as a new tensor."""
    if PREFERS_ONEDNN and suits(a, b, b.shape[1]):
        return matmul(a, b, alpha).add_(total, alpha=beta)
    return torch.addmm(total, a, b, beta=beta, alpha=alpha)


def multiply(a: Tensor, b: Tensor, out: Tensor) -> None:
    """Write the product of two matrices to `out`, of the same data type."""
    if PREFERS_ONEDNN and suits(a, b, b.shape[1]):
        _add_blocks(out, a, b, 0, 1.0)
    else:
        torch.mm(a, b, out=out)


def has_gpu_products(x: Tensor) -> bool:
    """Return whether products with `x` are a GPU's, which adds them to wider sums without copies.

    Where memory is counted, with tensors that have no data, it is a GPU's.
    """
    return x.is_cuda or isinstance(x, FakeTensor)


def add_product(total: Tensor, a: Tensor, b: Tensor, beta: int = 1, alpha: float = 1.0) -> None:
    """total = beta·total + alpha·a·b, rounded only to the data type of `total`, which may be wider than a's and b's.

    beta: 1; or 0, and `total` may be uninitialized.
    """
    if total.dtype == a.dtype:
        if PREFERS_ONEDNN and suits(a, b, b.shape[1]):
            _add_blocks(total, a, b, beta, alpha)
        else:
            torch.addmm(total, a, b, beta=beta, alpha=alpha, out=total)
    elif has_gpu_products(total):
        if total.is_cuda:  # without data, there is nothing to add
            torch.addmm(total, a, b, out_dtype=total.dtype, beta=beta, alpha=alpha, out=total)
    else:  # a CPU has no such product; wide copies of all logits would take more memory
        wide = b.to(total.dtype)
        for start in range(0, len(a), BLOCK):
            rows = slice(start, start + BLOCK)
            add_product(total[rows], a[rows].to(total.dtype), wide, beta, alpha)


def _add_blocks(total: Tensor, a: Tensor, b: Tensor, beta: int, alpha: float) -> None:
    """`add_product` by oneDNN, whose products are new tensors: of many rows or columns, some at a time."""
    tall = total.shape[0] > total.shape[1]
    for start in range(0, max(total.shape), BLOCK):
        block = slice(start, start + BLOCK)
        into = total[block] if tall else total[:, block]
        made = _onednn(a[block], b.t(), None) if tall else _onednn(a, b[:, block].t(), None)
        if alpha != 1:
            made.mul_(alpha)
        if beta:
            into.add_(made)
        else:
            into.copy_(made)


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if bias is not None:
        bias = bias.contiguous()  # it is read as if it were
    made: Tensor = torch.ops.mkldnn._linear_pointwise.default(_dense(x), _dense(weight), bias, "none", [], "")
    return made


def _dense(x: Tensor) -> Tensor:
    """x, or a copy of it where its elements do not lie side by side: its products would be hundreds of times slower."""
    return x if x.is_contiguous() or (x.ndim == 2 and x.t().is_contiguous()) else x.contiguous()


@torch.library.custom_op("megalite::linear", mutates_args=())
def _op(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return _onednn(x, weight, bias).detach()  # no view, which autograd would not let others change in place


@_op.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None], output: Tensor) -> None:
    (x, weight, _), (of_x, of_weight) = inputs, ctx.needs_input_grad[:2]
    ctx.save_for_backward(x if of_weight else None, weight if of_x else None)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    x, weight = ctx.saved_tensors
    of_x, of_weight, of_bias = ctx.needs_input_grad
    rows = grad.flatten(0, -2)
    return (
        _op(grad, weight.t(), None) if of_x else None,
        _op(rows.t(), x.flatten(0, -2).t(), None) if of_weight else None,
        rows.sum(0) if of_bias else None,
    )


_op.register_autograd(_gradients, setup_context=_save)
