"""The bytes that a pipeline rank holds while its step is walked through, by kind and component, and their peak."""

from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import NamedTuple

from megalite.config.schema import Place
from megalite.plan.memory.moment_text import Instant
from megalite.plan.memory.states import States
from megalite.plan.muon import streaming_slot
from megalite.plan.parts.part import in_four_bits
from megalite.plan.repeated_layers import parts_of
from megalite.plan.resolved import Plan
from megalite.plan.units import Item, Unit, Weights
from megalite.schedule.actions import Action, Exchange

HOST_MEMORY = "host memory"
FILES = "files"  # bytes that are in no memory
OUTSIDE_KINDS = (HOST_MEMORY, FILES)  # kinds that are not on the device
STATES_IN: dict[Place, str] = {"device": "optimizer states", "host": HOST_MEMORY, "files": FILES}
PartKey = tuple[int, int]  # a stage, and the index of a part in it


def on_device(held: Mapping[Item, int]) -> int:
    """Bytes of all kinds on the device."""
    return sum(size for (kind, _), size in held.items() if kind not in OUTSIDE_KINDS)


class Group(NamedTuple):
    """Weights of a part that FSDP2 exchanges at once."""

    key: PartKey  # experts that ranks share out have an index below 0
    weights: Weights
    shards: int


class Held:
    """Bytes held by pipeline rank `pp` in a step of `m` micro-batches, and the most so far."""

    def __init__(self, plan: Plan, m: int, pp: int) -> None:
        self.config, self.table, self.pp = plan.config, plan.table(m), pp
        self.states, self.sizes = States(plan), plan.sizes
        layers = {stage: plan.recomputed(stage) for stage in plan.stages_of(pp)}
        self.parts = parts_of(self.sizes, layers, plan.stages, condense=not self.table.pairs)
        self.held: Counter[Item] = Counter()
        self.peak: Counter[Item] = Counter()
        self.doing: Action | Exchange | str = "before the step"
        self.at: PartKey | None = None  # the part that is being computed
        self.peak_at: tuple[Action | Exchange | str, PartKey | None, str] = self.doing, None, ""
        self.total = self.most = 0  # bytes on the device
        self.on_host = self.most_on_host = 0
        self.in_files: Counter[Item] = Counter()
        self.host_peak: Counter[Item] = Counter()
        self.passing = False  # in layers that are taken as one, where memory never peaks
        self.aside = 0  # temporaries of a pass that has given way to the one beside it

    @property
    def instant(self) -> Instant:
        """The moment at which `run` has found the peak."""
        doing, key, what = self.peak_at
        return Instant(doing, self._named(*key) if key is not None else "", what)

    def _named(self, stage: int, index: int) -> str:
        parts = self.parts[stage]
        if parts[index].name != "layer":
            return f"the {parts[index].name}"
        before = sum(part.times for part in parts[:index] if part.name == "layer")
        return f"layer {self.states.plan.layers[stage][before]}"

    def _through(self, stage: int, backwards: bool = False) -> Iterator[tuple[int, Unit]]:
        """The parts of a stage and their indexes, one by one."""
        numbered = list(enumerate(self.parts[stage]))
        for index, part in reversed(numbered) if backwards else numbered:
            self.at, self.passing = (stage, index), part.times > 1
            yield index, part
        self.at, self.passing = None, False

    def _hold_states(self, stage: int, index: int) -> None:
        """Hold parameters and optimizer states of a part, which exist from the first step on."""
        states, kind, part = self.states, STATES_IN[self.config.optim.place], self.parts[stage][index]
        for group in self._groups(stage, index):
            for component, count, trained, moments, copies, four_bits in group.weights.by_component:
                there = states.on_host(count, trained, four_bits) // group.shards
                kept = states.kept(count, trained, four_bits) // group.shards + states.copied(count, trained)
                self._hold("parameters", component, part.times * (kept - there))
                self._hold(HOST_MEMORY, component, part.times * there)
                self._hold(kind, component, part.times * (states.p * (moments + copies) // group.shards))

    def _hold_saved(self, stage: int, index: int) -> None:
        """Hold the copies of a part that a background save keeps: in host memory, of states in files in another."""
        of_all, times = self.config.adapter is None, self.parts[stage][index].times
        for group in self._groups(stage, index):
            for _, count, trained, moments, *_ in group.weights.by_component:
                weights = count if of_all else trained
                self._hold(HOST_MEMORY, "checkpoint", times * (self.states.p * weights // group.shards))
                kind = FILES if self.config.optim.place == "files" else HOST_MEMORY
                self._hold(kind, "checkpoint", times * (self.states.p * moments // group.shards))

    @cached_property
    def _slot_bytes(self) -> int:
        """Bytes of one slot in which states outside of the device pass on their way; 0 where none do."""
        optim = self.config.optim
        trains = any(part.weights.trained.total for parts in self.parts.values() for part in parts)
        return streaming_slot(self.states.plan, self.pp) if trains and optim.place != "device" else 0

    def _is_second_copy(self, stage: int, part: Unit) -> bool:
        """Return whether a part is a tied embedding that the rank's first stage has too; a checkpoint saves one."""
        return stage > 0 and part.copy and 0 in self.parts

    def _groups(self, stage: int, index: int) -> list[Group]:
        """Groups of a part, in the order of backward: experts that ranks share out, then all else."""
        part, states = self.parts[stage][index], self.states
        own = Group((stage, index), part.weights, states.shards)
        if part.apart is None:
            return [own]
        return [Group((stage, -1 - index), part.apart, states.expert_shards), own]

    def _gathered(self, part: Unit) -> int:
        """Bytes of weights that are gathered only while `part` is in use."""
        return part.gathered(self.states.w) if self.states.frees and not part.with_stage else 0

    def _buffer(self, weights: Weights) -> int:
        """Bytes that the gather of a part takes while its weights are copied out."""
        return weights.gathered(self.states.w) + self.states.w * weights.recut

    def _gathered_experts(self, part: Unit) -> int:
        """Bytes of experts among those of `_gathered`; they are gathered by themselves."""
        return part.apart.gathered(self.states.w) if self.states.frees and part.apart is not None else 0

    def _copied_ahead(self, stage: int, index: int) -> int:
        """Bytes of a part's weights that are on their way from the host while the part beside it computes."""
        parts = self.parts[stage]
        return self._gathered(parts[index]) if self.states.ahead and 0 <= index < len(parts) else 0

    def _hold_gathered(self, stage: int, index: int, sign: int) -> None:
        """Hold the gathered weights of a part; release them if `sign` is negative."""
        for group in self._groups(stage, index):
            for component, count, *_, four_bits in group.weights.by_component:
                size = self.states.w * (count - four_bits) + in_four_bits(four_bits)
                self._hold("gathered weights", component, sign * self.parts[stage][index].times * size)

    def _hold_gradients(self, part: Unit, group: Group, each: int, sharded: bool = False) -> None:
        """Hold `each` bytes for every trained parameter of a group; release them if negative. sharded: once reduced."""
        kind = HOST_MEMORY if sharded and self.config.on_host(trained=True) else "gradients"
        for component, _, trained, *_ in group.weights.by_component:
            self._hold(kind, component, part.times * (each * trained // (group.shards if sharded else 1)))

    def _hold(self, kind: str, component: str, size: int) -> None:
        self.held[kind, component] += size
        if kind == FILES:
            self.in_files[kind, component] += size
            return
        if kind != HOST_MEMORY:
            self.total += size
            return
        self.on_host += size
        if self.on_host > self.most_on_host:
            self.most_on_host = self.on_host
            self.host_peak = Counter({item: size for item, size in self.held.items() if item[0] == HOST_MEMORY})

    def _see(self, temporaries: int = 0, gathered: int = 0, what: str = "") -> None:
        """Record the bytes held, with `temporaries` and `gathered` weights in use, if that is the most so far.

        what: the moment in the part that is being computed.
        """
        temporaries += self.aside
        if not self.passing and self.total + temporaries + gathered > self.most:
            self.most = self.total + temporaries + gathered
            now = {("temporaries", "backward"): temporaries, ("gathered weights", "in use"): gathered}
            self.peak = self.held + Counter(now)
            if temporaries < 0:  # a pass beside this one waits for rows that are held to be there already
                self.peak["activations", "mlp"] += temporaries
            self.peak_at = self.doing, self.at, what
            for item in [item for item in self.peak if item[0] in OUTSIDE_KINDS]:
                del self.peak[item]
