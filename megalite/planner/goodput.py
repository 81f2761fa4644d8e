"""What a whole run takes: failures and checkpoints, days, GPU-hours, money and energy. Imports no torch."""

from dataclasses import dataclass
from math import sqrt

from megalite.plan.size import model_parameters
from megalite.planner.predict import Prediction
from megalite.planner.stages import HOST_SHARE

# Unexpected interruptions of Llama 3's training: 419 in 54 days on 16,384 GPUs (arXiv 2407.21783, §3.3.4).
HOURS_BETWEEN_FAILURES = 54 * 24 * 16_384 / 419  # of one GPU
RESTART = 600.0  # seconds from a failure to the first new step; an assumption
DAY, HOUR = 86_400.0, 3_600.0
SAVED = 12  # bytes of a parameter and its AdamW states in a checkpoint


@dataclass(frozen=True)
class Run:
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
    held = SAVED * model_parameters(prediction.config.model).total / parallel.pp / parallel.tp / shards
    return held / (prediction.cluster.gpu.host * HOST_SHARE)


def goodput(prediction: Prediction) -> tuple[float, float]:
    """The share of time in which steps are made that count, and the seconds between checkpoints.

    Lost are the copies of checkpoints, and after a failure the restart and, on average, half an interval. With
    `checkpoint.interval` 0 the interval is the one that loses least (Young 1974, doi 10.1145/361147.361115).
    """
    between = HOURS_BETWEEN_FAILURES * HOUR / prediction.gpus
    copy, steps = stall(prediction), prediction.config.checkpoint.interval
    interval = steps * prediction.seconds if steps else max(sqrt(2 * copy * between), prediction.seconds)
    lost = copy / interval + (RESTART + interval / 2) / between
    return 1 / (1 + lost), interval


def run_of(prediction: Prediction, tokens: float) -> Run:
    """What training on `tokens` tokens takes."""
    share, interval = goodput(prediction)
    seconds = tokens / prediction.step_tokens * prediction.seconds / share
    hours = seconds / HOUR * prediction.gpus
    cluster = prediction.cluster
    return Run(tokens, share, interval, seconds, hours, hours * cluster.price, hours * cluster.gpu.power)
