"""The times of a plan's pipeline stages, for one micro-batch on one rank, also as a search for an order takes them.

Imports no torch.

Communication of data parallelism runs beside the compute of layers, as FSDP2's hooks start it. A layer's gathering and
its reduction are on the same wires, one after the other, and a backward pass waits for each layer's before it goes on:
it takes the sum over its parts of what takes longer. The first gather of a pass is hidden by nothing.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from megalite.config.layers import LayerKind, layer_kinds
from megalite.config.schema import Config
from megalite.cost.activation_room import room_for
from megalite.cost.cluster import Cluster
from megalite.cost.constants import FITTED_CONSTANTS, Constants
from megalite.cost.host_copies import HOST_SHARE, HostCopies
from megalite.cost.kernels import Kernels
from megalite.cost.layer import LayerModel, LayerTime, Seconds
from megalite.cost.link_clocks import Part, end_links, exchanged, groups, layer_links, times, total
from megalite.cost.network import Collective, Group, Links, Net
from megalite.cost.program import MEGALITE, Program
from megalite.cost.schedule_tables import Tables
from megalite.cost.share import Share, share_of
from megalite.cost.stage_time import Piece, Sent, StageTime, Turns
from megalite.cost.turns import LayerPass, StagePass
from megalite.plan.activations import Activations
from megalite.plan.automatic import OrderCosts
from megalite.plan.automatic import costs_of as sizes_of
from megalite.plan.memory.fit import GIB, TENSOR_SHARE
from megalite.plan.parts.layer import Layer
from megalite.plan.parts.sizes import PRECISION_BYTES
from megalite.plan.pipeline import micro_batches, pairs_up, sharding_mode, uses_copies, uses_fsdp
from megalite.plan.recompute_modes import Mode
from megalite.plan.resolved import Plan, resolve
from megalite.schedule.problem import Beside

ZERO_BUBBLES = ("zb_h1", "zb_h2", "zbv")  # they split all backward passes; reductions follow each W
UNSPLIT_SCHEDULES = ("1f1b", "gpipe", "interleaved_1f1b")  # backward passes are whole


class Timer:
    """Times on a cluster, remembered: a search asks for the same layer in many layouts. program: whose kernels run."""

    def __init__(self, cluster: Cluster, constants: Constants = FITTED_CONSTANTS, program: Program = MEGALITE) -> None:
        self.cluster, self.constants, self.program = cluster, constants, program
        self.net, self.tables = Net(cluster, constants), Tables(self.costs)
        self.kernels = Kernels(cluster.gpu, constants)
        self._models: dict[Share, LayerModel] = {}
        self._kernels: dict[float, Kernels] = {}
        self._layers: dict[Share, LayerTime] = {}
        self._ends: dict[Share, tuple[Piece, Piece]] = {}
        self._sent: dict[object, tuple[Links, Links]] = {}

    def layer(self, share: Share) -> LayerTime:
        if (known := self._layers.get(share)) is None:  # a share is looked up once, as its hash takes long
            known = self._layers[share] = self._model(replace(share, recompute="none")).layer(share.recompute)
        return known

    def _model(self, share: Share) -> LayerModel:
        if (known := self._models.get(share)) is None:
            known = self._models[share] = LayerModel(
                share, self.program, self.cluster, self.constants, net=self.net, kernels=self._kernels
            )
        return known

    def ends(self, share: Share, frozen: bool = False) -> tuple[Piece, Piece]:
        """The embedding and the head. Ranks of tp scatter what one returns, and gather what the other takes.

        frozen: their weights have no gradients.
        """
        if share not in self._ends:
            model = self._model(share)
            forward, backward, weights = model.head()
            looked = model.embedding()
            sent = self.net.collective("all_gather", share.element * share.tokens * share.width, model.tp)
            size = share.vocab * share.width / share.tp
            there, back = Seconds(passes=looked / 3, tensor=sent), Seconds(passes=looked * 2 / 3, tensor=sent)
            last = Seconds(tensor=sent) * share.predicted
            there_last, back_last = Seconds(forward) + last, Seconds(backward) + last
            inputs = Seconds(backward - weights) + last
            further = share.predicted - 1  # embeddings that multi-token prediction looks up
            there_last, back_last = there_last + there * further, back_last + back * further
            self._ends[share] = (
                Piece("embedding", there, back, back, 0.0, size, size),
                Piece("head", there_last, back_last, inputs, weights, size, size),
            )
        embedding, head = self._ends[share]
        return (embedding.frozen(), head.frozen()) if frozen else (embedding, head)

    def stages(self, plan: Plan) -> list[StageTime]:
        """The times of every stage of `plan`."""
        shared, found = Shared(plan.config, self.net), dict[object, StageTime]()
        stages = []
        for stage in range(plan.stages):
            kinds = [id(plan.kinds[layer]) for layer in plan.layers[stage]]  # quicker to compare than kinds
            key = stage == 0, stage == plan.stages - 1, *kinds, *plan.modes[stage]
            if key not in found:  # most stages are like the one before
                found[key] = self._stage(plan, stage, shared)
            stages.append(found[key])
        return stages

    def costs(self, config: Config, *, with_room: bool = True) -> OrderCosts:
        """Costs that `schedule: auto` optimizes on this cluster, in seconds: a `Costing` of `plan.automatic`.

        With `train.recompute: budget`, layers count as if they recomputed nothing, as what they do follows from the
        order; and there is no room, since they would recompute more to let more micro-batches be under way.
        """
        if config.train.recompute == "budget":
            return self.costs_of(resolve(replace(config, train=replace(config.train, recompute="none"))))
        costs = self.costs_of(resolve(config))
        if not with_room or config.parallel.pipeline.memory is not None:
            return costs
        memory = config.batch.memory
        limit = self.cluster.gpu.memory * TENSOR_SHARE if memory is None else memory * GIB
        return replace(costs, room=room_for(config, costs, limit))

    def costs_of(self, plan: Plan) -> OrderCosts:
        """Costs for `schedule: auto` of the stages of `plan`, whose layers recompute as it says."""
        times, sizes = self.stages(plan), sizes_of(plan.config)
        stages = tuple(time.as_costs(size) for time, size in zip(times, sizes, strict=True))
        transfer, beside = transfer_seconds(plan.config, self.net), _beside(plan.config, times)
        return OrderCosts(stages, self.cluster.name, transfer, beside)

    def _stage(self, plan: Plan, stage: int, shared: "Shared") -> StageTime:
        zero3 = shared.gathers and plan.config.parallel.data_mode == "zero3"
        forward = backward = Seconds()
        inputs = weights = gather = reduce = replicas = parameters = trained = 0.0
        partial = recut = 0
        longer, sent = [0.0, 0.0], [[self.net.nothing] for _ in Sent._fields]
        edge = None  # the first unit of a pass: nothing hides its gather
        first = [0.0, 0.0]  # nor that it comes from the host; each pass: more than if its own compute did
        frees = plan.fsdp and plan.config.parallel.data_mode == "zero3"
        for piece, mode, count in self._pieces(plan, stage):
            moved, (there, back) = shared.moved(piece.part), self._links(plan.config, piece.part, mode)
            again, over = (moved.gathered, moved.sent.gather) if zero3 else (0.0, self.net.nothing)
            copied = self.kernels.passes(shared.copied * (piece.parameters + moved.recut))
            added = self.kernels.passes(shared.added * piece.trained + shared.recut * moved.recut)
            copies = Seconds(passes=copied * zero3)
            arriving, waited = shared.host.arriving(piece), shared.host.waited(piece)
            fetched = arriving if frees else 0.0  # in every pass
            compute = self._offloaded(piece.backward + copies + Seconds(passes=added), fetched)
            alone, compute = self._offloaded(piece.inputs + copies, fetched), compute + Seconds(offload=waited)
            forward += self._with(self._offloaded(piece.forward + copies, fetched), again, there, over) * count
            backward += (whole := self._with(compute, again, back, over)) * count
            inputs += self._with(alone, again, back, over).total * count
            reduced, summed = (moved.reduced, moved.sent.reduce), (moved.summed, moved.sent.replicas)
            for last, beside_it in enumerate(([reduced], [reduced, summed])):
                seconds = again + sum(each for each, _ in beside_it)
                slower = self._with(compute, seconds, back, over, *(links for _, links in beside_it))
                longer[last] += (slower.total - whole.total) * count
            weights += (piece.weights + added + waited) * count
            gather += max(moved.gathered, arriving) * count
            reduce += moved.reduced * count
            replicas += moved.summed * count
            parameters += piece.parameters * count
            trained += piece.trained * count
            recut += moved.recut * count
            partial += moved.partial * count
            for of_stage, each in zip(sent, (total((there, back, over, over)), *moved.sent[1:]), strict=True):
                of_stage.append(times(each, count))
            if edge is None:
                edge = moved
                first = [min(arriving, each.total) for each in (piece.forward, piece.backward)]
        assert edge is not None
        if zero3:
            forward, backward = forward + Seconds(data=edge.gathered), backward + Seconds(data=edge.gathered)
            inputs, gather = inputs + edge.gathered, 0.0
            sent[0].append(edge.sent.gather)
        if frees:
            forward, backward = forward + Seconds(offload=first[0]), backward + Seconds(offload=first[1])
            inputs, gather = inputs + first[1], 0.0
        elif gather:  # layers wait for their own weights only
            gather = max(edge.gathered, first[0]) + max(0.0, gather - forward.total)
            gather += self.kernels.passes(shared.copied * (parameters + recut))
        return StageTime(
            forward,
            backward,
            inputs,
            weights,
            gather,
            reduce,
            replicas,
            (longer[0], longer[1]),
            trained,
            partial,
            Sent(*(total(each) for each in sent)),
            self._turns(plan, stage, shared) if pairs_up(plan.config) else None,
        )

    def _turns(self, plan: Plan, stage: int, shared: "Shared") -> Turns:
        """Both passes of a stage as they take turns with others."""
        zero3, nothing = shared.gathers and plan.config.parallel.data_mode == "zero3", self.net.nothing
        layers: tuple[list[LayerPass], list[LayerPass]] = [], []
        plain, gathered, moved, first, reduced = [0.0, 0.0], 0.0, 0.0, 0.0, [0.0, 0.0, 0.0]
        links, reducing = ([nothing], [nothing]), ([nothing], [nothing], [nothing])
        for piece, mode, count in self._pieces(plan, stage):
            exchanges, of_pass = shared.moved(piece.part), self._links(plan.config, piece.part, mode)
            first = first or exchanges.gathered * zero3
            gathered += exchanges.gathered * zero3 * count
            moved += piece.moved * count
            copied = self.kernels.passes(shared.copied * (piece.parameters + exchanges.recut)) * zero3
            added = self.kernels.passes(shared.added * piece.trained + shared.recut * exchanges.recut)
            for at, (alone, more) in enumerate(((piece.forward, copied), (piece.backward, copied + added))):
                plain[at] += (more + (alone.total if piece.turns is None else 0.0)) * count
                layers[at].extend([piece.turns[at]] * count if piece.turns is not None else [])
                links[at].append(times(total((of_pass[at], *([exchanges.sent.gather] * zero3))), count))
            for at, seconds in enumerate((0.0, exchanges.reduced, exchanges.reduced + exchanges.summed)):
                reduced[at] += seconds * count
                reducing[at].extend(
                    times(each, count) for each in (exchanges.sent.reduce, exchanges.sent.replicas)[:at]
                )
        there, back = (
            StagePass(tuple(layers[at]), plain[at], moved, gathered, first, total(links[at]), self.constants.beside)
            for at in (0, 1)
        )
        return Turns(there, back, tuple(zip(reduced, map(total, reducing), strict=True)))

    def _with(self, compute: Seconds, communication: float, *links: Links) -> Seconds:
        """Compute, and how much longer it takes with communication beside it, and for links that both of them need."""
        alone = compute.total
        busy = max(map(sum, zip(*links, strict=True)))
        return compute + Seconds(data=max(self.constants.beside(alone, communication), busy) - alone)

    def _links(self, config: Config, part: Part, mode: Mode) -> tuple[Links, Links]:
        """Links in both passes of a part."""
        key = part, mode, share_of(config, layer_kinds(config.model)[0])
        if key not in self._sent:
            if isinstance(part, str):
                self._sent[key] = end_links(config, self.net, part)
            else:
                self._sent[key] = layer_links(config, self.net, part, mode)
        return self._sent[key]

    def _pieces(self, plan: Plan, stage: int) -> Iterator[tuple[Piece, Mode, int]]:
        """Yield the pieces that a stage is made of, in order, with their recompute modes and counts."""
        config = plan.config
        embedding, head = self.ends(share_of(config, plan.kinds[0]), config.adapter is not None)
        if stage == 0:
            yield embedding, "none", 1
        found: dict[tuple[LayerKind, Mode], int] = {}
        for kind, mode in plan.recomputed(stage):
            found[kind, mode] = found.get((kind, mode), 0) + 1
        for (kind, mode), count in found.items():
            yield self._layer(config, kind, mode), mode, count
        if stage == plan.stages - 1:
            if stage > 0 and config.model.shares_embedding and not config.model.tie_embeddings:
                none = Seconds()  # the head's time has the look-ups
                yield replace(embedding, forward=none, backward=none, inputs=none), "none", 1
            yield head, "none", 1

    def _layer(self, config: Config, kind: LayerKind, mode: Mode) -> Piece:
        time = self.layer(share_of(config, kind, mode))
        size, trained = (
            (every - experts) / config.parallel.tp + experts / config.parallel.ep
            for every, experts in (
                _amount(config.model.width, kind, trained, PRECISION_BYTES[config.train.dtype])
                for trained in (False, True)
            )
        )
        forward, backward, inputs, moved = time.forward, time.backward, time.inputs, 0.0
        if config.train.offload_activations:
            moved = Activations(config).layer_bytes(kind, mode) / (self.cluster.gpu.host * HOST_SHARE)
            forward, backward, inputs = (self._offloaded(each, moved) for each in (forward, backward, inputs))
        return Piece(kind, forward, backward, inputs, time.weights, size, trained, moved, time.turns)

    def _offloaded(self, compute: Seconds, moved: float) -> Seconds:
        """Compute beside a copy, which has an engine of its own."""
        return compute + Seconds(offload=max(0.0, moved - compute.total))


def expert_parameters(config: Config, kind: LayerKind, trained: bool = False) -> int:
    """Parameters of the experts of a layer, of all ranks together. trained: only those that training changes."""
    return int(_amount(config.model.width, kind, trained)[1])


@lru_cache(maxsize=1 << 8)
def _amount(width: int, kind: LayerKind, trained: bool, each: int | None = None) -> tuple[float, float]:
    """Parameters of a layer of a residual stream's `width`, and those of its experts.

    trained: only trained ones. each: bytes of one, in which those in four bits are then counted; None: all are alike.
    """
    weights = [weight for _, weight in Layer(width, kind).weights() if weight.trained or not trained]
    counts = [weight.elements if each is None else weight.bytes(weight.elements, each) / each for weight in weights]
    return sum(counts), sum(n for n, weight in zip(counts, weights, strict=True) if weight.role.of_expert)


class Shared:
    """Times in which data-parallel ranks gather and reduce the parameters of a part.

    copied: bytes that FSDP2 reads and writes for a parameter to take it out of the buffer of an all-gather. added: such
    bytes of a micro-batch's gradients, on average: to put them into the buffer of a reduce-scatter, or to add them to
    those before, which the first micro-batch of a step does not. recut: such bytes of the gradient of a parameter that
    is sharded along another dimension than its first, which is copied once more, as it is when it is gathered. last:
    such bytes at the end of a step. FSDP2 does all of this between kernels, on the stream that computes
    (torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py).
    """

    def __init__(self, config: Config, net: Net) -> None:
        parallel = config.parallel
        self._net = net
        self._element = PRECISION_BYTES[config.train.dtype]
        self._gradient = 2 if parallel.data.reduce_precision == "bf16" else max(self._element, 4)
        ranks = groups(config)
        self._ranks = {False: (ranks["fsdp"], ranks["dp_replicate"]), True: (ranks["ep_fsdp"], ranks["ep_replicate"])}
        self._shards, replicas = ranks["fsdp"], ranks["dp_replicate"].size
        self.gathers = self._shards.size > 1
        self._config = config
        self._known: dict[Part, Moved] = {}
        self._reduces = self.gathers or replicas > 1
        self.host = HostCopies(config, net.cluster, self._shards.size)
        self.copied = 2 * self._element if self.gathers else 0
        self.added, self.last, self.recut = self.summed(micro_batches(config))

    def summed(self, m: int) -> tuple[float, float, float]:
        """`added`, `last` and `recut` in a step of `m` micro-batches."""
        w, r, config = self._element, self._gradient, self._config
        at_once = config.parallel.data_mode in ("zero2", "zero3") or (m == 1 and uses_fsdp(config))  # no sums are kept
        recut = 2 * w if at_once else 2 * r / m
        if uses_copies(config):  # products read and write the sums, not gradients; the optimizer writes the copies
            return 2 * r - w - r / m, w, recut
        if at_once and self._reduces:
            return w + r, 0, recut
        return (w + 2 * r if uses_fsdp(config) else 3 * w) * (1 - 1 / m), 2 * r if self._reduces else 0, recut

    def seconds(self, part: Part) -> tuple[float, float, float]:
        """Seconds to gather a part, to reduce over the shards, and to sum over replicas what each has reduced."""
        gathered, reduced, summed = (
            sum(self._net.collective(*each) for each in of_groups) for of_groups in self._collectives(part)
        )
        return gathered, reduced, summed

    @property
    def of_copy(self) -> float:
        """Bytes that the two ranks with a copy of an embedding send each other."""
        (table,) = exchanged(self._config, "embedding")
        return table.gathered(self._shards.size, max(self._element, 4)) / self._shards.size

    def partial_sums(self, stages: Iterable[StageTime]) -> tuple[Collective, float, Group]:
        """The sum over tp, once a step, of partial gradients of a rank with these stages."""
        return (
            "all_reduce",
            max(self._element, 4) * sum(stage.partial for stage in stages),
            Group(self._config.parallel.tp, 1),
        )

    def moved(self, part: Part) -> "Moved":
        """Seconds of the exchanges of a part, with the links that they keep busy."""
        if part not in self._known:
            gather, reduce, replicas = (
                total(self._net.links(*each) for each in of_groups) for of_groups in self._collectives(part)
            )
            groups_of = exchanged(self._config, part)
            partial = sum(group.partial(self._shards.size) for group in groups_of)
            recut = sum(group.recut(self._ranks[group.apart][0].size) for group in groups_of)
            links = Sent(self._net.nothing, gather, reduce, replicas)
            self._known[part] = Moved(*self.seconds(part), partial, recut, links)
        return self._known[part]

    def _collectives(self, part: Part) -> list[list[tuple[Collective, float, Group]]]:
        """Gathers, reductions over the shards, and sums over replicas, each of all groups of a part."""
        of_groups = [(group, *self._ranks[group.apart]) for group in exchanged(self._config, part)]
        counted = [(group.gathered(shards.size, self._element), shards) for group, shards, _ in of_groups]
        made = [(group.reduced(shards.size), shards, replicas) for group, shards, replicas in of_groups]
        return [
            [("all_gather", size, shards) for size, shards in counted],
            [("reduce_scatter", self._gradient * count, shards) for count, shards, _ in made],
            [("all_reduce", self._gradient * count / shards.size, replicas) for count, shards, replicas in made],
        ]


class Moved(NamedTuple):
    """Seconds to gather a part, to reduce its gradients and to sum them over replicas; elements of its gradients that
    are partial sums over tp, and of a rank's parameters that are not sharded along their first dimension; and for how
    long links are busy with the three."""

    gathered: float
    reduced: float
    summed: float
    partial: int
    recut: int
    sent: Sent


def _beside(config: Config, times: Sequence[StageTime]) -> Beside | None:
    """Exchanges of data-parallel ranks of stages with these `times`; None without FSDP2."""
    mode = sharding_mode(config)
    if mode is None:
        return None
    return Beside(
        gathers=tuple(time.gather for time in times) if mode != "zero3" else None,
        each=mode in ("zero2", "zero3"),
        slower=tuple(time.longer for time in times),
        after_split=tuple((time.reducing(False), time.reducing(True)) for time in times),
    )


def transfer_seconds(config: Config, net: Net) -> float:
    """Seconds to send a micro-batch's activations to the next stage."""
    layout = config.parallel.layout
    if layout.pp == 1:
        return 0.0
    return net.transfer(Activations(config).stream, groups(config)["pp"])
