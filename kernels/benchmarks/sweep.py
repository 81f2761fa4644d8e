"""A sweep over the sizes of kernels' programs: are those that ship the fastest on a device?

A program must give the results of the one that ships before it is timed. A few rounds of all programs find the fastest
ones. These are timed again, in turns with the one that ships, and only the second times are compared: the best of many
short measurements is too good.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megalite_kernels.adamw import PROGRAM, launch_adamw
from megalite_kernels.backend import Program, wide_dtype
from megalite_kernels.benchmarks.agreement import excess
from megalite_kernels.benchmarks.cases import ADAMW, EPS, WHOLE_PASS, BenchmarkCase, cases
from megalite_kernels.benchmarks.inputs import Inputs, Model, fitting, flat
from megalite_kernels.benchmarks.measure import AGREEMENT, Log, attempt
from megalite_kernels.benchmarks.timing import Call, Gpu, Spread, Warm, spread, spreads, take_turns, warm_up
from megalite_kernels.cross_entropy import gradient_program, launch_gradient, launch_merge, launch_stats, stats_program
from megalite_kernels.labels import labels_of
from megalite_kernels.rms_norm import backward_program, forward_program
from megalite_kernels.rms_norm import launch_backward as launch_norm_backward
from megalite_kernels.rms_norm import launch_forward as launch_norm
from megalite_kernels.swiglu import launch_backward as launch_swiglu_backward
from megalite_kernels.swiglu import launch_forward as launch_swiglu
from megalite_kernels.swiglu import program_for

WARPS = (1, 2, 4, 8, 16)
ELEMENTS = (512, 1024, 2048, 4096, 8192, 16384)  # the last is a whole chunk of adamw
MIN_LOAD_BYTES = 16  # bytes that a thread loads at a time, at least: with fewer elements, loads are narrower
MAX_THREAD_ELEMENTS = 64  # elements: with more, registers are spilled
STATES_BYTES = 8 << 30  # comparing and timing AdamW takes so much: its tensors are far larger than any cache
FIRST_ROUNDS = 3
FINALISTS = 3  # beside the program that ships
ROUNDINGS = {
    torch.bfloat16: 2,
    torch.float32: 8,
}  # roundings that results may have, by data type; those of float32 may be sums


@dataclass(frozen=True)
class Pass:
    """One pass of an op over given inputs.

    run: launches its kernel with a program and returns its results. restore: undoes what run has overwritten.
    """

    part: str
    width: int
    itemsize: int
    shipped: Program
    run: Callable[[Program], Any]
    restore: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Trial:
    """One program of one pass, and its time if its results agree with those of the program that ships.

    width: elements of a row; for adamw, of all tensors. is_finalist: whether it was timed again, in more rounds.
    """

    op: str
    model: str
    part: str
    width: int
    elements: int
    warps: int
    is_shipped: bool
    status: str
    seconds: Spread | None = None
    is_finalist: bool = False
    moved_bytes: int | None = None

    @property
    def is_fault(self) -> bool:
        """True if the kernel is wrong. Programs that do not ship may fail, because the device may lack resources."""
        return self.status.startswith("differs") or (self.is_shipped and self.status != AGREEMENT)

    @property
    def name(self) -> str:
        """The program, in words."""
        return f"{self.warps} warps, {self.elements} elements"

    def __str__(self) -> str:
        result = self.status if self.seconds is None else f"{self.seconds.median * 1e6:.1f} µs"
        return f"{self.op} {self.model} {self.part}, {self.name}{' (ships)' * self.is_shipped}: {result}"


def _norm(inputs: Inputs) -> Iterator[Pass]:
    x, y, weight = (leaf.detach() for leaf in inputs.leaves.values())
    width = x.shape[-1]
    _, total, inverse = launch_norm(x, y, weight, EPS)
    yield Pass("forward", width, x.itemsize, forward_program(width), partial(launch_norm, x, y, weight, EPS))
    backward = partial(launch_norm_backward, total, weight, inverse, *inputs.grads)
    yield Pass("backward", width, x.itemsize, backward_program(width), backward)


def _swiglu(inputs: Inputs) -> Iterator[Pass]:
    gate, up = (leaf.detach() for leaf in inputs.leaves.values())
    width, itemsize, shipped = gate.shape[-1], gate.itemsize, program_for(gate.itemsize)
    yield Pass("forward", width, itemsize, shipped, partial(launch_swiglu, gate, up))
    yield Pass("backward", width, itemsize, shipped, partial(launch_swiglu_backward, gate, up, *inputs.grads))


def _cross_entropy(inputs: Inputs) -> Iterator[Pass]:
    """Yield forward and backward, without the merge of ranks' parts, which takes next to no time."""
    logits, targets = inputs.leaves["logits"].detach(), inputs.constants[0]
    rows, width = logits.shape
    labels = labels_of(rows, width, targets, None, None, 0.0, 0.0, None, None)
    width, itemsize = labels.columns, logits.itemsize
    _, lses = launch_merge(launch_stats(logits, targets, labels)[None], targets, labels)
    scales = inputs.grads[0].expand(len(logits))

    def backward(program: Program) -> Tensor:
        launch_gradient(logits, targets, lses, scales, labels, program)
        return logits

    stats = partial(launch_stats, logits, targets, labels)
    yield Pass("forward", width, itemsize, stats_program(width, itemsize), stats)
    yield Pass("backward", width, itemsize, gradient_program(width, itemsize), backward, inputs.restore)


def _adamw(inputs: Inputs) -> Iterator[Pass]:
    weights, grads, firsts, seconds, _ = inputs.constants
    rate, decay = ADAMW["lr"], 1 - ADAMW["lr"] * ADAMW["weight_decay"]
    factors = torch.tensor([[rate, 1.0, decay]] * len(weights), dtype=torch.float64, device=inputs.device)

    def update(program: Program) -> list[list[Tensor]]:
        lists = [weights, grads, firsts, seconds]
        launch_adamw(lists, factors, None, None, ADAMW["betas"], ADAMW["eps"], program)
        return [weights, firsts, seconds]

    elements = sum(weight.numel() for weight in weights)
    yield Pass(WHOLE_PASS, elements, weights[0].itemsize, PROGRAM, update, inputs.restore)


SWEEPS = {"add_rms_norm": _norm, "swiglu": _swiglu, "cross_entropy": _cross_entropy, "adamw": _adamw}


def swept_cases(ops: Iterable[str], models: Iterable[Model], memory: int) -> list[BenchmarkCase]:
    """Cases of all `ops`, for one model after the other. memory: bytes of the device that are free."""
    return cases(ops, [fitting(model, min(memory, STATES_BYTES)) for model in models])


def programs(one: Pass) -> list[Program]:
    """The program that ships, then all others that may be as fast."""
    least = MIN_LOAD_BYTES // one.itemsize
    every = [Program(elements, warps) for warps in WARPS for elements in ELEMENTS]
    return [one.shipped] + [
        program
        for program in every
        if program != one.shipped and least <= program.elements // (32 * program.warps) <= MAX_THREAD_ELEMENTS
    ]


def check(case: BenchmarkCase, device: torch.device) -> Iterator[list[Trial]]:
    """The trials of each pass. All programs are compared, and none is timed."""
    for one in SWEEPS[case.op](case.make(device)):
        yield _compared(case, one)


def measure(case: BenchmarkCase, gpu: Gpu, rounds: int, log: Log) -> Iterator[list[Trial]]:
    """The trials of each pass. Programs that agree are timed, the fastest of them in at most `rounds` rounds."""
    for one in SWEEPS[case.op](case.make(gpu.device)):
        _compile(one)
        trials = _timed(one, _compared(case, one), gpu, rounds)
        for trial in trials:
            if trial.is_finalist or trial.seconds is None:
                log(str(trial))
        yield trials


def _compile(one: Pass) -> None:
    """Launch all programs from several threads, because compiling one after the other would take most of the time.

    Their results are dropped. A program that fails here fails again where that is reported.
    """
    attempt(partial(one.run, one.shipped))  # alone, because a first launch also prepares Triton
    with ThreadPoolExecutor() as pool:
        for program in programs(one)[1:]:
            pool.submit(one.run, program)


def _compared(case: BenchmarkCase, one: Pass) -> list[Trial]:
    expected = attempt(lambda: [result.clone() for result in _results(one, one.shipped)])
    trials = []
    for program in programs(one):
        status = expected if isinstance(expected, str) else _compare(one, program, expected)
        is_shipped, moved = program == one.shipped, case.moved[one.part]
        trials.append(Trial(case.op, case.model, one.part, one.width, *program, is_shipped, status, moved_bytes=moved))
    return trials


def _results(one: Pass, program: Program) -> list[Tensor]:
    one.restore()
    return flat(one.run(program))


def _compare(one: Pass, program: Program, expected: Sequence[Tensor]) -> str:
    """Compare a program's results with those of the program that ships, and return a status."""
    excesses = attempt(lambda: [_excess(*both) for both in zip(_results(one, program), expected, strict=True)])
    if isinstance(excesses, str):
        return excesses
    worst = max(range(len(excesses)), key=excesses.__getitem__)
    if excesses[worst] > 1:
        return f"differs: result {worst} is {excesses[worst]:.3g} times as far off as roundings allow"
    return AGREEMENT


def _excess(found: Tensor, expected: Tensor) -> float:
    dtype = expected.dtype
    return excess(found, expected.to(wide_dtype(dtype)), (dtype, ROUNDINGS[dtype]))


def _timed(one: Pass, trials: Sequence[Trial], gpu: Gpu, rounds: int) -> list[Trial]:
    """The trials, with the times of those that agree."""
    calls = {trial.name: _call(one, trial) for trial in trials if trial.status == AGREEMENT}
    warm = {name: attempt(partial(warm_up, call, gpu)) for name, call in calls.items()}
    ready = {name: each for name, each in warm.items() if isinstance(each, Warm)}
    found, finalists = {}, set()
    if ready:
        turns = {name: (calls[name], each.lead) for name, each in ready.items()}
        found = {name: spread(seconds) for name, seconds in take_turns(turns, gpu, FIRST_ROUNDS).items()}
        finalists = _finalists(trials, found)
        final = {name: calls[name] for name in found if name in finalists}
        found |= spreads(final, {name: ready[name] for name in final}, gpu, rounds)
    failed = {name: each for name, each in warm.items() if isinstance(each, str)}
    return [
        replace(
            trial,
            status=failed.get(trial.name, trial.status),
            seconds=found.get(trial.name),
            is_finalist=trial.name in finalists,
        )
        for trial in trials
    ]


def _call(one: Pass, trial: Trial) -> Call:
    program = Program(trial.elements, trial.warps)
    return Call(lambda _: one.run(program), one.restore)


def _finalists(trials: Sequence[Trial], found: Mapping[str, Spread]) -> set[str]:
    """The names of the program that ships and of the fastest others."""
    timed = sorted((trial for trial in trials if trial.name in found), key=lambda trial: found[trial.name].median)
    others = [trial for trial in timed if not trial.is_shipped][:FINALISTS]
    return {trial.name for trial in timed if trial.is_shipped or trial in others}
