"""Keys and values of the tokens so far, and attention of new tokens to them.

New tokens of many sequences are one flat sequence `[s, 1, d]`. There are two kinds of passes: whole prompts, each of
which attends to itself alone, as a document of a packed sequence does in training; and a token, or a few, of every
sequence, which attend to that sequence's cache.

    s  tokens of a pass     h  query heads          e  width of a head
    n  sequences            k  key-value heads      g  query heads of a key-value head
    m  cached tokens
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from megalite.base.errors import InputError, counted
from megalite.config.layers import Heads, Scores
from megalite.model.positions import TokenPositions
from megalite.parallel.context import Attention
from megalite_launch.base.texts import memory_text


class Cache:
    """Keys and values of up to `slots` sequences of up to `capacity` tokens, for the layers of one stage."""

    def __init__(
        self,
        layers: Sequence[int],
        slots: int,
        capacity: int,
        heads: Heads,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Raises InputError if there is no memory for it. heads: of a rank."""
        keys, values = ((slots, heads.kv_count, capacity, width) for width in (heads.width, heads.value_width))
        self.capacity, self.lengths = capacity, [0] * slots  # final ones, as `Engine.prompts` is told
        try:  # zeros, since what is hidden is multiplied by 0 still
            self.layers = {
                layer: (torch.zeros(keys, dtype=dtype, device=device), torch.zeros(values, dtype=dtype, device=device))
                for layer in layers
            }
        except RuntimeError:  # CUDA's lack of memory is one too
            size = len(layers) * slots * (heads.keys + heads.values) * capacity * dtype.itemsize
            text = f"{counted(slots, 'sequence')} of {counted(capacity, 'token')}"
            raise InputError(
                f"the cache of {text} takes {memory_text(size)}, more than there is; use a smaller --batch or "
                "--tokens, or more ranks"
            ) from None

    def copy(self, source: int, target: int) -> None:
        """Let the sequence in slot `source` be in slot `target` too."""
        self.lengths[target] = self.lengths[source]
        for keys, values in self.layers.values():
            keys[target].copy_(keys[source])
            values[target].copy_(values[source])


@dataclass(frozen=True)
class Prompts(TokenPositions):
    """A pass of whole prompts. `attention` keeps each of them to itself."""

    cache: Cache | None = None  # None: nothing comes after
    slots: Tensor | None = None  # slot of every token, without padding
    at: Tensor | None = None  # its position

    def attend(self, layer: int, kind: Scores) -> Attention:
        whole = self.attention[kind]
        return whole if self.cache is None else partial(self._keep_and_attend, layer, whole)

    def _keep_and_attend(self, layer: int, whole: Attention, q: Tensor, k: Tensor, v: Tensor, *sinks: Tensor) -> Tensor:
        assert self.cache is not None
        assert self.slots is not None
        keys, values = self.cache.layers[layer]
        count = len(self.slots)
        keys[self.slots, :, self.at] = k[:count, 0]
        values[self.slots, :, self.at] = v[:count, 0]
        return whole(q, k, v, *sinks)


@dataclass(frozen=True)
class Next(TokenPositions):
    """A pass of the next tokens of each of the first n slots of the cache, as many of each."""

    cache: Cache | None = None
    at: tuple[int, ...] = ()  # positions of these tokens, slot by slot
    index: Tensor | None = None  # the same
    slots: Tensor | None = None  # every token's
    each: int = 1  # tokens of a slot
    _seen: dict[Scores, tuple[slice, Tensor | None]] = field(default_factory=dict)

    def attend(self, layer: int, kind: Scores) -> Attention:
        return partial(self._attend, layer, kind)

    def _attend(self, layer: int, kind: Scores, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        assert self.cache is not None
        keys, values = self.cache.layers[layer]
        count = len(self.at)
        if count == 1:  # a copy costs less than an index
            keys[0, :, self.at[0]] = k[0, 0]
            values[0, :, self.at[0]] = v[0, 0]
        else:
            keys[self.slots, :, self.index] = k[:count, 0]
            values[self.slots, :, self.index] = v[:count, 0]
        seen, hidden = self._visible(kind, q)
        padding, n = q.shape[0] - count, count // self.each
        queries = (q[:count] if padding else q).view(n, self.each, k.shape[2], -1, q.shape[3])  # n c k g e
        group = queries.shape[3]
        if hidden is not None:
            hidden = hidden.view(n, 1, self.each, 1, -1).expand(-1, -1, -1, group, -1).flatten(2, 3)
        if sinks is not None:
            sinks = sinks.view(-1, 1, group).expand(-1, self.each, -1).flatten()
        queries = queries.transpose(1, 2).flatten(2, 3)  # n k c·g e
        y = _attend(queries, keys[:n, :, seen], values[:n, :, seen], hidden, kind, sinks)
        y = y.unflatten(2, (self.each, group)).transpose(1, 2).reshape(count, 1, q.shape[2], v.shape[3])
        return F.pad(y, (0, 0, 0, 0, 0, 0, 0, padding)) if padding else y

    def _visible(self, kind: Scores, q: Tensor) -> tuple[slice, Tensor | None]:
        """The cached positions that some query attends to, and −∞ `[n·c, m]` where one does not; None: all do."""
        if kind not in self._seen:
            window, last = kind.window or max(self.at) + 1, max(self.at)
            seen = range(max(0, min(self.at) - window + 1), last + 1)
            hidden = None
            if min(self.at) != last:
                assert self.index is not None
                places = torch.arange(seen.start, seen.stop, device=q.device)
                now = self.index[:, None]
                outside = (places > now) | (places <= now - window)
                hidden = torch.zeros(outside.shape, dtype=q.dtype, device=q.device).masked_fill_(outside, -torch.inf)
            self._seen[kind] = slice(seen.start, seen.stop), hidden
        return self._seen[kind]


def _attend(
    q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None, kind: Scores, sinks: Tensor | None = None
) -> Tensor:
    """q `[n, k, g, e]`, k `[n, k, m, e]`, v `[n, k, m, u]`, hidden `[n, 1, g, m]`, sinks `[k·g]` → `[n, k, g, u]`."""
    if kind.softcap is None and sinks is None:
        return F.scaled_dot_product_attention(q, k, v, hidden, scale=kind.scale)
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = (q.to(wide) @ k.to(wide).mT) * (q.shape[-1] ** -0.5 if kind.scale is None else kind.scale)
    if kind.softcap is not None:
        scores = (scores / kind.softcap).tanh_() * kind.softcap
    if hidden is not None:
        scores += hidden
    if sinks is not None:
        alone = sinks.to(wide).view(q.shape[1], -1, 1).expand(*q.shape[:3], 1)
        scores = torch.cat((scores, alone), -1)
        return (scores.softmax(-1)[..., :-1] @ v.to(wide)).to(q.dtype)
    return (scores.softmax(-1) @ v.to(wide)).to(q.dtype)
