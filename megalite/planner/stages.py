"""The times of a plan's pipeline stages, for one micro-batch on one rank, also as a search for an order takes them.

Imports no torch.

Communication of data parallelism runs beside the compute of the layers before and after it, as FSDP2's hooks start it;
what nothing hides (the first gather of a pass, the last reduction) is added.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from megalite.config.layers import LayerKind
from megalite.config.schema import Config
from megalite.plan.activations import BYTES, Activations
from megalite.plan.automatic import OrderCosts
from megalite.plan.automatic import costs_of as sizes_of
from megalite.plan.fit import FOR_TENSORS, GIB
from megalite.plan.pipeline import micro_batches, sharding_mode, uses_fsdp
from megalite.plan.recompute_modes import Mode
from megalite.plan.resolved import Plan, resolve
from megalite.plan.size import layer_parameters
from megalite.plan.weights import embedding, part_of
from megalite.planner.constants import FITTED, Constants
from megalite.planner.hardware import Cluster
from megalite.planner.kernels import Kernels
from megalite.planner.layer import LayerModel, LayerTime, Seconds
from megalite.planner.network import Group, Net
from megalite.planner.programs import MEGALITE
from megalite.planner.room import room_for
from megalite.planner.step import beside
from megalite.planner.tables import Tables
from megalite.planner.work import Work
from megalite.schedule.problem import Beside, StageCosts

# By which halves of a backward pass take longer than the whole: of arXiv 2401.10241 (Zero Bubble), table 4 has speeds
# of 1F1B and ZB-2p, table 5 their bubbles; without these, ZB-2p is 2.4 % slower, and backward is two thirds of a step.
SPLIT = 0.035
HALVED = ("zb_h1", "zb_h2", "zbv")  # schedules that split all backward passes; reductions follow each W
WHOLE = ("1f1b", "gpipe", "interleaved_1f1b")  # schedules with whole backward passes
HOST_SHARE = 0.8  # of the bandwidth to host memory that copies reach; an assumption


@dataclass(frozen=True)
class StageTime:
    """Seconds of one stage and one micro-batch.

    backward: of B, the whole backward pass. weights: of it, what a W does. gather: before the first F of a step, where
    weights are gathered once. reduce: to reduce gradients over the shards. replicas: to sum them over replicas then.
    overlap: share of hidden communication by which it slows the compute beside it. parameters: of a rank, before they
    are sharded.
    """

    forward: Seconds
    backward: Seconds
    weights: float
    gather: float
    reduce: float
    replicas: float
    overlap: float
    parameters: float

    def reducing(self, last: bool) -> float:
        """To reduce the gradients after one backward pass, and on the last of a step over replicas too."""
        return self.reduce + (self.replicas if last else 0.0)

    def slowed(self, last: bool) -> float:
        """By how much a whole backward pass is slower for the reductions beside it, layer by layer."""
        return self.overlap * min(self.backward.total, self.reducing(last))

    def left(self, last: bool) -> float:
        """Of these reductions, what is not done when that pass ends."""
        return max(0.0, self.reducing(last) - self.backward.total - self.slowed(last))

    def as_costs(self, size: StageCosts) -> StageCosts:
        """For a search for an order, with the memory of `size`."""
        back, longer = self.backward.total, 1 + SPLIT
        halves = longer * (back - self.weights), longer * self.weights
        return StageCosts(self.forward.total, back, *halves, size.kept, size.waiting)


@dataclass(frozen=True)
class Piece:
    """What FSDP2 gathers at once: the embedding, a layer or the head. weights: seconds of backward; parameters: of a
    rank, before sharding."""

    forward: Seconds
    backward: Seconds
    weights: float
    parameters: float


class Timer:
    """Times on a cluster, remembered: a search asks for the same layer in many layouts."""

    def __init__(self, cluster: Cluster, constants: Constants = FITTED) -> None:
        self.cluster, self.constants = cluster, constants
        self.net, self.tables = Net(cluster, constants), Tables(self.costs)
        self.kernels = Kernels(cluster.gpu, constants)
        self._models: dict[Work, LayerModel] = {}
        self._layers: dict[Work, LayerTime] = {}
        self._ends: dict[Work, tuple[Piece, Piece]] = {}

    def layer(self, work: Work) -> LayerTime:
        if work not in self._layers:
            self._layers[work] = self._model(replace(work, recompute="none")).layer(work.recompute)
        return self._layers[work]

    def _model(self, work: Work) -> LayerModel:
        if work not in self._models:
            self._models[work] = LayerModel(work, MEGALITE, self.cluster, self.constants)
        return self._models[work]

    def ends(self, work: Work) -> tuple[Piece, Piece]:
        """The embedding and the head. Ranks of tp scatter what one returns, and gather what the other takes."""
        if work not in self._ends:
            model = self._model(work)
            forward, backward, weights = model.head()
            looked = model.embedding()
            sent = self.net.collective("all_gather", work.element * work.tokens * work.width, model.tp)
            size = work.vocab * work.width / work.tp
            self._ends[work] = (
                Piece(Seconds(passes=looked / 3, tensor=sent), Seconds(passes=looked * 2 / 3, tensor=sent), 0.0, size),
                Piece(Seconds(forward, tensor=sent), Seconds(backward, tensor=sent), weights, size),
            )
        return self._ends[work]

    def stages(self, plan: Plan) -> list[StageTime]:
        """The times of every stage of `plan`."""
        shared, found = Shared(plan.config, self.net), dict[object, StageTime]()
        times = []
        for stage in range(plan.stages):
            kinds = [id(plan.kinds[layer]) for layer in plan.layers[stage]]  # quicker to compare than kinds
            key = stage == 0, stage == plan.stages - 1, *kinds, *plan.modes[stage]
            if key not in found:  # most stages are like the one before
                found[key] = self._stage(plan, stage, shared)
            times.append(found[key])
        return times

    def costs(self, config: Config, *, with_room: bool = True) -> OrderCosts:
        """What `schedule: auto` searches for on this cluster, in seconds: a `Costing` of `plan.automatic`.

        With `train.recompute: budget`, layers count as if they recomputed nothing, as what they do follows from the
        order; and there is no room, since they would recompute more to let more micro-batches be under way.
        """
        if config.train.recompute == "budget":
            return self.costs_of(resolve(replace(config, train=replace(config.train, recompute="none"))))
        costs = self.costs_of(resolve(config))
        if not with_room or config.parallel.pipeline.memory is not None:
            return costs
        memory = config.batch.memory
        limit = self.cluster.gpu.memory * FOR_TENSORS if memory is None else memory * GIB
        return replace(costs, room=room_for(config, costs, limit))

    def costs_of(self, plan: Plan) -> OrderCosts:
        """The same for the stages of `plan`, whose layers recompute as it says."""
        times, sizes = self.stages(plan), sizes_of(plan.config)
        stages = tuple(time.as_costs(size) for time, size in zip(times, sizes, strict=True))
        transfer, beside = transfer_seconds(plan.config, self.net), _beside(plan.config, times)
        return OrderCosts(stages, self.cluster.name, transfer, beside)

    def _stage(self, plan: Plan, stage: int, shared: "Shared") -> StageTime:
        zero3 = shared.gathers and plan.config.parallel.data.mode == "zero3"
        forward = backward = Seconds()
        weights = gather = reduce = replicas = parameters = 0.0
        edge = 0.0  # the gather that nothing hides: of what a pass begins with
        for piece, count in self._pieces(plan, stage):
            gathered, scattered, summed = shared.times(piece.parameters)
            again = gathered if zero3 else 0.0
            copied, added = (self.kernels.passes(each * piece.parameters) for each in (shared.copied, shared.added))
            forward += self._with(piece.forward + Seconds(passes=copied * zero3), again) * count
            backward += self._with(piece.backward + Seconds(passes=copied * zero3 + added), again) * count
            weights += (piece.weights + added) * count
            gather += gathered * count
            reduce += scattered * count
            replicas += summed * count
            parameters += piece.parameters * count
            edge = edge or gathered
        if zero3:
            forward, backward, gather = forward + Seconds(data=edge), backward + Seconds(data=edge), 0.0
        elif gather:  # layers wait for their own weights only
            gather = edge + max(0.0, gather - forward.total) + self.kernels.passes(shared.copied * parameters)
        return StageTime(forward, backward, weights, gather, reduce, replicas, self.constants.overlap, parameters)

    def _with(self, compute: Seconds, communication: float) -> Seconds:
        """Compute, and how much longer it takes with communication beside it."""
        if not communication:
            return compute
        alone = compute.total
        return compute + Seconds(data=beside(alone, communication, self.constants) - alone)

    def _pieces(self, plan: Plan, stage: int) -> Iterator[tuple[Piece, int]]:
        """What a stage is made of, in order, and how often."""
        config = plan.config
        base = work_of(config)
        embedding, head = self.ends(base)
        if stage == 0:
            yield embedding, 1
        found: dict[tuple[LayerKind, Mode], int] = {}
        for kind, mode in plan.recomputed(stage):
            found[kind, mode] = found.get((kind, mode), 0) + 1
        for (kind, mode), count in found.items():
            yield self._layer(config, base, kind, mode), count
        if stage == plan.stages - 1:
            yield head, 1

    def _layer(self, config: Config, base: Work, kind: LayerKind, mode: Mode) -> Piece:
        window = kind.attention.window_in(config.model.sequence_length)
        time = self.layer(replace(base, recompute=mode, window=window))
        size = layer_parameters(config.model, kind).total / config.parallel.tp
        forward, backward = time.forward, time.backward
        if config.train.offload_activations:
            moved = Activations(config).layer_bytes(kind, mode) / (self.cluster.gpu.host * HOST_SHARE)
            forward, backward = self._offloaded(forward, moved), self._offloaded(backward, moved)
        return Piece(forward, backward, time.weights, size)

    def _offloaded(self, compute: Seconds, moved: float) -> Seconds:
        """Compute beside a copy, which has an engine of its own."""
        return compute + Seconds(offload=max(0.0, moved - compute.total))


class Shared:
    """Times in which data-parallel ranks gather and reduce the parameters of a part.

    copied: bytes that FSDP2 reads and writes for a parameter to take it out of the buffer of an all-gather. added: such
    bytes of a micro-batch's gradients, on average: to put them into the buffer of a reduce-scatter, or to add them to
    those before, which the first micro-batch of a step does not. last: such bytes at the end of a step. FSDP2 does all
    of this between kernels, on the stream that computes (torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py).
    """

    def __init__(self, config: Config, net: Net) -> None:
        parallel = config.parallel
        layout, tp = parallel.layout, parallel.tp
        self._net = net
        self._element = BYTES[config.train.precision]
        self._gradient = 2 if parallel.data.reduce_precision == "bf16" else max(self._element, 4)
        self._shards = Group(layout.dp_shard * layout.cp if parallel.data.sharded else 1, tp)
        replicas = layout.dp_replicate if parallel.data.sharded else layout.dp * layout.cp
        self._replicas = Group(replicas, tp * self._shards.size)
        self.gathers = self._shards.size > 1
        self._known: dict[float, tuple[float, float, float]] = {}
        w, r, m = self._element, self._gradient, micro_batches(config)
        reduces = self.gathers or replicas > 1
        self.copied = 2 * w if self.gathers else 0
        self.last = 0
        at_once = parallel.data.mode in ("zero2", "zero3") or (m == 1 and uses_fsdp(config))  # no sums are kept
        if at_once and reduces:
            self.added = float(w + r)
        else:
            self.added = (w + 2 * r if uses_fsdp(config) else 3 * w) * (1 - 1 / m)
            self.last = 2 * r if reduces else 0

    def times(self, parameters: float) -> tuple[float, float, float]:
        """Seconds to gather, to reduce over the shards, and to sum over replicas what each of them has reduced."""
        if parameters not in self._known:
            whole, shard = self._gradient * parameters, self._gradient * parameters / self._shards.size
            self._known[parameters] = (
                self._net.collective("all_gather", self._element * parameters, self._shards),
                self._net.collective("reduce_scatter", whole, self._shards),
                self._net.collective("all_reduce", shard, self._replicas),
            )
        return self._known[parameters]


def _beside(config: Config, times: Sequence[StageTime]) -> Beside | None:
    """What data-parallel ranks of stages with these `times` exchange; None without FSDP2."""
    mode = sharding_mode(config)
    if mode is None:
        return None
    return Beside(
        gathers=tuple(time.gather for time in times) if mode != "zero3" else None,
        each=mode in ("zero2", "zero3"),
        slower=tuple((time.slowed(False), time.slowed(True)) for time in times),
        after_whole=tuple((time.left(False), time.left(True)) for time in times),
        after_split=tuple((time.reducing(False), time.reducing(True)) for time in times),
    )


def transfer_seconds(config: Config, net: Net) -> float:
    """Seconds to send a micro-batch's activations to the next stage."""
    layout = config.parallel.layout
    if layout.pp == 1:
        return 0.0
    return net.transfer(Activations(config).stream, layout.world_size // layout.pp)


def work_of(config: Config) -> Work:
    """What a micro-batch of `config` is, for layers without windows that recompute nothing."""
    model, parallel = config.model, config.parallel
    return Work(
        layers=model.layers,
        width=model.width,
        heads=model.heads,
        kv_heads=model.kv_heads,
        head_size=model.head_size,
        ffn=model.ffn,
        vocab=part_of(embedding(model), parallel.tp)[0] * parallel.tp,  # with padding
        sequence=model.sequence_length,
        tied=model.tie_embeddings,
        tp=parallel.tp,
        cp=parallel.cp,
        micro=config.batch.micro_size,
        precision=config.train.precision,
        method=parallel.context.method,
    )
