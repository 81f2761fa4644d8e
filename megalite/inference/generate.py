"""Continuing many texts at a time. As one ends, the next that waits takes its place."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import ClassVar, Literal

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
    passes: int = 0  # made for these, of all texts
    seconds: float = 0.0
    first: float | None = None  # seconds until the first token of all

    def beside(self, other: "Timing") -> "Timing":
        """Join this timing with another of the same time, whose texts are others."""
        return Timing(
            self.prompt_tokens + other.prompt_tokens,
            max(self.prompt_seconds, other.prompt_seconds),
            self.tokens + other.tokens,
            self.passes + other.passes,
            max(self.seconds, other.seconds),
            self.first,
        )

    def __str__(self) -> str:
        parts = [f"prompts {self.prompt_tokens:,} tokens, {_rate(self.prompt_tokens, self.prompt_seconds)}"]
        if self.first is not None:
            parts.append(f"first token after {self.first:.3f} s")
        if self.tokens:
            parts.append(f"then {self.tokens:,} tokens, {_rate(self.tokens, self.seconds)}")
        if self.tokens > self.passes:
            parts.append(f"{self.tokens / self.passes:.2f} tokens a pass")
        return "; ".join(parts)


def _rate(tokens: int, seconds: float) -> str:
    return f"{tokens / max(seconds, 1e-9):,.0f} tokens/s"


@dataclass
class Text:
    """A text that is being continued."""

    request: Request
    new: list[int] = field(default_factory=list)
    draft: int = NO_TOKEN  # a guess at the next token

    @property
    def at(self) -> int:
        """The position of the latest token."""
        return len(self.request.tokens) + len(self.new) - 1

    def key(self, ahead: int) -> tuple[int, int, int]:
        """Numbers that tell the draw of the next token, or of one further ahead, from all others."""
        return self.request.index, self.request.sample, len(self.new) + ahead


class Steps:
    """Passes that continue texts in the slots of a cache, each by one token. tried: tokens of a text in a pass."""

    tried: ClassVar[int] = 1

    def __init__(self, engine: Engine, cache: Cache, draw: Draw, vocabulary: int) -> None:
        self.engine, self.cache, self.draw, self.vocabulary = engine, cache, draw, vocabulary

    def read(self, new: Sequence[Text], first: int) -> list[list[int]]:
        """Put prompts into the slots from `first` on. Returns the next tokens of each text."""
        logits = _read(self.engine, self.cache, [text.request for text in new], first)
        return [[token] for token in self.drawn(logits, [text.key(0) for text in new])]

    def next(self, active: Sequence[Text]) -> list[list[int]]:
        """The next tokens of each text, which are in the first slots."""
        logits = self.engine.next([text.new[-1] for text in active], [text.at for text in active], self.cache)
        return [[token] for token in self.drawn(logits, [text.key(0) for text in active])]

    def drawn(self, logits: Tensor | None, keys: Sequence[tuple[int, int, int]]) -> list[int]:
        """A token for each row of logits, known to all ranks. Raises InputError for logits that are not finite."""

        def make(whole: Tensor) -> Tensor:
            return self.draw(whole[:, : self.vocabulary], keys)

        tokens: list[int] = self.engine.agree(len(keys), make, logits, torch.int64).tolist()
        if NO_TOKEN in tokens:
            raise InputError("the model's logits are not finite: its weights are too large to write text with")
        return tokens


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
    steps: type[Steps] = Steps,
) -> Iterator[Drawn]:
    """The tokens of all continuations, each as soon as it is drawn; the same on all ranks. Collective.

    batch: texts at a time. vocabulary: only ids below this number are drawn, since the model's vocabulary may be
    padded. end: the token that ends a text; None: none does. over: whether a text ends that goes on with these tokens.
    steps: how passes are made. Raises InputError for logits that are not finite.
    """
    with engine.together():
        if requests:
            yield from _continued(engine, requests, draw, batch, vocabulary, end, timing or Timing(), over, steps)


def _continued(
    engine: Engine,
    requests: Sequence[Request],
    draw: Draw,
    batch: int,
    vocabulary: int,
    end: int | None,
    timing: Timing,
    over: Callable[[list[int]], bool],
    steps: type[Steps],
) -> Iterator[Drawn]:
    waiting = list(reversed(requests))
    active: list[Text] = []  # in the order of the cache's slots
    batch = min(batch, len(requests))
    cache = engine.cache(batch, max(len(request.tokens) + request.most - 2 + steps.tried for request in requests))
    passes = steps(engine, cache, draw, vocabulary)
    began = time.perf_counter()
    while waiting or active:
        start = time.perf_counter()
        if waiting and len(active) < batch:
            new = _next_pass(waiting, batch - len(active))
            drawing = [Text(request) for request in new]
            tokens = passes.read(drawing, len(active))
            active += drawing
        else:
            drawing, new = list(active), []
            tokens = passes.next(active)
        seconds = time.perf_counter() - start
        if new:
            timing.prompt_tokens += sum(map(len, {tuple(request.tokens) for request in new}))
            timing.prompt_seconds += seconds
        else:
            timing.passes += len(tokens)
            timing.seconds += seconds
        if timing.first is None:
            timing.first = time.perf_counter() - began
        finished = []
        for text, several in zip(drawing, tokens, strict=True):
            for token in several:
                text.new.append(token)
                timing.tokens += not new
                finish: Finish | None = "length" if len(text.new) == text.request.most else None
                if token == end or over(text.new):
                    finish = "stop"
                yield Drawn(text.request, token, finish)
                if finish:
                    finished.append(text)
                    break
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


def _leave(active: list[Text], text: Text, cache: Cache) -> None:
    """Take a text out; the last one goes into its slot, so that those in use are the first."""
    slot, last = next(slot for slot, other in enumerate(active) if other is text), active.pop()
    if last is not text:
        cache.copy(len(active), slot)
        active[slot] = last
