"""A walk through one pipeline rank's program that adds up the bytes held; `plan.memory` explains the letters."""

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass

from megalite.plan.memory.gradient_sums import GradientSums
from megalite.plan.memory.held import HOST_MEMORY, Group, PartKey
from megalite.plan.muon import step_temporaries
from megalite.plan.parts.part import Moment
from megalite.plan.resolved import Plan
from megalite.plan.state_streams import BLOCK, BUCKET_BYTES, CAST_BYTES, FILE_SLOTS
from megalite.plan.units import FURTHER, Item, Unit
from megalite.schedule.actions import SEND_KINDS, Action, Exchange, Kind
from megalite.schedule.reductions import reductions

GATHERING = "gathering weights"  # a moment of a part, as are the next two
GRADIENT_SUMMATION, GRADIENT_REDUCTION = "adding up gradients", "reducing gradients"  # moments of a part
EXPERTS_DONE = "gate and up"  # the moment with which backward of experts ends


@dataclass(frozen=True)
class PutOff:
    """Weight gradients of one moment that a split backward leaves to W, and the bytes held for them."""

    key: PartKey
    moment: Moment
    held: Counter[Item]


class Walk(GradientSums):
    """A step of `m` micro-batches on one pipeline rank, action by action."""

    def __init__(self, plan: Plan, m: int, pp: int) -> None:
        super().__init__(plan, m, pp)
        self.reductions = reductions(self.table, pp)
        self.fetched: Counter[tuple[int, PartKey]] = Counter()  # by micro-batch and part: layers fetched from the host
        self.arriving: set[int] = set()  # stages with gathers of a whole step that forward has not taken apart yet
        self.staying: set[int] = set()  # stages with a tied embedding that is gathered now, until a backward ends
        self.sharded: dict[PartKey, int] = {}  # parts with reduced gradients, and the bytes of an element
        self.shared: Counter[PartKey] = Counter()  # bytes of the buffer in which replicas sum a part, until its next
        self.put_off: dict[tuple[int, int], list[PutOff]] = {}  # by stage and micro-batch, from I to W
        self.reducing: Counter[int] = Counter()  # by stage: bytes being reduced, kept until FSDP2 reduces again
        self.sending = 0  # tensors on their way to other ranks
        # Bytes of the latest gather of a forward pass. FSDP2 means to free them before it takes the next one apart, but
        # before PyTorch 2.15 a variable of `wait_for_unshard` has them until that is done.
        self.buffer = 0

    def run(self) -> dict[Item, int]:
        """Bytes held at the peak of device memory, bytes of host memory at its own peak, and bytes in files."""
        for stage, parts in self.parts.items():
            for index, part in enumerate(parts):
                self._hold_states(stage, index)
                if self.config.checkpoint.async_ and not self._is_second_copy(stage, part):
                    self._hold_saved(stage, index)
        if self.config.optim.place == "files" and self._slot_bytes:
            self._hold(HOST_MEMORY, "buffers", FILE_SLOTS * (self._slot_bytes + BLOCK))
            self._hold(HOST_MEMORY, "checkpoint", BUCKET_BYTES)  # two buckets through which a save reads states
        self._hold("activations", "attention", self.sizes.angles)
        self._hold("temporaries", "tensor parallelism", self.sizes.shared_buffer)
        casts = sum(part.times * part.casts for parts in self.parts.values() for part in parts)
        casts = 0 if self.states.mode == "zero3" else casts  # weights are cast once a step, and freed before the update
        self._hold("gathered weights", "in 8 bits", casts)
        self._see()
        taken = set(self.table.pairs.values())
        for item in self.table.programs[self.pp]:
            self.doing = item
            if isinstance(item, Exchange):
                self._exchange(item)
                continue
            match item.kind:
                case Kind.F if item in self.table.pairs:
                    self._compute(item, self.table.pairs[item])
                case Kind.B if item in taken:
                    pass
                case Kind.F | Kind.B | Kind.I:
                    self._compute(item)
                case Kind.W:
                    self._weight_gradients(item)
                case Kind.GATHER | Kind.RESHARD:
                    sign = 1 if item.kind is Kind.GATHER else -1
                    self.arriving |= {item.stage}
                    for index in range(len(self.parts[item.stage])):
                        self._hold_gathered(item.stage, index, sign)
        self._hold("gathered weights", "in 8 bits", -casts)
        self.doing = "update of the weights"
        kept = self.most - self.total if self.config.train.cuda_graph else 0  # graphs share their memory with nobody
        self._see(kept + step_temporaries(self.states.plan, self.pp, self._slot_bytes))
        return {item: size for item, size in (self.peak | self.host_peak | self.in_files).items() if size}

    def _compute(self, *actions: Action) -> None:
        """Walk through an F, B or I, or through an F and a B of which each goes on where the other gives way."""
        left = deque((each, self._forward(each) if each.kind is Kind.F else self._backward(each)) for each in actions)
        at: dict[Action, PartKey | None] = dict.fromkeys(actions)
        while left:
            action, steps = left.popleft()
            self.doing, self.at = action, at[action]
            aside = next(steps, None)
            self.aside = aside if aside is not None and left else 0
            at[action] = self.at
            if aside is not None:
                left.append((action, steps))

    def _forward(self, action: Action) -> Iterator[int]:
        """Action F. Yields its temporaries whenever it gives way, as `_backward` does."""
        self._stay(action.stage, True)
        self._hold("activations", "attention", self.sizes.turns)
        self.buffer = 0
        if action.stage > 0 and not self._offloads_input(action.stage):
            self._hold("activations", "between stages", -self.sizes.stream)  # counted as the first layer's input
        head: Unit | None = None  # runs layers of multi-token prediction, before which it is gathered
        buffers = 0, 0
        for index, part in self._through(action.stage):
            if part is not head:
                self._gather(part)
            for group in self._groups(action.stage, index) if action.stage in self.arriving else ():
                self._see(self._buffer(group.weights) * (group.shards > 1), what=GATHERING)
            self._copy_ahead(action.stage, index, index + 1)
            self._keep(part)
            gathered, experts = self._gathered(part), self._gathered_experts(part)
            # FSDP2 frees the buffer of a gather at its next one: the head's, at those of layers that it runs.
            if part is head:
                buffers = 0, buffers[1] or buffers[0]
            else:
                buffers = (gathered - experts, experts) if self.states.shards > 1 else (0, 0)
                gathered += 0 if head is None else self._gathered(head)
            largest = max(buffers)
            gathered += self._copied_ahead(action.stage, index + 1)
            for temporaries, missing in part.pauses:
                held = temporaries - missing + buffers[not missing]
                self._see(held, gathered - experts)
                yield held + gathered - experts
                if missing and temporaries:  # now experts compute what has arrived
                    self._see(part.forward + largest, gathered)
            self._see(part.forward + largest, gathered)
            if part.name == FURTHER:
                head = self.parts[action.stage][-1]
                self._gather(head)
        self.arriving.discard(action.stage)
        if action.stage < self.table.stages - 1:
            self._hold("activations", "between stages", self.sizes.stream)
        self._see()

    def _backward(self, action: Action) -> Iterator[int]:
        """Action B or I. After I, the tensors from which weight gradients are made stay until W."""
        split, states = action.kind is Kind.I, self.states
        self._stay(action.stage, True)
        reduction = self.reductions[action]
        parts = self.parts[action.stage]
        received = self.sizes.stream if action.stage < self.table.stages - 1 else 0
        widens = states.of_2_15 and not reduction.now
        waiting, end = self._waiting(action.stage, widens)
        for index, part in self._through(action.stage, backwards=True):
            key = action.stage, index
            puts_off = split and part.puts_off
            before = parts[index - 1] if index > 0 and states.shards > 1 else None
            beside = self._gathered(before) - self._gathered_experts(before) if before is not None else 0
            beside += self._copied_ahead(action.stage, index - 1)
            gathered, groups = self._gathered(part), self._groups(action.stage, index)
            self._gather(part, backward=True)
            self._copy_ahead(action.stage, index, index - 1, self.sizes.stream)
            for kept in part.remade:
                self._hold("temporaries", kept.component, kept.bytes)
            if part.offloaded:
                self._fetch(action, index, part.times)
                self._fetch(action, index - 1, 1)
            made = sums = 0
            # Bytes of the stream's gradient that are held anyway: the last layer is given the received one.
            held = received if index == len(parts) - 1 else 0
            for moment in part.backward:
                begun, adds = 0 if puts_off else self._new_sums(key, moment, widens), self._adds_at_once(key, widens)
                is_sum = states.copies > 0 and moment.summed is not None  # which counts as begun from then on
                made = 0 if puts_off else self._made(key, moment, adds) + (0 if adds else made)
                sums += 0 if is_sum else begun
                again = part.again[moment.name]
                summed = waiting if index == 0 else 0
                taken = moment.temporaries - held - moment.held * puts_off
                # An embedding's two gradients make one: with a copy, a float32 sum, or one that is then cast to it.
                new = max(made + summed, sums) if summed and states.copies else made + sums + summed
                # Gradients that autograd is given are widened when all else of the moment is freed.
                late = begun if widens and (part.name == "head" or moment.name == "lookup") else 0
                self._see(taken + new - late + again + beside, gathered, moment.name)
                # Full recompute begins after the first pause, and what has arrived is used after the second.
                for missing in part.missing[: moment.pauses] if moment.where == "remade" else [0] * moment.pauses:
                    yield taken + new + again + beside + gathered - missing
                self._release(part, moment, puts_off)
                if late:
                    stream = self.sizes.stream if index else 0
                    self._see(late + max(made, summed) + stream + beside, gathered, moment.name)
                if puts_off and moment.weights and moment.of_stream:  # which W needs too
                    if held:
                        self._hold("activations", "between stages", -received)
                        received = 0
                    held = self.sizes.stream
                if moment.adds:
                    held = 0
                sums += begun if is_sum else 0
                if moment.name == EXPERTS_DONE and len(groups) > 1:
                    gathered -= self._gathered_experts(part)
                    if not puts_off:
                        experts = groups.pop(0)
                        made -= states.w * experts.weights.gradients
                        self._finish(action, part, experts, beside, reduction.by_layer)
                if puts_off and moment.weights:
                    put_off = PutOff(key, moment, part.put_off[moment.name])
                    self.put_off.setdefault((action.stage, action.micro), []).append(put_off)
            if index == 0:
                self._stay(action.stage, False)
            if waiting and index in (0, end):
                self._hold("gradients", "waiting", waiting if index else -waiting)
            if puts_off:
                continue
            for group in groups:
                self._finish(action, part, group, beside, reduction.by_layer)
        if reduction.now and not reduction.by_layer:
            self._reduce_all(action)
        self._end_reductions(action)
        self._hold("activations", "attention", -self.sizes.turns)
        if action.stage > 0:
            self._hold("activations", "between stages", self.sizes.stream)
            self._see()
            if self._offloads_input(action.stage):
                self._hold("activations", "between stages", -self.sizes.stream)
        self._hold("activations", "between stages", -received)

    def _waiting(self, stage: int, widens: bool) -> tuple[int, int]:
        """Bytes of the gradient of an embedding that its stage uses again, which waits for that of the look-up, and the
        index of the part that makes it. widens: as for `_adds_at_once`."""
        states, parts = self.states, self.parts[stage]
        gradient, end = states.r if states.copies else states.w, len(parts) - 1
        if not self.config.model.tie_embeddings:  # multi-token prediction uses it
            end = next((index for index, part in enumerate(parts) if part.name == FURTHER), end)
            gradient = states.w  # a look-up makes it, which no sum is added to at once
        if widens and (stage, 0) not in self.whole:
            gradient = states.r
        return gradient * parts[0].weights.gradients if parts[0].with_stage and not parts[0].copy else 0, end

    def _weight_gradients(self, action: Action) -> None:
        """Action W: make the weight gradients that the layers of a stage have put off, then reduce as FSDP2 does."""
        made: Counter[PartKey] = Counter()
        for put_off in self.put_off.pop((action.stage, action.micro), []):
            self.at = put_off.key
            self.passing = self.parts[action.stage][put_off.key[1]].times > 1
            adds = self._adds_at_once(put_off.key, self.states.of_2_15)
            new = self._made(put_off.key, put_off.moment, adds)
            sums = self._new_sums(put_off.key, put_off.moment, self.states.of_2_15)
            self._see(made.total() + new + sums + put_off.moment.again, what=put_off.moment.name)
            made[put_off.key] += sums if adds else new
            for (kind, component), size in put_off.held.items():
                self._hold(kind, component, -size)
        self.at, self.passing = None, False
        self._see(made.total())
        for index, part in self._through(action.stage):
            if part.puts_off:
                left = made.pop((action.stage, index), 0)
                for group in reversed(self._groups(action.stage, index)):
                    left = max(0, left - self.states.w * group.weights.gradients)
                    self._add_up(part, group, made.total() + left)
        if self.reductions[action].now:
            self._reduce_all(action)
        self._end_reductions(action)

    def _gather(self, part: Unit, backward: bool = False) -> None:
        """Put together the shards of a part: of its own weights, then of experts, with the gradients that are there."""
        if not self.states.frees or part.with_stage or part.name == FURTHER:  # which has no weights of its own
            return
        gathered, gradients = 0, self.sizes.stream
        for weights, shards in ((part.weights, self.states.shards), (part.apart, self.states.expert_shards)):
            if weights is not None:
                gathered += weights.gathered(self.states.w)
                if shards > 1:
                    beside = gradients if backward else self.buffer * (not self.states.of_2_15)
                    self._see(self._buffer(weights) + beside, gathered, GATHERING)
                    self.buffer = weights.gathered(self.states.w)
                gradients += part.rows

    def _stay(self, stage: int, gathered: bool) -> None:
        """Gather a tied embedding that stays with its stage, or free it, if that is not done yet."""
        part = self.parts[stage][0]
        if not (self.states.frees and part.with_stage) or (stage in self.staying) == gathered:
            return
        self.staying ^= {stage}
        if gathered and self.states.shards > 1:
            size = part.weights.gathered(self.states.w)
            self._see(size, size, GATHERING)
        self._hold_gathered(stage, 0, 1 if gathered else -1)

    def _copy_ahead(self, stage: int, index: int, ahead: int, gradients: int = 0) -> None:
        """Copy a part of the index `ahead` from the host, and cast it if it is trained, beside the one of `index`."""
        size = self._copied_ahead(stage, ahead)
        if size and self.states.w != self.states.p and self.config.on_host(trained=True):
            cast = min(self.states.p * self.parts[stage][ahead].gradients, CAST_BYTES)
            self._see(cast + gradients, self._gathered(self.parts[stage][index]) + size, GATHERING)

    def _keep(self, part: Unit) -> None:
        """Hold the tensors that a forward pass keeps."""
        for kept in part.kept:
            self._hold("activations", kept.component, kept.bytes)
        for kept in part.offloaded:
            self._hold(HOST_MEMORY, kept.component, kept.bytes)

    def _release(self, part: Unit, moment: Moment, puts_off: bool) -> None:
        """Free the tensors that were kept until `moment`, except for those that a split backward keeps for W."""
        for (kind, component), size in part.freed[moment.name].items():
            self._hold(kind, component, -size)
        for (kind, component), size in part.retained[moment.name].items() if puts_off else ():
            self._hold(kind, component, size)

    def _fetch(self, action: Action, index: int, wanted: int) -> None:
        """Fetch offloaded tensors of a part to the device; if the part is many layers, tensors of `wanted` layers."""
        if index < 0:
            return
        part, key = self.parts[action.stage][index], (action.micro, (action.stage, index))
        missing = max(0, wanted - self.fetched[key])
        self.fetched[key] += missing
        for kept in part.offloaded:
            size = missing * (kept.bytes // part.times)
            self._hold("temporaries", kept.component, size)
            self._hold(HOST_MEMORY, kept.component, -size)

    def _offloads_input(self, stage: int) -> bool:
        """Return whether the first layer offloads its input; the tensor that the stage has received then stays too."""
        return any(kept.given for kept in self.parts[stage][0].offloaded)

    def _finish(self, action: Action, part: Unit, group: Group, beside: int, reduces: bool) -> None:
        """Reduce the gradients of a group, which backward has just made, or add them to those that are held."""
        if reduces:
            self._reduce(action, part, group, beside)
        else:
            self._add_up(part, group, beside)

    def _add_up(self, part: Unit, group: Group, beside: int) -> None:
        states = self.states
        summed = group.key in self.whole
        if not summed:
            self._hold_gradients(part, group, states.r)
            self.whole.add(group.key)
        if states.r != states.w and not states.copies and not states.of_2_15:
            new = 0 if summed else states.w * group.weights.twice
            self._see(new + beside, what=GRADIENT_SUMMATION)

    def _reduce_all(self, action: Action) -> None:
        """Reduce the gradients of all parts in the order of the model, as FSDP2 does at the end of a backward pass."""
        for index, part in self._through(action.stage):
            for group in reversed(self._groups(action.stage, index)):
                self._reduce(action, part, group, 0)

    def _reduce(self, action: Action, part: Unit, group: Group, beside: int) -> None:
        """Reduce the gradients that a group has accumulated, or else those just made; `beside` more bytes are used."""
        states, key, count = self.states, group.key, group.weights.gradients
        summed = key in self.whole
        element = states.r if summed else states.w
        made, whole = 0 if summed else states.w * count, states.r * count
        self._release_reduced(action.stage)
        self._share(key, 0)
        last_recut = 0 if states.of_2_15 else element * group.weights.last_recut
        self._see(made + beside + whole + last_recut, what=GRADIENT_REDUCTION)
        self._hold("gradients", "being reduced", whole)
        self.reducing[action.stage] = whole
        if summed:
            self._hold_gradients(part, group, -states.r)
            self.whole.remove(key)
        if states.of_2_15:
            copy = 0
        elif group.shards > 1:  # FSDP2 still holds the gradient that it handled last
            copy = element * group.weights.newest
        else:  # where only replicas are summed, FSDP2 divides by 1, into a copy
            copy = whole if states.replicas else 0
        reduced = whole // group.shards
        self._see(beside + copy + reduced, what=GRADIENT_REDUCTION)
        waits = states.replicas and not self.reductions[action].replicas
        held, each = self.sharded.get(key, 0), states.r if waits else states.p
        if states.r != each:
            more = each * count // group.shards if held else 0
            self._see(beside + copy + reduced + more, what=GRADIENT_REDUCTION)
        if held != each:
            self._hold_gradients(part, group, each - held, sharded=True)
            self.sharded[key] = each
        # The first gradient is the buffer itself, and so is a sum that has waited for the replicas.
        is_gradient = states.r == states.p and not (held and self.table.splits_backward)
        if states.replicas and not waits and not is_gradient:
            self._share(key, part.times * reduced)

    def _end_reductions(self, action: Action) -> None:
        """Free the buffers of a stage's reductions after its last backward pass; only the results stay."""
        if self.reductions[action].last:
            self._release_reduced(action.stage)
            for index in range(len(self.parts[action.stage])):
                for group in self._groups(action.stage, index):
                    self._share(group.key, 0)

    def _release_reduced(self, stage: int) -> None:
        self._hold("gradients", "being reduced", -self.reducing.pop(stage, 0))

    def _share(self, key: PartKey, size: int) -> None:
        """Replace the buffer in which replicas sum the gradients of a part by one of `size` bytes."""
        self._hold("gradients", "being reduced", size - self.shared.pop(key, 0))
        if size:
            self.shared[key] = size

    def _exchange(self, exchange: Exchange) -> None:
        """Hold buffers for the tensors to receive, and free the tensors that the exchange before has sent."""
        sends = sum(action.kind in SEND_KINDS for action in exchange.actions)
        self._hold("activations", "between stages", -self.sending * self.sizes.stream)
        self._hold("activations", "between stages", (len(exchange.actions) - sends) * self.sizes.stream)
        self.sending = sends
        self._see()
