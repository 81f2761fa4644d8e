"""Weights in four bits: the codes that bitsandbytes finds, in PyTorch and in Triton's kernel."""

import hashlib
import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rounding import DEVICE, random
from torch import Tensor

from megalite_kernels.backend import Backend
from megalite_kernels.nf4 import (
    BLOCK,
    BLOCK_BYTES,
    CODE_BYTES,
    CODES,
    bytes_moved,
    dequantize_nf4,
    packed_shape,
    quantize_nf4,
    values_shape,
)

BACKENDS: list[Backend] = ["torch", "triton"]
DTYPES = [torch.bfloat16, torch.float32, torch.float64]
# SHA-256 of codes and maxima by bitsandbytes 0.50.2, `functional.quantize_4bit(weights(), blocksize=64,
# quant_type="nf4")` on a CPU.
JUDGED = "80a51de48f5ae019229edce28337d10c0bd5d4722a91457b37aaddfefd2cf9a4"


def weights() -> Tensor:
    """Blocks of many sizes, then of edges: zeros, equal values, signs, codes, places between codes."""
    made = torch.randn(4096, BLOCK, generator=torch.Generator().manual_seed(0))
    made *= torch.logspace(-39, 20, 4096)[:, None]
    edges = torch.zeros(8, BLOCK)
    edges[1], edges[2], edges[3] = 3, -2, -0.0
    edges[4] = torch.linspace(-1, 1, BLOCK)
    edges[5, :16] = torch.tensor(CODES)
    edges[6, 0], edges[6, 1:16] = -1, torch.tensor([(a + b) / 2 for a, b in pairwise(CODES)])
    edges[7, 0] = 1e30
    return torch.cat([made, edges])


def parts(packed: Tensor) -> tuple[Tensor, Tensor]:
    """The bytes with codes, and the largest magnitudes."""
    blocks = packed.view(-1, BLOCK_BYTES)
    return blocks[:, :CODE_BYTES].contiguous(), blocks[:, CODE_BYTES:].contiguous().view(torch.float32)


def test_codes_are_those_of_bitsandbytes() -> None:
    found = hashlib.sha256(b"".join(each.numpy().tobytes() for each in parts(quantize_nf4(weights()))))
    assert found.hexdigest() == JUDGED


def test_bitsandbytes_itself_agrees() -> None:
    """Also for ten million values, where it is installed: pip install bitsandbytes."""
    judge = pytest.importorskip("bitsandbytes.functional")
    many = torch.randn(156_250, BLOCK, generator=torch.Generator().manual_seed(1))
    for weight in (weights(), many, many[:4096].bfloat16()):
        codes, state = judge.quantize_4bit(weight, blocksize=BLOCK, quant_type="nf4")
        packed = quantize_nf4(weight)
        found, largest = parts(packed)
        assert found.view(-1).equal(codes.view(-1))
        assert largest.view(-1).equal(state.absmax)
        assert dequantize_nf4(packed, weight.dtype).equal(judge.dequantize_4bit(codes, state))


@given(
    st.lists(st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False), min_size=1, max_size=BLOCK),
    st.integers(0, 200),
)
@settings(deadline=None, max_examples=200)
def test_every_value_becomes_the_nearest_code(values: list[float], turn: int) -> None:
    block = torch.zeros(BLOCK)
    block[: len(values)] = torch.tensor(values)
    block = block.roll(turn)
    largest, again = float(block.abs().max()), dequantize_nf4(quantize_nf4(block), torch.float64)
    for value, kept in zip(block.tolist(), again.tolist(), strict=True):
        nearest = min(abs(code * largest - value) for code in CODES)
        assert abs(kept - value) <= nearest + 1e-6 * largest


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_come_again_rounded_to_float32_first(backend: Backend, dtype: torch.dtype) -> None:
    packed = quantize_nf4(random(3, 5, 2 * BLOCK, dtype=torch.float32, seed=0))
    found = dequantize_nf4(packed, dtype, backend)
    codes, largest = (each.cpu() for each in parts(packed))
    indexes = torch.stack([codes >> 4, codes & 15], -1).flatten(1).long()
    expected = (torch.tensor(CODES)[indexes] * largest).view(3, 5, 2 * BLOCK)
    assert found.dtype == dtype
    if backend == "triton" and dtype == torch.bfloat16:  # the interpreter does not round to bfloat16, it cuts off
        torch.testing.assert_close(found.float().cpu(), expected, rtol=2.0**-7, atol=0)
    else:
        assert found.cpu().equal(expected.to(dtype))


@pytest.mark.parametrize("backend", BACKENDS)
def test_any_number_of_blocks_is_made(backend: Backend) -> None:
    for rows in (0, 1, 33):
        weight = random(rows, BLOCK, dtype=torch.float32, seed=rows)
        found = dequantize_nf4(quantize_nf4(weight), torch.float32, backend)
        assert found.shape == weight.shape
        assert (found - weight).abs().max().item() < weight.abs().max() * 0.16 if rows else True


def test_slices_of_blocks_are_slices_of_bytes() -> None:
    weight = random(6, 4 * BLOCK, dtype=torch.float32, seed=1)
    packed = quantize_nf4(weight)
    assert packed.shape == packed_shape(*weight.shape)
    assert values_shape(*packed.shape) == tuple(weight.shape)
    columns = slice(BLOCK, 3 * BLOCK)
    assert packed[2:4, BLOCK_BYTES : 3 * BLOCK_BYTES].equal(quantize_nf4(weight[2:4, columns]))
    assert bytes_moved(weight.numel(), torch.bfloat16) == packed.numel() + 2 * weight.numel()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_are_refused(value: float) -> None:
    weight = torch.zeros(2, BLOCK, device=DEVICE)
    weight[1, 3] = value
    with pytest.raises(ValueError, match="not finite"):
        quantize_nf4(weight)


def test_rows_that_blocks_do_not_fill_are_refused() -> None:
    with pytest.raises(ValueError, match="rows of 96 values cannot be cut into blocks of 64"):
        quantize_nf4(torch.zeros(2, 96))
