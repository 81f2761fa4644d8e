"""Muon's two passes over memory (Jordan 2024, kellerjordan.github.io/posts/muon), each over many tensors in one launch:

    m = m + (1 − μ)·(c·g − m)        u = m − (1 − μ)·(m − c·g) with Nesterov, else m      (c: the clipping coefficient)
    w = (1 − lr·λ)·w − lr·s·o        (o: u made orthogonal; s: its scale)

The first writes u in the data type in which it is made orthogonal, the second can write a copy of the weights in a
narrower one. Every tensor is read and written at most once. An element's bits do not depend on the tensors beside it.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megalite_kernels.backend import Backend, Program, jit, on_device, tl, use_triton, wide_dtype, widen
from megalite_kernels.compile_cases import LLAMAS, CompileCase, meta
from megalite_kernels.tensor_table import check_contiguous, find, launches, numbers_on, pointer, size_of

PROGRAM = Program(elements=4096, warps=16)  # a block is a part of a chunk


def reference_momentum(
    grad: Tensor, average: Tensor, momentum: float, nesterov: bool = True, clip: float = 1.0
) -> tuple[Tensor, Tensor]:
    """The average after an update, and u, in float64."""
    grad, average = grad.double() * clip, average.double()
    average = momentum * average + (1 - momentum) * grad
    return average, (1 - momentum) * grad + momentum * average if nesterov else average


def reference_update(weight: Tensor, update: Tensor, rate: float, decay: float) -> Tensor:
    """The weight after an update, in float64. decay: the factor that is left of the weight."""
    return decay * weight.double() - rate * update.double()


@jit
def _lerp(start, end, WEIGHT: tl.constexpr):
    """`torch.lerp`, with its roundings on CUDA."""
    if WEIGHT < 0.5:
        return tl.fma(end - start, tl.full(start.shape, WEIGHT, start.dtype), start)
    return tl.fma(end - start, tl.full(start.shape, WEIGHT - 1, start.dtype), end)


@jit
def _momentum_kernel(
    Table, Clip, FoundInf, tensors,
    MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr, COLUMNS: tl.constexpr,
    GRAD: tl.constexpr, STATE: tl.constexpr, DIRECTION: tl.constexpr,
    ALIGNED: tl.constexpr, STEPS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Average one chunk of one tensor, and write its part of u where a direction is asked for."""
    row = find(Table, tensors, COLUMNS, STEPS) * COLUMNS
    start = (tl.program_id(0) - tl.load(Table + row)) * CHUNK
    size = size_of(Table, row, ALIGNED)
    grads = pointer(Table, row + 2, GRAD, ALIGNED)
    averages = pointer(Table, row + 3, STATE, ALIGNED)
    if FoundInf is not None:
        size = tl.where(tl.load(FoundInf) == 0, size, 0)
    for block in range(0, tl.minimum(size - start, CHUNK), BLOCK):
        at = start + block + tl.arange(0, BLOCK)
        inside = at < size
        g = widen(tl.load(grads + at, mask=inside, other=0.0))
        if Clip is not None:
            g *= tl.load(Clip)
        m = _lerp(widen(tl.load(averages + at, mask=inside, other=0.0)), g, 1 - MOMENTUM)
        tl.store(averages + at, m.to(STATE), mask=inside)
        if DIRECTION is not None:
            u = _lerp(g, m, MOMENTUM) if NESTEROV else m
            tl.store(pointer(Table, row + 4, DIRECTION, ALIGNED) + at, u.to(DIRECTION), mask=inside)


@jit
def _update_kernel(
    Table, Factors, FoundInf, tensors,
    COLUMNS: tl.constexpr, WEIGHT: tl.constexpr, UPDATE: tl.constexpr, COPY: tl.constexpr,
    ALIGNED: tl.constexpr, STEPS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Update one chunk of one tensor. Factors of each tensor: lr·s and 1 − lr·λ."""
    tensor = find(Table, tensors, COLUMNS, STEPS)
    row = tensor * COLUMNS
    start = (tl.program_id(0) - tl.load(Table + row)) * CHUNK
    size = size_of(Table, row, ALIGNED)
    weights = pointer(Table, row + 2, WEIGHT, ALIGNED)
    updates = pointer(Table, row + 3, UPDATE, ALIGNED)
    rate = tl.load(Factors + tensor * 2)
    decay = tl.load(Factors + tensor * 2 + 1)
    if FoundInf is not None:
        size = tl.where(tl.load(FoundInf) == 0, size, 0)
    for block in range(0, tl.minimum(size - start, CHUNK), BLOCK):
        at = start + block + tl.arange(0, BLOCK)
        inside = at < size
        o = widen(tl.load(updates + at, mask=inside, other=0.0))
        w = widen(tl.load(weights + at, mask=inside, other=0.0))
        w = tl.fma(o.to(w.dtype), -rate, w * decay)
        tl.store(weights + at, w.to(WEIGHT), mask=inside)
        if COPY is not None:
            tl.store(pointer(Table, row + 4, COPY, ALIGNED) + at, w.to(COPY), mask=inside)


@on_device
def launch_momentum(
    lists: Sequence[Sequence[Tensor]], clip: Tensor | None, found_inf: Tensor | None,
    momentum: float, nesterov: bool, program: Program = PROGRAM,
) -> None:  # fmt: skip
    """Launch the kernel. lists: gradients, averages and, if any, directions."""
    for numbers, tensors, (grad, state, *direction), table, programs, options in launches(lists):
        wide = wide_dtype(tensors[1][0].dtype)
        _momentum_kernel[(programs,)](
            table, None if clip is None else clip.to(wide), found_inf, len(numbers),
            MOMENTUM=momentum, NESTEROV=nesterov, COLUMNS=table.shape[1],
            GRAD=grad, STATE=state, DIRECTION=direction[0] if direction else None,
            BLOCK=program.elements, num_warps=program.warps, **options,
        )  # fmt: skip


@on_device
def launch_update(
    lists: Sequence[Sequence[Tensor]], factors: Tensor, found_inf: Tensor | None, program: Program = PROGRAM
) -> None:
    """Launch the kernel. lists: weights, updates and, if any, copies; factors `[tensors, 2]`."""
    for numbers, tensors, (weight, update, *copy), table, programs, options in launches(lists):
        chosen = factors[numbers_on(factors.device, numbers)].to(wide_dtype(tensors[0][0].dtype))
        _update_kernel[(programs,)](
            table, chosen, found_inf, len(numbers),
            COLUMNS=table.shape[1], WEIGHT=weight, UPDATE=update, COPY=copy[0] if copy else None,
            BLOCK=program.elements, num_warps=program.warps, **options,
        )  # fmt: skip


@torch.library.custom_op("megalite::muon_momentum", mutates_args=("averages", "directions"))
def _momentum_op(
    grads: Sequence[Tensor], averages: Sequence[Tensor], directions: Sequence[Tensor],
    clip: Tensor | None, found_inf: Tensor | None, momentum: float, nesterov: bool,
) -> None:  # fmt: skip
    whole = [grad.contiguous() for grad in grads]
    launch_momentum([whole, averages, *([directions] if directions else [])], clip, found_inf, momentum, nesterov)


@torch.library.custom_op("megalite::muon_update", mutates_args=("weights", "copies"))
def _update_op(
    weights: Sequence[Tensor], updates: Sequence[Tensor], copies: Sequence[Tensor],
    rates: Sequence[float], decays: Sequence[float], found_inf: Tensor | None,
) -> None:  # fmt: skip
    whole = [update.contiguous() for update in updates]
    device = weights[0].device
    pairs = torch.tensor([*zip(rates, decays, strict=True)], dtype=torch.float64, pin_memory=device.type == "cuda")
    launch_update([weights, whole, *([copies] if copies else [])], pairs.to(device, non_blocking=True), found_inf)


@_momentum_op.register_fake
@_update_op.register_fake
def _(*_: Any) -> None:
    return None


def _plain_momentum(
    grads: Sequence[Tensor], averages: Sequence[Tensor], directions: Sequence[Tensor],
    clip: Tensor | None, found_inf: Tensor | None, momentum: float, nesterov: bool,
) -> None:  # fmt: skip
    for number, (grad, average) in enumerate(zip(grads, averages, strict=True)):
        grad = grad.to(average.dtype)
        if clip is not None:
            grad = grad * clip.to(grad.dtype)
        new = average.lerp(grad, 1 - momentum)
        average.copy_(_unless_skipped(new, average, found_inf))
        if directions:
            directions[number].copy_(grad.lerp(new, momentum) if nesterov else new)


def _plain_update(
    weights: Sequence[Tensor], updates: Sequence[Tensor], copies: Sequence[Tensor],
    rates: Sequence[float], decays: Sequence[float], found_inf: Tensor | None,
) -> None:  # fmt: skip
    for number, (weight, update) in enumerate(zip(weights, updates, strict=True)):
        new = weight.mul(decays[number]).add_(update, alpha=-rates[number])
        if copies:
            copies[number].copy_(_unless_skipped(new.to(copies[number].dtype), copies[number], found_inf))
        weight.copy_(_unless_skipped(new, weight, found_inf))


def _unless_skipped(new: Tensor, old: Tensor, found_inf: Tensor | None) -> Tensor:
    return new if found_inf is None else torch.where(found_inf == 0, new, old)


@torch.no_grad()
def muon_momentum(
    grads: Sequence[Tensor],
    averages: Sequence[Tensor],
    directions: Sequence[Tensor] = (),
    *,
    momentum: float,
    nesterov: bool,
    clip: Tensor | None = None,
    found_inf: Tensor | None = None,
    backend: Backend = "auto",
) -> None:
    """Average gradients in place. Gradients are not overwritten.

    The i-th tensors of all lists belong together; they may be empty. directions: tensors of any data type that receive
    u; without them it is not computed. clip, 0-dimensional: gradients are multiplied by it. found_inf, float32 of one
    element: if it is not 0, no average changes, and directions mean nothing. All tensors but gradients must be
    contiguous.
    """
    check_contiguous("muon_momentum", (*averages, *directions))
    if averages:
        run = _momentum_op if use_triton(backend, averages[0].device) else _plain_momentum
        run(grads, averages, directions, clip, found_inf, momentum, nesterov)


@torch.no_grad()
def muon_update(
    weights: Sequence[Tensor],
    updates: Sequence[Tensor],
    rates: Sequence[float],
    decays: Sequence[float],
    *,
    copies: Sequence[Tensor] = (),
    found_inf: Tensor | None = None,
    backend: Backend = "auto",
) -> None:
    """Multiply weights by `decays` and subtract `rates` times `updates`, in place.

    The i-th entries of all lists belong together; tensors may be empty. copies: tensors of any data type that receive
    the weights after the update. found_inf, float32 of one element: if it is not 0, nothing changes. All tensors but
    updates must be contiguous.
    """
    check_contiguous("muon_update", (*weights, *copies))
    if weights:
        run = _update_op if use_triton(backend, weights[0].device) else _plain_update
        run(weights, updates, copies, rates, decays, found_inf)


def bytes_moved(
    elements: int,
    grad: torch.dtype = torch.float32,
    working: torch.dtype = torch.bfloat16,
    copy: torch.dtype | None = None,
) -> tuple[int, int]:
    """Bytes moved by both passes, with float32 weights and averages in and out. There is no backward."""
    return elements * (grad.itemsize + 4 * 4 + 2 * working.itemsize + (copy.itemsize if copy else 0)), 0


def compile_cases() -> Iterator[CompileCase]:
    for model, shape in LLAMAS.items():
        wide, narrow = ([meta(shape.ffn, shape.width, dtype=dtype)] * 300 for dtype in (torch.float32, torch.bfloat16))
        factors, one = meta(300, 2, dtype=torch.float32), meta(dtype=torch.float32)
        for grads in (wide, narrow):
            launch = partial(launch_momentum, [grads, wide, narrow], one, one, 0.95, True)
            yield CompileCase("muon momentum", model, grads[0].dtype, launch)
        alone = partial(launch_momentum, [wide, wide], one, one, 0.95, True)
        yield CompileCase("muon momentum alone", model, torch.float32, alone)
        for name, copies in (("muon update", []), ("muon update with copy", [narrow])):
            yield CompileCase(name, model, torch.float32, partial(launch_update, [wide, narrow, *copies], factors, one))
