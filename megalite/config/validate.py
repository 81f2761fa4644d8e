"""Rules between configuration values: every broken one is found and comes with a fix."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from megalite.config.batch import batch_rules
from megalite.config.convert import to_plain
from megalite.config.errors import InputError, Problem, listing
from megalite.config.numbers import divisible, multiples
from megalite.config.recompute import recompute_rules
from megalite.config.schema import SCHEDULES, Config, LearningRate, Model, Parallel, Pipeline, Run, Source
from megalite.config.sequence import document_rules, sequence_rules

AT_LEAST = {
    "run.seed": 0,
    "model.layers": 1,
    "model.width": 1,
    "model.heads": 1,
    "model.kv_heads": 1,
    "model.head_width": 1,
    "model.ffn": 1,
    "model.vocab_size": 1,
    "model.sequence_length": 1,
    "model.rope_scaling.original_length": 1,
    "parallel.pp": 1,
    "parallel.pipeline.virtual_stages": 1,
    "parallel.dp_replicate": 1,
    "parallel.dp_shard": 1,
    "parallel.cp": 1,
    "parallel.tp": 1,
    "batch.micro": 1,
    "batch.global": 1,
    "batch.rampup.start": 1,
    "batch.rampup.increment": 1,
    "batch.rampup.tokens": 1,
    "batch.curriculum.start": 1,
    "batch.curriculum.tokens": 1,
    "train.steps": 1,
    "train.recompute_every": 1,
    "train.max_bad_steps": 0,
    "train.rollback_skip": 1,
    "train.spike_window": 8,
    "optim.weight_decay": 0,
    "optim.clip_norm": 0,
    "schedule.warmup": 0,
    "schedule.decay": 1,
    "checkpoint.interval": 0,
    "checkpoint.keep": 0,
    "checkpoint.keep_every": 0,
    "checkpoint.max_failures": 0,
    "log.interval": 1,
    "eval.interval": 0,
    "eval.steps": 0,
}
POSITIVE = (
    "model.rope_theta",
    "model.rope_scaling.factor",
    "model.rope_scaling.low_frequency_factor",
    "model.rope_scaling.high_frequency_factor",
    "model.norm_eps",
    "model.init_std",
    "batch.memory",
    "train.recompute_budget",
    "train.spike_threshold",
    "train.timeout",
    "optim.lr",
    "optim.eps",
)
MOST = {"batch.memory": 1e6, "train.recompute_budget": 1e6}  # GiB
SCHEDULE_FILES = (".yaml", ".yml")


def check(config: Config, world_size: int | None = None) -> Config:
    """The configuration with `parallel.dp_shard` resolved to a number, for a job of `world_size` ranks.

    `world_size` is None where no launcher gives one. Raises `InputError` with every broken rule.
    """
    if problems := validate(config, world_size):
        raise InputError(problems)
    return replace(config, parallel=replace(config.parallel, dp_shard=_dp_shard(config.parallel, world_size)))


def validate(config: Config, world_size: int | None = None) -> list[Problem]:
    """Every broken rule of a configuration, for a job of `world_size` ranks (None: no launcher gives one).

    Looks at no file: see `validate_files`.
    """
    dp = config.parallel.dp_replicate * _dp_shard(config.parallel, world_size)
    return [
        *_run(config.run),
        *_ranges(to_plain(config)),
        *_model(config.model),
        *_tensor_parallel(config.model, config.parallel.tp),
        *sequence_rules(config.model, config.parallel),
        *_pipeline(config.model.layers, config.parallel),
        *_schedule_file(config),
        *_data_parallel(config),
        *_world(config.parallel, world_size),
        *batch_rules(config.batch, dp, config.model.sequence_length, config.parallel.sequence_parts),
        *recompute_rules(config.train),
        *_rollback(config),
        *_betas(config.optim.betas),
        *_kernels(config),
        *_schedule(config.schedule, config.train.steps),
        *_sources("data.train", config.data.train),
        *_sources("data.valid", config.data.valid),
        *document_rules(config.data, config.model.vocab_size),
    ]


def check_files(config: Config) -> None:
    """Raises `InputError` with every file that training needs and does not find."""
    if problems := validate_files(config):
        raise InputError(problems)


def validate_files(config: Config) -> list[Problem]:
    """Every file that training needs and does not find; relative paths start at the working directory."""
    data, resume = config.data, config.checkpoint.resume
    problems = [*_stores("data.train", data.train), *_stores("data.valid", data.valid)]
    if not data.train:
        problems.append(Problem("data.train", "is empty", "list token stores, as in data.train=[{path: data/train}]"))
    if config.eval.steps > 0 and not data.valid:
        problems.append(
            Problem("eval.steps", "evaluation needs data.valid", "list token stores there, or use 0", config.eval.steps)
        )
    if data.tokenizer is not None and not Path(data.tokenizer).is_file():
        problems.append(Problem("data.tokenizer", "no such file", "mend the path, or use null", data.tokenizer))
    schedule = config.parallel.pipeline.schedule
    if schedule not in SCHEDULES and not Path(schedule).is_file():
        problems.append(Problem("parallel.pipeline.schedule", "no such file", "mend the path", schedule))
    if resume not in ("auto", "never") and not Path(resume).exists():
        problems.append(
            Problem("checkpoint.resume", "no such checkpoint", "use auto, never or the path of a checkpoint", resume)
        )
    weights = config.checkpoint.weights
    if weights is not None and not Path(weights).exists():
        problems.append(Problem("checkpoint.weights", "no such checkpoint", "mend the path, or use null", weights))
    return problems


def _run(run: Run) -> Iterator[Problem]:
    if run.name in ("", ".", "..") or not run.name.isprintable() or set(run.name) & set("/\\"):
        yield Problem("run.name", "must be a plain folder name", "use run.dir for the folder it lies in", run.name)


def _ranges(plain: dict[str, Any]) -> Iterator[Problem]:
    for key, least in AT_LEAST.items():
        value = _at(plain, key)
        if isinstance(value, int | float) and value < least:
            yield Problem(key, f"must be at least {least}", value=value)
    for key in POSITIVE:
        value = _at(plain, key)
        if value is not None and value <= 0:
            yield Problem(key, "must be greater than 0", value=value)
    for key, most in MOST.items():
        value = _at(plain, key)
        if value is not None and value > 0 and not value <= most:
            yield Problem(key, f"must be at most {most:,.0f} GiB", value=value)


def _at(plain: dict[str, Any], key: str) -> Any:
    """The value of a dotted key; None inside a section that is null."""
    section, _, rest = key.partition(".")
    inner = plain[section]
    return inner if not rest or inner is None else _at(inner, rest)


def _model(model: Model) -> Iterator[Problem]:
    yield from divisible("model.heads", model.heads, "model.kv_heads", model.kv_heads)
    if model.head_width is None:
        yield from divisible("model.width", model.width, "model.heads", model.heads, ", or set model.head_width")
        if model.heads >= 1 and model.head_size % 2:
            rule = f"model.width / model.heads = {model.head_size} must be even, since RoPE turns pairs"
            yield Problem("model.heads", rule, "set model.head_width, or change the number of heads", model.heads)
    elif model.head_width % 2:
        even = [width for width in (model.head_width - 1, model.head_width + 1) if width > 0]
        yield Problem(
            "model.head_width", "must be even, since RoPE turns pairs", f"use {listing(even)}", model.head_width
        )
    scaling = model.rope_scaling
    if scaling is not None and scaling.low_frequency_factor >= scaling.high_frequency_factor:
        rule = f"must be less than model.rope_scaling.high_frequency_factor = {scaling.high_frequency_factor}"
        fix = "Llama 3.1 uses 1 and 4"
        yield Problem("model.rope_scaling.low_frequency_factor", rule, fix, scaling.low_frequency_factor)


def _tensor_parallel(model: Model, tp: int) -> Iterator[Problem]:
    for name in ("heads", "kv_heads", "ffn", "vocab_size"):
        yield from divisible(f"model.{name}", getattr(model, name), "parallel.tp", tp)


def _pipeline(layers: int, parallel: Parallel) -> Iterator[Problem]:
    pp, pipeline = parallel.pp, parallel.pipeline
    yield from _pipeline_schedule(pipeline)
    key, split = "parallel.pipeline.split", pipeline.split
    per_rank = pipeline.stages_per_rank
    stages = pp * per_rank
    if split is None and stages > layers >= 1:
        of_each = f" with {per_rank} stages on each rank" if per_rank > 1 else ""
        fix = f"use pp {layers // per_rank} or fewer" if layers >= per_rank else "use a schedule with fewer stages"
        yield Problem("parallel.pp", f"makes {stages} stages{of_each}, more than model.layers = {layers}", fix, pp)
    if split is None:
        return
    balanced = "use null for a balanced split"
    if len(split) != stages:
        yield Problem(key, f"must have one entry for each of the {stages} stages", balanced, split)
    if any(count < 0 for count in split) or 0 in split[1:-1]:
        rule = "only the first stage, which has the embedding, and the last, which has the head, may have 0 layers"
        yield Problem(key, rule, balanced, split)
    if sum(split) != layers:
        yield Problem(key, f"must add up to model.layers = {layers}, not {sum(split)}", balanced, split)


def _pipeline_schedule(pipeline: Pipeline) -> Iterator[Problem]:
    name, virtual = pipeline.schedule, pipeline.virtual_stages
    key = "parallel.pipeline.virtual_stages"
    if name not in SCHEDULES and not name.endswith(SCHEDULE_FILES):
        fix = f"use {listing(list(SCHEDULES))}, or the path of a file that ends in {listing(SCHEDULE_FILES)}"
        yield Problem("parallel.pipeline.schedule", "is no schedule", fix, name)
    if virtual is None or virtual < 1:
        return
    if name in SCHEDULES and name != "interleaved_1f1b" and virtual != SCHEDULES[name]:
        rule = f"must be {SCHEDULES[name]} for parallel.pipeline.schedule = {name}"
        yield Problem(key, rule, "use null, or interleaved_1f1b, which has as many as you like", virtual)


def _schedule_file(config: Config) -> Iterator[Problem]:
    if config.parallel.pipeline.schedule in SCHEDULES:
        return
    rule = "needs a schedule by name: the file of parallel.pipeline.schedule is for one number of micro-batches"
    if config.batch.micro == "auto":
        yield Problem("batch.micro", rule, f"use a number, or {listing(list(SCHEDULES))}", "auto")
    if config.batch.rampup is not None:
        yield Problem("batch.rampup", rule, f"use null, or {listing(list(SCHEDULES))}")


def _data_parallel(config: Config) -> Iterator[Problem]:
    data, precision = config.parallel.data, config.train.precision
    if data.reduce_precision == "bf16" and precision != "bf16":
        rule = f"needs train.precision = bf16, not {precision}"
        yield Problem("parallel.data.reduce_precision", rule, "use fp32: gradients have their own precision", "bf16")


def _world(parallel: Parallel, world_size: int | None) -> Iterator[Problem]:
    others, shard = _without_dp_shard(parallel), parallel.dp_shard
    if world_size is None or others < 1:
        return
    if shard == "auto" and world_size % others:
        rule = f"the other axes make {others} ranks, which must divide the job's {world_size}"
        yield Problem("parallel.dp_shard", rule, f"start {listing(multiples(world_size, others))} ranks", shard)
    elif shard != "auto" and shard >= 1 and shard * others != world_size:
        rule = f"the layout makes {shard * others} ranks, but the job has {world_size}"
        fitting = f"use dp_shard {world_size // others} or auto, or " if world_size % others == 0 else ""
        yield Problem("parallel.dp_shard", rule, f"{fitting}start {shard * others} ranks", shard)


def _rollback(config: Config) -> Iterator[Problem]:
    for key, value in (("on_bad_step", config.train.on_bad_step), ("on_spike", config.train.on_spike)):
        if value == "rollback" and config.checkpoint.interval == 0:
            rule = "needs checkpoints to go back to, but checkpoint.interval = 0 saves at the end only"
            yield Problem(f"train.{key}", rule, "set checkpoint.interval", value)


def _betas(betas: list[float]) -> Iterator[Problem]:
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        yield Problem("optim.betas", "must be two numbers from 0 to below 1", "[0.9, 0.95] is usual", betas)


def _kernels(config: Config) -> Iterator[Problem]:
    adamw = config.kernels_by_operation.adamw
    if adamw in ("triton", "apex") and config.optim.offload:
        rule = "runs on a GPU, but optim.offload updates on the host"
        yield Problem("kernels.adamw", rule, "use kernels.adamw=auto, or no optim.offload", adamw)
    if adamw == "apex" and config.train.precision == "fp64":
        yield Problem("kernels.adamw", "cannot be used with train.precision = fp64", "use auto", adamw)
    if config.kernels_by_operation.rms_norm == "apex" and config.train.compile:
        yield Problem("kernels.rms_norm", "cannot be used with train.compile", "use auto", "apex")


def _schedule(schedule: LearningRate, steps: int) -> Iterator[Problem]:
    decay = schedule.decay or 0
    if not 0 <= schedule.floor <= 1:
        rule = "must be from 0 to 1, a share of optim.lr"
        yield Problem("schedule.floor", rule, value=schedule.floor)
    if schedule.warmup > steps:
        rule = f"must be at most train.steps = {steps}"
        yield Problem("schedule.warmup", rule, "use fewer steps of warmup or more of training", schedule.warmup)
    if decay > steps:
        rule = f"must be at most train.steps = {steps}"
        yield Problem("schedule.decay", rule, "use fewer steps of decay or more of training", decay)
    elif schedule.name == "wsd" and schedule.warmup <= steps < schedule.warmup + decay:
        rule = f"with schedule.warmup = {schedule.warmup} must fit into train.steps = {steps}"
        yield Problem("schedule.decay", rule, f"use at most {steps - schedule.warmup}", decay)


def _sources(key: str, sources: list[Source]) -> Iterator[Problem]:
    for i, source in enumerate(sources):
        if not source.path:
            yield Problem(f"{key}[{i}].path", "is missing", "give the prefix of a token store: PATH.bin and PATH.idx")
        if source.weight <= 0:
            yield Problem(
                f"{key}[{i}].weight", "must be greater than 0", "leave the source out to skip it", source.weight
            )


def _stores(key: str, sources: list[Source]) -> Iterator[Problem]:
    for i, source in enumerate(sources):
        missing = [source.path + end for end in (".bin", ".idx") if not Path(source.path + end).is_file()]
        if missing:
            extra = source.path.endswith((".bin", ".idx"))
            fix = (
                f"leave out the {source.path[-4:]}" if extra else "mend the path, or make it with megalite-prepare-data"
            )
            yield Problem(f"{key}[{i}].path", f"no such file: {listing(missing, 'and')}", fix, source.path)


def _without_dp_shard(parallel: Parallel) -> int:
    return parallel.pp * parallel.dp_replicate * parallel.cp * parallel.tp


def _dp_shard(parallel: Parallel, world_size: int | None) -> int:
    """The size of the axis; 0 where the other axes leave nothing."""
    if isinstance(parallel.dp_shard, int):
        return parallel.dp_shard
    return 1 if world_size is None else world_size // max(1, _without_dp_shard(parallel))
