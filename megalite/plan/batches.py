"""Which samples every optimizer step takes, and how it cuts them, as pure functions of the samples before it.

Batch-size ramp-up and sequence-length curriculum follow the samples consumed, not steps or ranks, so a run has no
other data state, and the samples and their order are the same under every ramp, curriculum and layout.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from megalite.config.schema import Config


@dataclass(frozen=True)
class GlobalBatch:
    """What one optimizer step trains on: whole samples, in order."""

    first: int  # samples consumed before
    samples: int
    pieces: int = 1  # shorter sequences that every sample is cut into

    @property
    def end(self) -> int:
        """Samples consumed with this step."""
        return self.first + self.samples


def global_batches(config: Config, consumed: int) -> Iterator[GlobalBatch]:
    """The batches of a run from sample `consumed` on, without end."""
    while True:
        pieces = config.model.sequence_length // sequence_length(config, consumed)
        batch = GlobalBatch(consumed, batch_size(config, consumed), pieces)
        yield batch
        consumed = batch.end


def samples_after(config: Config, steps: int, consumed: int = 0) -> int:
    """Samples consumed after `steps` more optimizer steps from sample `consumed` on."""
    while steps > 0 and (size := batch_size(config, consumed)) < config.batch.global_:
        consumed, steps = consumed + size, steps - 1
    return consumed + max(0, steps) * config.batch.global_


def batch_sizes(config: Config) -> list[int]:
    """Every global batch size that a run can have, in samples, ascending."""
    rampup, full = config.batch.rampup, config.batch.global_
    return [full] if rampup is None else [*range(rampup.start, full, rampup.increment or rampup.start), full]


def batch_size(config: Config, consumed: int) -> int:
    """The global batch size of the step after sample `consumed`, in samples.

    Linear in tokens (GPT-3, arXiv 2005.14165, app. B), rounded down: every size has the same share of the ramp.
    """
    rampup, full = config.batch.rampup, config.batch.global_
    if rampup is None:
        return full
    increment = rampup.increment or rampup.start
    increments = (full - rampup.start) // increment
    reached = increments * consumed * config.model.sequence_length // rampup.tokens
    return rampup.start + min(reached, increments) * increment


def sequence_length(config: Config, consumed: int) -> int:
    """The sequence length of the step after sample `consumed`, in tokens.

    Linear in tokens (arXiv 2108.06084), rounded down to a multiple of the first length that divides the last.
    """
    curriculum, full = config.batch.curriculum, config.model.sequence_length
    if curriculum is None or consumed * full >= curriculum.tokens:
        return full
    start = curriculum.start
    reached = start + (full - start) * consumed * full // curriculum.tokens
    return next(length for length in range(reached // start * start, 0, -start) if full % length == 0)
