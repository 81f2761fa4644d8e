"""Transfers of context parallelism for the attention of a layer and a micro-batch.

    heads  of queries, keys and values, as projections made them
    kv     elements of keys and values on a rank

Keys and values are sent in the compute precision, in forward and again in backward. In backward their gradients follow,
which are summed in float32 or wider. Ulysses exchanges positions for heads before attention, and heads for positions
after it, in forward and in backward.
"""

from collections import Counter
from dataclasses import dataclass, replace
from math import lcm

from megalite.config.layers import Heads, layer_kinds
from megalite.config.schema import Config
from megalite.plan.parts.sizes import Sizes
from megalite.plan.parts.transfers import Transfers, over
from megalite.plan.parts.window import halo_messages


@dataclass(frozen=True)
class ContextTraffic:
    """The transfers of a rank at position `rank` of the context-parallel group."""

    sizes: Sizes
    heads: Heads
    rank: int

    def forward(self, phase: str = "forward") -> Transfers:
        config = self.sizes.config
        cp, method = config.parallel.cp, config.parallel.context.method
        if cp == 1:
            return Counter()
        if method == "ulysses":
            return self._ulysses(phase)
        purpose = f"{phase}: keys and values"
        if (window := self._window) is not None:
            return self._halo(window, self.sizes.w, purpose)
        return self._all_keys(method, self.sizes.w, purpose)

    def backward(self) -> Transfers:
        config, wide = self.sizes.config, self.sizes.z
        cp, method = config.parallel.cp, config.parallel.context.method
        if cp == 1:
            return Counter()
        again, purpose = self.forward("backward"), "backward: gradients of keys and values"
        if method == "ulysses":
            return again
        if (window := self._window) is not None:
            return again + self._halo(window, wide, purpose, back=True)
        if method == "ring":
            return again + self._all_keys("ring", wide, purpose)
        return again + over("cp", "reduce_scatter", cp * self._kv * wide, wide, purpose)

    @property
    def _window(self) -> int | None:
        return self.heads.scores.window_in(self.sizes.config.model.sequence_length)

    @property
    def _kv(self) -> int:
        return self.sizes.tokens * (self.heads.keys + self.heads.values) // self.sizes.t

    def _all_keys(self, method: str, each: int, purpose: str) -> Transfers:
        """Keys and values of all ranks, `each` bytes an element."""
        cp, size = self.sizes.config.parallel.cp, self._kv * each
        if method == "all_gather":
            return over("cp", "all_gather", cp * size, each, purpose)
        send, receive = (over("cp", kind, size, each, purpose, cp - 1) for kind in ("send", "receive"))
        return send + receive

    def _halo(self, window: int, each: int, purpose: str, back: bool = False) -> Transfers:
        """One message to and from each rank whose keys and values, or their gradients on the way `back`, are needed."""
        cp, length = self.sizes.config.parallel.cp, self.sizes.config.model.sequence_length
        position = self._kv * cp // length * each
        gives, takes = halo_messages(cp, self.rank, length, window)
        found: Transfers = Counter()
        for kind, messages in (("send", takes if back else gives), ("receive", gives if back else takes)):
            for positions in messages:
                found += over("cp", kind, positions * position, each, purpose)
        return found

    def _ulysses(self, phase: str) -> Transfers:
        """Heads go to ranks with all positions, outputs return. Key-value heads are copied until cp divides them."""
        sizes, heads, cp = self.sizes, self.heads, self.sizes.config.parallel.cp
        copies, one = lcm(heads.kv_count // sizes.t, cp), sizes.tokens * sizes.w
        there = heads.queries // sizes.t + copies * (heads.width + heads.value_width)
        purposes = f"{phase}: queries, keys and values", f"{phase}: outputs of attention"
        sent = over("cp", "all_to_all", there * one, sizes.w, purposes[0])
        return sent + over("cp", "all_to_all", heads.outputs // sizes.t * one, sizes.w, purposes[1])


def bytes_sent(config: Config, window: int | None = None) -> tuple[int, int]:
    """The bytes that one rank sends for the attention of a layer and a micro-batch: in forward, and in backward.

    With a `window` the ranks send unequal amounts; the largest are returned.
    """
    heads, cp = layer_kinds(config.model)[0].attention.heads, config.parallel.cp
    heads = replace(heads, scores=replace(heads.scores, window=window))
    ranks = [ContextTraffic(Sizes(config), heads, rank) for rank in range(cp)]

    def sent(transfers: Transfers) -> int:
        return sum(
            count * (each.bytes if each.kind == "send" else each.bytes * (cp - 1) // cp)
            for (each, _), count in transfers.items()
            if each.kind != "receive"
        )

    return max(sent(rank.forward()) for rank in ranks), max(sent(rank.backward()) for rank in ranks)
