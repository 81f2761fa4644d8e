"""Rules of the batch section: batches are whole numbers of micro-batches, shorter sequences are parts of a sample."""

from collections.abc import Iterator

from megalite.base.errors import Problem, listing
from megalite.config.rules.numbers import divisors, multiples
from megalite.config.rules.ranges import most
from megalite.config.schema import Batch, Curriculum, Rampup

MAX_SIZES = 1000  # sizes of a growing batch; for each, every rank makes a pipeline of its own


def batch_rules(
    batch: Batch, dp: int, sequence_length: int, sequence_parts: int, limits: bool = False
) -> Iterator[Problem]:
    """Every broken rule, for `dp` data-parallel ranks and sequences that come in `sequence_parts` equal parts.

    limits: whether `batch.memory` limits something else too: an order of the pipeline, or the data-parallel mode.
    """
    micro = 1 if batch.micro == "auto" else batch.micro  # auto takes what divides
    if batch.micro != "auto" and batch.memory is not None and not limits:
        rule = f"has no meaning with batch.micro = {batch.micro}"
        fix = "use null, or auto for batch.micro, parallel.data.mode or parallel.pipeline.schedule"
        yield Problem("batch.memory", rule, fix, batch.memory)
    if micro * dp >= 1 and batch.global_ >= 1:
        yield from _whole_micro_batches("batch.global", batch.global_, micro, dp)
        if batch.rampup is not None:
            yield from _rampup(batch.rampup, batch.global_, micro, dp)
    if batch.curriculum is not None and sequence_length >= 1 and sequence_parts >= 1:
        yield from _curriculum(batch.curriculum, sequence_length, sequence_parts)


def _rampup(rampup: Rampup, full: int, micro: int, dp: int) -> Iterator[Problem]:
    start = rampup.start
    increment = start if rampup.increment is None else rampup.increment
    if start < 1 or increment < 1:
        return
    yield from _whole_micro_batches("batch.rampup.start", start, micro, dp)
    if rampup.increment is not None:
        yield from _whole_micro_batches("batch.rampup.increment", increment, micro, dp)
    if start > full:
        yield Problem("batch.rampup.start", f"must be at most batch.global = {full}", value=start)
    elif (full - start) % increment:
        fitting = divisors(full - start, increment, micro * dp)
        as_start = f" is batch.rampup.start = {start}, which" if rampup.increment is None else ""
        rule = f"{as_start} must divide batch.global − batch.rampup.start = {full - start}".strip()
        fix = f"use increment {listing(fitting)}" if fitting else ""
        yield Problem("batch.rampup.increment", rule, fix, rampup.increment)
    elif (full - start) // increment >= MAX_SIZES:
        rule = f"makes {(full - start) // increment + 1:,} batch sizes; at most {MAX_SIZES:,} are allowed"
        yield Problem("batch.rampup.increment", rule, "use a larger increment", rampup.increment)


def _whole_micro_batches(key: str, value: int, micro: int, dp: int) -> Iterator[Problem]:
    together = micro * dp
    if value % together == 0:
        return
    rule = f"must be a multiple of batch.micro · data-parallel ranks = {micro} · {dp} = {together}"
    fitting = multiples(value, together, most(key))
    advice = [f"{key.rpartition('.')[2]} {listing(fitting)}"] if fitting else []
    if value % dp == 0:
        advice.append(f"micro {listing(divisors(value // dp, micro))}")
    yield Problem(key, rule, f"use {', or '.join(advice) or 'smaller micro-batches on fewer ranks'}", value)


def _curriculum(curriculum: Curriculum, full: int, parts: int) -> Iterator[Problem]:
    start = curriculum.start
    if start < 1 or (full % start == 0 and start % parts == 0):
        return
    rule = f"must divide model.sequence_length = {full}"
    if parts > 1:
        rule += f" and be a multiple of {parts}, as parallel.tp and parallel.cp need"
    fitting = divisors(full, start, parts)
    yield Problem("batch.curriculum.start", rule, f"use {listing(fitting)}" if fitting else "", start)
