"""Texts laid end to end in one flat sequence; those that begin alike share their beginning."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from megalite.config.layers import Scores
from megalite.parallel.blocks import Block
from megalite.parallel.context import Attention, Ring, attention
from megalite.parallel.sequence import Sequences, own_blocks


@dataclass(frozen=True)
class Stem:
    """The beginning of texts, and how each goes on. The last token of a branch is only predicted, never read."""

    tokens: Sequence[int]
    branches: Sequence[Sequence[int]] = ()

    def __post_init__(self) -> None:
        if not self.tokens:  # its branches would be predicted from the text before it in the flat sequence
            raise ValueError("a stem has at least one token")

    @property
    def length(self) -> int:
        """Tokens that are read."""
        return len(self.tokens) + sum(len(branch) - 1 for branch in self.branches)


@dataclass(frozen=True)
class Flat:
    """A run of tokens in the flat sequence that begins at the position `at` of its text."""

    tokens: Sequence[int]
    at: int = 0
    row: int = 0  # row of its first token
    stem: "Flat | None" = None  # run that it continues; None: it is a beginning

    @property
    def end(self) -> int:
        return self.at + len(self.tokens)


def flat(stems: Sequence[Stem]) -> list[Flat]:
    """The runs of all texts, in the order of their rows. A stem with one branch is a single run with it."""
    found: list[Flat] = []
    row = 0
    for stem in stems:
        alone = len(stem.branches) == 1
        first = Flat([*stem.tokens, *stem.branches[0][:-1]] if alone else stem.tokens, 0, row)
        runs = [first]
        if not alone:
            at = len(stem.tokens)
            runs += [Flat(branch[:-1], at, 0, first) for branch in stem.branches if len(branch) > 1]
        for run in runs:
            found.append(replace(run, row=row))
            row += len(run.tokens)
    return found


def longest(runs: Sequence[Flat]) -> list[int]:
    """Return for every run the number of tokens of the longest text that has the same beginning."""
    ends: dict[int, int] = {}
    for run in runs:
        beginning = (run.stem or run).row
        ends[beginning] = max(ends.get(beginning, 0), run.end)
    return [ends[(run.stem or run).row] for run in runs]


def scored_rows(stems: Sequence[Stem]) -> tuple[list[int], list[int]]:
    """The rows that predict the tokens of all branches, in their order, and these tokens."""
    rows: list[int] = []
    targets: list[int] = []
    start = 0
    for stem in stems:
        last, following = start + len(stem.tokens) - 1, start + len(stem.tokens)
        for branch in stem.branches:
            rows += [last, *range(following, following + len(branch) - 1)]
            targets += branch
            following += len(branch) - 1
        start += stem.length
    return rows, targets


def attention_of(runs: Sequence[Flat], length: int, kind: Scores, device: torch.device) -> Attention:
    """Attention of a flat sequence of `length`, padding included, in which every text attends to itself alone."""
    bounds = tuple(accumulate((len(run.tokens) for run in runs), initial=0))
    bounds = bounds if bounds[-1] == length else (*bounds, length)
    if all(run.stem is None for run in runs):
        return attention("ring", None, length, device, [bounds] if len(bounds) > 2 else None, kind)
    own = own_blocks((range(length),), [Sequences(slice(0, 1), bounds)], device, kind.window_in(length))
    return Ring([[*own, *_to_stems(runs, kind)]], None, kind)


def _to_stems(runs: Sequence[Flat], kind: Scores) -> Iterator[Block]:
    """The blocks in which branches attend to their stems; with a window, to what their first tokens can see."""
    for run in runs:
        if run.stem is None:
            continue
        end = run.at
        window = kind.window or run.end
        begin, last = max(0, end - window + 1), min(run.end, end + window - 1)
        if begin < end < last:
            left = end + window - 1 - last
            queries = slice(run.row, run.row + last - end)
            keys = slice(run.stem.row + begin, run.stem.row + end)
            yield Block(slice(0, 1), queries, keys, left=left if left < end - begin - 1 else None)
