"""The samples of every optimizer step, and how the step cuts them: pure functions of the samples consumed before.

Batch-size ramp-up and sequence-length curriculum depend on the samples consumed, not on steps or ranks. So the data
state of a run is the number of samples consumed and the ranges of samples left out, and nothing else. The samples and
their order are the same under every ramp, curriculum and layout.
"""

from bisect import bisect
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile

from megalite.config.rules.numbers import every_divisor
from megalite.config.schema import Config

Ranges = tuple[tuple[int, int], ...]  # ranges of samples, [first, end): disjoint and ascending


@dataclass(frozen=True)
class GlobalBatch:
    """Batch that one optimizer step trains on: whole samples, in order."""

    first: int  # samples consumed before, left-out ones included
    samples: int
    pieces: int = 1  # shorter sequences that every sample is cut into
    left_out: Ranges = ()  # inside the batch

    @property
    def end(self) -> int:
        """Samples consumed up to the end of this step, left-out ones included."""
        return self.first + self.samples + sum(end - first for first, end in self.left_out)

    @property
    def ids(self) -> list[int]:
        """The numbers of the samples, in order."""
        starts = [self.first, *(end for _, end in self.left_out)]
        ends = [*(first for first, _ in self.left_out), self.end]
        return [sample for start, end in zip(starts, ends, strict=True) for sample in range(start, end)]


def global_batches(config: Config, consumed: int, left_out: Ranges = ()) -> Iterator[GlobalBatch]:
    """The endless sequence of a run's batches from sample `consumed` on; samples of `left_out` are skipped."""
    while True:
        for first, end in left_out:
            consumed = end if first <= consumed < end else consumed
        pieces = config.model.sequence_length // sequence_length(config, consumed)
        size = batch_size(config, consumed)
        batch = GlobalBatch(consumed, size, pieces, _inside(consumed, size, left_out))
        yield batch
        consumed = batch.end


def samples_after(config: Config, steps: int, consumed: int = 0, left_out: Ranges = ()) -> int:
    """Samples consumed after `steps` more optimizer steps from sample `consumed` on."""
    while steps > 0:
        batch = next(global_batches(config, consumed, left_out))
        alike = min([steps, *_until_another(config, batch, left_out)])
        consumed = batch.end + (alike - 1) * batch.samples
        steps -= alike
    return consumed


def _until_another(config: Config, batch: GlobalBatch, left_out: Ranges) -> Iterator[int]:
    """Yield numbers of steps with batches like `batch`: until they grow, and until they meet each range left out."""
    if batch.left_out:
        yield 1
        return
    yield from ((first - batch.first) // batch.samples for first, _ in left_out if first > batch.first)
    rampup = config.batch.rampup
    if rampup is not None and batch.samples < config.batch.global_:
        sizes = batch_sizes(config)
        grown = sizes.index(batch.samples) + 1
        larger = -(
            -grown * rampup.tokens // ((len(sizes) - 1) * config.model.sequence_length)
        )  # the first sample of a larger batch
        yield -(-(larger - batch.first) // batch.samples)


def latest_batches(config: Config, consumed: int, left_out: Ranges, end: int, count: int) -> tuple[int, int]:
    """The range of samples [first, end) of the last `count` batches, up to the batch that ends at `end`.

    Batches are counted from sample `consumed` on, so the range does not begin before that sample.
    """
    batches = takewhile(lambda batch: batch.first < end, global_batches(config, consumed, left_out))
    return [batch.first for batch in batches][-count:][0], end


def joined(ranges: Ranges) -> Ranges:
    """Samples of `ranges` as disjoint, ascending ranges that do not touch."""
    found: list[tuple[int, int]] = []
    for first, end in sorted(ranges):
        if found and first <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((first, end))
    return tuple(found)


def _inside(first: int, samples: int, left_out: Ranges) -> Ranges:
    """The left-out ranges that lie between the samples of the batch that begins at `first`."""
    inside, end = [], first + samples
    for start, stop in left_out:
        if first < start < end:
            inside.append((start, stop))
            end += stop - start
    return tuple(inside)


def batch_sizes(config: Config) -> range:
    """Every global batch size that a run can have, in samples, ascending."""
    rampup, full = config.batch.rampup, config.batch.global_
    return range(full, full + 1) if rampup is None else range(rampup.start, full + 1, rampup.increment or rampup.start)


def batch_size(config: Config, consumed: int) -> int:
    """The global batch size of the step after sample `consumed`, in samples.

    The size grows linearly with tokens (GPT-3, arXiv 2005.14165, app. B). It is rounded down, so every size has the
    same share of the ramp.
    """
    rampup, full = config.batch.rampup, config.batch.global_
    if rampup is None:
        return full
    sizes = batch_sizes(config)
    increments = len(sizes) - 1
    return sizes[min(increments * consumed * config.model.sequence_length // rampup.tokens, increments)]


def sequence_length(config: Config, consumed: int) -> int:
    """The sequence length of the step after sample `consumed`, in tokens.

    The length grows linearly with tokens (arXiv 2108.06084). It is rounded down to a multiple of the first length that
    divides the last length.
    """
    curriculum, full = config.batch.curriculum, config.model.sequence_length
    if curriculum is None or consumed * full >= curriculum.tokens:
        return full
    start = curriculum.start
    reached = start + (full - start) * consumed * full // curriculum.tokens
    shares = every_divisor(full // start)
    return start * shares[bisect(shares, reached // start) - 1]
