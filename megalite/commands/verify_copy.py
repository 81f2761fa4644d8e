"""The shrunken copy of a configuration that `megalite verify` trains, and what the copy leaves untested."""

from collections.abc import Callable
from dataclasses import asdict, replace
from math import gcd, lcm
from typing import Any

from megalite.config.layout import FOUR_BIT_BLOCK, vocabulary_rows
from megalite.config.model_schema import Base, Experts, Latent, Model, RopeScaling
from megalite.config.parallel_schema import SCHEDULES, Parallel
from megalite.config.schema import Batch, Config, Curriculum, Rampup
from megalite.plan.activations import Activations
from megalite.plan.automatic import as_tight
from megalite.plan.pipeline import tables_of
from megalite.plan.recompute_modes import GIB, Mode, by_rank, held_by_rank, kept_by_rank
from megalite.plan.resolved import estimated_costs
from megalite.plan.split import split_of
from megalite.schedule.generate import AUTO_SCHEDULE

MAX_RATE = 0.01  # the learning rate; larger steps amplify rounding errors beyond the tolerances


def shrink(config: Config) -> Config:
    """A configuration with the same layout and kind of model, as small as they allow, in float64.

    Kernels of apex, which has no float64, become `auto`. Batches and sequences that grow do so once, after the first
    step. A recompute budget is replaced by one that mixes modes.
    """
    parallel, batch = config.parallel, config.batch
    split = parallel.pipeline.split
    if split is not None:
        split = [min(layers, 2) for layers in split]
    stages = parallel.pp * parallel.pipeline.stages_per_rank
    layers = sum(split) if split is not None else min(config.model.layers, 2 * stages + 1)
    asked = 1 if batch.micro == "auto" else batch.micro
    micro, dp = min(asked, 2), parallel.layout.dp
    micro_batches = batch.global_ // (asked * dp)
    if parallel.pipeline.schedule in SCHEDULES:  # a schedule file is for one number of them
        micro_batches = min(micro_batches, 2 * parallel.pp + 1)
    kernels = config.kernels_by_operation
    other: dict[str, Any] = {operation: "auto" for operation, kernel in asdict(kernels).items() if kernel == "apex"}
    other["attention"] = "auto"  # on a CPU, in float64, there is little to choose
    model = _shrink_model(config.model, layers, parallel)
    first = full = micro * dp * micro_batches
    rampup = curriculum = None
    if batch.rampup is not None and batch.rampup.start < batch.global_:
        first = micro * dp * min(batch.rampup.start // (asked * dp), micro_batches - 1)
        rampup = Rampup(first, full - first, first * model.sequence_length)
    if batch.curriculum is not None and batch.curriculum.start < config.model.sequence_length:
        curriculum = Curriculum(model.sequence_length // 2, first * model.sequence_length)
    small = replace(
        config,
        run=replace(config.run, cluster=None),  # it runs on this machine's CPU, so auto goes by FLOPs
        model=model,
        parallel=replace(parallel, pipeline=replace(parallel.pipeline, split=split)),
        batch=Batch(micro, full, None, rampup, curriculum),
        train=replace(config.train, precision="fp64", cuda_graph=False),
        optim=replace(config.optim, lr=min(config.optim.lr, MAX_RATE)),
        kernels=replace(kernels, **other),
    )
    if config.train.recompute == "budget":
        small.train.recompute_budget = _mixing_budget(small)
    if parallel.pipeline.memory is not None:
        small.parallel.pipeline.memory = as_tight(config, small)
    return small


def _mixing_budget(config: Config) -> float:
    """The budget in GiB with which all layers of the fullest rank but one can keep everything, the fastest mode."""
    split, tables = split_of(config), tables_of(config)
    outside = kept_by_rank(tables, Activations(config).outside(len(split)))
    costs, held = by_rank(tables[0], split, estimated_costs(config)), held_by_rank(tables, split)
    ranks = [list(zip(*layers, strict=True)) for layers in zip(costs, held, strict=True)]

    def kept(mode: Mode) -> list[int]:
        layers = (sum(count * cost[mode].bytes for cost, count in rank) for rank in ranks)
        return [found + other for found, other in zip(layers, outside, strict=True)]

    most, fullest = max((size, rank) for rank, size in enumerate(kept("none")) if ranks[rank])
    spared = min(count * (cost["none"].bytes - cost["selective"].bytes) for cost, count in ranks[fullest])
    return max(most - spared / 2, *kept("full")) / GIB  # half, since measured bytes differ a little from planned ones


def _shrink_model(model: Model, layers: int, parallel: Parallel) -> Model:
    tp, cp = parallel.tp, parallel.cp
    block = FOUR_BIT_BLOCK if model.four_bits else 1  # inputs that no rank has a part of

    def up(size: int, ranks: int = 1) -> int:
        return -(-size // (block * ranks)) * block * ranks

    kv_heads = min(model.kv_heads, 2 * tp)
    heads = kv_heads * min(model.heads // model.kv_heads, 4)
    if parallel.context.method == "ulysses":
        heads = lcm(heads, tp * cp)
    kv_heads = kv_heads if model.attention.latent is None else heads
    length = 6 * parallel.sequence_parts if cp > 1 else 12 * tp
    attention = model.attention
    for key in ("full_every", "nope_every"):
        every = getattr(attention, key)
        if every is not None and every <= model.layers:  # the copy too has a layer of this kind
            attention = replace(attention, **{key: min(every, layers)})
    if attention.window is not None and attention.window < model.sequence_length:
        # The same share of a rank's chunk as at full size, so that the same ranks exchange keys and values.
        # A window of a token alone would leave nothing of queries and keys.
        share = attention.window * length / model.sequence_length
        attention = replace(attention, window=max(min(2, attention.window), min(round(share), length - 1)))
    width, own = up(8 * heads), model.heads * model.head_size
    # Heads together are as wide as the model, wider or narrower, as they are at full size.
    head_width = None if model.head_width is None else 8 if own == model.width else 12 if own > model.width else 6
    if block > 1:
        head_width = block // gcd(block, heads // tp)
    rotary_width = _shrink_rotary(model, head_width or 8)
    attention = replace(attention, latent=_shrink_latent(model, width, head_width or 8, block))
    return replace(
        model,
        attention=attention,
        experts=_shrink_experts(model, width, parallel, up),
        rotary_width=rotary_width,
        rope_scaling=_shrink_scaling(model, rotary_width or head_width or 8, length),
        base=_shrink_base(model, width, head_width or 8, layers),
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=kv_heads,
        head_width=head_width,
        ffn=up(_side(model.ffn, model.width, width, tp, 24), tp),
        vocab_size=_shrink_vocabulary(model, width, tp),
        sequence_length=length,
    )


def _shrink_latent(model: Model, width: int, head_width: int, block: int) -> Latent | None:
    """About the same shares of the width and of a head, and unlike each other if they are. block: divides ranks."""
    latent = model.attention.latent
    if latent is None:
        return None

    def share(rank: int, least: int) -> int:
        found = min(rank, max(least, round(rank * width / model.width)))
        return -(-found // block) * block

    return Latent(
        query_rank=None if latent.query_rank is None else share(latent.query_rank, 6),
        key_rank=share(latent.key_rank, 5),
        value_width=max(1, round(latent.value_width * head_width / model.head_size)) if block == 1 else head_width,
    )


def _shrink_experts(model: Model, width: int, parallel: Parallel, up: Callable[[int, int], int]) -> Experts | None:
    """Eight experts or so, as many on every rank; more than are active, if so at full size; layers without, if any are.

    Ranks with the same ones shard these by experts if so at full size, else by rows of their matrices. They are not
    forced to be chosen equally often: whom a token gets would depend on its place on a rank. up: rounds a width.
    """
    experts = model.experts
    if experts is None:
        return None
    tp, ep, same = parallel.tp, parallel.ep, parallel.expert_shards
    each = min(experts.count // ep, max(2, 8 // ep))
    hidden = None if experts.width is None else up(_side(experts.width, model.width, width, 1, 24), 1)
    if experts.count // ep % same == 0:
        each = -(-each // same) * same
    else:
        each -= each % same == 0
        rows = hidden or _side(model.ffn, model.width, width, tp, 24)
        hidden = -(-rows // same) * same if rows % same else hidden
    count = ep * each
    groups = next((number for number in (4, 2) if experts.groups > 1 and count % (2 * number) == 0), 1)
    shared = experts.shared_width
    return replace(
        experts,
        count=count,
        active=count if experts.active == experts.count else min(experts.active, 2, count - 1),
        width=hidden,
        groups=groups,
        active_groups=groups if experts.active_groups == experts.groups else max(groups // 2, 1),
        shared_width=None if shared is None else up(_side(shared, model.width, width, tp, 24), tp),
        first_dense=min(experts.first_dense, 1),
        every=min(experts.every, 2),
        force_balance=False,
    )


def _shrink_vocabulary(model: Model, width: int, tp: int) -> int:
    """A vocabulary with padding, and with ranks of nothing else, if there is or are some at full size."""

    def has_padding(size: int) -> tuple[bool, bool]:
        each = vocabulary_rows(size, tp)
        return each * tp > size, each * (tp - 1) >= size

    full = has_padding(model.vocab_size)
    size = vocabulary_rows(_side(model.vocab_size, model.width, width, tp, 48), tp) * tp
    if not any(full):
        return size
    return next(found for found in range(min(size, model.vocab_size), 0, -1) if has_padding(found) == full)


def _shrink_rotary(model: Model, head_size: int) -> int | None:
    """About the same share of a head: four features or more, since one pair would turn alike in all scalings."""
    if model.rotary_width is None:
        return None
    pairs = round(model.rotary_width * head_size / model.head_size / 2)
    return 2 * max(2, min(pairs, head_size // 2 - 1))


def _shrink_scaling(model: Model, rotary_size: int, length: int) -> RopeScaling | None:
    """The same scaling, whose original length is to the copy's sequences what it is to those at full size."""
    scaling = model.rope_scaling
    if scaling is None or scaling.kind not in ("longrope", "dynamic"):
        return scaling
    share = scaling.original_length / model.sequence_length
    small = replace(scaling, original_length=min(round(share * length), length - 1) if share < 1 else length)
    small.original_length = max(2, small.original_length)
    for name in ("short_factors", "long_factors"):
        if factors := getattr(scaling, name):
            setattr(small, name, [factors[2 * pair * len(factors) // rotary_size] for pair in range(rotary_size // 2)])
    return small


def _side(size: int, full_width: int, width: int, tp: int, share: int) -> int:
    """Size a matrix's other side, which tp divides: longer than the copy's width, as long or shorter, as at full size.

    Numbers that depend on the longer side, such as Muon's scale, would else be the same for a matrix and its shard.
    share: the least number of rows of a rank, but where the side has to be shorter than the width.
    """
    if size == full_width:
        return width
    return max(share, width // tp + 4) * tp if size > full_width else min(share * tp, width - 4 * tp)


def _shrink_base(model: Model, width: int, head_size: int, layers: int) -> Base | None:
    """Return a base that is to the shrunken model about what `model.base` is to `model`, and equal only if that is."""
    base = model.base
    if base is None:
        return None

    def shrunk(size: int | None, full: int, small: int) -> int | None:
        if size is None or size == full:
            return None if size is None else small
        near = max(1, round(size * small / full))
        return near if near != small else small + 1

    head_width = shrunk(base.head_width, model.head_size, head_size)
    return Base(shrunk(base.width, model.width, width), shrunk(base.layers, model.layers, layers), head_width)


def not_compared(config: Config, steps: int) -> list[str]:
    """The aspects of a configuration that a comparison of `steps` steps of its shrunken copy does not test."""
    small, model, batch, train = shrink(config), config.model, config.batch, config.train
    sizes = ("layers", "width", "heads", "kv_heads", "ffn", "vocab_size", "sequence_length")
    shrunk = [
        f"{name} {getattr(model, name):,} as {getattr(small.model, name):,}"
        for name in sizes
        if getattr(model, name) != getattr(small.model, name)
    ]
    attention = replace(model.attention, latent=None), replace(small.model.attention, latent=None)
    sections: dict[str, tuple[Any, Any]] = {"attention": attention}
    if model.attention.latent is not None:
        sections["latent"] = model.attention.latent, small.model.attention.latent
    if model.experts is not None:
        sections["experts"] = replace(model.experts, force_balance=False), small.model.experts
    shrunk += [
        f"{section}.{name} {value:,} as {getattr(in_small, name):,}"
        for section, (full, in_small) in sections.items()
        for name, value in vars(full).items()
        if value != getattr(in_small, name)
    ]
    apex = "apex" in vars(config.kernels_by_operation).values()
    rampup, curriculum = small.batch.rampup, small.batch.curriculum
    sequences = f"{rampup.start} and {small.batch.global_}" if rampup else ""
    lengths = f"{curriculum.start} and {small.model.sequence_length}" if curriculum else ""
    told = {
        f"sizes ({', '.join(shrunk)})": bool(shrunk),
        f"batch.global {batch.global_:,} as {small.batch.global_:,}": batch.global_ != small.batch.global_,
        f"batch.micro {batch.micro} as {small.batch.micro}": batch.micro != small.batch.micro,
        f"batch.rampup but for {sequences} sequences": bool(sequences) and steps > 1,
        f"batch.curriculum but for {lengths} tokens": bool(lengths) and steps > 1,
        "how batches grow, as --steps is 1": bool(sequences or lengths) and steps == 1,
        f"optim.lr {config.optim.lr:g} as {small.optim.lr:g}": config.optim.lr != small.optim.lr,
        f"the roundings of train.precision {train.precision}": train.precision != "fp64",
        "which layers train.recompute_budget chooses at full size": train.recompute == "budget",
        "model.experts.force_balance": model.experts is not None and model.experts.force_balance,
        "the order that auto finds at full size, which --schedule FILE.yaml of megalite show writes": (
            config.parallel.pipeline.schedule == AUTO_SCHEDULE
        ),
        "train.cuda_graph": train.cuda_graph,
        "bfloat16 in Newton–Schulz": config.optim.name == "muon" and config.run.device != "cpu",
        "apex": apex,
        "CUDA's kernels, streams and NCCL": config.run.device != "cpu",
        "your data, checkpoints and evaluation": True,
    }
    return [what for what, matters in told.items() if matters]
