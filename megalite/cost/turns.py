"""The time of a forward and a backward pass that take turns, as `parallel.turns` has them. Imports no torch.

Each computes until something is on its way, and goes on when that has arrived and the other has given way or is done.
Rows of one thus travel while the other computes. When one is done, the other waits for all that it still sends.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from megalite.cost.kernels import launched
from megalite.cost.network import Links


class Stretch(NamedTuple):
    """Seconds that a pass computes, and for which it then sends. own: that it computes before it gives way."""

    compute: float
    sent: float = 0.0
    own: float = 0.0


class LayerPass(NamedTuple):
    """A pass of a layer: its stretches, seconds of compute after the last one, and those of the host's launches."""

    stretches: tuple[Stretch, ...]
    rest: float
    launches: float

    @property
    def computes(self) -> float:
        return self.rest + sum(each.compute + each.own for each in self.stretches)


@dataclass(frozen=True, eq=False)  # which makes it a quick key
class StagePass:
    """A pass of a stage, apart from what its experts' rows, launches and exchanges of weights add to it.

    layers: in their order. plain: seconds of other compute, which waits for no launch. moved: seconds of copies to or
    from the host. gathered: of weights beside compute. first: of the first weights, which nothing hides. links: seconds
    for which each is busy. beside: `Constants.beside`.
    """

    layers: tuple[LayerPass, ...]
    plain: float
    moved: float
    gathered: float
    first: float
    links: Links
    beside: Callable[[float, float], float]


class InTurns(NamedTuple):
    """Seconds by which two passes in turns take longer than their compute, by reason: what is still waited for of the
    experts' rows, of launches, of copies to and from the host, and of weights and gradients."""

    computes: float
    experts: float
    host: float
    offload: float
    data: float

    @property
    def total(self) -> float:
        return sum(self)


@lru_cache(maxsize=1 << 12)
def in_turns(forward: StagePass, backward: StagePass, reduced: float, links: Links) -> InTurns:
    """A forward beside a backward pass. reduced, links: seconds of a reduction beside them, and for which links are
    busy with it."""
    passes, beside = (forward, backward), forward.beside
    layers = [layer for each in passes for layer in each.layers]
    computes = sum(layer.computes for layer in layers)
    device = walked([*_joined(forward.layers)], [*_joined(backward.layers)], beside)
    with_host = launched(device, sum(layer.launches for layer in layers))
    moved = max(with_host, *(each.moved for each in passes))
    plain = sum(each.plain for each in passes)
    busy = max(map(sum, zip(*(each.links for each in passes), links, strict=True)))
    sent = reduced + sum(each.gathered for each in passes)
    whole = max(beside(moved + plain, sent), busy) + sum(each.first for each in passes)
    return InTurns(computes + plain, device - computes, with_host - device, moved - with_host, whole - moved - plain)


def walked(forward: Sequence[Stretch], backward: Sequence[Stretch], beside: Callable[[float, float], float]) -> float:
    """Seconds of two passes in turns, forward first. Their last stretches send nothing."""
    passes, at, turn, seconds, before = (forward, backward), [0, 0], 0, 0.0, Stretch(0.0)
    while at[0] < len(forward) or at[1] < len(backward):
        alone = at[turn] == len(passes[turn])
        turn = 1 - turn if alone else turn
        stretch = passes[turn][at[turn]]
        if alone:  # the same pass goes on, which waits for what it has sent
            seconds += beside(before.own, before.sent) + stretch.compute
        else:
            seconds += beside(before.own + stretch.compute, before.sent)
        at[turn], turn, before = at[turn] + 1, 1 - turn, stretch
    return seconds + beside(before.own, before.sent)


def _joined(layers: Iterable[LayerPass]) -> Iterable[Stretch]:
    """Stretches of layers one after another, with what each computes after its last one in the first of the next."""
    rest = 0.0
    for layer in layers:
        for stretch in layer.stretches:
            yield stretch._replace(compute=rest + stretch.compute)
            rest = 0.0
        rest += layer.rest
    yield Stretch(rest)
