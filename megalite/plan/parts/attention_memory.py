"""Bytes that attention of one kind keeps of a micro-batch on one rank, and bytes that its backward takes.

Attention is computed block by block (`parallel.attention`), unless a kernel computes it in one call (`parallel.packed`,
or PyTorch's own). A block has n queries and m keys. Its temporaries depend on the kernel that computes the block.

    q   bytes of queries on this rank             w  bytes of an activation: 2, 4 or 8
    o   bytes of the output on this rank          z  bytes of a sum: 4 or 8
    kv  bytes of keys and values on this rank
"""

import math
from dataclasses import dataclass
from functools import cached_property

from megalite.config.attention_kernels import ANY_GPU, PADDING, Kernel, need_of, planned_kernel
from megalite.config.layers import Heads
from megalite.config.schema import Config
from megalite.plan.parts.part import Kept
from megalite.plan.parts.sizes import Sizes
from megalite.plan.parts.window import busiest, halo

# Limits of `parallel.explicit`:
ROWS = 128  # queries at a time, at most: each gets scores for all keys that any of them attends to
MAX_SCORES = 2**24  # the most scores at a time, unless a single row of queries has more


@dataclass(frozen=True)
class AttentionMemory:
    """One layer's attention on one rank. normed: queries and keys have norms."""

    sizes: Sizes
    heads: Heads
    normed: bool

    def kept(self) -> tuple[Kept, ...]:
        """Queries, keys, values and output in the form that the kernel keeps. Selective recompute remakes no copies."""
        q, o, normed = self.queries, self.outputs, self.normed
        if self._exchanges_heads:  # the output is kept twice: by heads and by positions
            again = self.kv if self._in_blocks else q + o if self.repeats else 0
            by_heads = Kept("attention", q + self.kv + again, "attention"), Kept("attention", o, "attention")
            return *by_heads, Kept("attention", o, "output", for_weights="output")
        queries = Kept("attention", q, "attention", cheap=normed)
        output = Kept("attention", o, "attention", for_weights="output")
        if self._in_blocks:
            return queries, Kept("attention", self.kv, "attention"), output
        if self.repeats:
            return queries, Kept("attention", q + o, "attention"), output
        keys = Kept("attention", self.sizes.split(self.heads.keys), "attention", cheap=normed)
        values = Kept("attention", self.sizes.split(self.heads.values), "attention")
        return queries, keys, values, output

    @property
    def backward(self) -> int:
        """Bytes of the gradients of queries, keys and values, and of temporaries of the method of attention."""
        q, o, kv, sums = self.queries, self.outputs, self.kv, self._wide(self.queries + self.kv)
        if self._exchanges_heads:
            inside = sums + self._own(self._positions) if self._in_blocks else 2 * q + o + kv if self.repeats else 0
            return max(2 * q + o + 2 * kv, inside)  # while heads are exchanged, or inside of attention
        if not self._in_blocks:
            several = self.config.data.mask_documents and self.config.batch.micro_size > 1
            apart = several and not self.config.joins_samples  # a call for each sample
            return 2 * q + o + kv if self.repeats else (q + kv) * (1 + apart)
        rounded = q + kv if self.w < self.z else 0  # the sums in the compute precision, made while the sums live
        if self.config.parallel.cp == 1:
            return sums + max(rounded, self._own(self._positions))
        if self._windowed is not None:
            return sums + self._window(self._windowed, rounded)
        return sums + (self._ring() if self.config.parallel.context.method == "ring" else self._all_gather())

    def _ring(self) -> int:
        """Bytes of the fullest step of ring attention's backward, beside the summed gradients: keys and values in use
        and arriving, gradients being made and sent back."""
        cp, kv, here = self.config.parallel.cp, self.kv, self._positions
        others = max(self._block(here // 2, here), self._block(here, here // 2))
        arriving, returning = (kv, 0) if cp == 3 else (0, 0) if cp == 2 else (kv, self._wide(kv))
        steps = [self._own(here) + kv, others + kv + self._wide(kv) + arriving + returning]
        if cp == 3:
            steps.append(others + kv + 2 * self._wide(kv))
        return max(steps)

    def _all_gather(self) -> int:
        """Bytes beside the sums: all keys and values, their gradients, and the gradients sorted by rank."""
        cp, kv, here = self.config.parallel.cp, self.kv, self._positions
        far = self._block(here // 2, (cp - 1) * here) + cp * (kv + self._wide(kv))
        return max(far, cp * (kv + 3 * self._wide(kv)))

    def _window(self, window: int, rounded: int) -> int:
        """Bytes beside the sums: keys and values that windows reach, their gradients, and buffers that send both."""
        cp, length = self.config.parallel.cp, self.config.model.sequence_length
        chunk, reach, rank = length // (2 * cp), window - 1, busiest(cp, length, window)
        given, taken = (self._of(self.kv, positions) for positions in halo(cp, rank, length, window))
        gaps = rank * chunk, 2 * (cp - 1 - rank) * chunk  # before the rank's first chunk, and between its two chunks
        far = max(self._far(min(chunk, reach), min(gap, reach), reach) for gap in gaps)
        return max(
            self._own(chunk) + given + taken,
            2 * taken,
            taken + self._wide(taken) + max(far, rounded),
            taken + self._wide(2 * taken + given),
        )

    def _own(self, rows: int) -> int:
        """Temporaries of `rows` queries over the keys of the same positions, with a causal mask."""
        reach = rows if self._windowed is None else self._windowed - 1
        if self._kernel == "flash" and self._on_cpu and 0 < reach < rows - 1:
            return max(self._block(rows, rows, reach), self._edge(rows - reach, reach))
        return self._block(rows, rows, masked=True, reach=reach)

    def _far(self, rows: int, keys: int, reach: int) -> int:
        """Temporaries of `rows` queries over the `keys` keys right before them.

        reach: how many positions the first query reaches back; every later query reaches one of the keys less.
        """
        if self._kernel != "flash" or not self._on_cpu:
            return self._block(rows, keys, masked=True)
        whole = min(rows, reach - keys)  # rows that reach all keys
        last = rows - whole
        return max(self._block(whole, keys), self._edge(last), self._block(last, max(0, keys - last)))

    def _edge(self, rows: int, piece: int | None = None) -> int:
        """Temporaries of the far edge of a window, which the CPU's flash kernel computes with rows in reverse order."""
        if self._kernel != "flash" or not self._on_cpu:
            return self._block(rows, rows)
        piece = min(piece or rows, rows)
        turned = 4 * self._of_block(self.queries, piece) + 2 * self._of_block(self.kv, piece)
        return self._block(rows, rows, piece) + turned + piece * self._heads * self.z

    def _block(self, n: int, m: int, piece: int | None = None, masked: bool = False, reach: int | None = None) -> int:
        """Temporaries of n queries over m keys.

        piece: how many queries, and keys, the CPU's flash kernel handles at a time; None: all. masked: some queries do
        not attend to all keys. reach: how many positions before its own a query attends to; None: all.
        """
        q, kv = self._of_block(self.queries, n), self._of_block(self.kv, m)
        if self._kernel == "math":
            longest = m if reach is None else min(m, reach + ROWS)
            rows = max(1, min(ROWS, n, MAX_SCORES // max(1, longest * self._heads)))
            tensors = 3 if self.heads.scores.softcap is not None else 2
            scores = rows * longest * (tensors * self._heads * self.z + masked)
            return self._wide(q + 2 * kv + 4 * self._of_block(self.queries, rows)) + scores
        padded = 0
        if self._pads:  # values, their gradients, outputs and gradients of these become as wide as keys
            kv = self._of_block(self._both_as_keys, m)
            padded = kv // 2 + 2 * q
        if not self._on_cpu:
            return q + kv + padded
        in_one = q if piece is None else self._of_block(self.queries, piece)
        keys = kv if piece is None else self._of_block(self._both_as_keys, piece)
        return q + kv + in_one + keys * self._shared + keys + padded

    @cached_property
    def _kernel(self) -> Kernel:
        return planned_kernel(
            self.config.kernels_by_operation.attention,
            need_of(self.config, self.heads),
            None if self._on_cpu else ANY_GPU,
        )

    @property
    def config(self) -> Config:
        return self.sizes.config

    @property
    def w(self) -> int:
        return self.sizes.w

    @property
    def z(self) -> int:
        return self.sizes.z

    @cached_property
    def queries(self) -> int:
        """Bytes of queries."""
        return self.sizes.split(self.heads.queries)

    @cached_property
    def outputs(self) -> int:
        """Bytes of the output."""
        return self.sizes.split(self.heads.outputs)

    @property
    def repeats(self) -> bool:
        """Flag: keys and values are repeated for every query head, in attention over whole sequences."""
        return self._kernel == "efficient" and self._shared > 1

    @cached_property
    def _in_blocks(self) -> bool:
        whole = self.config.parallel.cp == 1 or self._exchanges_heads
        cut = self._windowed is not None or self.config.data.mask_documents
        if self._on_cpu and (cut or self.heads.scores.sinks):
            return True
        return not whole or self._pads or self._kernel in ("math", "flex")

    @cached_property
    def _windowed(self) -> int | None:
        return self.heads.scores.window_in(self.config.model.sequence_length)

    @property
    def _exchanges_heads(self) -> bool:
        return self.config.parallel.context.method == "ulysses" and self.config.parallel.cp > 1

    @property
    def _on_cpu(self) -> bool:
        return self.config.run.device != "cuda"

    @property
    def _positions(self) -> int:
        """Number of positions of a sequence that this rank has queries of."""
        return self.config.model.sequence_length // (1 if self._exchanges_heads else self.config.parallel.cp)

    @property
    def _heads(self) -> int:
        """Query heads on this rank times the samples of a block."""
        return self._of_block(self.queries, self._positions) // (self.w * self.heads.width * self._positions)

    @cached_property
    def _blocks(self) -> int:
        """Blocks over the same positions: each of one sample where samples have documents of their own, else one."""
        return self.config.batch.micro_size if self.config.data.mask_documents and self._kernel != "flex" else 1

    @cached_property
    def kv(self) -> int:
        """Bytes of keys and values. Ulysses copies key-value heads until all ranks of cp can have equally many."""
        return self.sizes.split(self.heads.keys + self.heads.values) * self._kv_copies

    @cached_property
    def _both_as_keys(self) -> int:
        """Bytes of keys and of values that are as wide."""
        return self.sizes.split(2 * self.heads.keys) * self._kv_copies

    @property
    def _pads(self) -> bool:
        """Flag: the kernel takes values as wide as keys, and these are not."""
        return self.heads.value_width != self.heads.width and self._kernel in PADDING

    @property
    def _kv_copies(self) -> int:
        if not self._exchanges_heads:
            return 1
        kv_heads = self.heads.kv_count // self.config.parallel.tp
        return math.lcm(kv_heads, self.config.parallel.cp) // kv_heads

    @property
    def _shared(self) -> int:
        """Query heads that share a key-value head."""
        return self.heads.count // (self.heads.kv_count * self._kv_copies)

    def _of(self, whole: int, positions: int) -> int:
        """Bytes of `positions` positions of a tensor that takes `whole` bytes for all positions on this rank."""
        return whole * positions // self._positions

    def _of_block(self, whole: int, positions: int) -> int:
        """Bytes of the samples of a block in what takes `_of(whole, positions)`."""
        return self._of(whole, positions) // self._blocks

    def _wide(self, narrow: int) -> int:
        """Bytes of a sum, in float32 or wider, of tensors that take `narrow` bytes."""
        return narrow * self.z // self.w
