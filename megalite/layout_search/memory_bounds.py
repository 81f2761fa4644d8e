"""The memory of a layout, estimated without its schedule: never more than a walk through it finds. Imports no torch."""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from operator import mul
from typing import Any, NamedTuple, TypeVar

from megalite.config.layers import LayerKind, layer_kinds
from megalite.config.parallel_schema import SCHEDULES
from megalite.config.schema import Config
from megalite.cost.held_bytes import StageBytes, most_held
from megalite.cost.layout_choice import Choice, mode_of
from megalite.cost.schedule_tables import Tables, filled
from megalite.cost.stages import expert_parameters
from megalite.layout_search.micro_batches_in_flight import flight, flights
from megalite.plan.activations import Activations
from megalite.plan.model.size import layer_parameters
from megalite.plan.parts.part import FOUR_BIT_BYTES
from megalite.plan.parts.sizes import PRECISION_BYTES
from megalite.plan.pipeline import can_pair, is_managed, placement
from megalite.plan.recompute_modes import Mode, every_nth
from megalite.plan.split import balance, with_mtp
from megalite.schedule.generate import NAMES, V_SCHEDULES

N = TypeVar("N", int, float)
Alike = tuple[tuple[int, ...], bool, bool]  # a stage: its layers' kinds, and whether it is the first and the last
SINGLE_REDUCTION_MODES = ("ddp", "zero1")  # modes whose gradients are reduced once a step


class Amount(NamedTuple):
    """Numbers of parameters: those that tensor parallelism splits, and those of experts."""

    own: float
    experts: float

    @property
    def total(self) -> float:
        return self.own + self.experts

    def whole(self, choice: Choice) -> float:
        """Parameters of which a rank has 1/tp before data-parallel sharding, where ranks of ep share out experts."""
        return self.own + self.experts * choice.tp / choice.ep


class Each(NamedTuple):
    """Bytes that a pipeline rank needs because of its parameters.

    states: sharded parameters and optimizer states. gathered: weights for compute. whole: gradients before they are
    reduced. reduced: the part of these that a rank keeps.
    """

    states: float
    gathered: float
    whole: float
    reduced: float


class Rank(NamedTuple):
    """A rank of a pipeline.

    parameters: those of norms and of a second matrix of a tied embedding aside. stages: of each that counts, its layers
    by kind. most, beside: as in a `Flight`. single: whether the rank has one stage.
    """

    parameters: Amount
    stages: tuple[tuple[int, ...], ...]
    most: int
    beside: int | None
    single: bool


class Lightest(NamedTuple):
    """A rank in front under any of some schedules. parameters: at least. most, beside: as in `Rank`, but layers of one
    stage, by kind, each counted for every micro-batch in flight, of which any may be the fewest; beside is empty if
    gradients may not be there."""

    parameters: Amount
    most: frozenset[tuple[int, ...]]
    beside: frozenset[tuple[int, ...]]

    @staticmethod
    def of(ranks: Sequence[Rank]) -> "Lightest":
        """Combine ranks under each schedule."""
        found = frozenset(_times(rank.most, counts) for rank in ranks for counts in rank.stages)
        beside = frozenset(_times(rank.beside or 0, counts) for rank in ranks for counts in rank.stages)
        parameters = Amount(*map(min, zip(*(rank.parameters for rank in ranks), strict=True)))
        return Lightest(parameters, found, beside if all(rank.beside is not None for rank in ranks) else frozenset())


class Estimate:
    """Bytes of the layouts of `config`.

    pins: keys that keep their values. kinds: of layers, each with how many there are.
    """

    def __init__(self, config: Config, pins: Mapping[str, Any], kinds: Mapping[LayerKind, int]) -> None:
        self.config, self.pins, self.kinds = config, pins, kinds
        self.amounts = [_amount(config, kind) for kind in kinds]
        found, layers = list(kinds), layer_kinds(config.model)
        numbers = {id(kind): found.index(kind) for kind in {id(kind): kind for kind in layers}.values()}
        self.order = [numbers[id(kind)] for kind in layers]  # index in `kinds` of every layer's kind
        self._kinds = found  # quicker to ask by number
        self._own, self._experts = (self.before(each) for each in zip(*self.amounts, strict=True))
        self.matrix = config.model.vocab_size * config.model.width
        self._all = Amount(self._own[-1] + self.matrix * (1 if config.model.tie_embeddings else 2), self._experts[-1])
        self._element = PRECISION_BYTES[config.train.dtype]
        self._wide = max(self._element, 4)
        # Bytes of a parameter that is not trained, at least; and in those of compute.
        self._frozen = FOUR_BIT_BYTES if config.model.four_bits else self._element
        self.narrow = self._frozen / self._element
        self._gradient = 2 if config.parallel.data.reduce_precision == "bf16" else self._wide
        self._known: dict[tuple[object, ...], Activations] = {}
        self._keep: dict[tuple[object, ...], list[int]] = {}
        self._splits: dict[tuple[int, int], Sequence[int]] = {}
        self._placements: dict[tuple[int, int, bool], Sequence[int]] = {}
        self._scheduled: dict[tuple[object, ...], Config] = {}
        self._of_rank: dict[tuple[object, ...], Amount] = {}
        self._made_of: dict[tuple[object, ...], list[Alike]] = {}
        self._each_of: dict[tuple[object, ...], Each] = {}
        self._fronts: dict[tuple[object, ...], list[Rank]] = {}

    def before(self, each: Sequence[N]) -> tuple[N, ...]:
        """By kind of layer, what each has: the sums of all layers before each, and at last of all."""
        return tuple(accumulate(map(each.__getitem__, self.order), initial=0))

    def memory(self, choice: Choice) -> float:
        """Bytes that the fullest rank has at least: one in front, with its activations, or one with an even share."""
        if choice.schedule not in NAMES:  # where stages are is not known
            return self.of_states(choice)
        return max(self._needed(choice, rank, *self._activations(choice, rank)) for rank in self.front(choice))

    def memories(self, layouts: Sequence[Choice]) -> list[float]:
        """`memory` of layouts that differ in data parallelism and offloading alone."""
        if len(layouts) < 2 or layouts[0].schedule not in NAMES:
            return [self.memory(choice) for choice in layouts]
        needed = [0.0] * len(layouts)
        each_way = {choice.offload_activations: choice for choice in layouts}
        for rank in self.front(layouts[0]):
            active = {offloads: self._activations(choice, rank) for offloads, choice in each_way.items()}
            of_rank = (self._needed(choice, rank, *active[choice.offload_activations]) for choice in layouts)
            needed = list(map(max, needed, of_rank))
        return needed

    def lightest(self, choice: Choice, lightest: Lightest) -> float:
        """Lower bound of `memory` under any of some schedules."""
        states, gathered, whole, reduced = self.held(choice, lightest.parameters)
        by_kind = [0] * len(self.kinds) if choice.offload_activations else self.kept(choice)
        most, beside = (
            min([sum(map(mul, counts, by_kind)) for counts in each], default=0)
            for each in (lightest.most, lightest.beside)
        )
        if lightest.beside:
            most = max(most, beside + (whole if choice.mode in SINGLE_REDUCTION_MODES else reduced))
        return states + gathered + most

    def _needed(self, choice: Choice, rank: Rank, most: float, beside: float | None) -> float:
        """Bytes with a rank in front, and with its activations: at most, and while all of its gradients are there."""
        states, gathered, whole, reduced = self.held(choice, rank.parameters)
        found = max(
            self._even(choice, rank.single),
            states + reduced + gathered * rank.single,
            states + gathered + most,
        )
        if beside is not None:
            found = max(
                found,
                states + gathered + (whole if choice.mode in SINGLE_REDUCTION_MODES else reduced) + beside,
            )
        return found

    def _even(self, choice: Choice, single: bool) -> float:
        """Bytes with an even share of the model and no activations.

        single: ranks have one stage; those of several have freed weights of others when gradients are reduced.
        """
        states, gathered, _, reduced = self.held(choice, self._all)
        return max(states + gathered, states + reduced + gathered * single) / choice.pp

    def _activations(self, choice: Choice, rank: Rank) -> tuple[float, float | None]:
        """Bytes of activations that a rank holds: at most, and while all of its gradients are there."""
        if choice.offload_activations:
            return 0.0, None if rank.beside is None else 0.0
        by_kind = self.kept(choice)
        kept = min([sum(map(mul, counts, by_kind)) for counts in rank.stages])
        outside = self.sizes(choice).outside(1)[0] if rank.single and choice.pp == 1 else 0
        return rank.most * kept + outside, None if rank.beside is None else rank.beside * kept

    def of_actions(self, choice: Choice, tables: Tables, room: float) -> float:
        """Bytes that the fullest of some ranks has at least, by its actions; 0 where they are not counted.

        tables: of schedules. Ranks are looked at until one needs more than `room`.
        """
        if choice.schedule not in NAMES:
            return 0.0
        m = choice.micro_batches(self.config.batch.global_)
        config, owners, alike = self.scheduled(choice), self.owners(choice), self._alike(choice)
        managed = is_managed(self.config, choice.replicas * choice.shards * choice.cp, choice.mode)
        inputs, most = m * self.sizes(choice).inputs, 0.0
        known, few = dict[Alike, StageBytes](), filled(config, m)
        paired = config.parallel.pipeline.overlap and can_pair(choice.schedule, choice.ep)
        for rank in sorted({0, 1, choice.pp - 2, choice.pp - 1} & set(range(choice.pp))):
            mine = {stage: alike[stage] for stage, owner in enumerate(owners) if owner == rank}
            for what in {*mine.values()} - known.keys():
                known[what] = self._stage(choice, *what)
            held = {stage: known[what] for stage, what in mine.items()}
            steps = tables.steps(config, few, rank, paired)
            states = self.held(choice, self._parameters(choice, rank)).states + inputs
            most = max(most, states + most_held(steps, held, choice.mode not in SINGLE_REDUCTION_MODES, managed))
            if most > room:
                break
        return most

    def _alike(self, choice: Choice) -> list[Alike]:
        """By stage, what it is made of."""
        key = choice.pp, self._virtual(choice), choice.split
        if key not in self._made_of:
            ends = list(accumulate(self.split(choice), initial=0))
            last = len(ends) - 2
            self._made_of[key] = [
                (tuple(self.order[begin:end]), stage == 0, stage == last)
                for stage, (begin, end) in enumerate(pairwise(ends))
            ]
        return self._made_of[key]

    def _stage(self, choice: Choice, order: Sequence[int], first: bool, last: bool) -> StageBytes:
        """Bytes that a stage holds. order: the kinds of its layers. first, last: whether it is the model's."""
        mode = mode_of(choice)
        sizes, modes = self.sizes(choice._replace(micro=1)), [mode] * len(order)
        if mixed(self.config, self.pins, choice):  # where it is for a budget, this is what is kept at least
            every = 1 if choice.recompute == "budget" else self.config.train.recompute_every
            modes = every_nth("full" if choice.recompute == "budget" else mode, every, len(order))
        kept = left = 0
        layers = Amount(0, 0)
        for (number, recomputes), count in Counter(zip(order, modes, strict=True)).items():
            part = sizes.layer(self._kinds[number], recomputes)
            kept += choice.micro * count * part.kept_bytes
            left += choice.micro * count * part.put_off_bytes
            layers = Amount(*(have + count * more for have, more in zip(layers, self.amounts[number], strict=True)))
        ends = first + last if not self.config.model.tie_embeddings else first or last
        all_of = self.held(choice, Amount(layers.own + ends * self.matrix, layers.experts))
        units = [unit for number in {*order} for unit in self._units(choice, self.amounts[number])]
        units += [Amount(self.matrix, 0)] * bool(ends)
        return StageBytes(
            kept,
            left,
            all_of.gathered,
            all_of.whole,
            self.held(choice, layers).whole,
            all_of.reduced,
            min(self.held(choice, unit).whole for unit in units),
        )

    def _units(self, choice: Choice, layer: Amount) -> list[Amount]:
        """Parameters of a layer that are reduced at once: experts by themselves where ranks share them out."""
        return [Amount(layer.own, 0), Amount(0, layer.experts)] if choice.ep > 1 and layer.experts else [layer]

    def of_states(self, choice: Choice, any_schedule: bool = False) -> float:
        """Bytes that a rank with an even share of the model has at least, with no activations: quickly found.

        any_schedule: with whatever schedule.
        """
        return self._even(choice, not any_schedule and self._virtual(choice) == 1)

    def front(self, choice: Choice) -> list[Rank]:
        """The first rank of a pipeline, and the second where layers differ, since the first may have all of the small
        ones."""
        m = choice.micro_batches(self.config.batch.global_)
        key = choice.pp, choice.schedule, choice.virtual, choice.split, m
        if key not in self._fronts:
            virtual, kinds = self._virtual(choice), range(len(self.kinds))
            ends = list(accumulate(self.split(choice), initial=0))
            counts = [tuple(map(self.order[begin:end].count, kinds)) for begin, end in pairwise(ends)]
            first = flight(choice.schedule, choice.pp, m, virtual)  # in a V, on the first stage
            stages = counts[:: choice.pp] if choice.schedule == "interleaved_1f1b" else counts[:1]
            found = [Rank(self._parameters(choice, 0), tuple({*stages}), *first, virtual == 1)]
            if len(self.kinds) > 1 and choice.pp > 1 and choice.schedule in NAMES:
                flying = flights(choice.schedule, choice.pp, m, virtual)
                stages = [each for each, owner in zip(counts, self.owners(choice), strict=True) if owner == 1]
                most = flying.most[1]
                beside = most if flying.beside else None
                found.append(Rank(self._parameters(choice, 1), tuple({*stages}), most, beside, virtual == 1))
            self._fronts[key] = found
        return self._fronts[key]

    def split(self, choice: Choice) -> Sequence[int]:
        """Layers of every stage."""
        if choice.split is not None:
            return with_mtp(self.config.model, choice.split)
        key = choice.pp, self._virtual(choice)
        if key not in self._splits:
            self._splits[key] = with_mtp(self.config.model, balance(self.config.model, key[0] * key[1]))
        return self._splits[key]

    def _virtual(self, choice: Choice) -> int:
        """Stages of a rank."""
        return choice.virtual or SCHEDULES.get(choice.schedule, 1)

    def _parameters(self, choice: Choice, rank: int) -> Amount:
        """Parameters of a pipeline rank, those of norms and of a second matrix of a tied embedding aside."""
        key = choice.pp, self._virtual(choice), choice.schedule in V_SCHEDULES, rank, choice.split
        if key not in self._of_rank:
            split, owners = self.split(choice), self.owners(choice)
            ends = list(accumulate(split, initial=0))
            mine = [stage for stage, owner in enumerate(owners) if owner == rank]
            own, experts = (
                sum(before[ends[stage + 1]] - before[ends[stage]] for stage in mine)
                for before in (self._own, self._experts)
            )
            first, last = 0 in mine, len(split) - 1 in mine
            outer = first + last if not self.config.model.tie_embeddings else first or last
            self._of_rank[key] = Amount(own + self.matrix * outer, experts)
        return self._of_rank[key]

    def scheduled(self, choice: Choice) -> Config:
        """A configuration with the schedule of a layout, whatever else it has."""
        key = choice.pp, choice.schedule, choice.virtual
        if key not in self._scheduled:
            self._scheduled[key] = choice.applied(self.config, self.pins)
        return self._scheduled[key]

    def owners(self, choice: Choice) -> Sequence[int]:
        """By stage, its pipeline rank."""
        key = choice.pp, self._virtual(choice), choice.schedule in V_SCHEDULES
        if key not in self._placements:
            self._placements[key] = placement(self.scheduled(choice))
        return self._placements[key]

    def held(self, choice: Choice, amount: Amount) -> Each:
        """Bytes of so many parameters of a pipeline rank.

        Experts that ranks of ep share out are sharded over tp / ep times as many ranks: to as many states a rank.
        """
        each, whole = self._each(choice), amount.whole(choice)
        sharded = whole if choice.mode == "ddp" else amount.total
        return Each(each.states * sharded, each.gathered * whole, each.whole * whole, each.reduced * sharded)

    def _each(self, choice: Choice) -> Each:
        """Bytes for each parameter of a pipeline rank that tensor parallelism splits."""
        shards = choice.shards * choice.cp if choice.mode != "ddp" else 1
        key = choice.tp, shards, choice.mode == "zero3", choice.states
        if key not in self._each_of:
            states = 0 if choice.states != "device" else 2 if self.config.optim.name == "adamw" else 1
            gathers = choice.mode != "zero3" and self.config.train.dtype == "bf16"
            trains = self.config.adapter is None  # else factors are left out, which are few
            here = self.config.parallel.placement.parameters == "device"
            self._each_of[key] = Each(
                ((here + states) * self._wide if trains else here * self._frozen) / shards / choice.tp,
                (self._element if trains else self._frozen) * gathers / choice.tp if trains or shards > 1 else 0.0,
                self._gradient / choice.tp * trains,
                self._gradient / shards / choice.tp * (trains and here),
            )
        return self._each_of[key]

    def kept(self, choice: Choice) -> list[int]:
        """Bytes that a layer of each kind keeps of a micro-batch: of every sequence as many."""
        key = choice.tp, choice.ep, choice.cp, choice.method, choice.recompute, choice.micro
        if key not in self._keep:
            if choice.micro > 1:
                self._keep[key] = [choice.micro * each for each in self.kept(choice._replace(micro=1))]
            else:
                mode: Mode = "full" if mixed(self.config, self.pins, choice) else mode_of(choice)
                self._keep[key] = [self.sizes(choice).layer_bytes(kind, mode) for kind in self.kinds]
        return self._keep[key]

    def sizes(self, choice: Choice) -> Activations:
        """Sizes of a layout's activations."""
        key = choice.tp, choice.ep, choice.cp, choice.micro, choice.method, choice.offload_activations
        if key not in self._known:
            self._known[key] = Activations(choice.applied(self.config, self.pins))
        return self._known[key]


def _amount(config: Config, kind: LayerKind) -> Amount:
    """Parameters of a layer."""
    experts = expert_parameters(config, kind)
    return Amount(layer_parameters(config.model, kind).total - experts, experts)


def mixed(config: Config, pins: Mapping[str, Any], choice: Choice) -> bool:
    """Return whether layers of a stage may recompute in different ways, so that the memory of any one way is only a
    bound."""
    return choice.recompute == "budget" or (config.train.recompute_every > 1 and "train.recompute" in pins)


def _times(number: int, counts: Sequence[int]) -> tuple[int, ...]:
    return tuple([number * count for count in counts])
