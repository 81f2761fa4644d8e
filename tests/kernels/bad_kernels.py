"""Kernels that do what the compile-only gate is there to find; for a process without the interpreter."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from megalite_kernels.backend import jit, tl
from megalite_kernels.compile_cases import CompileCase, meta


@jit
def _copy(X, Y, stride, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(Y + at, tl.load(X + at * stride).to(tl.float32))


@jit
def _keeps_too_much(X, Y, stride, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(X + at * stride)
    tl.debug_barrier()
    y = tl.load(Y + at)
    tl.debug_barrier()
    tl.store(Y + at, x.to(tl.float32) / tl.sum(y * x))


@jit
def _wide(X, Y, stride, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(Y + at, tl.exp(tl.load(X + at).to(tl.float64)).to(tl.float32))


@jit
def _adds_in_any_order(X, Y, stride, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.atomic_add(Y + at, tl.load(X + at).to(tl.float32))


def _launch(kernel: object, stride: int, block: int) -> Callable[[], object]:
    def launch() -> None:
        x, y = meta(block * stride, dtype=torch.bfloat16), meta(block, dtype=torch.float32)
        _run(kernel, x, y, stride, block)

    return launch


def _run(kernel: object, x: Tensor, y: Tensor, stride: int, block: int) -> None:
    kernel[(1,)](x, y, stride, BLOCK=block, num_warps=4)  # type: ignore[index]


def compile_cases() -> Iterator[CompileCase]:
    yield CompileCase("good", "", torch.bfloat16, _launch(_copy, 1, 1024))
    yield CompileCase("narrow", "", torch.bfloat16, _launch(_copy, 3, 1024))
    yield CompileCase("narrow, as it must be", "", torch.bfloat16, _launch(_copy, 3, 1024), wide_loads=False)
    yield CompileCase("spills", "", torch.bfloat16, _launch(_keeps_too_much, 1, 65536))
    yield CompileCase("float64", "", torch.bfloat16, _launch(_wide, 1, 1024))
    yield CompileCase("atomic", "", torch.bfloat16, _launch(_adds_in_any_order, 1, 1024))
