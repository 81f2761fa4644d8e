"""Layouts that predictions do not tell apart, and the simplest of them."""

from collections.abc import Sequence

from megalite.cost.layout_choice import Choice
from megalite.layout_search.search import Result
from megalite_launch.base.texts import memory_text

TIE_MARGIN = 0.01  # share of the fastest step's time by which ratios of predictions are not told apart: docs/planner.md
MEMORY_MARGIN = 0.01  # share of the memory of the fastest by which another's must differ to be told


def alike(results: Sequence[Result]) -> Sequence[Result]:
    """The first of the `results`, the fastest first, that take at most TIE_MARGIN longer than the fastest."""
    return [result for result in results if result.seconds <= (1 + TIE_MARGIN) * results[0].seconds]


def simplest(results: Sequence[Result]) -> int:
    """The index of the simplest layout: the one with the fewest features, and among equals with the least memory."""
    return min(range(len(results)), key=lambda at: (len(_features(results[at].choice)), results[at].memory))


def told_alike(results: Sequence[Result], more: bool) -> str:
    """Write a note on the layouts that predictions do not tell apart; "" where the fastest is the simplest of them.

    more: whether there may be further ones beyond `results`.
    """
    close = alike(results)
    at = simplest(close)
    first, other = close[0], close[at]
    lacks = [feature for feature in _features(first.choice) if feature not in _features(other.choice)]
    spared = first.memory - other.memory
    reasons = [f"no {feature}" for feature in lacks]
    if abs(spared) >= MEMORY_MARGIN * first.memory:
        reasons.append(f"{memory_text(abs(spared))} {'less' if spared > 0 else 'more'} memory")
    if at == 0 or not reasons:
        return ""
    further = ", and perhaps further ones, which a larger --top shows" if more and len(close) == len(results) else ""
    return (
        f"Rows 1 to {len(close)} are within {TIE_MARGIN:.0%} of each other{further}: "
        "predictions do not tell them apart. "
        f"The simplest is row {at + 1}: {', '.join(reasons)}. --pick {at + 1} takes it in place of row 1."
    )


def _features(choice: Choice) -> list[str]:
    """List what a layout has beyond plain data parallelism."""
    has = {
        "tensor parallelism": choice.tp > 1,
        "expert parallelism": choice.ep > 1,
        "context parallelism": choice.cp > 1,
        "pipeline": choice.pp > 1,
        "moved layers": choice.split is not None,
        "recomputation": choice.recompute != "none",
        "activations on the host": choice.offload_activations,
        "optimizer states outside of the device": choice.states != "device",
    }
    return [name for name, there in has.items() if there]
