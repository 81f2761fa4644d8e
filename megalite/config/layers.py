"""The kinds of a model's layers. All code that looks at layers reads them here, so layers may differ."""

from dataclasses import dataclass
from functools import lru_cache

from megalite.config.schema import Model


@dataclass(frozen=True)
class AttentionKind:
    """Which of the tokens before it a query attends to, and how large scores can be.

    window: so many keys, the query's own included, as in Mistral 7B (arXiv 2310.06825, §2); None: all.
    softcap: scores become softcap · tanh(score / softcap), as in Gemma 2 (arXiv 2408.00118, §2); None: they stay.
    """

    window: int | None = None
    softcap: float | None = None

    def window_in(self, length: int) -> int | None:
        """The window where a sequence of `length` is longer than that; else every query attends to all before it."""
        return self.window if self.window is not None and self.window < length else None


@dataclass(frozen=True)
class FeedForward:
    """SwiGLU (arXiv 2002.05202) with a hidden width."""

    width: int


@dataclass(frozen=True)
class LayerKind:
    """What a layer is made of. Layers of equal kind differ in nothing but their weights."""

    attention: AttentionKind
    feed_forward: FeedForward
    rotary: bool = True  # False: queries and keys are not turned by their positions (NoPE, arXiv 2305.19466)


def layer_kinds(model: Model) -> tuple[LayerKind, ...]:
    """The kind of every layer of `model`, first to last."""
    attention = model.attention
    return _kinds(
        model.layers, model.ffn, attention.window, attention.softcap, attention.full_every, attention.nope_every
    )


@lru_cache(maxsize=64)  # a search of layouts asks thousands of times
def _kinds(
    layers: int, ffn: int, window: int | None, softcap: float | None, full_every: int | None, nope_every: int | None
) -> tuple[LayerKind, ...]:
    feed_forward = FeedForward(ffn)
    full, near = AttentionKind(None, softcap), AttentionKind(window, softcap)
    kinds = {
        (attends_to_all, rotary): LayerKind(full if attends_to_all else near, feed_forward, rotary)
        for attends_to_all in (True, False)
        for rotary in (True, False)
    }

    def every(number: int, n: int | None) -> bool:
        return number % (n or layers + 1) == 0

    return tuple(kinds[every(number, full_every), not every(number, nope_every)] for number in range(1, layers + 1))
