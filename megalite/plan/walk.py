"""A walk along one pipeline rank's program that adds up what the rank holds; see `plan.memory` for the legend."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from megalite.config.schema import Config
from megalite.plan.activations import BYTES, Activations, Moment, Part
from megalite.plan.pipeline import uses_fsdp
from megalite.plan.recompute import Mode
from megalite.schedule.actions import Action, Exchange, Kind, Table

HOST = "host memory"
Item = tuple[str, str]  # one of the kinds of `plan.memory`, or HOST, and the component of the model
Place = tuple[int, int]  # a stage, and the index of a part in it


@dataclass(frozen=True)
class States:
    """How parameters and gradients are held."""

    config: Config

    @property
    def mode(self) -> str:
        return self.config.parallel.data.mode

    @property
    def w(self) -> int:
        return BYTES[self.config.train.precision]

    @property
    def p(self) -> int:
        return max(self.w, 4)

    @property
    def r(self) -> int:
        return 2 if self.config.parallel.data.reduce_precision == "bf16" else self.p

    @property
    def shards(self) -> int:
        parallel = self.config.parallel
        return parallel.layout.dp_shard * parallel.cp if parallel.data.sharded else 1

    @property
    def managed(self) -> bool:
        """Whether FSDP2 gathers weights and reduces gradients."""
        return uses_fsdp(self.config)

    @property
    def reduces_each(self) -> bool:
        return self.mode in ("zero2", "zero3")

    @property
    def frees(self) -> bool:
        """Whether gathered weights are freed after every use."""
        return self.managed and self.mode == "zero3"


def _parts(sizes: Activations, config: Config, modes: Sequence[Mode], stage: int, stages: int) -> list[Part]:
    """The parts of a stage, first to last."""
    layers = [sizes.layer(mode) for mode in modes]
    last = [sizes.head()] if stage == stages - 1 else []
    if stage == 0:
        return [sizes.embedding(with_head=stages == 1), *layers, *last]
    return [*([sizes.tied_copy()] if last and config.model.tie_embeddings else []), *layers, *last]


class Walk:
    """One pipeline rank's step, action by action: what it holds, and when that is most.

    modes: by stage of the rank, what each of its layers recomputes.
    """

    def __init__(self, config: Config, table: Table, pp: int, modes: Mapping[int, Sequence[Mode]]) -> None:
        self.config, self.table, self.pp = config, table, pp
        self.states, self.sizes = States(config), Activations(config)
        self.parts = {stage: _parts(self.sizes, config, modes[stage], stage, table.stages) for stage in modes}
        reduces = [item for item in table.programs[pp] if isinstance(item, Action) and item.kind is Kind.REDUCE]
        self.reduces = {(action.stage, action.micro) for action in reduces}
        self.held: Counter[Item] = Counter()
        self.peak: Counter[Item] = Counter()
        self.total = self.most = 0  # bytes on the device
        self.on_host = self.most_on_host = 0
        self.host_peak: Counter[Item] = Counter()
        self.fetched: set[tuple[int, Place]] = set()  # micro-batch and part whose activations are back from the host
        self.whole: set[Place] = set()  # parts with gradients that are not reduced yet
        self.sharded: set[Place] = set()  # parts with gradients that are
        self.put_off: dict[tuple[int, int], Counter[Item]] = {}  # by stage and micro-batch, from I to W
        self.reducing: Counter[int] = Counter()  # by stage: bytes being reduced, which FSDP2 keeps until the next are
        self.sending = 0  # tensors on their way to other ranks

    def run(self) -> dict[Item, int]:
        """What is held at the peak, and of host memory, at the peak of that."""
        p, shards = self.states.p, self.states.shards
        for part in (part for parts in self.parts.values() for part in parts):
            self._hold_weights("parameters", part, p, shards)
            self._hold_weights(HOST if self.config.optim.offload else "optimizer states", part, 2 * p, shards)
            if self.states.frees and part.with_stage:
                self._hold_weights("gathered weights", part, self.states.w)
        self._hold("activations", "attention", self.sizes.angles)
        self._see()
        for item in self.table.programs[self.pp]:
            if isinstance(item, Exchange):
                self._exchange(item)
                continue
            match item.kind:
                case Kind.F:
                    self._forward(item)
                case Kind.B | Kind.I:
                    self._backward(item)
                case Kind.W:
                    self._weight_gradients(item)
                case Kind.GATHER | Kind.RESHARD:
                    sign = 1 if item.kind is Kind.GATHER else -1
                    for part in self.parts[item.stage]:
                        self._hold_weights("gathered weights", part, sign * self.states.w)
        if self.config.optim.offload:
            for part in (part for parts in self.parts.values() for part in parts):
                self._hold_weights(HOST, part, 2 * p, shards)  # weights and gradients, for the update
        return {item: size for item, size in (self.peak | self.host_peak).items() if size}

    def _forward(self, action: Action) -> None:
        self._hold("activations", "attention", self.sizes.turns)
        for part in self.parts[action.stage]:
            for kept in part.kept:
                self._hold("activations", kept.component, kept.bytes)
            for kept in part.offloaded:
                self._hold(HOST, kept.component, kept.bytes)
            gathered = self._gathered(part)
            self._see(part.forward + (gathered if self.states.shards > 1 else 0), gathered)
        if action.stage > 0 and not self._offloads_input(action.stage):
            self._hold("activations", "between stages", -self.sizes.stream)  # now the input of the first layer
        if action.stage < self.table.stages - 1:
            self._hold("activations", "between stages", self.sizes.stream)
        self._see()

    def _backward(self, action: Action) -> None:
        """B, or I: then what weights' gradients are made of stays until W."""
        split, states = action.kind is Kind.I, self.states
        waiting = self.put_off[action.stage, action.micro] = Counter()
        parts = self.parts[action.stage]
        for index in reversed(range(len(parts))):
            part, place = parts[index], (action.stage, index)
            puts_off = split and part.puts_off
            beside = self._gathered(parts[index - 1]) if index > 0 and states.shards > 1 else 0
            for kept in part.remade:
                self._hold("temporaries", kept.component, kept.bytes)
            if part.offloaded:
                self._fetch(action, index)
                self._fetch(action, index - 1)
            made = 0
            for moment in part.backward:
                made = 0 if puts_off else moment.weights + (0 if self._adds_at_once(place) else made)
                again = sum(cheap.bytes for cheap in part.cheap if cheap.until == moment.name)
                if moment.gathers:
                    self._see(moment.temporaries + made + again + beside, self._gathered(part))
                else:
                    self._see(moment.temporaries)
                self._release(part, moment, waiting if puts_off else None)
            if not puts_off:
                self._take(place, part, not split and (action.stage, action.micro) in self.reduces, beside)
        self._hold("activations", "attention", -self.sizes.turns)
        if action.stage > 0:
            self._hold("activations", "between stages", self.sizes.stream)
            self._see()
            if self._offloads_input(action.stage):
                self._hold("activations", "between stages", -self.sizes.stream)
        if action.stage < self.table.stages - 1:
            self._hold("activations", "between stages", -self.sizes.stream)

    def _weight_gradients(self, action: Action) -> None:
        """W: what the layers of a stage have put off, then FSDP2's turn."""
        parts = self.parts[action.stage]
        places = [(action.stage, index) for index, part in enumerate(parts) if part.puts_off]
        made = sum(self.states.w * parts[index].parameters.total for _, index in places)
        if all(map(self._adds_at_once, places)):
            made = 0
        # What was put off goes layer by layer as gradients are made: most is held at one of the ends.
        self._see(made // max(1, len(places)) + self.sizes.gathered)
        for (kind, component), size in self.put_off.pop((action.stage, action.micro)).items():
            self._hold(kind, component, -size)
        self._see(made)
        reduce = (action.stage, action.micro) in self.reduces
        for index in reversed(range(len(parts))):
            part = parts[index]
            if part.puts_off:
                made -= self.states.w * part.parameters.total
            if part.puts_off or reduce:
                self._take((action.stage, index), part, reduce, made)

    def _gathered(self, part: Part) -> int:
        """Bytes of weights gathered for the use of `part` only."""
        return self.states.w * part.parameters.total if self.states.frees and not part.with_stage else 0

    def _release(self, part: Part, moment: Moment, waiting: Counter[Item] | None) -> None:
        """Free what was kept until `moment`; what gradients of weights still need goes to `waiting`, if given."""
        groups = (("activations", part.kept), ("temporaries", (*part.remade, *part.offloaded)))
        ended = [(kind, kept) for kind, group in groups for kept in group if kept.until == moment.name]
        for kind, kept in ended:
            if waiting is None or not kept.for_weights:
                self._hold(kind, kept.component, -kept.bytes)
        if waiting is None:
            return
        cheap = [("temporaries", kept) for kept in part.cheap if kept.until == moment.name]
        for kind, kept in cheap:
            self._hold(kind, kept.component, kept.bytes if kept.for_weights else 0)
        self._hold("gradients", "put off", moment.put_off)
        waiting["gradients", "put off"] += moment.put_off
        for kind, kept in (*ended, *cheap):
            waiting[kind, kept.component] += kept.bytes if kept.for_weights else 0

    def _fetch(self, action: Action, index: int) -> None:
        """Bring what a part has offloaded back to the device, for the first time."""
        place = action.stage, index
        if index < 0 or (action.micro, place) in self.fetched:
            return
        self.fetched.add((action.micro, place))
        for kept in self.parts[action.stage][index].offloaded:
            self._hold("temporaries", kept.component, kept.bytes)
            self._hold(HOST, kept.component, -kept.bytes)

    def _offloads_input(self, stage: int) -> bool:
        """Whether the first layer has a copy of what the stage has received, which stays too."""
        return any(kept.until == "attention norm" for kept in self.parts[stage][0].offloaded)

    def _adds_at_once(self, place: Place) -> bool:
        """Whether autograd adds every gradient to one that is there already, and frees it."""
        return not self.states.managed and place in self.whole

    def _take(self, place: Place, part: Part, reduce: bool, beside: int) -> None:
        """Accumulate or reduce the gradients of `part`, which backward has just made."""
        states = self.states
        summed = place in self.whole  # into gradients that are held already
        made = 0 if summed else states.w * part.parameters.total
        whole = states.r * part.parameters.total
        if not reduce:
            if not summed:
                self._hold_weights("gradients", part, states.r)
                self.whole.add(place)
            if states.r != states.w:
                self._see(made + beside)
            return
        self._see(made + beside - self.reducing[place[0]] + whole)
        self._hold("gradients", "being reduced", whole - self.reducing[place[0]])
        self.reducing[place[0]] = whole
        if summed:
            self._hold_weights("gradients", part, -states.r)
            self.whole.remove(place)
        if states.shards > 1:  # FSDP2 still has the gradient that it looked at last
            copy = part.newest * (states.r if summed else states.w)
        else:  # and where it has nobody to reduce with, it divides by 1, in a copy
            copy = whole
        self._see(beside + copy + whole // states.shards)
        if place not in self.sharded:
            self._hold_weights("gradients", part, states.p, states.shards)
            self.sharded.add(place)

    def _exchange(self, exchange: Exchange) -> None:
        """Buffers are made for what comes; what was sent before has arrived."""
        sends = sum(action == action.transfer for action in exchange.actions)
        self._hold("activations", "between stages", -self.sending * self.sizes.stream)
        self._hold("activations", "between stages", (len(exchange.actions) - sends) * self.sizes.stream)
        self.sending = sends
        self._see()

    def _hold_weights(self, kind: str, part: Part, each: int, shards: int = 1) -> None:
        """Hold `each` bytes for every parameter of `part`, shared out over `shards` ranks; release if negative."""
        for component, count in asdict(part.parameters).items():
            if count:
                self._hold(kind, component, each * count // shards)

    def _hold(self, kind: str, component: str, size: int) -> None:
        self.held[kind, component] += size
        if kind != HOST:
            self.total += size
            return
        self.on_host += size
        if self.on_host > self.most_on_host:
            self.most_on_host = self.on_host
            self.host_peak = Counter({item: size for item, size in self.held.items() if item[0] == HOST})

    def _see(self, temporaries: int = 0, gathered: int = 0) -> None:
        """Remember what is held, with what is used for a moment, if it is the most so far."""
        if self.total + temporaries + gathered > self.most:
            self.most = self.total + temporaries + gathered
            now = {("temporaries", "backward"): temporaries, ("gathered weights", "in use"): gathered}
            self.peak = self.held + Counter(now)
            for item in [item for item in self.peak if item[0] == HOST]:
                del self.peak[item]
