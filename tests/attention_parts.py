"""Attention over whole sequences with an explicit mask, and the same put together from the blocks of all ranks."""

from collections.abc import Sequence

import torch
from torch import Tensor

from megalite.config.layers import Scores
from megalite.parallel.attention import attend, attend_backward, empty_result, gradient_of_sinks
from megalite.parallel.blocks import Block
from megalite.parallel.sequence import Documents, Method, Sequences, gaps, own_blocks, ring_steps, rows, split

FULL = Scores()


def mask(length: int, bounds: Documents, window: int | None = None) -> Tensor:
    """Which query attends to which key, `[length, length]`."""
    position = torch.arange(length)
    document = torch.bucketize(position, torch.tensor(bounds), right=True)
    back = position[:, None] - position
    return (document[:, None] == document) & (back >= 0) & (back < (window or length))


def oracle(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Sequence[Documents] | None,
    kind: Scores = FULL,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention over whole sequences with an explicit mask. sinks: one more column of scores, by head."""
    s, b, _, e = q.shape
    masks = torch.stack([mask(s, bounds, kind.window) for bounds in documents or [(0, s)] * b])[:, None].to(q.device)
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
    scores = torch.einsum("nbhe,mbhe->bhnm", q, k) * (e**-0.5 if kind.scale is None else kind.scale)
    if kind.softcap is not None:
        scores = kind.softcap * torch.tanh(scores / kind.softcap)
    scores = scores.masked_fill(~masks, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks[:, None, None].expand(b, -1, s, 1)), -1)
    return torch.einsum("bhnm,mbhe->nbhe", scores.softmax(-1)[..., :s], v)


def keys_and_blocks(
    method: Method,
    cp: int,
    rank: int,
    length: int,
    sequences: list[Sequences],
    device: torch.device,
    window: int | None = None,
) -> list[tuple[Tensor, Sequence[Block]]]:
    """Of everything that a rank attends to: the positions of the keys and values, and its blocks over them."""
    mine, position = rows(method, cp, rank, length), torch.arange(length, device=device)
    found: list[tuple[Tensor, Sequence[Block]]] = [(split(position, mine), own_blocks(mine, sequences, device, window))]
    if cp > 1 and method == "ring" and window is None:
        for step, blocks in enumerate(ring_steps(cp, rank, length, sequences), 1):
            found.append((split(position, rows(method, cp, (rank - step) % cp, length)), blocks))
    elif cp > 1:
        found += [(position[gap.start : gap.stop], blocks) for gap, blocks in gaps(mine, sequences, window)]
    return found


def in_blocks(
    method: Method,
    cp: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad: Tensor,
    documents: Sequence[Documents],
    kind: Scores = FULL,
    sinks: Tensor | None = None,
) -> list[Tensor]:
    """The result and its gradients, put together from those of all ranks, one after another on one device."""
    length = len(q)
    sequences = [Sequences(slice(i, i + 1), cuts) for i, cuts in enumerate(documents)]
    wide = torch.promote_types(q.dtype, torch.float32)
    kv = torch.cat((k, v), dim=-1)
    result = empty_result(q, kv)[0]
    dq, dkv = torch.zeros_like(q, dtype=wide), torch.zeros_like(kv, dtype=wide)
    of_sinks = list[Tensor]()
    for rank in range(cp):
        mine = split(torch.arange(length, device=q.device), rows(method, cp, rank, length))
        seen = keys_and_blocks(method, cp, rank, length, sequences, q.device, kind.window_in(length))
        out, lse = empty_result(q[mine], kv, sinks)
        for keys, blocks in seen:
            attend(out, lse, q[mine], kv[keys], blocks, kind)
        out = out.to(q.dtype)
        part = torch.zeros_like(dq[mine])
        for keys, blocks in seen:
            theirs = torch.zeros_like(dkv[keys])
            attend_backward(part, theirs, grad[mine], q[mine], kv[keys], out, lse, blocks, kind)
            dkv[keys] += theirs
        result[mine], dq[mine] = out.to(wide), part
        if sinks is not None:
            of_sinks.append(gradient_of_sinks(sinks, grad[mine], out, lse))
    of_kv = dkv.split((k.shape[-1], v.shape[-1]), dim=-1)
    return [result, dq, *of_kv, *([] if sinks is None else [torch.stack(of_sinks).sum(0)])]
