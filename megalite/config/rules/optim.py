"""Rules of the optimizer, the learning rate, and the kernels."""

from collections.abc import Iterator

from megalite.config.errors import Problem
from megalite.config.schema import Config, LearningRate

MOST_BETA = 0.999999
LEAST_NORM = 1e-12


def optim_rules(config: Config) -> Iterator[Problem]:
    """Every broken rule of the optim, kernels and schedule sections."""
    yield from _betas(config.optim.betas)
    yield from _kernels(config)
    yield from _schedule(config.schedule, config.train.steps)
    if config.optim.offload and config.optim.name == "muon":
        rule = "updates on the host, where optim.name = muon does not run"
        yield Problem("optim.offload", rule, "use optim.name=adamw, or no optim.offload", True)
    if 0 < config.optim.clip_norm < LEAST_NORM:
        rule = f"must be 0 or at least {LEAST_NORM}: closer to 0, optim.eps drowns all gradients"
        yield Problem("optim.clip_norm", rule, "0 clips nothing", config.optim.clip_norm)


def _betas(betas: list[float]) -> Iterator[Problem]:
    if len(betas) != 2 or not all(0 <= beta <= MOST_BETA for beta in betas):
        rule = f"must be two numbers from 0 to {MOST_BETA}: closer to 1, float32 loses what a step adds"
        yield Problem("optim.betas", rule, "[0.9, 0.95] is usual", betas)


def _schedule(schedule: LearningRate, steps: int) -> Iterator[Problem]:
    decay = schedule.decay or 0
    if schedule.decay is not None and schedule.name != "wsd":
        rule = f"has no meaning with schedule.name = {schedule.name}, which decays until the last step"
        yield Problem("schedule.decay", rule, "use null, or schedule.name=wsd", decay)
    elif decay > steps:
        rule = f"must be at most train.steps = {steps}"
        yield Problem("schedule.decay", rule, "use fewer steps of decay or more of training", decay)
    elif schedule.name == "wsd" and schedule.warmup <= steps < schedule.warmup + decay:
        rule = f"with schedule.warmup = {schedule.warmup} must fit into train.steps = {steps}"
        yield Problem("schedule.decay", rule, f"use at most {steps - schedule.warmup}", decay)


def _kernels(config: Config) -> Iterator[Problem]:
    adamw = config.kernels_by_operation.adamw
    if adamw in ("triton", "apex") and config.optim.offload:
        rule = "runs on a GPU, but optim.offload updates on the host"
        yield Problem("kernels.adamw", rule, "use kernels.adamw=auto, or no optim.offload", adamw)
    if adamw == "apex" and config.train.precision == "fp64":
        yield Problem("kernels.adamw", "cannot be used with train.precision = fp64", "use auto", adamw)
    if config.kernels_by_operation.rms_norm == "apex" and config.train.compile:
        yield Problem("kernels.rms_norm", "cannot be used with train.compile", "use auto", "apex")
