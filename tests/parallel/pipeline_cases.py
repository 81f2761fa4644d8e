"""What runs on the ranks in the tests of the pipeline runner; torch's own runner is one oracle."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from megalite.config.layout import Layout
from megalite.distributed.health.activity import Activity
from megalite.distributed.mesh import Mesh
from megalite.parallel.parameter import whole
from megalite.parallel.pipeline import Activation, Pipeline, StepInputs, TensorsInFlight
from megalite.parallel.tensor import ColumnLinear, RowLinear, columns, parameter, split_backward
from megalite.plan.parts.part import Weight
from megalite.plan.parts.roles import DOWN_PROJECTION, NORM, UP_PROJECTION
from megalite.schedule.actions import Action, Kind, Table
from megalite.schedule.generate import build, build_forward
from megalite.schedule.simulate import simulate

WIDTH, ROWS = 6, 5
CPU = torch.device("cpu")
ORACLES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved_1f1b": ScheduleInterleaved1F1B,
    "zbv": ScheduleZBVZeroBubble,
    "dualpipev": ScheduleDualPipeV,
}
SCALE = 0.125
Result = list[Tensor]  # the loss, summed over micro-batches, and the gradients of this rank's stages


def values(number: int) -> tuple[Tensor, Tensor, Tensor]:
    """The weights of stage `number`."""
    generator = torch.Generator().manual_seed(number)
    first, second = torch.randn(2, WIDTH, WIDTH, generator=generator, dtype=torch.float64)
    return first, second, torch.randn(WIDTH, generator=generator, dtype=torch.float64)


def loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().sum()


class ToyStage(nn.Module):
    """Two matrices, whose gradients a schedule may put off, and a vector. penalty: of large outputs, in the loss."""

    def __init__(self, number: int, tp: DeviceMesh, penalty: float = 0.0) -> None:
        super().__init__()
        self.penalty = penalty
        self.first, self.second = (
            ColumnLinear(Weight((WIDTH, WIDTH), UP_PROJECTION), tp),
            RowLinear(Weight((WIDTH, WIDTH), DOWN_PROJECTION), tp),
        )
        self.bias = parameter(Weight((WIDTH,), NORM), tp, torch.distributed.tensor.Replicate())
        self.group = tp.get_group()
        self.to(torch.float64).to_empty(device="cpu")
        for param, value in zip(self.weights(), values(number), strict=True):
            param.data.to_local().copy_(value)  # type: ignore[attr-defined]

    def weights(self) -> tuple[nn.Parameter, nn.Parameter, nn.Parameter]:
        return self.first.weight, self.second.weight, self.bias

    def forward(
        self, x: Tensor, positions: object = None, targets: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        (y,) = columns(x, (self.first,), self.group)
        y = self.second(torch.tanh(y)) + whole(self.bias)
        result = y if targets is None else loss(y, targets)
        return (result, self.penalty * y.square().sum()) if self.penalty else result


class PlainStage(nn.Module):
    """The same stage without anything of megalite's."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.first, self.second, self.bias = (nn.Parameter(value) for value in values(number))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.first.t()) @ self.second.t() + self.bias


def micro_batches(m: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64) for _ in range(m)]


def step(m: int, scale: float = SCALE) -> StepInputs:
    return StepInputs(micro_batches(m, 1), micro_batches(m, 2), [None] * m, scale)


def runner(mesh: Mesh, table: Table, penalty: float = 0.0) -> tuple[Pipeline, dict[int, ToyStage]]:
    activation = Activation((ROWS, WIDTH), torch.float64, CPU)
    rank = mesh.coordinates["pp"]
    stages = {number: ToyStage(number, mesh.tp, penalty) for number in table.stages_of(rank)}
    gradients = {number: split_backward(stage) for number, stage in stages.items()}
    return Pipeline(table, stages, gradients, mesh, activation, "zero3", Activity()), stages


def result(total: Tensor, params: Iterable[nn.Parameter]) -> Result:
    grads = [param.grad.to_local() if isinstance(param.grad, DTensor) else param.grad for param in params]
    return [total.detach(), *grads]  # type: ignore[list-item]


def by_megalite(mesh: Mesh, table: Table, penalty: float = 0.0) -> Result:
    pipeline, stages = runner(mesh, table, penalty)
    total = pipeline.run(step(table.micro_batches))
    return result(total, [param for stage in stages.values() for param in stage.weights()])


def by_torch(mesh: Mesh, table: Table) -> Result:
    m, rank = table.micro_batches, mesh.coordinates["pp"]
    toys = {number: PlainStage(number) for number in table.stages_of(rank)}
    stages = []
    for number, toy in toys.items():
        x, y = (torch.empty(ROWS, WIDTH, dtype=torch.float64, requires_grad=True) for _ in range(2))
        arguments = {"input_args": x, "output_args": y, "group": mesh.group("pp")}
        stages.append(PipelineStage(toy, number, table.stages, CPU, **arguments))
    losses: list[Tensor] = []
    several = table.stages > table.ranks
    oracle = ORACLES[table.name](
        stages if several else stages[0], m, loss_fn=lambda y, z: loss(y, z) * SCALE, scale_grads=False
    )
    first, last = 0 in toys, table.stages - 1 in toys
    feed = {"target": torch.cat(micro_batches(m, 2)), "losses": losses} if last else {}
    oracle.step(*([torch.cat(micro_batches(m, 1)).requires_grad_()] if first else []), **feed)
    total = sum(losses, torch.zeros((), dtype=torch.float64)) / SCALE
    return result(total, [param for toy in toys.values() for param in toy.parameters()])


def by_one_process(mesh: Mesh, table: Table, penalty: float = 0.0) -> Result:
    stages = [PlainStage(number) for number in range(table.stages)]
    totals = torch.zeros(table.stages, dtype=torch.float64)
    for x, target in zip(micro_batches(table.micro_batches, 1), micro_batches(table.micro_batches, 2), strict=True):
        losses = []
        for stage in stages:
            x = stage(x)
            losses.append(penalty * x.square().sum())
        losses[-1] = losses[-1] + loss(x, target)
        (sum(losses) * SCALE).backward()
        totals += torch.stack(losses).detach()
    mine = list(table.stages_of(mesh.coordinates["pp"]))
    return result(totals[mine].sum(), [param for number in mine for param in stages[number].parameters()])


def disagreement(
    pp: int, schedule: str, m: int, v: int | None, with_torch: bool, penalty: float = 0.0
) -> dict[str, float]:
    """By oracle: the largest difference on this rank, relative to the largest value of the loss or a gradient.

    penalty: what every stage adds to the loss for large outputs.
    """
    mesh = Mesh.build(Layout(pp=pp), CPU)
    if mesh is None:
        return {}
    table = build(schedule, pp, m, v)
    ours = by_megalite(mesh, table, penalty)
    oracles = {"one process": by_one_process(mesh, table, penalty)}
    if with_torch:
        oracles["torch"] = by_torch(mesh, table)

    def apart(mine: Tensor, theirs: Tensor) -> float:
        return ((mine - theirs).abs().max() / theirs.abs().max().clamp(min=1e-3)).item()

    return {name: max(map(apart, ours, theirs)) for name, theirs in oracles.items()}


@dataclass
class Watch:
    """What was seen of one step on one rank."""

    promised: int  # live stage-activations, by the simulation of the schedule
    peak: int = 0
    posted: int = 0
    finished: set[int] = field(default_factory=set)  # transfers whose end the runner has seen
    received: int = 0  # most receive buffers that were there at once before their use
    left: int = -1  # tensors that are still on their way after the step


class WatchedWork:
    """The handle of a transfer, which tells when its end is seen."""

    def __init__(self, work: dist.Work, number: int, watch: Watch) -> None:
        self.work, self.number, self.watch = work, number, watch

    def wait(self) -> None:
        self.work.wait()
        self.watch.finished.add(self.number)

    def is_completed(self) -> bool:
        done = self.work.is_completed()
        if done:
            self.watch.finished.add(self.number)
        return done


def watch_a_step(pp: int, schedule: str, m: int, v: int | None) -> Watch | None:
    """What one step does with micro-batches and transfers."""
    mesh = Mesh.build(Layout(pp=pp), CPU)
    if mesh is None:
        return None
    pipeline, _ = runner(mesh, build(schedule, pp, m, v))
    watch = Watch(simulate(pipeline.table).peak_live[mesh.rank])
    flights: list[TensorsInFlight] = []
    forward, post = Pipeline._forward, dist.batch_isend_irecv

    def watched_forward(self: Pipeline, action: Action, step: StepInputs, flight: TensorsInFlight) -> Any:
        found = forward(self, action, step, flight)
        watch.peak = max(watch.peak, len(flight.outputs) + len(flight.put_off))
        watch.received = max(watch.received, sum(work is not None for _, work in flight.inbox.values()))
        flights.append(flight)
        return found

    def watched_post(operations: list[dist.P2POp]) -> list[WatchedWork]:
        assert {dist.get_world_size(operation.group) for operation in operations} == {2}, "each peer has its group"
        works = [WatchedWork(work, watch.posted + i, watch) for i, work in enumerate(post(operations))]
        watch.posted += len(works)
        return works

    with patch.object(Pipeline, "_forward", watched_forward), patch.object(dist, "batch_isend_irecv", watched_post):
        pipeline.run(step(m))
    flight = flights[-1]
    watch.left = sum(map(len, (flight.inbox, flight.outbox, flight.inputs, flight.outputs, flight.put_off)))
    return watch


def outputs_alive(pp: int, schedule: str, m: int) -> list[bool] | None:
    """Of every output sent on: whether, once it has arrived, its memory is still held when its backward begins."""
    mesh = Mesh.build(Layout(pp=pp), CPU)
    if mesh is None:
        return None
    sent: dict[Action, StorageWeakRef] = {}
    alive: list[bool] = []
    forward, backward = Pipeline._forward, Pipeline._backward

    def watched_forward(self: Pipeline, action: Action, step: StepInputs, flight: TensorsInFlight) -> Any:
        found = forward(self, action, step, flight)
        if action.send in flight.outbox:
            sent[action] = StorageWeakRef(flight.outbox[action.send].untyped_storage())
        return found

    def watched_backward(self: Pipeline, action: Action, flight: TensorsInFlight) -> None:
        for _, work, _ in flight.sending:
            work.wait()
        flight.sending.clear()  # as the next exchange does with what has arrived
        made_by = Action(Kind.F, action.stage, action.micro)
        if made_by in sent:
            alive.append(not sent[made_by].expired())
        backward(self, action, flight)

    pipeline, _ = runner(mesh, build(schedule, pp, m))
    with patch.object(Pipeline, "_forward", watched_forward), patch.object(Pipeline, "_backward", watched_backward):
        pipeline.run(step(m))
    return alive


def evaluate(pp: int, m: int, schedule: str) -> tuple[float, float, int, bool] | None:
    """Forward only: the loss, that of one process, how much was kept, and whether any gradient was made."""
    mesh = Mesh.build(Layout(pp=pp), CPU)
    if mesh is None:
        return None
    kept: list[int] = []
    forward = Pipeline._forward

    def watched(self: Pipeline, action: Action, step: StepInputs, flight: TensorsInFlight) -> Any:
        found = forward(self, action, step, flight)
        kept.append(len(flight.outputs) + len(flight.inputs))
        return found

    table = build_forward(build(schedule, pp, m).placement, m)
    pipeline, stages = runner(mesh, table)
    with torch.no_grad(), patch.object(Pipeline, "_forward", watched):
        found = pipeline.run(step(m, 1.0))
    expected = by_one_process(mesh, table)[0].item()
    made = any(param.grad is not None for stage in stages.values() for param in stage.parameters())
    return found.item(), expected, max(kept), made
