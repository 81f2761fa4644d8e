"""Drawing the next tokens of many sequences from their logits."""

import struct
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import xxhash
from torch import Tensor

NO_TOKEN = -1  # in place of a token, where logits are not finite
GREEDY_TEMPERATURE = 0.0  # the temperature at which nothing is random


@dataclass(frozen=True)
class Draw:
    """Settings for drawing the next token. Each choice narrows the one before."""

    temperature: float = 1.0  # divides logits; 0: the likeliest token
    top_k: int = 0  # drawn among so many of the likeliest tokens; 0: among all
    top_p: float = 1.0  # drawn among the fewest of the likeliest that together have this probability
    seed: int = 0

    def __call__(self, logits: Tensor, of: Iterable[tuple[int, ...]]) -> Tensor:
        """One index into every row of `logits` `[n, v]`: `[n]`, NO_TOKEN for rows that are not finite.

        of: numbers that tell every row's draw from all others. With the seed, they alone decide what is random in it,
        so it does not matter which rows are drawn together.
        """
        drawn = logits.argmax(-1) if self.temperature == GREEDY_TEMPERATURE else self._random(logits, of)
        finite = logits.sum(-1, dtype=torch.float64).isfinite()
        return drawn.masked_fill_(~finite, NO_TOKEN)

    def _random(self, logits: Tensor, of: Iterable[tuple[int, ...]]) -> Tensor:
        chosen, indices = logits, None
        if self.top_k or self.top_p < 1:  # in descending order
            chosen, indices = logits.topk(min(self.top_k or logits.shape[-1], logits.shape[-1]))
        chosen = chosen.double()
        apart = (chosen - chosen.amax(-1, keepdim=True)) / self.temperature  # a tiny temperature overflows to -inf
        chances = nucleus(apart.softmax(-1), self.top_p).cumsum(-1)
        points = torch.tensor([_uniform(self.seed, *numbers) for numbers in of], dtype=torch.float64)
        last = chances[:, -1:]
        below = torch.minimum(points.to(last.device)[:, None] * last, torch.nextafter(last, torch.zeros_like(last)))
        places = torch.searchsorted(chances, below, right=True).clamp_(max=chances.shape[-1] - 1)
        return (places if indices is None else indices.gather(-1, places))[:, 0]


def nucleus(chances: Tensor, share: float) -> Tensor:
    """`chances` `[n, k]`, which descend, with 0 for all but the first of a row that together reach `share`.

    This is nucleus sampling (Holtzman et al. 2020, arXiv 1904.09751). At least one chance of a row is left.
    """
    if share >= 1:
        return chances
    before = chances.cumsum(-1).roll(1, -1)
    before[:, 0] = 0
    return chances.where(before < share, 0)


def _uniform(*numbers: int) -> float:
    """A random number of at least 0 and below 1: a pure function of whole numbers."""
    key = struct.pack(f"<{len(numbers)}q", *numbers)
    return float((xxhash.xxh3_64_intdigest(key) >> 11) * 2.0**-53)
