"""Seconds that exchanges of weights and gradients take at least, alone and beside passes. Imports no torch."""

from collections.abc import Mapping, Sequence
from typing import Any

from megalite.config.schema import Config
from megalite.cost.layout_choice import Choice
from megalite.cost.stages import UNSPLIT_SCHEDULES, Shared, Timer
from megalite.layout_search.memory_bounds import SINGLE_REDUCTION_MODES, Estimate, mixed
from megalite.layout_search.pipeline_bounds import Exchanged, Longer, Moved, summed
from megalite.layout_search.shape import Shape


class Exchanges:
    """Exchanges of data-parallel ranks in layouts of `config`. pins: keys that keep their values."""

    def __init__(self, config: Config, timer: Timer, pins: Mapping[str, Any], estimate: Estimate) -> None:
        self.config, self.timer, self.pins, self.estimate = config, timer, pins, estimate
        self._matrix = config.model.vocab_size * config.model.width
        self._found: dict[tuple[object, ...], Exchanged] = {}
        self._shared: dict[tuple[object, ...], tuple[Shared, list[tuple[float, float, float]]]] = {}
        self._longer_passes: dict[tuple[object, ...], Longer] = {}

    def of(self, choice: Choice) -> Exchanged:
        """Seconds to exchange weights and gradients of a micro-batch."""
        key = choice.tp, choice.ep, choice.cp, choice.replicas, choice.shards, choice.mode, choice.micro
        if key not in self._found:
            if key[:-1] not in self._shared:
                shared = Shared(choice.applied(self.config, self.pins), self.timer.net)
                self._shared[key[:-1]] = (
                    shared,
                    [*map(shared.seconds, self.estimate.kinds), shared.seconds("embedding")],
                )
            (shared, seconds), passes = self._shared[key[:-1]], self.timer.kernels.passes
            added, last, _ = shared.summed(choice.micro_batches(self.config.batch.global_))
            if self.config.adapter is not None:  # factors are few, and left out
                added = last = 0.0
            sizes = *(amount.whole(choice) / choice.tp for amount in self.estimate.amounts), self._matrix / choice.tp
            *layers, end = (
                Moved(*sent, passes(shared.copied * size * self.estimate.narrow), passes(added * size))
                for sent, size in zip(seconds, sizes, strict=True)
            )
            counts, fields = list(self.estimate.kinds.values()), list(zip(*layers, strict=True))
            self._found[key] = Exchanged(
                tuple(layers),
                Moved(*map(min, fields)),
                end,
                Moved(*(summed(counts, each) for each in fields)),
                passes(last),
            )
        return self._found[key]

    def longer(self, shape: Shape, choice: Choice, whole: bool | None = None) -> Longer:
        """Seconds that copies, gathers and reductions of each micro-batch add to passes.

        whole: whether backward passes are; None: as all are under the schedule.
        """
        whole = choice.schedule in UNSPLIT_SCHEDULES if whole is None else whole
        key = shape, choice.mode, choice.replicas, whole, choice.offload_activations
        if (known := self._longer_passes.get(key)) is not None:
            return known
        data, passes = self.of(choice), shape.passes
        zero3, is_known = choice.mode == "zero3", self.known(shape, choice)
        reduces = choice.mode not in SINGLE_REDUCTION_MODES and whole

        def longer(alone: Sequence[float], moved: Moved, known: bool) -> tuple[float, float]:
            copied, gathered = zero3 * moved.copied, zero3 * moved.gathered
            back, sent = copied + moved.added, gathered + reduces * moved.reduced
            return (
                copied + self.grown(alone[0] + copied, gathered, known or alone[0]),
                back + self.grown(alone[1] + back, sent, known or alone[1]),
            )

        layers = [longer(alone, moved, is_known) for alone, moved in zip(passes.kinds, data.kinds, strict=True)]
        (there, back), edge = longer(passes.embedding, data.end, not shape.paired), zero3 * data.end.gathered
        found = self._longer_passes[key] = Longer(
            tuple([each for each, _ in layers]),
            tuple([each for _, each in layers]),
            (there + edge, back + edge),
            longer(passes.head, data.end, not shape.paired),
            tuple([zero3 * moved.gathered for moved in data.kinds]),
        )
        return found

    def grown(self, alone: float, sent: float, known: bool | float = True) -> float:
        """A lower bound of the seconds by which communication beside a pass makes it longer.

        alone: seconds of the pass by itself, or an upper bound of them. sent: seconds of the communication. known: True
        if `alone` is exact, else a lower bound of it.
        """
        if known is True:
            return self.timer.constants.beside(alone, sent) - alone
        return self.timer.constants.overlap * min(known, sent)

    def known(self, shape: Shape, choice: Choice) -> bool:
        """Return whether passes of layers take as long as `Shape.passes` says, rather than longer."""
        if shape.paired or choice.offload_activations:
            return False
        return not mixed(self.config, self.pins, choice)

    def mean(self, shape: Shape, choice: Choice, whole: bool) -> float:
        """Seconds in which a rank computes, on average. whole: backward passes are not split."""
        data, forward, backward = self.of(choice), shape.passes.there, shape.passes.back
        copied, added = data.all.copied + 2 * data.end.copied, data.all.added + 2 * data.end.added
        gathered, constants, zero3 = (
            data.all.gathered + 2 * data.end.gathered,
            self.timer.constants,
            choice.mode == "zero3",
        )
        reduced = (data.all.reduced + 2 * data.end.reduced) * (whole and choice.mode not in SINGLE_REDUCTION_MODES)
        forward, backward = forward + zero3 * copied, backward + zero3 * copied + added
        if shape.paired:  # weights that one pass gathers may be beside the other
            both = constants.beside(forward + backward, 2 * zero3 * gathered + reduced)
        else:
            both = constants.beside(forward, zero3 * gathered)
            both += constants.beside(backward, zero3 * gathered + reduced)
        return shape.micro_batches * both / choice.pp

    def sent(self, shape: Shape, choice: Choice) -> float:
        """Seconds for which the wires of data parallelism are busy with each micro-batch, on an average rank."""
        if choice.mode in SINGLE_REDUCTION_MODES:
            return 0.0
        data = self.of(choice)
        gathered = 2 * (data.all.gathered + 2 * data.end.gathered) * (choice.mode == "zero3")
        return shape.micro_batches * (gathered + data.all.reduced + 2 * data.end.reduced) / choice.pp
