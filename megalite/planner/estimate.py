"""The memory of a layout, estimated without its schedule: never more than a walk through it finds. Imports no torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeVar

from megalite.config.layers import LayerKind, layer_kinds
from megalite.config.schema import SCHEDULES, Config
from megalite.plan.activations import BYTES, Activations
from megalite.plan.parts import Item
from megalite.plan.pipeline import placement
from megalite.plan.recompute_modes import Mode
from megalite.plan.size import layer_parameters
from megalite.plan.split import balance
from megalite.planner.choice import Choice, mode_of
from megalite.planner.flight import flight
from megalite.schedule.generate import NAMES, V_SHAPED

N = TypeVar("N", int, float)
ONCE = ("ddp", "zero1")  # modes whose gradients are reduced once a step


@dataclass(frozen=True)
class Learned:
    """What a walk has found at the peak of a pipeline rank. activations: bytes. made: whether gradients of all its
    parameters were there; whole: before they are reduced. gathered: whether all weights were."""

    rank: int
    activations: int
    made: bool
    whole: bool
    gathered: bool


class Estimate:
    """Bytes of the layouts of `config`, with what walks through schedules have taught.

    pins: keys that keep their values. kinds: of layers, each with how many there are.
    """

    def __init__(self, config: Config, pins: Mapping[str, Any], kinds: Mapping[LayerKind, int]) -> None:
        self.config, self.pins, self.kinds = config, pins, kinds
        self.layer_parameters = {kind: layer_parameters(config.model, kind).total for kind in kinds}
        found, layers = list(kinds), layer_kinds(config.model)
        numbers = {id(kind): found.index(kind) for kind in {id(kind): kind for kind in layers}.values()}
        self.order = [numbers[id(kind)] for kind in layers]  # of every layer, which of `kinds` it is
        self._parameters = self.before(self.layer_parameters)
        self._matrix = config.model.vocab_size * config.model.width
        self._element = BYTES[config.train.precision]
        self._wide = max(self._element, 4)
        self._gradient = 2 if config.parallel.data.reduce_precision == "bf16" else self._wide
        self._known: dict[tuple[object, ...], Activations] = {}
        self._keep: dict[tuple[object, ...], tuple[int, ...]] = {}
        self._splits: dict[tuple[int, int], Sequence[int]] = {}
        self._placements: dict[tuple[int, int, bool], Sequence[int]] = {}
        self._of_rank: dict[tuple[int, int, bool, int], float] = {}
        self._flying: dict[Choice, tuple[float, float | None]] = {}
        self._learned: dict[Choice, Learned] = {}

    def before(self, each: Mapping[LayerKind, N]) -> tuple[N, ...]:
        """By kind of layer, what each has: the sums of all layers before each, and at last of all."""
        values = [each[kind] for kind in self.kinds]
        return tuple(accumulate((values[number] for number in self.order), initial=0))

    def memory(self, choice: Choice) -> float:
        """Bytes that the fullest rank has at least: the first, with its activations, or one with an even share."""
        found = self.of_states(choice)
        if choice.schedule not in NAMES:  # where its stages are is not known
            return found
        first = self._held(choice, 0)
        most, beside = self._in_flight(choice)
        here = self._states(choice, first)
        found = max(found, here + most, self._after(choice, first))
        if beside is not None:
            found = max(found, here + self._gradients(choice, first, whole=choice.mode in ONCE) + beside)
        if learned := self._learned.get(_beside(choice)):
            held = self._held(choice, learned.rank)
            whole = learned.whole and choice.mode in ONCE
            made = self._gradients(choice, held, whole) if learned.made else 0.0
            found = max(found, self._states(choice, held, learned.gathered) + learned.activations + made)
        return found

    def of_states(self, choice: Choice) -> float:
        """Bytes that a rank with an even share of the model has at least, with no activations: quickly found."""
        even = (self._parameters[-1] + self._matrix * (1 if self.config.model.tie_embeddings else 2)) / choice.pp
        return max(self._states(choice, even), self._after(choice, even))

    def _after(self, choice: Choice, parameters: float) -> float:
        """Bytes when the last gradient is there. Of several stages, others have freed their weights by then."""
        states = self._states(choice, parameters, gathered=self._virtual(choice) == 1)
        return states + self._gradients(choice, parameters, whole=False)

    def learn(self, choice: Choice, rank: int, peak: Mapping[Item, int]) -> None:
        """Remember what a walk through the schedule of a layout found at the peak of its fullest rank.

        Layouts that differ from it in nothing but how states are shared out over ranks hold the same activations then.
        """
        activations = sum(size for (kind, _), size in peak.items() if kind == "activations")
        apart = ("being reduced", "put off", "waiting")
        gradients = sum(size for (kind, part), size in peak.items() if kind == "gradients" and part not in apart)
        held = self._held(choice, rank)
        shards = choice.shards * choice.cp if choice.mode == "zero1" else 1
        whole = shards * self._gradient > self._wide  # else a sum of reduced ones may be as large
        made = gradients >= self._gradients(choice, held, whole)
        weights = sum(size for (kind, _), size in peak.items() if kind == "gathered weights")
        gathered = choice.mode != "zero3" and weights >= self._element * held / choice.tp
        self._learned.setdefault(_beside(choice), Learned(rank, activations, made, whole, gathered))

    def _in_flight(self, choice: Choice) -> tuple[float, float | None]:
        """Bytes of activations that the first rank holds: at most, and while all of its gradients are there."""
        key = _beside(choice)
        if key not in self._flying:
            self._flying[key] = self._count(choice)
        return self._flying[key]

    def _count(self, choice: Choice) -> tuple[float, float | None]:
        m = self.config.batch.global_ // (choice.replicas * choice.shards * choice.micro)
        virtual = self._virtual(choice)
        most, beside = flight(choice.schedule, choice.pp, m, virtual)
        if choice.offload_activations:
            return 0.0, None if beside is None else 0.0
        kept, ends = self._kept(choice), list(accumulate(self.split(choice), initial=0))
        stages = range(0, len(ends) - 1, choice.pp) if choice.schedule == "interleaved_1f1b" else range(1)
        each = min(kept[ends[stage + 1]] - kept[ends[stage]] for stage in stages)
        outside = self.sizes(choice).outside(1)[0] if len(ends) == 2 else 0
        return most * each + outside, None if beside is None else beside * each

    def split(self, choice: Choice) -> Sequence[int]:
        """Layers of every stage."""
        if (split := self.config.parallel.pipeline.split) and "parallel.pipeline.split" in self.pins:
            return split
        key = choice.pp, self._virtual(choice)
        if key not in self._splits:
            self._splits[key] = balance(self.config.model, key[0] * key[1])
        return self._splits[key]

    def _virtual(self, choice: Choice) -> int:
        """Stages of a rank."""
        return choice.virtual or SCHEDULES.get(choice.schedule, 1)

    def _held(self, choice: Choice, rank: int) -> float:
        """Parameters of a pipeline rank, those of norms and of a second matrix of a tied embedding aside."""
        key = choice.pp, self._virtual(choice), choice.schedule in V_SHAPED, rank
        if key not in self._of_rank:
            split, owners = self.split(choice), self.owners(choice)
            ends = list(accumulate(split, initial=0))
            mine = [stage for stage, owner in enumerate(owners) if owner == rank]
            layers = sum(self._parameters[ends[stage + 1]] - self._parameters[ends[stage]] for stage in mine)
            first, last = 0 in mine, len(split) - 1 in mine
            outer = first + last if not self.config.model.tie_embeddings else first or last
            self._of_rank[key] = layers + self._matrix * outer
        return self._of_rank[key]

    def owners(self, choice: Choice) -> Sequence[int]:
        """By stage, its pipeline rank."""
        key = choice.pp, self._virtual(choice), choice.schedule in V_SHAPED
        if key not in self._placements:
            self._placements[key] = placement(choice.applied(self.config, self.pins))
        return self._placements[key]

    def _states(self, choice: Choice, parameters: float, gathered: bool = True) -> float:
        """Bytes of so many parameters, their optimizer states and gathered weights."""
        held, shards = parameters / choice.tp, choice.shards * choice.cp if choice.mode != "ddp" else 1
        states = 0 if choice.offload_optimizer else 2 if self.config.optim.name == "adamw" else 1
        needed = (1 + states) * self._wide * held / shards
        if gathered and choice.mode != "zero3" and self.config.train.precision == "bf16":
            needed += self._element * held
        return needed

    def _gradients(self, choice: Choice, parameters: float, whole: bool) -> float:
        """Bytes of the gradients of so many parameters: before they are reduced, or of what a rank keeps."""
        held, shards = parameters / choice.tp, choice.shards * choice.cp if choice.mode != "ddp" else 1
        return self._gradient * held / (1 if whole else shards)

    def _kept(self, choice: Choice) -> tuple[int, ...]:
        """Bytes that layers keep of a micro-batch: of all layers before each, and at last of all."""
        mode: Mode = "full" if mixed(self.config, self.pins, choice) else mode_of(choice)
        key = choice.tp, choice.cp, choice.micro, choice.method, mode
        if key not in self._keep:
            sizes = self.sizes(choice)
            each = {kind: sizes.layer_bytes(kind, mode) for kind in self.kinds}
            self._keep[key] = self.before(each)
        return self._keep[key]

    def sizes(self, choice: Choice) -> Activations:
        """Sizes of a layout's activations."""
        key = choice.tp, choice.cp, choice.micro, choice.method
        if key not in self._known:
            self._known[key] = Activations(choice.applied(self.config, self.pins))
        return self._known[key]


def mixed(config: Config, pins: Mapping[str, Any], choice: Choice) -> bool:
    """Whether layers of a stage may recompute in different ways: what one of these takes is a bound, no more."""
    return choice.recompute == "budget" or (config.train.recompute_every > 1 and "train.recompute" in pins)


def _beside(choice: Choice) -> Choice:
    """What the bytes beside a layout's states depend on, in a choice of its own."""
    return choice._replace(mode="zero1", replicas=1, shards=choice.replicas * choice.shards, offload_optimizer=False)
