"""The time of one layer, of the output layer and of the embedding, for one micro-batch. Imports no torch.

A pass takes as long as its kernels, one after another, and the communication that is not hidden behind them; or as long
as the host needs to launch them, if that is longer.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from math import ceil
from operator import add, mul
from typing import NamedTuple

from megalite.config.attention_kernels import PADDING
from megalite.config.layers import Heads
from megalite.cost.cluster import Cluster
from megalite.cost.constants import FITTED_CONSTANTS, Constants
from megalite.cost.kernels import VECTOR_ELEMENTS, Kernels, launched
from megalite.cost.network import Group, Net
from megalite.cost.program import HOST_BACKWARD_RATIO, TABLE_KERNELS, Program, attention_shares, machine_of
from megalite.cost.share import Share
from megalite.cost.turns import LayerPass, Stretch
from megalite.plan.parts.part import FOUR_BIT_BYTES, Product
from megalite.plan.parts.window import attended_pairs
from megalite.plan.recompute_modes import Mode

MERGE_BYTES = (12, 8)  # for each element of attention's result, to add what other ranks' keys give: forward, backward
ROUTED_BYTES = 4  # for each element of a token and of its rows, forward or backward: it is read once, and written once
SCALED_PASSES = (2, 6)  # over outputs that adapters scale by norms of rows, forward and backward
LOOKUP_ELEMENTS = 6  # read and written for each of the embedding's output, forward and backward
# Share of the network's rate at which tokens are sent once to each node. DeepEP's README (0297fc8) tells 90, 81, 61 and
# 61 GB/s on two and on four nodes with networks of 50, and counts what stays on a node.
ONCE_SHARE = 0.88
ATTENTION_BACKWARD = 2.5  # operations of fused attention's backward, in those of its forward: scores are made again
REFERENCE_BYTES = 2  # bytes of an element in the precision that programs' bytes are counted in


class Seconds(NamedTuple):
    """A time by what takes it. A named tuple, as a search makes many.

    products: matrix products. attention: scores, and what is summed by them. passes: over memory. tensor, context:
    exposed communication of these kinds of parallelism. data: that of data parallelism. host: waiting for launches.
    offload: tensors on their way from or to host memory. experts: tokens on their way to experts and back.
    """

    products: float = 0.0
    attention: float = 0.0
    passes: float = 0.0
    tensor: float = 0.0
    context: float = 0.0
    data: float = 0.0
    host: float = 0.0
    offload: float = 0.0
    experts: float = 0.0

    @property
    def total(self) -> float:
        return float(sum(self))

    def __add__(self, other: "Seconds") -> "Seconds":  # type: ignore[override]
        return Seconds._make(map(add, self, other))

    def __mul__(self, times: float) -> "Seconds":  # type: ignore[override]
        return Seconds._make([each * times for each in self])


KINDS = Seconds._fields


@dataclass(frozen=True)
class LayerTime:
    """Times of one layer and micro-batch.

    backward: what is recomputed included. weights: of it, the seconds that make the gradients of weights. inputs: all
    else of it by itself, with all launches: as long at least as what weights leave of the whole. turns: forward and
    backward as they take turns with others.
    """

    forward: Seconds
    backward: Seconds
    weights: float
    inputs: Seconds
    turns: tuple[LayerPass, LayerPass]


class LayerModel:
    """Times of a layer, the embedding and the head, for a rank's `share` done by `program` on `cluster`.

    net: of the cluster; kernels: of its GPUs, by fp8's rate. Both remember what has been asked.
    """

    def __init__(
        self,
        share: Share,
        program: Program,
        cluster: Cluster,
        constants: Constants = FITTED_CONSTANTS,
        *,
        net: Net | None = None,
        kernels: dict[float, Kernels] | None = None,
    ) -> None:
        self.share, self.program, self.cluster = share, program, cluster
        self.beside, kernels = constants.beside, {} if kernels is None else kernels
        fp8 = {"tensorwise": program.fp8, "rowwise": program.rowwise, "mx": program.mx}[share.recipe]
        self.kernels = kernels.setdefault(fp8, Kernels(cluster.gpu, constants, fp8))
        self.net = net or Net(cluster, constants)
        self.tp, self.cp = Group(share.tp, 1), Group(share.cp, share.tp)

    def layer(self, recompute: Mode | None = None) -> LayerTime:
        """The time of a layer. recompute: in place of the share's."""
        program, recompute = self.program, recompute or self.share.recompute
        forward, backward, weights, uncovered = self._alone
        host = program.host + (program.experts_host if self.share.passed.active else 0.0)
        host = 0.0 if self.share.graphed else host
        launches = host, host * HOST_BACKWARD_RATIO
        if recompute == "full":
            again = forward if program.remade_results else forward._replace(experts=forward.experts / 2)
            backward, launches = backward + again, (launches[0], launches[1] + launches[0])
        elif recompute == "selective" and program.repeats is None:
            backward += Seconds(attention=forward.attention)
        elif recompute == "selective":
            backward += Seconds(products=(program.repeats or 0.0) * forward.products, passes=forward.passes)
        halved = backward._replace(products=backward.products - weights, tensor=backward.tensor + uncovered)
        inputs = _launched(halved, launches[1])
        turns = self._turns(forward, backward, launches, recompute)
        forward, backward = _launched(forward, launches[0]), _launched(backward, launches[1])
        if program.waits:
            waits = Seconds(host=program.waits)
            forward, backward = forward + waits, backward + waits if recompute == "full" else backward
        return LayerTime(forward, backward, weights, inputs, turns)

    def _turns(
        self, forward: Seconds, backward: Seconds, launches: tuple[float, float], recompute: Mode
    ) -> tuple[LayerPass, LayerPass]:
        """Both passes, without launches, as they take turns: each gives way when it has sent numbers of rows, or rows.

        Forward's last stretch are the products of experts, backward's first. Between them rows come and go.
        """
        alone = [each.total - each.experts for each in (forward, backward)]
        if not (sent := self._dispatch() / 2):
            return LayerPass((), alone[0], launches[0]), LayerPass((), alone[1], launches[1])
        forward_of, *backward_of = self._of_product
        grouped = [product for product in self.share.products(_aligned(self.share.tokens)) if product.groups > 1]
        there, back = (
            sum(passed(product) for product in grouped for passed in each) for each in ([forward_of], backward_of)
        )
        own, own_back = (sum(map(passed, self._shared)) for passed in self._of_product[:2])
        before, rest = alone[0] - there - own, alone[1] - back - own_back
        rows = Stretch(back, sent, own_back)
        first = LayerPass((Stretch(before), Stretch(0.0, sent, own), Stretch(there, sent)), 0.0, launches[0])
        if recompute != "full":
            return first, LayerPass((Stretch(0.0, sent), rows), rest, launches[1])
        again = Stretch(before, sent, own), Stretch(there, sent)
        return first, LayerPass((*again, rows), rest - alone[0], launches[1])

    @cached_property
    def _alone(self) -> tuple[Seconds, Seconds, float, float]:
        """Forward and backward without launches, with nothing made again; what makes the gradients of weights; and how
        much longer a split backward waits for tensor-parallel ranks."""
        share, matrices = self.share, self.share.products(_aligned(self.share.tokens))
        each = zip(
            self._of_product, (matrices, matrices, [matrix for matrix in matrices if matrix.trained]), strict=True
        )
        products, inputs, weights = (sum(map(passed, those)) for passed, those in each)
        attention, passes = self._attention(), self._passes()
        if share.precision == "fp8":
            passes = passes[0] + self._casts(matrices)[0], passes[1] + self._casts(matrices)[1]
        widened, scaled = self._widened(matrices), self._scaled(matrices)
        passes = passes[0] + widened + scaled[0], passes[1] + widened + scaled[1]
        tensor, context = self._tensor(), self._context(attention)
        there, back = (sum(map(passed, self._shared)) for passed in self._of_product[:2])
        forward = self._with_dispatch(Seconds(products, attention[0], passes[0], tensor[0], context[0]), there)
        backward = self._with_dispatch(Seconds(inputs + weights, attention[1], passes[1], tensor[1], context[1]), back)
        return forward, backward, weights, tensor[2]

    @property
    def _of_product(self) -> tuple[Callable[[Product], float], ...]:
        """Seconds of a product, of that which makes its input's gradient, and of that for its weight's."""
        orders = (0, 1, 2), (0, 2, 1), (2, 1, 0)
        return tuple(partial(self._matmul, order=order) for order in orders)

    def _matmul(self, product: Product, order: tuple[int, int, int]) -> float:
        """The time of a product whose sizes are the fields of `product` in this order, or of one for each group of the
        rank. Ranks of ep have fewer groups, with as many rows in all."""
        groups = product.groups // self.share.ep if product.groups > 1 else 1
        sizes = _aligned(ceil(product.rows / groups)), *product[1:3]
        eight = product.groups == 1 or self.program.experts_fp8
        precision = self.share.operands if eight else self.share.outside
        m, n, k = (sizes[at] for at in order)
        seconds = self.kernels.matmul(m, n, k, groups, precision)
        return seconds if product.groups == 1 else seconds * self._load / self.program.grouped

    def _widened(self, products: list[Product]) -> float:
        """A pass in which weights in four bits are read and made wide, as they are for forward and for backward."""
        each = (max(1, product.groups // self.share.ep) * product.outputs * product.inputs for product in products)
        elements = sum(size for size, product in zip(each, products, strict=True) if product.four_bits)
        return self.kernels.passes((FOUR_BIT_BYTES + self.share.element) * elements)

    def _scaled(self, products: list[Product]) -> tuple[float, float]:
        """Passes in which outputs are scaled by norms of rows: forward, which reads the rows too, and backward."""
        element = self.share.element
        weights = sum(product.outputs * product.scaled for product in products)
        outputs = sum(product.rows * product.outputs for product in products if product.scaled)
        there, back = SCALED_PASSES
        return self.kernels.passes(element * (weights + there * outputs)), self.kernels.passes(element * back * outputs)

    def _casts(self, products: list[Product]) -> tuple[float, float]:
        """Casts of what enters products in fp8: inputs in forward, and in backward inputs again and gradients."""
        there, back = self.program.casts
        inputs = sum(product.rows * product.inputs for product in products if product.groups == 1)
        results = sum(product.rows * product.outputs for product in products if product.groups == 1)
        return self.kernels.passes(there * inputs), self.kernels.passes(back * (inputs + results))

    def head(self) -> tuple[float, float, float]:
        """The output layer and the loss: forward, backward, and of backward the part that makes weight gradients."""
        share, t, v = self.share, _aligned(self.share.predicted * self.share.tokens), self.share.vocab / self.share.tp
        precision = share.outside
        forward = self.kernels.matmul(t, v, share.width, precision=precision)
        weights = self.kernels.matmul(v, share.width, t, precision=precision)
        backward = self.kernels.matmul(t, share.width, v, precision=precision) + weights
        whole = share.vocab if self.program.gathers_logits else v
        logits = self.kernels.passes(self.program.logit * share.element / REFERENCE_BYTES * t * whole)
        if self.program.gathers_logits:
            forward += self.net.collective("all_gather", share.element * t * whole, self.tp)
        return forward + logits / 3, backward + logits * 2 / 3, weights

    def embedding(self) -> float:
        """The look-up, forward and backward."""
        return self.kernels.passes(LOOKUP_ELEMENTS * self.share.element * self.share.tokens * self.share.width)

    def _attention(self) -> tuple[float, float]:
        """Scores and values: forward, backward."""
        each = [self._scores(heads) for heads in self.share.heads]
        return sum(there for there, _ in each), sum(back for _, back in each)

    def _scores(self, heads: Heads) -> tuple[float, float]:
        share, program, s = self.share, self.program, self.share.sequence
        if program.attention == "unfused":
            batch = max(1, share.micro * heads.count // share.tp)
            products = self.kernels.matmul(s, s, heads.width, batch)
            products += self.kernels.matmul(s, heads.value_width, s, batch)
            scores = batch * s * s
            there, back = (self.kernels.passes(each * scores) for each in program.scores)
            return products + there, 2 * products + back
        seen = attended_pairs(s, heads.scores.window) / s  # keys of a query, on average
        gpu, outputs = self.cluster.gpu.name, heads.outputs
        if program.attention == "table":
            kernel = share.kernel(heads, machine_of(gpu))
            chosen = TABLE_KERNELS.get(kernel, "flash2")
            outputs = heads.queries if kernel in PADDING else outputs
        else:
            chosen = program.attention
        flops = 2 * share.tokens * seen * (heads.queries + outputs) / share.tp
        there, back = attention_shares(chosen, gpu, heads.width)
        forward = self.kernels.attention(flops, there, share.outside)
        return forward, self.kernels.attention(ATTENTION_BACKWARD * flops, back, share.outside)

    def _passes(self) -> tuple[float, float]:
        """Passes over activations: forward, backward."""
        share, program, tokens = self.share, self.program, self.share.tokens
        stream = share.width / (share.tp if program.sequence_parallel else 1)
        inner, heads, routed, rows, _ = share.passed
        if share.ep > 1 and program.dispatch == "all_to_all" and not share.fixed:
            routed += 2 * rows  # they are put in order before and after the way, too
        own = routed - rows if share.fixed else 0.0
        inner, routed = (each * (self._load if rows else 1.0) for each in (inner, routed - own))
        # Tokens of all are read or written when rows are made of them or added up, and sums when these are summed.
        routed += own * (3 * share.ep + 1) / 2
        of_stream, of_ffn = (program.forward, program.backward), (program.forward_ffn, program.backward_ffn)
        each = zip(of_stream, of_ffn, program.heads, strict=True)
        wider = share.element / REFERENCE_BYTES
        merges = {"ring": share.cp - 1, "all_gather": min(1, share.cp - 1), "ulysses": 0}[share.method]
        outputs = sum(each.outputs for each in share.heads)
        merged = [merges * bytes_moved * outputs / share.tp for bytes_moved in MERGE_BYTES]
        there, back = (
            self.kernels.passes(wider * tokens * (stream * a + inner * b + heads * c + routed * ROUTED_BYTES + more))
            for (a, b, c), more in zip(each, merged, strict=True)
        )
        return there, back

    def _tensor(self) -> tuple[float, float, float]:
        """Exposed tensor-parallel communication: forward, backward, and what a split backward has more.

        Half of an all-reduce's worth gathers inputs of products, which may be in 8 bits by then; the other half
        reduces results, and so does backward with gradients.
        """
        share, program = self.share, self.program
        stream = share.element * share.tokens * share.width
        if program.overlaps and share.pieces and share.tp > 1:
            return self._overlapped(stream, share.pieces)
        half = self.net.collective("all_reduce", stream, self.tp) / 2 * (1 - program.hidden)
        if program.rearranges and share.tp > 1:
            half += self.kernels.passes(2 * stream) * (1 - program.hidden)
        products = share.products(_aligned(share.tokens))
        of_inputs = half * sum(product.gathered for product in products) / share.width
        of_results = half * sum(product.scattered for product in products)
        gathers = of_inputs / (2 if program.gathers_fp8 and share.precision == "fp8" else 1)
        return gathers + of_results, of_inputs + of_results + (gathers if program.gathers_again else 0.0), 0.0

    def _overlapped(self, stream: float, n: int) -> tuple[float, float, float]:
        """The same of collectives beside matrix products, as `parallel.linear` and `parallel.scattered` begin them.

        The input of a part, or each latent, is gathered in `n` pieces and the output scattered in as many, and so is
        the output's gradient gathered; experts take and return a rank's part of the sequence. A product waits for the
        first piece, or is followed by the last. Backward gathers the input again beside the first product, and scatters
        its gradient beside the second; halves of a split backward wait for these. Further pieces start while those
        before are on their way, and pieces are taken to be multiplied as fast as the whole.
        """
        start = self.net.collective("all_gather", 0.0, self.tp)
        forward, inputs, weights = self._of_product

        def in_pieces(product: float, whole: float) -> float:
            piece = (whole - start) / n
            return start + piece + (n - 1) * (self.beside(product / n, piece) - product / n)

        def gathered(features: float) -> float:
            return self.net.collective("all_gather", stream * features / self.share.width, self.tp)

        there = back = hidden = 0.0
        for product in self.share.products(_aligned(self.share.tokens)):
            if product.scattered:
                there += in_pieces(forward(product), gathered(self.share.width))
                back += in_pieces(inputs(product), gathered(self.share.width))
            if product.gathered:
                whole = gathered(product.gathered)
                there += in_pieces(forward(product), whole)
                beside = sum(self.beside(each(product), whole) - each(product) for each in (inputs, weights))
                back += beside
                hidden += 2 * whole - beside
        return there, back, hidden

    @property
    def _load(self) -> float:
        """Rows of the busiest of the ranks that share out experts, in those of the mean: others wait for it."""
        return self.program.load if self.share.ep > 1 else 1.0

    @property
    def _shared(self) -> list[Product]:
        """Products of the expert that computes all tokens, while others' rows travel."""
        return [each for each in self.share.products(_aligned(self.share.tokens)) if each.beside_rows]

    def _with_dispatch(self, compute: Seconds, shared: float) -> Seconds:
        """A pass with what its tokens' way to their experts and back adds to the compute, of which `shared` seconds are
        beside one of the two ways, or all beside both where a program overlaps more."""
        sent = self._dispatch()
        if self.program.dispatch_overlaps:
            return compute._replace(experts=self.beside(compute.total, sent) - compute.total)
        return compute._replace(experts=self.beside(shared, sent / 2) + sent / 2 - shared)

    def _dispatch(self) -> float:
        """Communication of tokens with their experts in one pass, there and back."""
        share, group = self.share, Group(self.share.ep, 1)
        tokens = share.element * share.tokens * share.passed.rows
        if not tokens or share.ep == 1:
            return 0.0
        if share.fixed:
            every = share.element * share.tokens * share.ep * (share.passed.routed - share.passed.rows)
            return sum(self.net.collective(kind, every, group) for kind in ("all_gather", "all_to_all"))
        tokens *= self._load
        if self.program.dispatch == "all_to_all":
            return 2 * self.net.collective("all_to_all", tokens, group)
        spans = [1, *(min(share.ep, level.gpus) for level in self.cluster.levels)]  # ranks that a copy serves
        active = max(part.passed(1).active for part in share.parts)
        copies = (_distinct(share.ep / each, active) / active for each in spans)
        *inside, network = map(mul, copies, self.net.links("all_to_all", tokens, group))
        return 2 * max(*inside, network * self.net.constants.network / max(ONCE_SHARE, self.net.constants.network))

    def _context(self, attention: tuple[float, float]) -> tuple[float, float]:
        """Exposed context-parallel communication: forward, backward.

        A ring passes keys and values on while it attends to those it has, and gradients in backward. Half of that is
        taken to be exposed, as published runs show. Who gathers all of them begins with its own keys and values; the
        gradients are reduced at the end. All-to-alls of Ulysses hide behind nothing.
        """
        share = self.share
        if share.cp == 1 or not share.heads:
            return 0.0, 0.0
        (heads,) = share.heads
        keys = share.element * (heads.keys + heads.values) / share.tp
        keys *= share.micro * (heads.scores.window_in(share.sequence) or share.sequence)
        if share.method == "ulysses":
            copied = max(heads.keys, share.cp * heads.width) + max(heads.values, share.cp * heads.value_width)
            every = share.element * (heads.queries + heads.outputs + copied) / share.tp * share.tokens
            both = self.net.collective("all_to_all", every, self.cp)
            return both, both
        if share.method == "all_gather":
            gathered = self.net.collective("all_gather", keys, self.cp)
            own = attention[0] / share.cp
            return max(0.0, gathered - own), max(0.0, gathered - own) + 2 * gathered
        gathered, wide = (
            (share.cp - 1) * self.net.transfer(keys / share.cp, self.cp),
            max(4, share.element) / share.element,
        )
        again = 1 + (wide if self.program.wide_keys else 1)
        there, back = (
            self.beside(compute, sent) - compute
            for compute, sent in zip(attention, (gathered, again * gathered), strict=True)
        )
        return there, back


def _distinct(places: float, drawn: int) -> float:
    """Places, of so many that are equally likely, among which so many draws fall on average."""
    return places * (1 - (1 - 1 / places) ** drawn)


def _aligned(tokens: int) -> int:
    """A number of tokens, in whole vectors: these lie along the features, so that no number of tokens is an odd one."""
    return -(-tokens // VECTOR_ELEMENTS) * VECTOR_ELEMENTS


def _launched(device: Seconds, host: float) -> Seconds:
    """`launched` of kernels by what takes them."""
    alone = device.total
    return device + Seconds(host=launched(alone, host) - alone)
