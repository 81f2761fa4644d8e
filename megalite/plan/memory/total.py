"""Peak memory of a pipeline rank as one number, without a breakdown: a search looks at hundreds of layouts."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from megalite.plan.memory.held import OUTSIDE_KINDS
from megalite.plan.memory.walk import PutOff, Walk
from megalite.plan.parts.part import Moment
from megalite.plan.pipeline import as_full, fullest_steps
from megalite.plan.resolved import Plan
from megalite.plan.units import Unit
from megalite.schedule.actions import Action


class Gradients(NamedTuple):
    """State of a stage's gradients in a walk, by index in a `PartKey`, and of an embedding that stays with it: the
    fields of `Walk` of the same names."""

    whole: frozenset[int] = frozenset()
    sharded: tuple[tuple[int, int], ...] = ()
    shared: tuple[tuple[int, int], ...] = ()
    reducing: int = 0
    staying: bool = False


class Effect(NamedTuple):
    """Effect of an action on the memory of a rank.

    adds: bytes that stay after it. most: the most bytes during it, beyond those before. left: state of the gradients of
    its stage afterwards, or of the two stages whose actions run side by side. put_off: weight gradients that a split
    backward (I) leaves to its W.
    """

    adds: int
    most: int
    left: list[Gradients]
    put_off: list[PutOff] | None


class Total(Walk):
    """A walk that counts the bytes on the device alone.

    An action does the same for every micro-batch, as long as the gradients of its stage are in the same state. So it is
    walked through once for each such state, and looked up from then on.
    """

    def __init__(self, plan: Plan, m: int, pp: int) -> None:
        super().__init__(plan, m, pp)
        self.effects: dict[tuple[object, ...], Effect] = {}
        self.now = dict.fromkeys(self.parts, Gradients())  # gradients of every stage; those of `Walk` may be older

    def most_bytes(self) -> int:
        """Run the walk, and return the most bytes on the device: `on_device` of what `run` returns."""
        self.run()
        return self.most

    def _compute(self, *actions: Action) -> None:
        self._once(actions, super()._compute)

    def _weight_gradients(self, action: Action) -> None:
        self._once((action,), super()._weight_gradients)

    def _once(self, actions: tuple[Action, ...], walk: Callable[..., None]) -> None:
        """Walk through an action, or through two side by side, or do what that did before."""
        stages, first = [each.stage for each in actions], actions[0][1:]
        key = tuple((each.kind, each.stage, self.reductions.get(each), self.now[each.stage]) for each in actions)
        effect = self.effects.get(key)
        if effect is None:
            before, most = self.total, self.most
            self.most = 0
            for stage in stages:
                self._set(stage, self.now[stage])
            walk(*actions)
            left, put_off = [self._get(stage) for stage in stages], self.put_off.get(first)
            effect = Effect(self.total - before, self.most - before, left, put_off)
            self.effects[key] = effect
            self.total, self.most = before, most
        self.most = max(self.most, self.total + effect.most)
        self.total += effect.adds
        self.now.update(zip(stages, effect.left, strict=True))
        if effect.put_off is not None:
            self.put_off[first] = effect.put_off

    def _get(self, stage: int) -> Gradients:
        every = range(-len(self.parts[stage]), len(self.parts[stage]))
        return Gradients(
            frozenset(index for index in every if (stage, index) in self.whole),
            tuple((index, self.sharded[stage, index]) for index in every if (stage, index) in self.sharded),
            tuple((index, self.shared[stage, index]) for index in every if (stage, index) in self.shared),
            self.reducing[stage],
            stage in self.staying,
        )

    def _set(self, stage: int, state: Gradients) -> None:
        for index in range(-len(self.parts[stage]), len(self.parts[stage])):
            self.whole.discard((stage, index))
            self.sharded.pop((stage, index), None)
            self.shared.pop((stage, index), None)
        self.whole |= {(stage, index) for index in state.whole}
        for index, each in state.sharded:
            self.sharded[stage, index] = each
        for index, size in state.shared:
            self.shared[stage, index] = size
        self.reducing[stage] = state.reducing
        self.staying.discard(stage)
        self.staying |= {stage} if state.staying else set()

    def _keep(self, part: Unit) -> None:
        self.total += part.kept_bytes

    def _release(self, part: Unit, moment: Moment, puts_off: bool) -> None:
        self.total += part.change[moment.name, puts_off]

    def _hold(self, kind: str, component: str, size: int) -> None:
        if kind not in OUTSIDE_KINDS:
            self.total += size

    def _see(self, temporaries: int = 0, gathered: int = 0, what: str = "") -> None:
        temporaries += self.aside
        if self.total + temporaries + gathered > self.most and not self.passing:
            self.most = self.total + temporaries + gathered


def fullest(plan: Plan, ranks: Iterable[int]) -> int:
    """The bytes of `Memory.total` on the fullest of `ranks`; not for gpipe, whose steps are too long to be walked."""
    inputs, steps = plan.sizes.inputs, fullest_steps(plan.config)
    return max(Total(plan, as_full(plan.config, m), rank).most_bytes() + m * inputs for rank in ranks for m in steps)
