"""The time of a training step, from the times of its kernels and collectives. Imports no torch.

A layer's forward and backward pass take as long as their kernels, one after another, and the communication that is not
hidden behind them; or as long as the host needs to launch them, if that is longer. A pipeline of m micro-batches takes
m times its slowest stage, and once all others: (p - 1) / (v · m) more where stages are equal (Narayanan et al. 2021,
arXiv 2104.04473, §2.2). Data-parallel communication of zero3 runs beside the compute of layers; of other modes it
follows the last micro-batch.
"""

from dataclasses import dataclass

from megalite.planner.constants import FITTED, Constants
from megalite.planner.hardware import Cluster
from megalite.planner.kernels import Kernels
from megalite.planner.network import Group, Net
from megalite.planner.programs import HOST_BACKWARD, Program, attention_shares
from megalite.planner.work import Work

ACTIVATION = 2  # bytes of an activation's element, and of a weight's in a matrix product
SCORES = (9, 11)  # bytes for each score that unfused attention reads and writes: forward, backward
QKV = (4, 6)  # bytes for each element of queries, keys and values: positions and layouts, forward and backward
LOOK_UP = 12  # bytes for each element of the embedding's output, forward and backward
CAUSAL = 0.5  # share of the scores that causal attention computes
SHORT = 3  # how sharply the longer of device and host decides; from Megatron's layers, whose kernels differ in length
ATTENTION_BACKWARD = 2.5  # operations of fused attention's backward, in those of its forward: scores are made again


@dataclass(frozen=True)
class LayerTime:
    """Seconds of one layer and micro-batch, with tensor- and context-parallel communication that nothing hides."""

    forward: float
    backward: float  # what is recomputed included


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step.

    pipeline: compute of the slowest rank, with what it sends for tensor and context parallelism. bubble: in which it
    waits for other stages. transfers: between stages. data: data-parallel communication that is exposed. optimizer: the
    update.
    """

    pipeline: float
    bubble: float
    transfers: float
    data: float
    optimizer: float

    @property
    def total(self) -> float:
        return self.pipeline + self.bubble + self.transfers + self.data + self.optimizer


def _launched(device: float, host: float) -> float:
    """Seconds of kernels that the host launches one by one: those that are shorter than a launch wait for it."""
    return (device**SHORT + host**SHORT) ** (1 / SHORT)


class StepModel:
    """Times of `work` done by `program` on `cluster`."""

    def __init__(self, work: Work, program: Program, cluster: Cluster, constants: Constants = FITTED) -> None:
        self.work, self.program, self.cluster, self.constants = work, program, cluster, constants
        self.kernels, self.net = Kernels(cluster.gpu, constants, program.fp8), Net(cluster, constants)
        self.tp = Group(work.tp, 1)
        self.cp = Group(work.cp, work.tp)
        self.data = Group(work.dp * work.cp, work.tp)

    def step(self) -> StepTime:
        work = self.work
        layer, head, embedding = self.layer(), self.head(), self.embedding()
        data = 0.0
        per_layer = layer.forward + layer.backward
        if work.mode == "zero3":
            per_layer, data = self._sharded(layer)
        elif work.dp * work.cp > 1:
            data = self._reduced(work.layers / work.pp * layer.backward)
        stages = [work.layers / work.pp * per_layer] * work.pp
        stages[0] += embedding
        stages[-1] += head
        slowest, m = max(stages), work.micro_batches
        bubble = (sum(stages) - slowest) / work.virtual
        return StepTime(m * slowest, bubble, self._transfers(), data, self._optimizer())

    def layer(self) -> LayerTime:
        """The times of one layer and micro-batch."""
        work, program = self.work, self.program
        products = [self.kernels.matmul(*sizes, precision=work.precision) for sizes in self._matrices()]
        gradients = [
            self.kernels.matmul(m, k, n, precision=work.precision)
            + self.kernels.matmul(k, n, m, precision=work.precision)
            for m, n, k in self._matrices()
        ]
        attention = self._attention()
        passes = self._passes()
        sent = self._sent()
        forward = sum(products) + attention[0] + passes[0] + sent[0]
        backward = sum(gradients) + attention[1] + passes[1] + sent[1]
        launched = program.host, program.host * HOST_BACKWARD
        if work.recompute == "full":
            backward, launched = backward + forward, (launched[0], launched[1] + launched[0])
        elif work.recompute == "selective":
            again = attention[0] if program.repeats is None else program.repeats * sum(products) + passes[0]
            backward += again
        return LayerTime(_launched(forward, launched[0]), _launched(backward, launched[1]))

    def _matrices(self) -> list[tuple[float, float, float]]:
        """Rows, columns and depth of a layer's matrix products on one rank."""
        work, tokens = self.work, self.work.tokens
        wide = 2 if work.gated else 1
        return [
            (tokens, (work.q + 2 * work.k) / work.tp, work.width),
            (tokens, work.width, work.q / work.tp),
            (tokens, wide * work.ffn / work.tp, work.width),
            (tokens, work.width, work.ffn / work.tp),
        ]

    def _attention(self) -> tuple[float, float]:
        """Scores and values: forward, backward."""
        work, s = self.work, self.work.sequence
        if self.program.attention == "unfused":
            batch = max(1, work.micro * work.heads // work.tp)
            products = self.kernels.matmul(s, s, work.head_size, batch) + self.kernels.matmul(
                s, work.head_size, s, batch
            )
            scores = batch * s * s
            there, back = (self.kernels.passes(each * scores) for each in SCORES)
            return products + there, 2 * products + back
        flops = 4 * work.tokens * s * work.q / work.tp * CAUSAL
        there, back = attention_shares(self.program, self.cluster.gpu.name, work.head_size)
        return self.kernels.attention(flops, there), self.kernels.attention(ATTENTION_BACKWARD * flops, back)

    def _passes(self) -> tuple[float, float]:
        """Passes over activations: forward, backward."""
        work, program, tokens = self.work, self.program, self.work.tokens
        stream = work.width / (work.tp if program.sequence_parallel else 1)
        inner = (2 if work.gated else 1) * work.ffn / work.tp
        heads = (work.q + 2 * work.k) / work.tp
        each = zip((program.forward, program.backward), (program.forward_ffn, program.backward_ffn), QKV, strict=True)
        there, back = (self.kernels.passes(tokens * (stream * a + inner * b + heads * c)) for a, b, c in each)
        return there, back

    def _sent(self) -> tuple[float, float]:
        """Exposed tensor- and context-parallel communication: forward, backward."""
        work, program = self.work, self.program
        stream = ACTIVATION * work.tokens * work.width
        tensor = 2 * self.net.collective("all_reduce", stream, self.tp) * (1 - program.hidden)
        there, back = tensor, tensor * (1.5 if program.gathers_again else 1.0)
        if work.cp > 1:
            keys = 2 * ACTIVATION * work.k / work.tp * work.tokens * work.cp
            ring = self.net.collective("all_gather", keys, self.cp)
            there, back = there + 0.5 * ring, back + ring
        return there, back

    def head(self) -> float:
        """The output layer and the loss of one micro-batch, forward and backward."""
        work, t, v = self.work, self.work.tokens, self.work.vocab / self.work.tp
        products = (
            self.kernels.matmul(t, v, work.width)
            + self.kernels.matmul(t, work.width, v)
            + self.kernels.matmul(v, work.width, t)
        )
        return products + self.kernels.passes(self.program.logit * t * v)

    def embedding(self) -> float:
        return self.kernels.passes(LOOK_UP * self.work.tokens * self.work.width)

    def _sharded(self, layer: LayerTime) -> tuple[float, float]:
        """Seconds of a layer and micro-batch whose weights are gathered beside its compute; and what nothing hides."""
        weights = self.work.layer_parameters / self.work.tp
        slower = 1 if self.program.rings else self.cluster.gpus_per_node
        gather = slower * self.net.collective("all_gather", ACTIVATION * weights, self.data)
        scatter = slower * self.net.collective("reduce_scatter", self.program.gradient * weights, self.data)
        there = self._beside(layer.forward, gather)
        back = self._beside(layer.backward, gather + scatter)
        return there + back, gather + scatter

    def _beside(self, compute: float, communication: float) -> float:
        """Compute and communication at once: the longer, and a share of the other, which takes its multiprocessors."""
        return max(compute, communication) + self.constants.overlap * min(compute, communication)

    def _reduced(self, backward: float) -> float:
        """Gradients and weights that are exchanged once in a step; `backward` of the last micro-batch may hide some."""
        program = self.program
        count = program.pieces * self.work.layers / self.work.pp
        each = self._parameters() / count
        gathered = 0.0
        if self.work.mode == "ddp":
            reduced = count * self.net.collective("all_reduce", program.gradient * each, self.data)
        else:
            reduced = count * self.net.collective("reduce_scatter", program.gradient * each, self.data)
            gathered = count * self.net.collective("all_gather", ACTIVATION * each, self.data)
        if program.reduces_beside:
            reduced = self._beside(backward, reduced) - backward
        return reduced + gathered

    def _parameters(self) -> float:
        """Of the fullest pipeline rank, before data-parallel sharding."""
        work = self.work
        return (work.layers / work.pp * work.layer_parameters + work.vocab * work.width) / work.tp

    def _transfers(self) -> float:
        work = self.work
        if work.pp == 1:
            return 0.0
        size = ACTIVATION * work.tokens * work.width / (work.tp if self.program.scatters else 1)
        hop = self.net.transfer(size, work.gpus // work.pp)
        return hop * (work.micro_batches * work.virtual + 2 * (work.pp - 1))

    def _optimizer(self) -> float:
        shards = 1 if self.work.mode == "ddp" else self.data.size
        return self.kernels.passes(self._parameters() / shards * self.program.optimizer)
