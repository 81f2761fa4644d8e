"""Attention over whole sequences, with capped scores or without, by kernels that FlexAttention generates on CUDA.

A query attends to an unbroken range of keys that ends with its own: the keys of its document that are in its window. So
the first key of each query describes the whole mask. From these first keys follows which tiles of queries and keys have
some pairs, and which have all, without a mask of all pairs (Dong et al. 2024, arXiv 2412.05496).

    s  length     h  query heads         e  width of a head
    b  samples    k  key-value heads     t  tiles of a sequence
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

TILE = 128  # rows of queries, and of keys


class Flex:
    """Causal attention within documents and a window.

    documents: one entry per sample, or one for all samples. softcap: None: scores are not capped.
    """

    def __init__(
        self,
        documents: Sequence[tuple[int, ...]],
        window: int | None,
        softcap: float | None,
        device: torch.device,
        scale: float | None = None,
    ) -> None:
        begins = _begins(documents, window)
        if device.type == "cuda":
            begins = begins.pin_memory().to(device, non_blocking=True)
        self.mask = _block_mask(begins)
        self.softcap, self.scale = softcap, scale

    @torch.compiler.disable
    def __call__(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        """q `[s, b, h, e]`, k and v `[s, b, k, e]`, sinks `[h]` → `[s, b, h, e]`."""
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
        options = {"block_mask": self.mask, "scale": self.scale, "enable_gqa": True}
        run = partial(compiled(q.is_cuda), q, k, v, score_mod=_capping(self.softcap), **options)
        if sinks is None:
            return run().permute(2, 0, 1, 3)
        y, extra = run(return_aux=AuxRequest(lse=True))
        share = torch.sigmoid(extra.lse - sinks[:, None])[..., None]  # b h s 1, of all keys but the sink
        return (y * share.to(y.dtype)).permute(2, 0, 1, 3)


@cache
def compiled(on_cuda: bool) -> Callable[..., Tensor]:
    """FlexAttention as a compiled kernel on CUDA. Elsewhere it is not compiled and makes all scores, for tests only."""
    run: Callable[..., Any] = flex_attention
    return torch.compile(run) if on_cuda else run


def _capping(softcap: float | None) -> Callable[..., Tensor] | None:
    if softcap is None:
        return None

    def capped(score: Tensor, b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return capped


def _begins(documents: Sequence[tuple[int, ...]], window: int | None) -> Tensor:
    """The first key that each query attends to: `[b, s]`."""
    bounds = [torch.tensor(cuts) for cuts in documents]
    begins = torch.stack([cuts[:-1].repeat_interleave(cuts.diff()) for cuts in bounds])
    return begins if window is None else begins.maximum(torch.arange(begins.shape[1]) - window + 1)


def _block_mask(begins: Tensor) -> BlockMask:
    length = begins.shape[1]
    first = torch.arange(0, length, TILE, device=begins.device)
    last = (first + TILE).clamp(max=length) - 1
    earliest, latest = begins[:, first, None], begins[:, last, None]  # first keys of a tile's outermost queries: b t 1
    some = (first <= last[:, None]) & (last >= earliest)
    every = (last <= first[:, None]) & (first >= latest)

    def mask(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (key >= begins[b % len(begins), query])

    return BlockMask.from_kv_blocks(
        *_ordered(some & ~every), *_ordered(every), BLOCK_SIZE=TILE, mask_mod=mask, seq_lengths=(length, length)
    )


def _ordered(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """Per tile of queries, the number of its tiles of keys, and all tiles of keys, its own first: `[b, 1, t, …]`."""
    tiles = tiles[:, None].int()
    return tiles.sum(-1, dtype=torch.int32), tiles.argsort(dim=-1, descending=True, stable=True).int()
