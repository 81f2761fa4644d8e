"""Grouped-query attention, as plans know it. Its module is `megalite.model.attention`.

    q, k, v, o  features of all queries, keys, values and outputs of a token    t  tp
    h           width of the residual stream                                    T  tokens on a rank
    w           bytes of an activation                                          z  bytes of a statistic

Kept are queries, keys, values and output, (q + k + v + o)·wT/t, and the log-sum-exp, heads·zT/t, in the form that the
method of attention needs (`attention_memory`); norms of queries and keys keep their inputs and 1/rms, too.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from types import MappingProxyType

from megalite.config.layers import GroupedQuery, Heads
from megalite.config.model_schema import BaseForm
from megalite.plan.parts import roles
from megalite.plan.parts.attention_memory import AttentionMemory
from megalite.plan.parts.context import ContextTraffic
from megalite.plan.parts.gathered import Gathered
from megalite.plan.parts.part import Kept, Moment, Passed, Pause, Product, Weight
from megalite.plan.parts.sizes import Sizes
from megalite.plan.parts.transfers import Transfers, over


@dataclass(frozen=True)
class GroupedQueryPart(Gathered):
    """The attention of a layer of the residual stream's `width`."""

    width: int
    kind: GroupedQuery
    base: BaseForm | None = None
    rotary: bool = True  # positions turn queries and keys

    name = title = "attention"
    takes = "projections"
    moments = MappingProxyType({"q": takes, "k": takes, "v": takes, "o": "output"})

    @property
    def heads(self) -> Heads:
        return self.kind.heads

    def described(self) -> Iterator[tuple[str, Weight]]:
        heads = self.heads
        projections = (
            ("q", heads.queries, roles.QUERY),
            ("k", heads.keys, roles.KEY),
            ("v", heads.values, roles.VALUE),
        )
        for name, size, role in projections:
            yield f"{name}.weight", Weight((size, self.width), role)
            if self.kind.biases:
                yield f"{name}.bias", Weight((size,), role.bias)
        if self.kind.norms == "head":
            for name in ("q_norm", "k_norm"):
                yield f"{name}.weight", Weight((heads.width,), roles.HEAD_NORM)
        elif self.kind.norms == "all":
            yield "q_norm.weight", Weight((heads.queries,), roles.QUERY_NORM)
            yield "k_norm.weight", Weight((heads.keys,), roles.KEY_NORM)
        if heads.scores.sinks:
            yield "sinks", Weight((heads.count,), roles.SINKS)
        yield "o.weight", Weight((self.width, heads.outputs), roles.ATTENTION_OUTPUT)
        if self.kind.out_bias:
            yield "o.bias", Weight((self.width,), roles.ATTENTION_OUTPUT.bias)

    def products(self, tokens: float, tp: int) -> list[Product]:
        heads = self.heads
        return [
            Product(tokens, (heads.queries + heads.keys + heads.values) / tp, self.width, gathered=self.width),
            Product(tokens, self.width, heads.outputs / tp, scattered=True),
        ]

    def passed(self, tp: int) -> Passed:
        return Passed(heads=(self.heads.queries + self.heads.keys + self.heads.values) / tp)

    def kept(self, sizes: Sizes) -> tuple[Kept, ...]:
        heads, of_head = self.heads, sizes.tokens * sizes.z // sizes.t  # bytes for every head: a number per position
        found = [*self._memory(sizes).kept(), Kept("attention", heads.count * of_head, "attention")]
        if sizes.in_8_bits(self.weights(), into_stream=True):
            narrow = sizes.narrow(sizes.split(heads.outputs), sizes.tokens)
            found.append(Kept("attention", narrow, "output", for_weights="output"))
        for features, count in ((heads.queries, heads.count), (heads.keys, heads.kv_count)) if self.kind.norms else ():
            inverse = count * of_head if self.kind.norms == "head" else sizes.tokens * sizes.z
            found += [Kept("norms", sizes.split(features), "rope"), Kept("norms", inverse, "rope")]
        return tuple(found)

    def pauses(self, sizes: Sizes) -> tuple[Pause, ...]:
        return ()

    def backward(self, sizes: Sizes, own: int) -> tuple[Moment, ...]:
        gathered, heads = sizes.gathered, self.heads
        q, k, v, o = map(sizes.split, (heads.queries, heads.keys, heads.values, heads.outputs))
        gradients = {
            name: sizes.w * weight.gradient(sizes.t)
            for name, weight in self.weights()
            if weight.role.kind is not roles.RoleKind.NORM
        }
        output = gradients.pop("o.weight") + gradients.pop("o.bias", 0)
        columns, into = self.casts(sizes, q + k + v, o)
        put_off = sum(size for name, size in (("q", q), ("k", k), ("v", v)) if gradients[f"{name}.weight"])
        return (
            Moment(
                "output",
                max(own, gathered) + o + into,
                output,
                put_off=gathered or sizes.stream,
                of_stream=not (own or gathered or into),
            ),
            Moment("attention", o + self._memory(sizes).backward),
            Moment("rope", self._turning(sizes, q, k, v)),
            Moment(
                "projections",
                sizes.linear(q + k + v, self.trains_columns) + columns,
                sum(gradients.values()),
                max(gradients.values()),
                put_off=put_off,
                again=gathered,
            ),
        )

    def _turning(self, sizes: Sizes, q: int, k: int, v: int) -> int:
        """Bytes in backward of the norms and the rotation of queries, which are last, and gradients of keys, values."""
        wide = q * sizes.z // sizes.w
        if self.kind.norms is not None:  # whose input is freed, of keys
            return q + 3 * wide + v
        turned = wide + (q if sizes.z > sizes.w else 0)  # queries turn in a wide tensor
        return q + (turned if self.rotary else 0) + k + v

    def forward_transfers(self, sizes: Sizes, cp: int, phase: str) -> Transfers:
        found = super().forward_transfers(sizes, cp, phase) + self._sums(sizes, phase)
        return found + ContextTraffic(sizes, self.heads, cp).forward(phase)

    def backward_transfers(self, sizes: Sizes, cp: int) -> Transfers:
        found = super().backward_transfers(sizes, cp) + self._sums(sizes, "backward")
        return found + ContextTraffic(sizes, self.heads, cp).backward()

    def _sums(self, sizes: Sizes, phase: str) -> Transfers:
        """A number per token, summed over tp for queries and for keys, where all heads have one norm together."""
        together = self.kind.norms == "all" and sizes.t > 1
        size, purpose = sizes.tokens * sizes.z, f"{phase}: sums of the norms of queries and keys"
        return over("tp", "all_reduce", size, sizes.z, purpose, times=2 * together)

    def _memory(self, sizes: Sizes) -> AttentionMemory:
        return AttentionMemory(sizes, self.heads, normed=self.kind.norms is not None)
