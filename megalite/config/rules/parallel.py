"""Rules of the parallel section: the pipeline, sequences split over ranks, data parallelism, and the world."""

from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path

from megalite.base.errors import InputError, Problem, counted, listing
from megalite.config.layout import shard_dim
from megalite.config.model_schema import Model
from megalite.config.parallel_schema import SCHEDULES, Parallel, Pipeline
from megalite.config.rules.numbers import divisible, divisors, multiples
from megalite.config.rules.ranges import MAX_RANKS, most
from megalite.config.schema import Config
from megalite.config.yaml import read_mapping

SCHEDULE_FILES = (".yaml", ".yml")
MAX_SCHEDULE_BYTES = 16 << 20  # largest file: as many as the longest schedule that can be planned
MAX_SEARCHED_SIZES = 32  # batch sizes that `auto` searches orders for; each takes up to seconds


def parallel_rules(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Every broken rule of a layout, for a job of `world_size` ranks (None: no launcher gives one)."""
    yield from _tensor_parallel(config.model, config.parallel.tp)
    yield from _overlap(config)
    yield from _experts(config.model, config.parallel, world_size)
    yield from _sequence(config.model, config.parallel)
    yield from _pipeline(config.model.layers, config.parallel)
    yield from _schedule_file(config)
    yield from _memory_of_auto(config)
    yield from _batches_of_auto(config)
    yield from _data_parallel(config, world_size)
    yield from _world(config.parallel, world_size)


def shards(parallel: Parallel, world_size: int | None) -> int:
    """The size of dp_shard, rounded down if it is automatic: 0 if the other axes leave no ranks, 1 if `world_size` is
    None."""
    if isinstance(parallel.dp_shard, int):
        return parallel.dp_shard
    return 1 if world_size is None else world_size // max(1, _without_dp_shard(parallel))


def virtual_stages(parallel: Parallel) -> int | None:
    """`parallel.pipeline.virtual_stages`, or the stages per rank that a schedule file places.

    None for a named schedule without the key, and for a file without that number, which is refused when it is planned.
    """
    pipeline = parallel.pipeline
    if pipeline.virtual_stages is not None or pipeline.schedule in SCHEDULES:
        return pipeline.virtual_stages
    try:
        placement = read_mapping(Path(pipeline.schedule), MAX_SCHEDULE_BYTES).get("placement")
    except InputError:
        return None
    stages, p = len(placement) if isinstance(placement, list) else 0, max(1, parallel.pp)
    return stages // p if stages and stages % p == 0 else None


def _tensor_parallel(model: Model, tp: int) -> Iterator[Problem]:
    for name in ("heads", "kv_heads", "ffn"):
        yield from divisible(f"model.{name}", getattr(model, name), "parallel.tp", tp)


def _overlap(config: Config) -> Iterator[Problem]:
    if config.parallel.tensor.overlap != "symmetric" or config.plain_products:
        return
    if config.train.precision == "fp8":
        other = "train.precision = fp8"
    elif config.model.four_bits:
        other = "adapter.base = nf4"
    else:
        other = f"train.product = {config.train.product}"
    rule = f"fuses PyTorch's own matrix products alone with collectives, not those of {other}"
    yield Problem("parallel.tensor.overlap", rule, "use pieces, or auto", "symmetric")


def _experts(model: Model, parallel: Parallel, world_size: int | None) -> Iterator[Problem]:
    ep, tp, key = parallel.ep, parallel.tp, "parallel.ep"
    yield from _expert_count(model, ep)
    yield from _buffers(parallel)
    if model.experts is None or min(ep, tp) < 1:
        return
    if (shared := model.experts.shared_width) is not None:
        yield from divisible("model.experts.shared_width", shared, "parallel.tp", tp)
    ranks = shards(parallel, world_size) * parallel.cp * tp
    if ep % tp:
        rule = f"must be a multiple of parallel.tp = {tp}, which does not split experts"
        yield Problem(key, rule, f"use {listing(multiples(ep, tp, MAX_RANKS))}", ep)
    elif ranks >= 1 and ranks % ep:
        rule = f"must divide the {ranks} ranks of dp_shard · cp · tp"
        yield Problem(key, rule, f"use {listing(divisors(ranks, ep, tp))}", ep)
    elif parallel.data.sharded and not share_experts(model, ep, ranks // ep):
        same = counted(model.experts.count // ep, "expert")
        rule = (
            f"leaves {ranks // ep} ranks to shard {same}: that must divide their number, their width "
            f"{model.experts.width or model.ffn} or model.width = {model.width}, so that all hold as much"
        )
        if model.four_bits:
            rule += "; with adapter.base=nf4, their number or both widths, so that blocks stay whole"
        yield Problem(key, rule, "use more ranks of ep, dp_replicate in place of some dp_shard, or data mode ddp", ep)


def share_experts(model: Model, ep: int, ranks: int) -> bool:
    """Return whether `ranks` ranks with the same experts can share out the parameters of these evenly."""
    experts = model.experts
    if experts is None or min(ep, ranks, experts.count // max(ep, 1)) < 1:
        return True
    count, width = experts.count // ep, experts.width or model.ffn
    if model.four_bits:  # blocks of inputs stay whole
        return all(shard_dim((count, outputs), ranks) is not None for outputs in (width, model.width))
    return shard_dim((count, width, model.width), ranks) is not None


def _buffers(parallel: Parallel) -> Iterator[Problem]:
    if parallel.ep == 1 and parallel.experts.buffers == "worst_case":
        rule = "has no meaning with parallel.ep = 1: no rows come from other ranks, and nothing waits"
        yield Problem("parallel.experts.buffers", rule, "use exact, or a larger parallel.ep", "worst_case")


def _expert_count(model: Model, ep: int) -> Iterator[Problem]:
    if model.experts is not None:
        yield from divisible("model.experts.count", model.experts.count, "parallel.ep", ep)
    elif ep > 1:
        yield Problem("parallel.ep", "has no meaning without model.experts", "use 1", ep)


def _sequence(model: Model, parallel: Parallel) -> Iterator[Problem]:
    cp, tp, parts, length = parallel.cp, parallel.tp, parallel.sequence_parts, model.sequence_length
    if cp <= 1 or tp < 1:  # between tensor-parallel regions too, activations are split along the sequence
        yield from divisible("model.sequence_length", length, "parallel.tp", tp)
        return
    method = f"parallel.context.method = {parallel.context.method}"
    if length >= 1 and length % parts:
        product = "parallel.cp · parallel.tp" if parts == cp * tp else "2 · parallel.cp · parallel.tp"
        rule = f"must be divisible by {product} = {parts} with {method}"
        fitting = multiples(length, parts, most("model.sequence_length"))
        yield Problem("model.sequence_length", rule, f"use {listing(fitting) or 'smaller axes'}", length)
    heads = model.heads
    if parallel.context.method == "ulysses" and heads >= 1 and heads % (cp * tp):
        rule = f"must be divisible by parallel.cp · parallel.tp = {cp * tp} with {method}, which shares out heads"
        counts = [number // tp for number in divisors(heads, cp * tp, tp)]
        fix = f"cp {listing(counts)}, or " if counts else ""
        yield Problem("model.heads", rule, f"use {fix}method ring or all_gather", heads)


def pinned_rules(config: Config, pinned: Collection[str]) -> Iterator[Problem]:
    """Every broken rule of the pipeline and of experts that no layout can change which has the values of the keys in
    `pinned`."""
    of_any = replace(config, batch=replace(config.batch, micro=1))
    if "parallel.ep" in pinned:
        yield from _expert_count(config.model, config.parallel.ep)
    if "parallel.ep" in pinned or config.model.experts is None:
        yield from _buffers(config.parallel)
    yield from _memory_of_auto(of_any)
    if "parallel.pipeline.schedule" in pinned:
        yield from _schedule_name(config.parallel.pipeline.schedule)
        yield from _schedule_file(of_any)
    if "parallel.pipeline.split" in pinned:
        yield from _split(config.model.layers, config.parallel.pipeline.split or [])


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
    yield from _split(layers, split)


def _split(layers: int, split: list[int]) -> Iterator[Problem]:
    key, balanced = "parallel.pipeline.split", "use null for a balanced split"
    if any(count < 0 for count in split) or 0 in split[1:-1]:
        rule = "only the first stage, which has the embedding, and the last, which has the head, may have 0 layers"
        yield Problem(key, rule, balanced, split)
    if sum(split) != layers:
        yield Problem(key, f"must add up to model.layers = {layers}, not {sum(split)}", balanced, split)


def _pipeline_schedule(pipeline: Pipeline) -> Iterator[Problem]:
    name, virtual = pipeline.schedule, pipeline.virtual_stages
    key = "parallel.pipeline.virtual_stages"
    yield from _schedule_name(name)
    if virtual is None or virtual < 1:
        return
    allowed = (1, 2) if name == "auto" else (SCHEDULES.get(name),)
    if name in SCHEDULES and name != "interleaved_1f1b" and virtual not in allowed:
        rule = f"must be {listing(allowed)} for parallel.pipeline.schedule = {name}"
        yield Problem(key, rule, "use null, or interleaved_1f1b, which has as many as you like", virtual)


def _schedule_name(name: str) -> Iterator[Problem]:
    if name not in SCHEDULES and not name.endswith(SCHEDULE_FILES):
        fix = f"use {listing(list(SCHEDULES))}, or the path of a file that ends in {listing(SCHEDULE_FILES)}"
        yield Problem("parallel.pipeline.schedule", "is not a schedule", fix, name)


def _memory_of_auto(config: Config) -> Iterator[Problem]:
    pipeline, key = config.parallel.pipeline, "parallel.pipeline.memory"
    if pipeline.memory is None:
        return
    if pipeline.schedule != "auto":
        rule = f"has no meaning with parallel.pipeline.schedule = {pipeline.schedule}, which holds what it holds"
        yield Problem(key, rule, "use null, or parallel.pipeline.schedule=auto", pipeline.memory)
    elif config.train.recompute == "budget":
        rule = "cannot be kept with train.recompute = budget, which fits what layers keep to a schedule that is there"
        yield Problem(key, rule, "use null, or train.recompute none, selective or full", pipeline.memory)
    elif config.batch.micro == "auto":
        rule = "needs batch.micro as a number: how many micro-batches fit depends on their size"
        yield Problem(key, rule, "use null, or give batch.micro", pipeline.memory)


def _batches_of_auto(config: Config) -> Iterator[Problem]:
    rampup, full = config.batch.rampup, config.batch.global_
    if rampup is None or config.parallel.pipeline.schedule != "auto":
        return
    increment = rampup.start if rampup.increment is None else rampup.increment
    sizes = (full - rampup.start) // increment + 1 if increment >= 1 else 0
    if sizes > MAX_SEARCHED_SIZES:
        rule = (
            f"makes {sizes:,} batch sizes, and parallel.pipeline.schedule = auto searches an order for each of them, "
            f"{MAX_SEARCHED_SIZES} at most"
        )
        yield Problem("batch.rampup", rule, "use a larger increment, or a schedule by name")


def _schedule_file(config: Config) -> Iterator[Problem]:
    if config.parallel.pipeline.schedule in SCHEDULES:
        return
    rule = "needs a schedule by name: the file of parallel.pipeline.schedule is for one number of micro-batches"
    if config.batch.micro == "auto":
        yield Problem("batch.micro", rule, f"use a number, or {listing(list(SCHEDULES))}", "auto")
    if config.batch.rampup is not None:
        yield Problem("batch.rampup", rule, f"use null, or {listing(list(SCHEDULES))}")


def _data_parallel(config: Config, world_size: int | None) -> Iterator[Problem]:
    data, precision = config.parallel.data, config.train.dtype
    if data.reduce_precision == "bf16" and precision != "bf16":
        rule = f"needs train.precision = bf16, not {precision}"
        yield Problem("parallel.data.reduce_precision", rule, "use fp32: gradients have their own precision", "bf16")
    if config.parallel.placement.parameters == "host":
        yield from _on_host(config, world_size)


def _on_host(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Rules of parameters in host memory, which FSDP2 copies to the device where they are gathered."""
    parallel, key = config.parallel, "parallel.placement.parameters"
    alone = parallel.dp_replicate * shards(parallel, world_size) * parallel.cp == 1
    if parallel.data.mode == "ddp" or (alone and parallel.data.mode not in ("auto", "zero3")):
        ranks = "one data-parallel rank" if alone else "data-parallel ranks"
        rule = f"needs weights that are gathered, but parallel.data.mode = {parallel.data.mode} keeps them on {ranks}"
        yield Problem(key, rule, f"use parallel.data.mode={'zero3' if alone else 'zero1, zero2 or zero3'}", "host")
    if config.adapter is None and config.optim.place == "device":
        rule = "needs the optimizer's states outside of the device too, but optim.placement = device"
        yield Problem(
            key, rule, "use optim.placement=host or a folder, or parallel.placement.parameters=device", "host"
        )


def _world(parallel: Parallel, world_size: int | None) -> Iterator[Problem]:
    others, shard = _without_dp_shard(parallel), parallel.dp_shard
    if others * shards(parallel, world_size) > MAX_RANKS:
        rule = f"the layout makes {others * shards(parallel, world_size):,} ranks, and {MAX_RANKS:,} is the most"
        yield Problem("parallel", rule, "use smaller sizes of its axes")
    if world_size is None or others < 1:
        return
    if shard == "auto" and world_size % others:
        fitting = multiples(world_size, others, MAX_RANKS)
        rule = f"the other axes make {counted(others, 'rank')}, which must divide the job's {world_size}"
        yield Problem("parallel.dp_shard", rule, f"start {listing(fitting) or 'fewer'} ranks", shard)
    elif shard != "auto" and shard >= 1 and shard * others != world_size:
        rule = f"the layout makes {counted(shard * others, 'rank')}, but the job has {world_size}"
        sizes = f"use dp_shard {world_size // others} or auto, or " if world_size % others == 0 else ""
        yield Problem("parallel.dp_shard", rule, f"{sizes}start {counted(shard * others, 'rank')}", shard)


def _without_dp_shard(parallel: Parallel) -> int:
    return parallel.pp * parallel.dp_replicate * parallel.cp * parallel.tp
