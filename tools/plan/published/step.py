"""The time of a training step of a published program. Imports no torch.

A pipeline of m micro-batches takes m times its slowest stage, and once all others: (p - 1) / (v · m) more where stages
are equal (Narayanan et al. 2021, arXiv 2104.04473, §2.2). Data-parallel communication of zero3 runs beside the compute
of layers; of other modes it follows the last micro-batch.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import ceil

from megalite.cost.cluster import Cluster
from megalite.cost.constants import FITTED_CONSTANTS, Constants
from megalite.cost.layer import LayerModel, LayerTime
from megalite.cost.network import Group
from megalite.cost.share import Share
from megalite_tools.plan.published.layer_counts import stage_layers
from megalite_tools.plan.published.profiles import Profile
from megalite_tools.plan.published.work import Work


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


class StepModel:
    """Times of `work` done by `program` on `cluster`."""

    def __init__(self, work: Work, program: Profile, cluster: Cluster, constants: Constants = FITTED_CONSTANTS) -> None:
        self.work, self.program, self.cluster, self.constants = work, program, cluster, constants
        self.parts = LayerModel(work.share, program, cluster, constants)
        self.kernels, self.net = self.parts.kernels, self.parts.net
        kinds = {share: LayerModel(share, program, cluster, constants) for share in dict.fromkeys(work.shares)}
        self.times = {share: self._with_weights(model.layer(), share) for share, model in kinds.items()}
        self.data = Group(work.dp * work.cp, work.tp)
        self.shards = Group((work.shards or work.dp) * work.cp, work.tp)
        self.replicas = Group(self.data.size // self.shards.size, work.tp * self.shards.size)
        same = self.shards.size * work.tp // work.ep  # ranks with the same experts
        self.experts = Group(same, work.ep), Group(self.replicas.size, work.ep * same)

    def step(self) -> StepTime:
        work = self.work
        head, embedding = self.parts.head(), self.parts.embedding()
        data, each = 0.0, {share: sum(passes) for share, passes in self.times.items()}
        if work.mode == "zero3":
            sharded = {share: self._sharded(*passes, share) for share, passes in self.times.items()}
            each, data = {share: layer for share, (layer, _) in sharded.items()}, sharded[work.share][1]
        elif work.dp * work.cp > 1:
            there, back = (sum(self.times[share][way] for share in work.shares) / work.pp for way in (0, 1))
            data = self._reduced(there, back)
        ends = list(accumulate(stage_layers(work, self.program), initial=0))
        stages = [sum(each[share] for share in work.shares[begin:end]) for begin, end in pairwise(ends)]
        moved = self.kernels.passes(sum(self._moved()) * work.vocab * work.width / work.tp)
        stages[0] += embedding + moved
        stages[-1] += (1 + work.predicting) * (head[0] + head[1]) + moved + work.predicting * each[work.share]
        slowest, m = max(stages), work.micro_batches
        bubble = work.rounds * (sum(stages) - slowest) / work.virtual
        return StepTime(m * slowest, bubble, self._transfers(), data, self._optimizer())

    def _with_weights(self, layer: LayerTime, share: Share) -> tuple[float, float]:
        """Seconds of a layer's forward and backward, with what they move for its weights and gradients."""
        forward, backward = self._moved()
        weights = self.work.rank_parameters(share)
        return (
            layer.forward.total + self.kernels.passes(forward * weights),
            layer.backward.total + self.kernels.passes(backward * weights),
        )

    def _moved(self) -> tuple[float, float]:
        """Bytes for each parameter of a micro-batch on average: forward, backward."""
        there, back = self.program.moved
        return there, back + self.program.sums * (1 - 1 / self.work.micro_batches)

    def _sharded(self, forward: float, backward: float, share: Share) -> tuple[float, float]:
        """Seconds of a layer and micro-batch whose weights are gathered beside its compute; and what nothing hides."""
        slower = 1 if self.program.rings else self.cluster.gpus_per_node
        element = 1 if self.program.gathers_fp8 and self.work.precision == "fp8" else self.work.element
        gather = scatter = 0.0
        for weights, shards, replicas in self._divided(*self.work.parameters(share)):
            gather += slower * self.net.collective("all_gather", element * weights, shards)
            scatter += slower * self.net.collective("reduce_scatter", self.program.gradient * weights, shards)
            scatter += self.net.collective("all_reduce", self.program.gradient * weights / shards.size, replicas)
        there = self.constants.beside(forward, gather)
        back = self.constants.beside(backward, gather + scatter)
        return there + back, gather + scatter

    def _reduced(self, forward: float, backward: float) -> float:
        """Gradients and weights that are exchanged once in a step; passes of a micro-batch may hide some."""
        program, reduced, gathered = self.program, 0.0, 0.0
        for whole, shards, replicas in self._divided(*self._counted()):
            count = program.pieces * self.work.layers / self.work.pp
            if program.buckets and self.work.mode == "ddp":
                count = ceil(self.work.element * whole / program.buckets)
            each = whole / count
            size = program.gradient * each
            if self.work.mode == "ddp" or program.all_reduces:
                every = Group(shards.size * replicas.size, shards.stride)
                reduced += count * self.net.collective("all_reduce", size, every)
            else:
                reduced += count * self.net.collective("reduce_scatter", size, shards)
                reduced += count * self.net.collective("all_reduce", size / shards.size, replicas)
            if self.work.mode != "ddp" and program.broadcasts:
                gathered += self._broadcasts(self.work.element * each * count, shards)
            elif self.work.mode != "ddp":
                gathered += count * self.net.collective("all_gather", self.work.element * each, shards)
        if program.reduces_beside:
            reduced = self.constants.beside(backward, reduced) - backward
        if program.gathers_beside:
            gathered = self.constants.beside(forward, gathered) - forward
        return reduced + gathered

    def _broadcasts(self, whole: float, group: Group) -> float:
        """Seconds in which each rank of the group in turn sends its part of `whole` bytes to all others."""
        if group.size <= 1:
            return 0.0
        return whole / self.net.bandwidth(group) + group.size * self.net.collective("all_gather", 0.0, group)

    def _counted(self) -> tuple[float, float]:
        """Parameters of a pipeline rank with its share of the layers and one end, those of experts apart."""
        work, shares = self.work, [*self.work.shares, *[self.work.share] * self.work.predicting]
        own, experts = map(sum, zip(*map(work.parameters, shares), strict=True))
        return own / work.pp + work.vocab * work.width, experts / work.pp

    def _divided(self, own: float, experts: float) -> Iterator[tuple[float, Group, Group]]:
        """Parameters on a rank, the ranks that share them out, and the groups of these with the same: those that tensor
        parallelism splits, and those of experts."""
        yield own / self.work.tp, self.shards, self.replicas
        if experts:
            yield experts / self.work.ep, *self.experts

    def _transfers(self) -> float:
        work = self.work
        if work.pp == 1:
            return 0.0
        size = self.work.element * work.tokens * work.width / (work.tp if self.program.scatters else 1)
        hop = self.net.transfer(size, Group(work.pp, work.gpus // work.pp))
        each = 1
        if self.program.serial:  # a result and a gradient, with each neighbour
            each = 2 if work.pp == 2 else 4
        return hop * (each * work.micro_batches * work.virtual + 2 * (work.pp - 1))

    def _optimizer(self) -> float:
        updated = (
            whole / (1 if self.work.mode == "ddp" else shards.size)
            for whole, shards, _ in self._divided(*self._counted())
        )
        return self.kernels.passes(sum(updated) * self.program.optimizer)
