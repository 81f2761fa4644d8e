"""Settings that are valid but have no effect, or make sense in a trial at most: the user is told, and not refused.

A value that is the default may not have been asked for; it is never told.
"""

from collections.abc import Iterator

from megalite.base.errors import Problem
from megalite.config.convert import leaves, to_plain
from megalite.config.schema import Config, Model

DEFAULTS = dict(leaves(to_plain(Config())))
Idle = dict[str, tuple[bool, str, str]]
"""Keys that may have no effect, each with whether that is so, why, and what to do."""


def doubts(config: Config) -> Iterator[Problem]:
    """Everything in a valid configuration that deserves a second look."""
    schedule, steps = config.schedule, config.train.steps
    if schedule.warmup >= steps > 1:
        rule = f"lasts all of train.steps = {steps}, so the learning rate does not reach optim.lr"
        yield Problem("schedule.warmup", rule, "use fewer steps of warmup, unless this is a trial", schedule.warmup)
    values = dict(leaves(to_plain(config)))
    idle = _training(config) | _checkpoints(config) | _layers(config.model) | _parametrization(config) | _batch(config)
    for key, (found, why, fix) in idle.items():
        if found and values.get(key) not in (None, DEFAULTS.get(key)):
            yield Problem(key, f"has no effect {why}", fix, values[key])
    if config.data.valid and config.eval.steps == 0:
        rule = "is not looked at with eval.steps = 0"
        yield Problem("data.valid", rule, "set eval.steps, or leave data.valid out")


def _training(config: Config) -> Idle:
    train, name = config.train, config.schedule.name
    rolls_back = "rollback" in (train.on_bad_step, train.on_spike)
    no_spikes = (train.on_spike == "ignore", "with train.on_spike = ignore", "set train.on_spike=warn or rollback")
    no_floor = (name in ("constant", "inverse_sqrt"), f"with schedule.name = {name}", "use cosine or linear")
    stops = train.on_bad_step == "stop" and not rolls_back
    muon = (config.optim.name != "muon", f"with optim.name = {config.optim.name}", "set optim.name=muon")
    return {
        "eval.interval": (config.eval.steps == 0, "with eval.steps = 0", "set eval.steps, the batches to evaluate on"),
        "schedule.floor": no_floor,
        "train.rollback_skip": (not rolls_back, "where nothing is rolled back", "set train.on_bad_step=rollback"),
        "train.max_bad_steps": (stops, "with train.on_bad_step = stop", "set train.on_bad_step=skip or rollback"),
        "train.float8_recipe": (
            train.precision != "fp8",
            f"with train.precision = {train.precision}",
            "set train.precision=fp8",
        ),
        "train.spike_window": no_spikes,
        "train.spike_threshold": no_spikes,
        "parallel.context.method": (config.parallel.cp == 1, "with parallel.cp = 1", "set parallel.cp"),
        "parallel.tensor.overlap": (config.parallel.tp == 1, "with parallel.tp = 1", "set parallel.tp"),
        **{f"optim.muon.{key}": muon for key in vars(config.optim.muon)},
    }


def _checkpoints(config: Config) -> Idle:
    checkpoint = config.checkpoint
    one_start = checkpoint.resume not in ("auto", "never")
    no_export = (checkpoint.export is None, "with checkpoint.export = null", "set checkpoint.export=hf")
    no_url = (checkpoint.export_url is None, "with checkpoint.export_url = null", "set checkpoint.export_url")
    if checkpoint.keep == 0 and checkpoint.interval:
        spared = (True, "with checkpoint.keep = 0, which keeps all", "use one of them")
    else:
        why = "with checkpoint.interval = 0, which saves at the end only"
        spared = (checkpoint.interval == 0, why, "set checkpoint.interval")
    return {
        "checkpoint.weights": (
            one_start,
            f"with checkpoint.resume = {checkpoint.resume}",
            "a run begins with one of them; leave out the other",
        ),
        **{f"checkpoint.{key}": no_export for key in ("export_every", "export_keep", "export_url")},
        "checkpoint.export_timeout": no_url,
        "checkpoint.keep_every": spared,
    }


def _layers(model: Model) -> Idle:
    attention, length, layers, found = model.attention, model.sequence_length, model.layers, Idle()
    if attention.window is not None:
        if attention.full_every == 1:
            why, fix = "with model.attention.full_every = 1: no layer has a window", "use a larger full_every, or null"
            found |= {f"model.attention.{key}": (True, why, fix) for key in ("window", "window_rope_theta")}
        else:
            reaches = attention.window >= length and attention.window_rope_theta is None
            why = f"with model.sequence_length = {length}: every query reaches all tokens before it"
            found["model.attention.window"] = (reaches, why, "use a shorter window, or null")
        why, fix = f"with model.layers = {layers}: every layer has a window", "use at most that, or null"
        found["model.attention.full_every"] = ((attention.full_every or 0) > layers, why, fix)
    if attention.nope_every is not None:
        why, fix = f"with model.layers = {layers}: every layer has rotary positions", "use at most that, or null"
        found["model.attention.nope_every"] = (attention.nope_every > layers, why, fix)
        why = "with model.attention.nope_every = 1: no layer has rotary positions"
        for key in ("model.rope_theta", "model.rotary_width"):
            found[key] = (attention.nope_every == 1, why, "use a larger nope_every, or null")
    return found


def _parametrization(config: Config) -> Idle:
    kind, base = config.model.parametrization, config.model.base
    if base is None or kind == "completep":
        return {}
    scaled = () if kind == "standard" else ("width", "head_width")
    why = f"with model.parametrization = {kind}"
    return {
        f"model.base.{key}": (True, why, f"set model.parametrization={'completep' if key == 'layers' else 'mup'}")
        for key in vars(base)
        if key not in scaled
    }


def _batch(config: Config) -> Idle:
    batch, found = config.batch, Idle()
    if batch.rampup is not None:
        full = batch.rampup.start == batch.global_
        found["batch.rampup.tokens"] = (full, "with batch.rampup.start = batch.global", "begin with less")
    if batch.curriculum is not None:
        full = batch.curriculum.start == config.model.sequence_length
        found["batch.curriculum.tokens"] = (full, "with a start of model.sequence_length", "begin with less")
    return found
