"""A part of a layer with adapters beside its matrices, as plans know it; the modules are in `megalite.model.adapters`.

A matrix W `[out, in]` that is a target has two factors beside it, A `[r, in]` and B `[out, r]`, or as many pairs as it
has experts. Tensor parallelism splits B's outputs as W's, and A's inputs as W's. So A of a matrix that takes the whole
residual stream is copied, as is B of one that returns it.

Kept are the input of W, for A's gradient, and for B's the few features between the factors. Backward makes the gradient
of W's input by two ways, and adds them.

DoRA scales every output by (‖W‖ + m) / ‖W + s B A‖, norms of its row, where m is trained. A rank has whole rows, or
adds up with others what their parts have. Kept is the output as it was before, for m's gradient.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import NamedTuple

from megalite.config.layers import TARGETS, Adapter, Heads
from megalite.config.model_schema import Target
from megalite.plan.parts.attention import GroupedQueryPart
from megalite.plan.parts.experts import ExpertsPart
from megalite.plan.parts.latent import LatentPart
from megalite.plan.parts.part import Kept, Moment, Passed, Pause, Product, Weight
from megalite.plan.parts.roles import SPLIT, Side
from megalite.plan.parts.sizes import Sizes
from megalite.plan.parts.swiglu import SwiGLUPart
from megalite.plan.parts.transfers import Transfers, over

MAGNITUDE = ".lora_m"  # ends the names of what is added to norms of rows
HASH_BYTES = 3 * 8  # bytes of whole numbers while an element's hash is made
BLOCK = 1 << 20  # elements whose hashes are made at a time


def target(name: str, weight: Weight) -> Target | None:
    """The target that a weight is; None: it never has an adapter, as vectors and the router of experts."""
    if weight.role.inputs is None or weight.role.adapts:
        return None
    return "experts" if weight.role.of_expert else TARGETS.get(name.removesuffix(".weight").rpartition(".")[2])


def factor_names(name: str) -> tuple[str, str]:
    """The names of the two factors beside a weight."""
    layer = name.removesuffix(".weight")
    return f"{layer}.lora_a.weight", f"{layer}.lora_b.weight"


def factors(weight: Weight, rank: int) -> tuple[Weight, Weight]:
    """The two factors of `rank` beside a weight."""
    *stack, outputs, inputs = weight.shape
    first = replace(weight.role, outputs=Side.ADAPTER)
    second = replace(weight.role, inputs=Side.ADAPTER)
    return Weight((*stack, rank, inputs), first, used=weight.used), Weight(
        (*stack, outputs, rank), second, used=weight.used
    )


def magnitude_name(name: str) -> str:
    """The name of what is added to the norms of a weight's rows."""
    return name.removesuffix(".weight") + MAGNITUDE


def beside(name: str, weight: Weight, adapter: Adapter | None) -> Iterator[tuple[str, Weight]]:
    """Yield what an adapter trains beside a weight, each with its name."""
    if adapter is not None and target(name, weight) in adapter.targets:
        yield from zip(factor_names(name), factors(weight, adapter.rank), strict=True)
        if adapter.dora:
            yield magnitude_name(name), Weight(weight.shape[:-1], weight.role.magnitude)


class Pair(NamedTuple):
    """A matrix with two factors beside it. moment: of backward, which makes their gradients."""

    name: str
    weight: Weight
    first: Weight
    second: Weight
    moment: str

    @property
    def gathers(self) -> bool:
        """Flag: the matrix is column-parallel: its input is gathered over tp, and so is that of its second factor."""
        return self.weight.role.split and self.weight.role.outputs in SPLIT

    @property
    def scatters(self) -> bool:
        """Flag: the matrix is row-parallel: its output is summed over tp, and so is that of its first factor."""
        return self.weight.role.split and not self.gathers


@dataclass(frozen=True)
class Adapted:
    """A `part` whose weights are not trained, with the factors of `adapter` beside them."""

    part: GroupedQueryPart | LatentPart | SwiGLUPart | ExpertsPart
    adapter: Adapter

    @property
    def name(self) -> str:
        return self.part.name

    @property
    def takes(self) -> str:
        return self.part.takes

    @property
    def heads(self) -> Heads | None:
        return self.part.heads

    def weights(self) -> Iterator[tuple[str, Weight]]:
        for name, weight in self.part.weights():
            yield name, weight
            yield from beside(name, weight, self.adapter)

    @cached_property
    def pairs(self) -> list[Pair]:
        """The matrices that have adapters."""
        return [
            Pair(name, weight, *factors(weight, self.adapter.rank), self.part.moment_of(name))
            for name, weight in self.part.weights()
            if target(name, weight) in self.adapter.targets
        ]

    def products(self, tokens: float, tp: int) -> list[Product]:
        narrow = self.adapter.base == "nf4"
        found = [each._replace(trained=False, four_bits=narrow) for each in self.part.products(tokens, tp)]
        for pair in self.pairs:
            *stack, outputs, inputs = pair.weight.shape
            r, rows, groups = self.adapter.rank, tokens / tp, stack[0] if stack else 1
            scaled = self.adapter.dora * inputs
            if pair.weight.role.of_expert:
                found += [Product(rows * (pair.weight.used or 1), r, inputs, groups)]
                found += [Product(rows * (pair.weight.used or 1), outputs, r, groups)]
            elif pair.gathers:
                found += [Product(rows, r, inputs), Product(tokens, outputs / tp, r, gathered=r, scaled=scaled)]
            elif pair.scatters:
                found += [
                    Product(tokens, r, inputs / tp, scattered=True),
                    Product(rows, outputs, r, scaled=scaled / tp),
                ]
            else:
                found += [Product(rows, r, inputs), Product(rows, outputs, r, scaled=scaled)]
        return found

    def passed(self, tp: int) -> Passed:
        return self.part.passed(tp)

    def kept(self, sizes: Sizes) -> tuple[Kept, ...]:
        between = [Kept("adapters", self._between(sizes, pair), pair.moment, pair.moment) for pair in self.pairs]
        if self.adapter.dora:
            for pair in self.pairs:  # with an output, factors of its features and the norms by which these are divided
                features = pair.weight.shape[-2] // (sizes.t if pair.gathers else 1)
                size = self._output(sizes, pair) + features * (sizes.w + sizes.z)
                between.append(Kept("adapters", size, _scaling(pair.moment)))
        if not self.drops:
            return *self.part.kept(sizes), *between
        # Factors see inputs of their own, and the matrices' are not kept for gradients.
        others = (kept for kept in self.part.kept(sizes) if not kept.for_weights or kept.until != kept.for_weights)
        seen = (Kept("adapters", self._input(sizes, pair), pair.moment, pair.moment) for pair in self.pairs)
        return *others, *between, *seen

    @property
    def drops(self) -> bool:
        """Flag: factors see inputs in which features are dropped."""
        return self.adapter.dropout > 0

    def _dropping(self, sizes: Sizes, pair: Pair) -> int:
        """Bytes of hashes by which features are dropped of what a matrix takes."""
        if not self.drops:
            return 0
        return HASH_BYTES * min(BLOCK, self._input(sizes, pair) // sizes.w)

    def _input(self, sizes: Sizes, pair: Pair) -> int:
        """Bytes of what a matrix takes on a rank."""
        return self._rows(sizes, pair) * sizes.w * pair.weight.shape[-1]

    def _output(self, sizes: Sizes, pair: Pair) -> int:
        """Bytes of what a matrix makes on a rank."""
        return self._rows(sizes, pair) * sizes.w * pair.weight.shape[-2]

    def _between(self, sizes: Sizes, pair: Pair) -> int:
        """Bytes of the features between two factors, as the second one takes them."""
        whole = sizes.t if pair.gathers else 1
        return self._rows(sizes, pair) * self.adapter.rank * sizes.w * whole

    def _rows(self, sizes: Sizes, pair: Pair) -> int:
        """Rows that a rank's part of the sequence has of what a matrix makes."""
        if isinstance(self.part, ExpertsPart) and pair.weight.role.of_expert:
            return self.part.room(sizes)
        return sizes.tokens // sizes.t

    def forward(self, sizes: Sizes, passing: Sequence[Kept]) -> int:
        """Temporaries of the part, and what the adapter of its last matrix adds, if that is as large as its output."""
        last = next((pair for pair in self.pairs if pair.moment == "down"), None)
        whole = last is not None and (last.weight.role.of_expert or sizes.t == 1)
        added = self._rows(sizes, last) * last.weight.shape[-2] * sizes.w if last is not None and whole else 0
        dropping = 0 if last is None else self._dropping(sizes, last)
        with_factors = self.part.forward(sizes, [*passing, Kept("adapters", max(added, dropping), "down")])
        alone = self.part.forward(sizes, [*passing, Kept("adapters", added, "down")]) + self._widened(sizes, "down")
        return max(with_factors, alone)

    def _widened(self, sizes: Sizes, moment: str) -> int:
        """Bytes of the largest weight in four bits of a moment, which is made wide for its product."""
        ep, weights = sizes.config.parallel.ep, ((name, each) for name, each in self.part.weights() if each.four_bits)
        found = (prod(each.part(sizes.t, ep)) for name, each in weights if self.part.moment_of(name) == moment)
        return sizes.w * max(found, default=0)

    @property
    def scales_output(self) -> bool:
        """Flag: backward needs what the last matrix makes, whose rows are scaled."""
        return self.adapter.dora and any(pair.weight.role.into_stream for pair in self.pairs)

    def pauses(self, sizes: Sizes) -> tuple[Pause, ...]:
        return self.part.pauses(sizes)

    def backward(self, sizes: Sizes, own: int) -> tuple[Moment, ...]:
        if self.scales_output:  # the gradient of what is scaled is not the residual stream's
            own = sizes.stream
        return tuple(
            each for moment in self.part.backward(sizes, own) for each in self._with_factors(sizes, moment, own)
        )

    def _with_factors(self, sizes: Sizes, moment: Moment, own: int) -> Iterator[Moment]:
        """A moment of backward, in which factors have gradients if it is that of their matrices.

        Beside it is one in which the matrices make the gradient of their input; the later of both has two of these.
        Layers that return a part of the sequence have used their factors first, so these come last.
        """
        here = [pair for pair in self.pairs if pair.moment == moment.name]
        if here and self.adapter.dora:
            of_outputs = [self._output(sizes, pair) for pair in here]
            given = 0 if here[0].scatters else sum(of_outputs)
            yield Moment(_scaling(moment.name), given + 2 * max(of_outputs), where=moment.where)
        ep, made, between, put_off, outputs = sizes.config.parallel.ep, 0, 0, 0, 0
        for pair in here:
            made += sum(sizes.w * factor.gradient(sizes.t, ep) for factor in (pair.first, pair.second))
            rows = self._rows(sizes, pair) * sizes.w
            between += self._between(sizes, pair)
            # The output's gradient is kept for the second factor, and that between them for the first.
            outputs += rows * pair.weight.shape[-2]
            put_off += rows * self.adapter.rank * (sizes.t if pair.scatters else 1)
        taken, twice = moment.temporaries + between, self._input(sizes, here[0]) if here else 0
        widened = moment.temporaries + self._widened(sizes, moment.name)
        if here:  # inputs with features dropped are gone by then
            taken += self._dropping(sizes, here[0])
        else:
            taken = widened
        last = bool(here) and here[0].scatters
        if last:  # the gathered gradient of the output is gone, and its own once the second factor has used it
            taken += max(own, twice) - max(own, sizes.gathered)
        held = 0 if last else outputs
        widened += own if last else twice  # the second factor will need the gradient of the output, too
        alone = Moment(f"{moment.name} without factors", widened, held=held, where=moment.where)
        if last:
            yield from self._made_again(sizes, moment, own)
            yield alone
        yield replace(
            moment,
            temporaries=taken,
            weights=made,
            put_off=put_off + outputs,
            of_stream=moment.of_stream or (last and not own),  # as a rank's part of the sequence
            again=0,
        )
        if here and not last:
            yield alone

    def _made_again(self, sizes: Sizes, moment: Moment, own: int) -> Iterator[Moment]:
        """The end of full recompute, which the last matrix begins when it has gathered its output's gradient.

        Its own output and its adapter's are made once more, and its part's input is there whether it is kept or not.
        """
        if isinstance(self.part, SwiGLUPart) and not self.adapter.dora and sizes.t > 1:
            given = 0 if any(pair.gathers for pair in self.pairs) else sizes.stream
            again = max(own, sizes.gathered) + sizes.gathered + sizes.stream + given
            yield Moment(f"{moment.name} made again", again, where="remade")

    def forward_transfers(self, sizes: Sizes, cp: int, phase: str) -> Transfers:
        found = self.part.forward_transfers(sizes, cp, phase) + self._sent(sizes, phase, "all_gather", "reduce_scatter")
        if sizes.t == 1 or not self.adapter.dora:
            return found
        purpose = f"{phase}: norms of rows with adapters"
        for pair in self.pairs:
            if pair.scatters:
                found += over("tp", "all_reduce", 2 * pair.weight.shape[-2] * sizes.z, sizes.z, purpose)
        return found

    def output_transfers(self, sizes: Sizes, phase: str) -> Transfers:
        return self.part.output_transfers(sizes, phase)

    def backward_transfers(self, sizes: Sizes, cp: int) -> Transfers:
        found = self.part.backward_transfers(sizes, cp)
        return found + self._sent(sizes, "backward", "reduce_scatter", "all_gather")

    def _sent(self, sizes: Sizes, phase: str, kind: str, into: str) -> Transfers:
        """Features between factors, all of those of matrices that share an input at once. kind: of matrices that take
        what is gathered; into: of the others that tensor parallelism splits."""
        whole, found = sizes.tokens * self.adapter.rank * sizes.w, Transfers()
        if sizes.t == 1:
            return found
        purpose = f"{phase}: features between the factors of adapters"
        for count in Counter(pair.moment for pair in self.pairs if pair.gathers).values():
            found += over("tp", kind, count * whole, sizes.w, purpose)
        return found + over("tp", into, whole, sizes.w, purpose, times=sum(pair.scatters for pair in self.pairs))

    def weight_transfers(self, sizes: Sizes) -> Transfers:
        return self.part.weight_transfers(sizes)


def _scaling(moment: str) -> str:
    """The moment of backward before another, in which what that one's matrices have made was scaled."""
    return f"{moment} scaled"
