"""The kinds of a model's layers. All code that looks at layers reads them here, so layers may differ."""

from dataclasses import dataclass, replace
from functools import lru_cache

from megalite.config.parametrization import multipliers
from megalite.config.schema import Model


@dataclass(frozen=True)
class AttentionKind:
    """Which of the tokens before it a query attends to, and how large scores are.

    window: so many keys, the query's own included, as in Mistral 7B (arXiv 2310.06825, §2); None: all.
    softcap: scores become softcap · tanh(score / softcap), as in Gemma 2 (arXiv 2408.00118, §2); None: they stay.
    scale: what products of queries and keys are multiplied by, before the cap; None: 1/√(width of a head).
    """

    window: int | None = None
    softcap: float | None = None
    scale: float | None = None

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
    near = AttentionKind(attention.window, attention.softcap, multipliers(model).scores)
    return _kinds(model.layers, model.ffn, near, attention.full_every, attention.nope_every)


@lru_cache(maxsize=64)  # a search of layouts asks thousands of times
def _kinds(
    layers: int, ffn: int, near: AttentionKind, full_every: int | None, nope_every: int | None
) -> tuple[LayerKind, ...]:
    feed_forward, full = FeedForward(ffn), replace(near, window=None)
    kinds = {
        (attends_to_all, rotary): LayerKind(full if attends_to_all else near, feed_forward, rotary)
        for attends_to_all in (True, False)
        for rotary in (True, False)
    }

    def every(number: int, n: int | None) -> bool:
        return number % (n or layers + 1) == 0

    return tuple(kinds[every(number, full_every), not every(number, nope_every)] for number in range(1, layers + 1))
