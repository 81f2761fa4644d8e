"""Layouts that a search may choose from, and what each costs at least. Imports no torch.

A search goes through two levels. A `Shape` fixes what decides the time of a layer: tp, cp, pp, the micro-batch and
recompute. Its `Choice`s add the schedule, data parallelism and offloading. Both have a lower bound of their time, so
that the search needs to look at few of them closely; choices also have one of their memory.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import mul
from typing import Any

from megalite.config.layers import layer_kinds
from megalite.config.rules.numbers import every_divisor
from megalite.config.schema import SCHEDULES, Config
from megalite.plan.pipeline import placement
from megalite.plan.split import split_of
from megalite.planner.bounds import Chain, Exchanged, Passes, Turns, chains, turns
from megalite.planner.choice import Choice, Method, Recomputed, mode_of
from megalite.planner.estimate import Estimate
from megalite.planner.predict import adamw_seconds
from megalite.planner.stages import Shared, Timer, work_of
from megalite.planner.step import beside
from megalite.planner.tables import ROUNDS
from megalite.planner.work import DataMode, Work
from megalite.schedule.generate import NAMES, SPLITTING, V_SHAPED, bubble_of
from megalite.schedule.orders import first_rounds

LARGEST_MICRO = 32  # sequences in a micro-batch
LARGEST_CP = 64
SHORTEST = 1024  # positions of a sequence that a context-parallel rank has at least
VIRTUAL = (2, 3, 4, 6, 8)  # stages of a rank under interleaved_1f1b
CUT = 0.993  # of a whole step: one that is simulated for ROUNDS only may seem shorter, by as much as 0.6 %
PLAIN = ("1f1b", "gpipe")  # schedules of one stage a rank with whole backward passes


@dataclass(frozen=True)
class Shape:
    """What decides the time of layers, with a lower bound of the seconds of a step."""

    choice: Choice  # of its first layout
    micro_batches: int
    dp: int
    passes: Passes
    bound: float


class Space:
    """The layouts of `config` on `gpus` GPUs of a cluster.

    pins: keys of SEARCHED that keep the values that `config` has. offload: whether tensors may be moved to host memory
    without being pinned there.
    """

    def __init__(self, config: Config, gpus: int, timer: Timer, pins: Mapping[str, Any], offload: bool) -> None:
        self.config, self.gpus, self.timer, self.pins, self.offload = config, gpus, timer, pins, offload
        self.model = config.model
        self.tightest: tuple[float, Choice] | None = None  # bytes of the smallest shape that does not fit
        self.kinds: dict[Any, int] = {}
        for kind in layer_kinds(config.model):
            self.kinds[kind] = self.kinds.get(kind, 0) + 1
        self._times: dict[tuple[object, ...], Passes] = {}
        self._splits: dict[tuple[object, ...], tuple[Sequence[int], Sequence[int]]] = {}
        self._waits: dict[tuple[object, ...], tuple[list[Chain], list[Turns]]] = {}
        self._exchanged: dict[tuple[object, ...], Exchanged] = {}
        self._updating = {offloaded: adamw_seconds(1.0, offloaded, timer) for offloaded in (False, True)}
        self.estimate = Estimate(config, pins, self.kinds)

    def shapes(self, limit: float) -> Iterator[Shape]:
        """All shapes that some layout may fit into `limit` bytes."""
        for tp in self._pinned("parallel.tp", self._tensor):
            for cp in self._pinned("parallel.cp", lambda tp=tp: self._context(tp)):
                for method in self._methods(tp, cp):
                    for pp in self._pinned("parallel.pp", lambda tp=tp, cp=cp: self._pipeline(tp, cp)):
                        dp, rest = divmod(self.gpus, tp * cp * pp)
                        if dp and not rest and self.config.batch.global_ % dp == 0:
                            for first in self._with_batches(tp, cp, method, pp, dp):
                                needed = self.estimate.memory(first)
                                if needed <= limit:
                                    yield self._shape(first)
                                elif self.tightest is None or needed < self.tightest[0]:
                                    self.tightest = needed, first

    def sharings(self, shape: Shape) -> Iterator[tuple[float, Choice]]:
        """Ways to share a shape's states out over data-parallel ranks, each with a lower bound of its seconds."""
        for mode in self._modes(shape):
            for replicas in self._replicas(shape, mode):
                choice = shape.choice._replace(mode=mode, replicas=replicas, shards=shape.dp // replicas)
                yield self._bound(shape, choice, None), choice

    def choices(self, shape: Shape, shared: Choice) -> Iterator[tuple[float, Choice]]:
        """The layouts of a shape whose states are shared out so, each with a lower bound of its seconds."""
        for schedule, virtual in self._schedules(shape.choice):
            for activations, optimizer in self._offloading(schedule):
                choice = shared._replace(
                    schedule=schedule,
                    virtual=virtual,
                    offload_activations=activations,
                    offload_optimizer=optimizer,
                )
                yield self._bound(shape, choice, schedule), choice

    def _work(self, choice: Choice) -> Work:
        """A micro-batch of the layout, for layers without windows that recompute nothing."""
        return work_of(self.estimate.sizes(choice).config)

    def _pinned(self, key: str, otherwise: Any) -> Any:
        return [self.pins[key]] if key in self.pins else otherwise()

    def _tensor(self) -> list[int]:
        model, node = self.model, self.timer.cluster.gpus_per_node
        sizes = (model.heads, model.kv_heads, model.ffn, model.vocab_size, model.sequence_length)
        return [tp for tp in every_divisor(self.gpus) if tp <= node and not any(size % tp for size in sizes)]

    def _context(self, tp: int) -> list[int]:
        length = self.model.sequence_length
        fitting = every_divisor(self.gpus // tp)
        return [cp for cp in fitting if cp == 1 or (cp <= LARGEST_CP and length // cp >= SHORTEST)]

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

    def _with_batches(self, tp: int, cp: int, method: Method, pp: int, dp: int) -> Iterator[Choice]:
        each = self.config.batch.global_ // dp
        micros = [micro for micro in every_divisor(each) if micro <= LARGEST_MICRO]
        for micro in self._pinned("batch.micro", lambda: micros):
            if each % micro:
                continue
            for recompute in self._recompute():
                yield Choice(
                    tp, cp, method, pp, micro, recompute, "1f1b", None, 1, dp, "zero3", self.offload, self.offload
                )

    def _recompute(self) -> list[Recomputed]:
        found: list[Recomputed] = self._pinned("train.recompute", lambda: ["none", "selective", "full"])
        compiled = self.config.train.compile
        return [mode for mode in found if not (compiled and mode == "selective")]

    def _shape(self, first: Choice) -> Shape:
        m = self.config.batch.global_ // (first.shards * first.micro)
        passes = self._passes(self._work(first), first)
        fullest = -(-passes.layers // first.pp)  # layers of some rank
        bound = m * max((passes.there + passes.back) / first.pp, fullest * passes.shortest)
        return Shape(first, m, first.shards, passes, bound)

    def _passes(self, base: Work, choice: Choice) -> Passes:
        """Seconds of the model's passes for a micro-batch."""
        key = base, choice.recompute
        if key not in self._times:
            times = {
                kind: self.timer.layer(
                    replace(base, recompute=mode_of(choice), window=kind.attention.window_in(base.sequence))
                )
                for kind in self.kinds
            }
            each = [times[kind] for kind in layer_kinds(self.model)]
            embedding, head = self.timer.ends(base)
            self._times[key] = Passes(
                tuple(accumulate((time.forward.total for time in each), initial=0.0)),
                tuple(accumulate((time.backward.total for time in each), initial=0.0)),
                (embedding.forward.total, embedding.backward.total),
                (head.forward.total, head.backward.total),
                sum(time.weights for time in each) + head.weights,
            )
        return self._times[key]

    def _schedules(self, first: Choice) -> Iterator[tuple[str, int | None]]:
        """Schedules and virtual stages. Halves of backward keep for W what full recompute has made again."""
        pp = first.pp
        key, of = "parallel.pipeline.schedule", "parallel.pipeline.virtual_stages"
        if key in self.pins and self.pins[key] not in NAMES:
            yield self.pins[key], self.pins.get(of)
            return
        if pp == 1 and key not in self.pins:
            yield "1f1b", None
            return
        splits = not self.config.train.compile and first.recompute != "full"
        names = ["1f1b", "interleaved_1f1b", *(["zb_h1", "zb_h2", "zbv", "dualpipev"] if splits else [])]
        for name in self._pinned(key, lambda: names):
            if name == "interleaved_1f1b":
                for virtual in self._pinned(of, lambda: VIRTUAL):
                    if virtual is None or pp * virtual <= self.model.layers:
                        yield name, virtual
            elif pp * SCHEDULES[name] <= self.model.layers and self.pins.get(of) in (None, SCHEDULES[name]):
                yield name, None

    def _modes(self, shape: Shape) -> list[DataMode]:
        if shape.dp * shape.choice.cp == 1:
            return list(self._pinned("parallel.data.mode", lambda: ["zero1"]))
        once = shape.micro_batches == 1  # gradients are reduced once in any case
        return list(self._pinned("parallel.data.mode", lambda: ["ddp", "zero1", *([] if once else ["zero2"]), "zero3"]))

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
        shard = self.pins.get("parallel.dp_shard")
        return [n for n in found if n and shape.dp % n == 0 and shard in (None, shape.dp // n)]

    def _offloading(self, schedule: str) -> Iterator[tuple[bool, bool]]:
        either = [False, True] if self.offload else [False]
        free = [False] if self.config.train.compile or schedule in SPLITTING else either
        for activations in self._pinned("train.offload_activations", lambda: free):
            for optimizer in self._pinned("optim.offload", lambda: either):
                yield activations, optimizer

    def _bound(self, shape: Shape, choice: Choice, schedule: str | None) -> float:
        """Seconds that a step takes at least: those of the busiest rank, and of what it waits for.

        schedule: None for the best there may be.
        """
        pp, m, passes = shape.choice.pp, shape.micro_batches, shape.passes
        forward, backward, constants = passes.there, passes.back, self.timer.constants
        data = self._exchanges(choice)
        gathered, reduced, summed = data.layers
        if choice.mode == "zero3":
            forward, backward = beside(forward, gathered, constants), beside(backward, gathered, constants)
        busy = max(shape.bound, m * (forward + backward) / pp)
        whole, splits, slower = schedule in (*PLAIN, "interleaved_1f1b"), schedule in SPLITTING, 0.0
        if choice.mode in ("zero2", "zero3"):  # halves of a backward pass have sums over replicas each time
            slower = whole * constants.overlap * min(passes.shortest_backward, data.layer[1])
            busy = max(busy + m * slower * passes.layers / pp, m * (reduced + splits * summed) / pp)
        if schedule is None:  # ranks wait for the first forward pass, half of it on average
            virtual = max(1, min(max(VIRTUAL), passes.layers // pp))
            first = passes.layers // (pp * virtual)  # layers of the first stage, at least
            busy += (pp - 1) / (2 * pp) * first * pp / passes.layers * passes.forward[-1]
            return busy + self._start(shape, choice, data, first) + self._update(shape, choice, 0)
        found, around, first = self._chains(shape, choice, whole)
        edge, slows = self._gathering(shape, choice, data)
        hop, once = self._hop(shape.choice), 0.0
        if whole and choice.mode in ("ddp", "zero1"):  # the last backward passes are slower
            once = constants.overlap * min(passes.shortest_backward, data.layer[1] + data.layer[2])
        starts, ends = self._start(shape, choice, data, first), self._end(shape, choice, data, first) if whole else 0.0
        starved = self._starved(choice, m) * passes.shortest / 3 * (passes.layers // pp // 2)
        most = self._way(shape, choice, whole) + found[0].stages * pp * 2 * edge
        for each in found:
            computes = m * (each.busy + each.layers * (slower + slows) + each.stages * 2 * edge)
            waits = each.wait + max(starved, each.before * edge + each.hops * hop) + each.behind * once
            most = max(most, computes + waits + splits * each.ends * (data.layer[1] + data.layer[2]))
        busy = max(busy, starts + most + ends)
        if choice.mode in ("ddp", "zero1"):
            for turn in around:
                busy = max(busy, starts + turn.seconds(m, data, hop, constants.overlap) + ends)
        cut = CUT if m > ROUNDS * pp else 1.0
        return cut * busy + self._update(shape, choice, max(each.layers for each in found))

    def _start(self, shape: Shape, choice: Choice, data: Exchanged, first: int) -> float:
        """Seconds until the first of the pipeline's stages, of `first` layers, has the weights that it waits for."""
        if choice.mode == "zero3":
            return 0.0  # every pass waits
        passes, ends, one = shape.passes, data.end[0], shape.choice.pp == 1
        if choice.offload_activations:  # which makes passes longer
            return ends
        computes = passes.forward[first] + passes.embedding[0] + one * passes.head[0]
        return ends + max(0.0, (1 + one) * ends + first * data.layer[0] - computes)

    def _end(self, shape: Shape, choice: Choice, data: Exchanged, first: int) -> float:
        """Seconds of reductions after the last backward pass, which is whole and of the first stage."""
        passes, overlap, one = shape.passes, self.timer.constants.overlap, shape.choice.pp == 1
        back = passes.backward[first] + passes.embedding[1] + one * passes.head[1]
        reduced = (1 + one) * (data.end[1] + data.end[2]) + first * (data.layer[1] + data.layer[2])
        if choice.offload_activations:
            return 0.0
        if choice.mode == "zero3":  # whose gathers make the pass longer
            back += (2 + one) * data.end[0] + (first + 1) * data.layer[0]
        return max(0.0, reduced - (1 + overlap) * back)

    def _gathering(self, shape: Shape, choice: Choice, data: Exchanged) -> tuple[float, float]:
        """With weights gathered for each pass: seconds that a stage waits, and by which both passes of a layer slow."""
        if choice.mode != "zero3":
            return 0.0, 0.0
        layer = data.layer[0]
        slows = sum(beside(each, layer, self.timer.constants) - each for each in shape.passes.longest)
        return min(layer, data.end[0]), 0.0 if choice.offload_activations else slows

    def split(self, choice: Choice) -> tuple[Sequence[int], Sequence[int]]:
        """Layers per stage of a layout, and the rank of each stage."""
        pipeline = choice.pp, choice.schedule, choice.virtual
        if pipeline not in self._splits:
            config = choice.applied(self.config, self.pins)
            self._splits[pipeline] = split_of(config), placement(config)
        return self._splits[pipeline]

    def _way(self, shape: Shape, choice: Choice, whole: bool) -> float:
        """Seconds of a micro-batch on its way through all stages and back, where weight gradients can wait.

        All others go through the last stage after it.
        """
        passes, turns = shape.passes, 1 if choice.schedule in V_SHAPED else 0
        stages = choice.pp * (2 if turns else choice.virtual or 1)
        if choice.schedule == "interleaved_1f1b":
            stages = choice.pp * (choice.virtual or 2)
        hops = (stages - 1 - turns) * (choice.pp > 1)
        others = (shape.micro_batches - 1) * sum(passes.head)
        if not whole:
            others = -passes.weights
        return passes.there + passes.back + others + 2 * hops * self._hop(shape.choice)

    def _hop(self, first: Choice) -> float:
        """Seconds to send a micro-batch's activations to the next pipeline rank."""
        if first.pp == 1:
            return 0.0
        return self.timer.net.transfer(self.estimate.sizes(first).stream, self.gpus // first.pp)

    def _update(self, shape: Shape, choice: Choice, layers: int) -> float:
        """Seconds of the optimizer, on a rank that has its share of the model and at least so many layers.

        layers: 0 where the layout is still open.
        """
        model, pp = self.model, shape.choice.pp
        each = min(self.estimate.layer_parameters.values())
        held = max(layers * each, (shape.passes.layers * each + 2 * model.vocab_size * model.width) / pp) / choice.tp
        shards = choice.shards * choice.cp if choice.mode != "ddp" else 1
        offloads = (False, True) if layers == 0 and self.offload else (choice.offload_optimizer,)
        return held / shards * min(self._updating[offloaded] for offloaded in offloads)

    def _starved(self, choice: Choice, m: int) -> int:
        """Passes of a V's stage for which a rank waits longer, where too few micro-batches fill the pipeline."""
        if choice.schedule not in V_SHAPED:
            return 0
        share = bubble_of(choice.schedule, choice.pp, m, 2)
        return int(6 * m * share / (1 - share)) - (choice.pp - 1)

    def _chains(self, shape: Shape, choice: Choice, whole: bool) -> tuple[list[Chain], list[Turns], int]:
        """What pipeline ranks wait for and do, and the layers of the first stage."""
        split, owners = self.split(choice)
        key = shape.choice, choice.schedule, choice.virtual
        if key not in self._waits:
            around = list[Turns]()
            if choice.schedule == "interleaved_1f1b" and choice.pp > 1:
                around = turns(shape.passes, split, owners, first_rounds(choice.pp, shape.micro_batches)[0])
            self._waits[key] = chains(shape.passes, split, owners, whole), around
        return *self._waits[key], split[0]

    def _exchanges(self, choice: Choice) -> Exchanged:
        """Seconds to exchange weights and gradients of a micro-batch."""
        key = choice.tp, choice.cp, choice.replicas, choice.shards, choice.mode == "ddp"
        if key not in self._exchanged:
            shared = Shared(choice.applied(self.config, self.pins), self.timer.net)
            each = [shared.times(self.estimate.layer_parameters[kind] / choice.tp) for kind in self.kinds]
            counts = self.kinds.values()
            self._exchanged[key] = Exchanged(
                _three(map(min, zip(*each, strict=True))),
                shared.times(self.model.vocab_size * self.model.width / choice.tp),
                _three(sum(map(mul, counts, times)) for times in zip(*each, strict=True)),
            )
        return self._exchanged[key]


def _three(values: Iterable[float]) -> tuple[float, float, float]:
    one, two, three = values
    return one, two, three
