"""Chooses the micro-batch and the data-parallel mode that fit a device, and checks predicted memory."""

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

from megalite.base.errors import InputError, Problem
from megalite.base.terminal import gib_above
from megalite.config.parallel_schema import DataMode
from megalite.config.rules.numbers import every_divisor
from megalite.config.schema import Config
from megalite.plan.automatic import Costing
from megalite.plan.batches import batch_sizes
from megalite.plan.memory.held import HOST_MEMORY
from megalite.plan.memory.peak import KINDS, each_rank, memory_of_ranks
from megalite.plan.pipeline import can_be_planned, table_of
from megalite.plan.resolved import resolve
from megalite_launch.base.texts import memory_text

GIB = 1 << 30
TENSOR_SHARE = 0.9  # share of a GPU's memory for tensors; CUDA, NCCL and the allocator's fragments take the rest


def peak_bytes(config: Config, limit: float = math.inf, costing: Costing | None = None) -> int:
    """Predicted bytes of the fullest rank at the peak of the fullest training step.

    limit: if a rank needs more bytes than this, the result is that of the first such rank. costing: as for `resolve`.
    """
    most = 0
    for memory in each_rank(config, resolve(config, costing=costing)):
        most = max(most, memory.total)
        if most > limit:
            break
    return most


def fitted(
    config: Config,
    offered: int | None = None,
    peak: Callable[..., int] | None = None,
    costing: Costing | None = None,
) -> Config:
    """The configuration with `batch.micro` as a number and `parallel.data.mode` as one of the four modes.

    The micro-batch is the largest of `choices` that fits `batch.memory` in some mode; the mode is the one that sends
    least and fits beside it. In the result, `batch.memory` is null, except under `schedule: auto`, which it
    limits as well. offered: bytes of a device, used if `batch.memory` is null; None: unknown. peak: in place of
    `peak_bytes`. costing: as for `resolve`. Raises InputError if not even one sequence fits, or if the micro-batch is
    to be chosen and neither `batch.memory` nor `offered` is given.
    """
    # With the room that it has, `auto` fits any micro-batch, of which hardly two may be under way then.
    held = None if costing is None else partial(costing, with_room=False)
    peak = peak or partial(peak_bytes, costing=held)
    asked = config.batch.memory
    limit = offered if asked is None else round(asked * GIB)
    config = replace(config, batch=replace(config.batch, memory=None))
    known = config.parallel.data.mode != "auto" or limit is None
    modes = (config.parallel.data_mode,) if known else config.parallel.data_modes

    def least(config: Config, limit: float = math.inf) -> int:
        return min(peak(with_mode(config, mode), limit) for mode in modes)

    config = _fit_micro(config, limit, asked, least)
    each = [with_mode(config, mode) for mode in modes]
    config = next((one for one in each[:-1] if limit is not None and peak(one, limit) <= limit), each[-1])
    return replace(config, batch=replace(config.batch, memory=asked)) if config.parallel.pipeline.searched else config


def with_mode(config: Config, mode: DataMode) -> Config:
    """The configuration with `parallel.data.mode`."""
    data = replace(config.parallel.data, mode=mode)
    return replace(config, parallel=replace(config.parallel, data=data))


def _fit_micro(config: Config, limit: int | None, asked: float | None, peak: Callable[..., int]) -> Config:
    batch = config.batch
    if batch.micro != "auto":
        return config
    if limit is None:
        rule = "is needed to fit batch.micro = auto where there is no GPU to ask"
        raise InputError([Problem("batch.memory", rule, "give GiB per device, or batch.micro a number", None)])

    def of(micro: int) -> Config:
        return replace(config, batch=replace(batch, micro=micro))

    @cache
    def fits(micro: int) -> bool:
        return peak(of(micro), limit) <= limit

    sizes = choices(config)
    first = bisect_left(sizes, True, key=fits)
    if first == len(sizes):
        raise InputError([_too_few(asked, sizes[-1], peak(of(sizes[-1])), limit)])
    if first and config.parallel.pipeline.schedule == "interleaved_1f1b":
        # Rounds are up to twice as large as they must be, so a larger micro-batch may take less memory.
        first = next(at for at, micro in enumerate(sizes) if micro < 2 * sizes[first - 1] and fits(micro))
    return of(sizes[first])


def planned(config: Config, costing: Costing | None = None) -> Config:
    """The configuration that ranks are started with; what only their GPUs can tell stays auto.

    costing: as for `resolve`. Raises InputError for memory that not even one sequence fits, and for a schedule that
    cannot run.
    """
    if config.batch.memory is not None or config.run.device == "cpu":
        config = fitted(config, costing=costing)
    if config.batch.micro != "auto":
        table_of(config, None, costing)
    return config


def _too_few(asked: float | None, micro: int, needed: int, limit: int) -> Problem:
    offered = memory_text(limit) if asked is not None else f"the {memory_text(limit)} of a device for tensors"
    rule = f"{offered} are too few: a micro-batch of {micro} has a predicted peak of {memory_text(needed)}"
    more = "" if asked is None else f"at least {gib_above(needed)}, "
    return Problem("batch.memory", rule, f"use {more}train.recompute, or more ranks to share the model", asked)


def check_memory(config: Config, total: int, of: str, ranks: int | None = None, costing: Costing | None = None) -> str:
    """A warning if the predicted memory comes near to `total` bytes; "" if it does not.

    of: the name of what has `total` bytes. ranks: how many ranks share these bytes, all on one host; None: each rank
    has a device of its own. costing: as for `resolve`. Raises InputError if training cannot fit.
    """
    memories = memory_of_ranks(config, costing)
    fullest = max(memories, key=lambda memory: memory.total)
    together = sum(memory.total + sum(memory.of(HOST_MEMORY).values()) for memory in memories)
    needed = fullest.total if ranks is None else together * ranks // len(memories)
    if needed <= TENSOR_SHARE * total:
        return ""
    kinds = KINDS if ranks is None else (*KINDS, HOST_MEMORY)
    parts = sorted(((sum(fullest.of(kind).values()), kind) for kind in kinds), reverse=True)[:3]
    largest = ", ".join(f"{kind} {memory_text(size)}" for size, kind in parts)
    without = ", checkpoint.async=false" if ranks is not None and config.checkpoint.async_ else ""
    everybody = ranks == config.parallel.layout.world_size
    who = f"pipeline rank {fullest.pp}" if ranks is None else f"{'all' if everybody else ranks} ranks together"
    told = (
        f"{who} would need {memory_text(needed)} at the peak of a step, as predicted, of {memory_text(total)} of {of} "
        f"(of the fullest rank: {largest}); use train.recompute=selective or full, a smaller "
        f"batch.micro{without}, or more ranks to share the model"
    )
    if needed > total:
        raise InputError(told)
    return told


def choices(config: Config) -> list[int]:
    """Micro-batch sizes that `auto` may take, the largest first, 1 among them.

    Each divides every global batch of the run. Each cuts `batch.global` into at least `parallel.pp` micro-batches on a
    rank, if there are that many sequences, so that every stage has work. Sizes that make too many micro-batches to be
    planned are left out, except for the largest size.
    """
    dp, pp, sizes = config.parallel.layout.dp, config.parallel.pp, batch_sizes(config)
    shared = math.gcd(sizes[0], sizes[-1], sizes.step * (len(sizes) > 1)) // dp
    largest = max(1, config.batch.global_ // dp // pp)
    found = [micro for micro in reversed(every_divisor(shared)) if micro <= largest]
    return [found[0], *(micro for micro in found[1:] if can_be_planned(config, config.batch.global_ // (dp * micro)))]
