"""Weights in four bits, as NF4 (QLoRA: Dettmers et al. 2023, arXiv 2305.14314, §3 and appendix E).

A block is 64 consecutive inputs of an output's row. Kept are the largest magnitude of the block, m, in float32, and of
every value w the index of the code nearest to w / m. The 16 codes are quantiles of the normal distribution. A value is
again code · m, rounded to float32.

A block takes 36 bytes, which lie together: 32 with two codes each, the earlier value in the upper half, and m. So any
whole blocks of a matrix are bytes of a slice of it, whoever has them, and no rounding depends on that.
"""

from collections.abc import Iterator
from functools import cache, partial
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite_kernels.backend import Backend, Program, jit, on_device, tl, use_triton
from megalite_kernels.compile_cases import CompileCase, meta, models

BLOCK = 64  # values
CODE_BYTES = BLOCK // 2
BLOCK_BYTES = CODE_BYTES + 4
CODES = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
MIN_SCALE = 1e-38  # the least magnitude by which values are divided
VALUES_AT_A_TIME = 1 << 22  # to bound temporaries
PROGRAM = Program(2048, 4)


def packed_shape(*shape: int) -> tuple[int, ...]:
    """The shape in bytes of a weight `[…, in]`. Raises ValueError if blocks do not fill its rows."""
    *outer, inputs = shape
    if inputs % BLOCK:
        raise ValueError(f"rows of {inputs} values cannot be cut into blocks of {BLOCK}")
    return (*outer, inputs // BLOCK * BLOCK_BYTES)


def values_shape(*shape: int) -> tuple[int, ...]:
    """The inverse of `packed_shape`."""
    return (*shape[:-1], shape[-1] // BLOCK_BYTES * BLOCK)


@torch.no_grad()
def quantize_nf4(weight: Tensor) -> Tensor:
    """The bytes `packed_shape` of a weight `[…, in]`, uint8. Raises ValueError for a value that is not finite."""
    packed = torch.empty(packed_shape(*weight.shape), dtype=torch.uint8, device=weight.device)
    blocks, out = weight.reshape(-1, BLOCK), packed.view(-1, BLOCK_BYTES)
    step = VALUES_AT_A_TIME // BLOCK
    for begin in range(0, len(blocks), step):
        values = blocks[begin : begin + step].float()
        largest = values.abs().amax(1, keepdim=True)
        if not largest.is_meta and not largest.isfinite().all():
            raise ValueError("a value is not finite")
        # As bitsandbytes divides: its bits are those of files and programs of others.
        shares = values * (1 / largest.clamp(min=MIN_SCALE))
        codes = torch.bucketize(shares, _midpoints(weight.device), out_int32=True).to(torch.uint8)
        target = out[begin : begin + step]
        target[:, :CODE_BYTES] = codes[:, ::2] << 4 | codes[:, 1::2]
        target[:, CODE_BYTES:] = largest.view(torch.uint8)
    return packed


@cache
def _midpoints(device: torch.device) -> Tensor:
    return torch.tensor([(a + b) / 2 for a, b in pairwise(CODES)], dtype=torch.float32, device=device)


@cache
def _pairs(device: torch.device) -> Tensor:
    """The two values of every byte, `[256, 2]`."""
    codes = torch.tensor(CODES, dtype=torch.float32, device=device)
    return torch.cartesian_prod(codes, codes)


def reference(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """`dequantize_nf4` in plain PyTorch."""
    weight = torch.empty(values_shape(*packed.shape), dtype=dtype, device=packed.device)
    blocks, out = packed.view(-1, BLOCK_BYTES), weight.view(-1, BLOCK)
    step = VALUES_AT_A_TIME // BLOCK
    for begin in range(0, len(blocks), step):
        part = blocks[begin : begin + step]
        codes, largest = part[:, :CODE_BYTES], part[:, CODE_BYTES:].contiguous().view(torch.float32)
        out[begin : begin + step] = F.embedding(codes.int(), _pairs(packed.device)).flatten(1).mul_(largest)
    return weight


@jit
def _dequantize(Packed, Codes, Weight, blocks, ROWS: tl.constexpr):
    """ROWS blocks of a weight. Bytes of a block lie 36 apart, which is 9 numbers of float32."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    there = (rows < blocks)[:, None]
    codes = tl.load(Packed + rows[:, None] * 36 + tl.arange(0, 32)[None, :], mask=there, other=0).to(tl.int32)
    largest = tl.load(Packed.to(tl.pointer_type(tl.float32)) + rows * 9 + 8, mask=rows < blocks, other=0.0)
    first, second = tl.load(Codes + (codes >> 4)), tl.load(Codes + (codes & 15))
    values = tl.interleave(first, second) * largest[:, None]
    at = rows[:, None] * 64 + tl.arange(0, 64)[None, :]
    tl.store(Weight + at, values.to(Weight.dtype.element_ty), mask=there)


@on_device
def launch(packed: Tensor, dtype: torch.dtype, program: Program = PROGRAM) -> Tensor:
    weight = packed.new_empty(values_shape(*packed.shape), dtype=dtype)
    blocks, rows = weight.numel() // BLOCK, program.elements // BLOCK
    if blocks:
        codes = _codes(packed.device)
        _dequantize[(-(-blocks // rows),)](packed, codes, weight, blocks, ROWS=rows, num_warps=program.warps)
    return weight


@cache
def _codes(device: torch.device) -> Tensor:
    return torch.tensor(CODES, dtype=torch.float32, device=device)


# An operation by itself: what counts memory sees the weight, not how it is made.
@torch.library.custom_op("megalite::dequantize_nf4", mutates_args=())
def _op(packed: Tensor, dtype: torch.dtype, triton: bool) -> Tensor:
    return launch(packed, dtype) if triton else reference(packed, dtype)


@_op.register_fake
def _(packed: Tensor, dtype: torch.dtype, triton: bool) -> Tensor:
    return packed.new_empty(values_shape(*packed.shape), dtype=dtype)


def dequantize_nf4(packed: Tensor, dtype: torch.dtype, backend: Backend = "auto") -> Tensor:
    """The weight `[…, in]` of contiguous bytes `packed_shape`, rounded to float32 and then to `dtype`."""
    weight: Tensor = _op(packed, dtype, use_triton(backend, packed.device))
    return weight


def bytes_moved(elements: int, dtype: torch.dtype) -> int:
    """Bytes moved to dequantise so many elements."""
    return elements // BLOCK * BLOCK_BYTES + elements * dtype.itemsize


def compile_cases() -> Iterator[CompileCase]:
    for model, shape, dtype in models():
        packed = meta(*packed_shape(shape.ffn, shape.width), dtype=torch.uint8)
        yield CompileCase("dequantize_nf4", model, dtype, partial(launch, packed, dtype), wide_loads=False)
