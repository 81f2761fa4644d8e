"""Mixture of experts, as plans know it. Its module is `megalite.model.experts`.

    E, K  experts, and those of a token    f  hidden width of one    h  width of the residual stream
    n     tokens on a rank, of its part of the sequence: T/t         w, z  bytes of an activation, of a statistic

Every token is copied for each of its experts: nK rows. Kept are these rows, gate, up and their product, nK·(h + 3f)·w,
the input of the router hnw, and of every token E logits, K scores and two numbers of 8 bytes for each of K experts.
Tensor parallelism splits neither experts nor router: a rank computes its part of the sequence.

A shared expert is a SwiGLU of all tokens, split over tp as in other layers. It computes while rows travel.

Where ranks share out experts, each sends its rows to those of their experts, and gets as many if experts are chosen
equally often, as is taken here; what experts return goes back, and gradients go both ways again. Rows that arrive are
kept, with two more numbers for each.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from megalite.config.layers import Mixture
from megalite.plan.parts import roles
from megalite.plan.parts.part import Kept, Moment, Passed, Pause, Product, Weight
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
class ExpertsPart:
    """The experts of a layer of the residual stream's `width`."""

    width: int
    kind: Mixture

    name = "mlp"
    takes = "router"
    heads = None

    def weights(self) -> Iterator[tuple[str, Weight]]:
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
        return None if self.kind.shared is None else SharedExpertPart(self.width, self.kind.shared)

    def products(self, tokens: float, tp: int) -> list[Product]:
        here, count, hidden = tokens / tp, self.kind.count, self.kind.width
        rows = here * self.kind.active
        return [
            Product(here, count, self.width),
            Product(rows, 2 * hidden, self.width, count),
            Product(rows, self.width, hidden, count),
            *([] if self.shared is None else self.shared.products(tokens, tp)),
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
        choices, apart = self._choices(sizes), sizes.config.parallel.ep > 1
        return (
            Kept("mlp", self._logits(sizes), "router"),
            # Experts, and places of rows.
            Kept("mlp", (4 if apart else 2) * INDEX_BYTES * choices, "router", remembered=True),
            Kept("mlp", rows, "gate and up", for_weights="gate and up", cheap=not apart, of_arrivals=apart),
            Kept("mlp", hidden, "swiglu", of_arrivals=apart),
            Kept("mlp", hidden, "swiglu", of_arrivals=apart),
            Kept("mlp", choices * sizes.z, "swiglu", of_arrivals=apart),
            Kept("mlp", hidden, "down", for_weights="down", cheap=True, of_arrivals=apart),
            *self._shared_kept(sizes),
        )

    def _shared_kept(self, sizes: Sizes) -> Iterator[Kept]:
        if self.shared is None:
            return
        for kept in self.shared.kept(sizes):
            moment = f"{SHARED} {kept.for_weights}" if kept.for_weights else ""
            yield replace(kept, until=f"{SHARED} {kept.until}", for_weights=moment)
        if self.kind.shared_gate:
            yield Kept("mlp", sizes.stream + 2 * sizes.statistic, f"{SHARED} gate")

    def forward(self, sizes: Sizes, passing: int) -> int:
        rows, hidden = self._rows(sizes)
        total = sizes.stream * sizes.z // sizes.w
        if sizes.config.parallel.ep > 1:
            # Rows that come back, beside those that were sent back. Layers that recompute still hold their input.
            return max(rows + passing, 2 * rows - (1 if passing else 2) * sizes.stream, rows + total)
        return rows + passing + (max(total - hidden, 0) if passing else total)  # the last matrix's input has passed

    def pauses(self, sizes: Sizes) -> tuple[Pause, ...]:
        if sizes.config.parallel.ep == 1:
            return ()
        rows, _ = self._rows(sizes)
        return Pause(0, False), Pause(2 * rows, False), Pause(2 * rows, True)

    def backward(self, sizes: Sizes, own: int) -> tuple[Moment, ...]:
        rows, hidden = self._rows(sizes)
        gradients: Counter[str] = Counter()  # by matrix, with those of its bias
        for name, weight in self.weights():
            matrix, _, _ = name.rpartition(".")
            gradients[matrix] += sizes.w * weight.gradient(sizes.t, sizes.config.parallel.ep)
        router, gate, up, down = (gradients[name] for name in MATRICES)
        # The gradient of what all return is held until the shared expert has used it.
        held, given = (own, sizes.stream) if self.shared is not None else (0, 0)
        apart = sizes.config.parallel.ep > 1
        # Full recompute begins when a gradient of rows is there, and makes what experts return once more.
        return (
            Moment("made again", own + 2 * rows, where="remade", pauses=2 * apart),
            *([Moment("gradients to experts", own + 2 * rows, where="kept", pauses=1)] if apart else []),
            Moment("down", own + rows + hidden, down, put_off=rows),
            Moment("swiglu", held + 3 * hidden),
            Moment("gate and up", held + 2 * hidden + rows, gate + up, put_off=2 * hidden),
            *([Moment("gradients back", held + 2 * rows, pauses=1)] if apart else []),
            *self._shared_backward(sizes, own, rows, gradients["shared_gate"]),
            Moment("router", rows + 2 * sizes.stream + given, router, put_off=self._logits(sizes)),
        )

    def _shared_backward(self, sizes: Sizes, own: int, rows: int, gate: int) -> Iterator[Moment]:
        """Moments of the shared expert, with the gradient of rows on their way back. gate: bytes of its gradient."""
        if self.shared is None:
            return
        if self.kind.shared_gate:
            yield Moment(f"{SHARED} gate", own + rows + 2 * sizes.stream, gate, put_off=sizes.statistic)
            own = sizes.stream
        for each in self.shared.backward(sizes, own):
            yield replace(each, name=f"{SHARED} {each.name}", temporaries=each.temporaries + rows)

    def forward_transfers(self, sizes: Sizes, cp: int, phase: str) -> Transfers:
        found = self._counted(sizes, phase) + self._sent(sizes, f"{phase}: tokens to their experts")
        found += self._sent_scores(sizes, f"{phase}: scores")
        if self.shared is not None:
            found += self.shared.forward_transfers(sizes, cp, phase) + self.shared.output_transfers(sizes, phase)
        if sizes.config.parallel.ep > 1 and phase != "recompute":
            counts = Transfer("all_to_all", "ep", INDEX_BYTES * self.kind.count, "int64")
            found[counts, f"{phase}: numbers of tokens for each expert"] += 1
        return found

    def output_transfers(self, sizes: Sizes, phase: str) -> Transfers:
        return self._sent(sizes, f"{phase}: tokens back from their experts")

    def backward_transfers(self, sizes: Sizes, cp: int) -> Transfers:
        there = self._sent(sizes, "backward: gradients to experts") + self._sent(sizes, "backward: gradients back")
        shared = Counter() if self.shared is None else self.shared.backward_transfers(sizes, cp)
        return there + self._sent_scores(sizes, "backward: gradients of scores") + shared

    def weight_transfers(self, sizes: Sizes) -> Transfers:
        return Counter() if self.shared is None else self.shared.weight_transfers(sizes)

    def _sent(self, sizes: Sizes, purpose: str) -> Transfers:
        """Rows that ranks with other experts exchange."""
        apart = sizes.config.parallel.ep > 1
        return over("ep", "all_to_all", self._rows(sizes)[0], sizes.w, purpose, times=int(apart))

    def _sent_scores(self, sizes: Sizes, purpose: str) -> Transfers:
        apart = sizes.config.parallel.ep > 1
        return over("ep", "all_to_all", self._choices(sizes) * sizes.z, sizes.z, purpose, times=int(apart))

    def _choices(self, sizes: Sizes) -> int:
        """Experts that tokens of this rank have chosen, nK."""
        return sizes.tokens // sizes.t * self.kind.active

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
        rows = self._choices(sizes) * sizes.w
        return rows * self.width, rows * self.kind.width
