"""Continuing many texts at a time. As one ends, the next that waits takes its place."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal

import torch
from torch import Tensor

from megalite.base.errors import InputError
from megalite.inference.cache import Cache
from megalite.inference.draw import NO_TOKEN, Draw
from megalite.inference.engine import Engine

PASS_TOKENS = 8192  # tokens of prompts in one pass, or a single prompt that has more

Finish = Literal["stop", "length"]


@dataclass(frozen=True)
class Request:
    """A text to continue."""

    index: int  # number of its prompt
    sample: int  # among the continuations of that prompt
    tokens: Sequence[int]  # at least one, and no more than the model's sequence has
    most: int  # new tokens; the last of them is drawn from the model's last position or before it


@dataclass(frozen=True)
class Drawn:
    """The next token of a text."""

    request: Request
    token: int
    finish: Finish | None  # why there are no more: the token ends documents, or is the last that was asked for


@dataclass
class Timing:
    """Tokens and times of the continuation of texts."""

    prompt_tokens: int = 0
    prompt_seconds: float = 0.0
    tokens: int = 0  # drawn one after another; the first of a text comes with its prompt
    seconds: float = 0.0
    first: float | None = None  # seconds until the first token of all

    def beside(self, other: "Timing") -> "Timing":
        """Join this timing with another of the same time, whose texts are others."""
        return Timing(
            self.prompt_tokens + other.prompt_tokens,
            max(self.prompt_seconds, other.prompt_seconds),
            self.tokens + other.tokens,
            max(self.seconds, other.seconds),
            self.first,
        )

    def __str__(self) -> str:
        parts = [f"prompts {self.prompt_tokens:,} tokens, {_rate(self.prompt_tokens, self.prompt_seconds)}"]
        if self.first is not None:
            parts.append(f"first token after {self.first:.3f} s")
        if self.tokens:
            parts.append(f"then {self.tokens:,} tokens, {_rate(self.tokens, self.seconds)}")
        return "; ".join(parts)


def _rate(tokens: int, seconds: float) -> str:
    return f"{tokens / max(seconds, 1e-9):,.0f} tokens/s"


@dataclass
class _Text:
    request: Request
    new: list[int] = field(default_factory=list)

    @property
    def at(self) -> int:
        """The position of the latest token."""
        return len(self.request.tokens) + len(self.new) - 1


@torch.inference_mode()
def generate(
    engine: Engine,
    requests: Sequence[Request],
    draw: Draw,
    batch: int,
    vocabulary: int,
    end: int | None,
    timing: Timing | None = None,
    over: Callable[[list[int]], bool] = lambda _: False,
) -> Iterator[Drawn]:
    """The tokens of all continuations, each as soon as it is drawn; the same on all ranks. Collective.

    batch: texts at a time. vocabulary: only ids below this number are drawn, since the model's vocabulary may be
    padded. end: the token that ends a text; None: none does. over: whether a text ends that goes on with these tokens.
    Raises InputError for logits that are not finite.
    """
    with engine.together():
        if requests:
            yield from _continued(engine, requests, draw, batch, vocabulary, end, timing or Timing(), over)


def _continued(
    engine: Engine,
    requests: Sequence[Request],
    draw: Draw,
    batch: int,
    vocabulary: int,
    end: int | None,
    timing: Timing,
    over: Callable[[list[int]], bool],
) -> Iterator[Drawn]:
    waiting = list(reversed(requests))
    active: list[_Text] = []  # in the order of the cache's slots
    batch = min(batch, len(requests))
    cache = engine.cache(batch, max(len(request.tokens) + request.most - 1 for request in requests))
    began = time.perf_counter()
    while waiting or active:
        start = time.perf_counter()
        if waiting and len(active) < batch:
            new = _next_pass(waiting, batch - len(active))
            logits = _read(engine, cache, new, len(active))
            drawing = [_Text(request) for request in new]
            active += drawing
        else:
            drawing, new = active, []
            logits = engine.next([text.new[-1] for text in active], [text.at for text in active], cache)
        tokens = _draw(engine, logits, draw, drawing, vocabulary)
        seconds = time.perf_counter() - start
        if new:
            timing.prompt_tokens += sum(map(len, {tuple(request.tokens) for request in new}))
            timing.prompt_seconds += seconds
        else:
            timing.tokens += len(tokens)
            timing.seconds += seconds
        if timing.first is None:
            timing.first = time.perf_counter() - began
        finished = []
        for text, token in zip(drawing, tokens, strict=True):
            text.new.append(token)
            finish: Finish | None = "length" if len(text.new) == text.request.most else None
            if token == end or over(text.new):
                finish = "stop"
            if finish:
                finished.append(text)
            yield Drawn(text.request, token, finish)
        for text in finished:
            _leave(active, text, cache)


def _next_pass(waiting: list[Request], free: int) -> list[Request]:
    """Takes so many of those that wait, from the end, that their prompts make one pass."""
    taken = [waiting.pop()]
    tokens = len(taken[0].tokens)
    while waiting and len(taken) < free and (tokens := tokens + len(waiting[-1].tokens)) <= PASS_TOKENS:
        taken.append(waiting.pop())
    return taken


def _read(engine: Engine, cache: Cache, new: Sequence[Request], first: int) -> Tensor | None:
    """Put prompts into the slots from `first` on; the logits of their last tokens. Equal prompts are read once."""
    slots = range(first, first + len(new))
    texts = [(tuple(request.tokens), len(request.tokens) + request.most - 1) for request in new]
    read = dict(reversed(list(zip(texts, slots, strict=True))))
    ends = dict(zip(read, accumulate(len(tokens) for tokens, _ in read), strict=True))
    prompts, lengths = map(list, zip(*read, strict=True))
    logits = engine.prompts(prompts, cache, list(read.values()), [ends[text] - 1 for text in texts], lengths)
    for text, slot in zip(texts, slots, strict=True):
        if (source := read[text]) != slot:
            cache.copy(source, slot)
    return logits


def _leave(active: list[_Text], text: _Text, cache: Cache) -> None:
    """Take a text out; the last one goes into its slot, so that those in use are the first."""
    slot, last = next(slot for slot, other in enumerate(active) if other is text), active.pop()
    if last is not text:
        cache.copy(len(active), slot)
        active[slot] = last


def _draw(engine: Engine, logits: Tensor | None, draw: Draw, texts: Sequence[_Text], vocabulary: int) -> list[int]:
    keys = [(text.request.index, text.request.sample, len(text.new)) for text in texts]

    def make(whole: Tensor) -> Tensor:
        return draw(whole[:, :vocabulary], keys)

    tokens: list[int] = engine.agree(len(texts), make, logits, torch.int64).tolist()
    if NO_TOKEN in tokens:
        raise InputError("the model's logits are not finite: its weights are too large to write text with")
    return tokens
