"""The pipeline runner on four local processes that sleep instead of computing, compared with simulation and torch.

Every stage sleeps for a forward pass, and for each half of a backward pass, and does almost nothing else. So the time
of a step is that of the schedule plus the overhead of the runner. The lengths of the sleeps are measured in the same
run and given to the simulation. The two runners take steps in turn, and a ratio is the median over rounds. Results are
shown only if their gradients agree.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)

from megalite.base.errors import InputError
from megalite.base.exit_codes import ExitCode
from megalite.base.files import write_object
from megalite.config.layout import Layout
from megalite.distributed.health.activity import Activity
from megalite.distributed.mesh import Mesh
from megalite.distributed.start.ranks import RankInfo
from megalite.parallel.linear import WeightGradients
from megalite.parallel.pipeline import Activation, Pipeline, StepInputs
from megalite.schedule.actions import Kind, Table
from megalite.schedule.generate import NAMES, build
from megalite.schedule.simulate import simulate
from megalite_tools.bench.ranks import CPU, run_on_ranks
from megalite_tools.report_file import add_out
from megalite_tools.terminal import Terminal

COMMAND = "megalite-bench-pipeline"
RANKS = 4
ACTIVATION_SIZE = (256, 128)  # shape of an activation: 128 KiB
TORCH_SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved_1f1b": ScheduleInterleaved1F1B,
    "zbv": ScheduleZBVZeroBubble,
    "dualpipev": ScheduleDualPipeV,
}
if torch.__version__.startswith("2.11."):  # there, the rank with both ends of a V sends to itself, which gloo cannot
    del TORCH_SCHEDULES["zbv"], TORCH_SCHEDULES["dualpipev"]
TOLERANCE = 0.05  # excess of the time of a step over the simulated one, as a share of it
NOISE = 0.02  # excess over 1 of the ratio to torch's time: repeated runs differ by so much
Run = Callable[[], None]


class _Sleep(torch.autograd.Function):
    """The identity, whose forward and backward sleep for given seconds."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        ctx.seconds = backward
        time.sleep(forward)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.seconds)
        return grad, None, None


class _Weighted(torch.autograd.Function):
    """x · w for a number w. Computing the gradient of w sleeps, in backward or later if it is put off."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: nn.Parameter, gradients: WeightGradients, seconds: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.gradients, ctx.seconds = weight, gradients, seconds
        return x * weight.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (x,) = ctx.saved_tensors
        make = partial(_weight_gradient, ctx.weight, x, grad, ctx.seconds)
        if not ctx.gradients.later(make):
            make()
        return grad * ctx.weight.detach(), None, None, None


@torch.no_grad()
def _weight_gradient(weight: nn.Parameter, x: Tensor, grad: Tensor, seconds: float) -> None:
    time.sleep(seconds)
    made = (x * grad).sum()
    weight.grad = made if weight.grad is None else weight.grad + made


@dataclass(frozen=True)
class Sleeps:
    """Seconds that a stage sleeps in a forward, and in each half of a backward."""

    forward: float
    input: float
    weight: float


class Stage(nn.Module):
    """A sleeping stage. gradients: given for our runner; None for torch's runner, which splits backward by autograd."""

    def __init__(self, sleeps: Sleeps, gradients: WeightGradients | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(1.001))
        self.sleeps, self.gradients = sleeps, gradients

    def forward(self, x: Tensor, positions: object = None, targets: Tensor | None = None) -> Tensor:
        if not x.requires_grad:  # tokens; torch needs a gradient to send back
            x = x.detach().requires_grad_()
        x = _Sleep.apply(x, self.sleeps.forward, self.sleeps.input)
        if self.gradients is None:
            x = x * _Sleep.apply(self.weight, 0.0, self.sleeps.weight)
        else:
            x = _Weighted.apply(x, self.weight, self.gradients, self.sleeps.weight)
        return x if targets is None else self.loss(x, targets)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return (output - target).square().sum()


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark or, as one of its ranks, measures. Returns the exit code.

    The code is FAILED if the runners disagree, or if ours is too slow.
    """
    return run_on_ranks("megalite_tools.bench.pipeline", _parser(), argv, _ranks, _measure, _judge)


def _ranks(options: argparse.Namespace) -> int:
    if options.micro_batches < 2 * RANKS or options.steps < 1 or not options.unit > 0:
        raise InputError(f"--micro-batches must be at least {2 * RANKS}, --steps at least 1, --unit above 0")
    return RANKS


def _judge(options: argparse.Namespace) -> int:
    slow = too_slow(json.loads(Path(options.out).read_text(encoding="utf-8"))["schedules"])
    for problem in slow:
        print(f"{COMMAND}: error: {problem}", file=sys.stderr)
    return ExitCode.FAILED if slow else ExitCode.DONE


def too_slow(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The schedules that take `TOLERANCE` longer than simulated, or `NOISE` longer than with torch's runner."""
    found = []
    for row in rows:
        ours = statistics.median(row["seconds"]["megalite"])
        if (ratio := ours / row["simulated_seconds"]) > 1 + TOLERANCE:
            found.append(f"{row['schedule']}: takes {ratio:.3f} of its simulated time, more than {1 + TOLERANCE}")
        if (ratio := row["time_ratio"] or 0) > 1 + NOISE:
            found.append(f"{row['schedule']}: takes {ratio:.3f} of the time of torch's runner, more than {1 + NOISE}")
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument(
        "--unit",
        type=float,
        default=30.0,
        metavar="MS",
        help="length of a sleep, in milliseconds (default: %(default)s)",
    )
    parser.add_argument(
        "--micro-batches", type=int, default=12, metavar="M", help="micro-batches in a step (default: %(default)s)"
    )
    parser.add_argument("--steps", type=int, default=5, help="timed steps of every runner (default: %(default)s)")
    add_out(parser, "pipeline_cpu.json")
    return parser


def _measure(rank_info: RankInfo, options: argparse.Namespace, header: dict[str, Any]) -> None:
    mesh = Mesh.build(Layout(pp=RANKS), CPU)
    assert mesh is not None
    unit = options.unit / 1000
    costs = {kind: length_of_sleep(unit, mesh) for kind in (Kind.F, Kind.I, Kind.W)}
    costs[Kind.B] = costs[Kind.I] + costs[Kind.W]
    transfer = length_of_transfer(mesh)
    rows = []
    for name in NAMES:
        table = build(name, RANKS, options.micro_batches)
        simulated = float(simulate(table, costs, transfer).makespan)
        rows.append({"schedule": name, "simulated_seconds": simulated} | _compare(table, mesh, unit, options.steps))
    if rank_info.rank == 0:
        report = {
            **header,
            "ranks": RANKS,
            "micro_batches": options.micro_batches,
            "unit_seconds": unit,
            "measured_sleep_seconds": costs[Kind.F],
            "transfer_seconds": transfer,
            "schedules": rows,
        }
        _show(report)
        write_object(Path(options.out), report)


def length_of_sleep(unit: float, mesh: Mesh) -> float:
    """The real length of a sleep of `unit` seconds, on average over the ranks."""
    began = time.perf_counter()
    for _ in range(20):
        time.sleep(unit)
    return _average((time.perf_counter() - began) / 20, mesh)


def length_of_transfer(mesh: Mesh) -> float:
    """The seconds to send an activation to a neighbour, on average over the ranks.

    It is half of a round trip, run by pairs of neighbours at once.
    """
    group, rank = mesh.group("pp"), mesh.rank
    buffer, lengths = torch.zeros(ACTIVATION_SIZE), []
    for _ in range(50):
        began = time.perf_counter()
        for send in (True, False) if rank % 2 == 0 else (False, True):
            (dist.send if send else dist.recv)(buffer, rank ^ 1, group=group)
        lengths.append((time.perf_counter() - began) / 2)
    return _average(statistics.median(lengths), mesh)


def _average(value: float, mesh: Mesh) -> float:
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total, group=mesh.world)
    return total.item() / RANKS


def _compare(table: Table, mesh: Mesh, unit: float, steps: int) -> dict[str, Any]:
    """Seconds per step of our runner and, if it has the schedule, of torch's. They take turns, in alternating order."""
    sleeps = [Sleeps(unit, unit, unit)] * table.stages
    ours, weights = runner(table, mesh, sleeps)
    runs = {"megalite": ours}
    if table.name in TORCH_SCHEDULES:
        runs["torch"], others = _torch(table, mesh, sleeps)
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for step in range(-1, steps):  # the first warms up
        for name in list(runs)[:: 1 if step % 2 else -1]:
            taken = timed(runs[name], mesh)
            if step >= 0:
                seconds[name].append(taken)
        if step < 0 and "torch" in runs:
            for a, b in zip(weights, others, strict=True):
                torch.testing.assert_close(a.grad, b.grad)
    ratios = [a / b for a, b in zip(seconds["megalite"], seconds.get("torch", []), strict=False)]
    return {"seconds": seconds, "time_ratio": statistics.median(ratios) if ratios else None}


def timed(run: Run, mesh: Mesh) -> float:
    """The seconds from when all ranks are ready until the last rank has finished."""
    dist.barrier(group=mesh.world)
    began = time.perf_counter()
    run()
    dist.barrier(group=mesh.world)
    return time.perf_counter() - began


def runner(table: Table, mesh: Mesh, sleeps: Sequence[Sleeps]) -> tuple[Run, list[nn.Parameter]]:
    """A function that runs a step of `table` by our runner, and the weights of this rank's stages. sleeps: by stage."""
    gradients = {number: WeightGradients() for number in table.stages_of(mesh.rank)}
    stages = {number: Stage(sleeps[number], owner) for number, owner in gradients.items()}
    activation = Activation(ACTIVATION_SIZE, torch.float32, CPU)
    pipeline = Pipeline(table, stages, gradients, mesh, activation, "zero3", Activity())
    m = table.micro_batches
    step = StepInputs(_micro_batches(m), [torch.zeros(ACTIVATION_SIZE)] * m, [None] * m)
    return lambda: _discard(pipeline.run(step)), [stage.weight for stage in stages.values()]


def _torch(table: Table, mesh: Mesh, sleeps: Sequence[Sleeps]) -> tuple[Run, list[nn.Parameter]]:
    toys = {number: Stage(sleeps[number], None) for number in table.stages_of(mesh.rank)}
    example = torch.empty(ACTIVATION_SIZE, requires_grad=True)
    stage = partial(PipelineStage, input_args=example, output_args=example, group=mesh.group("pp"))
    stages = [stage(toy, number, table.stages, CPU) for number, toy in toys.items()]
    several, m = table.stages > table.ranks, table.micro_batches
    loss = next(iter(toys.values())).loss
    schedule = TORCH_SCHEDULES[table.name](stages if several else stages[0], m, loss_fn=loss, scale_grads=False)
    inputs = [torch.cat(_micro_batches(m)).requires_grad_()] if 0 in toys else []
    feed = {"target": torch.zeros(m * ACTIVATION_SIZE[0], ACTIVATION_SIZE[1])} if table.stages - 1 in toys else {}
    return lambda: _discard(schedule.step(*inputs, **feed)), [toy.weight for toy in toys.values()]


def _micro_batches(m: int) -> list[Tensor]:
    return list(torch.randn(m, *ACTIVATION_SIZE, generator=torch.Generator().manual_seed(0)).unbind())


def _discard(result: object) -> None:
    del result


def _show(report: dict[str, Any]) -> None:
    terminal, rows = Terminal(), []
    terminal.line(
        f"{report['ranks']} ranks, {report['micro_batches']} micro-batches; a sleep of "
        f"{1e3 * report['measured_sleep_seconds']:.2f} ms for a forward and for each half of a backward, "
        f"{1e3 * report['transfer_seconds']:.2f} ms a transfer."
    )
    for row in report["schedules"]:
        simulated, ours = row["simulated_seconds"], statistics.median(row["seconds"]["megalite"])
        cells = [row["schedule"], f"{1e3 * simulated:.1f}", f"{1e3 * ours:.1f}", f"{ours / simulated:.3f}"]
        if row["time_ratio"] is not None:
            cells += [f"{1e3 * statistics.median(row['seconds']['torch']):.1f}", f"{row['time_ratio']:.3f}"]
        rows.append(cells)
    terminal.table(("schedule:", "simulated ms", "megalite ms", "/ simulated", "torch ms", "megalite / torch"), rows)


if __name__ == "__main__":
    sys.exit(main())
