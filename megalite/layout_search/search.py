"""The fastest layouts that fit, best first (A*). Imports no torch.

Nodes wait in a heap, the one with the lowest bound of its seconds in front. In turn, a node is a shape, a shape with a
schedule, a layout with the bound of its time, one with what the beginning of its step tells, and one with its time. A
layout that comes to the front with that is the fastest of all that are left, since no bound is lower. Then its memory
is walked through layer by layer (`plan.total`); it is a result if it fits.
"""

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import IntEnum, auto
from heapq import heappop, heappush
from itertools import accumulate, count
from math import inf
from operator import itemgetter
from typing import Any, NamedTuple

from megalite.base.errors import InputError
from megalite.config.rules.validate import check
from megalite.config.schema import Config
from megalite.cost.layout_choice import Choice
from megalite.cost.predict import Prediction, Trial, predict
from megalite.cost.schedule_tables import filled
from megalite.cost.stages import Timer
from megalite.layout_search.shape import Shape
from megalite.layout_search.space import Space
from megalite.layout_search.uneven_splits import MAX_LIMIT_FACTOR
from megalite.plan.memory.peak import Memory, each_rank
from megalite.plan.memory.total import Total
from megalite.plan.memory.total import fullest as fullest_of
from megalite.plan.pipeline import as_full, can_be_planned, fullest_steps, micro_batches
from megalite.plan.resolved import Plan, resolve
from megalite.schedule.actions import Action, Kind
from megalite.schedule.generate import NAMES

RESULT_COUNT = 10
MAX_WALKED_RANKS = 16  # ranks of a pipeline: in longer ones, all ranks are walked through for the first result only


@dataclass(frozen=True)
class Result:
    """A layout that fits. memory: bytes of its fullest pipeline rank.

    With more than MAX_WALKED_RANKS, only those most likely to be the fullest are looked at, but for the first result.
    """

    choice: Choice
    prediction: Prediction
    memory: int

    @property
    def seconds(self) -> float:
        return self.prediction.seconds


@dataclass
class Found:
    """Result of a search: the layouts that fit, the fastest first, and counts of layouts on the way.

    layouts: with a bound. timed: simulated. walked: whose memory was walked through.
    tightest: of layouts that do not fit, the bytes and the choice of the one that needs least.
    """

    results: list[Result] = field(default_factory=list)
    layouts: int = 0
    timed: int = 0
    walked: int = 0
    tightest: tuple[float, Choice] | None = None
    _layouts: set[Choice] = field(default_factory=set)  # layouts of the results, whatever their splits

    def add(self, result: Result) -> None:
        """Take a result, with the fastest split of its layout."""
        self.results.append(result)
        self._layouts.add(result.choice._replace(split=None))

    def has(self, node: "Node") -> bool:
        """Return whether the layout of a node is among the results with another split."""
        return bool(self._layouts) and node.level > Level.MOVED and node.choice._replace(split=None) in self._layouts

    def fits(self, needed: float, choice: Choice, room: float) -> bool:
        """Return whether a layout fits into `room` bytes; if not, take note of it."""
        if needed > room:
            self.too_large(needed, choice)
        return needed <= room

    def too_large(self, needed: float, choice: Choice) -> None:
        """Take note of a layout that does not fit."""
        if self.tightest is None or needed < self.tightest[0]:
            self.tightest = needed, choice


class Level(IntEnum):
    """Degree to which a node has been examined."""

    SHAPE = auto()  # leads to the one that recomputes more, too
    SHARINGS = auto()  # a shape with the best bound of how its states may be shared out
    PIPELINE = auto()  # and with a schedule
    MOVED = auto()  # likewise, of layouts with moved layers
    UNSPLIT = auto()  # one of these layouts, for which a split is looked for
    SHARED = auto()  # a layout, with the bounds of its pipeline and of how its states are shared out
    BOUNDED = auto()  # with a bound of its own
    CHAINED = auto()  # and one from its schedule
    ABOUT = auto()  # its time is known approximately
    TIMED = auto()


class Node(NamedTuple):
    """A layout, or several. choice: theirs, or of a first one. trial: of one whose time is known about."""

    level: Level
    shape: Shape
    choice: Choice
    trial: Trial | None = None


def search(
    config: Config,
    gpus: int,
    timer: Timer,
    limit: float,
    pins: Mapping[str, Any] | None = None,
    *,
    wanted: int = RESULT_COUNT,
    offload: bool = False,
    exhaustive: bool = False,
    tell: Callable[[Found], object] = lambda _: None,
) -> Found:
    """The `wanted` fastest layouts of `config` on `gpus` GPUs that need at most `limit` bytes.

    pins: keys of `choice.SEARCHED` with the values that stay. offload: whether tensors may be moved to host memory.
    exhaustive: simulate every layout and walk through its memory, whatever bounds and estimates say. tell: is called
    with what is found so far, before each walk.
    """
    with _uncollected():
        # If nothing fits, layers are moved however little the default split would fit.
        for missed in (MAX_LIMIT_FACTOR, inf):
            found = Found()
            _look(
                Space(config, gpus, timer, pins or {}, offload, limit, missed), found, limit, wanted, exhaustive, tell
            )
            if found.results:
                break
    return found


@contextmanager
def _uncollected() -> Iterator[None]:
    """Pause the garbage collector: of a hundred thousand nodes it would find none, in a fifth of the time."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _look(
    space: Space, found: Found, limit: float, wanted: int, exhaustive: bool, tell: Callable[[Found], object]
) -> None:
    """Search the space, and fill `found` with results."""
    number, room = count(), float("inf") if exhaustive else limit
    heap: list[tuple[float, int, Node]] = []
    firsts = sorted(space.firsts(room), key=itemgetter(0), reverse=True)
    while (heap or firsts) and (exhaustive or len(found.results) < wanted):
        while firsts and (not heap or firsts[-1][0] <= heap[0][0]):
            shape = space.shape(firsts.pop()[1])
            heappush(heap, (shape.bound, next(number), Node(Level.SHAPE, shape, shape.choice)))
        seconds, _, node = heappop(heap)
        if found.has(node):
            continue
        if node.trial is not None and node.level is Level.TIMED:
            tell(found)
            if result := _walked(space, node.choice, node.trial.plan, limit, found):
                found.add(result)
            continue
        for bound, child in _closer(space, node, room, found):
            heappush(heap, (max(bound, seconds) if child.level < Level.TIMED else bound, next(number), child))
    if not found.results and (tightest := space.tightest(room)):
        found.too_large(*tightest)


def _closer(space: Space, node: Node, room: float, found: Found) -> Iterator[tuple[float, Node]]:
    """Yield the nodes that a node leads to, with bounds."""
    shape, choice = node.shape, node.choice
    if node.trial is not None:
        yield node.trial.seconds, node._replace(level=Level.TIMED)
        return
    match node.level:
        case Level.SHAPE:
            if (more := space.recomputing(shape, room)) is not None:
                yield more.bound, Node(Level.SHAPE, more, more.choice)
            if sharings := space.sharings(shape, room):
                yield min(bound for bound, _ in sharings), node._replace(level=Level.SHARINGS)
        case Level.SHARINGS:
            for pipeline in space.pipelines(choice):
                needed = space.estimate.memory(pipeline)
                if found.fits(needed, pipeline, room):
                    yield space.least.of_pipeline(shape, pipeline), Node(Level.PIPELINE, shape, pipeline)
                if (bound := space.moves.of_pipeline(shape, pipeline, needed)) is not None:
                    yield bound, Node(Level.MOVED, shape, pipeline)
        case Level.PIPELINE:
            layouts = list(space.layouts(shape, choice, room))
            found.layouts += len(layouts)
            needs = space.estimate.memories([layout for _, layout in layouts])
            for (bound, layout), needed in zip(layouts, needs, strict=True):
                if found.fits(needed, layout, room):
                    yield bound, Node(Level.SHARED, shape, layout)
        case Level.MOVED:
            for bound, layout in space.moves.wanted(shape, choice, space.layouts(shape, choice, room)):
                yield bound, Node(Level.UNSPLIT, shape, layout)
        case Level.UNSPLIT:
            for bound, split in space.moves.splits(shape, choice):
                layout = choice._replace(split=split)
                found.layouts += 1
                if found.fits(space.estimate.memory(layout), layout, room):
                    yield bound, Node(Level.SHARED, shape, layout)
        case Level.SHARED:
            yield space.least.of_layout(shape, choice), node._replace(level=Level.BOUNDED)
        case Level.BOUNDED:
            if found.fits(space.estimate.of_actions(choice, space.timer.tables, room), choice, room):
                chained = choice.pp > 1 and choice.schedule in NAMES
                bound = space.least.of_schedule(shape, choice) if chained else 0.0
                yield bound, node._replace(level=Level.CHAINED)
        case _:
            if plan := _plan(space, choice):
                found.timed += 1
                trial = Trial(plan, space.timer)
                with suppress(InputError):  # an order that is searched may have no memory to be in
                    yield trial.least, node._replace(level=Level.ABOUT, trial=trial)


def _walked(space: Space, choice: Choice, planned: Plan, limit: float, found: Found) -> Result | None:
    """A timed layout, if it fits."""
    if not (plan := _checked(space, planned)):
        return None
    found.walked += 1
    needed = 0 if choice.pp <= MAX_WALKED_RANKS else _likely_fullest(plan, limit)
    if needed <= limit and (not found.results or choice.pp <= MAX_WALKED_RANKS):
        needed = _all_ranks(plan, space.timer, limit)
    if not found.fits(needed, choice, limit):
        return None
    return Result(choice, predict(plan.config, space.timer.cluster, space.timer, plan), needed)


def _plan(space: Space, choice: Choice) -> Plan | None:
    """The plan of a layout, not checked yet; None if it is too long to be planned, or cannot be."""
    config = choice.applied(space.config, space.pins)
    if not can_be_planned(config, micro_batches(config)):
        return None
    try:
        return resolve(config, split=space.estimate.split(choice), costing=space.timer.costs)
    except InputError:
        return None


def _checked(space: Space, plan: Plan) -> Plan | None:
    """The plan with its checked configuration, and the schedule that memory is walked through; None if it cannot
    run."""
    try:
        config = check(plan.config, space.gpus)
        few = filled(config, micro_batches(config))
        return plan.of(config, {few: space.timer.tables.of(config, few, transfers=True)})
    except InputError:
        return None


def _likely_fullest(plan: Plan, limit: float) -> int:
    """Bytes of the pipeline rank that most likely is the fullest; or of the first that needs more than `limit`.

    Looked at are both ends, and of the others the two that keep most for backward passes, and the one that has most
    layers.
    """
    config = plan.config
    pp, m = config.parallel.pp, filled(config, micro_batches(config))
    kept = _kept_at_once(plan, m)
    layers = [sum(len(plan.layers[stage]) for stage in plan.stages_of(rank)) for rank in range(pp)]
    fullest = sorted(range(pp), key=lambda rank: -kept[rank])
    ranks = {0, pp - 1, *fullest[:2], layers.index(max(layers))}
    most, inputs = 0, micro_batches(config) * plan.sizes.inputs
    for rank in sorted(ranks, key=fullest.index):
        most = max(most, Total(plan, m, rank).most_bytes() + inputs)
        if most > limit:
            break
    return most


def _kept_at_once(plan: Plan, m: int) -> list[int]:
    """By rank: bytes that layers keep for backward passes at most, and for W what the other half leaves."""
    of_layer = {}
    for layer in {layer for stage in range(plan.stages) for layer in plan.recomputed(stage)}:
        part = plan.sizes.layer(*layer)
        of_layer[layer] = part.kept_bytes, part.put_off_bytes
    changes = []
    for stage in range(plan.stages):
        kept, left = (sum(of_layer[layer][what] for layer in plan.recomputed(stage)) for what in (0, 1))
        changes.append({Kind.F: kept, Kind.B: -kept, Kind.I: left - kept, Kind.W: -left})
    programs = ([item for item in program if isinstance(item, Action)] for program in plan.table(m).programs)
    return [
        max(accumulate(changes[item.stage].get(item.kind, 0) for item in program if item.stage < plan.stages))
        for program in programs
    ]


def _all_ranks(plan: Plan, timer: Timer, limit: float = inf) -> int:
    """Bytes of the fullest of all pipeline ranks; or of one that needs more than `limit`, if any does."""
    config = plan.config
    steps = {
        m: timer.tables.of(config, m, transfers=True) for m in (as_full(config, each) for each in fullest_steps(config))
    }
    whole = plan.of(config, steps)
    if config.parallel.pipeline.schedule == "gpipe":
        return max(memory.total for memory in each_rank(config, whole))
    kept, most = _kept_at_once(whole, max(steps)), 0
    for rank in sorted(range(config.parallel.pp), key=lambda rank: -kept[rank]):
        most = max(most, fullest_of(whole, [rank]))
        if most > limit:
            break
    return most


def fullest_rank(config: Config, timer: Timer) -> Memory:
    """The memory of the fullest pipeline rank. timer: of the cluster for which `schedule: auto` searches."""
    plan = resolve(config, costing=timer.costs)
    return max(each_rank(config, plan), key=lambda memory: memory.total)
