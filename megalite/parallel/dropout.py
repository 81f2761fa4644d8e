"""Dropout whose choices hang on the seed, the token, the feature and the layer alone: the same in every layout.

Backward makes the choices again, so that none is kept.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megalite.parallel.hashes import splitmix, start_of
from megalite.plan.parts.adapted import BLOCK

BITS = 32  # bits of a hash that decide


class _Running(threading.local):
    numbers: Tensor | None = None  # numbers of tokens that a thread computes; forward and backward may take turns


_running = _Running()


@contextmanager
def dropping(numbers: Tensor | None) -> Iterator[None]:
    """Inside, layers drop features of tokens with these numbers in the run, `[s, b]`; None: they drop nothing."""
    before, _running.numbers = _running.numbers, numbers
    try:
        yield
    finally:
        _running.numbers = before


@dataclass
class Dropout:
    """Dropout of the input of a layer with `width` features on all ranks of tp together.

    rank: of tp. split: whether a rank has some of the features of all tokens; else it has some of the tokens, or all.
    name: of the seed and the layer, which `seed_dropout` gives.
    """

    rate: float
    width: int
    rank: int
    split: bool
    name: str = ""

    def __call__(self, x: Tensor) -> Tensor:
        numbers = _running.numbers
        if numbers is None or self.rate == 0:
            return x
        first = self.rank * x.shape[-1] if self.split else 0
        own = numbers if len(x) == len(numbers) else numbers.chunk(len(numbers) // len(x))[self.rank]
        dropped: Tensor = _Dropped.apply(x, own, self.rate, self.width, first, start_of(self.name))
        return dropped


class _Dropped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, numbers: Tensor, *settings: Any) -> Tensor:
        ctx.save_for_backward(numbers)
        ctx.settings = settings
        return _masked(x, numbers, *settings)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _masked(grad, *ctx.saved_tensors, *ctx.settings), None, None, None, None, None


def _masked(x: Tensor, numbers: Tensor, rate: float, width: int, first: int, start: int) -> Tensor:
    """x `[s, b, in]` over 1 − rate where the hash of an element is not below that share of all hashes, else 0."""
    rows, tokens, least = x.flatten(0, -2), numbers.flatten(), round(rate * (1 << BITS))
    made, across = torch.empty_like(rows), torch.arange(first, first + x.shape[-1], device=x.device)
    step = max(1, BLOCK // x.shape[-1])
    for top in range(0, len(rows), step):
        mine = slice(top, top + step)
        kept = (splitmix(start, tokens[mine, None] * width + across) & ((1 << BITS) - 1)) >= least
        torch.mul(rows[mine], kept.to(x.dtype) / (1 - rate), out=made[mine])
    return made.view_as(x)
