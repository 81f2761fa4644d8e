"""Sampling from a decoder held by one process."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megalite.config.errors import InputError
from megalite.model.decoder import Decoder


@dataclass(frozen=True)
class Draw:
    """How the next token is drawn. Each choice narrows the one before."""

    temperature: float = 1.0  # divides logits; 0: the likeliest token
    top_k: int = 0  # drawn among so many of the likeliest tokens; 0: among all
    top_p: float = 1.0  # drawn among the fewest of the likeliest that together have this probability
    seed: int = 0

    def __call__(self, logits: Tensor, generator: torch.Generator) -> int:
        """Draw an index into `logits` `[v]`. Raises InputError for logits that are not finite."""
        if not logits.isfinite().all():
            raise InputError("the model's logits are not finite: its weights are too large to write text with")
        if self.temperature == 0:
            return int(logits.argmax())
        likeliest = logits.double().topk(min(self.top_k or len(logits), len(logits)))
        apart = (likeliest.values - likeliest.values[0]) / self.temperature  # a tiny temperature overflows to -inf
        chances = nucleus(apart.softmax(0), self.top_p)
        return int(likeliest.indices[torch.multinomial(chances, 1, generator=generator)])


def nucleus(chances: Tensor, share: float) -> Tensor:
    """`chances`, which descend, with 0 for all but the first ones that together reach `share`.

    This is nucleus sampling (Holtzman et al. 2020, arXiv 1904.09751). At least one chance is left.
    """
    before = chances.cumsum(0).roll(1)
    before[0] = 0
    return chances if share >= 1 else chances.where(before < share, 0)


@torch.inference_mode()
def sample(decoder: Decoder, prompt: Sequence[int], count: int, vocabulary: int, draw: Draw) -> Iterator[int]:
    """The `count` tokens that follow `prompt`, one by one.

    vocabulary: only ids below this number are drawn, since the model's vocabulary may be padded. The model sees the
    latest `sequence_length` tokens and runs over all of them for every new one; there is no cache.
    """
    generator = torch.Generator().manual_seed(draw.seed)
    tokens = list(prompt)
    for _ in range(count):
        context = torch.tensor(tokens[-decoder.model.sequence_length :])[:, None]  # s b
        token = draw(decoder(context)[-1, 0, :vocabulary], generator)
        tokens.append(token)
        yield token
