"""Estimates an experiment's cost before it runs: seconds and GPU-hours of every run, and the source of the estimate."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import log
from statistics import median

from megalite.base.errors import InputError
from megalite.config.schema import Config
from megalite.cost.cluster import Cluster, load_cluster
from megalite.cost.predict import predict
from megalite.cost.stages import Timer
from megalite.experiment.cell import Cell
from megalite.experiment.expand import Expanded
from megalite.layout_search.search import fullest_rank
from megalite.plan.memory.fit import TENSOR_SHARE, fitted
from megalite.plan.model.size import flops_per_token, model_parameters

SAVED_BYTES = 12  # bytes of a parameter with AdamW's moments
WRITE_BANDWIDTH, COPY_BANDWIDTH = 1e9, 10e9  # bytes/s of a rank: to the disk, and of the copy that training waits for
FORWARD_SHARE = 1 / 3  # share of a step that an evaluation of a batch takes
HOUR = 3600.0


@dataclass(frozen=True)
class MeasuredStep:
    """The measured time of a run: seconds of a step with `tokens` tokens on each of its ranks.

    startup: seconds that were neither steps nor evaluations nor saves; None if that is not known.
    """

    flops_per_token: int
    gpus: int
    tokens: float
    seconds: float
    startup: float | None = None

    @property
    def flops(self) -> float:
        """FLOPs of a rank in a step."""
        return self.flops_per_token * self.tokens

    @staticmethod
    def of(cell: Cell, rate: float, seconds: float | None, begun: int = 0) -> "MeasuredStep":
        """Return the measured time of a run that has reached `rate` tokens/s on each rank.

        seconds: of the whole run, if it is done and was started once. begun: the step that it began from.
        """
        tokens = cell.step_tokens / cell.gpus
        step = tokens / rate
        startup = None if seconds is None else max(seconds - _besides_startup(cell, cell.steps - begun, step), 0.0)
        return MeasuredStep(flops_per_token(cell.config.model), cell.gpus, tokens, step, startup)


@dataclass(frozen=True)
class RunCost:
    """The estimated cost of one run.

    source: where the time of a step comes from. steps: those that the run makes itself. fits: False where the planner
    finds that the run needs more memory than a GPU of the cluster has.
    """

    cell: Cell
    steps: int
    seconds: float
    source: str
    fits: bool = True

    @property
    def gpu_hours(self) -> float:
        return self.seconds * self.cell.gpus / HOUR


@dataclass(frozen=True)
class Costs:
    """The costs of an experiment. unknown: runs without an estimate. later: GPU-hours of rounds not known yet."""

    costs: tuple[RunCost, ...]
    unknown: tuple[Cell, ...] = ()
    later: float = 0.0

    @property
    def gpu_hours(self) -> float:
        return sum(cost.gpu_hours for cost in self.costs) + self.later

    @property
    def seconds(self) -> float:
        """Seconds of all runs, one after another."""
        return sum(cost.seconds for cost in self.costs)


class Estimator:
    """Estimates the time of a step, and of a run.

    A measurement of the same model and number of ranks counts first, then `launch.flops_per_second`, then the planner's
    prediction for a cluster, and at last measurements of other models. saved: by id, the step from which an
    interrupted run goes on.
    """

    def __init__(
        self, expanded: Expanded, measured: Iterable[MeasuredStep] = (), saved: Mapping[str, int] | None = None
    ) -> None:
        launch = expanded.setup.experiment.launch
        self.launch, self.measured, self.saved = launch, list(measured), saved or {}
        startups = [run.startup for run in self.measured if run.startup is not None]
        self.startup = median(startups) if startups else launch.startup
        name = launch.cluster or expanded.setup.base["run"].get("cluster")
        self.cluster: Cluster | None = None if name is None else load_cluster(str(name), "run.cluster = ")
        self.timer = None if self.cluster is None else Timer(self.cluster)
        self._known: dict[str, tuple[float, str] | None] = {}
        self._fitting: dict[str, bool] = {}

    def cost(self, cell: Cell) -> RunCost | None:
        """Estimate the cost of a run; None where the time of a step is not known."""
        found = self.step(cell)
        if found is None:
            return None
        step, source = found
        steps = cell.steps - max(cell.start, min(self.saved.get(cell.id, 0), cell.steps))
        return RunCost(cell, steps, self.startup + _besides_startup(cell, steps, step), source, self._fits(cell))

    def _fits(self, cell: Cell) -> bool:
        if self.cluster is None or self.timer is None:
            return True
        key = _timed_by(cell)
        if key not in self._fitting:
            needed = fullest_rank(_started(cell.config, self.cluster), self.timer).total
            self._fitting[key] = needed <= TENSOR_SHARE * self.cluster.gpu.memory
        return self._fitting[key]

    def step(self, cell: Cell) -> tuple[float, str] | None:
        """Seconds of a step, and where they come from."""
        key = _timed_by(cell)
        if key not in self._known:
            self._known[key] = self._step(cell)
        return self._known[key]

    def _step(self, cell: Cell) -> tuple[float, str] | None:
        each, tokens = flops_per_token(cell.config.model), cell.step_tokens / cell.gpus
        same = [run for run in self.measured if (run.flops_per_token, run.gpus) == (each, cell.gpus)]
        alike = [run for run in same if run.tokens == tokens]
        if alike:
            return median(run.seconds for run in alike), "measured"
        others = [run for run in self.measured if run.gpus == cell.gpus] or self.measured
        if same:
            several = len({run.tokens for run in same}) > 1
            return _between(same if several else others, tokens * each), "measured with other batches"
        if self.launch.flops_per_second is not None:
            return tokens * each / self.launch.flops_per_second, "launch.flops_per_second"
        if self.cluster is not None:
            config = _started(cell.config, self.cluster)
            return predict(config, self.cluster, self.timer).seconds, f"planner, {self.cluster.name}"
        if self.measured:
            return _between(others, tokens * each), "measured on other sizes"
        return None


def _between(measured: Sequence[MeasuredStep], flops: float) -> float:
    """Seconds of a step of `flops` FLOPs, on the line through the two nearest measurements.

    Neither the line's time at 0 FLOPs nor its time per FLOP is below 0. With a single measurement, or several of the
    same work, the time is proportional to the FLOPs.
    """
    known: dict[float, list[float]] = {}
    for run in measured:
        known.setdefault(run.flops, []).append(run.seconds)
    near, *further = sorted(known, key=lambda each: abs(log(each / flops)))
    beyond = [each for each in further if (each > flops) != (near > flops)] or further
    first = median(known[near])
    slope = (median(known[beyond[0]]) - first) / (beyond[0] - near) if beyond else first / near
    return first + min(max(slope, 0.0), first / near) * (flops - near)


def _timed_by(cell: Cell) -> str:
    """All that the time and the memory of a step follow from."""
    config = cell.config
    return repr((config.model, config.parallel, config.batch, replace(config.train, steps=1), config.optim, cell.gpus))


def estimate(
    expanded: Expanded,
    cells: Sequence[Cell],
    measured: Iterable[MeasuredStep] = (),
    saved: Mapping[str, int] | None = None,
) -> Costs:
    """The cost of `cells`, which may be some of an experiment's. Raises InputError for a cluster that is not known.

    saved: by id, the step from which an interrupted run goes on.
    """
    estimator = Estimator(expanded, measured, saved)
    found = [(cell, estimator.cost(cell)) for cell in cells]
    costs = tuple(cost for _, cost in found if cost is not None)
    later = _later(expanded, costs) if expanded.later else 0.0
    return Costs(costs, tuple(cell for cell, cost in found if cost is None), later)


def _later(expanded: Expanded, costs: Sequence[RunCost]) -> float:
    """GPU-hours of the rounds of successive halving that are not known yet: of mean runs, by their steps."""
    halving = expanded.setup.experiment.halving
    if halving is None or not costs:
        return 0.0
    latest = max(cell.round for cell in expanded.cells)
    rounds = [cost for cost in costs if cost.cell.round == latest]
    if not rounds:
        return 0.0
    mean, hours = sum(cost.gpu_hours for cost in rounds) / len(rounds), 0.0
    count = sum(cell.round == latest for cell in expanded.cells)
    for steps in halving.steps[latest + 1 :]:
        count = -(-count // halving.factor)
        hours += count * mean * steps / halving.steps[latest]
    return hours


def _besides_startup(cell: Cell, steps: int, step: float) -> float:
    """Seconds of `steps` steps of a run, with its evaluations and saves."""
    return steps * step + _evaluations(cell) * FORWARD_SHARE * step + _saves(cell)


def _evaluations(cell: Cell) -> int:
    """Batches that a run evaluates."""
    section = cell.config.eval
    if not cell.evaluates:
        return 0
    times = (cell.start == 0) + (cell.steps - cell.start) // section.interval if section.interval else cell.start == 0
    ends = not section.interval or cell.steps % section.interval != 0
    return section.steps * (int(times) + int(ends))


def _saves(cell: Cell) -> float:
    """Seconds that training stands still for checkpoints; the last one is waited for."""
    checkpoint, steps = cell.config.checkpoint, cell.steps - cell.start
    size = SAVED_BYTES * model_parameters(cell.config.model).total / cell.gpus
    interval = checkpoint.interval if isinstance(checkpoint.interval, int) else 0
    times = len(checkpoint.at) + (steps // interval if interval else 0)
    return size / WRITE_BANDWIDTH + times * size / (COPY_BANDWIDTH if checkpoint.async_ else WRITE_BANDWIDTH)


def _started(config: Config, cluster: Cluster) -> Config:
    """Settle what a start chooses: the data-parallel mode that fits; for batch.micro = auto, 1 is a careful guess."""
    if config.batch.micro == "auto":
        config = replace(config, batch=replace(config.batch, micro=1))
    return fitted(config, round(TENSOR_SHARE * cluster.gpu.memory))


def check_budget(costs: Costs, expanded: Expanded, spent: float = 0.0) -> None:
    """Raises InputError if the runs would take more than `launch.max_gpu_hours`, or if nobody can tell.

    spent: GPU-hours that the experiment has taken already.
    """
    launch = expanded.setup.experiment.launch
    most = launch.max_gpu_hours
    if most is None:
        if launch.kind == "slurm":
            raise InputError(
                f"launch.max_gpu_hours: is needed on a cluster, so that an experiment cannot take more than was meant; "
                f"{_told(costs)}: set it to the most that these runs may take"
            )
        return
    if costs.unknown:
        raise InputError(
            f"launch.max_gpu_hours = {most:g}: cannot be held, as nothing tells how long a step takes: set "
            "launch.cluster, or launch.flops_per_second as one rank has reached it"
        )
    if spent + costs.gpu_hours > most:
        already = f", {spent:,.1f} being spent" if spent else ""
        raise InputError(
            f"launch.max_gpu_hours = {most:g}: these {len(costs.costs):,} runs take {costs.gpu_hours:,.1f} "
            f"GPU-hours{already}; raise it, or ask for fewer or shorter runs"
        )


def _told(costs: Costs) -> str:
    if costs.unknown:
        return "nothing tells how long a step takes (launch.cluster does)"
    return f"these {len(costs.costs):,} runs take about {costs.gpu_hours:,.1f} GPU-hours"
