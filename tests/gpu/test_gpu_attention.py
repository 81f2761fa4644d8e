"""Attention in blocks on a CUDA device: every rank's part of ring and all-gather, and documents; `make gpu` runs it."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from megalite.parallel.attention import Block, attend, attend_backward, empty_result
from megalite.parallel.sequence import Documents, Method, Sequences, gaps, own_blocks, ring_steps, rows, split

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

LENGTH, BATCH, HEADS, KV_HEADS, HEAD = 256, 2, 4, 2, 64
WHOLE: list[Documents] = [(0, LENGTH), (0, LENGTH)]
CUT: list[Documents] = [(0, 3, 100, 200, LENGTH), (0, 128, LENGTH)]


def random(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Queries, keys, values, and the gradient of the result."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(LENGTH, BATCH, heads, HEAD) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    return tuple(torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)


def reference(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, documents: Sequence[Documents]) -> list[Tensor]:
    """The result and its gradients, in float64 under an explicit mask."""
    inputs = [x.double().requires_grad_() for x in (q, k, v)]
    position = torch.arange(LENGTH, device=q.device)
    number = torch.stack([torch.bucketize(position, position.new_tensor(cuts), right=True) for cuts in documents])
    mask = (number[:, :, None] == number[:, None, :]) & (position[:, None] >= position)
    heads = (x.permute(1, 2, 0, 3) for x in inputs)
    y = scaled_dot_product_attention(*heads, attn_mask=mask[:, None], enable_gqa=True).permute(2, 0, 1, 3)
    return [y.detach(), *torch.autograd.grad(y, inputs, grad.double())]


def keys_and_blocks(
    method: Method, cp: int, rank: int, sequences: list[Sequences], device: torch.device
) -> list[tuple[Tensor, Sequence[Block]]]:
    """Of everything that a rank attends to: the positions of the keys and values, and its blocks over them."""
    mine, position = rows(method, cp, rank, LENGTH), torch.arange(LENGTH, device=device)
    found: list[tuple[Tensor, Sequence[Block]]] = [(split(position, mine), own_blocks(mine, sequences, device))]
    if cp > 1 and method == "ring":
        for step, blocks in enumerate(ring_steps(cp, rank, LENGTH, sequences), 1):
            found.append((split(position, rows(method, cp, (rank - step) % cp, LENGTH)), blocks))
    elif cp > 1:
        found += [(position[gap], blocks) for gap, blocks in gaps(mine, sequences)]
    return found


def in_blocks(
    method: Method, cp: int, q: Tensor, k: Tensor, v: Tensor, grad: Tensor, documents: Sequence[Documents]
) -> list[Tensor]:
    """The result and its gradients, put together from those of all ranks, one after another on one device."""
    sequences = [Sequences(slice(i, i + 1), cuts) for i, cuts in enumerate(documents)]
    result, kv = torch.empty_like(q, dtype=torch.float32), torch.stack((k, v), dim=1)
    dq, dkv = torch.zeros_like(q, dtype=torch.float32), torch.zeros_like(kv, dtype=torch.float32)
    for rank in range(cp):
        mine = split(torch.arange(LENGTH, device=q.device), rows(method, cp, rank, LENGTH))
        seen = keys_and_blocks(method, cp, rank, sequences, q.device)
        out, lse = empty_result(q[mine])
        for keys, blocks in seen:
            attend(out, lse, q[mine], kv[keys], blocks)
        out = out.to(q.dtype)
        part = torch.zeros_like(dq[mine])
        for keys, blocks in seen:
            theirs = torch.zeros_like(dkv[keys])
            attend_backward(part, theirs, grad[mine], q[mine], kv[keys], out, lse, blocks)
            dkv[keys] += theirs
        result[mine], dq[mine] = out.float(), part
    return [result, dq, *dkv.unbind(1)]


@pytest.mark.parametrize("documents", [WHOLE, CUT], ids=["whole", "documents"])
@pytest.mark.parametrize(("method", "cp"), [("ring", 1), ("ring", 2), ("ring", 4), ("all_gather", 4)])
def test_blocks_give_what_whole_attention_does(method: Method, cp: int, documents: list[Documents]) -> None:
    assert all(first < last for cuts in documents for first, last in pairwise(cuts))
    inputs = random(torch.device("cuda"), torch.bfloat16)
    expected, found = reference(*inputs, documents), in_blocks(method, cp, *inputs, documents)
    for name, exact, blocked in zip(("y", "dq", "dk", "dv"), expected, found, strict=True):
        apart = (blocked.double() - exact).norm() / exact.norm()
        assert apart < 2**-6, name
