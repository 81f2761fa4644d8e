"""The pipeline runner: executes one rank's program of a schedule table.

It knows no schedule and no model. Transfers are posted where the table says and waited for where their
data is needed, so they overlap with compute. pp = 1 is a table without transfers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megalite.config.schema import DataParallel
from megalite.parallel import fsdp
from megalite.schedule.actions import Action, Exchange, Kind, Table


class Stage(Protocol):
    """What the runner asks of a pipeline stage."""

    def __call__(self, x: Tensor) -> Tensor:
        """Forward: a micro-batch, or the activations of the stage before."""

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Of the last stage: the loss summed over a micro-batch."""


@dataclass(frozen=True)
class Activation:
    """What stages hand to each other."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def empty(self) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)


@dataclass
class Flight:
    """Tensors of one step that are between two actions."""

    inbox: dict[Action, tuple[Tensor, dist.Work]] = field(default_factory=dict)
    outbox: dict[Action, Tensor] = field(default_factory=dict)
    inputs: dict[Action, Tensor] = field(default_factory=dict)  # by F: leaves whose gradient is sent back
    outputs: dict[Action, GradientEdge] = field(default_factory=dict)  # by F: the graph alone, not its tensor
    sending: list[tuple[Tensor, dist.Work]] = field(default_factory=list)


class Pipeline:
    """Runs `table` as pipeline rank `rank`, which owns `stages` by their global number."""

    def __init__(
        self,
        table: Table,
        stages: dict[int, Stage],
        rank: int,
        group: dist.ProcessGroup,
        activation: Activation,
        data: DataParallel,
    ) -> None:
        self.program = table.programs[rank]
        self.table, self.stages, self.group, self.activation, self.data = table, stages, group, activation, data
        backwards = [item for item in self.program if isinstance(item, Action) and item.kind is Kind.B]
        self.last_backward = {action.stage: action for action in backwards}

    def run(self, tokens: Sequence[Tensor], targets: Sequence[Tensor], scale: float) -> Tensor:
        """Run one step; the sum of the losses seen here, 0 except on the last stage's rank.

        tokens, targets: one tensor per micro-batch. Gradients of `scale` · loss are accumulated in the
        parameters, unless the table is forward only.
        """
        flight = Flight()
        total = torch.zeros((), dtype=torch.float64, device=self.activation.device)
        for item in self.program:
            if isinstance(item, Exchange):
                self._exchange(item, flight)
            elif item.kind is Kind.F:
                total += self._forward(item, tokens, targets, scale, flight)
            else:
                self._backward(item, flight)
        for _, work in flight.sending:
            work.wait()
        return total

    def _forward(
        self, action: Action, tokens: Sequence[Tensor], targets: Sequence[Tensor], scale: float, flight: Flight
    ) -> Tensor | float:
        stage = self.stages[action.stage]
        if action.stage == 0:
            x = tokens[action.micro]
        else:
            x = self._received(Action(Kind.RECV_F, action.stage, action.micro), flight)
            if torch.is_grad_enabled():
                flight.inputs[action] = x.requires_grad_()
        y = stage(x)
        if action.stage < self.table.stages - 1:
            flight.outbox[action.send] = y.detach()
            result: Tensor | float = 0.0
        else:
            y = stage.loss(y, targets[action.micro])
            result = y.detach()
            y = y * scale
        if torch.is_grad_enabled():
            flight.outputs[action] = get_gradient_edge(y)
        return result

    def _backward(self, action: Action, flight: Flight) -> None:
        last = action == self.last_backward[action.stage]
        fsdp.before_backward(self.stages[action.stage], last, self.data)
        forward = Action(Kind.F, action.stage, action.micro)
        grad = None
        if action.stage < self.table.stages - 1:
            grad = self._received(Action(Kind.RECV_B, action.stage, action.micro), flight)
        torch.autograd.backward([flight.outputs.pop(forward)], [grad])
        if action.stage > 0:
            x = flight.inputs.pop(forward)
            assert x.grad is not None
            flight.outbox[action.send] = x.grad

    def _exchange(self, exchange: Exchange, flight: Flight) -> None:
        """Post every transfer of `exchange` as one batch."""
        operations, received = [], []
        for action in exchange.actions:
            peer = dist.get_global_rank(self.group, self.table.peer(action))
            if action == action.transfer:
                operations.append(dist.P2POp(dist.isend, flight.outbox.pop(action).contiguous(), peer, self.group))
            else:
                operations.append(dist.P2POp(dist.irecv, self.activation.empty(), peer, self.group))
            received.append(None if action == action.transfer else action)
        works = dist.batch_isend_irecv(operations)
        if len(works) < len(operations):  # NCCL answers with one handle for the whole batch
            works = works * len(operations)
        flight.sending = [(tensor, work) for tensor, work in flight.sending if not work.is_completed()]
        for action_in, operation, work in zip(received, operations, works, strict=True):
            if action_in is None:
                flight.sending.append((operation.tensor, work))
            else:
                flight.inbox[action_in] = operation.tensor, work

    def _received(self, action: Action, flight: Flight) -> Tensor:
        tensor, work = flight.inbox.pop(action)
        work.wait()
        return tensor
