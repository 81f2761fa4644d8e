"""Scores texts by the likelihood that a model gives them."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from megalite.base.errors import InputError
from megalite.inference.engine import Engine
from megalite.inference.flat import Stem

PASS_TOKENS = 8192  # tokens of one pass, or a single text that has more


class Score(NamedTuple):
    """The score of one branch."""

    log_likelihood: float  # in nats
    greedy: bool  # whether each of its tokens is the likeliest


def score(engine: Engine, stems: Sequence[Stem]) -> list[list[Score]]:
    """The scores of all branches of every stem, on all ranks. Collective. Raises InputError if one is not finite."""
    return [
        [Score(part[:, 0].sum().item(), bool(part[:, 1].all())) for part in parts]
        for parts in token_scores(engine, stems)
    ]


@torch.inference_mode()
def token_scores(engine: Engine, stems: Sequence[Stem]) -> list[list[torch.Tensor]]:
    """Scores of tokens, `[tokens, 2]` for each branch of each stem: log-likelihood, and whether it is the likeliest.

    On all ranks; collective. Raises InputError if one is not finite.
    """
    if not stems:
        return []
    parts = [part for stem in stems for part in engine.alike(stem)]
    found = engine.scores(list(_passes(parts))).cpu()
    if not found.isfinite().all():
        raise InputError("the model's logits are not finite: its weights are too large to score text with")
    each = iter(found.split([len(branch) for stem in stems for branch in stem.branches]))
    return [[next(each) for _ in stem.branches] for stem in stems]


def _passes(stems: Sequence[Stem]) -> Iterator[list[Stem]]:
    taken: list[Stem] = []
    tokens = 0
    for stem in stems:
        if taken and tokens + stem.length > PASS_TOKENS:
            yield taken
            taken, tokens = [], 0
        taken.append(stem)
        tokens += stem.length
    if taken:
        yield taken
