"""One case: every implementation is compared with the exact result, and those that agree are timed in turns."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from megalite_kernels.benchmarks.agreement import excess
from megalite_kernels.benchmarks.cases import WHOLE_PASS, BenchmarkCase
from megalite_kernels.benchmarks.inputs import Inputs, flat
from megalite_kernels.benchmarks.timing import Call, Gpu, Spread, Warm, spreads, warm_up
from megalite_kernels.benchmarks.variants import LIGER, MEGALITE, VARIANTS, Run, Variant, has_liger

AGREEMENT, NO_SUCH_KERNEL = "agrees", "no such kernel"

Log = Callable[[str], None]
Result = TypeVar("Result")


@dataclass(frozen=True)
class Row:
    """Results for one implementation, and for one part of its work if that was timed; in bytes and seconds."""

    op: str
    model: str
    sizes: str
    kind: str
    variant: str
    status: str
    part: str = ""
    seconds: Spread | None = None
    host_seconds: float | None = None
    peak_bytes: int | None = None
    moved_bytes: int | None = None

    @property
    def is_fault(self) -> bool:
        """Flag: the row is of one of our kernels, and its result does not agree."""
        return self.kind == MEGALITE and self.status != AGREEMENT

    def __str__(self) -> str:
        result = self.status if self.seconds is None else f"{self.seconds.median * 1e6:.1f} µs"
        return f"{self.op} {self.model} {self.part or 'result'}, {self.variant}: {result}"


@dataclass(frozen=True)
class _Candidate:
    variant: Variant
    row: Row
    run: Run | None  # none: not to be timed


def check(case: BenchmarkCase, device: torch.device, log: Log) -> list[Row]:
    """Compare all implementations, and time none."""
    return [candidate.row for candidate in _compared(case, case.make(device), log)]


def measure(case: BenchmarkCase, gpu: Gpu, rounds: int, log: Log) -> list[Row]:
    """Compare all implementations, and time those that agree, in at most `rounds` rounds."""
    inputs = case.make(gpu.device)
    candidates = _compared(case, inputs, log)
    rows = [candidate.row for candidate in candidates if candidate.run is None]
    for part in case.parts:
        for row in _timed(case, part, inputs, candidates, gpu, rounds):
            log(str(row))
            rows.append(row)
    return rows


def _compared(case: BenchmarkCase, inputs: Inputs, log: Log) -> list[_Candidate]:
    torch.compiler.reset()  # code that was compiled for other sizes counts against a limit
    exact = attempt(lambda: case.exact(inputs))
    candidates = []
    for variant in VARIANTS[case.op]:
        status, run = (
            (f"no reference: {exact}", None) if isinstance(exact, str) else _compare(variant, case, inputs, exact)
        )
        row = Row(case.op, case.model, case.sizes, variant.kind, variant.name, status)
        log(str(row))
        candidates.append(_Candidate(variant, row, run))
    return candidates


def _compare(variant: Variant, case: BenchmarkCase, inputs: Inputs, exact: Sequence[Tensor]) -> tuple[str, Run | None]:
    """Return the status of the implementation, and the function that runs it; None if it may not be timed."""
    if variant.bind is None:
        return NO_SUCH_KERNEL, None
    if variant.kind == LIGER and not has_liger():
        return "not installed", None
    inputs.restore()
    run = attempt(partial(variant.bind, inputs))
    if isinstance(run, str):
        return run, None
    if not variant.compared:
        return "not compared", run
    excesses = attempt(lambda: _excesses(run, inputs, exact, case.rounded))
    if isinstance(excesses, str):
        return excesses, None
    worst = max(excesses, key=excesses.__getitem__)
    if excesses[worst] > 1:
        return f"differs: {worst} is {excesses[worst]:.3g} times as far off as roundings allow", None
    return AGREEMENT, run


def attempt(work: Callable[[], Result]) -> Result | str:
    """Return the result of `work`, or a text on how it failed: other projects' code may fail in any way, and must not
    stop the rest."""
    try:
        return work()
    except Exception as error:  # noqa: BLE001 - it is reported
        reason = next(iter(str(error).splitlines()), "")
        return f"failed: {type(error).__name__}: {reason[:200]}"


def _excesses(run: Run, inputs: Inputs, exact: Sequence[Tensor], rounded: tuple[torch.dtype, int]) -> dict[str, float]:
    """Return the `excess` of every result and gradient; results come before backward, which may overwrite them."""
    results = flat(run())
    names = [f"result {number}" for number in range(len(results))]
    of_results = [excess(*both, rounded) for both in zip(results, exact[: len(results)], strict=True)]
    gradients = torch.autograd.grad(results, list(inputs.leaves.values()), inputs.grads) if inputs.grads else ()
    names += [f"gradient of {name}" for name in inputs.leaves]
    of_gradients = [excess(*both, rounded) for both in zip(gradients, exact[len(results) :], strict=True)]
    return dict(zip(names, of_results + of_gradients, strict=True))


def _timed(
    case: BenchmarkCase, part: str, inputs: Inputs, candidates: Sequence[_Candidate], gpu: Gpu, rounds: int
) -> list[Row]:
    """Rows of one part of the work."""
    takers = [
        (one, one.run) for one in candidates if one.run is not None and (one.variant.compared or part == WHOLE_PASS)
    ]
    restores = any(one.variant.overwrites for one, _ in takers)
    calls = {one.variant.name: _call(one.variant, run, part, inputs, restores) for one, run in takers}
    warm = {name: attempt(partial(warm_up, call, gpu)) for name, call in calls.items()}
    ready = {name: each for name, each in warm.items() if isinstance(each, Warm)}
    times = spreads({name: calls[name] for name in ready}, ready, gpu, rounds) if ready else {}
    rows = []
    for one, _ in takers:
        name, row, outcome = one.variant.name, replace(one.row, part=part), warm[one.variant.name]
        if isinstance(outcome, str):
            row = replace(row, status=outcome)
        else:
            row = replace(
                row,
                seconds=times[name],
                host_seconds=outcome.host,
                peak_bytes=outcome.peak,
                moved_bytes=case.moved.get(part),
            )
        rows.append(row)
    return rows


def _call(variant: Variant, run: Run, part: str, inputs: Inputs, restores: bool) -> Call:
    """The timed part of an implementation: backward alone is prepared by forward."""
    leaves = list(inputs.leaves.values())

    def restore() -> None:
        if restores:
            inputs.restore()

    def forward() -> list[Tensor]:
        restore()
        return flat(run())

    def backward(results: list[Tensor]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(results, leaves, inputs.grads)

    if part == "forward" or not inputs.grads or not variant.compared:
        return Call(lambda _: run(), restore)
    if part == "backward":
        return Call(backward, forward)
    return Call(lambda _: backward(flat(run())), restore)
