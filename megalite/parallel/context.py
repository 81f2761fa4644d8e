"""Context parallelism: attention over a sequence whose positions are spread over the ranks of a group.

Three methods compute the same result as attention over the unsplit sequence:

* ring: ranks pass keys and values on round a ring while they attend to those they have (Liu et al. 2023,
  arXiv 2310.01889). Zigzag chunks give every rank the same share of the causal triangle (cf. Brandon et al. 2023,
  arXiv 2311.09431);
* all_gather: every rank gathers all keys and values (Llama 3, arXiv 2407.21783, §3.3.2), on the same chunks;
* ulysses: an all-to-all gives every rank all positions of some heads (Jacobs et al. 2023, arXiv 2309.14509).

With a window, ring and all_gather are the same: a rank fetches the keys and values in the windows of its queries, the
halo.

    s  positions of this rank     h  query heads          e  width of a query and of a key
    b  micro-batch                k  key-value heads      u  width of a value
    c  ranks of the group
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import lcm
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from megalite.config.attention_kernels import PADDING, Kernel
from megalite.config.layers import Scores
from megalite.parallel.attention import attend, attend_backward, empty_result, gradient_of_sinks
from megalite.parallel.blocks import Block
from megalite.parallel.exchange import AllGather, Halo, KeyValueExchange
from megalite.parallel.flex import Flex
from megalite.parallel.packed import Packed
from megalite.parallel.sequence import (
    Documents,
    Method,
    Sequences,
    blocks_of_joined,
    gaps,
    joined,
    missing,
    own_blocks,
    place,
    ring_steps,
    rows,
)

# q [s, b, h, e], k [s, b, k, e], v [s, b, k, u], and sinks [h] where scores have some → [s, b, h, u]
Attention = Callable[..., Tensor]
Gaps = Sequence[tuple[slice, Sequence[Block]]]
FULL_SCORES = Scores()
FLASH = PADDING
# PyTorch's functions for the kernels that it chooses from; FlashAttention 3 and 4 take the place of 2 when activated.
BACKENDS: dict[Kernel, SDPBackend] = {
    **dict.fromkeys(FLASH, SDPBackend.FLASH_ATTENTION),
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def attention(
    method: Method,
    group: dist.ProcessGroup | None,
    length: int,
    device: torch.device,
    documents: Sequence[Documents] | None = None,
    kind: Scores = FULL_SCORES,
    kernel: Kernel | None = None,
    joint: bool = False,
) -> Attention:
    """Causal attention for a micro-batch of sequences of `length`, spread over `group` (None: not spread).

    documents: those of every sample, if attention must stay inside of them. kernel: what computes it, of those that can
    (`config/attention_kernels`); None: one that fits the tensors, and PyTorch chooses for whole causal sequences.
    joint: samples, which have documents then, lie one behind the other in one sequence that is not spread. The host
    never waits for the device here.
    """
    if group is None or method == "ulysses":
        whole = _whole(length, device, documents, kind, kernel, joint)
        return whole if group is None else Ulysses(whole, group)
    sequences, math = _sequences(length, documents), kernel == "math"
    cp, rank, window = group.size(), group.rank(), kind.window_in(length)
    mine = rows(method, cp, rank, length)
    own = own_blocks(mine, sequences, device, window)
    if window is None and method == "ring":
        return Ring([own, *ring_steps(cp, rank, length, sequences)], group, kind, math)
    held = (range(length),) if window is None else missing(mine, window)
    far = [(place(held, gap), blocks) for gap, blocks in gaps(mine, sequences, window)]
    exchange = AllGather(group) if window is None else Halo.over(group, length, window)
    return Fetching(own, far, exchange, kind, math)


def _sequences(length: int, documents: Sequence[Documents] | None) -> list[Sequences]:
    if documents is None:
        return [Sequences(slice(None), (0, length))]
    return [Sequences(slice(i, i + 1), bounds) for i, bounds in enumerate(documents)]


def _whole(
    length: int,
    device: torch.device,
    documents: Sequence[Documents] | None,
    kind: Scores,
    kernel: Kernel | None,
    joint: bool,
) -> Attention:
    """Attention over sequences that this rank holds whole."""
    window, on_cuda = kind.window_in(length), device.type == "cuda"
    if joint:
        assert documents is not None
        documents = [joined(documents)]
    if kernel == "flex" or (kernel is None and kind.softcap is not None and on_cuda):
        return Flex(documents or [(0, length)], window, kind.softcap, device, kind.scale)

    def in_blocks() -> Attention:
        if joint and documents is not None:
            blocks = blocks_of_joined(length, documents[0], device, window)
        else:
            blocks = own_blocks((range(length),), _sequences(length, documents), device, window)
        return Ring([blocks], None, kind, kernel == "math")

    if documents is None and window is None and kind.softcap is None and not kind.sinks and kernel != "math":
        return ByWidths(partial(causal, scale=kind.scale, kernel=kernel), in_blocks, kernel)
    if kernel in FLASH and on_cuda:
        return ByWidths(Packed(documents, window, device, kind.scale), in_blocks, kernel)
    return in_blocks()


def causal(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, kernel: Kernel | None = None) -> Tensor:
    """Causal attention over sequences that this rank holds whole.

    kernel: the only one that may run on CUDA, where another would be slower without a word; None: PyTorch chooses.
    """
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))  # b h s e
    if q.shape[1] != k.shape[1] and (kernel == "efficient" or _needs_equal_heads(q, k)):
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    attend = partial(
        scaled_dot_product_attention, q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    if kernel is None or not q.is_cuda:
        return attend().permute(2, 0, 1, 3)
    with sdpa_kernel(BACKENDS[kernel]):
        return attend().permute(2, 0, 1, 3)


def _needs_equal_heads(q: Tensor, k: Tensor) -> bool:
    """Return whether fewer key-value heads must be repeated, one per query head, so that CUDA has a fused kernel.

    Without a fused kernel, CUDA makes the matrix of all queries and keys. Flash and cuDNN attention take grouped
    queries but no fp32. Memory-efficient attention takes fp32 but no grouped queries. No fused kernel takes fp64.
    """
    return q.is_cuda and q.dtype == torch.float32 and q.shape[1] != k.shape[1]


# These dataclasses are not frozen: PyTorch 2.11 looks into frozen ones, and compiles anew for other documents.
@dataclass(eq=False)
class Ring:
    """Ring attention. Without a group there is a single step, over sequences that this rank holds whole."""

    steps: Sequence[Sequence[Block]]
    group: dist.ProcessGroup | None
    kind: Scores = FULL_SCORES
    math: bool = False

    @torch.compiler.disable
    def __call__(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        return _Ring.apply(q, torch.cat((k, v), dim=-1), sinks, self.steps, self.group, (self.kind, self.math))


@dataclass(eq=False)
class ByWidths:
    """Attention by a kernel in one call where values are as wide as keys, or where the kernel takes them as they are.

    Else blocks, for which values are padded block by block, so nothing padded is kept for backward.
    """

    in_one: Attention
    make_blocks: Callable[[], Attention]
    kernel: Kernel | None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *sinks: Tensor) -> Tensor:
        if k.shape[-1] == v.shape[-1] or (q.is_cuda and self.kernel not in FLASH):
            return self.in_one(q, k, v, *sinks)
        return self._in_blocks(q, k, v, *sinks)

    @torch.compiler.disable
    def _in_blocks(self, q: Tensor, k: Tensor, v: Tensor, *sinks: Tensor) -> Tensor:
        return self._blocks(q, k, v, *sinks)

    @cached_property
    def _blocks(self) -> Attention:
        return self.make_blocks()


@dataclass(eq=False)
class Fetching:
    """A rank attends to its own keys and values while those of other ranks arrive, then to those of other ranks."""

    own: Sequence[Block]
    far: Gaps
    exchange: KeyValueExchange
    kind: Scores = FULL_SCORES
    math: bool = False

    @torch.compiler.disable
    def __call__(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        how = self.kind, self.math
        return _Fetching.apply(q, torch.cat((k, v), dim=-1), sinks, self.own, self.far, self.exchange, how)


@dataclass(eq=False)
class Ulysses:
    """An all-to-all gives a rank all positions of its heads; a second one takes outputs back to their ranks."""

    whole: Attention
    group: dist.ProcessGroup

    @torch.compiler.disable
    def __call__(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        cp = self.group.size()
        mine = () if sinks is None else (sinks.chunk(cp)[self.group.rank()],)
        copies = lcm(k.shape[2], cp) // k.shape[2]  # so that cp divides the number of key-value heads
        k, v = (x.repeat_interleave(copies, dim=2) for x in (k, v))
        by_rank = [x.unflatten(2, (cp, -1)).movedim(2, 0) for x in (q, k, v)]  # c s b h/c e
        features = torch.cat([x.flatten(3) for x in by_rank], dim=3)
        everywhere = _AllToAll.apply(features, self.group).flatten(0, 1)  # c·s b (h·e + k·e + k·u)/c
        parts = zip(everywhere.split([x.shape[3] * x.shape[4] for x in by_rank], dim=2), by_rank, strict=True)
        y = self.whole(*(part.unflatten(2, x.shape[3:]) for part, x in parts), *mine)
        return _AllToAll.apply(y.unflatten(0, (cp, -1)), self.group).movedim(0, 2).flatten(2, 3)  # s b h u


def takes_parts(attend: Attention, samples: int) -> bool:
    """Return whether `attend` takes q, k and v as parts of one tensor, of which it keeps no copies for backward.

    samples: beside each other. They are heads of one sequence for `Packed`, which parts can be no view of.
    """
    if isinstance(attend, ByWidths):
        return attend.kernel != "efficient" and (samples == 1 or not isinstance(attend.in_one, Packed))
    return not isinstance(attend, Ring | Fetching | Ulysses)


class _Ring(torch.autograd.Function):
    """Ring attention: keys and values go round the ranks, and are sent on while they are used.

    At step i, a rank has those of the rank i places before it.
    In backward, their gradients go round the ring one step behind them. Each rank adds its part, and the sum ends at
    the rank that owns the rows. The part that a rank computes for its own rows is not sent.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, kv: Tensor, sinks: Tensor | None, steps: Any, group: dist.ProcessGroup | None, how: Any
    ) -> Tensor:
        out, lse = empty_result(q, kv, sinks)
        held = kv
        for step, blocks in enumerate(steps):
            arriving = _pass_on(held, group) if step < len(steps) - 1 else None
            attend(out, lse, q, held, blocks, *how)
            held = arriving() if arriving else held
        out = out.to(q.dtype)
        ctx.save_for_backward(q, kv, out, lse, sinks)
        ctx.steps, ctx.group, ctx.how = steps, group, how
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, held, out, lse, sinks = ctx.saved_tensors
        of_sinks = None if sinks is None else gradient_of_sinks(sinks, grad, out, lse)
        dq, dkv = _zeros(q), _zeros(held)
        returning = None
        for step, blocks in enumerate(ctx.steps):
            arriving = _pass_on(held, ctx.group) if step < len(ctx.steps) - 1 else None
            theirs = _zeros(held) if step else dkv
            attend_backward(dq, theirs, grad, q, held, out, lse, blocks, *ctx.how)
            if returning:
                theirs += returning()
            if step:
                returning = _pass_on(theirs, ctx.group)
            held = arriving() if arriving else held
        if returning:
            dkv += returning()
        return dq.to(q.dtype), dkv.to(q.dtype), of_sinks, None, None, None


def _pass_on(x: Tensor, group: dist.ProcessGroup | None) -> Callable[[], Tensor]:
    """Send `x` to the next rank of the ring. Returns a function that waits for the previous rank's tensor."""
    assert group is not None
    received = torch.empty_like(x)
    following, before = ((group.rank() + step) % group.size() for step in (1, -1))
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, x, group=group, group_peer=following),
            dist.P2POp(dist.irecv, received, group=group, group_peer=before),
        ]
    )

    def wait() -> Tensor:
        for work in works:
            work.wait()
        return received

    return wait


class _Fetching(torch.autograd.Function):
    """Fetched keys and values are not saved for backward, which fetches them again."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        kv: Tensor,
        sinks: Tensor | None,
        own: Sequence[Block],
        far: Gaps,
        exchange: KeyValueExchange,
        how: tuple[Scores, bool],
    ) -> Tensor:
        out, lse = empty_result(q, kv, sinks)
        arriving = exchange.fetch(kv)
        attend(out, lse, q, kv, own, *how)
        fetched = arriving()
        del arriving  # it holds a large copy
        for gap, blocks in far:
            attend(out, lse, q, fetched[gap], blocks, *how)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, kv, out, lse, sinks)
        ctx.own, ctx.far, ctx.exchange, ctx.how = own, far, exchange, how
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, kv, out, lse, sinks = ctx.saved_tensors
        of_sinks = None if sinks is None else gradient_of_sinks(sinks, grad, out, lse)
        dq, dkv = _zeros(q), _zeros(kv)
        arriving = ctx.exchange.fetch(kv)
        attend_backward(dq, dkv, grad, q, kv, out, lse, ctx.own, *ctx.how)
        fetched = arriving()
        del arriving
        dfetched = _zeros(fetched)
        for gap, blocks in ctx.far:
            attend_backward(dq, dfetched[gap], grad, q, fetched[gap], out, lse, blocks, *ctx.how)
        ctx.exchange.give_back(dfetched, dkv)
        return dq.to(q.dtype), dkv.to(q.dtype), of_sinks, None, None, None, None


def _zeros(x: Tensor) -> Tensor:
    """Zeros to which gradients of `x` are added, in float32 or wider."""
    return torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32))


class _AllToAll(torch.autograd.Function):
    """x `[c, …]`: part i is sent to rank i, and the part from rank i becomes part i. Backward is the same exchange."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_to_all(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _all_to_all(grad, ctx.group), None


def _all_to_all(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    received = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dist.all_to_all_single(received, x.contiguous(), group=group)
    return received
