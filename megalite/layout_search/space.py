"""Layouts that a search may choose from, and what each costs at least. Imports no torch.

A search goes through levels. A `Shape` fixes what decides the time of a layer: tp, cp, pp, the micro-batch and
recompute. Its pipelines add the schedule, and its layouts data parallelism and offloading. All have a lower bound of
their time, so that the search needs to look at few of them closely; layouts also have one of their memory.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from math import inf
from typing import Any, NamedTuple

from megalite.config.layers import inputs_of_matrices, layer_kinds
from megalite.config.layout import FOUR_BIT_BLOCK
from megalite.config.parallel_schema import SCHEDULES, DataMode
from megalite.config.rules.numbers import every_divisor
from megalite.config.rules.parallel import share_experts
from megalite.config.schema import Config
from megalite.cost.kernels import launched
from megalite.cost.layer import LayerTime
from megalite.cost.layout_choice import Choice, Method, Recomputed, mode_of, places
from megalite.cost.share import share_of
from megalite.cost.stages import UNSPLIT_SCHEDULES, Timer
from megalite.layout_search.memory_bounds import Estimate, Lightest, Rank, mixed
from megalite.layout_search.pipeline_bounds import Passes, summed
from megalite.layout_search.shape import Shape
from megalite.layout_search.time_bounds import VIRTUAL_STAGES, Least
from megalite.layout_search.turn_bounds import Pairs, least_in_turns
from megalite.layout_search.uneven_splits import MAX_LIMIT_FACTOR, Moves
from megalite.plan.pipeline import can_pair, of_file
from megalite.schedule.actions import MAX_ACTIONS, Table
from megalite.schedule.generate import AUTO_SCHEDULE, NAMES, SPLIT_SCHEDULES, V_SCHEDULES, actions_of

# Where in a choice the schedule begins, how states are shared out, and what is offloaded.
SCHEDULE_INDEX, SHARING_INDEX, OFFLOADING_INDEX = map(
    Choice._fields.index, ("schedule", "replicas", "offload_activations")
)
MAX_MICRO_SIZE = 32  # sequences in a micro-batch
LARGE_MICRO_SIZE = 1 << 16  # sequences, of which products have more than a hundred waves of tiles
ROUNDED_SHARE = 0.99  # share of their time that is left if the last wave is full
MAX_CP = 64
MIN_RANK_POSITIONS = 2048  # positions of a sequence that a context-parallel rank has at least


class Scheduled(NamedTuple):
    """The schedules of a shape.

    names: each with its virtual stages. split: whether any may split backward passes. front: ranks of `Estimate.front`.
    """

    names: list[tuple[str, int | None]]
    split: bool
    front: list[Lightest]


class Space:
    """The layouts of `config` on `gpus` GPUs of a cluster.

    pins: keys of SEARCHED that keep the values that `config` has. offload: whether tensors may be moved to host memory
    without being pinned there. limit: bytes that tensors may take; layers are moved where it
    is near, or missed by up to `missed` times.
    """

    def __init__(
        self,
        config: Config,
        gpus: int,
        timer: Timer,
        pins: Mapping[str, Any],
        offload: bool,
        limit: float = inf,
        missed: float = MAX_LIMIT_FACTOR,
    ) -> None:
        self.config, self.gpus, self.timer, self.pins, self.offload = config, gpus, timer, pins, offload
        self.model = config.model
        self._too_large = list[Choice]()
        self._sharings: dict[Shape, list[tuple[float, Choice]]] = {}
        self.kinds: dict[Any, int] = {}
        for kind in layer_kinds(config.model):
            self.kinds[kind] = self.kinds.get(kind, 0) + 1
        self._times: dict[tuple[object, ...], Passes] = {}
        self._scheduled: dict[tuple[object, ...], Scheduled] = {}
        self.estimate = Estimate(config, pins, self.kinds)
        self.least = Least(config, gpus, timer, pins, self.estimate, offload)
        self.moves = Moves(self.estimate, self.least, limit, missed)

    def shapes(self, limit: float) -> Iterator[Shape]:
        """All shapes but those that do not fit into `limit` bytes with any schedule and split, which are remembered."""
        for shape in self.quickest_shapes(limit):
            more: Shape | None = shape
            while more is not None:
                yield more
                more = self.recomputing(more, limit)

    def quickest_shapes(self, limit: float) -> Iterator[Shape]:
        """The shapes that recompute least; others follow from them by `recomputing`."""
        return (self.shape(first) for _, first in self.firsts(limit))

    def firsts(self, limit: float) -> Iterator[tuple[float, Choice]]:
        """The first layouts of these shapes, each with a lower bound of its seconds that is found without its times."""
        modes = self._recompute()
        for tp in self._tensor():
            for cp in self._pinned("parallel.cp", lambda tp=tp: self._context(tp)):
                for method in self._methods(tp, cp):
                    for pp in self._pinned("parallel.pp", lambda tp=tp, cp=cp: self._pipeline(tp, cp)):
                        dp, rest = divmod(self.gpus, tp * cp * pp)
                        if not dp or rest or self.config.batch.global_ % dp:
                            continue
                        for first in self._with_batches(tp, cp, method, pp, dp, modes[0]):
                            for ep in self._experts(tp, dp * cp * tp):
                                for grouped in self._groups(first._replace(ep=ep)):
                                    if (fitting := self._fitting(grouped, modes, limit)) is not None:
                                        yield self._in_large(fitting), fitting

    def _groups(self, first: Choice) -> list[Choice]:
        """First layouts: one for schedules in which passes never take turns, and one for those in which they do."""
        pairing = [first._replace(schedule=name) for name in V_SCHEDULES]
        return [first, *(each for each in pairing if self._pairs_up(each))]

    def _pairs_up(self, choice: Choice) -> bool:
        """Return whether passes of a layout take turns."""
        return self.config.parallel.pipeline.overlap and can_pair(choice.schedule, choice.ep)

    def _in_large(self, first: Choice) -> float:
        """Seconds of all layers' compute, shared by all ranks, if micro-batches were so large that nothing is rounded
        up, and of their launches."""
        large = first._replace(micro=LARGE_MICRO_SIZE)
        passes = self._turns(large) if self._pairs_up(first) else self._passes(large)
        share = ROUNDED_SHARE * first.micro / LARGE_MICRO_SIZE
        layers = passes.forward[-1] + passes.backward[-1]
        seconds = launched(share * layers, passes.launches) + share * (passes.there + passes.back - layers)
        return first.micro_batches(self.config.batch.global_) * seconds / first.pp

    def shape(self, first: Choice) -> Shape:
        """The shape with this first layout."""
        alone, splits = self._passes(first), self._schedules(first).split
        if self._pairs_up(first):
            ordered = list(self.estimate.order) == sorted(self.estimate.order)
            known = ordered and not mixed(self.config, self.pins, first)
            pairs = Pairs(self._layers(first), self.timer.constants.beside) if known else None
            return self.least.shape(first, self._turns(first), splits, alone, pairs)
        return self.least.shape(first, alone, splits)

    def recomputing(self, shape: Shape, limit: float) -> Shape | None:
        """The shape that recomputes more, by one step, and so is not faster; None if there is none."""
        modes = self._recompute()
        first = self._fitting(shape.choice, modes[modes.index(shape.choice.recompute) + 1 :], limit)
        return None if first is None else self.shape(first)

    def _fitting(self, first: Choice, modes: Sequence[Recomputed], limit: float) -> Choice | None:
        """The layout with the first of `modes` with which it may fit into `limit` bytes; others are remembered."""
        for recompute in modes:
            first = first._replace(recompute=recompute)
            if not self._schedules(first).names:
                continue
            if self.estimate.of_states(first) <= limit and self._may_fit(first, limit):
                return first
            self._too_large.append(first)
        return None

    def _may_fit(self, first: Choice, limit: float) -> bool:
        """Return whether a shape, or with a way to share states, may fit with any schedule and split."""
        room, lightest = self.moves.missed * limit, self.estimate.lightest
        return all(lightest(first, rank) <= room for rank in self._schedules(first).front)

    def tightest(self, limit: float) -> tuple[float, Choice] | None:
        """Bytes and first layout of the shape that needs least, among those that do not fit."""
        found: tuple[float, Choice] | None = None
        for first in self._too_large:
            if found is None or self.estimate.of_states(first) < found[0]:
                needed = min((self.estimate.memory(choice) for choice in self.pipelines(first)), default=inf)
                if needed < (inf if found is None else found[0]):
                    found = needed, first
        return found

    def pipelines(self, first: Choice) -> Iterator[Choice]:
        """A shape's first layout under each schedule that it can have, and that is not too long."""
        head, tail = first[:SCHEDULE_INDEX], first[SHARING_INDEX:]
        for name, virtual in self._schedules(first).names:
            yield Choice._make((*head, name, virtual, *tail))

    def sharings(self, shape: Shape, limit: float = inf) -> list[tuple[float, Choice]]:
        """Ways to share a shape's states out over data-parallel ranks, each with a lower bound of its seconds, but for
        those that do not fit into `limit` bytes with any schedule and split, which are remembered."""
        if shape not in self._sharings:
            found = self._sharings[shape] = []
            for mode in self._modes(shape):
                for replicas in self._replicas(shape, mode):
                    choice = shape.choice._replace(mode=mode, replicas=replicas, shards=shape.dp // replicas)
                    if self.estimate.of_states(choice, any_schedule=True) <= limit and self._may_fit(choice, limit):
                        found.append((self.least.of_sharing(shape, choice), choice))
                    else:
                        self._too_large.append(choice)
        return self._sharings[shape]

    def layouts(self, shape: Shape, pipeline: Choice, limit: float = inf) -> Iterator[tuple[float, Choice]]:
        """The layouts of a shape with the schedule of `pipeline`, each with a lower bound of its seconds. limit: as in
        `sharings`."""
        head, split, offloading = pipeline[:SHARING_INDEX], pipeline.split, list(self._offloading(pipeline.schedule))
        for bound, shared in self.sharings(shape, limit):
            sharing = shared[SHARING_INDEX:OFFLOADING_INDEX]
            for offloads in offloading:
                yield bound, Choice._make((*head, *sharing, *offloads, split))

    def _pinned(self, key: str, otherwise: Any) -> Any:
        return [self.pins[key]] if key in self.pins else otherwise()

    def _tensor(self) -> list[int]:
        model, node = self.model, self.timer.cluster.gpus_per_node
        sizes = (model.heads, model.kv_heads, model.ffn, model.sequence_length)
        wanted = self._pinned("parallel.tp", lambda: [tp for tp in every_divisor(self.gpus) if tp <= node])
        found = [tp for tp in wanted if not any(size % tp for size in sizes)]
        if not model.four_bits:
            return found
        rows = [inputs for _, inputs, split in inputs_of_matrices(model) if split]
        return [tp for tp in found if not any(inputs % (FOUR_BIT_BLOCK * tp) for inputs in rows)]

    def _experts(self, tp: int, ranks: int) -> list[int]:
        """Numbers of ranks, among so many, that may share out experts."""
        experts = self.model.experts
        if experts is None:
            return [1]
        wanted = self._pinned("parallel.ep", lambda: every_divisor(experts.count, ranks))
        least = 2 if self.config.parallel.experts.buffers == "worst_case" else 1
        return [ep for ep in wanted if ep >= least and not (ep % tp or ranks % ep or experts.count % ep)]

    def _context(self, tp: int) -> list[int]:
        length = self.model.sequence_length
        fitting = every_divisor(self.gpus // tp)
        return [cp for cp in fitting if cp == 1 or (cp <= MAX_CP and length // cp >= MIN_RANK_POSITIONS)]

    def _methods(self, tp: int, cp: int) -> Iterator[Method]:
        length, heads = self.model.sequence_length, self.model.heads
        key = "parallel.context.method"
        if cp == 1:
            yield self.pins.get(key, self.config.parallel.context.method)
            return
        for method in self._pinned(key, lambda: ["ring", "all_gather", "ulysses"]):
            chunks = 1 if method == "ulysses" else 2
            if length % (chunks * cp * tp) == 0 and not (method == "ulysses" and heads % (cp * tp)):
                yield method

    def _pipeline(self, tp: int, cp: int) -> list[int]:
        return [pp for pp in every_divisor(self.gpus // (tp * cp)) if pp <= self.model.layers]

    def _with_batches(
        self, tp: int, cp: int, method: Method, pp: int, dp: int, recompute: Recomputed
    ) -> Iterator[Choice]:
        each = self.config.batch.global_ // dp
        micros = every_divisor(each, MAX_MICRO_SIZE)
        split = tuple(self.config.parallel.pipeline.split or ()) if "parallel.pipeline.split" in self.pins else None
        activations = bool(self.pins.get("train.offload_activations", self.offload))
        states = self.pins.get("optim.placement", places(self.config, self.offload)[-1])
        first = Choice(tp, 1, cp, method, pp, 1, recompute, "1f1b", None, 1, dp, "zero3", activations, states, split)
        for micro in self._pinned("batch.micro", lambda: micros):
            if each % micro == 0:
                yield first._replace(micro=micro)

    def _recompute(self) -> list[Recomputed]:
        """Ways to recompute, the quickest first."""
        found: list[Recomputed] = self._pinned("train.recompute", lambda: ["none", "selective", "full"])
        compiled = self.config.train.compile
        return [mode for mode in found if not (compiled and mode == "selective")]

    def _passes(self, choice: Choice) -> Passes:
        """Seconds of the model's passes for a micro-batch."""
        key = choice.tp, choice.ep, choice.cp, choice.method, choice.micro, choice.recompute
        if key not in self._times:
            layers = self._layers(choice)
            passes = [(time.forward.total, time.backward.total) for time in layers]
            self._times[key] = self._timed(choice, layers, passes)
        return self._times[key]

    def _turns(self, choice: Choice) -> Passes:
        """Passes as they are at least where they take turns."""
        key = choice.tp, choice.ep, choice.cp, choice.method, choice.micro, choice.recompute, "in turns"
        if key not in self._times:
            layers = self._layers(choice)
            passes = least_in_turns(list(zip(layers, self.kinds.values(), strict=True)), self.timer.constants.overlap)
            self._times[key] = self._timed(choice, layers, passes)
        return self._times[key]

    def _layers(self, choice: Choice) -> list[LayerTime]:
        """Times of a layer of each kind."""
        mode = "none" if mixed(self.config, self.pins, choice) else mode_of(choice)
        config = self.estimate.sizes(choice).config
        return [self.timer.layer(share_of(config, kind, mode)) for kind in self.kinds]

    def _timed(self, choice: Choice, layers: Sequence[LayerTime], passes: Sequence[tuple[float, float]]) -> Passes:
        """Passes of the model, with those of a layer of each kind."""
        weights = [time.weights for time in layers]
        launches = [sum(each.launches for each in time.turns) for time in layers]
        forward, backward = ([each[at] for each in passes] for at in (0, 1))
        config = self.estimate.sizes(choice).config
        embedding, head = self.timer.ends(share_of(config, next(iter(self.kinds))), config.adapter is not None)
        before = self.estimate.before
        return Passes(
            before(forward),
            before(backward),
            before(weights),
            tuple(zip(forward, backward, weights, strict=True)),
            (embedding.forward.total, embedding.backward.total, embedding.weights),
            (head.forward.total, head.backward.total, head.weights),
            summed(list(self.kinds.values()), launches),
        )

    def _schedules(self, first: Choice) -> Scheduled:
        """The schedules that a shape can have."""
        m = first.micro_batches(self.config.batch.global_)
        key = first.pp, first.recompute == "full", m, (paired := self._pairs_up(first)), first.ep > 1
        if key not in self._scheduled:
            names = [
                (name, virtual)
                for name, virtual in self._named(first)
                if self._pairs_up(first._replace(schedule=name)) == paired
                and self._can_be_placed(first.pp, m, name, virtual)
                and _can_be_planned(first.pp, m, name, virtual)
            ]
            fronts = list[list[Rank]]()
            for name, virtual in names:
                if name not in NAMES:  # where its stages are is not known
                    fronts = []
                    break
                fronts.append(self.estimate.front(first._replace(schedule=name, virtual=virtual)))
            front = [Lightest.of(ranks) for ranks in zip(*fronts, strict=True)]
            splits = any(name not in UNSPLIT_SCHEDULES for name, _ in names)
            self._scheduled[key] = Scheduled(names, splits, front)
        return self._scheduled[key]

    def _can_be_placed(self, pp: int, m: int, schedule: str, virtual: int | None) -> bool:
        """Return whether every stage has a layer, a pinned split is for so many stages, a file for this pipeline."""
        stages = pp * (virtual or SCHEDULES.get(schedule, 1))
        split = self.config.parallel.pipeline.split if "parallel.pipeline.split" in self.pins else None
        if stages > self.model.layers or (split is not None and len(split) != stages):
            return False
        file = self.file
        return file is None or (file.ranks, file.micro_batches, file.stages) == (pp, m, stages)

    @cached_property
    def file(self) -> Table | None:
        """The schedule of the pinned file, if one is pinned. Raises InputError for a bad file."""
        schedule = self.pins.get("parallel.pipeline.schedule", AUTO_SCHEDULE)
        return None if schedule in SCHEDULES else of_file(schedule)

    def _named(self, first: Choice) -> Iterator[tuple[str, int | None]]:
        """Schedules and virtual stages. Halves of backward keep for W what full recompute has made again."""
        pp = first.pp
        key, of = "parallel.pipeline.schedule", "parallel.pipeline.virtual_stages"
        if self.file is not None:
            yield self.pins[key], self.pins.get(of, self.file.stages // self.file.ranks)
            return
        if self.pins.get(key) == AUTO_SCHEDULE:
            for virtual in self._pinned(of, lambda: [None] if pp == 1 else [None, 2]):
                yield AUTO_SCHEDULE, virtual
            return
        if pp == 1 and key not in self.pins:
            yield "1f1b", None
            return
        splits = not self.config.train.compile and first.recompute != "full"
        names = ["1f1b", "interleaved_1f1b", *(["zb_h1", "zb_h2", "zbv", "dualpipev"] if splits else [])]
        for name in self._pinned(key, lambda: names):
            if name == "interleaved_1f1b":
                for virtual in self._pinned(of, lambda: VIRTUAL_STAGES):
                    yield name, virtual
            elif self.pins.get(of) in (None, SCHEDULES[name]):
                yield name, None

    def _modes(self, shape: Shape) -> list[DataMode]:
        on_host = self.config.parallel.placement.parameters == "host"
        return list(self._pinned("parallel.data.mode", lambda: shape.modes(on_host)))

    def _replicas(self, shape: Shape, mode: DataMode) -> list[int]:
        if "parallel.dp_replicate" in self.pins:
            found = [self.pins["parallel.dp_replicate"]]
        elif "parallel.dp_shard" in self.pins:
            found = [shape.dp // self.pins["parallel.dp_shard"]]
        elif mode == "ddp":
            found = [1]
        else:  # sharded over all, over those of a node, or over eight nodes
            near = max(1, self.timer.cluster.gpus_per_node // (shape.choice.tp * shape.choice.cp))
            found = sorted({1, *(shape.dp // size for size in (near, 8 * near) if shape.dp % size == 0)})
            found = [replicas for replicas in found if replicas < shape.dp or shape.dp == 1]
        shard, (tp, ep, cp, *_) = self.pins.get("parallel.dp_shard"), shape.choice
        found = [n for n in found if n and shape.dp % n == 0 and shape.dp // n * cp * tp % ep == 0]
        if mode != "ddp":
            found = [n for n in found if share_experts(self.model, ep, shape.dp // n * cp * tp // ep)]
        return [n for n in found if shard in (None, shape.dp // n)]

    def _offloading(self, schedule: str) -> Iterator[tuple[bool, str]]:
        either = [False, True] if self.offload else [False]
        free = [False] if self.config.train.compile or schedule in SPLIT_SCHEDULES else either
        for activations in self._pinned("train.offload_activations", lambda: free):
            for states in self._pinned("optim.placement", lambda: places(self.config, self.offload)):
                yield activations, states


def _can_be_planned(pp: int, m: int, schedule: str, virtual: int | None) -> bool:
    """Return whether a schedule is not too long. The length of one in a file is known when it is read."""
    return schedule not in SCHEDULES or actions_of(schedule, pp, m, virtual or SCHEDULES[schedule]) <= MAX_ACTIONS
