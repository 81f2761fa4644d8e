"""How far a run has come: all of its state but weights and moments."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """The state of a run between two steps. Random numbers are functions of `run.seed` and of these fields."""

    step: int = 0  # optimizer steps taken, those that changed nothing included
    updates: int = 0  # of them, those that changed the weights: AdamW's own count
    samples: int = 0  # position in the data: sequences consumed, left-out ones included
    tokens: int = 0  # tokens trained on
    left_out: tuple[tuple[int, int], ...] = ()  # ranges of samples [first, end) passed over after a rollback
    bad_steps: int = 0
    losses: tuple[float, ...] = ()  # the latest, oldest first: what a spike is measured against
