"""The predicted time of a training step of a configuration on a cluster. Imports no torch.

The pipeline's own table runs on a clock with the times of its stages (`schedule.simulate`). Of a long step only its
beginning and end are run: in between, every micro-batch adds as much as the one before.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from megalite.config.schema import Config
from megalite.plan.activations import Activations
from megalite.plan.muon import Matrix
from megalite.plan.pipeline import micro_batches
from megalite.plan.resolved import Plan, resolve
from megalite.plan.roles import Kind as Role
from megalite.plan.size import flops_per_token
from megalite.plan.weights import layer_weights
from megalite.planner.hardware import Cluster
from megalite.planner.kernels import Kernels
from megalite.planner.layer import KINDS, Seconds
from megalite.planner.network import Group
from megalite.planner.programs import MEGALITE
from megalite.planner.stages import HOST_SHARE, StageTime, Timer
from megalite.planner.tables import PICTURED, ROUNDS, Cost, costs_of, enough
from megalite.schedule.actions import Kind
from megalite.schedule.simulate import Timeline, simulate

UPDATE_ON_HOST = 28  # bytes that AdamW reads and writes for a parameter in host memory
HOST_MEMORY = 25e9  # bytes/s of host memory that a GPU's process gets; an assumption for eight on a node
MUON_ELEMENT = 2  # bytes of an element that Muon sends
MUON_SHARE = 0.5  # of the rate of large products that the Newton–Schulz iteration reaches; an assumption


@dataclass(frozen=True)
class Prediction:
    """A step of `config` on `cluster`.

    seconds: of a step. spread: half the width of the interval, relative. parts: seconds of the busiest pipeline rank by
    what takes them: those of `layer.Seconds`, "bubble" (waiting for other stages), and "optimizer". busy: by rank,
    seconds in which it computes. stages: their times.
    """

    config: Config
    cluster: Cluster
    plan: Plan
    seconds: float
    spread: float
    parts: Mapping[str, float]
    busy: tuple[float, ...]
    stages: tuple[StageTime, ...]

    @property
    def low(self) -> float:
        return self.seconds / (1 + self.spread)

    @property
    def high(self) -> float:
        return self.seconds * (1 + self.spread)

    @property
    def gpus(self) -> int:
        return self.config.parallel.layout.world_size

    @property
    def step_tokens(self) -> int:
        return self.config.batch.global_ * self.config.model.sequence_length

    @property
    def tokens_per_second(self) -> float:
        """Of one GPU."""
        return self.step_tokens / self.seconds / self.gpus

    @cached_property
    def mfu(self) -> float:
        """Model FLOPs utilization, with causal attention counted as the half that is computed."""
        return self._utilization(flops_per_token(self.config.model, "causal"))

    @cached_property
    def mfu_full(self) -> float:
        """The same with attention counted in full, as Megatron-LM and PaLM do."""
        return self._utilization(flops_per_token(self.config.model, "full"))

    def _utilization(self, flops: int) -> float:
        peak = self.cluster.gpu.peak
        return flops * self.tokens_per_second / peak.get(self.config.train.precision, peak["bf16"])

    @property
    def bubble(self) -> float:
        """The share of a step in which the busiest pipeline rank waits for others."""
        return self.parts["bubble"] / self.seconds

    @property
    def exposed(self) -> float:
        """The share of a step in which communication is not hidden."""
        return sum(self.parts[kind] for kind in ("tensor", "context", "data")) / self.seconds


def predict(config: Config, cluster: Cluster, timer: Timer | None = None, plan: Plan | None = None) -> Prediction:
    """The prediction for a checked `config`, in which `parallel.dp_shard` and `batch.micro` are numbers.

    timer: of the cluster, where several are predicted. Raises InputError for a schedule that cannot run.
    """
    timer = timer or Timer(cluster)
    plan = plan or resolve(config)
    stages = timer.stages(plan)
    m = micro_batches(config)
    makespan, tail = _time(plan, stages, timer, m)
    update = _update(plan, stages, timer)
    undivided = not timer.tables.of(config, enough(config, m)).splits_backward
    busy = [_busy(plan, stages, undivided, rank, m) for rank in range(config.parallel.pp)]
    busiest = max(busy, key=lambda seconds: seconds.total)
    parts = {kind: getattr(busiest, kind) for kind in KINDS}
    parts["data"] += tail
    parts["bubble"] = max(0.0, makespan - busiest.total - tail)
    parts["optimizer"] = update
    return Prediction(
        config,
        cluster,
        plan,
        makespan + update,
        timer.constants.spread,
        parts,
        tuple(seconds.total for seconds in busy),
        tuple(stages),
    )


def step_seconds(plan: Plan, timer: Timer, rounds: int = ROUNDS) -> float:
    """`predict`'s seconds alone, which take less time to find; with fewer `rounds` about, and in less time still."""
    stages = timer.stages(plan)
    return _time(plan, stages, timer, micro_batches(plan.config), rounds)[0] + _update(plan, stages, timer)


def timeline(prediction: Prediction, timer: Timer) -> Timeline:
    """When every action runs in a step that is cut short after PICTURED rounds, for pictures."""
    config = prediction.config
    table = timer.tables.of(config, enough(config, micro_batches(config), PICTURED))
    of = costs_of(table)
    return simulate(table, lambda action: seconds_of(of(action), prediction.stages), transfer_seconds(config, timer))


def _time(plan: Plan, stages: Sequence[StageTime], timer: Timer, m: int, rounds: int = ROUNDS) -> tuple[float, float]:
    """Seconds of a step of `m` micro-batches without the update; and of them, those after all compute."""
    config = plan.config
    few, pp, transfer = enough(config, m, rounds), config.parallel.pp, transfer_seconds(config, timer)

    def run(m: int) -> tuple[float, float]:
        clock = timer.tables.clock(config, m)
        return clock.run([seconds_of(cost, stages) for cost in clock.classes], transfer)

    end, computed = run(few)
    more = (m - few) * (end - run(few - pp)[0]) / pp if few < m else 0.0
    return end + more, end - computed


def seconds_of(cost: Cost, stages: Sequence[StageTime]) -> float:
    """How long an action takes."""
    stage = stages[cost.stage]
    match cost.kind:
        case Kind.F:
            return stage.forward.total
        case Kind.B:
            return stage.backward.total + (stage.slowed(cost.last) if cost.reduces else 0.0)
        case Kind.I:
            return stage.backward.total - stage.weights
        case Kind.W:
            return stage.weights
        case Kind.GATHER:
            return stage.gather
        case Kind.REDUCE:
            return stage.reducing(cost.last) if cost.split else stage.left(cost.last)
    return 0.0


def _busy(plan: Plan, stages: list[StageTime], whole: bool, rank: int, m: int) -> Seconds:
    """The time in which a rank computes in a step of `m` micro-batches, slowed by reductions beside it.

    whole: whether backward passes are, so that reductions run beside them.
    """
    found = Seconds()
    each_time = plan.config.parallel.data.mode in ("zero2", "zero3")
    for stage in plan.stages_of(rank):
        time = stages[stage]
        found += (time.forward + time.backward) * m
        if whole:
            found += Seconds(data=time.slowed(True) + (m - 1) * time.slowed(False) * each_time)
    return found


def transfer_seconds(config: Config, timer: Timer) -> float:
    """Seconds to send a micro-batch's activations to the next stage."""
    layout = config.parallel.layout
    if layout.pp == 1:
        return 0.0
    return timer.net.transfer(Activations(config).stream, layout.world_size // layout.pp)


def _update(plan: Plan, stages: Sequence[StageTime], timer: Timer) -> float:
    """Seconds of the optimizer on the fullest rank."""
    config = plan.config
    layout = config.parallel.layout
    shards = layout.dp_shard * layout.cp if config.parallel.data.sharded else 1
    held = max(sum(stages[stage].parameters for stage in plan.stages_of(rank)) for rank in range(layout.pp))
    seconds = adamw_seconds(held / shards, config.optim.offload, timer)
    if config.optim.name == "muon":
        ranks = layout.world_size // layout.pp
        sent = timer.net.collective("all_to_all", MUON_ELEMENT * held, Group(ranks, 1))
        rate = Kernels(timer.cluster.gpu, timer.constants).rate("bf16")
        seconds += _orthogonalizing(plan, ranks) / (rate * MUON_SHARE) + 2 * sent
    return seconds


def adamw_seconds(count: float, offloaded: bool, timer: Timer) -> float:
    """Seconds to update `count` parameters with AdamW, whose states may be in host memory."""
    gpu = timer.cluster.gpu
    kernels = Kernels(gpu, timer.constants)
    if offloaded:
        moved = 2 * 4 * count / (gpu.host * HOST_SHARE)
        return moved + count * UPDATE_ON_HOST / HOST_MEMORY + kernels.passes(4 * count)
    return kernels.passes(count * MEGALITE.optimizer)


def _orthogonalizing(plan: Plan, ranks: int) -> int:
    """FLOPs of Muon on the rank that has most of them: an even share, or the largest matrix."""
    model, steps = plan.config.model, plan.config.optim.muon.steps
    most = 0
    for rank in range(plan.config.parallel.pp):
        matrices = [
            Matrix((weight.shape[0], weight.shape[1]), (), steps).flops
            for stage in plan.stages_of(rank)
            for layer in plan.layers[stage]
            for _, weight in layer_weights(model, plan.kinds[layer])
            if weight.role.kind is Role.MATRIX
        ]
        most = max(most, -(-sum(matrices) // ranks), max(matrices, default=0))
    return most
