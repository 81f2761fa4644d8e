"""The norm of all gradients together: sqrt(Σ g²) over all tensors of all ranks, each element counted once.

Every program sums the squares of its part of a tensor. These sums are added in a fixed order, so that the norm of
equal gradients is bitwise equal. To clip gradients (Pascanu et al. 2013, arXiv 1211.5063, §3.2), the coefficient is
given to `adamw`, which saves one pass that reads and writes them.
"""

from collections.abc import Iterator, Sequence
from functools import partial, reduce

import torch
import torch.distributed as dist
from torch import Tensor

from megalite_kernels.backend import Backend, jit, on_device, tl, use_triton, wide_dtype, widen
from megalite_kernels.compile_cases import LLAMAS, CompileCase, meta
from megalite_kernels.tensor_table import find, launches, pointer, size_of

BLOCK = 1024


def reference(grads: Sequence[Tensor]) -> Tensor:
    return torch.stack([grad.double().square().sum() for grad in grads]).sum().sqrt()


@jit
def _squares_kernel(
    Table, Sums, tensors,
    TYPE: tl.constexpr, ALIGNED: tl.constexpr, STEPS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = find(Table, tensors, 3, STEPS) * 3
    start = (tl.program_id(0) - tl.load(Table + row)) * CHUNK
    size = size_of(Table, row, ALIGNED)
    grad = pointer(Table, row + 2, TYPE, ALIGNED)
    squares = tl.zeros([BLOCK], Sums.dtype.element_ty)
    for block in range(0, tl.minimum(size - start, CHUNK), BLOCK):
        at = start + block + tl.arange(0, BLOCK)
        g = widen(tl.load(grad + at, mask=at < size, other=0.0))
        squares += g * g
    tl.store(Sums + tl.program_id(0), tl.sum(squares, 0))


@on_device
def launch_squares(grads: Sequence[Tensor]) -> Tensor:
    """Sums of squares of parts of contiguous tensors."""
    sums = []
    for numbers, (tensors,), (kind,), table, programs, options in launches([grads]):
        sums.append(tensors[0].new_empty(programs, dtype=wide_dtype(tensors[0].dtype)))
        _squares_kernel[(programs,)](table, sums[-1], len(numbers), TYPE=kind, BLOCK=BLOCK, **options)
    return torch.cat([part.double() for part in sums]) if sums else torch.zeros(0, dtype=torch.float64)


@torch.library.custom_op("megalite::square_sum", mutates_args=())
def _op(grads: Sequence[Tensor]) -> Tensor:
    """The sum of squares, in float64."""
    return launch_squares([grad.contiguous() for grad in grads]).sum().to(grads[0].device)


@_op.register_fake
def _(grads: Sequence[Tensor]) -> Tensor:
    return grads[0].new_empty((), dtype=torch.float64)


@torch.no_grad()
def grad_norm(
    grads: Sequence[Tensor],
    counted: Sequence[bool] | None = None,
    groups: Sequence[dist.ProcessGroup] = (),
    backend: Backend = "auto",
) -> Tensor:
    """The L2 norm of all gradients together, 0-dimensional, in float32 or wider; the same on every rank of `groups`.

    grads: this rank's parts, at least one, all on one device. counted: for each, whether this rank counts it; by
    default, all. If several ranks hold the same elements, exactly one may count them. groups: the sums of squares are
    added over each group in turn, in one all-reduce each; together, the groups must reach every rank once.
    """
    if not grads:
        raise ValueError("grad_norm: no gradients; give at least one, counted or not, so that their device is known")
    chosen = grads if counted is None else [grad for grad, counts in zip(grads, counted, strict=True) if counts]
    if not chosen:
        squares = grads[0].new_zeros((), dtype=torch.float64)
    elif use_triton(backend, grads[0].device):
        squares = _op(chosen)
    else:
        wide = reduce(torch.promote_types, (grad.dtype for grad in chosen), torch.float32)
        squares = torch.stack(torch._foreach_norm(list(chosen), dtype=wide)).double().square().sum()
    for group in groups:
        dist.all_reduce(squares, group=group)
    return squares.sqrt().to(wide_dtype(grads[0].dtype))


def clip_coefficient(norm: Tensor, limit: float) -> Tensor:
    """The factor that reduces gradients with this norm to a norm of at most `limit`."""
    return (limit / (norm + 1e-6)).clamp(max=1.0)


def bytes_moved(elements: int, dtype: torch.dtype) -> tuple[int, int]:
    """Bytes moved: gradients in. There is no backward."""
    return elements * dtype.itemsize, 0


def compile_cases() -> Iterator[CompileCase]:
    for dtype in (torch.bfloat16, torch.float32):
        for model, shape in LLAMAS.items():
            grads = [meta(shape.ffn, shape.width, dtype=dtype)] * 300
            yield CompileCase("grad_norm", model, dtype, partial(launch_squares, grads))
