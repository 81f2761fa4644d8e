"""Times of a pipeline stage, for one micro-batch on one rank. Imports no torch."""

from dataclasses import dataclass, replace
from typing import NamedTuple

from megalite.cost.layer import Seconds
from megalite.cost.link_clocks import Part
from megalite.cost.network import Links
from megalite.cost.turns import InTurns, LayerPass, StagePass, in_turns
from megalite.schedule.problem import StageCosts

# Share by which halves of a backward pass take longer than the whole. In arXiv 2401.10241 (Zero Bubble), table 4 tells
# how fast 1F1B and ZB-2p are, table 5 their bubbles; without these, ZB-2p is 2.4 % slower. Two thirds of a step are
# backward.
SPLIT_OVERHEAD = 0.035


class Sent(NamedTuple):
    """Seconds that links are busy with what a rank of a stage sends: in the passes of a micro-batch, while weights are
    gathered once a step, while gradients are reduced, and while replicas sum them."""

    passes: Links
    gather: Links
    reduce: Links
    replicas: Links


class Turns(NamedTuple):
    """Passes of a stage. reductions: seconds and links of none, of one over the shards, and with that over replicas."""

    forward: StagePass
    backward: StagePass
    reductions: tuple[tuple[float, Links], ...]


@dataclass(frozen=True)
class StageTime:
    """Seconds of one stage and one micro-batch.

    backward: of B, the whole backward pass. inputs, weights: of I and W, if it is split. gather: before the first F
    of a step, where weights are gathered once. reduce: to reduce gradients over the shards. replicas: to sum them over
    replicas then. longer: by how much a whole backward pass takes longer with the first beside it, and with both.
    parameters: of a rank that are trained, before they are sharded. partial: elements of gradients on a rank that are
    partial sums over tp. sent: on the links. turns: forward and backward, and the reductions of `longer` beside them;
    None where none of the passes take turns.
    """

    forward: Seconds
    backward: Seconds
    inputs: float
    weights: float
    gather: float
    reduce: float
    replicas: float
    longer: tuple[float, float]
    parameters: float
    partial: int
    sent: Sent
    turns: Turns | None

    def reducing(self, last: bool) -> float:
        """Seconds to reduce the gradients after one backward pass, and on the last of a step over replicas too."""
        return self.reduce + (self.replicas if last else 0.0)

    @property
    def halves(self) -> tuple[float, float]:
        """Seconds of the halves of a split backward: gradients of inputs (I) and of weights (W)."""
        return (1 + SPLIT_OVERHEAD) * self.inputs, (1 + SPLIT_OVERHEAD) * self.weights

    def beside(self, other: "StageTime", reduces: bool = False, last: bool = False) -> InTurns:
        """Forward of this stage in turns with a backward pass of another. reduces, last: as `Cost` has them."""
        assert self.turns is not None
        assert other.turns is not None
        return in_turns(self.turns.forward, other.turns.backward, *other.turns.reductions[reduces + (reduces and last)])

    def saved_beside(self, other: "StageTime") -> Seconds:
        """Seconds that forward of this stage and a backward pass of another save by turns, by what takes them."""
        alone, turns = self.forward + other.backward, self.beside(other)
        rest = {kind: getattr(alone, kind) - getattr(turns, kind) for kind in ("experts", "host", "offload", "data")}
        return Seconds(**rest)

    def as_costs(self, size: StageCosts) -> StageCosts:
        """Return the costs for a search for an order, with the memory of `size`."""
        return StageCosts(self.forward.total, self.backward.total, *self.halves, size.kept, size.waiting)


@dataclass(frozen=True)
class Piece:
    """A unit gathered at once. inputs, weights: of backward, as in a layer's time; parameters: of a rank, before
    sharding; trained: of these, those with gradients. moved: seconds of copies of a pass to or from the host. turns: of
    a layer.
    """

    part: Part
    forward: Seconds
    backward: Seconds
    inputs: Seconds
    weights: float
    parameters: float
    trained: float
    moved: float = 0.0
    turns: tuple[LayerPass, LayerPass] | None = None

    def frozen(self) -> "Piece":
        """The unit without gradients of its weights."""
        return replace(self, backward=self.inputs, weights=0.0, trained=0.0)
