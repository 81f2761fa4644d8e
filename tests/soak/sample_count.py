"""A data set whose every sample says which one it is, and the count of samples over the cycles of a killed run."""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from violation import Violation

from megalite.data.store_writer import StoreWriter

WEIGHTS = (3, 2, 1)
EPOCHS = 2.3  # of each source in a run, or a little more
LENGTH = 16  # tokens of a sample
VOCABULARY = 8192  # most of the model's size
COMMON = 64  # tokens that samples are made of, after the first two

Sample = tuple[int, int]  # source, and position in it


def write_sources(folder: Path, samples: int) -> list[int]:
    """Write a token store for each weight, for a run over `samples`; how many samples each of them has.

    The first two tokens of a sample are its source and its position.
    """
    sizes = [int(samples * weight / sum(WEIGHTS) / EPOCHS) for weight in WEIGHTS]
    for source, size in enumerate(sizes):
        tokens = np.random.default_rng(source).integers(COMMON, size=(size + 1, LENGTH))
        tokens[:, 0], tokens[:, 1] = source, np.arange(size + 1)
        with StoreWriter(folder / f"source-{source}", "<u2") as writer:
            writer.add(tokens.reshape(-1)[: size * LENGTH + 1])
    return sizes


def trained_on(attempts: Sequence[Path], batch: int, steps: int) -> list[Sample]:
    """The samples of a finished run in order: of every step, those of the latest attempt that has come to it.

    attempts: folders of notes, in order. Raises Violation where ranks that share samples do not agree, and where a
    step is missing.
    """
    taken: dict[int, list[Sample]] = {}
    for folder in attempts:
        taken |= _steps(folder, batch)
    wanted = range(0, steps * batch, batch)
    if sorted(taken) != list(wanted):
        raise Violation(f"batches began at samples {sorted(taken)}, not at {wanted}")
    return [sample for first in wanted for sample in taken[first]]


def check_epochs(samples: Sequence[Sample], sizes: Sequence[int]) -> list[float]:
    """Raise Violation unless every epoch has every sample of its source once, in the proportions of the weights.

    Returns how many epochs of each source there were.
    """
    for source, (size, weight) in enumerate(zip(sizes, WEIGHTS, strict=True)):
        positions = [position for other, position in samples if other == source]
        share = len(samples) * weight / sum(WEIGHTS)
        if not -1 < len(positions) - share < 2:
            raise Violation(f"source {source} was drawn {len(positions)} times, not {share:.1f}")
        for begin in range(0, len(positions), size):
            epoch = Counter(positions[begin : begin + size])
            whole = begin + size <= len(positions)
            if max(epoch.values()) > 1 or not epoch.keys() <= set(range(size)) or (whole and len(epoch) < size):
                _refuse(epoch, size, f"source {source}, epoch {begin // size}")
    return [sum(other == source for other, _ in samples) / size for source, size in enumerate(sizes)]


def _refuse(epoch: Counter[int], size: int, name: str) -> None:
    again = [position for position, count in epoch.items() if count > 1]
    missing = [position for position in range(size) if position not in epoch]
    raise Violation(f"{name}: samples {again} more than once; {len(missing)} missing: {missing}")


def _steps(folder: Path, batch: int) -> dict[int, list[Sample]]:
    """The samples of every batch that any rank has begun, by the number of the first."""
    shares: dict[int, dict[int, list[Sample]]] = {}
    for note in _notes(folder):
        samples = [(source, position) for source, position in note["tokens"]]
        known = shares.setdefault(note["first"], {}).setdefault(note["share"], samples)
        if known != samples:
            raise Violation(f"{folder}: ranks disagree on share {note['share']} of the batch from {note['first']}")
    found = {
        first: [sample for _, share in sorted(parts.items()) for sample in share] for first, parts in shares.items()
    }
    # Ranks are not killed at the same moment: of the last batch, some shares may be missing.
    return {first: samples for first, samples in found.items() if len(samples) == batch}


def _notes(folder: Path) -> Iterable[dict]:
    for path in sorted(folder.glob("rank-*.jsonl")):
        for line in path.read_text().splitlines(keepends=True):
            if line.endswith("\n"):  # the last may be half there
                yield json.loads(line)
