"""What runs on the ranks in the tests of the pipeline runner; torch's own runner is one oracle."""

from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.multiprocessing.reductions import StorageWeakRef

from megalite.config.layout import Layout
from megalite.config.schema import DataParallel
from megalite.dist.mesh import Mesh
from megalite.parallel.pipeline import Activation, Flight, Pipeline
from megalite.schedule.actions import Action, Kind
from megalite.schedule.generate import build
from megalite.schedule.simulate import simulate

WIDTH, ROWS = 6, 5
CPU = torch.device("cpu")
ORACLES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
SCALE = 0.125
Result = list[Tensor]  # the loss, summed over micro-batches, and the gradients of one stage


class ToyStage(nn.Module):
    """Two matrices that depend on the number of the stage."""

    def __init__(self, number: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(number)
        self.first = nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator, dtype=torch.float64))
        self.second = nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.first) @ self.second

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return (output - target).square().sum()

    def result(self, loss: Tensor) -> Result:
        return [loss.detach(), *(param.grad for param in self.parameters())]


def micro_batches(m: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64) for _ in range(m)]


def runner(mesh: Mesh, stage: nn.Module, schedule: str, m: int) -> Pipeline:
    activation = Activation((ROWS, WIDTH), torch.float64, CPU)
    number = mesh.coordinates["pp"]
    table = build(schedule, mesh.layout.pp, m)
    return Pipeline(table, {number: stage}, number, mesh.group("pp"), activation, DataParallel())


def by_megalite(mesh: Mesh, schedule: str, m: int) -> Result:
    stage = ToyStage(mesh.rank)
    return stage.result(runner(mesh, stage, schedule, m).run(micro_batches(m, 1), micro_batches(m, 2), SCALE))


def by_torch(mesh: Mesh, schedule: str, m: int) -> Result:
    toy, pp = ToyStage(mesh.rank), mesh.layout.pp
    example = torch.empty(ROWS, WIDTH, dtype=torch.float64, requires_grad=True)
    stage = PipelineStage(toy, mesh.rank, pp, CPU, input_args=example, output_args=example, group=mesh.group("pp"))
    losses: list[Tensor] = []
    oracle = ORACLES[schedule](stage, m, loss_fn=lambda y, z: toy.loss(y, z) * SCALE, scale_grads=False)
    first, last = mesh.rank == 0, mesh.rank == pp - 1
    feed = {"target": torch.cat(micro_batches(m, 2)), "losses": losses} if last else {}
    oracle.step(*([torch.cat(micro_batches(m, 1)).requires_grad_()] if first else []), **feed)
    return toy.result(sum(losses, torch.zeros((), dtype=torch.float64)) / SCALE)


def by_one_process(mesh: Mesh, m: int) -> Result:
    stages = [ToyStage(number) for number in range(mesh.layout.pp)]
    total = torch.zeros((), dtype=torch.float64)
    for x, target in zip(micro_batches(m, 1), micro_batches(m, 2), strict=True):
        for stage in stages:
            x = stage(x)
        loss = stages[-1].loss(x, target)
        (loss * SCALE).backward()
        total += loss.detach()
    mine = stages[mesh.rank]
    return mine.result(total if mine is stages[-1] else torch.zeros_like(total))


def disagreement(pp: int, schedule: str, m: int) -> dict[str, float]:
    """By oracle: the largest difference on this rank, relative to the largest value of the loss or a gradient."""
    mesh = Mesh.build(Layout(pp=pp), CPU)
    if mesh is None:
        return {}
    ours = by_megalite(mesh, schedule, m)
    oracles = {"one process": by_one_process(mesh, m)}
    if schedule == "gpipe" or m >= pp:  # torch's 1F1B refuses fewer micro-batches than stages
        oracles["torch"] = by_torch(mesh, schedule, m)

    def apart(mine: Tensor, theirs: Tensor) -> float:
        return ((mine - theirs).abs().max() / theirs.abs().max().clamp(min=1e-3)).item()

    return {name: max(map(apart, ours, theirs)) for name, theirs in oracles.items()}


@dataclass
class Watch:
    """What was seen of one step on one rank."""

    promised: int  # live micro-batches, by the simulation of the schedule
    peak: int = 0
    posted: int = 0
    finished: set[int] = field(default_factory=set)  # transfers whose end the runner has seen
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


def watch_a_step(pp: int, schedule: str, m: int) -> Watch | None:
    """What one step does with micro-batches and transfers."""
    mesh = Mesh.build(Layout(pp=pp), CPU)
    if mesh is None:
        return None
    pipeline = runner(mesh, ToyStage(mesh.rank), schedule, m)
    watch = Watch(simulate(pipeline.table, {Kind.F: 1, Kind.B: 2}).peak_live[mesh.rank])
    flights: list[Flight] = []
    forward, post = Pipeline._forward, dist.batch_isend_irecv

    def watched_forward(self: Pipeline, action: Action, tokens: Any, targets: Any, scale: float, flight: Flight) -> Any:
        result = forward(self, action, tokens, targets, scale, flight)
        watch.peak = max(watch.peak, len(flight.outputs))
        flights.append(flight)
        return result

    def watched_post(operations: list[dist.P2POp]) -> list[WatchedWork]:
        works = [WatchedWork(work, watch.posted + i, watch) for i, work in enumerate(post(operations))]
        watch.posted += len(works)
        return works

    with patch.object(Pipeline, "_forward", watched_forward), patch.object(dist, "batch_isend_irecv", watched_post):
        pipeline.run(micro_batches(m, 1), micro_batches(m, 2), SCALE)
    flight = flights[-1]
    watch.left = len(flight.inbox) + len(flight.outbox) + len(flight.inputs) + len(flight.outputs)
    return watch


def outputs_alive(pp: int, schedule: str, m: int) -> list[bool] | None:
    """Of every output sent on: whether, once it has arrived, its memory is still held when its backward begins."""
    mesh = Mesh.build(Layout(pp=pp), CPU)
    if mesh is None:
        return None
    sent: dict[Action, StorageWeakRef] = {}
    alive: list[bool] = []
    forward, backward = Pipeline._forward, Pipeline._backward

    def watched_forward(self: Pipeline, action: Action, tokens: Any, targets: Any, scale: float, flight: Flight) -> Any:
        result = forward(self, action, tokens, targets, scale, flight)
        if action.send in flight.outbox:
            sent[action] = StorageWeakRef(flight.outbox[action.send].untyped_storage())
        return result

    def watched_backward(self: Pipeline, action: Action, flight: Flight) -> None:
        for _, work in flight.sending:
            work.wait()
        flight.sending.clear()  # as the next exchange does with what has arrived
        made_by = Action(Kind.F, action.stage, action.micro)
        if made_by in sent:
            alive.append(not sent[made_by].expired())
        backward(self, action, flight)

    pipeline = runner(mesh, ToyStage(mesh.rank), schedule, m)
    with patch.object(Pipeline, "_forward", watched_forward), patch.object(Pipeline, "_backward", watched_backward):
        pipeline.run(micro_batches(m, 1), micro_batches(m, 2), SCALE)
    return alive


def evaluate(pp: int, m: int) -> tuple[float, float, int, bool] | None:
    """Forward only: the loss, that of one process, how much was kept, and whether any gradient was made."""
    mesh = Mesh.build(Layout(pp=pp), CPU)
    if mesh is None:
        return None
    kept: list[int] = []
    forward = Pipeline._forward

    def watched(self: Pipeline, action: Action, tokens: Any, targets: Any, scale: float, flight: Flight) -> Any:
        result = forward(self, action, tokens, targets, scale, flight)
        kept.append(len(flight.outputs) + len(flight.inputs))
        return result

    stage = ToyStage(mesh.rank)
    with torch.no_grad(), patch.object(Pipeline, "_forward", watched):
        loss = runner(mesh, stage, "forward", m).run(micro_batches(m, 1), micro_batches(m, 2), 1.0)
    expected = by_one_process(mesh, m)[0].item()
    return loss.item(), expected, max(kept), any(param.grad is not None for param in stage.parameters())
