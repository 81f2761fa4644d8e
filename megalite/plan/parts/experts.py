"""Mixture of experts, as plans know it. Its module is `megalite.model.experts`.

    E, K  experts, and those of a token    f  hidden width of one    h  width of the residual stream
    n     tokens on a rank, of its part of the sequence: T/t         w, z  bytes of an activation, of a statistic

Every token is copied for each of its experts: nK rows. Kept are these rows, gate, up and their product, nK·(h + 3f)·w,
the input of the router hnw, and of every token E logits, K scores and two numbers of 8 bytes for each of K experts.
Tensor parallelism splits neither experts nor router: a rank computes its part of the sequence.

A shared expert is a SwiGLU of all tokens, split over tp as in other layers. It computes while rows travel.

Where ranks share out experts, each sends its rows to those of their experts, and gets as many if experts are chosen
equally often, as is taken here; what experts return goes back, and gradients go both ways again. Rows that arrive are
kept, with a number for each.

With buffers of a fixed size all ep ranks get all tokens, ep·n of them, and have room for ep·n·min(K, E/ep) rows,
whatever is chosen. Sums of a token's rows go back.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType

from megalite.config.layers import Mixture
from megalite.config.model_schema import BaseForm
from megalite.plan.parts import roles
from megalite.plan.parts.part import Kept, Moment, Passed, Pause, Product, Weight, Weighted
from megalite.plan.parts.sizes import Sizes
from megalite.plan.parts.swiglu import SwiGLUPart
from megalite.plan.parts.transfers import Transfer, Transfers, over

INDEX_BYTES = 8
MATRICES = ("router", "experts.gate", "experts.up", "experts.down")
SHARED = "shared"  # the name of the shared expert's module, and a prefix of its moments


class SharedExpertPart(SwiGLUPart):
    """An expert that computes all tokens."""

    title = "shared expert"


@dataclass(frozen=True)
class ExpertsPart(Weighted):
    """The experts of a layer of the residual stream's `width`."""

    width: int
    kind: Mixture
    base: BaseForm | None = None

    name = "mlp"
    takes = "router"
    moments = MappingProxyType(
        {f"experts.{name}": moment for name, moment in SwiGLUPart.moments.items()}
        | {f"{SHARED}.{name}": f"{SHARED} {moment}" for name, moment in SwiGLUPart.moments.items()}
    )
    heads = None

    def described(self) -> Iterator[tuple[str, Weight]]:
        count, hidden, used = self.kind.count, self.kind.width, self.kind.active
        yield from self._with_bias("router", Weight((count, self.width), roles.ROUTER))
        if self.kind.router.correction_rate is not None:
            yield "router.correction", Weight((count,), roles.CORRECTION, trained=False)
        yield from self._with_bias("experts.gate", Weight((count, hidden, self.width), roles.EXPERT_GATE, used=used))
        yield from self._with_bias("experts.up", Weight((count, hidden, self.width), roles.EXPERT_UP, used=used))
        yield from self._with_bias("experts.down", Weight((count, self.width, hidden), roles.EXPERT_DOWN, used=used))
        if self.shared is not None:
            yield from ((f"{SHARED}.{name}", weight) for name, weight in self.shared.weights())
        if self.kind.shared_gate:
            yield f"{SHARED}_gate.weight", Weight((1, self.width), roles.ROUTER)

    def _with_bias(self, name: str, weight: Weight) -> Iterator[tuple[str, Weight]]:
        yield f"{name}.weight", weight
        if self.kind.biases:
            yield f"{name}.bias", replace(weight, shape=weight.shape[:-1], role=weight.role.bias)

    @cached_property
    def shared(self) -> SharedExpertPart | None:
        """The expert that computes all tokens, if there is one."""
        return None if self.kind.shared is None else SharedExpertPart(self.width, self.kind.shared, self.base)

    def products(self, tokens: float, tp: int) -> list[Product]:
        here, count, hidden = tokens / tp, self.kind.count, self.kind.width
        rows = here * self.kind.active
        return [
            Product(here, count, self.width),
            Product(rows, 2 * hidden, self.width, count),
            Product(rows, self.width, hidden, count),
            *(each._replace(beside_rows=True) for each in (self.shared.products(tokens, tp) if self.shared else ())),
            *([Product(here, 1, self.width)] if self.kind.shared_gate else []),
        ]

    def passed(self, tp: int) -> Passed:
        active = self.kind.active / tp
        shared = 0.0 if self.shared is None else self.shared.passed(tp).hidden
        rows = self.width * active
        return Passed(
            hidden=2 * self.kind.width * active + shared,
            routed=rows + self.width / tp,
            rows=rows,
            active=self.kind.active,
        )

    def kept(self, sizes: Sizes) -> tuple[Kept, ...]:
        rows, hidden = self._rows(sizes)
        choices, ep, fixed = self._choices(sizes), sizes.config.parallel.ep, sizes.config.parallel.fixed_buffers
        indices = 1 + (ep if fixed else min(ep, 2))  # experts, and places of rows here and at these
        return (
            Kept("mlp", self._logits(sizes), "router"),
            Kept("mlp", indices * INDEX_BYTES * choices, "router", remembered=True),
            Kept("mlp", self._gathered(sizes), "gate and up", recipe=True),
            Kept("mlp", rows, "gate and up", for_weights="gate and up", cheap=ep == 1 or fixed, of_arrivals=ep > 1),
            Kept("mlp", hidden, "swiglu", of_arrivals=ep > 1),
            Kept("mlp", hidden, "swiglu", of_arrivals=ep > 1),
            Kept("mlp", self.room(sizes) * sizes.z, "swiglu", of_arrivals=ep > 1),
            Kept("mlp", hidden, "down", for_weights="down", cheap=True, of_arrivals=ep > 1),
            *self._shared_kept(sizes),
        )

    def _shared_kept(self, sizes: Sizes) -> Iterator[Kept]:
        if self.shared is None:
            return
        for kept in self.shared.kept(sizes):
            moment = f"{SHARED} {kept.for_weights}" if kept.for_weights else ""
            yield replace(kept, until=f"{SHARED} {kept.until}", for_weights=moment)
        moments = [f"{SHARED} gate and up"]
        if self.kind.shared_gate:
            moments.append(f"{SHARED} gate")
            yield Kept("mlp", sizes.stream + 2 * sizes.statistic, f"{SHARED} gate")
        for moment in moments:  # selective recompute makes the tokens again for each
            yield Kept("mlp", sizes.stream, moment, for_weights=moment, cheap=True, recipe=True)

    def forward(self, sizes: Sizes, passing: Sequence[Kept]) -> int:
        rows, _ = self._rows(sizes)
        of_shared = sum(kept.bytes for kept in passing if kept.until.startswith(SHARED) and not kept.recipe)
        own = sum(kept.bytes for kept in passing if not kept.until.startswith(SHARED))
        parallel, gathered = sizes.config.parallel, self._gathered(sizes)
        summed = _summing(sizes, gathered) if gathered else 2 * sizes.stream + sizes.stream * sizes.z // sizes.w
        # Results that come back, beside those that were sent back.
        exchanged = 2 * (gathered or rows) if parallel.ep > 1 else 0
        sent = (gathered or rows) if parallel.ep > 1 else 0  # on their way, beside the shared expert
        if self.shared is not None and parallel.ep == 1:  # its output waits for that of the others
            rows += sizes.stream
        # Layers that recompute still hold their input.
        return max(rows + own, rows + summed, exchanged, sent + of_shared) - (1 if passing else 2) * sizes.stream

    def pauses(self, sizes: Sizes) -> tuple[Pause, ...]:
        if sizes.config.parallel.ep == 1:
            return ()
        sent = 2 * (self._gathered(sizes) or self._rows(sizes)[0])
        return Pause(0, False), Pause(sent, False), Pause(sent, True)

    def backward(self, sizes: Sizes, own: int) -> tuple[Moment, ...]:
        rows, hidden = self._rows(sizes)
        gradients: Counter[str] = Counter()  # by matrix, with those of its bias
        for name, weight in self.weights():
            matrix, _, _ = name.rpartition(".")
            gradients[matrix] += sizes.w * weight.gradient(sizes.t, sizes.config.parallel.ep)
        router, gate, up, down = (gradients[name] for name in MATRICES)
        # The gradient of what all return is held until the shared expert has used it.
        held, given = (own, sizes.stream) if self.shared is not None else (0, 0)
        apart, gathered = sizes.config.parallel.ep > 1, self._gathered(sizes)
        sent, summed = gathered or rows, _summing(sizes, sizes.stream)
        there = gathered or 2 * rows  # gradients to experts, on their way
        # Experts that are all here take tokens after the shared one, so they give gradients of these before it.
        early = self.shared is not None and not apart
        # Beside the shared expert's backward: that gradient, or those of rows on their way, and what its gate has made.
        beside = sizes.stream if early else 2 * sent + sizes.stream * self.kind.shared_gate
        # Full recompute begins when a gradient of rows is there, and makes once more what experts and the shared one
        # return.
        return (
            Moment("made again", own + 2 * rows + given, where="remade", pauses=2 * apart),
            *([Moment("gradients to experts", own + there, where="kept", pauses=1)] if apart else []),
            *([Moment("gradients of rows", own + rows + gathered, where="kept")] if gathered else []),
            Moment("down", own + rows + hidden, down, put_off=rows),
            Moment("swiglu", held + 3 * hidden),
            Moment("gate and up", held + 2 * hidden + rows, gate + up, max(gate, up), put_off=2 * hidden),
            *([Moment("gradients of tokens", held + rows + _summing(sizes, gathered))] if gathered else []),
            *([Moment("gradients back", held + 2 * sent, pauses=1)] if apart else []),
            *([Moment("gradients of rows", held + rows + summed)] if early else []),
            *self._shared_backward(sizes, own, beside, gradients["shared_gate"]),
            Moment("router", (0 if early else sent) + summed + given, router, put_off=self._logits(sizes)),
        )

    def _shared_backward(self, sizes: Sizes, own: int, rows: int, gate: int) -> Iterator[Moment]:
        """Moments of the shared expert. rows: bytes of gradients of rows or tokens beside. gate: of its gradient."""
        if self.shared is None:
            return
        if self.kind.shared_gate:
            yield Moment(f"{SHARED} gate", own + rows + 2 * sizes.stream, gate, put_off=sizes.statistic)
            own = sizes.stream
        for each in self.shared.backward(sizes, own):
            yield replace(each, name=f"{SHARED} {each.name}", temporaries=each.temporaries + rows)

    def forward_transfers(self, sizes: Sizes, cp: int, phase: str) -> Transfers:
        there = "all_gather" if sizes.config.parallel.fixed_buffers else "all_to_all"
        found = self._counted(sizes, phase) + self._sent(sizes, there, f"{phase}: tokens to their experts")
        found += self._sent_scores(sizes, there, f"{phase}: scores")
        if self.shared is not None:
            found += self.shared.forward_transfers(sizes, cp, phase) + self.shared.output_transfers(sizes, phase)
        if sizes.config.parallel.ep > 1 and phase != "recompute":
            if sizes.config.parallel.fixed_buffers:
                choices = INDEX_BYTES * self._choices(sizes) * sizes.config.parallel.ep
                found[Transfer(there, "ep", choices, "int64"), f"{phase}: experts of tokens"] += 1
            else:
                counts = Transfer(there, "ep", INDEX_BYTES * self.kind.count, "int64")
                found[counts, f"{phase}: numbers of tokens for each expert"] += 1
        return found

    def output_transfers(self, sizes: Sizes, phase: str) -> Transfers:
        return self._sent(sizes, "all_to_all", f"{phase}: tokens back from their experts")

    def backward_transfers(self, sizes: Sizes, cp: int) -> Transfers:
        kind = "all_gather" if sizes.config.parallel.fixed_buffers else "all_to_all"
        there = self._sent(sizes, kind, "backward: gradients to experts")
        there += self._sent(sizes, "all_to_all", "backward: gradients back")
        shared = Counter() if self.shared is None else self.shared.backward_transfers(sizes, cp)
        return there + self._sent_scores(sizes, "all_to_all", "backward: gradients of scores") + shared

    def weight_transfers(self, sizes: Sizes) -> Transfers:
        return Counter() if self.shared is None else self.shared.weight_transfers(sizes)

    def _sent(self, sizes: Sizes, kind: str, purpose: str) -> Transfers:
        """Rows that ranks with other experts exchange, or all of their tokens."""
        parallel = sizes.config.parallel
        size = self._gathered(sizes) if parallel.fixed_buffers else self._rows(sizes)[0]
        return over("ep", kind, size, sizes.w, purpose, times=int(parallel.ep > 1))

    def _sent_scores(self, sizes: Sizes, kind: str, purpose: str) -> Transfers:
        parallel = sizes.config.parallel
        size = self._choices(sizes) * sizes.z * (parallel.ep if parallel.fixed_buffers else 1)
        return over("ep", kind, size, sizes.z, purpose, times=int(parallel.ep > 1))

    def _choices(self, sizes: Sizes) -> int:
        """Experts that tokens of this rank have chosen, nK."""
        return sizes.tokens // sizes.t * self.kind.active

    def _gathered(self, sizes: Sizes) -> int:
        """Bytes of the tokens of all ranks with other experts, with buffers of a fixed size; else 0."""
        return sizes.config.parallel.ep * sizes.stream if sizes.config.parallel.fixed_buffers else 0

    def room(self, sizes: Sizes) -> int:
        """Rows of this rank's experts: as many as can come with buffers of a fixed size, else as many as come."""
        if not sizes.config.parallel.fixed_buffers:
            return self._choices(sizes)
        ep = sizes.config.parallel.ep
        return ep * sizes.tokens // sizes.t * min(self.kind.active, self.kind.count // ep)

    def _counted(self, sizes: Sizes, phase: str) -> Transfers:
        """Counts of the balance loss, summed over the parts of sequences. Full recompute remembers them."""
        if not self.kind.router.balance_loss or phase == "recompute":
            return Counter()
        parallel, size = sizes.config.parallel, INDEX_BYTES * sizes.config.batch.micro_size * self.kind.count
        purpose = f"{phase}: counts of experts for the balance loss"
        groups = {"cp": parallel.cp, "tp": parallel.tp}
        return Counter(
            {(Transfer("all_reduce", axis, size, "int64"), purpose): 1 for axis, ranks in groups.items() if ranks > 1}
        )

    def _logits(self, sizes: Sizes) -> int:
        """Bytes of the router's logits."""
        return sizes.tokens // sizes.t * self.kind.count * sizes.z

    def _rows(self, sizes: Sizes) -> tuple[int, int]:
        """Bytes of the tokens of all experts, and of as many hidden features."""
        rows = self.room(sizes) * sizes.w
        return rows * self.width, rows * self.kind.width


def _summing(sizes: Sizes, tokens: int) -> int:
    """Bytes in which rows are summed to so many bytes of tokens: sums in float32 or wider, and what is added."""
    return tokens * sizes.z // sizes.w + tokens
