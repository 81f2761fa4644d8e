"""What the ranks of a layout send each other in a step, group by group. Imports no torch.

The amounts are those that the time model counts (`layer`, `stages`), on the busiest pipeline rank.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from megalite.plan.activations import Activations
from megalite.plan.pipeline import micro_batches
from megalite.plan.size import layer_parameters
from megalite.planner.network import Collective, Group
from megalite.planner.predict import MUON_ELEMENT, Prediction
from megalite.planner.programs import MEGALITE
from megalite.planner.stages import Shared, Timer, work_of

AGAIN = (
    1.5 if MEGALITE.gathers_again else 1.0
)  # times of tensor-parallel communication in backward, in those of forward
# All-gathers of keys and values, or reductions of their gradients, that take as long: forward, backward.
KEYS = {"ring": (1, 2), "all_gather": (1, 3), "ulysses": (1, 1)}


@dataclass(frozen=True)
class Flow:
    """The communication of one kind of group.

    what: it moves. bandwidth: bytes/s that each rank of the group can send. sent: bytes that a rank sends in a step.
    seconds: that this would take alone. exposed: seconds by which it makes a step longer; None where the prediction
    counts it within `part`, a part of `Prediction.parts` or another flow.
    """

    axis: str
    what: str
    group: Group
    bandwidth: float
    sent: float
    seconds: float
    exposed: float | None
    part: str = ""

    @property
    def ranks(self) -> range:
        """The ranks of the group that rank 0 is in."""
        return range(0, self.group.size * self.group.stride, self.group.stride)


class _Counter:
    """Adds up the collectives of one group."""

    def __init__(self, timer: Timer, group: Group) -> None:
        self.net, self.group, self.sent, self.seconds = timer.net, group, 0.0, 0.0

    def add(self, kind: Collective, whole: float, times: float) -> None:
        rounds = 2 if kind == "all_reduce" else 1
        self.sent += times * rounds * (self.group.size - 1) / self.group.size * whole
        self.seconds += times * self.net.collective(kind, whole, self.group)

    def flow(self, axis: str, what: str, exposed: float | None, part: str = "") -> Flow:
        return Flow(axis, what, self.group, self.net.bandwidth(self.group), self.sent, self.seconds, exposed, part)


def flows(prediction: Prediction, timer: Timer) -> list[Flow]:
    """One flow for each kind of group that has more than one rank."""
    return [flow for flow in _all(prediction, timer) if flow.group.size > 1]


def _all(prediction: Prediction, timer: Timer) -> Iterator[Flow]:
    rank = max(range(len(prediction.busy)), key=prediction.busy.__getitem__)
    yield _tensor(prediction, timer, rank)
    yield _context(prediction, timer, rank)
    yield from _data(prediction, timer, rank)
    yield _pipeline(prediction, timer, rank)
    if prediction.config.optim.name == "muon":
        yield _muon(prediction, timer)


def _tensor(prediction: Prediction, timer: Timer, rank: int) -> Flow:
    plan, m = prediction.plan, micro_batches(prediction.config)
    tp = prediction.config.parallel.tp
    counter, whole = _Counter(timer, Group(tp, 1)), Activations(prediction.config).stream * tp
    for stage in plan.stages_of(rank):
        for _, mode in plan.recomputed(stage):
            counter.add("all_reduce", whole, 2 * m * (1 + AGAIN + (mode == "full")))
        counter.add("all_gather", whole, 2 * m * ((stage == 0) + (stage == plan.stages - 1)))
    return counter.flow("tp", "activations of every layer", prediction.parts["tensor"])


def _context(prediction: Prediction, timer: Timer, rank: int) -> Flow:
    config, plan, m = prediction.config, prediction.plan, micro_batches(prediction.config)
    base, method = work_of(config), config.parallel.context.method
    counter, (there, back) = _Counter(timer, Group(base.cp, base.tp)), KEYS[method]
    for stage in plan.stages_of(rank):
        for kind, mode in plan.recomputed(stage):
            times = m * (there * (1 + (mode == "full")) + back)
            if method == "ulysses":
                heads = 2 * base.q + 2 * max(base.k, base.cp * base.head_size)
                counter.add("all_to_all", base.element * heads / base.tp * base.tokens, times)
            else:
                work = replace(base, window=kind.attention.window_in(base.sequence))
                seen = min(work.tokens * work.cp, work.micro * (work.window or work.sequence))
                counter.add("all_gather", 2 * work.element * work.k / work.tp * seen, times)
    return counter.flow("cp", f"keys and values ({method})", prediction.parts["context"])


def _data(prediction: Prediction, timer: Timer, rank: int) -> Iterator[Flow]:
    """Shards and replicas.

    What they expose is one number of the prediction. It stands with the shards, if there are any.
    """
    config, plan, m = prediction.config, prediction.plan, micro_batches(prediction.config)
    shared, mode, model = Shared(config, timer.net), config.parallel.data.mode, config.model
    shards, replicas = _Counter(timer, shared.shards), _Counter(timer, shared.replicas)
    gathers = 2 * m if mode == "zero3" else 1
    reductions = m if mode in ("zero2", "zero3") else 1
    for stage in plan.stages_of(rank):
        pieces = [layer_parameters(model, kind).total for kind, _ in plan.recomputed(stage)]
        pieces += [model.vocab_size * model.width] * ((stage == 0) + (stage == plan.stages - 1))
        for piece in pieces:
            held = piece / config.parallel.tp
            shards.add("all_gather", shared.element * held, gathers)
            shards.add("reduce_scatter", shared.gradient * held, reductions)
            replicas.add("all_reduce", shared.gradient * held / shared.shards.size, 1)
    exposed = prediction.parts["data"]
    yield shards.flow("dp shards", f"weights and gradients ({mode})", exposed)
    if shared.shards.size > 1:
        yield replicas.flow("dp replicas", "gradients of each shard", None, "dp shards")
    else:
        yield replicas.flow("dp replicas", "gradients", exposed)


def _pipeline(prediction: Prediction, timer: Timer, rank: int) -> Flow:
    config, plan, m = prediction.config, prediction.plan, micro_batches(prediction.config)
    layout = config.parallel.layout
    group, size, sends = Group(layout.pp, layout.world_size // layout.pp), Activations(config).stream, 0
    for stage in plan.stages_of(rank):
        near = [other for other in (stage - 1, stage + 1) if 0 <= other < plan.stages]
        sends += m * sum(plan.placement[other] != rank for other in near)
    pair = Group(min(2, layout.pp), group.stride)
    seconds = sends * timer.net.transfer(size, group.stride)
    what = "activations and their gradients"
    return Flow("pp", what, group, timer.net.bandwidth(pair), sends * size, seconds, None, "bubble")


def _muon(prediction: Prediction, timer: Timer) -> Flow:
    plan, pp = prediction.plan, prediction.config.parallel.pp
    held = max(sum(prediction.stages[stage].parameters for stage in plan.stages_of(rank)) for rank in range(pp))
    counter = _Counter(timer, Group(prediction.gpus // pp, 1))
    counter.add("all_to_all", MUON_ELEMENT * held, 2)
    return counter.flow("Muon", "matrices to their owners and back", None, "optimizer")
