"""The predicted time of a training step of a configuration on a cluster. Imports no torch.

The pipeline's own table runs on a clock with the times of its stages (`schedule.simulate`). Only the beginning
and end of a long step are run: in between, every micro-batch adds as much as the one before.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from megalite.base.errors import InputError
from megalite.config.schema import Config
from megalite.cost.cluster import Cluster
from megalite.cost.host_copies import HOST_BANDWIDTH, HOST_SHARE
from megalite.cost.layer import KINDS
from megalite.cost.link_clocks import groups, times, total
from megalite.cost.muon import TORCH_SURPLUS, muon_matrices, muon_parameters, muon_seconds
from megalite.cost.rank_seconds import busy_of, pace_of, passes_of, seconds_of, table_of_step
from megalite.cost.schedule_tables import PICTURE_ROUNDS, costs_of, enough
from megalite.cost.slowest_gpu import waiting
from megalite.cost.stages import Shared, StageTime, Timer, expert_parameters, transfer_seconds
from megalite.plan.activations import Activations
from megalite.plan.model.size import flops_per_token
from megalite.plan.pipeline import micro_batches
from megalite.plan.resolved import Plan, resolve
from megalite.schedule.generate import NAMES
from megalite.schedule.simulate import Timeline, simulate

HOST_UPDATE_BYTES = 28  # bytes that AdamW reads and writes for a parameter in host memory
ROUNDING = 1e-12  # relative: what sums of seconds differ by, in which nobody waits


@dataclass(frozen=True)
class Prediction:
    """A step of `config` on `cluster`.

    seconds: of a step. spread: half the width of the interval, relative. parts: seconds of the busiest pipeline rank by
    what takes them: those of `layer.Seconds`, "bubble" (waiting for other stages), "optimizer", and "slowest" (waiting
    for the slowest GPU). busy: by rank, seconds in which it computes. stages: their times.
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
        """Tokens per second of one GPU."""
        return self.step_tokens / self.seconds / self.gpus

    @cached_property
    def mfu(self) -> float:
        """Model FLOPs utilization, with causal attention counted as the half that is computed."""
        return self._utilization(flops_per_token(self.config.model, "causal"))

    @cached_property
    def mfu_full(self) -> float:
        """Model FLOP/s utilization with attention counted in full, as Megatron-LM and PaLM do."""
        return self._utilization(flops_per_token(self.config.model, "full"))

    @property
    def peak(self) -> float:
        """FLOP/s of which utilization is a share; that of bf16 in fp8, too, as both runs are then told alike."""
        peak = self.cluster.gpu.peak
        return peak.get(self.config.train.dtype, peak["bf16"])

    def _utilization(self, flops: int) -> float:
        return flops * self.tokens_per_second / self.peak

    @property
    def bubble(self) -> float:
        """The share of a step in which the busiest pipeline rank waits for others."""
        return self.parts["bubble"] / self.seconds

    @property
    def exposed(self) -> float:
        """The share of a step in which communication is not hidden."""
        return sum(self.parts[kind] for kind in ("tensor", "context", "experts", "data")) / self.seconds


@dataclass(frozen=True)
class Trial:
    """A step of a plan on the clock, looked at as closely as is asked for. Only its beginning and end are run.

    How long a step waits for the slowest GPU is not in it: for all layouts on as many GPUs it is the same share.
    """

    plan: Plan
    timer: Timer

    @property
    def least(self) -> float:
        """Seconds that it takes at least: where a part is left out, each micro-batch what a rank does for it."""
        return self.begun[0] + self.left_out * self.pace + self.update

    @property
    def seconds(self) -> float:
        """`predict`'s seconds but for the wait for the slowest GPU, which take less time to find."""
        return self.makespan + self.update

    @cached_property
    def makespan(self) -> float:
        """Seconds without the update: on the clock, but no less than links need for what they carry."""
        return max(self.clocked, self.sending)

    @cached_property
    def sending(self) -> float:
        """Seconds for which the fullest link of a rank is busy."""
        return sending_seconds(self.plan, self.stages, self.timer)

    @cached_property
    def clocked(self) -> float:
        """Seconds on the clock. Rounds that are left out take as long as those before, or `pace`.

        The latter is too long where the slowest rank waits in these rounds, and would catch up in later ones.
        """
        return self.begun[0] + (self.left_out * max(self.round, self.pace) if self.left_out else 0.0)

    @cached_property
    def round(self) -> float:
        """Seconds that each micro-batch of the last two rounds adds. Two, as rounds may alternate."""
        last = 2 * self.plan.config.parallel.pp
        return (self.begun[0] - self._run(self._few - last)[0]) / last

    @cached_property
    def begun(self) -> tuple[float, float]:
        """Seconds until the last action ends, and until the last compute ends, in the part that is run."""
        return self._run(self._few)

    @cached_property
    def stages(self) -> list[StageTime]:
        return self.timer.stages(self.plan)

    @cached_property
    def update(self) -> float:
        return _update(self.plan, self.stages, self.timer)

    @cached_property
    def left_out(self) -> int:
        """Micro-batches."""
        return micro_batches(self.plan.config) - self._few

    @cached_property
    def _few(self) -> int:
        return enough(self.plan.config, micro_batches(self.plan.config))

    @cached_property
    def pace(self) -> float:
        """Seconds of a micro-batch on the slowest rank."""
        return pace_of(self.plan, self.stages)

    def _run(self, m: int) -> tuple[float, float]:
        config, tables = self.plan.config, self.timer.tables
        named = config.parallel.pipeline.schedule in NAMES
        clock = tables.clock(config, m) if named else tables.clock_of(self.plan.table(m))
        costs = [seconds_of(cost, self.stages) for cost in clock.classes]
        return clock.run(costs, transfer_seconds(self.plan.config, self.timer.net))


def predict(config: Config, cluster: Cluster, timer: Timer | None = None, plan: Plan | None = None) -> Prediction:
    """The prediction for a checked `config`, in which `parallel.dp_shard` and `batch.micro` are numbers.

    timer: of the cluster, where several are predicted. Raises InputError for a schedule that cannot run, and for a step
    that would take more FLOP/s than the peak.
    """
    timer = timer or Timer(cluster)
    plan = plan or resolve(config, costing=timer.costs)
    trial, m = Trial(plan, timer), micro_batches(config)
    stages, makespan, update = trial.stages, trial.makespan, trial.update
    tail = trial.begun[0] - trial.begun[1] + trial.makespan - trial.clocked
    counts = passes_of(plan, timer, m)
    busy = [busy_of(plan, stages, counts, rank, m) for rank in range(config.parallel.pp)]
    busiest = max(busy, key=lambda seconds: seconds.total)
    parts = {kind: getattr(busiest, kind) for kind in KINDS}
    parts |= {"data": parts["data"] + tail, "bubble": 0.0}
    idle = makespan - busiest.total - tail
    waited = "bubble" if config.parallel.pp > 1 else "data"  # without other stages: for the first weights
    parts[waited] += idle if idle > ROUNDING * makespan else 0.0
    parts["optimizer"] = update
    seconds = makespan + update
    parts["slowest"] = seconds * (waiting(cluster.gpu.spread, config.parallel.layout.world_size) - 1)
    found = Prediction(
        config,
        cluster,
        plan,
        seconds + parts["slowest"],
        timer.constants.spread,
        parts,
        tuple(seconds.total for seconds in busy),
        tuple(stages),
    )
    _refuse_impossible(found)
    return found


def _refuse_impossible(found: Prediction) -> None:
    """Raises InputError for more FLOP/s than the peak: figures of the cluster contradict each other."""
    gpu, precision = found.cluster.gpu, found.config.train.precision
    of_peak = found.mfu * found.peak / gpu.peak.get(precision, gpu.peak["bf16"])
    if of_peak <= 1:
        return
    peak, measured = gpu.peak.get(precision, gpu.peak["bf16"]), gpu.measured.get(precision)
    best = "" if measured is None else f", gpu.measured.{precision} = {measured / 1e12:g}"
    raise InputError(
        f"cluster {found.cluster.name}: a step of {found.seconds:.3g} s would be {of_peak:.0%} of the peak: "
        f"figures of the file contradict each other (gpu.peak.{precision} = {peak / 1e12:g} TFLOP/s{best}, "
        f"gpu.power = {gpu.power:g} W); correct them"
    )


def timeline(prediction: Prediction, timer: Timer) -> Timeline:
    """Return when every action runs in a step that is cut short after PICTURE_ROUNDS, for pictures."""
    config = prediction.config
    table = table_of_step(prediction.plan, timer, enough(config, micro_batches(config), PICTURE_ROUNDS))
    of = costs_of(table)
    return simulate(
        table, lambda action: seconds_of(of(action), prediction.stages), transfer_seconds(config, timer.net)
    )


def sending_seconds(plan: Plan, stages: Sequence[StageTime], timer: Timer) -> float:
    """Seconds of a step for which the fullest link of a rank is busy, in the direction in which it sends."""
    config, placement, net = plan.config, plan.placement, timer.net
    m, last, pipeline = micro_batches(config), plan.stages - 1, groups(config)["pp"]
    each_time = m if config.parallel.data_mode in ("zero2", "zero3") else 1
    splits = table_of_step(plan, timer, min(m, enough(config, m))).splits_backward
    by_stage = {
        id(stage): total(
            (
                times(stage.sent.passes, m),
                stage.sent.gather,
                times(stage.sent.reduce, each_time),
                times(stage.sent.replicas, each_time if splits else 1),
            )
        )
        for stage in {id(stage): stage for stage in stages}.values()
    }
    one = net.links("messages", Activations(config).stream, pipeline)
    two_copies = config.model.shares_embedding and placement[0] != placement[last]
    shared, found = Shared(config, net), dict[tuple[object, ...], float]()
    for rank in range(config.parallel.pp):
        mine = plan.stages_of(rank)
        messages = sum(
            (stage < last and placement[stage + 1] != rank) + (stage > 0 and placement[stage - 1] != rank)
            for stage in mine
        )
        copies = two_copies and rank in (placement[0], placement[last])
        key = *sorted(id(stages[stage]) for stage in mine), messages, copies
        if key not in found:
            sent = [by_stage[id(stages[stage])] for stage in mine]
            sent.append(times(one, m * messages))
            sent.append(net.links(*shared.partial_sums(stages[stage] for stage in mine)))
            if copies:
                sent.append(net.links("messages", shared.of_copy, pipeline))
            found[key] = max(total(sent))
    return max(found.values())


def _update(plan: Plan, stages: Sequence[StageTime], timer: Timer) -> float:
    """Seconds of the optimizer on the fullest rank, and of finishing and handing over the gradients of a step."""
    config, shared = plan.config, Shared(plan.config, timer.net)
    layout = config.parallel.layout
    shards = layout.dp_shard * layout.cp if config.parallel.data.sharded else 1
    held = [sum(stages[stage].parameters for stage in plan.stages_of(rank)) for rank in range(layout.pp)]
    muon = config.optim.name == "muon"
    matrices = muon_matrices(plan) if muon else []
    updated = [muon_parameters(plan, rank) if muon else 0.0 for rank in range(layout.pp)]
    seconds = max(
        state_seconds(every - matrices_of_rank, matrices_of_rank, config, layout.world_size, timer)
        for every, matrices_of_rank in zip(_kept(plan, held, shards), updated, strict=True)
    )
    if muon:
        seconds += muon_seconds(plan, matrices, timer)
        if config.kernels_by_operation.muon == "torch":
            seconds += timer.kernels.passes(TORCH_SURPLUS * max(updated))
    seconds += max(
        timer.net.collective(*shared.partial_sums(stages[stage] for stage in plan.stages_of(rank)))
        for rank in range(layout.pp)
    )
    return seconds + timer.kernels.passes(max(held) * shared.last)


def _kept(plan: Plan, held: Sequence[float], shards: int) -> list[float]:
    """By pipeline rank: parameters whose states a rank has. held: those that are trained, before they are sharded."""
    config = plan.config
    ep, same = config.parallel.ep, config.parallel.expert_shards
    kinds = {id(kind): kind for kind in plan.kinds}  # quicker to look up than kinds
    by_kind = {number: expert_parameters(config, kind, trained=True) for number, kind in kinds.items()}
    of_layer = [by_kind[id(kind)] for kind in plan.kinds]
    found = []
    for rank, every in enumerate(held):
        layers = [layer for stage in plan.stages_of(rank) for layer in plan.layers[stage]]
        experts = sum(map(of_layer.__getitem__, layers)) / ep if ep > 1 else 0.0
        found.append((every - experts) / shards + experts / same)
    return found


def state_seconds(adamw: float, muon: float, config: Config, gpus: int, timer: Timer) -> float:
    """Seconds to update so many parameters with AdamW and with Muon on one of `gpus` GPUs, by where states live.

    Newton–Schulz is not counted. States outside of the device are streamed through it: of the update, the copies in
    both directions, the host's memory and the drives of the node, the slowest decides. Drives are taken to read and
    write by turns, and to be shared by the node's GPUs. Parameters on the host and their gradients are streamed too.
    With `optim.update_on: host`, AdamW updates these, or else copies of them, in host memory, one after the other.
    """
    optim, parameters_too = config.optim, config.on_host(trained=True)
    on_device = timer.kernels.passes(timer.program.optimizer)
    if optim.place == "device":
        return (adamw + muon) * on_device
    bus = timer.cluster.gpu.host * HOST_SHARE
    each_way = in_memory = 1 / bus, 2 / HOST_BANDWIDTH, 0.0
    if optim.place == "files":
        drive, sharing = timer.cluster.drive, min(gpus, timer.cluster.gpus_per_node)
        each_way = 1 / bus, 4 / HOST_BANDWIDTH, sharing * (1 / drive.read + 1 / drive.write)
    more = [8 * parameters_too * seconds for seconds in in_memory]
    streamed = {
        size: max(on_device, *(size * seconds + also for seconds, also in zip(each_way, more, strict=True)))
        for size in (4, 8)
    }
    if optim.update_on == "device":
        return adamw * streamed[8] + muon * streamed[4]
    copied = 0.0 if parameters_too else 2 * 4 / bus
    there = HOST_UPDATE_BYTES / HOST_BANDWIDTH + timer.kernels.passes(4)
    return adamw * (copied + there) + muon * streamed[4]
