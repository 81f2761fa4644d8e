"""The pipeline runner: executes one rank's program of a schedule table.

The runner knows no schedule and no model. It posts transfers where the table says, and waits for them only when their
data is needed, so they overlap with compute. With pp = 1, the table has no transfers.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megalite.base.errors import ranks_text
from megalite.distributed.health.activity import Activity, Awaiting
from megalite.distributed.health.clock import SectionClock
from megalite.distributed.mesh import Mesh
from megalite.parallel import fsdp
from megalite.parallel.linear import WeightGradients
from megalite.parallel.turns import Turns
from megalite.schedule.actions import Action, Exchange, Kind, Program, Table
from megalite.schedule.reductions import Reduction, reductions


class Stage(Protocol):
    """A pipeline stage, as the runner calls it."""

    def __call__(self, x: Tensor, positions: Any, targets: Any) -> Tensor | tuple[Tensor, Tensor]:
        """Make activations, or given targets the summed loss, of a micro-batch or the activations of the stage before.

        Any stage may add to the loss: it then returns a pair of that result and its own loss, 0-dimensional.
        """


@dataclass(frozen=True)
class Activation:
    """Shape, data type and device of the activations that a stage sends to the next."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def empty(self) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)


@dataclass
class TensorsInFlight:
    """Tensors of one step that are between two actions.

    inputs: by action F, received activations, whose gradients are sent back.
    outputs: by action F, the graphs from which backward starts, without the output tensors.
    put_off: by action W, the functions that compute weight gradients.
    """

    inbox: dict[Action, tuple[Tensor, dist.Work | None]] = field(default_factory=dict)
    outbox: dict[Action, Tensor] = field(default_factory=dict)
    inputs: dict[Action, Tensor] = field(default_factory=dict)
    outputs: dict[Action, list[GradientEdge]] = field(default_factory=dict)
    put_off: dict[Action, list[Callable[[], None]]] = field(default_factory=dict)
    sending: list[tuple[Tensor, dist.Work, int]] = field(default_factory=list)  # and to which rank


@dataclass(frozen=True, slots=True)
class Entry:
    """The activity that the runner reports while it does an entry of its program."""

    item: Action | Exchange
    number: int  # from 1
    of: int

    def __str__(self) -> str:
        return f"{self.item} (entry {self.number} of {self.of})"


@dataclass(frozen=True, slots=True)
class Waiting(Awaiting):
    """The activity that the runner reports while an action waits for its input."""

    entry: object  # entry of this rank's program that waits
    transfer: Action
    peer: int  # pipeline rank
    rank: int  # in the whole job
    program: Program  # program of the peer

    @property
    def awaited(self) -> tuple[int, ...]:
        return (self.rank,)

    def __str__(self) -> str:
        sends = self.transfer.matching
        at = next(i for i, item in enumerate(self.program, 1) if isinstance(item, Exchange) and sends in item.actions)
        sender = f"pipeline rank {self.peer} (rank {self.rank}), which sends it at entry {at} of {len(self.program)}"
        return f"{self.entry}, waiting for {self.transfer} from {sender}"


@dataclass(frozen=True, slots=True)
class Delivering(Awaiting):
    """The activity that the runner reports while messages that it has sent are on their way."""

    ranks: tuple[int, ...]  # in the whole job

    @property
    def awaited(self) -> tuple[int, ...]:
        return self.ranks

    def __str__(self) -> str:
        return f"waiting until {ranks_text(sorted(set(self.ranks)))} has received everything"


@dataclass(frozen=True)
class StepInputs:
    """The inputs of a step: one entry per micro-batch."""

    tokens: Sequence[Tensor]
    targets: Sequence[Any]  # given to the last stage, as they are; the runner does not look into them
    positions: Sequence[Any]  # likewise, given to every stage
    scale: float | Tensor = 1.0  # the gradients are of scale · loss


class Pipeline:
    """Runs `table` as this rank of `mesh`, which owns `stages`, by their global number.

    gradients: for each stage whose backward the table splits, the object that collects the weight gradients put off
    until action W.
    mode: that of data parallelism, `parallel.data.mode`. clock: times what actions take without waiting.
    """

    def __init__(
        self,
        table: Table,
        stages: Mapping[int, Stage],
        gradients: Mapping[int, WeightGradients],
        mesh: Mesh,
        activation: Activation,
        mode: str,
        activity: Activity,
        clock: SectionClock | None = None,
    ) -> None:
        rank = mesh.coordinates["pp"]
        program = table.programs[rank]
        self.program = [Entry(item, number, len(program)) for number, item in enumerate(program, start=1)]
        seconds = {entry.item: entry for entry in self.program}
        self.beside = {first: seconds[second] for first, second in table.pairs.items() if first in seconds}
        self.taken = {entry.item for entry in self.beside.values()}
        self.table, self.stages, self.gradients, self.rank = table, stages, gradients, rank
        self.activation, self.mode, self.activity = activation, mode, activity
        self.clock = clock or SectionClock(activation.device)
        self.ranks = [mesh.along("pp", position) for position in range(table.ranks)]
        self.groups = {peer: mesh.toward(peer) for peer in range(table.ranks) if peer != rank}
        self.reductions = reductions(table, rank)

    def run(self, step: StepInputs) -> Tensor:
        """Run one step. Returns the sum of the losses of this rank's stages, 0 if they have none.

        Gradients are accumulated in the parameters, unless the table is forward only.
        """
        flight = TensorsInFlight()
        total = torch.zeros((), dtype=torch.float64, device=self.activation.device)
        for entry in self.program:
            self.activity(entry)
            item = entry.item
            if isinstance(item, Exchange):
                self._exchange(item, flight)
                continue
            match item.kind:
                case Kind.F if item in self.beside:
                    with self.clock.timed("backward"):
                        total += self._in_turns(entry, self.beside[item], step, flight)
                case Kind.B if item in self.taken:
                    pass  # it was computed beside the F before it
                case Kind.F:
                    with self.clock.timed("forward"):
                        total += self._forward(item, step, flight)
                case Kind.B:
                    with self.clock.timed("backward"):
                        self._backward(item, flight)
                case Kind.I:
                    with self.clock.timed("backward"):
                        self._input_gradients(item, flight)
                case Kind.W:
                    with self.clock.timed("backward"):
                        self._weight_gradients(item, flight)
                case Kind.GATHER:
                    fsdp.gather(self.stages[item.stage])
                case Kind.RESHARD:
                    fsdp.reshard(self.stages[item.stage])
                case Kind.REDUCE:
                    pass  # the backward before it is told of it, and reduces layer by layer
        if flight.sending:
            self.activity(Delivering(tuple(rank for _, _, rank in flight.sending)))
        for _, work, _ in flight.sending:
            work.wait()
        return total

    def _forward(self, action: Action, step: StepInputs, flight: TensorsInFlight) -> Tensor | float:
        stage = self.stages[action.stage]
        if action.stage == 0:
            x = step.tokens[action.micro]
        else:
            x = self._received(Action(Kind.RECV_F, action.stage, action.micro), flight)
            if torch.is_grad_enabled():
                flight.inputs[action] = x.requires_grad_()
        last = action.stage == self.table.stages - 1
        y = stage(x, step.positions[action.micro], step.targets[action.micro] if last else None)
        y, *losses = y if isinstance(y, tuple) else (y,)
        if last:
            losses.append(y)
        else:
            self._hand_over(action.send, y.detach(), flight)
        if torch.is_grad_enabled():
            made = [] if last else [y]
            flight.outputs[action] = [get_gradient_edge(x) for x in (*made, *(loss * step.scale for loss in losses))]
        return sum((loss.detach() for loss in losses), start=0.0)

    def _backward(self, action: Action, flight: TensorsInFlight) -> None:
        """Action B: compute all gradients. Action I: compute gradients of inputs; those of weights are put off."""
        stage, reduction = self.stages[action.stage], self.reductions[action]
        at_end = reduction.now and not reduction.by_layer
        fsdp.before_backward(stage, self.mode, Reduction() if at_end else reduction)
        forward = Action(Kind.F, action.stage, action.micro)
        outputs = flight.outputs.pop(forward)
        grads: list[Tensor | None] = [None] * len(outputs)  # None: 1, the gradient of a loss
        if action.stage < self.table.stages - 1:
            grads[0] = self._received(Action(Kind.RECV_B, action.stage, action.micro), flight)
        torch.autograd.backward(outputs, grads)
        if at_end:
            fsdp.after_weight_gradients(stage, reduction)
        if action.stage > 0:
            x = flight.inputs.pop(forward)
            assert x.grad is not None
            self._hand_over(action.send, x.grad, flight)

    def _in_turns(self, first: Entry, second: Entry, step: StepInputs, flight: TensorsInFlight) -> Tensor | float:
        """Compute the F of one entry beside the B of another."""
        assert isinstance(first.item, Action)
        assert isinstance(second.item, Action)
        forward = partial(self._forward, first.item, step, flight)
        turns = Turns(forward, lambda forward: self.activity(first if forward else second), self.activity.rest)
        return turns.run(partial(self._backward, second.item, flight))

    def _input_gradients(self, action: Action, flight: TensorsInFlight) -> None:
        with self.gradients[action.stage].put_off() as put_off:
            self._backward(action, flight)
        flight.put_off[Action(Kind.W, action.stage, action.micro)] = put_off

    @torch.no_grad()
    def _weight_gradients(self, action: Action, flight: TensorsInFlight) -> None:
        put_off = flight.put_off.pop(action)
        while put_off:  # from the last layer to the first; each call frees the tensors that it held
            put_off.pop(0)()
        fsdp.after_weight_gradients(self.stages[action.stage], self.reductions[action])

    def _hand_over(self, send: Action, tensor: Tensor, flight: TensorsInFlight) -> None:
        """Put a result into the inbox, if its stage is on this rank, else into the outbox until its exchange."""
        if self.table.peer(send) == self.rank:
            flight.inbox[send.matching] = tensor, None
        else:
            flight.outbox[send] = tensor

    def _exchange(self, exchange: Exchange, flight: TensorsInFlight) -> None:
        """Post the transfers of `exchange`, those with each peer as one batch."""
        batches: defaultdict[dist.ProcessGroup, list[tuple[Action, dist.P2POp]]] = defaultdict(list)
        for action in exchange.actions:
            peer = self.table.peer(action)
            sends, group = action == action.transfer, self.groups[peer]
            tensor = flight.outbox.pop(action).contiguous() if sends else self.activation.empty()
            posted = dist.P2POp(dist.isend if sends else dist.irecv, tensor, self.ranks[peer], group)
            batches[group].append((action, posted))
        flight.sending = [sent for sent in flight.sending if not sent[1].is_completed()]
        for batch in batches.values():
            works = dist.batch_isend_irecv([posted for _, posted in batch])
            if len(works) < len(batch):  # NCCL answers with one handle for the whole batch
                works = works * len(batch)
            for (action, posted), work in zip(batch, works, strict=True):
                if action == action.transfer:
                    flight.sending.append((posted.tensor, work, posted.peer))
                else:
                    flight.inbox[action] = posted.tensor, work

    def _received(self, transfer: Action, flight: TensorsInFlight) -> Tensor:
        """The tensor that `transfer` brings. Waits for it."""
        tensor, work = flight.inbox.pop(transfer)
        if work is not None:
            peer, (entry, _) = self.table.peer(transfer), self.activity.now
            self.activity(Waiting(entry, transfer, peer, self.ranks[peer], self.table.programs[peer]))
            work.wait()
            self.activity(entry)
        return tensor
