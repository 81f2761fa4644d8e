"""`megalite verify`: compares the configured layout with one process, in float64 on CPU.

Both train a shrunken copy of the model for a few steps on the same random tokens. Only the order of sums may differ.
So the experts that tokens choose must be the same, and losses, gradient norms, gradients and weights must agree to
rounding. A gradient of exactly 0, as of a bias
that shifts all scores of a query, is a rounding error, and an optimizer that divides by its size makes an update of it:
such a gradient is compared on the scale of all gradients, in every step, and such a weight is left out after the last.
"""

import argparse
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.text import Text
from torch import Tensor
from torch.distributed.tensor import DTensor

from megalite.base.errors import InputError, Problem, counted
from megalite.base.exit_codes import ExitCode
from megalite.base.files import check_writable, write_object
from megalite.base.stop_signals import ended_at_once
from megalite.base.terminal import console, sections, table
from megalite.commands.verify_copy import not_compared, shrink
from megalite.commands.verify_routing import Choices, Recorder, compare_choices, routing_text
from megalite.config.layout import Layout
from megalite.config.load import files_and_overrides, load
from megalite.config.parallel_schema import Parallel
from megalite.config.rules.validate import check
from megalite.config.schema import Config
from megalite.cost.order_costs import costing_of
from megalite.data.loader import Micros, Trained
from megalite.distributed.deterministic import be_deterministic
from megalite.distributed.mesh import Mesh
from megalite.distributed.start.local import launch
from megalite.distributed.start.ranks import RankInfo, find_rank_info
from megalite.distributed.start.signals import end_when_stopped
from megalite.distributed.start.start import run_rank, start
from megalite.parallel.parameter import box, cut, extra_state, parameters, trainable
from megalite.plan.batches import global_batches, samples_after
from megalite.plan.memory.fit import planned
from megalite.plan.pipeline import table_of
from megalite.plan.resolved import resolve
from megalite.train.build import Job, build, build_mesh
from megalite.train.recompute_costs import plan_for
from megalite.train.step import gradients, update

CPU = torch.device("cpu")
COMPILE_SECONDS = 60.0  # seconds; a little more than one core takes to compile for a rank
END_OF_DOCUMENT = 0  # in the shrunken copy
NOISE = 1e-4  # share of the largest gradient or weight: far less may be a rounding error of 0, as with one position
ROUNDING = 1e-12  # share of a step's largest gradient: a sum of exactly 0 is below, as of a bias that shifts all scores
LOSS_NOISE = 1e-13  # share of a loss: rounding errors of its sum explain smaller differences
LISTED_WEIGHTS = 8  # weights without a gradient


@dataclass(frozen=True)
class RankPart:
    """One rank's part of a tensor: its box in the global tensor, and the values there."""

    box: tuple[slice, ...]
    values: Tensor

    @staticmethod
    def of(tensor: Tensor | None) -> "RankPart":
        """Copy this rank's part of a DTensor."""
        assert isinstance(tensor, DTensor)
        place = tuple(slice(start, start + size) for size, start in zip(*box(tensor), strict=True))
        return RankPart(place, tensor.to_local().detach().clone())


Parts = list[tuple[str, RankPart]]  # by global name; a rank may have two copies of a tied embedding


@dataclass(frozen=True)
class Trace:
    """Results of training for a few steps, on one rank."""

    losses: list[float]
    norms: list[float]
    initial: Parts
    gradients: list[Parts]  # gradients of every step
    weights: Parts  # after the last step
    choices: list[Choices] = field(default_factory=list)  # experts of tokens in every step
    further: list[tuple[float, ...]] = field(default_factory=list)  # losses of tokens further ahead, likewise


@dataclass(frozen=True)
class Difference:
    """The largest difference of one quantity, relative to the largest value of the reference."""

    quantity: str
    value: float
    tolerance: float
    where: str  # the step or parameter that differs most
    without_gradient: tuple[str, ...] = ()  # weights left out: an optimizer makes updates of their rounding errors
    first: str = ""  # text that is shown before all numbers

    @property
    def passed(self) -> bool:
        return self.value <= self.tolerance  # false for nan


def compare(config: Config, steps: int, tolerance: float, masked: bool = False) -> list[Difference]:
    """Train `config` in its layout and on one process without micro-batches; return the differences, on every rank.

    Collective over all processes, of which there may be more than the layout needs. tolerance: of weights. Gradients,
    which the optimizer has not divided by their size yet, must agree 10 times better; losses and norms 100 times
    better; initial weights and the experts of tokens exactly. Raises InputError, on every rank, if the one process
    learns next to nothing. masked: see random_batch.
    """
    alone = Mesh.build(Layout(), CPU)
    single = replace(
        config,
        parallel=replace(Parallel(), dp_shard=1),
        batch=replace(config.batch, micro=config.batch.global_),
        train=replace(config.train, recompute="none", offload_activations=False, compile=False),
        optim=replace(config.optim, placement="device", update_on="device"),
        kernels="torch",
    )
    told = [None if alone is None else trace(single, alone, steps, masked)]
    dist.broadcast_object_list(told, src=0)
    assert told[0] is not None
    refuse_dead(told[0], config, tolerance)
    mesh = build_mesh(config, CPU)
    found = None
    if mesh is not None:
        found = [_differences(told[0], trace(config, mesh, steps, masked), steps, tolerance, mesh)]
    answer = [found]
    dist.broadcast_object_list(answer, src=0)
    assert answer[0] is not None
    return answer[0][0]


def trace(config: Config, mesh: Mesh, steps: int, masked: bool = False) -> Trace:
    """Train from the beginning, on random tokens."""
    job = build(plan_for(config, mesh), mesh)
    initial, recorder = _state(job), Recorder(job)
    losses, norms, grads, choices, further = [], [], [], [], []
    for step in range(steps):
        loss = gradients(job, random_batch(job, step, masked))
        grads.append(_gradients(job))
        choices.append(recorder.take())
        reading = update(job, loss, step).read()
        losses.append(reading.loss)
        norms.append(reading.norm)
        further.append(reading.further)
    return Trace(losses, norms, initial, grads, _state(job), choices, further)


def refuse_dead(reference: Trace, config: Config, tolerance: float) -> None:
    """Raises InputError if a layout that computes next to nothing, or updates no weight, would agree with `reference`.

    tolerance: of weights.
    """
    if why := _why_dead(reference):
        rule = f"makes a model that learns nothing: in one process {why}, so any layout would agree"
        fix = "use larger values of it and of the multipliers of the model; with usual ones, please report this"
        raise InputError([Problem("model.init_std", rule, fix, config.model.init_std)])
    moved = max(value for _, value in _distances(reference.initial, reference.weights))
    if moved <= tolerance:
        rule = f"changes no weight by more than {moved:.1e} of its largest value, within the tolerance {tolerance:.0e}"
        rule = f"{rule}, so no update would be compared"
        raise InputError([Problem("optim.lr", rule, "use a larger one", config.optim.lr)])


def _why_dead(reference: Trace) -> str:
    """The reason why one process learns next to nothing; empty if it learns."""
    first, dead, weights = reference.losses[0], len(without_gradient(reference)), len(reference.initial)
    if max(map(_largest_value, reference.gradients)) == 0:
        return "no weight has a gradient"
    if len(reference.losses) > 1 and all(abs(loss - first) <= LOSS_NOISE * abs(first) for loss in reference.losses):
        return f"the loss is {first:.6g} whatever the tokens"
    return f"{dead} of {weights} weights have no gradient" if 2 * dead > weights else ""


def without_gradient(reference: Trace) -> tuple[str, ...]:
    """The weights of one process whose gradients are 0 in every step, but for rounding errors."""
    found = [name for name, _ in reference.initial]
    for parts in reference.gradients:
        zero = ROUNDING * _largest_value(parts)
        none_here = {name for name, part in parts if part.values.abs().max() <= zero}
        found = [name for name in found if name in none_here]
    return tuple(found)


def _largest_value(parts: Parts) -> float:
    """The largest absolute value of all, in one process."""
    return float(torch.stack([part.values.abs().max() for _, part in parts]).max())


def random_batch(job: Job, step: int, masked: bool = False) -> Micros:
    """Return this rank's micro-batches of random tokens, which depend only on the step. Documents are short.

    masked: some tokens are not trained, none of them in about half of the samples.
    """
    model = job.config.model
    batch = next(global_batches(job.config, samples_after(job.config, step)))
    generator = torch.Generator().manual_seed(step)
    everything = torch.randint(model.vocab_size, (batch.samples, model.sequence_length + 1), generator=generator)
    if job.config.data.mask_documents:
        everything[everything % 8 == 0] = END_OF_DOCUMENT
    micros = micros_of(job, everything, batch.pieces)
    if not masked:
        return micros
    shares = torch.rand(batch.samples, 1, generator=generator) * 2 - 1
    shares[-1] = 0.5  # some token of the batch is trained
    trained = torch.rand(batch.samples, model.sequence_length, generator=generator) < shares
    mine = trained.chunk(job.mesh.layout.dp)[job.mesh.dp_rank]
    targets = mine.reshape(*micros.shape[:2], micros.shape[2] - 1)
    return replace(micros, trained=Trained(targets, int(trained.sum())))


def micros_of(job: Job, samples: Tensor, pieces: int = 1) -> Micros:
    """Return this rank's micro-batches of a global batch `[samples, sequence length + 1]`, each cut into `pieces`."""
    mine = samples.chunk(job.mesh.layout.dp)[job.mesh.dp_rank]
    micro = min(job.config.batch.micro_size, len(mine))  # one process takes a batch whole, whatever its size
    length = (samples.shape[1] - 1) // pieces
    cut = mine.unfold(1, length + 1, length)  # [samples, pieces, length + 1], as a loader cuts them
    return Micros.cut_at(cut.reshape(-1, micro * pieces, length + 1), END_OF_DOCUMENT)


def _gradients(job: Job) -> Parts:
    """The gradients of trained parameters, without padding."""
    every = (found for stage in job.stages.values() for found in trainable(stage))
    return _parts((found.name, found.value.grad, found.shape) for found in every)


def _state(job: Job) -> Parts:
    """The parameters and other state of this rank, without padding."""
    every = (found for of in (parameters, extra_state) for stage in job.stages.values() for found in of(stage))
    return _parts((found.name, found.value, found.shape) for found in every)


def _parts(tensors: Iterable[tuple[str, Any, tuple[int, ...]]]) -> Parts:
    return [(name, RankPart.of(cut(tensor, shape))) for name, tensor, shape in tensors]


def _differences(reference: Trace, found: Trace, steps: int, tolerance: float, mesh: Mesh) -> list[Difference]:
    def numbers(quantity: str, expected: Sequence[float], got: Sequence[float]) -> Difference:
        apart = [_relative(abs(a - b), abs(a)) for a, b in zip(expected, got, strict=True)]
        each = [(f"step {step}", value) for step, value in enumerate(apart)]
        return _largest(quantity, each, tolerance / 100, mesh)

    dead = without_gradient(reference)

    def tensors(expected: Parts, got: Parts) -> list[tuple[str, float]]:
        each = _distances(expected, got, NOISE * _largest_value(expected))
        return [(name, value) for name, value in each if name not in dead]

    def nothing(expected: Parts, got: Parts) -> list[tuple[str, float]]:
        """Gradients that are 0, on the scale of all gradients of the step."""
        return [(name, value) for name, value in _distances(expected, got, _largest_value(expected)) if name in dead]

    initial = _distances(reference.initial, found.initial)
    grads = tensors(reference.gradients[0], found.gradients[0])
    for expected, got in zip(reference.gradients, found.gradients, strict=True):
        grads += nothing(expected, got)
    ahead = zip(zip(*reference.further, strict=True), zip(*found.further, strict=True), strict=True)
    weights = _largest(
        f"weights after {counted(steps, 'step')}", tensors(reference.weights, found.weights), tolerance, mesh
    )
    return [
        *_routing(reference, found, mesh),
        numbers("loss", reference.losses, found.losses),
        *[numbers(f"mtp_loss/{k}", *each) for k, each in enumerate(ahead, start=1)],
        numbers("gradient norm", reference.norms, found.norms),
        _largest("initial weights", initial, 0.0, mesh),
        _largest("gradients", grads, tolerance / 10, mesh),
        replace(weights, without_gradient=dead),
    ]


def _routing(reference: Trace, found: Trace, mesh: Mesh) -> list[Difference]:
    """The share of tokens with other experts, in the first layer where there are any; nothing without experts."""
    compared = compare_choices(reference.choices, found.choices, mesh)
    if not compared:
        return []
    share, where = 0.0, ""
    for each in reversed(compared):
        if each.differing:
            share, where = each.differing / each.tokens, f"layer {each.layer}, step {each.step}"
    return [Difference("routing", share, 0.0, where, first=routing_text(compared))]


def _distances(expected: Parts, got: Parts, noise: float = 0.0) -> list[tuple[str, float]]:
    """By name: `_distance` of what was got."""
    wholes = {name: part.values for name, part in expected}
    return [(name, _distance(wholes[name], part, noise)) for name, part in got]


def _distance(expected: Tensor, part: RankPart, noise: float) -> float:
    """The largest difference, relative to the largest expected value, or to `noise` if that value is smaller."""
    if part.values.numel() == 0:
        return 0.0
    apart, largest = (expected[part.box] - part.values).abs().max().item(), expected.abs().max().item()
    return _relative(apart, max(largest, noise))


def _relative(apart: float, scale: float) -> float:
    return apart / scale if scale else apart


def _largest(quantity: str, each: list[tuple[str, float]], limit: float, mesh: Mesh) -> Difference:
    """The largest difference over all ranks of the mesh; nan counts as larger than any number."""

    def badness(entry: tuple[str, float]) -> tuple[bool, float]:
        return entry[1] != entry[1], entry[1]

    found = [("", 0.0)] * mesh.layout.world_size
    dist.all_gather_object(found, max(each, key=badness, default=("", 0.0)), group=mesh.world)
    where, value = max(found, key=badness)
    return Difference(quantity, value, limit, where)


def show(config: Config, differences: Sequence[Difference], on: Console) -> None:
    """Print the comparison as a table, with what has to be known before and after."""
    for row in differences:
        if row.first:
            on.print(row.first, style=None if row.passed else "red")
    rows = table("quantity", "difference", "tolerance", "", "largest in", text=("quantity", "", "largest in"))
    for row in differences:
        verdict = Text("ok", "green") if row.passed else Text("differs", "red")
        rows.add_row(row.quantity, f"{row.value:.1e}", f"{row.tolerance:.0e}", verdict, row.where)
    sections(on, [(f"{config.parallel.layout} against one process, float64", rows)])
    for row in differences:
        if names := row.without_gradient:
            rest = [f"and {len(names) - LISTED_WEIGHTS} more"] if len(names) > LISTED_WEIGHTS else []
            without = f"{counted(len(names), 'weight')} without a gradient, which must be 0 in the layout too"
            on.print(f"{without}: {', '.join([*names[:LISTED_WEIGHTS], *rest])}.")


def as_object(config: Config, steps: int, differences: Sequence[Difference]) -> dict[str, Any]:
    """The comparison as a JSON file has it. A difference that is not finite is null."""
    rows = [
        {
            "quantity": row.quantity,
            "difference": row.value if isfinite(row.value) else None,
            "tolerance": row.tolerance,
            "passed": row.passed,
            "where": row.where,
        }
        for row in differences
    ]
    return {"layout": str(config.parallel.layout), "steps": steps, "differences": rows}


def run(args: argparse.Namespace) -> int:
    """The command: start the ranks that the layout needs on this machine, and compare."""
    if args.json is not None:
        check_writable(Path(args.json))
    config = check(load(args.files, args.overrides))
    costing = costing_of(config)
    as_trained = planned(config, costing)  # raises InputError for what `train` refuses
    if as_trained.batch.micro != "auto":
        resolve(as_trained, costing=costing)  # raises InputError for a budget that nothing fits
    table_of(shrink(config))  # refuses a schedule that cannot run before any rank is started
    if config.train.compile:
        print("megalite: compiling takes about a minute, longer where ranks share a core", file=sys.stderr)
    json = [f"--json={args.json}"] * (args.json is not None)
    flags = [f"--steps={args.steps}", f"--tolerance={args.tolerance}", *["--masked"] * args.masked, *json]
    with ended_at_once():
        world_size = config.parallel.layout.world_size
        return launch(__name__, [*flags, *args.files, *args.overrides], world_size, shared=__name__)


def main(arguments: Sequence[str]) -> int:
    """One rank of the comparison, started by `run`."""
    parser = argparse.ArgumentParser()
    for name, kind in (("--steps", int), ("--tolerance", float), ("--json", str)):
        parser.add_argument(name, type=kind)
    parser.add_argument("--masked", action="store_true")
    parser.add_argument("inputs", nargs="*")
    args = parser.parse_args(arguments)
    rank_info = find_rank_info()
    assert rank_info is not None
    end_when_stopped(rank_info)
    return run_rank(lambda: _rank(rank_info, args), rank_info)


def _rank(rank_info: RankInfo, args: argparse.Namespace) -> int:
    asked = check(load(*files_and_overrides(args.inputs)))
    config = shrink(asked)
    patience = config.train.timeout + config.train.compile * COMPILE_SECONDS * rank_info.world_size
    if config.train.deterministic:
        be_deterministic()
    start(rank_info, "cpu", patience)
    differences = compare(config, args.steps, args.tolerance, args.masked)
    if rank_info.rank == 0:
        on = console()
        show(config, differences, on)
        if args.json is not None:
            write_object(Path(args.json), as_object(config, args.steps, differences))
        on.print(f"Not compared: {'; '.join(not_compared(asked, args.steps))}.")
    return ExitCode.DONE if all(difference.passed for difference in differences) else ExitCode.FAILED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
