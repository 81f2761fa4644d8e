"""Time and cost of a whole run: failures and checkpoints, days, GPU-hours, money and energy. Imports no torch."""

from dataclasses import dataclass

from megalite.cost.host_copies import HOST_SHARE
from megalite.cost.predict import Prediction
from megalite.plan.model.size import model_parameters
from megalite_launch.goodput.formulas import Costs, best, between_failures, share

RESTART_SECONDS = 600.0  # from a failure to the first new step; an assumption
DAY, HOUR = 86_400.0, 3_600.0
SAVED_BYTES = 12  # bytes of a parameter and its AdamW states in a checkpoint


@dataclass(frozen=True)
class WholeRun:
    """A run of `tokens` tokens.

    goodput: share of time in which steps are made that count. interval: seconds between checkpoints. seconds: of the
    whole run. cost: US dollars. energy: watt-hours of the GPUs at their power limit.
    """

    tokens: float
    goodput: float
    interval: float
    seconds: float
    gpu_hours: float
    cost: float
    energy: float

    @property
    def days(self) -> float:
        return self.seconds / DAY


def stall(prediction: Prediction) -> float:
    """Seconds that training waits for a checkpoint: until parameters and states are copied to host memory."""
    parallel = prediction.config.parallel
    shards = parallel.layout.dp_shard * parallel.cp if parallel.data.sharded else 1
    held = SAVED_BYTES * model_parameters(prediction.config.model).total / parallel.pp / parallel.tp / shards
    return held / (prediction.cluster.gpu.host * HOST_SHARE)


def goodput(prediction: Prediction) -> tuple[float, float]:
    """The share of time in which steps are made that count, and the seconds between checkpoints.

    Lost are the copies of checkpoints, and after a failure the restart and what was not saved yet. With
    `checkpoint.interval` 0 or auto the interval is the one that loses least.
    """
    steps = prediction.config.checkpoint.interval
    costs = Costs(between_failures(prediction.gpus), save=stall(prediction), restart=RESTART_SECONDS)
    if steps == "auto" or steps == 0:
        interval = max(best(costs), prediction.seconds)
    else:
        interval = steps * prediction.seconds
    return share(costs, interval), interval


def run_of(prediction: Prediction, tokens: float) -> WholeRun:
    """Time, GPU-hours, money and energy that training on `tokens` tokens takes."""
    share, interval = goodput(prediction)
    seconds = tokens / prediction.step_tokens * prediction.seconds / share
    hours = seconds / HOUR * prediction.gpus
    cluster = prediction.cluster
    return WholeRun(tokens, share, interval, seconds, hours, hours * cluster.price, hours * cluster.gpu.power)
