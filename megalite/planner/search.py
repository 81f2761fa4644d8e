"""The fastest layouts that fit, best first (A*). Imports no torch.

Nodes wait in a heap, the one with the lowest bound of its seconds in front. In turn, a node is a shape, a shape with
its states shared out, a layout with the bound of its time, one with what a short step tells, and one with its time. A
layout that comes to the front with that is the fastest of all that are left, since no bound is lower. Then its memory
is walked through action by action (`plan.memory`); it is a result if it fits.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import accumulate, count
from typing import Any, NamedTuple

from megalite.config.errors import InputError
from megalite.config.schema import Config
from megalite.config.validate import check
from megalite.plan.memory import Memory, each_rank
from megalite.plan.parts import Item
from megalite.plan.pipeline import as_full, can_be_planned, fullest_steps, micro_batches
from megalite.plan.resolved import Plan, resolve
from megalite.plan.total import Total
from megalite.plan.total import fullest as fullest_of
from megalite.plan.walk import Walk, on_device
from megalite.planner.choice import Choice
from megalite.planner.least import Shape
from megalite.planner.predict import Prediction, least_seconds, predict, step_seconds
from megalite.planner.space import Space
from megalite.planner.stages import Timer
from megalite.schedule.actions import Action, Kind
from megalite.schedule.generate import NAMES

WANTED = 10  # results
ALL_RANKS = 16  # of a pipeline: in longer ones, only the first result has the memory of every rank walked through
SHORT = 3  # rounds of a step that is timed first
CLOSELY, ENOUGH = 50, 3  # layouts that are simulated at least, and results, before the rest may stay unproven


@dataclass(frozen=True)
class Result:
    """A layout that fits. memory: bytes of its fullest pipeline rank.

    Of more than ALL_RANKS ranks those that most likely are the fullest are looked at, except for the first result.
    """

    choice: Choice
    prediction: Prediction
    memory: int

    @property
    def seconds(self) -> float:
        return self.prediction.seconds


@dataclass
class Found:
    """What a search found: the layouts that fit, the fastest first. The counts tell how.

    shapes, layouts: with a bound. timed: simulated. walked: whose memory was walked through. unproven: seconds above
    which layouts that were not simulated may rank between the results; the first result is the fastest in any case.
    tightest: of layouts that do not fit, the bytes and the choice of the one that needs least.
    """

    results: list[Result] = field(default_factory=list)
    shapes: int = 0
    layouts: int = 0
    timed: int = 0
    walked: int = 0
    unproven: float = 0.0
    tightest: tuple[float, Choice] | None = None

    def too_large(self, needed: float, choice: Choice) -> None:
        """Take note of a layout that does not fit."""
        if self.tightest is None or needed < self.tightest[0]:
            self.tightest = needed, choice


class Node(NamedTuple):
    """A shape; with its states shared out; (whole) a layout; (plan) one whose time is known about; (timed) exactly."""

    shape: Shape
    choice: Choice | None = None
    whole: bool = False
    plan: Plan | None = None
    timed: bool = False


def search(
    config: Config,
    gpus: int,
    timer: Timer,
    limit: float,
    pins: Mapping[str, Any] | None = None,
    *,
    wanted: int = WANTED,
    offload: bool = False,
    exhaustive: bool = False,
) -> Found:
    """The `wanted` fastest layouts of `config` on `gpus` GPUs that need at most `limit` bytes.

    pins: keys of `choice.SEARCHED` with the values that stay. offload: whether tensors may be moved to host memory.
    exhaustive: simulate every layout and walk through its memory, whatever bounds and estimates say.
    """
    space, found, number = Space(config, gpus, timer, pins or {}, offload), Found(), count()
    room = float("inf") if exhaustive else limit
    heap: list[tuple[float, int, Node]]
    heap = [(shape.bound, next(number), Node(shape)) for shape in space.shapes(room)]
    heapify(heap)
    found.shapes, found.tightest = len(heap), space.tightest
    while heap and (exhaustive or len(found.results) < wanted):
        seconds, _, node = heappop(heap)
        if node.plan is None:
            if len(found.results) >= ENOUGH and found.timed >= CLOSELY and not exhaustive:
                found.unproven = found.unproven or seconds
                continue
            if (closer := _closer(space, node)) > seconds:
                heappush(heap, (closer, next(number), node))
                continue
            for bound, child in _children(space, node, room, found):
                heappush(heap, (bound, next(number), child))
        elif not node.timed:
            heappush(heap, (step_seconds(node.plan, timer), next(number), node._replace(timed=True)))
        elif node.choice is not None and (least := space.estimate.memory(node.choice)) > room:  # was learned meanwhile
            found.too_large(least, node.choice)
        elif node.choice is not None and (plan := _checked(space, node.plan)):
            found.walked += 1
            rank, peak = _likely_fullest(plan, limit)
            needed = on_device(peak)
            space.estimate.learn(node.choice, rank, peak)
            if needed <= limit and (not found.results or node.choice.pp <= ALL_RANKS):
                needed = _all_ranks(plan, timer)
            if needed > limit:
                found.too_large(needed, node.choice)
            else:
                prediction = predict(plan.config, timer.cluster, timer, plan)
                found.results.append(Result(node.choice, prediction, needed))
    return found


def _closer(space: Space, node: Node) -> float:
    """A higher bound of a layout in several stages, if there is one."""
    if not node.whole or node.choice is None or node.choice.pp == 1 or node.choice.schedule not in NAMES:
        return 0.0
    if not can_be_planned(config := node.choice.applied(space.config, space.pins), micro_batches(config)):
        return 0.0
    return space.least.of_schedule(node.shape, node.choice)


def _children(space: Space, node: Node, room: float, found: Found) -> Iterator[tuple[float, Node]]:
    """What a node leads to, with bounds."""
    if node.choice is None:
        for bound, choice in space.sharings(node.shape):
            if space.least_memory(choice, room) <= room:
                yield bound, Node(node.shape, choice)
    elif not node.whole:
        for choice in space.choices(node.shape, node.choice):
            found.layouts += 1
            needed = space.estimate.memory(choice)
            if needed <= room:
                yield space.least.of_layout(node.shape, choice), Node(node.shape, choice, whole=True)
            else:
                found.too_large(needed, choice)
    elif space.estimate.memory(node.choice) > room:  # as was learned meanwhile
        found.too_large(space.estimate.memory(node.choice), node.choice)
    elif plan := _plan(space, node.choice):
        found.timed += 1
        yield least_seconds(plan, space.timer, SHORT), Node(node.shape, node.choice, True, plan)


def _plan(space: Space, choice: Choice) -> Plan | None:
    """The plan of a layout, not checked yet; None if it is too long to be planned, or cannot be."""
    config = choice.applied(space.config, space.pins)
    if not can_be_planned(config, micro_batches(config)):
        return None
    try:
        return resolve(config, split=space.estimate.split(choice))
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


def filled(config: Config, m: int) -> int:
    """Micro-batches of a step that holds as much as one of `m`."""
    pp, schedule = config.parallel.pp, config.parallel.pipeline.schedule
    if schedule not in NAMES or schedule == "gpipe":
        return m
    if schedule == "interleaved_1f1b":
        return as_full(config, m)
    return min(m, {"1f1b": pp + 2, "zb_h1": pp + 2, "zb_h2": 2 * pp}.get(schedule, 3 * pp))


def _likely_fullest(plan: Plan, limit: float) -> tuple[int, Mapping[Item, int]]:
    """The pipeline rank that most likely is the fullest, and its bytes; or the first that needs more than `limit`.

    Looked at are both ends, and of the others those that keep most for backward passes, and that have most layers.
    """
    config = plan.config
    pp, m = config.parallel.pp, filled(config, micro_batches(config))
    kept = _kept_at_once(plan, m)
    layers = [sum(len(plan.layers[stage]) for stage in plan.stages_of(rank)) for rank in range(pp)]
    ranks = {0, pp - 1, kept.index(max(kept)), layers.index(max(layers))}
    found = most = 0
    inputs = micro_batches(config) * plan.sizes.inputs
    for rank in sorted(ranks, key=lambda rank: -kept[rank]):
        needed = Total(plan, m, rank).most_bytes() + inputs
        if needed > most:
            found, most = rank, needed
        if needed > limit:
            break
    return found, Walk(plan, m, found).run() | {("activations", "inputs"): inputs}


def _kept_at_once(plan: Plan, m: int) -> list[int]:
    """By rank: bytes that layers keep for backward passes at most, and for W what the other half leaves."""
    of_layer = {}
    for layer in {layer for stage in range(plan.stages) for layer in plan.recomputed(stage)}:
        part = plan.sizes.layer(*layer)
        left = sum(sum(held.values()) for held in part.put_off.values())
        of_layer[layer] = sum(each.bytes for each in part.kept), left
    changes = []
    for stage in range(plan.stages):
        kept, left = (sum(of_layer[layer][what] for layer in plan.recomputed(stage)) for what in (0, 1))
        changes.append({Kind.F: kept, Kind.B: -kept, Kind.I: left - kept, Kind.W: -left})
    programs = ([item for item in program if isinstance(item, Action)] for program in plan.table(m).programs)
    return [
        max(accumulate(changes[item.stage].get(item.kind, 0) for item in program if item.stage < plan.stages))
        for program in programs
    ]


def _all_ranks(plan: Plan, timer: Timer) -> int:
    """Bytes of the fullest of all pipeline ranks."""
    config = plan.config
    steps = {
        m: timer.tables.of(config, m, transfers=True) for m in (as_full(config, each) for each in fullest_steps(config))
    }
    whole = plan.of(config, steps)
    if config.parallel.pipeline.schedule == "gpipe":
        return max(memory.total for memory in each_rank(config, whole))
    return fullest_of(whole, range(config.parallel.pp))


def fullest_rank(config: Config) -> Memory:
    """The memory of the fullest pipeline rank."""
    return max(each_rank(config), key=lambda memory: memory.total)
