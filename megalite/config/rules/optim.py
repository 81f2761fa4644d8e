"""Rules of the optimizer, the learning rate, and the kernels."""

from collections.abc import Iterator

from megalite.base.errors import Problem
from megalite.config.attention_kernels import ANY_GPU, broken, need_of
from megalite.config.layers import layer_kinds
from megalite.config.parametrization import depth_ratio, width_ratio
from megalite.config.schema import Config, LearningRate, Optim

MAX_BETA = 0.999999
MIN_NORM = 1e-12
MIN_SCALED_VALUE = 1e-30  # closer to 0, float32 loses it


def optim_rules(config: Config) -> Iterator[Problem]:
    """Every broken rule of the optim, kernels and schedule sections."""
    yield from _betas(config.optim.betas)
    yield from _scaled(config)
    yield from _placement(config.optim)
    yield from _kernels(config)
    yield from _schedule(config.schedule, config.train.steps)
    if 0 < config.optim.clip_norm < MIN_NORM:
        rule = f"must be 0 or at least {MIN_NORM}: closer to 0, optim.eps drowns all gradients"
        yield Problem("optim.clip_norm", rule, "0 clips nothing", config.optim.clip_norm)


def _betas(betas: list[float]) -> Iterator[Problem]:
    if len(betas) != 2 or not all(0 <= beta <= MAX_BETA for beta in betas):
        rule = f"must be two numbers from 0 to {MAX_BETA}: closer to 1, float32 loses what a step adds"
        yield Problem("optim.betas", rule, "[0.9, 0.95] is usual", betas)


def _scaled(config: Config) -> Iterator[Problem]:
    """Numbers that a parametrization divides, which must not be lost in float32 then."""
    width, depth = width_ratio(config.model), depth_ratio(config.model)
    for key, value, divisor in (("lr", config.optim.lr, width), ("eps", config.optim.eps, width * depth)):
        if MIN_SCALED_VALUE <= value < MIN_SCALED_VALUE * divisor:
            rule = f"must be at least {MIN_SCALED_VALUE:g} when divided by {divisor:g}, as model.parametrization = "
            rule += f"{config.model.parametrization} does"
            yield Problem(f"optim.{key}", rule, "use a larger one, or a larger base", value)


def _placement(optim: Optim) -> Iterator[Problem]:
    if optim.place == "files" and ("/" not in optim.placement or not optim.placement.isprintable()):
        rule = "must be device, host, or the path of a folder, written with a / and in printable characters"
        yield Problem("optim.placement", rule, "such as ./scratch or /mnt/nvme/states", optim.placement)
    if optim.update_on == "host" and optim.place != "host":
        rule = f"needs states in host memory, but optim.placement = {optim.placement}"
        yield Problem("optim.update_on", rule, "use device, or optim.placement=host", "host")


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
    if adamw in ("triton", "apex") and config.optim.update_on == "host":
        rule = "runs on a GPU, but optim.update_on = host"
        yield Problem("kernels.adamw", rule, "use kernels.adamw=auto, or optim.update_on=device", adamw)
    if adamw == "apex" and config.train.precision == "fp64":
        yield Problem("kernels.adamw", "cannot be used with train.precision = fp64", "use auto", adamw)
    if config.kernels_by_operation.rms_norm == "apex" and config.train.compile:
        yield Problem("kernels.rms_norm", "cannot be used with train.compile", "use auto", "apex")
    attention = config.kernels_by_operation.attention
    if attention != "auto" and config.model.heads > 0:
        needs = (need_of(config, kind.attention.heads) for kind in layer_kinds(config.model))
        rules = [broken(attention, need, ANY_GPU) for need in needs]
        for text in dict.fromkeys(each.text for each in rules if each is not None):
            yield Problem("kernels.attention", text, "use auto, which chooses for layers of each kind", attention)
