"""The micro-batch that fits a device."""

import math
from collections.abc import Callable
from dataclasses import replace

from megalite.config.errors import InputError, Problem
from megalite.config.schema import Config
from megalite.plan.batches import batch_sizes
from megalite.plan.memory import rank_memory

GIB = 1 << 30
FOR_TENSORS = 0.9  # of a GPU's memory; CUDA, NCCL and the allocator's fragments take the rest


def peak_bytes(config: Config) -> int:
    """Predicted bytes of the fullest rank at the peak of the fullest training step."""
    return max(rank_memory(config, pp).total for pp in range(config.parallel.pp))


def fit_micro(config: Config, offered: int | None = None, peak: Callable[[Config], int] = peak_bytes) -> Config:
    """The configuration with `batch.micro` as a number, the largest of `choices` that fits `batch.memory`.

    That is null then, as it has done its work. offered: bytes of a device, where `batch.memory` is null. Raises
    InputError where not even one sequence fits, or nobody says into what.
    """
    batch = config.batch
    if batch.micro != "auto":
        return config
    limit = offered if batch.memory is None else round(batch.memory * GIB)
    if limit is None:
        rule = "is needed to fit batch.micro = auto where there is no GPU to ask"
        raise InputError([Problem("batch.memory", rule, "give GiB per device, or batch.micro a number", None)])
    for micro in choices(config):
        fitted = replace(config, batch=replace(batch, micro=micro, memory=None))
        if (needed := peak(fitted)) <= limit:
            return fitted
    rule = f"{limit / GIB:.2f} GiB are too few: a micro-batch of 1 has a predicted peak of {needed / GIB:.2f} GiB"
    more = "" if batch.memory is None else f"at least {math.ceil(100 * needed / GIB) / 100:.2f}, "
    fix = f"use {more}train.recompute, or more ranks to share the model"
    raise InputError([Problem("batch.memory", rule, fix, batch.memory)])


def choices(config: Config) -> list[int]:
    """Micro-batches that `auto` may take, the largest first, 1 always among them.

    They divide every global batch of the run, and leave no stage of the pipeline without work: at least `parallel.pp`
    of them make `batch.global`, if it has that many sequences.
    """
    dp, pp = config.parallel.layout.dp, config.parallel.pp
    shared = math.gcd(*batch_sizes(config)) // dp
    largest = max(1, config.batch.global_ // dp // pp)
    return [micro for micro in range(min(shared, largest), 0, -1) if shared % micro == 0]
