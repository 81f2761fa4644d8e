"""Transfers inside of embedding, layers and head, of one micro-batch: those of tensor and context parallelism.

The sizes have the letters of `plan.activations`. G is a tensor [s, b, h] gathered over tp, hwT bytes.

    phase             tp                                          cp, each layer
    forward           layer: gathers 2G, scatters 2G              keys and values arrive: ring c - 1 messages each way,
                      embedding: scatters G; head: gathers G      all_gather one gathering, ulysses two exchanges
                      head: statistics of the loss, by chunk
    recompute         full only: the same again, until all        the same again
                      that backward needs is there
    backward          conjugates of forward's; gathers again      keys and values arrive again, and their gradients,
                      what column-parallel layers take            float32 or wider, return; ulysses: two exchanges
    weight gradients  where backward is split, that gathering

A norm of all heads together sums one number per token over tp, for queries and for keys, forward and backward.
"""

import math
from collections import Counter
from dataclasses import dataclass
from functools import cached_property

from megalite.config.layers import AttentionKind, LayerKind
from megalite.config.schema import Config
from megalite.plan.activations import Activations, chunk_tokens
from megalite.plan.recompute_modes import Mode
from megalite.plan.transfers import NAMES, Transfer, Transfers
from megalite.plan.window import halo_messages


@dataclass(frozen=True)
class LayerTraffic:
    """The transfers of a rank at position `cp` of the context-parallel group."""

    config: Config
    cp: int

    @cached_property
    def sizes(self) -> Activations:
        return Activations(self.config)

    def embedding(self) -> tuple[Transfers, Transfers]:
        """Forward and backward of the look-up."""
        return (
            self._stream("reduce_scatter", "forward: scatter of the embeddings"),
            self._stream("all_gather", "backward: gather of the embeddings' gradient"),
        )

    def head(self) -> tuple[Transfers, Transfers]:
        """Forward and backward of the head, which makes its weight's gradient at once even if backward is split."""
        forward = self._stream("all_gather", "forward: gather of the head's input")
        return (
            forward + self._statistics(),
            self._stream("reduce_scatter", "backward: scatter of the head's input gradient"),
        )

    def forward(self, kind: LayerKind, phase: str = "forward") -> Transfers:
        found: Transfers = Counter()
        for part in ("attention", "MLP"):
            found += self._stream("all_gather", f"{phase}: gather of the input of {part}")
            found += self._stream("reduce_scatter", f"{phase}: scatter of the output of {part}")
        return found + self._norms(phase) + self._attention(kind.attention, phase)

    def backward(self, kind: LayerKind, mode: Mode, split: bool) -> Transfers:
        """Backward of a layer that recomputes as `mode` says. split: gradients of weights are put off."""
        found: Transfers = Counter()
        if mode == "full":
            found += self.forward(kind, "recompute")
            if self.config.model.norm == "pre":  # nothing that backward needs is made of the MLP's output
                found -= self._stream("reduce_scatter", "recompute: scatter of the output of MLP")
        for part in ("attention", "MLP"):
            found += self._stream("all_gather", f"backward: gather of the output gradient of {part}")
            found += self._stream("reduce_scatter", f"backward: scatter of the input gradient of {part}")
        found += self._norms("backward") + self._attention_backward(kind.attention)
        return found if split else found + self.weight_gradients()

    def weight_gradients(self) -> Transfers:
        """What a layer gathers for the gradients of its weights, in backward or in W."""
        gathered = (f"weight gradients: gather of the input of {part}" for part in ("attention", "MLP"))
        return sum((self._stream("all_gather", purpose) for purpose in gathered), start=Counter())

    def _stream(self, kind: str, purpose: str) -> Transfers:
        """A collective over tp of the residual stream."""
        return self._over("tp", kind, self.sizes.gathered, self.sizes.w, purpose)

    def _over(self, axis: str, kind: str, size: int, each: int, purpose: str, times: int = 1) -> Transfers:
        """`times` transfers of `size` bytes, `each` an element; none where there is nothing to send."""
        return Counter({(Transfer(kind, axis, size, NAMES[each]), purpose): times} if size and times else {})

    def _norms(self, phase: str) -> Transfers:
        model, sizes = self.config.model, self.sizes
        if not (model.qk_norm and model.qk_norm_width == "all" and self.config.parallel.tp > 1):
            return Counter()
        purpose = f"{phase}: sums of the norms of queries and keys"
        return self._over("tp", "all_reduce", sizes.tokens * sizes.z, sizes.z, purpose, times=2)

    def _statistics(self) -> Transfers:
        """Log-sum-exp and target's logit of every token, gathered from all ranks that share the vocabulary."""
        sizes, tp = self.sizes, self.config.parallel.tp
        chunk = chunk_tokens(sizes.tokens, self.config.model.width, sizes.w, tp)
        found: Transfers = Counter()
        for start in range(0, sizes.tokens, chunk) if tp > 1 else ():
            rows = min(chunk, sizes.tokens - start)
            purpose = "forward: statistics of the loss"
            found += self._over("tp", "all_gather", tp * rows * 2 * sizes.z, sizes.z, purpose)
        return found

    @property
    def _keys_and_values(self) -> int:
        """Elements of the keys and values on this rank."""
        model = self.config.model
        return 2 * self.sizes.tokens * model.kv_heads // self.config.parallel.tp * model.head_size

    def _attention(self, kind: AttentionKind, phase: str) -> Transfers:
        cp, method = self.config.parallel.cp, self.config.parallel.context.method
        if cp == 1:
            return Counter()
        if method == "ulysses":
            return self._ulysses(phase)
        purpose = f"{phase}: keys and values"
        if (window := kind.window_in(self.config.model.sequence_length)) is not None:
            return self._halo(window, self.sizes.w, purpose)
        return self._all_keys(method, self.sizes.w, purpose)

    def _attention_backward(self, kind: AttentionKind) -> Transfers:
        cp, method, wide = self.config.parallel.cp, self.config.parallel.context.method, self.sizes.z
        if cp == 1:
            return Counter()
        again, purpose = self._attention(kind, "backward"), "backward: gradients of keys and values"
        if method == "ulysses":
            return again
        if (window := kind.window_in(self.config.model.sequence_length)) is not None:
            return again + self._halo(window, wide, purpose, back=True)
        if method == "ring":
            return again + self._all_keys("ring", wide, purpose)
        return again + self._over("cp", "reduce_scatter", cp * self._keys_and_values * wide, wide, purpose)

    def _all_keys(self, method: str, each: int, purpose: str) -> Transfers:
        """Keys and values of all ranks, `each` bytes an element."""
        cp, size = self.config.parallel.cp, self._keys_and_values * each
        if method == "all_gather":
            return self._over("cp", "all_gather", cp * size, each, purpose)
        send, receive = (self._over("cp", kind, size, each, purpose, cp - 1) for kind in ("send", "receive"))
        return send + receive

    def _halo(self, window: int, each: int, purpose: str, back: bool = False) -> Transfers:
        """One message to and from each rank whose keys and values, or their gradients on the way `back`, are needed."""
        cp, length = self.config.parallel.cp, self.config.model.sequence_length
        position = self._keys_and_values * cp // length * each
        gives, takes = halo_messages(cp, self.cp, length, window)
        found: Transfers = Counter()
        for kind, messages in (("send", takes if back else gives), ("receive", gives if back else takes)):
            for positions in messages:
                found += self._over("cp", kind, positions * position, each, purpose)
        return found

    def _ulysses(self, phase: str) -> Transfers:
        """Heads go to ranks with all positions, outputs return. Key-value heads are copied until cp divides them."""
        model, cp, sizes = self.config.model, self.config.parallel.cp, self.sizes
        heads, kv_heads = model.heads // self.config.parallel.tp, model.kv_heads // self.config.parallel.tp
        one = sizes.tokens * model.head_size * sizes.w  # of one head
        there = self._over(
            "cp",
            "all_to_all",
            (heads + 2 * math.lcm(kv_heads, cp)) * one,
            sizes.w,
            f"{phase}: queries, keys and values",
        )
        return there + self._over("cp", "all_to_all", heads * one, sizes.w, f"{phase}: outputs of attention")
