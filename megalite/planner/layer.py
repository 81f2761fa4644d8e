"""The time of one layer, of the output layer and of the embedding, for one micro-batch. Imports no torch.

A pass takes as long as its kernels, one after another, and the communication that is not hidden behind them; or as long
as the host needs to launch them, if that is longer.
"""

from dataclasses import dataclass, fields, replace
from functools import cached_property

from megalite.plan.window import attended_pairs
from megalite.planner.constants import FITTED, Constants
from megalite.planner.hardware import Cluster
from megalite.planner.kernels import ALIGNED, Kernels
from megalite.planner.network import Group, Net
from megalite.planner.program import HOST_BACKWARD, Program, attention_shares
from megalite.planner.work import Recompute, Work

MERGE = (12, 8)  # bytes for each element of attention's result, to add what other ranks' keys give: forward, backward
LOOK_UP = 6  # elements read and written for each of the embedding's output, forward and backward
SHORT = 3  # how sharply the longer of device and host decides; from Megatron's layers, whose kernels differ in length
ATTENTION_BACKWARD = 2.5  # operations of fused attention's backward, in those of its forward: scores are made again
USUAL = 2  # bytes of an element in the precision that programs' bytes are counted in


@dataclass(frozen=True)
class Seconds:
    """A time by what takes it.

    products: matrix products. attention: scores, and what is summed by them. passes: over memory. tensor, context:
    exposed communication of these kinds of parallelism. data: that of data parallelism. host: waiting for launches.
    offload: tensors on their way from or to host memory.
    """

    products: float = 0.0
    attention: float = 0.0
    passes: float = 0.0
    tensor: float = 0.0
    context: float = 0.0
    data: float = 0.0
    host: float = 0.0
    offload: float = 0.0

    @cached_property
    def total(self) -> float:
        return float(sum(getattr(self, name) for name in KINDS))

    def __add__(self, other: "Seconds") -> "Seconds":
        return Seconds(*(getattr(self, name) + getattr(other, name) for name in KINDS))

    def __mul__(self, times: float) -> "Seconds":
        return Seconds(*(getattr(self, name) * times for name in KINDS))


KINDS = tuple(field.name for field in fields(Seconds))


@dataclass(frozen=True)
class LayerTime:
    """Times of one layer and micro-batch.

    backward: what is recomputed included. weights: of it, the seconds that make the gradients of weights. inputs: all
    else of it by itself, with all launches: as long at least as what weights leave of the whole.
    """

    forward: Seconds
    backward: Seconds
    weights: float
    inputs: Seconds


class LayerModel:
    """Times of parts of a model, for a micro-batch of `work` done by `program` on `cluster`."""

    def __init__(self, work: Work, program: Program, cluster: Cluster, constants: Constants = FITTED) -> None:
        self.work, self.program, self.cluster = work, program, cluster
        self.overlap = constants.overlap
        self.kernels, self.net = Kernels(cluster.gpu, constants, program.fp8), Net(cluster, constants)
        self.tp, self.cp = Group(work.tp, 1), Group(work.cp, work.tp)

    def layer(self, recompute: Recompute | None = None) -> LayerTime:
        """The time of a layer. recompute: in place of the work's."""
        program, recompute = self.program, recompute or self.work.recompute
        forward, backward, weights = self._alone
        launched = program.host, program.host * HOST_BACKWARD
        if recompute == "full":
            backward, launched = backward + forward, (launched[0], launched[1] + launched[0])
        elif recompute == "selective" and program.repeats is None:
            backward += Seconds(attention=forward.attention)
        elif recompute == "selective":
            backward += Seconds(products=(program.repeats or 0.0) * forward.products, passes=forward.passes)
        inputs = _launched(replace(backward, products=backward.products - weights), launched[1])
        forward, backward = _launched(forward, launched[0]), _launched(backward, launched[1])
        if program.waits:
            waits = Seconds(host=program.waits)
            forward, backward = forward + waits, backward + waits if recompute == "full" else backward
        return LayerTime(forward, backward, weights, inputs)

    @cached_property
    def _alone(self) -> tuple[Seconds, Seconds, float]:
        """Forward and backward without launches, with nothing made again; and what makes the gradients of weights."""
        work, matrices = self.work, self._matrices()
        products = sum(self.kernels.matmul(*sizes, precision=work.precision) for sizes in matrices)
        inputs = sum(self.kernels.matmul(m, k, n, precision=work.precision) for m, n, k in matrices)
        weights = sum(self.kernels.matmul(k, n, m, precision=work.precision) for m, n, k in matrices)
        attention, passes = self._attention(), self._passes()
        if work.precision == "fp8":
            passes = passes[0] + self._casts(matrices)[0], passes[1] + self._casts(matrices)[1]
        tensor, context = self._tensor(), self._context(attention)
        forward = Seconds(products, attention[0], passes[0], tensor[0], context[0])
        return forward, Seconds(inputs + weights, attention[1], passes[1], tensor[1], context[1]), weights

    def _casts(self, matrices: list[tuple[float, float, float]]) -> tuple[float, float]:
        """Casts of what enters products in fp8: inputs in forward, and in backward inputs again and gradients."""
        there, back = self.program.casts
        inputs, results = (sum(sizes[0] * sizes[which] for sizes in matrices) for which in (2, 1))
        return self.kernels.passes(there * inputs), self.kernels.passes(back * (inputs + results))

    def head(self) -> tuple[float, float, float]:
        """The output layer and the loss: forward, backward, and of backward the part that makes weight gradients."""
        work, t, v = self.work, _aligned(self.work.tokens), self.work.vocab / self.work.tp
        precision = work.outside
        forward = self.kernels.matmul(t, v, work.width, precision=precision)
        weights = self.kernels.matmul(v, work.width, t, precision=precision)
        backward = self.kernels.matmul(t, work.width, v, precision=precision) + weights
        whole = work.vocab if self.program.gathers_logits else v
        logits = self.kernels.passes(self.program.logit * work.element / USUAL * t * whole)
        if self.program.gathers_logits:
            forward += self.net.collective("all_gather", work.element * t * whole, self.tp)
        return forward + logits / 3, backward + logits * 2 / 3, weights

    def embedding(self) -> float:
        """The look-up, forward and backward."""
        return self.kernels.passes(LOOK_UP * self.work.element * self.work.tokens * self.work.width)

    def _matrices(self) -> list[tuple[float, float, float]]:
        """Rows, columns and depth of a layer's matrix products on one rank."""
        work, tokens = self.work, _aligned(self.work.tokens)
        wide = 2 if work.gated else 1
        return [
            (tokens, (work.q + 2 * work.k) / work.tp, work.width),
            (tokens, work.width, work.q / work.tp),
            (tokens, wide * work.ffn / work.tp, work.width),
            (tokens, work.width, work.ffn / work.tp),
        ]

    def _attention(self) -> tuple[float, float]:
        """Scores and values: forward, backward."""
        work, program, s = self.work, self.program, self.work.sequence
        if program.attention == "unfused":
            batch = max(1, work.micro * work.heads // work.tp)
            products = self.kernels.matmul(s, s, work.head_size, batch) + self.kernels.matmul(
                s, work.head_size, s, batch
            )
            scores = batch * s * s
            there, back = (self.kernels.passes(each * scores) for each in program.scores)
            return products + there, 2 * products + back
        seen = attended_pairs(s, work.window) / s  # keys of a query, on average
        flops = 4 * work.tokens * seen * work.q / work.tp
        there, back = attention_shares(program, self.cluster.gpu.name, work.head_size)
        forward = self.kernels.attention(flops, there, work.outside)
        return forward, self.kernels.attention(ATTENTION_BACKWARD * flops, back, work.outside)

    def _passes(self) -> tuple[float, float]:
        """Passes over activations: forward, backward."""
        work, program, tokens = self.work, self.program, self.work.tokens
        stream = work.width / (work.tp if program.sequence_parallel else 1)
        inner = (2 if work.gated else 1) * work.ffn / work.tp
        heads = (work.q + 2 * work.k) / work.tp
        of_stream, of_ffn = (program.forward, program.backward), (program.forward_ffn, program.backward_ffn)
        each = zip(of_stream, of_ffn, program.heads, strict=True)
        wider = work.element / USUAL
        merges = {"ring": work.cp - 1, "all_gather": min(1, work.cp - 1), "ulysses": 0}[work.method]
        merged = [merges * bytes_moved * work.q / work.tp for bytes_moved in MERGE]
        there, back = (
            self.kernels.passes(wider * tokens * (stream * a + inner * b + heads * c + more))
            for (a, b, c), more in zip(each, merged, strict=True)
        )
        return there, back

    def _tensor(self) -> tuple[float, float]:
        """Exposed tensor-parallel communication: forward, backward.

        Half of an all-reduce's worth gathers inputs of products, which may be in 8 bits by then; the other half
        reduces results, and so does backward with gradients.
        """
        work, program = self.work, self.program
        stream = work.element * work.tokens * work.width
        half = self.net.collective("all_reduce", stream, self.tp) * (1 - program.hidden)
        if program.rearranges and work.tp > 1:
            half += 2 * self.kernels.passes(2 * stream) * (1 - program.hidden)
        gathers = half / (2 if program.gathers_fp8 and work.precision == "fp8" else 1)
        return gathers + half, 2 * half + (gathers if program.gathers_again else 0.0)

    def _context(self, attention: tuple[float, float]) -> tuple[float, float]:
        """Exposed context-parallel communication: forward, backward.

        A ring passes keys and values on while it attends to those it has, and gradients in backward. Half of that is
        taken to be exposed, as published runs show. Who gathers all of them begins with its own keys and values; the
        gradients are reduced at the end. All-to-alls of Ulysses hide behind nothing.
        """
        work = self.work
        if work.cp == 1:
            return 0.0, 0.0
        tokens = work.tokens * work.cp
        keys = 2 * work.element * work.k / work.tp * min(tokens, work.micro * (work.window or work.sequence))
        if work.method == "ulysses":
            every = work.element * (2 * work.q + 2 * max(work.k, work.cp * work.head_size)) / work.tp * work.tokens
            both = self.net.collective("all_to_all", every, self.cp)
            return both, both
        if work.method == "all_gather":
            gathered = self.net.collective("all_gather", keys, self.cp)
            own = attention[0] / work.cp
            return max(0.0, gathered - own), max(0.0, gathered - own) + 2 * gathered
        gathered, wide = (work.cp - 1) * self.net.transfer(keys / work.cp, self.cp), max(4, work.element) / work.element
        again = 1 + (wide if self.program.wide_keys else 1)
        there, back = (
            max(compute, sent) + self.overlap * min(compute, sent) - compute
            for compute, sent in zip(attention, (gathered, again * gathered), strict=True)
        )
        return there, back


def _aligned(tokens: int) -> int:
    """A number of tokens, in whole vectors: these lie along the features, so that no number of tokens is an odd one."""
    return -(-tokens // ALIGNED) * ALIGNED


def _launched(device: Seconds, host: float) -> Seconds:
    """Seconds of kernels that the host launches one by one: those that are shorter than a launch wait for it."""
    alone = device.total
    return device + Seconds(host=(alone**SHORT + host**SHORT) ** (1 / SHORT) - alone)
